"""Processes that belong to a name and to no run of it in progress: a training that somebody began by hand.

Two trainers of one experiment would write over each other's checkpoints. `look` runs ON the host, asked
before something is started; the rest is pure. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

from deploy import procfs
from deploy.checks import Check
from deploy.sizes import age
from trainer import status

ENDING = 0.3  # seconds that what a run has just left behind gets to be gone, ...
DYING = 2.0  # ... and what would keep the next one from starting: a killed trainer frees its memory first
MOST = 4  # are named
READING = "on the checkpoints"  # where a process is that only names them
SHOWN = 120  # characters of a command


def question(facts: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The arguments of `look`, from the probe's facts. Pure."""
    mine = [run for run in facts["runs"] if run["name"] == name]
    commands = [(run["run"] or {}).get("command") for run in mine]
    return {
        "state_root": facts["state"]["root"],
        "name": name,
        "programs": sorted({program(words) for words in commands if words} - {""}),
        "known": [process["pid"] for run in facts["runs"] for process in run["processes"]],
    }


def look(state_root: str, name: str, programs: list[str], known: list[int]) -> list[dict[str, Any]]:
    """``{"pid", "command", "age", "where", "same"}`` of each process that is in a place of `name`'s.

    `same`: it trains for certain, as it runs one of `programs`, those that runs of the name were started
    with, and works there. `known` are processes of runs in progress; one in the environment of a run that
    has begun meanwhile is none, either.
    """
    places = _Places(state_root, name)
    began = time.monotonic()
    while True:
        found = _found(places, set(programs), set(known))
        patience = DYING if any(one["same"] for one in found) else ENDING
        if not found or time.monotonic() - began >= patience:
            return found
        time.sleep(0.05)


class _Places:
    """What is `name`'s on this host, under the path that was given and the one that the kernel shows."""

    def __init__(self, state_root: str, name: str) -> None:
        roots = sorted({state_root.rstrip("/"), os.path.realpath(state_root)})
        self.name = name
        self.runs = [f"{root}/runs/" for root in roots]
        self.checkpoints = [f"{root}/names/{name}/checkpoints" for root in roots]

    def run(self, path: str) -> str | None:
        """The id of the run of `name` in whose directory `path` is."""
        for top in self.runs:
            run_id = path[len(top) :].partition("/")[0] if path.startswith(top) else ""
            try:
                if run_id and status.split_run_id(run_id)[1] == self.name:
                    return run_id
            except ValueError:
                continue
        return None

    def where(self, pid: int, words: list[str]) -> tuple[str, bool]:
        """(what ties a process to the name, as the end of a sentence, or nothing; whether it says so itself).

        One that was started in a run's environment belongs to that run, wherever it works.
        """
        marked = procfs.run_of(pid)
        if marked is not None:
            run_id = self.run(marked)
            mine = run_id is not None and not status.RunDir(f"{self.runs[0]}{run_id}").alive()
            return (f"with the environment of {run_id}", True) if mine else ("", False)
        here = procfs.link(pid, "cwd") or ""
        run_id = self.run(here)
        if run_id is not None:
            return f"in the directory of {run_id}", False
        for place in self.checkpoints:
            if f"{here}/".startswith(f"{place}/"):
                return f"in the checkpoints of {self.name}", False
            if any(place in word for word in words):
                return f"{READING} of {self.name}", False
        return "", False


def _found(places: _Places, programs: set[str], known: set[int]) -> list[dict[str, Any]]:
    table = procfs.processes()
    booted, mounts = procfs.boot_time(), procfs.link(os.getpid(), "ns/mnt")
    passed = known | _ancestors(os.getpid(), table)
    kinds = {_kind(one) for one in programs}
    found = []
    for pid, process in sorted(table.items()):
        if pid in passed or process["state"] in "ZX":
            continue
        words = [os.fsdecode(word) for word in procfs.read(pid, "cmdline").split(b"\0")[:-1]]
        if not words:  # the kernel's own
            continue
        where, marked = places.where(pid, words)
        if not where or procfs.link(pid, "ns/mnt") != mounts:  # in a container the same path is another place
            continue
        same = program(words) in programs
        # Training scripts evaluate, too: naming a checkpoint is not yet training.
        certain = same and not where.startswith(READING)
        if not (same or marked or _kind(program(words)) in kinds):  # a shell, a pager: somebody looks at it
            continue
        started = booted + process["start"] / procfs.TICK if booted else None
        command = "".join(char if char.isprintable() else " " for char in " ".join(words))
        found.append(
            {
                "pid": pid,
                "command": command if len(command) <= SHOWN else command[: SHOWN - 1] + "…",
                "age": None if started is None else max(0.0, time.time() - started),
                "where": where,
                "same": certain,
            }
        )
    return found


def _ancestors(pid: int, table: Mapping[int, Mapping[str, Any]]) -> set[int]:
    found: set[int] = set()
    while pid in table and pid not in found:
        found.add(pid)
        pid = table[pid]["ppid"]
    return found


def program(words: list[str]) -> str:
    """What a command runs, whoever wrote its path and flags: ``python: train.py``, ``torchrun``. Pure."""
    rest = list(words)
    if rest and os.path.basename(rest[0]) == "env":
        rest = rest[1:]
        while rest and "=" in rest[0]:
            rest = rest[1:]
    if not rest:
        return ""
    name = re.sub(r"[\d.]+$", "", os.path.basename(rest[0]).lstrip("-"))
    if name not in ("python", "pypy", "bash", "sh", "dash", "zsh"):
        return name
    index = 1
    while index < len(rest) and rest[index].startswith("-"):
        if rest[index] in ("-c", "-m"):
            return f"{name}: {' '.join(rest[index : index + 2])}"
        index += 2 if rest[index] in ("-X", "-W", "-o") else 1
    return f"{name}: {os.path.basename(rest[index])}" if index < len(rest) else name


def _kind(name: str) -> str:
    """``python`` of ``python: train.py``; a shell alone is none, as people sit in one."""
    kind, separator, _ = name.partition(":")
    return kind if separator or kind not in ("python", "bash", "sh", "dash", "zsh") else f"{kind} alone"


def checks(found: Iterable[Mapping[str, Any]], name: str, host: str) -> list[Check]:
    """A failure for what is certainly another training of `name`, a warning for what may be one. Pure."""
    made = []
    for one in [*found][:MOST]:
        since = f", for {age(one['age'])}" if one.get("age") is not None else ""
        who = f"process {one['pid']} on {host} ({one['command']}{since})"
        if one["same"]:
            message = f"{who} trains {name} already, {one['where']}, and belongs to no run in progress"
            remedy = "two at once would spoil its checkpoints: end that process, or wait for its end"
        else:
            message = f"{who} works {one['where']}, and belongs to no run in progress"
            remedy = f"if it trains {name}, end it first"
        made.append(Check("stray", False, message, remedy, not one["same"]))
    return made
