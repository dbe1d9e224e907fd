"""Processes of a run: whose they are, what the kernel says of them, and their end.

The trainer gets a session of its own, so that a session id names what belongs to it. launch is also the
subreaper of all it started: a descendant that made a session of its own and lost its parent comes back to
launch, and is found as its descendant.

Standard library only and Python >= 3.9; Linux.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int | bytes) -> None:
    """prctl(2) with one argument. Raises OSError."""
    argument = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    if _libc.prctl(option, argument, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


# -- what /proc says ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Process:
    """One line of /proc/PID/stat."""

    pid: int
    parent: int
    session: int
    state: str  # R, S, D, T ...; Z and X have ended
    started: int  # clock ticks since boot; with the pid it names a process for good
    name: str

    @property
    def ended(self) -> bool:
        return self.state in "ZX"


def parse_stat(text: str) -> Process:
    """Parse /proc/PID/stat; the name in it may hold blanks and parentheses."""
    head, _, tail = text.rpartition(")")
    pid, _, name = head.partition("(")
    fields = tail.split()
    return Process(int(pid), int(fields[1]), int(fields[3]), fields[0], int(fields[19]), name)


def read_process(pid: int) -> Process | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return parse_stat(file.read())
    except (OSError, ValueError, IndexError):
        return None


def all_processes() -> dict[int, Process]:
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            process = read_process(int(entry))
            if process is not None:
                found[process.pid] = process
    return found


def read_bytes(pid: int, name: str) -> bytes:
    """/proc/PID/`name`; empty if it cannot be read or the process has ended."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


def command_line(pid: int, limit: int = 120) -> str:
    """The command of a process as one line for people, at most `limit` characters."""
    words = read_bytes(pid, "cmdline").rstrip(b"\0").split(b"\0")
    text = b" ".join(words).decode("utf-8", "replace")
    if not text:
        process = read_process(pid)
        text = f"[{process.name}]" if process else "?"
    text = "".join(c if c.isprintable() else "·" for c in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def catches(status: bytes, number: int) -> bool:
    """Whether a process with this /proc/PID/status has a handler for signal `number`."""
    for line in status.splitlines():
        if line.startswith(b"SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def of_session(processes: Mapping[int, Process], leader: int, started: int) -> list[Process]:
    """The living processes of the session that `leader` (started at `started`) made.

    A session id cannot be given to another process while a member lives; once the last is gone it can, and
    then its new leader started at another time.
    """
    current = processes.get(leader)
    if current is not None and current.started != started:
        return []
    return [p for p in processes.values() if p.session == leader and p.started >= started and not p.ended]


def descendants(processes: Mapping[int, Process], ancestor: int) -> list[Process]:
    """The living processes below `ancestor`, without it."""
    children: dict[int, list[Process]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    waiting = [ancestor]
    while waiting:
        for child in children.get(waiting.pop(), []):
            waiting.append(child.pid)
            if not child.ended:
                found.append(child)
    return found


def send(process: Process, number: int) -> bool:
    """Send a signal to exactly this process, not to another that has its pid by now."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except (OSError, AttributeError):
        descriptor = -1
    try:
        current = read_process(process.pid)
        if current is None or current.started != process.started or current.ended:
            return False
        if descriptor >= 0:
            signal.pidfd_send_signal(descriptor, number)
        else:
            os.kill(process.pid, number)
    except OSError:
        return False
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return True


# -- what launch acts on -----------------------------------------------------------------------------------


class Signals:
    """The signals that launch acts on, readable from a descriptor; caught from the moment this is made."""

    CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)

    def __init__(self) -> None:
        self.descriptor, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a run outlives every login; the trainer inherits it
        for number in self.CAUGHT:
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])

    def read(self) -> list[int]:
        try:
            return list(os.read(self.descriptor, 4096))
        except BlockingIOError:
            return []


class Family:
    """The processes of one run: the trainer's session, and what came from it and left that session."""

    def __init__(self) -> None:
        self.trainer: Process | None = None  # of the current attempt
        self.not_ours: set[int] = set()  # children of launch that are not the run's
        self._first = 0  # clock ticks: nothing that started earlier came from a trainer

    def begin(self, trainer: Process) -> None:
        self.trainer = trainer
        self._first = self._first or trainer.started

    def members(self) -> list[Process]:
        """Those that live, by pid."""
        if self.trainer is None:
            return []
        processes = all_processes()
        found = {p.pid: p for p in of_session(processes, self.trainer.pid, self.trainer.started)}
        found.update((p.pid, p) for p in descendants(processes, os.getpid()) if p.started >= self._first)
        return [found[pid] for pid in sorted(found) if pid not in self.not_ours]


def describe(processes: list[Process]) -> str:
    """Processes for people: pid and command of each."""
    return ", ".join(f"pid {p.pid} ({command_line(p.pid, 60)})" for p in processes)
