"""What silent Python processes have printed but not written: whom to ask, and what the answers mean.

The host's part is `deploy.peek_host`, which only reads; `deploy.peek_flush` asks a process to write.
"""

from __future__ import annotations

import base64
import codecs
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deploy import onhost, overview, python_start
from deploy.errors import DeployError
from deploy.health import cut, plural
from deploy.host import Host
from deploy.terminal import Neutraliser

MOST_LINES = 40  # of one stream on a terminal; --json has all


def pids(facts: Mapping[str, Any], host: str, name: str, run_id: str | None) -> tuple[list[int], bool]:
    """The processes of the newest run of `name`, or of one run, and whether the run has a terminal of its own
    (tty: true). Raises DeployError if no process is left."""
    path = overview.run_path(facts, host, name, run_id)
    run = next(one for one in facts["runs"] if one["path"] == path)
    found = [process["pid"] for process in run["processes"] if process["state"] != "Z"]
    if not found:
        raise DeployError(
            f"{run['run_id']} has no process on {host} any more, so nothing is held back; "
            f"fab tail --run-id {run['run_id']} shows what it wrote"
        )
    return found, bool((run["run"] or {}).get("tty"))


def look(host: Host, processes: Sequence[int], of_run: bool) -> list[dict[str, Any]]:
    """What each process holds back: see `deploy.peek_host.look`."""
    found: list[dict[str, Any]] = onhost.ask(host, "deploy.peek_host:look", list(processes), of_run)
    return found


def check(host: str, found: Sequence[Mapping[str, Any]], pid: int | None, tty: bool = False) -> None:
    """Raise DeployError if nothing at all could be read, with every reason. `tty`: see `pids`."""
    if any(one["refused"] is None for one in found):
        return
    if pid is not None:
        raise DeployError(f"process {pid} on {host} cannot be read: {found[0]['refused']}")
    refused = [
        f"process {one['pid']} ({_program(one)}): {one['refused']}" for one in found if one["python"] is None
    ]
    if not refused:
        which = ", ".join(sorted({_program(one) for one in found})[:3])
        raise DeployError(
            f"no process of this run on {host} is a Python{f' ({which})' if which else ''}: {unread(tty)}"
        )
    raise DeployError("\n".join(refused))


def unread(tty: bool) -> str:
    """Why a program that is no Python may be silent, and what to do about it."""
    if tty:
        return (
            "what other programs hold back cannot be read; tty: true is set, so C's library writes each "
            "line, and what stays silent buffers for itself or has printed nothing"
        )
    return (
        "what other programs hold back cannot be read; into a pipe C's library writes in blocks of 4 KiB, "
        "and tty: true in the run's file makes it write each line"
    )


def flush(host: Host, found: Sequence[Mapping[str, Any]]) -> list[tuple[int, str, bool]]:
    """Ask every process that holds something back to write it: (pid, sentence, whether it did) each."""
    told = []
    for one in found:
        if one["refused"] or not held(one):
            continue
        try:
            answer = onhost.ask(host, "deploy.peek_flush:flush", one["pid"])
        except DeployError as error:
            told.append((one["pid"], str(error), False))
            continue
        if answer["waiting"]:
            words = (
                "was asked, and writes when it is back in Python code (a library or the kernel has it now)"
            )
            told.append(
                (one["pid"], f"process {one['pid']} {words}; until then {answer['waiting']} stays", False)
            )
        else:
            left = f", {answer['left']:,} bytes held since" if answer["left"] else ""
            told.append(
                (one["pid"], f"process {one['pid']} has written {answer['flushed']:,} bytes{left}", True)
            )
    return told


# -- words -------------------------------------------------------------------------------------------------


def text(found: Sequence[Mapping[str, Any]], tty: bool = False) -> str:
    """The answer for people, safe for a terminal. Processes that are no Python are only counted."""
    shown = [one for one in found if one["python"] is not False]
    lines = [line for one in shown for line in _process(one)]
    others = len(found) - len(shown)
    if others:
        lines.append(f"{plural(others, 'process')} of other programs: {unread(tty)}")
    return "\n".join(lines)


