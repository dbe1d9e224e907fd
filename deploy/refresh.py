"""`fab status --watch`: the same text again and again, in place on a terminal, else one after the other.

Nothing flickers: what is shown is written over in one piece, each line to its end, and only what is left of a
longer text before is cleared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TextIO

from deploy import overview, show
from deploy.health import plural
from deploy.newest import Heard, Newest
from deploy.sizes import age
from deploy.target import Target

MUCH, LITTLE, NONE = 2, 1, 0  # room for runs that have ended
FIRST = 15.0  # seconds that a screen without a terminal waits for the first answer of every host
_SCREEN, _NO_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_COLOUR = re.compile(r"(\x1b\[[0-9;]*m)")
_HOME, _TO_END, _BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


def status(
    goals: Sequence[Target],
    name: str | None,
    run_id: str | None,
    interval: float,
    verbose: bool,
    colour: bool,
    out: TextIO,
    words: Callable[[str], str],
) -> NoReturn:
    """Show `status` until Ctrl-C (KeyboardInterrupt). `words` makes the hints such as can be typed."""
    newest = Newest(goals, name, run_id, interval)

    def shown() -> str:
        return words(text(newest.heard(), name, colour, verbose))

    if not out.isatty():
        deadline = time.monotonic() + FIRST
        while time.monotonic() < deadline and any(not (one.at or one.note) for one in newest.heard()):
            newest.news.wait(0.2)
            newest.news.clear()
        while True:
            print(f"── {time.strftime('%H:%M:%S')}\n{shown()}", file=out, flush=True)
            newest.news.clear()
            time.sleep(interval)
            newest.news.wait(interval)
    with screen(out):
        while True:
            heard = newest.heard()
            choices = (words(text(heard, name, colour, verbose, room)) for room in (MUCH, LITTLE, NONE))
            out.write(frame([f"{choice}\n\nCtrl-C ends this; the runs go on" for choice in choices]))
            out.flush()
            newest.news.wait(1.0)
            newest.news.clear()


def text(found: Sequence[Heard], name: str | None, colour: bool, verbose: bool, room: int = MUCH) -> str:
    """What is shown of all hosts. With LITTLE room runs that have ended are one line, with NONE a number."""
    if room != NONE:
        return "\n".join(block(heard, name, colour, verbose, brief=room == LITTLE) for heard in found)
    parts, ended = [], 0
    for heard in found:
        living = tuple(row for row in heard.rows if not show.over(row))
        ended += len(heard.rows) - len(living)
        parts.append(
            block(dataclasses.replace(heard, rows=living), name, colour, verbose, quiet=bool(heard.rows))
        )
    if ended:
        parts.append(f"… and {plural(ended, 'run')} that ended")
    return "\n".join(part for part in parts if part)


def block(
    heard: Heard, name: str | None, colour: bool, verbose: bool, brief: bool = False, quiet: bool = False
) -> str:
    """What is shown of one host; why that is not the newest stands below it.

    `brief`: see `show.status`. `quiet`: it has runs, which are not among these.
    """
    parts = [show.status(heard.rows, colour, verbose, brief)] if heard.rows else []
    if heard.at is not None and not heard.rows and not quiet:
        parts.append(overview.nothing(heard.goal, heard.facts, name))
    if heard.at is None and not heard.note:
        parts.append(f"{heard.goal.settings.name}: no answer yet")
    if heard.note:
        old = f" (what stands here is {age(time.monotonic() - heard.at)} old)" if heard.at else ""
        parts.append(f"{heard.note}{old}")
    return "\n".join(parts)


def frame(texts: Sequence[str]) -> str:
    """What writes the first of `texts` that there is room for over whatever the screen shows: long lines
    folded, and what is too much even of the last counted."""
    size = shutil.get_terminal_size()
    lines: list[str] = []
    for text in texts:
        lines = [part for line in text.split("\n") for part in folded(line, size.columns)]
        if len(lines) <= size.lines:
            break
    if len(lines) > size.lines:
        lines = [*lines[: size.lines - 1], f"… {len(lines) - size.lines + 1} lines more"]
    return _HOME + "\n".join(line + _TO_END for line in lines) + _BELOW


def folded(line: str, width: int) -> list[str]:
    """`line` in parts of at most `width` characters; colours take no room."""
    parts, room = [""], width
    for token in _COLOUR.split(line):
        if token.startswith("\x1b"):
            parts[-1] += token
            continue
        while len(token) > room:
            parts[-1] += token[:room]
            token, room = token[room:], width
            parts.append("")
        parts[-1] += token
        room -= len(token)
    return parts


@contextlib.contextmanager
def screen(out: TextIO) -> Iterator[None]:
    """A screen of our own; what was on the terminal is there again afterwards, also after a SIGTERM."""
    with ended_by_signals():
        out.write(_SCREEN)
        try:
            yield
        finally:
            out.write(_NO_SCREEN)
            out.flush()


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as an exception does, so that it can tidy up."""

    def end(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    here = threading.current_thread() is threading.main_thread()
    before = [signal.signal(number, end) for number in numbers] if here else []
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=False):
            signal.signal(number, handler)
