"""What a run's trainer really runs with, and files that it needs and that are gone. Runs ON the host, as a
part of the probe. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deploy import machine, procfs

MANIFEST = ".drafthouse.json"  # in every copy of weights that we made
MOST_WORDS = 1000
ALWAYS = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES")
WEIGHTS = re.compile(rb"\.(safetensors|bin|pt|pth|gguf|npz|arrow)$")
MOST_DELETED = 5  # files are named
MOST_MAPPED = 8  # processes are looked at: a list of mappings takes milliseconds


def running(run: dict[str, Any]) -> dict[str, Any] | None:
    """What the trainer of a run in progress really runs with, as far as run.json says what it should be.

    Of its environment only what run.json gives, by name, and Python's own: never a secret.
    """
    trainer = (run["launch"] or {}).get("trainer_pid")
    found = [process["pid"] for process in run["processes"] if process["nspid"] == trainer]
    if not run["alive"] or not trainer or len(found) != 1:
        return None
    words = procfs.read(found[0], "cmdline").split(b"\0")[:-1]
    variables = dict(
        item.partition(b"=")[::2] for item in procfs.read(found[0], "environ").split(b"\0") if item
    )
    if not words or not variables:
        return None
    made = run["run"] or {}
    given, secrets = made.get("environment"), made.get("secrets")
    wanted = set(given) if isinstance(given, dict) else set()
    hidden = {str(name) for name in secrets} if isinstance(secrets, list) else set()
    environment = {}
    for key, value in variables.items():
        name = key.decode("utf-8", "replace")
        if (name in wanted or name.startswith("PYTHON") or name in ALWAYS) and name not in hidden:
            environment[name] = value.decode("utf-8", "replace")
    return {
        "argv": [word.decode("utf-8", "replace") for word in words],
        "environment": environment,
        "image_id": (run["container"] or {}).get("image_id"),
        "started": next(process["started"] for process in run["processes"] if process["pid"] == found[0]),
        "files": named_files(found[0], words[1:]),
    }


def named_files(pid: int, words: list[bytes]) -> list[dict[str, Any]]:
    """The regular files that words of a command line name, seen from the process itself, and their times.

    Files on a network disk are passed over: while its server is away, whoever asks waits with it.
    """
    remote = machine.remote(pid)
    here = os.fsencode(procfs.link(pid, "cwd") or "/")
    found = []
    for word in words[:MOST_WORDS]:
        if not word or len(word) > 4096:
            continue
        if remote and os.path.normpath(os.path.join(here, word)).startswith(remote):
            continue
        base = f"/proc/{pid}/{'root' if word.startswith(b'/') else 'cwd'}"
        path = os.fsencode(base) + b"/" + word.lstrip(b"/")
        try:
            info = os.stat(path)
        except (OSError, ValueError):
            continue
        if stat.S_ISREG(info.st_mode):
            found.append({"path": word.decode("utf-8", "replace"), "modified": info.st_mtime})
    return found


def deleted(pids: Iterable[int]) -> list[str]:
    """Weights and data that processes have mapped and that were removed meanwhile: a restart misses them."""
    found: list[str] = []
    for pid in list(pids)[:MOST_MAPPED]:
        text = procfs.read(pid, "maps")
        for line in text.split(b"\n") if b" (deleted)\n" in text else ():
            if not line.endswith(b" (deleted)"):
                continue
            words = line[: -len(b" (deleted)")].split(None, 5)
            path = words[5].decode("utf-8", "replace") if len(words) == 6 else ""
            if WEIGHTS.search(words[-1]) and path not in found:
                found.append(path)
    return found[:MOST_DELETED]


def weights(run: dict[str, Any], shm: Path) -> dict[str, Any] | None:
    """``{"path", "there", "missing"}`` of the directory in shared memory that a run was started on, the last
    being files of it that are gone; None: not known.
    """
    kept = (run["boot"] or {}).get("weights")
    path = kept.get("path") if isinstance(kept, dict) else None
    if not isinstance(path, str):
        command = (run["run"] or {}).get("command")
        words = [word for word in command if isinstance(word, str)] if isinstance(command, list) else []
        below = re.compile(rf"{re.escape(str(shm))}/[^/\s]+@[0-9a-f]{{6,64}}")
        path = next((match[0] for word in words if (match := below.search(word))), None)
    if path is None:
        return None
    return {"path": path, "there": os.path.isdir(path), "missing": _missing(path) if run["alive"] else []}


def _missing(path: str) -> list[str]:
    """Files that a copy's manifest names and that are gone, also those that nobody has open any more."""
    try:
        with open(os.path.join(path, MANIFEST), "rb") as file:
            names = list(json.load(file)["stamp"])
    except (OSError, ValueError, KeyError, TypeError):
        return []
    gone = [os.path.join(path, name) for name in names if not os.path.lexists(os.path.join(path, name))]
    return gone[:MOST_DELETED]
