"""Being woken when something is written in a directory, instead of looking again and again.

Linux only, and only for this machine's own file systems: what another machine writes on NFS wakes nobody, so
whoever waits here looks again after a while in any case. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
from collections.abc import Sequence
from pathlib import Path

# <sys/inotify.h>
_NONBLOCK, _CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC
_MODIFY, _MOVED_TO, _CREATE, _DELETE = 0x2, 0x80, 0x100, 0x200


class Watch:
    """Changes in one directory. Where the kernel has no inotify to give, `wait` only waits."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = os.fsencode(directory)
        self._descriptor = -1
        self._watches = False
        with contextlib.suppress(OSError, AttributeError):
            self._descriptor = ctypes.CDLL(None, use_errno=True).inotify_init1(_NONBLOCK | _CLOEXEC)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def begin(self) -> None:
        """Have changes from now on end a `wait`. May be called again: the directory may only come later."""
        if self._watches or self._descriptor < 0:
            return
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None, use_errno=True)
            mask = _MODIFY | _MOVED_TO | _CREATE | _DELETE
            self._watches = libc.inotify_add_watch(self._descriptor, self._directory, mask) >= 0

    def wait(self, seconds: float, others: Sequence[int] = ()) -> list[int]:
        """Wait until something has changed, one of the descriptors `others` can be read, or `seconds` are
        over; the descriptors of `others` that can be read. What changed before a call ends it at once."""
        own = [self._descriptor] if self._watches else []
        ready, _, _ = select.select([*own, *others], [], [], seconds)
        if self._descriptor in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._descriptor, 1 << 16)
        return [descriptor for descriptor in ready if descriptor in others]
