"""What a plan needs to know of a host besides the probe's facts, in one answer.

Runs ON the host, asked by `deploy.survey` and `deploy.release`. It only reads. Standard library only,
Python >= 3.9.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deploy import engine, files, hashing, pve, strays, typedpath, weights_store
from deploy.errors import DeployError
from trainer import status

PYTHON_TIMEOUT = 20.0  # seconds for the trainer's Python to say who it is; a disk may be asleep

# Answers with version, modules that are missing, and whether a program can be found. Imports nothing heavy.
QUESTION = """\
import importlib.util, json, os, shutil, sys
modules, program, path, directory = json.loads(sys.argv[1])
os.chdir(directory or "/")
print(json.dumps([
    ".".join(map(str, sys.version_info[:3])),
    [module for module in modules if importlib.util.find_spec(module) is None],
    program is None or shutil.which(program, path=path) is not None,
]))
"""


def look(wanted: dict[str, Any]) -> dict[str, Any]:
    """Answers to the questions in `wanted`, a function's arguments under its name, by the same keys."""
    known: dict[str, Callable[..., Any]] = {
        "interpreter": interpreter,
        "state": state,
        "weights": weights,
        "data": data,
        "copies": copies,
        "data_copies": copies,
        "held": weights_store.held,
        "places": places,
        "secrets": secrets,
        "image": image,
        "storages": storages,
        "strays": strays.look,
        "hashes": hashing.names,
    }
    return {key: known[key](**question) for key, question in wanted.items()}


def look_each(wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`look` for each of several runs."""
    return [look(questions) for questions in wanted]


def interpreter(
    python: str, modules: list[str], program: str | None, path: str, directory: str | None
) -> dict[str, Any]:
    """version, missing modules, and lost (a program that is not found); or problem, the end of a sentence."""
    words = json.dumps([modules, program, path, directory])
    try:
        done = subprocess.run(
            [python, "-c", QUESTION, words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PYTHON_TIMEOUT,
        )
    except FileNotFoundError:
        return {"problem": "does not exist"}
    except subprocess.TimeoutExpired:
        return {"problem": f"does not answer (it did not end within {PYTHON_TIMEOUT:g} s)"}
    except OSError as error:
        return {"problem": f"does not run ({error.strerror})"}
    try:
        version, missing, there = json.loads(done.stdout)
        return {"version": version, "missing": missing, "lost": "" if there else program}
    except ValueError:
        errors = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        return {"problem": f"does not run ({errors[-1]})"}


def state(checkpoints: str) -> dict[str, Any] | None:
    """state.json of the newest checkpoint; None if there is none that can be read."""
    try:
        value = json.loads(Path(checkpoints, "latest", "state.json").read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def after_switch(state_root: str, name: str, run_path: str) -> dict[str, Any]:
    """exit.json of a run that a switch has started (None while it goes on), and who changes the name now."""
    run = status.RunDir(run_path)
    try:
        exit = run.exit()
    except ValueError:
        exit = None
    holder = files.holder(Path(state_root, "names", name, "switch.lock"))
    return {"exit": dataclasses.asdict(exit) if exit else None, "switch": holder}


def secrets(path: str, values: dict[str, str]) -> list[str]:
    """The names of those `values` that a run's secrets file has otherwise; none if it cannot be read.

    Only names leave the host, and what came over stdin is written nowhere.
    """
    try:
        content = Path(path).read_bytes()
    except OSError:
        return []
    entries = content.split(b"\0" if b"\0" in content else b"\n")  # as launch reads them
    there = {name: value for name, equals, value in (entry.partition(b"=") for entry in entries) if equals}
    return [
        name
        for name, value in sorted(values.items())
        if there.get(name.encode(), value.encode("utf-8", "surrogateescape"))
        != value.encode("utf-8", "surrogateescape")
    ]


def weights(source: str, shm: str, read: bool) -> dict[str, Any]:
    """A model directory of this host; see `weights_store.look`."""
    return weights_store.look(source, shm, read)


def image(reference: str, address: str | None) -> bool | None:
    """Whether the engine has an image of one's own; None if it does not say.

    The engine is asked itself: a digest, an id and a name without its registry mean the same image.
    """
    try:
        engine.Engine(address).image(reference)
    except engine.EngineError as error:
        return False if error.status == 404 else None
    return True


def storages(template: str | None, paths: list[str]) -> dict[str, Any]:
    """What only a Proxmox host of the pct runtime is asked, since it takes Perl's second.

    ``{"space": see pve.space, "template": whether a template of one's own is there (None: not asked),
    "links": those of `paths` that lead through a symbolic link}``
    """
    return {
        "space": pve.space(),
        "template": None if template is None else pve.has_template(template),
        "links": [path for path in paths if os.path.realpath(path) != os.path.normpath(path)],
    }


def data(source: str) -> dict[str, Any]:
    """A directory of data of this host: its path and what is wrong with it, as a list of sentences."""
    path = typedpath.expand(source)
    return {"path": str(path), "problems": data_problems(path)}


def data_problems(path: Path) -> list[str]:
    try:
        kind = typedpath.look(path, f"data {path}")
    except DeployError as error:
        return [str(error)]
    if kind != typedpath.DIRECTORY:
        what = "are no directory" if kind else "do not exist"
        return [f"data {path} {what}; correct data: in the run's file"]
    if not any(path.iterdir()):
        return [f"data {path} are empty; put tokenised completions there, or correct data: in the run's file"]
    return []


def copies(name: str, places: list[str]) -> list[list[dict[str, Any]]]:
    """Which versions of a directory from another machine lie in each of `places`."""
    return [weights_store.known(place, name) for place in places]


def places(state: str, shm: str) -> list[str]:
    """Why what lies in these places, as far as they are given, is not to be relied on, a sentence each."""
    keys = {state: weights_store.STATE_KEY, shm: weights_store.SHM_KEY}
    return [one for at, key in keys.items() if at for one in weights_store.place_problems(Path(at), key)]


def contents(path: str, names: list[str]) -> dict[str, str | None]:
    """Some files of a directory as text, as far as they are there; {} if the directory is not."""
    if not Path(path).is_dir():
        return {}
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = Path(path, name).read_bytes().decode("utf-8", "surrogateescape")
        except OSError:
            found[name] = None
    return found
