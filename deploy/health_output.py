"""What a command has printed, as far as it has arrived, and what holds the rest back. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from deploy import python_start
from deploy.health_words import OURS, cut, number, rows, table
from deploy.health_work import Work, program

PYTHON = re.compile(r"(python|pypy)\d*(\.\d+)*t?")
BANNER = f"{OURS}drafthouse run "  # begins the first line of an attempt
EARLY = 2.0  # seconds after the start within which what is in the log may be the banner
# Programs that print little themselves and wait for others.
SHELLS = re.compile(r"(ba|da|z|k|a)?sh|busybox|env|make|timeout|time|xargs|tee|nice|tini|docker-init")


@dataclass(frozen=True)
class Said:
    """What came from a run's command itself in this attempt, without launch's own lines."""

    bytes: float
    newest: float | None = None  # when, Unix time in seconds


def said(run: dict[str, Any], began: float | None) -> Said:
    """By launch's own count, where it keeps one; an older one leaves it to the times and the last lines."""
    log, launch = table(run, "log"), table(run, "launch")
    size, written = number(log, "bytes") or 0.0, number(log, "last_write")
    offset, counted = number(launch, "offset"), number(launch, "output")
    if offset is not None and counted is not None:
        if size > offset:
            return Said(counted + size - offset, written)
        return Said(counted, number(launch, "output_time"))
    lines = [str(line) for line in rows(log, "tail")]
    first = max((at for at, line in enumerate(lines) if line.startswith(BANNER)), default=None)
    if first is not None:
        nothing = all(line.startswith(OURS) for line in lines[first:])
    else:
        nothing = not lines and began is not None and (written is None or written - began < EARLY)
    return Said(0.0) if nothing else Said(size, written)


def held_back(work: Work) -> str:
    """Why what the processes print does not appear, if Python holds it back; else an empty text."""
    for item in work.processes:
        why = buffered(item)
        if why:
            where = "a pipe" if str(item.get("stdout")).startswith("pipe:") else "a file"
            return f"its output is held back in its buffer (pid {item.get('pid')} prints into {where}, {why})"
    return ""


def buffered(item: dict[str, Any]) -> str:
    """Why a process holds its output back; an empty text if it does not, or if that cannot be known."""
    words = [str(word) for word in rows(item, "cmdline")]
    if not words or not into(item) or not PYTHON.fullmatch(program(item)):
        return ""
    given = item.get("unbuffered")
    value = None if given is None else str(given)
    if python_start.at_once(words, value):
        return ""
    if value is None:
        return "without PYTHONUNBUFFERED or -u"
    if python_start.is_off(value):
        return f"PYTHONUNBUFFERED is off ({cut(value, 10) or 'empty'})"
    return f"{python_start.ignores_variables(words)} makes Python ignore PYTHONUNBUFFERED"


def may_hold(work: Work) -> bool:
    """Whether a Python prints into a file that is empty: nothing yet, or a program's own buffer has it."""
    files = [table(item, "stdout_file") for item in work.processes if PYTHON.fullmatch(program(item))]
    return any(number(file, "bytes") == 0 for file in files)


def prints_elsewhere(run: dict[str, Any], work: Work) -> tuple[float, str] | None:
    """(when, words) of the newest output into a file that is not the run's log."""
    own = table(table(run, "run"), "adopted").get("stdout")  # of a run that was adopted this is its log
    found = []
    for item in work.processes:
        told = table(item, "stdout_file")
        when, size = number(told, "modified"), number(told, "bytes")
        if when is not None and size and item.get("stdout") != own:
            found.append((when, f"prints into {cut(str(item.get('stdout')), 80)}, {size:,.0f} bytes"))
    return max(found, default=None)


def any_python(work: Work) -> bool:
    """Whether a process of the run is a Python, or may be one for all that is known."""
    return any(not program(item) or PYTHON.fullmatch(program(item)) for item in work.processes)


def may_hold_back(work: Work) -> str:
    """What may hold back the output of a program that is no Python, if it prints into a pipe or a file."""
    if any_python(work):
        return ""
    for item in work.processes:
        if into(item) and not SHELLS.fullmatch(program(item)):
            where = f"pid {item.get('pid')} prints into a {into(item)}"
            return (
                f"what it prints may be held back by its C library ({where}; "
                "tty: true in the run's file lets every line out)"
            )
    return ""


def into(item: dict[str, Any]) -> str:
    """``pipe`` or ``file`` if a process prints into one, where programs hold back what they print."""
    stdout = str(item.get("stdout") or "")
    if stdout.startswith("pipe:"):
        return "pipe"
    return "file" if stdout.startswith("/") and not stdout.startswith("/dev/") else ""
