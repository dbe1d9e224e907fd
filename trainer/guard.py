"""What must be done after launch itself was killed.

Standard library only and Python >= 3.9; Linux.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable

from trainer.processes import PR_SET_NAME, Process, all_processes, of_session, prctl, send

GUARD_SECONDS = 10.0  # so long the guard tries to end what an ended launch left


class Guard:
    """A small process that outlives launch by a moment: when launch is gone, it kills what launch started.

    The kernel closes launch's end of a pipe however launch ends, KILL included; the guard then kills the
    sessions that it was told of. It holds the run's lock meanwhile, so that a run counts as alive until
    nothing of it is.
    """

    def __init__(self, keep: Iterable[int] = ()) -> None:
        """Fork the guard; `keep`: descriptors that it holds open. launch must have one thread."""
        reading, self._pipe = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _detach({reading, *keep})
                _guard(reading)
            finally:
                os._exit(0)
        os.close(reading)

    def watch(self, leader: Process) -> None:
        with contextlib.suppress(OSError):
            os.write(self._pipe, f"{leader.pid} {leader.started}\n".encode("ascii"))

    def close(self) -> None:
        """Let the guard look for the last time, and wait for it."""
        os.close(self._pipe)
        with contextlib.suppress(OSError):
            os.waitpid(self.pid, 0)


def _detach(keep: set[int]) -> None:
    """Leave launch's session, signals and descriptors."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.setsid()
    with contextlib.suppress(OSError):
        prctl(PR_SET_NAME, b"launch-guard")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) > 2 and int(entry) not in keep:
            with contextlib.suppress(OSError):
                os.close(int(entry))


def _guard(reading: int) -> None:
    told = b""
    while True:
        data = os.read(reading, 4096)
        if not data:
            break
        told += data
    sessions = [tuple(map(int, line.split())) for line in told.decode("ascii").splitlines()]
    deadline = time.monotonic() + GUARD_SECONDS
    while time.monotonic() < deadline:
        processes = all_processes()
        left = [p for leader, started in sessions for p in of_session(processes, leader, started)]
        if not left:
            return
        for process in left:
            send(process, signal.SIGKILL)
        time.sleep(0.01)
