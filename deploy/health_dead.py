"""Who has died of a run that goes on: its ranks, and children that nobody has waited for. Pure."""

from __future__ import annotations

from typing import Any

from deploy.health_words import number, table
from deploy.health_work import SHOWN, Work

MOST_RANKS = 64  # of one run are looked for


def end_of(item: dict[str, Any]) -> str:
    """How a process ended, by its wait status: ``killed by signal 9``."""
    ended = item.get("ended")
    if not isinstance(ended, int) or isinstance(ended, bool) or ended < 0:
        return "has ended"
    if ended & 0x7F:
        return f"was killed by signal {ended & 0x7F}"
    return f"has ended with exit code {ended >> 8}"


def dead_children(work: Work, badly: bool = False) -> str:
    """The children that ended and that their parents have not noticed; `badly`: not those that ended well."""
    parents = {item.get("pid") for item in work.processes}
    found = [item for item in work.dead if item.get("ppid") in parents and item.get("state") == "Z"]
    if badly:
        found = [item for item in found if item.get("ended")]
    words = [
        f"pid {item.get('pid')}, a child of pid {item.get('ppid')}, {end_of(item)}" for item in found[:SHOWN]
    ]
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"{'; '.join(words)}{more}, which its parent has not noticed" if words else ""


def dead_ranks(work: Work, beats: list[dict[str, Any]], now: float, grace: float) -> str:
    """The ranks whose process is gone while others live; empty while that cannot be told.

    By their heartbeats; of a command that sends none by the numbers that its launcher gave them. A rank that
    said that it finishes may be gone before the others.
    """
    if not work.complete or not work.processes:
        return ""
    living = {item.get("nspid", item.get("pid")): item for item in work.processes}
    if beats:
        told = {number(beat, "pid"): beat for beat in beats if number(beat, "pid")}
        gone = [
            beat
            for pid, beat in told.items()
            if pid not in living
            and beat.get("phase") != "finishing"
            and now - (number(beat, "time") or now) > grace
        ]
        if not gone or len(gone) == len(beats):
            return ""  # (all of them gone: launch is about to say so)
        dead = {item.get("nspid", item.get("pid")): item for item in work.dead}
        words = []
        for beat in gone:
            pid = number(beat, "pid")
            end = end_of(dead[pid]) if pid in dead else "is gone"
            words.append(f"rank {beat.get('rank', '?')} (pid {pid:.0f}) {end}")
        return f"{'; '.join(words[:SHOWN])}, of {len(beats)} ranks"
    return killed_ranks(work) or missing_ranks(work)


def killed_ranks(work: Work) -> str:
    """Ranks that ended badly and that their launcher has not waited for. What they were is not told any more:
    their number is one that its other children do not have."""
    found, size, wanted = [], 0.0, set[float]()
    for item in work.dead:
        if item.get("state") != "Z" or not item.get("ended"):
            continue
        beside = [table(one, "ranks") for one in work.processes if one.get("ppid") == item.get("ppid")]
        numbers = {number(one, "RANK") for one in beside} - {None}
        if numbers:
            found.append(item)
            size = max(size, *(number(one, "WORLD_SIZE") or 0 for one in beside))
            wanted |= set(map(float, range(min(int(size), MOST_RANKS)))) - numbers
    of = f", of {size:.0f} ranks" if size else ""
    if found and len(wanted) == len(found):
        named = zip(sorted(wanted), found, strict=True)  # (they were started in this order)
        words = [f"rank {rank:.0f} (pid {item.get('pid')}) {end_of(item)}" for rank, item in named]
    else:
        words = [f"a rank (pid {item.get('pid')}) {end_of(item)}" for item in found]
    return f"{'; '.join(words[:SHOWN])}{of}" if words else ""


def missing_ranks(work: Work) -> str:
    """The ranks of this host whose process is gone, by the numbers that the others have.

    How many there should be is known if the launcher said so; else a gap in the numbers shows it.
    """
    ranks = [table(item, "ranks") for item in work.processes]
    told = max((number(one, "LOCAL_WORLD_SIZE") or 0 for one in ranks), default=0)
    world = max((number(one, "WORLD_SIZE") or 0 for one in ranks), default=0)
    here = {value for one in ranks if (value := number(one, "LOCAL_RANK")) is not None}
    if not here and told == world:  # all are here, so their numbers in the world serve
        here = {value for one in ranks if (value := number(one, "RANK")) is not None}
    size = int(told or max(here, default=-1) + 1)
    lacking = [rank for rank in range(min(size, MOST_RANKS)) if rank not in here]
    parents = {item.get("ppid") for item in work.processes if table(item, "ranks")}
    well = [one for one in work.dead if one.get("ppid") in parents and one.get("ended") == 0]
    if not here or len(lacking) <= len(well):  # who has ended well may only be earlier than the others
        return ""
    of = f" of {told:.0f} on this host" if told else f" of {world:.0f}" if world else ""
    return f"rank {', '.join(map(str, lacking[:SHOWN]))}{of} is gone"
