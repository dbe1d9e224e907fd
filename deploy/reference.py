"""Which runs `fab compare` and `fab reference` mean, what they have left, and what status compares with."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from deploy import onhost, target
from deploy.errors import USAGE, DeployError
from deploy.target import Target
from trainer import status

LAST = 50  # records that figures are made from, if nothing else is said
MOST = 10_000
LEAST = 3  # records without which a reference would be an accident
READ = 60.0  # seconds to read the records of a run: a few hundred MB, from a cold disk


def find(word: str, host: str | None, root: Path, accept_new_host_key: bool = False) -> tuple[Target, str]:
    """(host, run) of ``0007-demo``, ``demo`` (its newest run) or ``gpu-box:0007-demo``."""
    named, colon, run = word.rpartition(":")
    if not run or (colon and not named):
        raise DeployError(
            f"{word!r} names no run: write RUN or HOST:RUN, like 0007-demo or gpu-box:demo", code=USAGE
        )
    return target.one(named or host, root, accept_new_host_key), run


def name_of(run: str) -> str:
    """``demo`` of ``0007-demo``, and of ``demo``."""
    try:
        return status.split_run_id(run)[1]
    except ValueError:
        return run


def figures(wanted: Sequence[tuple[Target, str]], last: int) -> list[dict[str, Any]]:
    """What each run has left (see `deploy.figures`), read side by side. Raises DeployError."""
    if not 1 <= last <= MOST:
        raise DeployError(f"--last {last} must be from 1 to {MOST:,} records", code=USAGE)

    def read(one: tuple[Target, str]) -> dict[str, Any]:
        goal, run = one
        where = goal.settings.name
        found: dict[str, Any] = onhost.ask(
            goal.host, "deploy.figures:of", goal.settings.state, run, last, where, timeout=READ
        )
        return found

    hosts: dict[str, list[int]] = {}
    for place, (goal, _) in enumerate(wanted):
        hosts.setdefault(goal.settings.name, []).append(place)
    found: dict[int, dict[str, Any]] = {}

    def read_all(places: list[int]) -> None:  # one after the other over one connection
        for place in places:
            found[place] = read((wanted[places[0]][0], wanted[place][1]))

    if len(hosts) == 1:
        read_all(list(range(len(wanted))))
    else:
        with ThreadPoolExecutor(len(hosts)) as pool:
            list(pool.map(read_all, hosts.values()))
    return [found[place] for place in range(len(wanted))]


def made(found: Mapping[str, Any], host: str) -> dict[str, Any]:
    """The reference that a run makes. Raises DeployError if it has logged too little to be one."""
    if found["used"] < LEAST or not found["tokens_per_second"]:
        raise DeployError(
            f"{found['run_id']} on {host} has logged its speed {found['used']} times, which is no reference: "
            f"it takes {LEAST}; choose a run of our trainer that has trained for a while (fab runs)"
        )
    return {
        "schema": 1,
        "run_id": found["run_id"],
        "tokens_per_second": found["tokens_per_second"],
        "step_seconds": found["step_seconds"],
        "phase_seconds": found["phase_seconds"],
        "memory_peak": found["memory"]["peak"],
        "created": time.time(),
    }


def write(goal: Target, name: str, value: Mapping[str, Any] | None) -> str:
    """Make `value` the reference of `name` on a host, None: take it away. The file's path there."""
    if not status.valid_name(name):
        raise DeployError(f"--name {name!r} cannot be a name; fab runs lists those there are", code=USAGE)
    path: str = onhost.ask(
        goal.host, "deploy.reference_store:write", goal.settings.state, name, value, goal.settings.name
    )
    return path
