"""What a command has printed, as far as it has arrived, and what holds the rest back. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deploy.health_words import OURS, cut, number, rows, table
from deploy.health_work import Work, program

PYTHON = re.compile(r"(python|pypy)\d*(\.\d+)*t?")
OFF = re.compile(r"\s*[+-]?0+|")  # values of PYTHONUNBUFFERED that CPython takes for no
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
    flags = set(switches(words[1:]))
    value = item.get("unbuffered")
    if "u" in flags:
        return ""
    if value is None:
        return "without PYTHONUNBUFFERED or -u"
    if OFF.fullmatch(str(value)):
        return f"PYTHONUNBUFFERED is off ({cut(str(value), 10) or 'empty'})"
    ignored = flags & {"I", "E"}
    return f"-{min(ignored)} makes Python ignore PYTHONUNBUFFERED" if ignored else ""


def switches(words: list[str]) -> Iterator[str]:
    """The one-letter switches of a Python command line, up to the program."""
    skip = False
    for word in words:
        if skip:
            skip = False
            continue
        if not word.startswith("-") or word in ("-", "--"):
            return
        if word.startswith("--"):
            skip = word == "--check-hash-based-pycs"
            continue
        for place, letter in enumerate(word[1:], 2):
            if letter in "cm":
                return
            if letter in "WX":
                skip = place == len(word)
                break
            yield letter


def prints_elsewhere(work: Work) -> tuple[float, str] | None:
    """(when, words) of the newest output into a file that is not the run's log."""
    found = []
    for item in work.processes:
        told = table(item, "stdout_file")
        when, size = number(told, "modified"), number(told, "bytes")
        if when is not None and size:
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