def _process(one: Mapping[str, Any]) -> Iterator[str]:
    inside = f" ({one['nspid']} in its container)" if one["nspid"] != one["pid"] else ""
    if one["refused"]:
        yield f"{one['pid']}{inside}  {_program(one)}: cannot be read: {cut(one['refused'], 400)}"
        return
    took = f"read in {one['seconds'] * 1000:.0f} ms"
    yield f"{one['pid']}{inside}  {_program(one)}  (CPython {one['version']}, {took})"
    if not held(one):
        yield "  holds nothing back: all that it has printed is written; fab stacks shows where it is"
    for stream in one["streams"]:
        data = base64.b64decode(stream["held"] or "")
        if stream["held"] is None:
            yield f"  {stream['name']} is a {cut(stream['kind'], 60)} of the program's own: not read"
        elif data:
            yield f"  {stream['name']} → {where(stream)}: {len(data):,} bytes printed, not written"
            yield from _quoted(data, stream["encoding"])
            for sentence in why(one, stream):
                yield f"  {sentence}"
    if held(one) and not one["confirmed"]:
        yield "  it printed all the while, so the end of this may be torn"


def _quoted(data: bytes, encoding: str) -> Iterator[str]:
    try:
        words = data.decode(codecs.lookup(encoding).name, "replace")
    except (LookupError, UnicodeError, TypeError):
        words = data.decode("utf-8", "replace")
    clean = Neutraliser().feed(words.encode("utf-8", "replace"), final=True).decode("utf-8", "replace")
    lines = clean.split("\n")
    if lines[-1] == "":
        lines.pop()
    if len(lines) > MOST_LINES:
        yield f"  │ … {len(lines) - MOST_LINES} lines before these; --json has them all"
    yield from (f"  │ {line}" + ("\x1b[0m" if "\x1b[" in line else "") for line in lines[-MOST_LINES:])


def held(one: Mapping[str, Any]) -> int:
    """How many bytes a process holds back."""
    return sum(len(base64.b64decode(stream["held"] or "")) for stream in one["streams"])


def where(stream: Mapping[str, Any]) -> str:
    """What a stream is open to: ``a pipe (fd 1)``, ``the file /tmp/x (fd 1)``."""
    target, descriptor = stream["leads_to"], stream.get("fd")
    if descriptor is None:
        return "an object of the program's own"
    kinds = {"pipe:": "a pipe", "socket:": "a socket", "/dev/pts/": "a terminal", "/dev/tty": "a terminal"}
    words = next((word for key, word in kinds.items() if (target or "").startswith(key)), None)
    if target is None:
        words = "nothing (it is closed)"
    elif words is None:
        words = target if target.startswith("/dev/") else f"the file {cut(target, 200)}"
    return f"{words} (fd {descriptor})"


def why(one: Mapping[str, Any], stream: Mapping[str, Any]) -> tuple[str, ...]:
    """Why a stream holds bytes back, and how to start the process right: sentences for people."""
    if one["waits"] == "pipe_write":
        return (
            "why: its pipe is full, and it waits for the reader, which does not read; look at what reads it",
        )
    if stream["mode"] == "line":
        return (
            "why: it is written line by line, and this line has no end yet: end it, or print(…, flush=True)",
        )
    variable = one["variables"].get("PYTHONUNBUFFERED")
    ignores = python_start.ignores_variables(one["command"])
    by = python_start.at_once(one["command"], variable)
    block = f"why: {where(stream)} is written in blocks (8 KiB by default), not line by line"
    by_hand = "in the program: sys.stdout.reconfigure(line_buffering=True), or print(…, flush=True)"
    if by:
        return (
            f"{block}: {cut(by, 40)} was given, but the program has made this stream itself",
            "next time: open it with buffering=1 or line_buffering=True, or print(…, flush=True)",
        )
    if variable is not None and not python_start.is_off(variable):
        return (
            f"{block}: {ignores} makes Python ignore PYTHONUNBUFFERED",
            f"next time: add -u to {ignores}; {by_hand}",
        )
    said = "PYTHONUNBUFFERED is not set"
    if variable is not None:
        said = f"PYTHONUNBUFFERED is {cut(variable, 20) or 'empty'}, which is off"
    elif "PYTHONBUFFERED" in one["variables"]:
        said = "PYTHONBUFFERED is set, which no Python knows (it is PYTHONUNBUFFERED)"
    start = (
        "add -u"
        if ignores
        else "PYTHONUNBUFFERED=1 in its environment (processes that it starts inherit it, -u not)"
    )
    return (f"{block}: {said}, and there is no -u", f"next time: {start}; {by_hand}")


def to_json(one: Mapping[str, Any]) -> dict[str, Any]:
    """A process for scripts: `held` in base64 as it is, `text` of it, and why."""
    streams = []
    for stream in one["streams"]:
        data = base64.b64decode(stream["held"] or "")
        reasons = list(why(one, stream)) if data else []
        words = None if stream["held"] is None else data.decode("utf-8", "replace")
        streams.append({**stream, "bytes": len(data), "text": words, "why": reasons})
    return {**one, "streams": streams}


def _program(one: Mapping[str, Any]) -> str:
    return cut(" ".join(one["command"]), 80) or "?"
