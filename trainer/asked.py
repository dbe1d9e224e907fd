"""What is asked of a run in progress, as far as launch answers it.

Standard library only and Python >= 3.9; Linux.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence

from trainer.processes import Process, catches, read_bytes, send
from trainer.status import Heartbeat, Request, RunDir


class Requests:
    """Sees each request.json once, soon after it was written, without reading it again and again."""

    def __init__(self, directory: RunDir) -> None:
        self._directory = directory
        self._seen: object = None

    def take(self) -> Request | None:
        """A request that was not seen before. Raises ValueError for a file that is none."""
        try:
            found = os.stat(self._directory.path / "request.json")
        except OSError:
            return None
        seen = (found.st_ino, found.st_mtime_ns)
        if seen == self._seen:
            return None
        self._seen = seen
        try:
            return self._directory.request()
        except OSError as error:
            raise ValueError(str(error)) from None


def dump_stacks(members: Sequence[Process], beats: Mapping[int, Heartbeat], attempt: int) -> str:
    """Send SIGUSR1 to every rank that has a handler for it; what was done, for people.

    faulthandler answers it even if the process holds Python's lock and cannot look at request.json. Without
    a handler the signal would end the process, and a pid from an old heartbeat may be another's by now.
    """
    living = {process.pid: process for process in members}
    told = []
    for rank, beat in beats.items():
        process = living.get(beat.pid)
        if process is None or beat.attempt != attempt:
            told.append(f"rank {rank} (pid {beat.pid}) is not running")
        elif not catches(read_bytes(process.pid, "status"), signal.SIGUSR1):
            told.append(f"rank {rank} (pid {beat.pid}) has no handler for SIGUSR1 and was left alone")
        elif send(process, signal.SIGUSR1):
            told.append(f"SIGUSR1 to rank {rank} (pid {beat.pid})")
        else:
            told.append(f"rank {rank} (pid {beat.pid}) ended meanwhile")
    return "; ".join(told) or "no process of this run has written a heartbeat yet"
