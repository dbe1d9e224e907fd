"""Where a log is shown: a file or a pipe gets its bytes as they are, a terminal what cannot harm it."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable
from typing import BinaryIO, Protocol, runtime_checkable

from deploy.errors import DeployError
from deploy.terminal import Neutraliser

Note = Callable[[str], None]


@runtime_checkable
class Shared(Protocol):
    def give_up(self) -> None: ...


class Screen:
    """The place of one log, and of sentences beside it."""

    def __init__(self, out: BinaryIO, note: Note) -> None:
        self.out = out
        self.note = note
        # The text layer above a terminal knows its encoding; `encoding` is what deploy.executor adds.
        self.terminal = Neutraliser(terminal_encoding(out)) if out.isatty() else None
        self.line_open = False  # the last byte shown was no newline

    def write(self, data: bytes) -> None:
        self._put(self.terminal.feed(data) if self.terminal else data)
        self.line_open = not data.endswith(b"\n")

    def rest(self) -> None:
        """Nothing comes for now: what `out` keeps back of an unfinished line may be shown."""
        self._put(b"")

    def begin(self) -> None:
        """Another run's bytes follow: its banner stands on a line of its own, in a file, too."""
        self._put(self._newline())

    def finish(self) -> None:
        """A run's last byte was written: the next one begins on a line, and in colours, of its own."""
        if self.terminal:
            self._put(self.terminal.feed(b"", final=True) + self.terminal.plain() + self._newline())

    def leave(self) -> None:
        """Whoever writes here next finds the colours that a terminal has by itself."""
        if self.terminal:
            self._put(self.terminal.plain())

    def say(self, sentence: str) -> None:
        if self.terminal and self.line_open:
            self._put(self.terminal.plain() + self._newline())
        self.note(sentence)

    def _newline(self) -> bytes:
        was_open, self.line_open = self.line_open, False
        return b"\n" if was_open else b""

    def _put(self, data: bytes) -> None:
        try:
            if data:
                self.out.write(data)
            self.out.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            quiet(self.out)
            raise DeployError(
                f"the log cannot be written to stdout: {error.strerror}; fab tail --since goes on with it"
            ) from None


def terminal_encoding(out: BinaryIO) -> str:
    """What the terminal behind `out` reads: as the text layer of stdout has it, which knows the locale."""
    import sys

    found = getattr(out, "encoding", None) or getattr(sys.stdout, "encoding", None)
    return found if isinstance(found, str) else "utf-8"


def unread(out: BinaryIO) -> bool:
    """Whether `out` is a pipe that nobody reads any more: a quiet log would hide that for ever."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        poll = select.poll()
        poll.register(out.fileno(), 0)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    return False


def quiet(out: BinaryIO) -> None:
    """Let Python's own flush at exit find somewhere to write, so that ``| head`` ends without a word.

    Several hosts share a stdout (`deploy.prefixed`): the others must hear why theirs is one that takes all.
    """
    if isinstance(out, Shared):
        out.give_up()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, out.fileno())
        os.close(null)
