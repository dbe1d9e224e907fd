"""Reads a run's log as it grows: each byte once, in order, from any offset, across rotation and attempts.

Runs on both sides: for a run of this machine inside `deploy.logs`, for one elsewhere ON the host as a child
of the connection (`stream`), where it ends with its stdin. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import struct
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple, TypeVar

from deploy.errors import DeployError
from deploy.inotify import Watch
from deploy.log_filter import Filter, compiled, find_last_matches, matching_for
from deploy.log_times import find_since
from deploy.segments import Segments
from deploy.sizes import age
from trainer import status

POLL = 0.01  # seconds between two looks at the end of the log, where nothing wakes us
CHECK = 0.25  # seconds between two looks at everything else: has it ended, is it there at all
ALIVE = 1.0  # seconds between two signs of life of a stream
START_PATIENCE = 60.0  # seconds that a run may take from run.json to its first sign of life
SETTLE = 1.0  # seconds for exit.json to appear once launch has let go of its lock
MATCHING = 2.0  # seconds of CPU after which an expression counts as one that never ends
UNKNOWN_CODE = 1  # for a run that has ended without saying how


class Event(NamedTuple):
    """Something to show: `kind` is one of the following, `offset` and `data` what belongs to it.

    run     the log of the run in the directory `data` follows, from `offset` on
    data    these bytes of the log; it goes on at `offset` behind them
    note    a sentence that is not part of the log
    finish  the run has written its last byte
    idle    nothing to show for now; the log goes on at `offset`, if that is not 0
    none    there is no run of that name
    end     that was all; the exit code as JSON
    """

    kind: str
    offset: int = 0
    data: bytes = b""


KINDS = ("run", "data", "note", "finish", "idle", "none", "end")
HEADER = struct.Struct(">BQI")  # of an event in a stream: its number in KINDS, offset, length of the data


class Wanted(NamedTuple):
    """What is to be read. With a name, the reader goes on to the name's next run when one starts."""

    state_root: str
    name: str | None  # None: only the run in `run_path`
    run_path: str | None  # None: the run that the name means
    lines: int | None = None  # begin with the last lines (that match)
    offset: int | None = None  # else at an offset; else with the first byte that is still there
    follow: bool = True
    since: float | None = None  # nothing that was written before this Unix time, by the host's clock
    grep: str | None = None  # only lines that match this expression, and launch's own


Pause = Callable[[Watch, float], bool]
Found = TypeVar("Found")


def read(wanted: Wanted, pause: Pause) -> Generator[Event, None, None]:
    """The events of what is `wanted`, to its end.

    `pause` waits for the watch of the log's directory, some seconds at most; it returns False when nobody
    listens any more.
    """
    expression = None if wanted.grep is None else compiled(wanted.grep)
    moment = wanted.since
    meant = None if wanted.name is None else choose(known_runs(wanted))
    if wanted.run_path is not None:
        run = status.RunDir(wanted.run_path)
    elif meant is None:
        yield Event("none")
        return
    elif moment is None or wanted.lines is not None:
        run = meant
    else:
        run = yield from silently(first_since(known_runs(wanted), meant, moment))
    lines, offset = wanted.lines, wanted.offset
    while True:
        follower = Follower(str(run.path), pause, expression)
        code = None
        with contextlib.closing(follower):
            if offset is None:
                follower.offset = yield from silently(beginning(follower.log, lines, moment, expression))
                if follower.offset > (follower.log.starts() or [0])[0]:
                    yield note(f"── run {run.path.name}, {part(lines, wanted)}")
            else:
                follower.offset = offset
            yield Event("run", follower.offset, os.fsencode(run.path))
            code = yield from follower.run(wanted.follow)
        successor = None
        if wanted.name is not None and not follower.left:
            if wanted.follow:
                successor = following(known_runs(wanted), run)
            elif meant is not None:
                successor = next(
                    (other for other in later(known_runs(wanted), run, meant) if begun(other)), None
                )
        if successor is None:
            yield Event("end", 0, json.dumps(code).encode())
            return
        yield note(f"── {run.path.name} {how_it_ended(run)} · {successor.path.name} follows")
        run, lines, offset, moment = successor, None, None, None


def known_runs(wanted: Wanted) -> list[status.RunDir]:
    return status.list_runs(f"{wanted.state_root}/runs", wanted.name)


def silently(search: Generator[None, None, Found]) -> Generator[Event, None, Found]:
    """The value of a search that takes its time; meanwhile a sign of life now and then."""
    while True:
        try:
            next(search)
        except StopIteration as found:
            value: Found = found.value
            return value
        yield Event("idle")


