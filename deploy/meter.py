"""How far a transfer is: bytes, rate and what is left, of the file and in all.

On a terminal one line that is drawn anew; elsewhere a line now and then.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import IO, Any

from deploy.manifest import Chunk
from deploy.sizes import age, size

DRAW = 0.2  # seconds between two drawings of the line
TELL = 10.0  # seconds between two lines without a terminal
SPAN = 10.0  # seconds that the rate is taken over
ENOUGH = 256 << 10  # bytes that tell a rate
WIDTH = 80  # characters of a line, where the terminal does not say


class Meter:
    """Told of every chunk that has arrived; shows it to people. Not for several threads at once."""

    def __init__(self, say: Callable[[str], None], out: IO[str] | None = None) -> None:
        self._say = say
        self._out = out if out is not None and out.isatty() else None
        self._files: dict[str, list[int]] = {}  # name: [bytes that are there, bytes]
        self._done = self._total = self._begun = 0
        self._recent: deque[tuple[float, int]] = deque()
        self._last, self._current, self._drawn = time.monotonic(), "", False

    def begin(self, pieces: Sequence[Chunk], missing: Collection[int]) -> None:
        """Start to count. `missing`: the numbers of those chunks that have to be sent."""
        self._files, self._done, self._total = {}, 0, 0
        for number, one in enumerate(pieces):
            there = 0 if number in missing else one.length
            counts = self._files.setdefault(one.relative, [0, 0])
            counts[0] += there
            counts[1] += one.length
            self._done += there
            self._total += one.length
        self._begun = self._done
        self._recent = deque([(time.monotonic(), self._done)])

    def add(self, one: Chunk) -> None:
        self._files[one.relative][0] += one.length
        self._done += one.length
        self._current = one.relative
        now = time.monotonic()
        self._recent.append((now, self._done))
        while len(self._recent) > 2 and now - self._recent[0][0] > SPAN:
            self._recent.popleft()

    def show(self) -> None:
        """Show it, unless that was done a moment ago."""
        now = time.monotonic()
        if not self._current or now - self._last < (DRAW if self._out else TELL):
            return
        self._last = now
        if self._out is None:
            self._say(self.line())
        else:
            self._out.write(f"\r\x1b[K{self.line(self._columns() - 1)}")
            self._out.flush()
            self._drawn = True

    def _columns(self) -> int:
        """A line that is longer would go on in the next, which nothing wipes."""
        assert self._out
        try:
            return os.get_terminal_size(self._out.fileno()).columns or WIDTH
        except (OSError, ValueError, AttributeError):  # several hosts share it
            return WIDTH

    def tell(self, text: str) -> None:
        """Say something else meanwhile, on a line of its own."""
        self._wipe()
        self._say(text)

    def line(self, columns: int = 200) -> str:
        """``model-3.safetensors 1.2 of 4.0 GB, 24 s left · all 12 of 54 GB at 118 MB/s, 5 min left``."""
        rate = self.rate()
        here, length = self._files[self._current]
        last = self._current.rpartition("/")[2][-48:]
        name = "".join(char if char.isprintable() else " " for char in last)
        file = f" {_of(here, length)}{_left(length - here, rate)}"
        whole = f" · all {_of(self._done, self._total)}"
        whole += f" at {size(rate)}/s{_left(self._total - self._done, rate)}" if rate else ""
        if len(name) + len(file) + len(whole) > columns:  # what is said of it all is what people wait for
            file = f" {_of(here, length)}"
        room = columns - len(file) - len(whole)
        if len(name) > room:
            name = f"…{name[1 - room :]}" if room > 1 else ""
        return f"{name}{file}{whole}"[:columns]

    def rate(self) -> float:
        """Bytes a second, of the last moments; 0 while too little has arrived to tell."""
        if len(self._recent) < 2 or self._done - self._begun < ENOUGH:
            return 0.0
        (then, before), (now, done) = self._recent[0], self._recent[-1]
        return (done - before) / max(now - then, 1e-3)

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *_: Any) -> None:
        self._wipe()

    def _wipe(self) -> None:
        if self._drawn and self._out is not None:
            self._out.write("\r\x1b[K")
            self._out.flush()
            self._drawn = False


def on_terminal(say: Callable[[str], None]) -> Meter:
    """One that draws on stderr, if that is a terminal."""
    return Meter(say, sys.stderr)


def _of(done: int, total: int) -> str:
    return f"{size(done)} of {size(total)}"


def _left(count: int, rate: float) -> str:
    return f", {age(count / rate)} left" if rate > 0 and count > 0 else ""
