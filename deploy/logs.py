"""Follow a run's log: each byte once, in order, from any offset, across rotation, attempts and restarts."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable
from typing import BinaryIO

from deploy.errors import DeployError
from deploy.host import Host, Local
from deploy.segments import Segments
from deploy.terminal import Neutraliser
from trainer import status

POLL = 0.01  # seconds between two looks at the end of the log: a tenth of what a reader notices
CHECK = 0.25  # seconds between two looks at everything else: has it ended, is it there at all
START_PATIENCE = 60.0  # seconds that a run may take from run.json to its first sign of life
SETTLE = 1.0  # seconds for exit.json to appear once launch has let go of its lock
UNKNOWN_CODE = 1  # for a run that has ended without saying how


def to_stderr(sentence: str) -> None:
    """Say something about the log that is not a part of it."""
    print(sentence, file=sys.stderr, flush=True)


def follow(
    host: Host,
    run_path: str,
    *,
    lines: int | None = None,
    from_offset: int | None = None,
    out: BinaryIO,
    follow: bool = True,
    note: Callable[[str], None] = to_stderr,
) -> int | None:
    """Copy a run's log to `out` as it grows, until the run ends; return the run's exit code.

    Begins with the last `lines`, at `from_offset` (a byte offset in the run's log), or with its first byte
    that is still there. Without `follow`, copies what is there and returns the exit code, or None if the run
    has not ended. None also when nobody reads `out` any more (``| head``). What is not part of the log goes
    to `note`, in sentences: bytes that were removed before they could be read, an end without a record.
    """
    return _copy(host, run_path, lines, from_offset, out, follow, note)


def follow_name(
    host: Host,
    state_root: str,
    name: str,
    *,
    lines: int | None = None,
    out: BinaryIO,
    follow: bool = True,
    note: Callable[[str], None] = to_stderr,
) -> int | None:
    """The same for whatever run of `name` there is, going on to the next one when one starts.

    Ends with the exit code of a run that ended and has no successor. Raises DeployError if the name has no
    run at all.
    """
    run = choose(status.list_runs(f"{state_root}/runs", name))
    if run is None:
        raise DeployError(f"{host.name} has no run of {name}, so no log of it: fab deploy starts one")
    while True:
        code = _copy(host, str(run.path), lines, None, out, follow, note)
        if code is None or not follow:
            return code
        successor = following(state_root, name, run)
        if successor is None:
            return code
        note(f"── {run.path.name} {how_it_ended(run)} · {successor.path.name} follows")
        run, lines = successor, None


def _copy(
    host: Host,
    run_path: str,
    lines: int | None,
    from_offset: int | None,
    out: BinaryIO,
    follow: bool,
    note: Callable[[str], None],
) -> int | None:
    if not isinstance(host, Local):
        raise DeployError(f"{host.name}: logs of other machines cannot be followed yet")
    with contextlib.closing(Follower(run_path, out, note)) as follower:
        try:
            if lines is not None:
                follower.offset = follower.log.last_lines(lines)
            elif from_offset is not None:
                follower.offset = from_offset
            else:
                follower.offset = (follower.log.starts() or [0])[0]
            return follower.run(follow)
        except BrokenPipeError:
            quiet(out)
            return None


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
    """Copies one run's log."""

    def __init__(self, run_path: str, out: BinaryIO, note: Callable[[str], None]) -> None:
        self.directory = status.RunDir(run_path)
        self.log = Segments(self.directory.log)
        self.offset = 0
        self.out = out
        self.note = note
        self.terminal = Neutraliser() if out.isatty() else None
        self.line_open = False  # the last byte shown was no newline

    def close(self) -> None:
        self.log.close()

    def run(self, follow: bool) -> int | None:
        next_check = 0.0
        while True:
            while self.copy():
                pass
            now = time.monotonic()
            if now >= next_check or not follow:
                next_check = now + CHECK
                ended, code, why = self.end(follow)
                if ended or not follow:
                    while self.copy():  # what was written between our last look and the end
                        pass
                    self.finish()
                    if why:
                        self.say(why)
                    return code
                if unread(self.out):
                    raise BrokenPipeError
            time.sleep(POLL)

    def copy(self) -> bool:
        """Show the next block of the log; False if there is none now."""
        offset, data = self.log.read(self.offset)
        if data:
            if offset > self.offset:
                self.say(
                    f"── {offset - self.offset:,} bytes of this log are gone: their segments were removed"
                )
            self.offset = offset + len(data)
            self.write(data)
        return bool(data)

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