def beginning(
    log: Segments, lines: int | None, moment: float | None, expression: re.Pattern[str] | None
) -> Generator[None, None, int]:
    """Where in a log to begin: at the later one of its last lines and a moment, else with its first byte."""
    offset = (log.starts() or [0])[0]
    if moment is not None:
        offset = max(offset, (yield from find_since(log, moment)))
    if lines is not None and expression is not None:
        offset = max(offset, (yield from find_last_matches(log, expression, lines)))
    elif lines is not None:
        offset = max(offset, (yield from log.find_last(lines)))
    return offset


def part(lines: int | None, wanted: Wanted) -> str:
    """What is shown of a log that is not shown from its beginning, in words."""
    past = "" if wanted.since is None else age(time.time() - wanted.since)
    if lines is None:
        return f"the last {past}"
    of = f", none older than {past}" if past else ""
    if not lines:
        return f"from now on{of}"
    one, more = ("line", "lines") if wanted.grep is None else ("match", "matches")
    return f"its last {one if lines == 1 else f'{lines:,} {more}'}{of}"


def first_since(
    runs: list[status.RunDir], meant: status.RunDir, moment: float
) -> Generator[None, None, status.RunDir]:
    """The first run of a name of which something was written at `moment` or later, at the latest `meant`."""
    found = meant
    for run in reversed(runs):
        if number(run) >= number(meant) or not begun(run):
            continue
        log = Segments(run.log)
        if (yield from find_since(log, moment)) >= log.end():
            break
        found = run
    return found


def note(sentence: str) -> Event:
    """A sentence for a terminal: what a run has written into its own files must not steer that."""
    shown = "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in sentence)
    return Event("note", 0, shown.encode("utf-8", "replace"))


def choose(runs: list[status.RunDir]) -> status.RunDir | None:
    """The run that a person means by its name: the one in progress, else the newest that ever began."""
    for wanted in (status.RunDir.alive, begun, lambda run: True):
        for run in reversed(runs):
            if wanted(run):
                return run
    return None


def begun(run: status.RunDir) -> bool:
    return bool(Segments(run.log).starts())


def following(runs: list[status.RunDir], run: status.RunDir) -> status.RunDir | None:
    """The next run of a name that has begun or is about to. A switch makes its directory before it stops
    the old run, so there is no moment between the two at which a successor could be missed."""
    return next((other for other in later(runs, run) if begun(other) or pending(other)[0]), None)


def later(
    runs: list[status.RunDir], run: status.RunDir, last: status.RunDir | None = None
) -> Iterator[status.RunDir]:
    """Those after `run`, up to `last`."""
    for other in runs:
        if number(other) > number(run) and (last is None or number(other) <= number(last)):
            yield other


def number(run: status.RunDir) -> int:
    return status.split_run_id(run.path.name)[0]


def pending(run: status.RunDir) -> tuple[bool, str]:
    """Of a run that has not begun: (may it still begin, else why it did not)."""
    switch = status.read_json(run.path / "switch.json")
    outcome = switch.get("outcome") if isinstance(switch, dict) else None
    if isinstance(switch, dict) and outcome == "failed":
        return False, f"was not started: {switch.get('reason')}"
    made = run.run()
    if outcome == "running" or (made and time.time() - made.created < START_PATIENCE):
        return True, ""
    return False, "never began"


def how_it_ended(run: status.RunDir) -> str:
    with contextlib.suppress(ValueError, TypeError):
        exit = run.exit()
        if exit:
            return f"{exit.reason} with exit code {exit.code}"
    return "ended without a record"


