"""A plan as people read it, and the difference between two releases. Pure."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from deploy import budget, mask, release
from deploy.render import shell
from deploy.runtimes import compose, pct

LONGEST_TEXT = 80  # characters of one argument of a command that has blanks, like the program of python -c
LONGEST_WORD = 300  # of one without, like a path

if TYPE_CHECKING:
    from deploy.plan import Plan
    from deploy.release import Release


def text(plan: Plan) -> list[str]:
    """The lines of a plan: what will be done, or why nothing is."""
    if plan.action in ("unchanged", "link") and plan.stop:
        return [
            f"unchanged: {plan.stop.run_id} runs release {plan.release} on {plan.host} ({plan.stop.doing})",
            *_link(plan),
            *(f"note: {warning}" for warning in plan.warnings),
        ]
    if plan.action == "nothing":
        none = f"no run of {plan.name} is in progress on {plan.host}"
        return [f"{none} yet: {plan.warnings[0]}" if plan.warnings else f"nothing to stop: {none}"]
    rows: list[tuple[str, str]] = []
    if plan.action == "stop":
        rows += _stop_rows(plan)
    else:
        rows += [("runtime", f"{plan.runtime}: {plan.runtime_why}")]
        if plan.run_file:
            rows += [("run file", f"{plan.run_file} ({plan.run_file_why})")]
        rows += [("release", _release(plan))]
        rows += [("", difference) for difference in plan.differences]
        if plan.changes:
            rows += [
                (
                    "set",
                    ", ".join(f"{key}={value}" for key, value in mask.pairs(plan.changes)) + ", for this run",
                )
            ]
        if plan.image:
            rows += [("image", f"{plan.image}, {plan.image_words}" if plan.image_words else plan.image)]
        if plan.weights:
            rows += [("weights", plan.weights.describe())]
        rows += [("memory", plan.memory)] if plan.memory else []
        rows += [("evict", _evicted(plan))] if plan.evict else []
        if plan.data_copy:
            rows += [("data", plan.data_copy.describe())]
        elif plan.data:
            rows += [
                ("data", plan.data if plan.data != "toy" else "toy, which the trainer makes from its target")
            ]
        rows += [("secret", f"{name} {source}") for name, source in plan.secrets.items()]
        rows += [("command", _command(plan.command))]
        if plan.tty:
            rows += [("output", "to a terminal (tty: true), so that C programs write line by line")]
        rows += (
            [("install", f"tini, with {' '.join(plan.install)} (--no-install declines)")]
            if plan.install
            else []
        )
        rows += [("init", plan.init)]
        rows += _container_rows(plan)
        rows += _stop_rows(plan)
        rows += [("at boot", plan.boot)] if plan.boot else []
        rows += [("start", f"the next run of {plan.name}: {plan.resume}")]
        if plan.rollback:
            rows += [
                ("rollback", f"to release {plan.rollback}, should the new run die before its first step")
            ]
    rows += [("note", warning) for warning in plan.warnings]
    width = max(len(label) for label, _ in rows)
    return [
        f"{plan.task} {plan.name} on {plan.host}",
        *(f"  {label:<{width}}  {text}" for label, text in rows),
    ]


def _evicted(plan: Plan) -> str:
    """What goes so that the new weights fit in, and what that means for the run in progress."""
    what = f"{budget.described(plan.evict)}, since the new weights do not fit in beside it"
    if plan.stop is None or not any(one.held for one in plan.evict):
        return what
    return f"{what}: {plan.stop.run_id} is stopped first, and nothing runs until the new ones are there"


def _link(plan: Plan) -> list[str]:
    if plan.link is None:
        return []
    there = f"leads to {plan.link}" if plan.link else "is not there"
    return [f"link: {plan.layout.home}/current {there}; it is put right, to lead to releases/{plan.release}"]


def _release(plan: Plan) -> str:
    state = "on the host already" if plan.release_is_there else "new"
    if plan.damaged:
        state = f"damaged on the host ({release.several(plan.damaged)}): moved aside, and written anew"
    if plan.release == plan.release_before and plan.damaged:
        return f"{plan.release}, {state}"
    if plan.release == plan.release_before:
        return f"{plan.release}, unchanged"
    if plan.release_before is None:
        return f"{plan.release}, {state}"
    return f"{plan.release_before} → {plan.release}, {state}"


def _container_rows(plan: Plan) -> list[tuple[str, str]]:
    """Who the container is, what it sees of the host, and how long it has when it is not us who stop it."""
    rows = []
    if plan.image:
        rows += [("trial", "a container of this release looks and ends, before anything else is stopped")]
    if plan.devices is not None:
        rows += [("gpus", ", ".join(plan.devices) or "none")]
    rows += [("container", plan.container)] if plan.container else []
    if plan.user is not None:
        rows += [
            ("user", f"{plan.user}{' as this host numbers them' if plan.making else ' in the container'}")
        ]
    rows += [("mounts", _mounts(plan))] if plan.mounts else []
    if plan.image and plan.grace_seconds:
        if plan.making:
            return [*rows, _proxmox_grace(plan)]
        grace, engine = plan.grace_seconds, math.ceil(plan.grace_seconds) + compose.ENGINE_MARGIN_SECONDS
        shutdown = compose.DOCKERD_SHUTDOWN_SECONDS
        smallest = min(grace, shutdown)
        why = "grace_seconds" if smallest == grace else "dockerd's, when the host goes down"
        rows += [
            (
                "grace",
                f"{grace:g} s from SIGTERM to SIGKILL by launch (grace_seconds), {engine} s by the engine, "
                f"{shutdown} s when the host goes down (dockerd's default): "
                f"the smallest is {smallest:g} s ({why})",
            )
        ]
    return rows


def _proxmox_grace(plan: Plan) -> tuple[str, str]:
    proxmox = math.ceil(plan.grace_seconds) + pct.STOP_MARGIN_SECONDS
    return (
        "grace",
        f"{plan.grace_seconds:g} s from SIGTERM to SIGKILL by launch (grace_seconds), {proxmox} s by "
        "Proxmox, also when the host goes down",
    )


def _mounts(plan: Plan) -> str:
    """What a container sees of the host, on one line: the name's own places by their last word."""
    home = f"{plan.layout.home}/"
    words = {
        only: ", ".join(one.source.removeprefix(home) for one in plan.mounts if one.read_only == only)
        for only in (False, True)
    }
    read = f"; read-only: {words[True]}" if words[True] else ""
    return f"of {plan.layout.home}: {words[False]}{read}"


