"""Follow a run's log: each byte once, in order, from any offset, across rotation, restarts and lost links.

What is read, and when it is over, is decided where the log lies, by `deploy.log_reader`: in this process for
a run of this machine, else by a reader on the host, which is started again at the byte where a connection
broke off. How it is shown is `deploy.screen`'s.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Generator
from typing import BinaryIO

from deploy import log_reader, onhost
from deploy import stream as streams
from deploy.errors import DeployError
from deploy.host import Host, HostError
from deploy.inotify import Watch
from deploy.log_reader import Event, Wanted
from deploy.screen import Screen, quiet, unread
from deploy.stream import to_stderr

Note = Callable[[str], None]


def follow(
    host: Host,
    run_path: str,
    *,
    lines: int | None = None,
    from_offset: int | None = None,
    out: BinaryIO,
    follow: bool = True,
    since: float | None = None,
    grep: str | None = None,
    note: Note = to_stderr,
) -> int | None:
    """Copy a run's log to `out` as it grows, until the run ends; return the run's exit code.

    Begins with the last `lines`, at `from_offset` (a byte offset in the run's log), or with its first byte
    that is still there; with `since` (Unix time by the host's clock), at the earliest with what was written
    then. `grep` leaves lines that match this expression, and launch's own; `lines` then counts matches.
    Without `follow`, copies what is there and returns the exit code, or None if the run has not ended. None
    also when nobody reads `out` any more (``| head``). What is not part of the log goes to `note`, in
    sentences: bytes that were removed unread, an end without a record, a connection that was lost.
    """
    return _show(host, Wanted("", None, run_path, lines, from_offset, follow, since, grep), out, note)


def follow_name(
    host: Host,
    state_root: str,
    name: str,
    *,
    lines: int | None = None,
    out: BinaryIO,
    follow: bool = True,
    since: float | None = None,
    grep: str | None = None,
    note: Note = to_stderr,
) -> int | None:
    """The same for whatever run of `name` there is, going on to the next one when one starts.

    `since` without `lines` begins with an earlier run if that said something since then.
    Ends with the exit code of a run that ended and has no successor. Raises DeployError if the name has no
    run at all.
    """
    return _show(host, Wanted(state_root, name, None, lines, None, follow, since, grep), out, note)


def _show(host: Host, wanted: Wanted, out: BinaryIO, note: Note) -> int | None:
    screen = Screen(out, note)
    # A process of its own can be ended while an expression tries for ever; this one would hear of nothing.
    apart = not host.is_local or wanted.grep is not None
    events = there(host, wanted, screen.say) if apart else here(wanted)
    with contextlib.closing(events):
        try:
            for event in events:
                if event.kind == "data":
                    screen.write(event.data)
                elif event.kind == "run":
                    screen.begin()
                elif event.kind == "note":
                    screen.say(event.data.decode())
                elif event.kind == "finish":
                    screen.finish()
                elif event.kind == "idle":
                    if unread(out):
                        raise BrokenPipeError
                    screen.rest()
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
        except KeyboardInterrupt:
            screen.leave()
            raise
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
                elif event.kind in ("data", "idle") and at.offset is not None:
                    at = at._replace(offset=max(at.offset, event.offset))
                yield event
            if not data:
                return
