"""Which processes are the ranks of a command that sends no heartbeats: by the environment they started with.

A launcher (torchrun, mpirun through a wrapper, a script) gives each rank RANK and WORLD_SIZE, most also
LOCAL_RANK and LOCAL_WORLD_SIZE. What a rank starts, like loader workers, inherits them. Pure. Runs ON the
host: standard library only, Python >= 3.9.
"""

from __future__ import annotations

from collections.abc import Mapping

MOST = 1024  # ranks that are looked for by their number


def find(told: Mapping[int, Mapping[str, int]], parents: Mapping[int, int]) -> dict[int, int]:
    """The rank of each process that is one.

    `told` has the numbers in the environment of every Python process of the run, empty for none, `parents`
    the parent of every process. A launcher may have a RANK of its own (its node's), but its children have
    others; a worker has that of the process it comes from.
    """
    given = {pid: numbers["RANK"] for pid, numbers in told.items() if "RANK" in numbers}
    above = {pid: _above(pid, given, parents) for pid in given}
    launchers = {top for pid, top in above.items() if top is not None and given[pid] != given[top]}
    return {
        pid: rank
        for pid, rank in given.items()
        if pid not in launchers and (above[pid] is None or above[pid] in launchers)
    }


def _above(pid: int, given: Mapping[int, int], parents: Mapping[int, int]) -> int | None:
    """The nearest ancestor that has a rank, too; between the two may be shells."""
    seen = {pid}
    while (pid := parents.get(pid, 0)) and pid not in seen:
        if pid in given:
            return pid
        seen.add(pid)
    return None


def lacking(told: Mapping[int, Mapping[str, int]], ranks: Mapping[int, int]) -> tuple[list[int], list[int]]:
    """(ranks of this host that have ended, ranks that are not here and may be on another host)."""
    here = [told[pid] for pid in ranks]
    local = [one for one in here if {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= one.keys()]
    present = set(ranks.values())
    if local:
        expected = {
            one["RANK"] - one["LOCAL_RANK"] + number
            for one in local
            for number in range(min(one["LOCAL_WORLD_SIZE"], MOST))
        }
        return sorted(expected - present), []
    size = max((one.get("WORLD_SIZE", 0) for one in here), default=0)
    return [], sorted(set(range(min(size, MOST))) - present)
