"""Follow a run's log: each byte once, in order, from any offset, across rotation, restarts and lost links.

What is read, and when it is over, is decided where the log lies, by `deploy.log_reader`: in this process for
a run of this machine, else by a reader on the host, which is started again at the byte where a connection
broke off.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
from collections.abc import Callable, Generator
from typing import BinaryIO

from deploy import log_reader, onhost
from deploy import stream as streams
from deploy.errors import DeployError
from deploy.host import Host, HostError
from deploy.inotify import Watch
from deploy.log_reader import Event, Wanted
from deploy.stream import to_stderr
from deploy.terminal import Neutraliser

Note = Callable[[str], None]


def follow(
    host: Host,
    run_path: str,
    *,
    lines: int | None = None,
    from_offset: int | None = None,
    out: BinaryIO,
    follow: bool = True,
    note: Note = to_stderr,
) -> int | None:
    """Copy a run's log to `out` as it grows, until the run ends; return the run's exit code.

    Begins with the last `lines`, at `from_offset` (a byte offset in the run's log), or with its first byte
    that is still there. Without `follow`, copies what is there and returns the exit code, or None if the run
    has not ended. None also when nobody reads `out` any more (``| head``). What is not part of the log goes
    to `note`, in sentences: bytes that were removed before they could be read, an end without a record.
    """
    return _show(host, Wanted("", None, run_path, lines, from_offset, follow), out, note)


def follow_name(
    host: Host,
    state_root: str,
    name: str,
    *,
    lines: int | None = None,
    out: BinaryIO,
    follow: bool = True,
    note: Note = to_stderr,
) -> int | None:
    """The same for whatever run of `name` there is, going on to the next one when one starts.

    Ends with the exit code of a run that ended and has no successor. Raises DeployError if the name has no
    run at all.
    """
    return _show(host, Wanted(state_root, name, None, lines, None, follow), out, note)


def _show(host: Host, wanted: Wanted, out: BinaryIO, note: Note) -> int | None:
    screen = Screen(out, note)
    events = here(wanted) if host.is_local else there(host, wanted, screen.say)
    with contextlib.closing(events):
        try:
            for event in events:
                if event.kind == "data":
                    screen.write(event.data)
                elif event.kind == "note":
                    screen.say(event.data.decode())
                elif event.kind == "finish":
                    screen.finish()
                elif event.kind == "idle" and unread(out):
                    raise BrokenPipeError
                elif event.kind == "none":
                    raise DeployError(
                        f"{host.name} has no run of {wanted.name}, so no log of it: fab deploy starts one"
                    )
                elif event.kind == "end":
                    code: int | None = json.loads(event.data)
                    return code
        except BrokenPipeError:
            quiet(out)
            return None
    raise HostError(f"{host.name}: the log ended before its reader said so; fab tail goes on with it")


def here(wanted: Wanted) -> Generator[Event, None, None]:
    """The events of a log of this machine."""

    def pause(watch: Watch, seconds: float) -> bool:
        watch.wait(seconds)
        return True

    return log_reader.read(wanted, pause)


def there(host: Host, wanted: Wanted, note: Note) -> Generator[Event, None, None]:
    """The events of a log on another machine; after a loss from the byte on that is wanted next."""
    at = wanted
    parser = log_reader.Parser()
    with streams.listening(host, lambda: onhost.open(host, "deploy.log_reader:stream", *at), note) as step:
        while True:
            data = step()
            if data is None:
                parser = log_reader.Parser()
                continue
            for event in parser.feed(data):
                if event.kind == "run":
                    known = at.run_path == os.fsdecode(event.data) and at.offset == event.offset
                    at = at._replace(run_path=os.fsdecode(event.data), lines=None, offset=event.offset)
                    if known:
                        continue
                elif event.kind == "data":
                    at = at._replace(offset=event.offset + len(event.data))
                yield event
            if not data:
                return


class Screen:
    """Where a log is shown: a file as it is, a terminal made safe."""

    def __init__(self, out: BinaryIO, note: Note) -> None:
        self.out = out
        self.note = note
        self.terminal = Neutraliser() if out.isatty() else None
        self.line_open = False  # the last byte shown was no newline

    def write(self, data: bytes) -> None:
        shown = self.terminal.feed(data) if self.terminal else data
        self.out.write(shown)
        self.out.flush()
        self.line_open = not data.endswith(b"\n")

    def finish(self) -> None:
        if self.terminal:
            self.out.write(self.terminal.feed(b"", final=True) + (b"\n" if self.line_open else b""))
            self.out.flush()
            self.line_open = False

    def say(self, sentence: str) -> None:
        if self.terminal and self.line_open:
            self.out.write(b"\n")
            self.out.flush()
            self.line_open = False
        self.note(sentence)


def unread(out: BinaryIO) -> bool:
    """Whether `out` is a pipe that nobody reads any more: a quiet log would hide that for ever."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        poll = select.poll()
        poll.register(out.fileno(), 0)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    return False


def quiet(out: BinaryIO) -> None:
    """Let Python's own flush at exit find somewhere to write, so that ``| head`` ends without a word."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, out.fileno())
        os.close(null)
