"""How evidence is read and put into words: fields that somebody else wrote, spans of time, commands. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

OURS = "── "  # begins launch's own lines in a log


def command(task: str, name: Any, host: str | None, more: str = "") -> str:
    parts = ["fab", task]
    if host and host != "localhost":
        parts.append(f"--host {host}")
    if name:
        parts.append(f"--name {name}")
    return " ".join([*parts, more]).rstrip()


def on_host(words: str, host: str | None) -> str:
    """A command for the shell of a host; of another one through ssh."""
    return words if not host or host == "localhost" else f"ssh {host} {words}"


def trainers(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The heartbeats whose step counts optimiser steps; a target's counts the micro-batches it has served."""
    found = table(dict(run), "heartbeats").values()
    return [beat for beat in found if isinstance(beat, dict) and beat.get("role") != "target"]


def last_line(run: dict[str, Any]) -> str:
    """The newest line of a log that is not launch's own."""
    log = table(run, "log")
    own = log.get("last_line") or next(
        (line for line in reversed(rows(log, "tail")) if not str(line).startswith(OURS)), None
    )
    return f", last line: {cut(str(own))}" if own else ""


def cut(text: str, length: int = 120) -> str:
    """One line of at most `length` characters, without control characters."""
    line = "".join(char if char.isprintable() else " " for char in text).strip()
    return line if len(line) <= length else line[: length - 1] + "…"


def plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}{'es' if word.endswith('s') else 's'}"


def seconds(span: float) -> str:
    span = max(0.0, span)
    if span < 120:
        return f"{span:.0f} s"
    if span < 7200:
        return f"{span / 60:.0f} min"
    return f"{span / 3600:.0f} h" if span < 172800 else f"{span / 86400:.0f} days"


def amount(count: float) -> str:
    """Bytes as people say them: ``3.2 GB``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


def ago(now: float, moment: float | None) -> str:
    return "at an unknown time" if moment is None else f"{seconds(now - moment)} ago"


def since(now: float, moment: float | None) -> str:
    return "since an unknown time" if moment is None else f"for {seconds(now - moment)}"


# -- fields that somebody else wrote -----------------------------------------------------------------------


def table(value: dict[str, Any], key: str) -> dict[str, Any]:
    found = value.get(key)
    return found if isinstance(found, dict) else {}


def rows(value: dict[str, Any], key: str) -> list[Any]:
    found = value.get(key)
    return found if isinstance(found, list) else []


def tables(value: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The objects of a list."""
    return [item for item in rows(value, key) if isinstance(item, dict)]


def number(value: dict[str, Any], key: str) -> float | None:
    """A finite number; None for anything else."""
    found = value.get(key)
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        return None
    return float(found)


def change(value: dict[str, Any], key: str, place: int | None = None) -> float | None:
    """How much a count grew between two samples; of a list of counts the one at `place`."""
    pair = rows(value, key)
    if place is not None:
        pair = [item[place] if isinstance(item, list) and len(item) > place else None for item in pair]
    if len(pair) != 2 or not all(type(one) in (int, float) for one in pair):
        return None
    return float(pair[1]) - float(pair[0])
