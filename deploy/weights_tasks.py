"""What `fab weights.*` and `fab data.*` do, and how it is said.

`deploy.weights` decides and moves, `deploy.weights_uses` looks, ON the host.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy import (
    budget,
    hashing,
    lookup,
    onhost,
    sender,
    typedpath,
    weights,
    weights_check,
    weights_store,
)
from deploy.errors import USAGE, DeployError, nearest
from deploy.health_words import plural
from deploy.host import NoPython
from deploy.manifest import Progress, name_of
from deploy.meter import Meter
from deploy.sizes import age, printable, size
from deploy.target import Target
from deploy.weights import Weights

LOOK_TIMEOUT = 60.0  # seconds
SHM = "/dev/shm/drafthouse"  # where nothing else is said, and nobody can be asked
Copy = Mapping[str, Any]  # an item of `weights_uses.listing`


# -- bringing ----------------------------------------------------------------------------------------------


def push(
    goal: Target,
    directory: str,
    kind: str,
    *,
    streams: int | None = None,
    evict_first: bool = False,
    rsync: bool = False,
    progress: Progress,
    meter: Meter | None = None,
) -> dict[str, Any]:
    """Send a directory of this machine: weights into shared memory and to disk, data to disk.

    With `rsync`, and to a host without Python, by rsync. Returns path, digest, bytes, sent (bytes over the
    link), seconds and done. Raises DeployError.
    """
    if streams is not None and not 1 <= streams <= sender.MOST:
        raise DeployError(f"--streams {streams} must be from 1 to {sender.MOST}", code=USAGE)
    if goal.host.is_local:
        return stage(goal, directory, kind, evict_first=evict_first, progress=progress)
    progress = weights.lined(progress)
    source = Path(typedpath.expand(directory)).absolute()
    problems = weights_check.check_model_dir(source) if kind == "weights" else lookup.data_problems(source)
    _refuse(problems, kind)
    try:
        room = _room(goal)
        state, shm = room["state"]["root"], room["shm"]["root"]
    except NoPython as error:
        progress(f"{error}; it goes by rsync this time, and no copy is kept on the disk there")
        state, shm, rsync = goal.settings.state or "", goal.settings.shm or SHM, True
    if rsync:
        return _by_rsync(goal, source, kind, shm if kind == "weights" else state, progress)
    place = f"{state}/{kind}" if kind == "data" or goal.settings.keep_on_disk else ""
    root = shm if kind == "weights" else ""
    there, staged, known = _known(goal, name_of(source), place, root)
    found = weights.pushed(source, place, root, there, staged, progress, **known)
    words = f"fab {kind}.push {shlex.quote(directory)} --host {goal.settings.name}"
    sent = None
    if found.action == "push":
        make_room(goal, found, room, evict_first, progress)
        sent = weights.push(goal.host, found, progress, streams=streams, meter=meter, again=words)
        found = dataclasses.replace(found, action="keep" if root and place else "present")
    weights.bring(goal.host, found, progress, words)
    return {
        "path": str(found.path),
        "digest": found.digest,
        "bytes": found.bytes,
        "sent": sent.bytes if sent else 0,
        "seconds": sent.seconds if sent else 0.0,
        "streams": sent.streams if sent else 0,
        # (Of two pushes at once the second has waited, and sends nothing.)
        "done": "pushed"
        if sent and sent.bytes
        else "from its copy on disk"
        if found.action == "copy"
        else "there already",
    }


def _by_rsync(goal: Target, source: Path, kind: str, root: str, progress: Progress) -> dict[str, Any]:
    from deploy import by_rsync

    if not root:
        name = goal.settings.name
        raise DeployError(f"nothing says where data lie on {name}; give it state: in fabric.yaml")
    wanted = weights.read_manifest(source, hashing.names(), progress)
    place = root if kind == "weights" else f"{root}/{kind}"
    target = f"{place}/{name_of(source)}@{wanted['digest'][:12]}"
    progress(f"sending {source} by rsync")
    sent = by_rsync.send(goal.host, source, wanted, target, link=kind == "weights", progress=progress)
    return {
        "path": target,
        "digest": wanted["digest"],
        "bytes": weights_store.taken(wanted),
        "sent": sent.bytes,
        "seconds": sent.seconds,
        "streams": sent.streams,
        "done": "pushed by rsync" if sent.streams else "there already",
    }


def stage(
    goal: Target, directory: str, kind: str, *, evict_first: bool = False, progress: Progress
) -> dict[str, Any]:
    """Copy a directory that lies on the host: weights into shared memory, data into the state."""
    progress = weights.lined(progress)
    room = _room(goal)
    state, shm = room["state"]["root"], room["shm"]["root"]
    asked: dict[str, Any] = {"timeout": weights.SILENCE, "progress": progress}
    source = str(Path(typedpath.expand(directory)).absolute()) if goal.host.is_local else directory
    if kind == "data":
        done = onhost.ask(goal.host, "deploy.weights_store:stage_data", source, f"{state}/data", **asked)
        return {**done, "sent": 0}
    found = onhost.ask(goal.host, "deploy.weights_store:look", source, shm, **asked)
    _refuse(found.get("problems", ()), kind)
    made = weights.Weights(**found)
    make_room(goal, made, room, evict_first, progress)
    weights.bring(goal.host, made, progress)
    words = {"copy": "copied", "in-place": "in shared memory by itself"}
    return {
        "path": str(made.path),
        "digest": made.digest,
        "bytes": made.bytes,
        "sent": 0,
        "done": words.get(made.action, "there already"),
    }


def make_room(
    goal: Target, found: Weights, room: Mapping[str, Any], evict_first: bool, progress: Progress
) -> None:
    """See that weights fit into shared memory; with `evict_first` other versions of their name go for that.

    None that a process uses, and none at all if those that may go are not enough: then it raises DeployError.
    """
    need = budget.need_of(found)
    if not found.root or not need:
        return
    short = budget.shortages(room, goal.settings.name, need, held=found.held)
    if not short:
        return
    copies = listing(goal)
    chosen = budget.evictions(copies, str(found.path), found.name, None, max(one.bytes for one in short))
    if not chosen or not evict_first:
        remedy = "fab weights.list shows what else could go (fab weights.evict)"
        if chosen:
            remedy = f"--evict-first removes {printable(budget.described(chosen))} before; {remedy}"
        else:
            others = budget.others(copies, str(found.path), found.name)
            remedy = "; ".join([*_why_not(others, evict_first), remedy])
        given = budget.more_memory(room) if any(one.where == "memory" for one in short) else ""
        remedy += f"; or give it more: {given}" if given else ""
        raise DeployError("\n".join(one.sentence for one in short) + f"; {remedy}")
    for eviction in chosen:
        freed = _evict(goal, {"path": eviction.path}, progress)
        progress(f"{eviction.path} evicted: {size(freed)} of memory freed")


def _why_not(others: Sequence[Copy], evict_first: bool) -> list[str]:
    """What is said of other versions that may not go, or are not enough: nothing, or a part of a sentence."""
    used = [one for one in others if one["processes"]]
    counts = [len(one["processes"]) for one in used]
    words = [
        f"{one['path']} is used by {count} process{'es' if count > 1 else ''}"
        for one, count in zip(used, counts, strict=True)
    ]
    if used:
        words[-1] += ": stop what runs there first (fab status, fab stop)"
    if evict_first and others:
        words.append("nothing was evicted, since all that may go is not enough")
    return [printable(one) for one in words]


def told(done: Mapping[str, Any], host: str) -> str:
    """What `push` and `stage` did, in a line."""
    what = f"{done['path']} on {host} ({size(done['bytes'])}): {done['done']}"
    if done["sent"]:
        rate = size(done["sent"] / max(done["seconds"], 1e-3))
        what += (
            f", {size(done['sent'])} sent in {done['seconds']:.1f} s ({rate}/s), every byte read back there"
        )
    return printable(what)


# -- looking -----------------------------------------------------------------------------------------------


def listing(goal: Target) -> list[Copy]:
    """The copies on the host; see `weights_uses.listing`."""
    found: list[Copy] = onhost.ask(
        goal.host, "deploy.weights_uses:listing", goal.settings.state, goal.settings.shm, timeout=LOOK_TIMEOUT
    )
    return found


def table(copies: Sequence[Copy], host: str) -> str:
    """The copies for people: where, name and version, size, memory, age, who uses them."""
    if not copies:
        return f"no weights and no data of Drafthouse's lie on {host}"
    rows = [("WHERE", "COPY", "SIZE", "MEMORY", "AGE", "USED BY")]
    for one in copies:
        name = f"{'data ' if one['kind'] == 'data' else ''}{one['name']}@{one['digest'][:12]}"
        state = "in part" if one["partial"] else "damaged" if one["manifest"] else "no manifest"
        marks = (" ←" if one["linked"] else "") + ("" if one["whole"] else f" ({state})")
        memory = size(one["memory"]) if one["where"] == "memory" else "-"
        rows.append(
            (
                one["where"],
                printable(name) + marks,
                size(one["bytes"]),
                memory,
                age(one["age"]),
                _by(one),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    taken = sum(one["memory"] for one in copies)
    return "\n".join([*lines, f"{size(taken)} of {host}'s memory in all; ← is what the plain name points to"])


def _by(one: Copy) -> str:
    newest = list(one["runs"])[-3:]
    more = [f"{len(one['runs']) - len(newest)} more"] if len(one["runs"]) > len(newest) else []
    held = [plural(len(one["processes"]), "process")] if one["processes"] else []
    return ", ".join([*newest, *more, *held]) or "nobody"


def verify(goal: Target, which: str | None, progress: Progress) -> list[tuple[str, list[str]]]:
    """Read copies on the host again: (path, what is wrong) of each.

    By default all in shared memory that have a manifest to be held against.
    """
    there = [one for one in listing(goal) if not one["partial"]]
    memory = [one for one in there if one["where"] == "memory" and one["manifest"]]
    paths = [one["path"] for one in (memory if which is None else chosen(there, which, goal.settings.name))]
    if not paths:
        return []
    found = onhost.ask(
        goal.host, "deploy.weights_uses:verify", paths, timeout=weights.SILENCE, progress=progress
    )
    return list(found.items())


def evict(goal: Target, which: str, progress: Progress) -> list[tuple[str, int]]:
    """Remove copies from shared memory: (path, bytes) of each. Raises DeployError for one that is in use."""
    copies = [one for one in listing(goal) if one["where"] == "memory"]
    found = chosen(copies, which, goal.settings.name)
    return [(one["path"], _evict(goal, one, progress)) for one in found]


def chosen(copies: Sequence[Copy], which: str, host: str) -> list[Copy]:
    """The copies that a word means: a path, a name (all its versions), or ``name@`` and some of the digest.

    Raises DeployError if it means none.
    """
    name, at, digest = which.rpartition("@")
    found = [
        one
        for one in copies
        if which in (one["path"], one["name"])
        or (at and one["name"] == name and digest and one["digest"].startswith(digest))
    ]
    if not found:
        close = nearest(which, [one["name"] for one in copies]) if which else ""
        named = printable(which) if which.strip() else f"'{printable(which)}'"
        raise DeployError(f"{named} is not among the copies on {host}, which fab weights.list shows{close}")
    return found


def _evict(goal: Target, one: Copy, progress: Progress) -> int:
    place = str(Path(one["path"]).parent)
    asked: dict[str, Any] = {"timeout": weights.SILENCE, "progress": progress}
    return int(onhost.ask(goal.host, "deploy.weights_uses:evict", place, one["path"], **asked))


def _room(goal: Target) -> dict[str, Any]:
    """The host's places, and what room they and its memory have: see `deploy.room`."""
    words = ("deploy.room:look", goal.settings.state, goal.settings.shm)
    found: dict[str, Any] = onhost.ask(goal.host, *words, timeout=LOOK_TIMEOUT)
    return goal.completed(found)


def _known(goal: Target, name: str, place: str, root: str) -> tuple[Any, Any, dict[str, Any]]:
    """(copies on disk, copies in shared memory, what else `weights.pushed` takes).

    Raises DeployError for a place where others can change what is in it.
    """
    places = [one for one in (place, root) if one]
    wanted: dict[str, Any] = {"copies": {"name": name, "places": places}, "hashes": {}}
    wanted["places"] = {"state": place, "shm": root}
    if root:
        wanted["held"] = {"name": name, "place": root}
    answers = onhost.ask(goal.host, "deploy.lookup:look", wanted, timeout=LOOK_TIMEOUT)
    if answers["places"]:  # before anything is read
        raise DeployError(f"{goal.settings.name}: {answers['places'][0]}")
    found = dict(zip(places, answers["copies"], strict=True))
    known = {"hashes": answers["hashes"], "held": answers.get("held", 0)}
    return found.get(place, []), found.get(root, []), known


def _refuse(problems: Sequence[str], kind: str) -> None:
    """(Their remedies speak of the run's file; here the directory was typed.)"""
    remedy = f"correct {kind}: in the run's file"
    if problems:
        raise DeployError("\n".join(problem.replace(remedy, "name another") for problem in problems))
