"""Which lines of a log are shown: those that match an expression, and launch's own.

The lines of launch (they begin with ``── ``) are the banners of runs and attempts and what is said of the log
itself; without them nobody could tell whose line a match is. Lines end with a newline or a carriage return,
so that each state of a progress bar is one, and come out with a newline. Empty ones never match.

Used ON the host, so that a slow link carries matches only. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import re
import time
import warnings
from collections.abc import Generator, Iterator

from deploy.errors import USAGE, DeployError
from deploy.segments import Segments

LONGEST = 1 << 20  # bytes after which an unfinished line is looked at as it is
FEW = 1024  # bytes for each line that is worth being cut out by itself; more of them are cut at once
OURS = "── "
_began: float | None = None  # when the block was begun that is being matched


def compiled(expression: str) -> re.Pattern[str]:
    """The expression, ready to use. Raises DeployError, one sentence, for what is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "possible nested set": how it is read is documented
            return re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        shown = expression if len(expression) <= 60 else f"{expression[:60]}…"
        raise DeployError(
            f"--grep {shown!r} is no regular expression: {error}; a backslash before a sign makes it "
            "mean itself, like \\( or \\[",
            code=USAGE,
        ) from None


def certain(expression: str) -> bytes:
    """The longest text that every match of `expression` has in it; empty if that is not plain to see.

    So most lines of a log need not be cut out of it, let alone matched.
    """
    best, text, at = "", "", 0
    while at < len(expression):
        sign = expression[at]
        at += 1
        if sign in "()[]|{}":
            return b""
        if sign == "\\" and at < len(expression):
            sign = expression[at]
            at += 1
            if sign.isalnum():  # a class of signs, a border, or the same text again
                return b""
        elif sign in ".^$*+?":
            sign = ""
        repeated = expression[at : at + 1]
        if sign and (not repeated or repeated not in "*+?{"):
            text += sign
        else:
            best, text = max(best, text + (sign if repeated == "+" else ""), key=len), ""
    return encoded(max(best, text, key=len))


@contextlib.contextmanager
def timed() -> Iterator[None]:
    """Have `matching_for` count from here on."""
    global _began
    _began = time.process_time()
    try:
        yield
    finally:
        _began = None


def matching_for() -> float:
    """Seconds of CPU that the block of 64 KiB in hand has taken so far; 0 between blocks."""
    return 0.0 if _began is None else time.process_time() - _began


class Filter:
    """The matching lines of a stream of bytes. It may be cut anywhere."""

    def __init__(self, expression: re.Pattern[str]) -> None:
        self._expression = expression
        self._certain = certain(expression.pattern)
        self._rest = b""

    @property
    def held(self) -> int:
        """How many bytes wait for the end of their line: whoever begins anew begins with them."""
        return len(self._rest)

    def feed(self, data: bytes) -> bytes:
        """The lines that match, of those that `data` ends."""
        data = self._rest + data
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not cut and len(data) >= LONGEST:
            cut = len(data)
        self._rest = data[cut:]
        return self._matching(data[:cut])

    def end(self) -> bytes:
        """The unfinished line, if it matches."""
        data, self._rest = self._rest, b""
        return self._matching(data)

    def _matching(self, data: bytes) -> bytes:
        search = self._expression.search
        with timed():
            few = self._certain and data.count(self._certain) <= len(data) // FEW
            lines = candidates(data, self._certain) if few else split(data)
            found = [line for line in lines if line and (search(line) or line.startswith(OURS))]
        return encoded("\n".join([*found, ""])) if found else b""


def find_last_matches(log: Segments, expression: re.Pattern[str], count: int) -> Generator[None, None, int]:
    """The offset at which the last `count` lines that match begin; where the log begins if there are fewer.

    It is the value of a generator, which yields now and then.
    """
    search, sure = expression.search, certain(expression.pattern)
    oldest = log.end()
    if count <= 0:
        return oldest
    line = b""  # the end of a line that begins before what was read so far
    for offset, block in log.backwards():
        oldest = offset
        data = block + line
        cut = min((at + 1 for at in (data.find(b"\n"), data.find(b"\r")) if at >= 0), default=0)
        if not cut and len(data) < LONGEST:
            line = data
            yield
            continue
        position = offset + len(data)
        with timed():
            for text in () if sure and sure not in data else reversed(split(data[cut:])):
                position -= len(encoded(text))
                if text and search(text):
                    count -= 1
                    if not count:
                        return position
                position -= 1
        line = data[:cut]
        yield
    return oldest


def candidates(data: bytes, text: bytes) -> Iterator[str]:
    """The lines of `data` that have `text` in them, and launch's own."""
    data = data.replace(b"\r", b"\n")
    ours = encoded(OURS)
    at = 0
    nearest = {text: -1, ours: -1}  # where each is found next, from `at` on
    while True:
        for wanted, place in nearest.items():
            if place < at:
                found = data.find(wanted, at)
                nearest[wanted] = found if found >= 0 else len(data)
        place = min(nearest.values())
        if place == len(data):
            return
        end = data.find(b"\n", place)
        end = len(data) if end < 0 else end
        yield data[data.rfind(b"\n", 0, place) + 1 : end].decode("utf-8", "surrogateescape")
        at = end


def split(data: bytes) -> list[str]:
    """The lines of `data`, as long as they were; bytes that are no UTF-8 come through `encoded` unharmed."""
    return data.replace(b"\r", b"\n").decode("utf-8", "surrogateescape").split("\n")


def encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
