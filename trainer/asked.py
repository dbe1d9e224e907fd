"""What is asked of a run in progress, as far as launch answers it.

Standard library only and Python >= 3.9; Linux.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.processes import Process, catches, read_bytes, read_process, send
from trainer.status import REQUEST, Heartbeat, Request, RunDir

ANSWER_SECONDS = 1.0  # so long a rank may take to print its stacks


class Requests:
    """Sees each request once, soon after it was written, without reading its file again and again."""

    def __init__(self, directory: RunDir, name: str = REQUEST) -> None:
        self._directory = directory
        self._name = name
        self._seen: object = None

    def take(self) -> Request | None:
        """A request that was not seen before. Raises ValueError for a file that is none."""
        try:
            found = os.stat(self._directory.path / self._name)
        except OSError:
            return None
        seen = (found.st_ino, found.st_mtime_ns)
        if seen == self._seen:
            return None
        self._seen = seen
        try:
            return self._directory.request(self._name)
        except OSError as error:
            raise ValueError(str(error)) from None


class Dump:
    """Has the stacks of a run printed, one rank after the other, so that no answer is mixed with another's.

    A rank is sent SIGUSR1 if it has a handler for it. faulthandler answers even if the process holds Python's
    lock and cannot look at a request. Without a handler the signal would end the process, and a pid from an
    old heartbeat may be another's by now. A process without heartbeats is never asked: it may take the signal
    for something else.
    """

    def __init__(
        self, request: Request, members: Sequence[Process], beats: Mapping[int, Heartbeat], attempt: int
    ) -> None:
        living = {process.pid: process for process in members}
        self._ranks = [
            (rank, beat.pid, living.get(beat.pid) if beat.attempt == attempt else None)
            for rank, beat in beats.items()
        ]
        self.request = request
        self.told: list[str] = []
        self._start = -1  # offset of the log where the answers begin
        self._asked_at = 0.0  # when the last rank was asked (monotonic, s)
        self._asked = self._seen = 0  # offsets of the log: then, and at the last look
        self._name = ""

    def go_on(self, now: float, say: Callable[[str], None], offset: Callable[[], int]) -> bool:
        """Ask the next rank if the last one has answered; whether all have been asked.

        `say` writes a line into the log, `offset` is how long the log is by now.
        """
        if self._start < 0:
            self._start = offset()
            say(f"stacks asked for by {self.request.by or 'request'}")
        if self._name:
            size = offset()
            settled, self._seen = size == self._seen and size > self._asked, size
            if not settled and now - self._asked_at < ANSWER_SECONDS:
                return False
            silent = size == self._asked
            more = f", which gave no answer within {ANSWER_SECONDS:g} s" if silent else ""
            self.told.append(f"SIGUSR1 to {self._name}{more}")
            self._name = ""
        while self._ranks:
            rank, pid, process = self._ranks.pop(0)
            name = f"rank {rank} (pid {pid})"
            if process is None or read_process(pid) is None:
                self.told.append(f"{name} is not running")
            elif not catches(read_bytes(pid, "status"), signal.SIGUSR1):
                self.told.append(f"{name} has no handler for SIGUSR1 and was left alone")
            else:
                say(f"stacks of {name}")
                self._asked = self._seen = offset()
                if send(process, signal.SIGUSR1):
                    self._name, self._asked_at = name, now
                    return False
                self.told.append(f"{name} ended meanwhile")
        say(f"end of the stacks: {self.outcome}")
        return True

    @property
    def outcome(self) -> str:
        """What was done, for people."""
        return "; ".join(self.told) or "no process of this run has written a heartbeat yet"

    def answer(self, end: int) -> dict[str, Any]:
        """For `Launch.answered`; `log` says between which offsets of the log the stacks are."""
        return {
            "id": self.request.id,
            "action": self.request.action,
            "outcome": self.outcome,
            "time": time.time(),
            "log": [max(self._start, 0), end],
        }
