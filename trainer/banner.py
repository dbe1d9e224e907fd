"""The first line of every attempt: what runs here, and proof that its output is not held back.

Standard library only and Python >= 3.9; Linux.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import select
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trainer.processes import Process, read_bytes, read_process
from trainer.status import Run

PROOF_SECONDS = 1.0  # how long to wait for the kernel to show the new program's environment
WRAPPED_SECONDS = 0.1  # how long to wait for a wrapper to become the program that it was told to run
# Programs that most often replace themselves by another one.
WRAPPERS = frozenset((
    "env", "sh", "bash", "dash", "ash", "ksh", "zsh", "busybox", "toybox", "coreutils", "nice", "ionice",
    "nohup", "stdbuf", "setsid", "taskset", "numactl", "chrt", "setpriv", "prlimit", "chroot", "unshare",
))  # fmt: skip
INITS = ("tini", "docker-init", "tini-static", "dumb-init", "catatonit")

_PYTHON = re.compile(r"(python|pypy)\d*(\.\d+)*t?")


def environment_flag(value: bytes) -> bool:
    """Whether CPython takes an environment variable with this value as set: any text but one that reads as 0.

    As `_Py_get_env_flag` does it: empty is off, a number counts unless it is 0, all other text is on.
    """
    return not re.fullmatch(rb"\s*[+-]?0+|", value)


def python_flags(argv: Sequence[bytes]) -> set[str]:
    """The one-letter switches that a Python interpreter was started with."""
    flags: set[str] = set()
    words = iter(argv[1:])
    for word in words:
        if not word.startswith(b"-") or word in (b"-", b"--"):
            break
        if word.startswith(b"--"):
            if word == b"--check-hash-based-pycs":
                next(words, None)
            continue
        letters = word[1:].decode("ascii", "replace")
        for position, letter in enumerate(letters):
            if letter in "cm":
                return flags
            if letter in "WX":
                if position == len(letters) - 1:
                    next(words, None)
                break
            flags.add(letter)
    return flags


@dataclass(frozen=True)
class Buffering:
    """Whether a process writes its stdout at once: None if that cannot be known."""

    unbuffered: bool | None
    why: str
    how: str = "unbuffered"  # when it does write at once


def judge(program: str, argv: Sequence[bytes], environment: Mapping[bytes, bytes]) -> Buffering:
    """Whether `program` (the executable's base name), started so, writes its stdout at once."""
    if not _PYTHON.fullmatch(program):
        return Buffering(None, f"unknown: {program} is not Python")
    flags = python_flags(argv)
    value = environment.get(b"PYTHONUNBUFFERED")
    heard = not flags & {"E", "I"}
    reasons = []
    if value is not None and environment_flag(value) and heard:
        reasons.append(f"PYTHONUNBUFFERED={value.decode('utf-8', 'replace')}")
    if "u" in flags:
        reasons.append("-u")
    if reasons:
        return Buffering(True, ", ".join(reasons))
    if not heard:
        ignoring = "-I" if "I" in flags else "-E"
        return Buffering(False, f"{ignoring} makes Python ignore PYTHONUNBUFFERED; add -u")
    return Buffering(False, "neither PYTHONUNBUFFERED nor -u")


def split_environment(raw: bytes) -> dict[bytes, bytes]:
    """What /proc/PID/environ holds."""
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if entry)
    return {name: value for name, _, value in pairs}


def program_of(pid: int) -> str:
    """The base name of what a process runs; empty if that cannot be read."""
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe").replace(" (deleted)", ""))
    except OSError:
        return ""


def wraps(pid: int) -> bool:
    """Whether a process runs what most often only starts another program in its own place."""
    return program_of(pid) in WRAPPERS


def settled(pid: int, reading: int) -> bool:
    """Wait a moment for `env python3 …` to become Python; whether it is no wrapper any more.

    `reading` is the end that its output comes from: no byte ever waits for this.
    """
    deadline = time.monotonic() + WRAPPED_SECONDS
    while wraps(pid):
        if select.select([reading], [], [], 0.001)[0] or time.monotonic() > deadline:
            return not wraps(pid)
    return True


