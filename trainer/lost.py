"""A rank of a run on several machines: it is woken when another machine is lost.

A host that dies and a network that is gone end no connection, and torch.distributed would wait for them for
ever. The launcher, which hears the others' beats, tells its ranks; each then ends its own connections, and
the main thread meets that where it waits, as it meets the death of a process.

Standard library only; Linux.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading

from trainer.status import LOST_VARIABLE


def watch() -> None:
    """Look out for it, in a thread, if there are several machines."""
    told = os.environ.get(LOST_VARIABLE, "")
    if told.isdigit():
        os.set_inheritable(int(told), False)
        threading.Thread(target=_wait, args=(int(told),), name="lost", daemon=True).start()


def _wait(descriptor: int) -> None:
    if os.read(descriptor, 1):
        end_connections()


def end_connections() -> None:
    """Shut every TCP connection of this process."""
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                continue
            one = socket.socket(fileno=os.dup(int(entry)))
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                one.getpeername()  # one that listens has none
                one.shutdown(socket.SHUT_RDWR)
