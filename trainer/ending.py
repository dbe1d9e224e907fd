"""What the end of an attempt means: another attempt, or the run's end. And the record of that end.

Standard library only and Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainer.starting import NOT_EXECUTABLE, NOT_FOUND, USAGE
from trainer.status import Exit, Heartbeat, Run, RunDir

FIRST_DELAY, LONGEST_DELAY = 0.5, 30.0  # before a next attempt, s; doubled with each


@dataclass(frozen=True)
class End:
    """How one attempt ended."""

    code: int  # as a shell reports it: 128 + signal after a signal
    signal: int | None = None
    out_of_memory: bool | None = False
    sentence: str = ""  # why it could not be started
    seconds: float = 0.0  # that it ran


def from_wait_status(code: int) -> tuple[int, int | None]:
    """`os.waitstatus_to_exitcode`'s value as (code of a shell, signal)."""
    return (code, None) if code >= 0 else (128 - code, -code)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def next_attempt(end: End, crashes: Sequence[float], run: Run, stopping: str | None) -> float | None:
    """The delay before the next attempt, s; None if there is none.

    `crashes` are the times (s, any one clock) of the run's crashes, the newest last. A run that ended with 0,
    that was asked to stop, or whose command or settings are wrong is not started again.
    """
    if stopping or end.code == 0 or end.sentence:
        return None
    if end.signal is None and end.code in (USAGE, NOT_EXECUTABLE, NOT_FOUND):
        return None
    recent = sum(1 for when in crashes if crashes[-1] - when <= run.restart_minutes * 60)
    if recent > run.restart_attempts:
        return None
    return min(FIRST_DELAY * 2 ** (recent - 1), LONGEST_DELAY)


def how(end: End) -> str:
    """How an attempt ended, in words: "with exit code 3", "by SIGKILL (out of memory)"."""
    if end.sentence:
        return end.sentence
    text = f"with exit code {end.code}" if end.signal is None else f"by {signal_name(end.signal)}"
    if end.out_of_memory:
        return f"{text} (out of memory: the kernel killed a process of this run)"
    if end.signal == signal.SIGKILL and end.out_of_memory is None:
        return f"{text} (nobody here sent it; whether memory ran out could not be read)"
    return text


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def conclude(end: End, attempts: int, run: Run, stopping: str | None) -> tuple[str, str]:
    """The run's (reason, one sentence for people)."""
    if stopping:
        if attempts == 0:
            return "stopped", f"stopped by {stopping} before the trainer was started"
        return "stopped", f"stopped by {stopping} after {duration(end.seconds)}, ended {how(end)}"
    if end.sentence:
        return "failed", f"failed: {end.sentence}"
    if end.code == 0:
        return "finished", f"finished after {duration(end.seconds)}"
    if end.code == USAGE and end.signal is None:
        return "failed", f"failed: ended {how(end)}: its command line or settings are wrong"
    restarts = f"{run.restart_attempts} restart{'' if run.restart_attempts == 1 else 's'}"
    tried = f" (attempt {attempts}; at most {restarts} in {run.restart_minutes:g} min)"
    return "failed", f"failed: ended {how(end)} after {duration(end.seconds)}{tried if attempts > 1 else ''}"


def newest(heartbeats: Iterable[Heartbeat]) -> tuple[int | None, dict | None]:
    """(last step, last checkpoint) of what the trainer's processes said last."""
    step, checkpoint = None, None
    for beat in sorted(heartbeats, key=lambda beat: beat.time):
        if beat.step is not None and beat.trains:
            step = beat.step
        if beat.last_checkpoint:
            checkpoint = beat.last_checkpoint
    return step, checkpoint


def write_exit(directory: RunDir, record: Exit, reserve: str | os.PathLike) -> None:
    """Write exit.json; on a full disk, into the room that the file `reserve` has kept for it."""
    problem = ""
    for delay in (0.0, 0.0, 0.5, 1.0):
        time.sleep(delay)
        try:
            directory.write_exit(record)
            problem = ""
            break
        except OSError as error:
            problem = error.strerror or str(error)
        with contextlib.suppress(OSError):
            os.unlink(reserve)
    if problem:
        print(f"trainer.launch: the end of {directory.path} is not recorded: {problem}", file=sys.stderr)
    with contextlib.suppress(OSError):
        os.unlink(reserve)