def prove(pid: int) -> Buffering:
    """Judge a process that was just started by what the kernel says of it."""
    deadline = time.monotonic() + PROOF_SECONDS
    while True:
        program, argv, environment = program_of(pid), read_bytes(pid, "cmdline"), read_bytes(pid, "environ")
        if program and argv and environment:
            return judge(program, argv.rstrip(b"\0").split(b"\0"), split_environment(environment))
        process = read_process(pid)
        if process is None or process.ended:
            return Buffering(None, "unknown: it ended before it could be looked at")
        if time.monotonic() > deadline:
            return Buffering(None, f"unknown: /proc/{pid} cannot be read")
        time.sleep(0.001)


def on_terminal(pid: int, buffering: Buffering) -> Buffering:
    """The same for a process that was given a pseudo-terminal, by what its stdout is now.

    On one, C libraries and a Python without its switches write each line at its end.
    """
    try:
        terminal = os.readlink(f"/proc/{pid}/fd/1")
    except OSError:  # it has ended, or closed it
        return buffering
    if not terminal.startswith("/dev/pts/"):
        why = f"{buffering.why}; {terminal}, not the terminal that tty: true gave it"
        return replace(buffering, why=why)
    if buffering.unbuffered:
        return replace(buffering, why=f"{buffering.why}, {terminal}")
    return Buffering(True, f"tty: true, {terminal}", "line by line")


def python_version(pid: int) -> str:
    """The version of a process that runs Python: ours exactly, another by its program's name."""
    try:
        program = os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""
    if program == os.path.realpath(sys.executable):
        return f"Python {platform.python_version()}"
    name = os.path.basename(program)
    return f"Python ({name})" if _PYTHON.fullmatch(name) else ""


def warnings(environment: Mapping[bytes, bytes]) -> list[str]:
    """What the environment that was given, before launch sets its own, says wrongly about buffering."""
    found = []
    if b"PYTHONBUFFERED" in environment:
        found.append(
            "warning: PYTHONBUFFERED is set, which Python ignores; PYTHONUNBUFFERED is meant, and set here"
        )
    value = environment.get(b"PYTHONUNBUFFERED")
    if value is not None and not environment_flag(value):
        shown = value.decode("utf-8", "replace") or "(empty)"
        found.append(f"warning: PYTHONUNBUFFERED={shown} was given, which means off; launch sets it to 1")
    return found


def under_init(parent: int) -> str:
    """The name of the init that launch runs under, if it is one that reaps and passes signals on."""
    process = read_process(parent)
    return process.name if process and process.name in INITS else ""


def stdout_words(buffering: Buffering, pid: int) -> str:
    """What the banner says of stdout: ``stdout unbuffered (-u; from /proc/123)``."""
    if buffering.unbuffered is None:
        return f"stdout {buffering.why}"
    how = buffering.how if buffering.unbuffered else "BUFFERED"
    return f"stdout {how} ({buffering.why}; from /proc/{pid})"


def banner(
    run: Run,
    attempt: int,
    buffering: Buffering,
    *,
    pid: int,
    python: str,
    init: str,
    warned: Sequence[str],
    now: float,
) -> str:
    """The banner's text, one line."""
    parts = [f"drafthouse run {run.run_id}", f"attempt {attempt}"]
    release = run.release.get("id")
    parts.append(f"release {release}" if release else "no release")
    commit = run.git.get("commit")
    parts.append(f"git {commit[:12]}{' (dirty)' if run.git.get('dirty') else ''}" if commit else "no git")
    whole = (run.image or "").startswith("sha256:")  # else it is a name, and short enough
    shown = run.image[len("sha256:") :][:12] if run.image and whole else run.image
    parts.append(f"image {shown}" if shown else "no image")
    if python:
        parts.append(python)
    parts.append(stdout_words(buffering, pid))
    parts.append(f"under {init}" if init else "no tini: launch reaps")
    parts.append(time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now)))
    parts += warned
    return " ".join(" · ".join(parts).splitlines())


def buffered_writers(processes: Sequence[Process], pipe: str) -> list[tuple[int, str]]:
    """The Python processes that write to `pipe` ("pipe:[inode]") but hold their output back: (pid, why).

    A worker that was started with an environment of its own, or with -I, does so whatever its parent does.
    """
    found = []
    for process in processes:
        if not _PYTHON.fullmatch(program_of(process.pid)):
            continue
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{process.pid}/fd/1") == pipe:
                buffering = prove(process.pid)
                if buffering.unbuffered is False:
                    found.append((process.pid, buffering.why))
    return found
