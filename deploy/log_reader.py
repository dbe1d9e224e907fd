"""Reads a run's log as it grows: each byte once, in order, from any offset, across rotation and attempts.

Runs on both sides: for a run of this machine inside `deploy.logs`, for one elsewhere ON the host as a child
of the connection (`stream`), where it ends with its stdin. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

from deploy.inotify import Watch
from deploy.segments import Segments
from trainer import status

POLL = 0.01  # seconds between two looks at the end of the log, where nothing wakes us
CHECK = 0.25  # seconds between two looks at everything else: has it ended, is it there at all
ALIVE = 1.0  # seconds between two signs of life of a stream
START_PATIENCE = 60.0  # seconds that a run may take from run.json to its first sign of life
SETTLE = 1.0  # seconds for exit.json to appear once launch has let go of its lock
UNKNOWN_CODE = 1  # for a run that has ended without saying how


class Event(NamedTuple):
    """Something to show: `kind` is one of the following, `offset` and `data` what belongs to it.

    run     the log of the run in the directory `data` follows, from `offset` on
    data    these bytes of the log, which begin at `offset`
    note    a sentence that is not part of the log
    finish  the run has written its last byte
    idle    nothing for now
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
    lines: int | None = None  # begin with the last lines
    offset: int | None = None  # else at an offset; else with the first byte that is still there
    follow: bool = True


Pause = Callable[[Watch, float], bool]


def read(wanted: Wanted, pause: Pause) -> Generator[Event, None, None]:
    """The events of what is `wanted`, to its end.

    `pause` waits for the watch of the log's directory, some seconds at most; it returns False when nobody
    listens any more.
    """
    runs = f"{wanted.state_root}/runs"
    if wanted.run_path is not None:
        run = status.RunDir(wanted.run_path)
    else:
        chosen = choose(status.list_runs(runs, wanted.name))
        if chosen is None:
            yield Event("none")
            return
        run = chosen
    lines, offset = wanted.lines, wanted.offset
    while True:
        follower = Follower(str(run.path), pause)
        code = None
        with contextlib.closing(follower):
            if lines is not None:
                follower.offset = follower.log.last_lines(lines)
            elif offset is not None:
                follower.offset = offset
            else:
                follower.offset = (follower.log.starts() or [0])[0]
            yield Event("run", follower.offset, os.fsencode(run.path))
            code = yield from follower.run(wanted.follow)
        successor = None
        if wanted.name is not None and wanted.follow and not follower.left:
            successor = following(wanted.state_root, wanted.name, run)
        if successor is None:
            yield Event("end", 0, json.dumps(code).encode())
            return
        yield note(f"── {run.path.name} {how_it_ended(run)} · {successor.path.name} follows")
        run, lines, offset = successor, None, None


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


def following(state_root: str, name: str, run: status.RunDir) -> status.RunDir | None:
    """The next run of `name` that has begun or is about to. A switch makes its directory before it stops
    the old run, so there is no moment between the two at which a successor could be missed."""
    number = status.split_run_id(run.path.name)[0]
    for other in status.list_runs(f"{state_root}/runs", name):
        if status.split_run_id(other.path.name)[0] > number and (begun(other) or pending(other)[0]):
            return other
    return None


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

    def __init__(self, run_path: str, pause: Pause) -> None:
        self.directory = status.RunDir(run_path)
        self.log = Segments(self.directory.log)
        self.watch = Watch(self.directory.log)
        self.offset = 0
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
                    yield Event("finish")
                    if why:
                        yield note(why)
                    return code
                yield Event("idle")
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
                yield note(f"── {gone:,} bytes of this log are gone: their segments were removed")
            self.offset = offset + len(data)
            yield Event("data", offset, data)

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
        except (ValueError, TypeError) as error:
            return True, UNKNOWN_CODE, f"── run {run.path.name} cannot be followed: {error}"
        why = "killed, or the machine restarted"
        return True, UNKNOWN_CODE, f"── run {run.path.name} ended without a record of its end: {why}"


# -- over a connection -------------------------------------------------------------------------------------


def stream(*fields: Any) -> None:
    """Write the events of `Wanted(*fields)` to stdout, with a sign of life now and then."""
    last = time.monotonic()
    with contextlib.suppress(BrokenPipeError):
        for event in read(Wanted(*fields), listened):
            if event.kind == "idle" and time.monotonic() - last < ALIVE:
                continue
            last = time.monotonic()
            send(HEADER.pack(KINDS.index(event.kind), event.offset, len(event.data)) + event.data)


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