def _stop_rows(plan: Plan) -> list[tuple[str, str]]:
    """How the old run ends, and the smallest timeout that its checkpoint has to fit in."""
    stop = plan.stop
    if stop is None:
        return []
    signals = f"SIGTERM, SIGKILL {stop.grace_seconds:g} s later"
    if stop.adopted is not None:
        which = f"{stop.run_id}, process {stop.adopted} and its children ({stop.doing}): {signals}"
        return [
            ("stop", which),
            (
                "",
                "started by hand, so no checkpoint can be asked for: what is not saved or printed is lost",
            ),
        ]
    if not stop.asks:
        return [
            ("stop", f"{stop.run_id} ({stop.doing}): {signals}"),
            (
                "timeouts",
                f"{stop.grace_seconds:g} s is all it has to save in (grace_seconds of {stop.run_id})",
            ),
        ]
    asked = f"a checkpoint first, waited for up to {stop.checkpoint_timeout_seconds:g} s; then {signals}"
    smallest, key = min(
        (stop.grace_seconds, "grace_seconds"), (stop.checkpoint_timeout_seconds, "checkpoint_timeout_seconds")
    )
    return [
        ("stop", f"{stop.run_id} ({stop.doing}): {asked}"),
        (
            "timeouts",
            f"the smallest is {smallest:g} s ({key}); no signal is sent while a checkpoint is awaited",
        ),
    ]


def _command(command: Sequence[str]) -> str:
    """A command line on one line, a program in it cut to its beginning; --json has it whole.

    Secrets are masked first: half an address would not be taken for one.
    """
    return mask.text(" ".join(_word(_cut(word)) for word in mask.words(command)))


def _cut(word: str) -> str:
    blanks = len(word.split()) > 1  # a path stays whole
    if len(word) <= (LONGEST_TEXT if blanks else LONGEST_WORD):
        return word
    begin = next(line for line in word.splitlines() if line.strip())[:LONGEST_TEXT] if blanks else word[:80]
    return f"{begin.strip()} … ({len(word)} characters)"


def _word(word: str) -> str:
    if word.isprintable():
        return shell(word)
    return "$'" + repr(word)[1:-1].replace("\\'", "'").replace("'", "\\'") + "'"  # one line, and still bash


def diff_text(before: Mapping[str, bytes], new: Release) -> str:
    """Each rendered file as a unified diff, what looks like a secret masked. Pure; empty if nothing differs.

    `before` holds the files that `release.deployed` gives. Of code `release.differences` names each file.
    """
    parts = []
    for name in sorted({*before, *new.files}):
        if name.startswith("app/") or name in (release.IMAGE, release.MANIFEST):
            continue
        old, now = mask.both(before.get(name), new.files.get(name))
        if old != now:
            lines = difflib.unified_diff(
                [] if old is None else old.splitlines(),
                [] if now is None else now.splitlines(),
                "/dev/null" if old is None else f"deployed/{name}",
                "/dev/null" if now is None else f"rendered/{name}",
                lineterm="",
            )
            parts.append("\n".join(lines))
    return "\n\n".join(parts)
