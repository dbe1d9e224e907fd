"""Several hosts on one stdout: each line whole, behind the name of the host that it comes from.

Bytes stay what they are, but for what only means something on a screen of one's own: of a line that was
overwritten with carriage returns (a progress bar) the last state is shown.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import threading
import time
from typing import Any, TextIO

from deploy import output

SETTLE = 1.0  # seconds after which an unfinished line that is left alone is shown as it is
PROGRESS = 5.0  # seconds between two states of a progress bar
LONGEST = 1 << 20  # bytes of an unfinished line that are kept back
PLAIN = b"\x1b[0m"  # ends a line's colours: the next line may be another host's


class Lines:
    """Cuts what one host says into lines."""

    def __init__(self) -> None:
        self._rest = b""
        self._began = 0.0  # when the unfinished line began (monotonic, s)
        self._latest = 0.0  # when its newest byte came
        self._shown = float("-inf")  # when a state of a progress bar was last shown
        self._fresh = False  # bytes came since it was shown
        self._part = False  # some of it was shown already

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """The lines that are complete by `data`, without their newlines."""
        *lines, rest = (self._rest + data).split(b"\n")
        if lines or not self._rest:
            self._began = now
        if lines:
            if self._part and not last_state(lines[0]):
                lines = lines[1:]  # all of this line was shown
            self._part = False
        if data:
            self._latest, self._fresh = now, bool(rest)
        if len(rest) >= LONGEST:
            if b"\r" in rest:
                rest = b"\r" + last_state(rest)
            else:
                lines, rest, self._part, self._fresh = [*lines, rest], b"", True, False
        self._rest = rest
        return [last_state(line) for line in lines]

    def settled(self, now: float) -> list[bytes]:
        """The unfinished line, if it is time to show it."""
        if not self._rest or not self._fresh:
            return []
        if b"\r" in self._rest:
            if now < max(self._began + SETTLE, self._shown + PROGRESS):
                return []
            self._shown = now
        elif now < self._latest + SETTLE:
            return []
        return self.end()

    def end(self) -> list[bytes]:
        """What is left of the last line."""
        if not self._rest:
            return []
        found, self._rest, self._fresh, self._part = last_state(self._rest), b"", False, True
        return [found] if found else []


def last_state(line: bytes) -> bytes:
    """What a terminal shows of a line that was overwritten with carriage returns."""
    if b"\r" not in line:
        return line
    return next((state for state in reversed(line.split(b"\r")) if state), b"")


class Prefixed(io.TextIOBase):
    """A stream that puts the writing thread's prefix before each of its lines, and never mixes two lines.

    A thread without a prefix writes through. `buffer` takes bytes, as sys.stdout.buffer does.
    """

    def __init__(self, stream: TextIO, quiet: bool = False) -> None:
        """`quiet`: a full disk is no error, for what is said beside the result."""
        self._stream = stream
        self._quiet = quiet
        self._local = threading.local()
        self._lock = threading.Lock()
        self._over = False
        self._failure: OSError | None = None  # the first thread to notice tells the others
        self.buffer = _Bytes(self)

    def begin(self, prefix: str) -> None:
        self._local.prefix = self._encoded(prefix)
        self._local.lines = Lines()

    def end(self) -> None:
        """Write what is left of the thread's last line."""
        self._put(self._local.lines.end())
        del self._local.prefix

    def give_up(self) -> None:
        """Nobody reads the stream any more: every thread that writes to it hears of that."""
        self._fail(BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)))

    def _fail(self, error: OSError) -> None:
        self._failure = self._failure or error

    def _check(self) -> None:
        """Raise BrokenPipeError or output.Unwritable if an earlier write failed."""
        if self._failure is not None:
            output.raise_for(self._failure)

    def silence(self) -> None:
        """What threads with a prefix still write goes nowhere."""
        self._over = True

    def write_bytes(self, data: bytes) -> None:
        if hasattr(self._local, "prefix"):
            self._put(self._local.lines.feed(data, time.monotonic()))
        else:
            self._out(data)

    def write(self, text: str) -> int:
        if hasattr(self._local, "prefix"):
            self.write_bytes(self._encoded(text))
        else:
            with self._turn():
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        if hasattr(self._local, "prefix"):
            self._check()
            self._put(self._local.lines.settled(time.monotonic()))
        else:
            with self._turn():
                self._stream.flush()

    def _turn(self) -> contextlib.AbstractContextManager[Any]:
        """Nobody else writes meanwhile. (After `silence` one may be stuck at a pipe that nobody empties.)"""
        return contextlib.nullcontext() if self._over else self._lock

    def _put(self, lines: list[bytes]) -> None:
        if not lines:
            return
        if self.isatty():
            lines = [line + PLAIN if b"\x1b" in line else line for line in lines]
        self._out(b"".join(b"%s%s\n" % (self._local.prefix, line) for line in lines))

    def _out(self, data: bytes) -> None:
        """Write past Python's own buffer, whose lock a thread that waits there would hold to the very end."""
        with self._turn():
            if self._over and hasattr(self._local, "prefix"):
                return
            self._check()
            try:
                self._stream.flush()
                descriptor = self._stream.fileno()
            except (OSError, ValueError):  # a stream of a test
                self._stream.write(data.decode(errors="replace"))
                return
            view = memoryview(data)
            try:
                while view:
                    view = view[os.write(descriptor, view) :]
            except OSError as error:
                if not self._quiet or error.errno == errno.EPIPE:
                    self._fail(error)
                    self._check()

    def _encoded(self, text: str) -> bytes:
        return text.encode(self.encoding or "utf-8", "replace")

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding


class _Bytes(io.RawIOBase):
    """The bytes side of a `Prefixed`."""

    def __init__(self, text: Prefixed) -> None:
        self._text = text

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._text.isatty()

    def fileno(self) -> int:
        return self._text.fileno()

    @property
    def encoding(self) -> str:
        return self._text.encoding

    def give_up(self) -> None:
        self._text.give_up()

    def write(self, data: Any) -> int:
        self._text.write_bytes(bytes(data))
        return len(data)

    def flush(self) -> None:
        with contextlib.suppress(ValueError):  # Python flushes what it clears away
            self._text.flush()
