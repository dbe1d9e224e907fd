"""The end of a process that was started by hand and adopted: it, what it has started, and nothing else.

Runs ON the host as a part of the switch. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import signal
import time
from typing import Any

from deploy import adopt_process
from trainer import status

GONE_TIMEOUT = 10.0  # seconds after a KILL
LEFT_TIMEOUT = 2.0  # seconds that children get to follow their parent by themselves
PAUSE = 0.05  # seconds between two looks


class Stays(Exception):
    """It cannot be ended; the message says why."""


def stop(known: dict[str, Any], grace: float) -> tuple[str, int]:
    """TERM to the process `known` ({pid, start, boot}), KILL after `grace` seconds.

    Returns what was done, and the exit code that a shell would report. Its descendants are ended with it,
    as far as they do not end by themselves. Raises Stays.
    """
    pid, start = int(known["pid"]), int(known["start"])
    began, family = time.monotonic(), {pid: start}
    words, code = "SIGTERM", 128 + signal.SIGTERM

    def over() -> bool:
        if not status.same_process(known):
            return True
        family.update(adopt_process.tree(pid))  # what it starts while it saves belongs to it, too
        return False

    try:
        if not over() and adopt_process.send(pid, start, signal.SIGTERM) and not _wait(over, grace):
            words, code = f"{words}, still there after {grace:g} s, SIGKILL", 128 + signal.SIGKILL
            adopt_process.send(pid, start, signal.SIGKILL)
            if not _wait(over, GONE_TIMEOUT):
                raise Stays(f"process {pid} is still there {GONE_TIMEOUT:g} s after SIGKILL")
        if not _wait(lambda: not adopt_process.living(family), LEFT_TIMEOUT):
            for one, when in adopt_process.living(family).items():
                adopt_process.send(one, when, signal.SIGKILL)
            if not _wait(lambda: not adopt_process.living(family), GONE_TIMEOUT):
                left = ", ".join(str(one) for one in adopt_process.living(family))
                raise Stays(f"process {left}, which process {pid} has started, cannot be ended")
    except PermissionError:
        raise Stays(f"process {pid} belongs to another user: stop it as that user") from None
    return f"{words} to process {pid}; ended after {time.monotonic() - began:.1f} s", int(code)


def _wait(look: Any, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not look():
        if time.monotonic() >= deadline:
            return False
        time.sleep(PAUSE)
    return True