class Follower:
    """Reads one run's log."""

    def __init__(self, run_path: str, pause: Pause, expression: re.Pattern[str] | None = None) -> None:
        self.directory = status.RunDir(run_path)
        self.log = Segments(self.directory.log)
        self.watch = Watch(self.directory.log)
        self.offset = 0  # of the next byte to be read
        self.filter = None if expression is None else Filter(expression)
        self.pause = pause
        self.left = False  # nobody listens any more

    def close(self) -> None:
        self.log.close()
        self.watch.close()

    def run(self, follow: bool) -> Generator[Event, None, int | None]:
        """The run's events to its end; the generator's value is its exit code."""
        next_check = 0.0
        while True:
            self.watch.begin()  # before the look, so that nothing is written unseen between that and the wait
            yield from self.copy()
            now = time.monotonic()
            if now >= next_check or not follow:
                next_check = now + CHECK
                ended, code, why = self.end(follow)
                if ended or not follow:
                    yield from self.copy()  # what was written between our last look and the end
                    yield from self.shown(self.filter.end() if self.filter else b"")
                    yield Event("finish")
                    if why:
                        yield note(why)
                    return code
                yield Event("idle", self.goes_on)
            if not self.pause(self.watch, POLL):
                self.left = True
                return None

    def copy(self) -> Iterator[Event]:
        """All that is there of the log now."""
        while True:
            offset, data = self.log.read(self.offset)
            if not data:
                return
            if offset > self.offset:
                gone = offset - self.offset
                yield from self.shown(self.filter.end() if self.filter else b"")
                yield note(f"── {gone:,} bytes of this log are gone: their segments were removed")
            self.offset = offset + len(data)
            if self.filter is None:
                yield from self.shown(data)
            else:
                yield from self.shown(self.filter.feed(data))
                yield Event("idle", self.goes_on)

    @property
    def goes_on(self) -> int:
        """Where whoever has seen all that was shown so far begins anew."""
        return self.offset - (self.filter.held if self.filter else 0)

    def shown(self, data: bytes) -> Iterator[Event]:
        if data:
            yield Event("data", self.goes_on, data)

    def end(self, follow: bool) -> tuple[bool, int | None, str]:
        """(has the run ended, its exit code, what to say about it)."""
        run = self.directory
        try:
            alive = run.alive()
            exit = run.exit()
            if exit is not None:
                return True, exit.code, ""
            if alive or not follow:
                return False, None, ""
            if not run.path.is_dir():
                return True, UNKNOWN_CODE, f"── the directory of run {run.path.name} is gone"
            if run.launch() is None and not self.log.starts():
                may_begin, why = pending(run)
                return not may_begin, None if may_begin else UNKNOWN_CODE, f"── run {run.path.name} {why}"
            deadline = time.monotonic() + SETTLE
            while time.monotonic() < deadline:  # launch lets go of its lock after exit.json; or it was killed
                time.sleep(POLL)
                exit = run.exit()
                if exit is not None:
                    return True, exit.code, ""
                if run.alive():  # it was between taking its files and its lock
                    return False, None, ""
            made = run.run()
            if made and made.adopted:
                pid = made.adopted.get("pid")
                return True, UNKNOWN_CODE, f"── process {pid} has ended; how is not known, as it was adopted"
        except (ValueError, TypeError) as error:
            return True, UNKNOWN_CODE, f"── run {run.path.name} cannot be followed: {error}"
        why = "killed, or the machine restarted"
        return True, UNKNOWN_CODE, f"── run {run.path.name} ended without a record of its end: {why}"


# -- over a connection -------------------------------------------------------------------------------------


def stream(*fields: Any) -> None:
    """Write the events of `Wanted(*fields)` to stdout, with a sign of life now and then."""
    wanted = Wanted(*fields)
    last = time.monotonic()
    if wanted.grep is not None:
        limit_matching(wanted.grep)
    with contextlib.suppress(BrokenPipeError):
        for event in read(wanted, listened):
            if event.kind == "idle" and time.monotonic() - last < ALIVE:
                continue
            last = time.monotonic()
            send(HEADER.pack(KINDS.index(event.kind), event.offset, len(event.data)) + event.data)


def limit_matching(expression: str) -> None:
    """End this process if an expression like ``(a+)+$`` tries for ever, deaf to the end of its stdin.

    Python looks for signals while it matches.
    """

    def look(*_: Any) -> None:
        if matching_for() > MATCHING:
            raise DeployError(
                f"--grep {expression!r} takes more than {MATCHING:g} s for one line; make it simpler "
                "(a repetition within a repetition tries every way to share a line among them)"
            )

    signal.signal(signal.SIGVTALRM, look)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.5, 0.5)


def send(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


def listened(watch: Watch, seconds: float) -> bool:
    """Wait; whether somebody still listens, which the end of stdin denies."""
    return not watch.wait(seconds, [0]) or bool(os.read(0, 4096))


class Parser:
    """Events from the bytes of a stream, however they were cut."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Event]:
        self._rest += data
        position = 0
        while len(self._rest) - position >= HEADER.size:
            kind, offset, length = HEADER.unpack_from(self._rest, position)
            end = position + HEADER.size + length
            if len(self._rest) < end:
                break
            yield Event(KINDS[kind], offset, bytes(self._rest[position + HEADER.size : end]))
            position = end
        del self._rest[:position]
