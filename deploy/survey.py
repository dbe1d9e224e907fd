"""What a plan is made from: everything that is read before anything is decided. Reads, never writes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy import CHECKOUT, release, secrets, weights
from deploy.host import Host, HostError
from deploy.release import Layout
from deploy.runtimes import process
from deploy.settings import TOY, HostSettings, Project, RunSettings

# What the trainer imports at its start: without one it would fail in the new run, after the old one ended.
TRAINER_MODULES = ("torch", "transformers", "tokenizers", "safetensors", "pyarrow", "numpy", "yaml")


@dataclass(frozen=True)
class Interpreter:
    """The Python that will run the trainer on the host."""

    path: str
    version: str = ""
    missing: tuple[str, ...] = ()
    problem: str = ""
    lost: str = ""  # the program of a foreign command, if there is no such program


@dataclass(frozen=True)
class Survey:
    """All evidence for one plan."""

    facts: Mapping[str, Any]  # of the probe
    layout: Layout
    interpreter: Interpreter
    app: Mapping[str, bytes]  # the trainer's sources in this checkout
    git: Mapping[str, Any]
    weights: weights.Weights | None = None
    weights_problems: tuple[str, ...] = ()
    data: str | None = None
    data_problems: tuple[str, ...] = ()
    secret_problems: tuple[str, ...] = ()
    checkpoint: Mapping[str, Any] | None = None  # state.json of checkpoints/latest

    @property
    def runs(self) -> list[Mapping[str, Any]]:
        """The runs of this name, oldest first."""
        return [run for run in self.facts["runs"] if run["name"] == self.layout.name]

    @property
    def live(self) -> Mapping[str, Any] | None:
        """The run of this name that is in progress."""
        return next((run for run in reversed(self.runs) if run["alive"]), None)


def take(
    project: Project,
    host: Host,
    settings: HostSettings,
    run: RunSettings,
    facts: Mapping[str, Any],
    progress: Callable[[str], None] = lambda text: None,
    *,
    read_weights: bool = True,
) -> Survey:
    """Read what the plan needs besides the probe's facts. Without `read_weights` nothing large is read."""
    layout = layout_of(settings, facts, run.name)
    python = settings.python or facts["python_path"]
    staged, weight_problems = _weights(project, layout, run, progress, read_weights)
    data, data_problems = _data(project, run)
    return Survey(
        facts,
        layout,
        _interpreter(host, python, run, working_directory(project, settings, run)),
        release.trainer_files(CHECKOUT),
        release.git_state(CHECKOUT),
        staged,
        weight_problems,
        data,
        data_problems,
        tuple(secrets.problems(run.secrets, project.root)),
        _checkpoint(host, layout),
    )


def working_directory(project: Project, settings: HostSettings, run: RunSettings) -> str | None:
    """Where a run is started: as its file says, else, for a foreign command on this machine, the project."""
    if run.working_directory is not None or run.command is None or not settings.is_local:
        return run.working_directory
    return str(project.root)


def layout_of(settings: HostSettings, facts: Mapping[str, Any], name: str) -> Layout:
    return Layout(facts["state"]["root"], facts["shm"]["root"], name, settings.cache)


# Answers with version, modules that are missing, and whether a program can be found. Imports nothing heavy.
_QUESTION = """\
import importlib.util, json, os, shutil, sys
modules, program, path, directory = json.loads(sys.argv[1])
os.chdir(directory or "/")
print(json.dumps([
    ".".join(map(str, sys.version_info[:3])),
    [module for module in modules if importlib.util.find_spec(module) is None],
    program is None or shutil.which(program, path=path) is not None,
]))
"""


def _interpreter(host: Host, python: str, run: RunSettings, directory: str | None) -> Interpreter:
    """Ask the trainer's Python who it is and what it has, and whether a foreign command's program exists."""
    program = run.command[0] if run.command else None
    path = run.environment.get("PATH") or process.search_path(python)
    words = json.dumps([TRAINER_MODULES, program, path, directory])
    try:
        answer = host.run([python, "-c", _QUESTION, words], timeout=20, check=False)
    except HostError as error:
        return Interpreter(python, problem=f"does not answer ({error})")
    if answer.code == 127:
        return Interpreter(python, problem="does not exist")
    try:
        version, missing, there = json.loads(answer.out)
        return Interpreter(python, version, tuple(missing), lost="" if there else str(program))
    except ValueError:
        errors = answer.err.decode(errors="replace").strip().splitlines() or [f"exit code {answer.code}"]
        return Interpreter(python, problem=f"does not run ({errors[-1]})")


def _weights(
    project: Project, layout: Layout, run: RunSettings, progress: Callable[[str], None], read: bool
) -> tuple[weights.Weights | None, tuple[str, ...]]:
    if run.weights is None:
        if run.command is not None:
            return None, ()
        return None, ("the run's file names no weights; add weights: with a model directory, or toy",)
    if run.weights == TOY:
        return weights.Weights(TOY, "toy", TOY), ()
    path = _path(project, run.weights)
    problems = tuple(weights.check_model_dir(path))
    return (None, problems) if problems else (weights.plan(path, Path(layout.shm), progress, read=read), ())


def _data(project: Project, run: RunSettings) -> tuple[str | None, tuple[str, ...]]:
    if run.data == TOY or (run.data is None and (run.weights == TOY or run.command is not None)):
        return run.data if run.command is not None else TOY, ()
    if run.data is None:
        return None, (
            "the run's file names no data; add data: with a directory of tokenised completions, or toy",
        )
    path = _path(project, run.data)
    if not path.is_dir():
        what = "are no directory" if path.exists() else "do not exist"
        return None, (f"data {path} {what}; correct data: in the run's file",)
    if not any(path.iterdir()):
        return None, (
            f"data {path} are empty; put tokenised completions there, or correct data: in the run's file",
        )
    return str(path), ()


def _path(project: Project, text: str) -> Path:
    """Relative paths in a run's file count from the project, wherever `fab` is called."""
    return Path(os.path.normpath(project.root / Path(text).expanduser()))


def _checkpoint(host: Host, layout: Layout) -> Mapping[str, Any] | None:
    data = host.read(f"{layout.checkpoints}/latest/state.json")
    try:
        value = json.loads(data) if data is not None else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
