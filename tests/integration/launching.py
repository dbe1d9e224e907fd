"""Starting `trainer.launch` for real, and waiting for what it does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.logfile import list_segments
from trainer.processes import all_processes, descendants, read_process
from trainer.status import Exit, Run, RunDir

TIMEOUT = 60.0
NOTE = "── ".encode()


def wait_for(condition: Callable[[], Any], what: str = "", timeout: float = TIMEOUT) -> Any:
    """The first true value of `condition`."""
    until = time.monotonic() + timeout
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > until:
            pytest.fail(f"not within {timeout:g} s: {what or condition}")
        time.sleep(0.01)


def python(source: str) -> list[str]:
    """The command of a small Python program."""
    return [sys.executable, "-S", "-c", source]


def gone(pid: int) -> bool:
    process = read_process(pid)
    return process is None or process.ended


def make_run(path: Path, command: list[str], **fields: Any) -> RunDir:
    path.mkdir(parents=True, exist_ok=True)
    directory = RunDir(path)
    fields = {"restart_attempts": 0, "grace_seconds": 20.0, **fields}
    directory.write_run(Run(run_id="0001-demo", name="demo", command=command, **fields))
    return directory


class Launched:
    """A launch in progress, and what it leaves."""

    def __init__(self, directory: RunDir, *, wrapper: list[str], stdout: Any, **popen: Any) -> None:
        self.directory = directory
        self.process = subprocess.Popen(
            [*wrapper, sys.executable, "-u", "-m", "trainer.launch", "--run-dir", str(directory.path)],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            start_new_session=True,
            **popen,
        )
        self.stdout = b""

    def finish(self, timeout: float = TIMEOUT) -> Exit:
        """Wait for the end, reading stdout; the run's record."""
        self.stdout, self.stderr = self.process.communicate(timeout=timeout)
        record = self.directory.exit()
        assert record is not None
        return record

    @property
    def raw_log(self) -> bytes:
        try:
            return b"".join(path.read_bytes() for _, path in list_segments(self.directory.log))
        except OSError:
            return b""

    @property
    def log(self) -> bytes:
        """The bytes of the trainer alone: without launch's own lines."""
        return without_notes(self.raw_log)

    @property
    def notes(self) -> list[str]:
        return [line.decode() for line in self.raw_log.splitlines() if line.startswith(NOTE)]

    def wait_for_log(self, text: bytes) -> None:
        wait_for(lambda: text in self.raw_log, f"{text!r} in the log, which has {self.raw_log[-2000:]!r}")

    def launch_pid(self) -> int:
        state = wait_for(self.directory.launch, "launch.json")
        return state.pid

    def trainer_pid(self) -> int:
        return wait_for(lambda: (state := self.directory.launch()) and state.trainer_pid, "the trainer's pid")

    def tree(self) -> list[int]:
        """All processes below what was started, with it."""
        root = self.process.pid
        return [root, *(p.pid for p in descendants(all_processes(), root))]

    def term(self) -> None:
        os.kill(self.launch_pid(), signal.SIGTERM)


def without_notes(data: bytes) -> bytes:
    return b"".join(line for line in data.splitlines(True) if not line.startswith(NOTE))


@contextlib.contextmanager
def launched(
    path: Path,
    command: list[str],
    *,
    wrapper: list[str] | None = None,
    stdout: Any = subprocess.PIPE,
    popen: dict | None = None,
    **fields: Any,
) -> Iterator[Launched]:
    """Start a run in `path`; whatever is left of it at the end is killed."""
    run = Launched(make_run(path, command, **fields), wrapper=wrapper or [], stdout=stdout, **(popen or {}))
    try:
        yield run
    finally:
        if run.process.poll() is None:
            for pid in run.tree():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            run.process.wait()
        for stream in (run.process.stdout, run.process.stderr):
            if stream is not None:
                stream.close()
