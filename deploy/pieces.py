"""Pieces of files: read, hashed, copied and written by offset, from any thread.

Runs on both sides. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from deploy import hashing
from deploy.errors import DeployError

# Bytes read, hashed and written at a time: smaller ones wait more for Python than for memory, larger ones do
# not stay in the CPU's cache until they are read back.
BLOCK = 512 << 10
OPEN = 64  # files that are filled at a time; a process may have 1,024 open, and a directory more files
PIPE = 1 << 20  # bytes: what Linux lets a pipe hold


class Chunk(NamedTuple):
    """A piece of a file, the smallest thing that is sent. `hash` is in hex; "" if it is not known."""

    relative: str
    offset: int
    length: int
    hash: str


class Reader:
    """Reads and hashes chunks of the files below a directory, from any thread."""

    def __init__(self, root: Path, hash_name: str) -> None:
        self.root, self._new = root, hashing.function(hash_name)
        self._own = threading.local()

    def hash(self, one: Chunk) -> bytes:
        """The hash of a chunk. Raises DeployError if its file cannot be read or is too short."""
        path, end = self.root / one.relative, one.offset + one.length
        hasher = self._new()
        with _opened(path) as file:
            for offset in range(one.offset, end, BLOCK):
                view = self._view(min(BLOCK, end - offset))
                fill(view, file, offset, path)
                hasher.update(view)
        found: bytes = hasher.digest()
        return found

    def copy(self, one: Chunk, root: Path) -> bytes:
        """Copy a chunk to the file of its name below `root`, and read it back: the hash of what is there.

        Raises DeployError as `hash` does, OSError if it cannot be written.
        """
        path, target = self.root / one.relative, root / one.relative
        hasher, end = self._new(), one.offset + one.length
        copy = os.open(target, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            with _opened(path) as file:
                for offset in range(one.offset, end, BLOCK):
                    view = self._view(min(BLOCK, end - offset))
                    self._copy(file, copy, offset, view, path)
                    fill(view, copy, offset, target)
                    hasher.update(view)
        finally:
            os.close(copy)
        found: bytes = hasher.digest()
        return found

    @staticmethod
    def _copy(file: int, copy: int, offset: int, view: memoryview, path: Path) -> None:
        """A block of a file, in the kernel, which moves each byte once; where it cannot, by our buffer."""
        try:
            os.lseek(copy, offset, os.SEEK_SET)
            if os.sendfile(copy, file, offset, len(view)) == len(view):
                return
        except OSError:  # not between these file systems; or an error that comes again
            pass
        fill(view, file, offset, path)
        put(copy, view, offset)

    def _view(self, length: int) -> memoryview:
        """This thread's buffer."""
        found: memoryview | None = getattr(self._own, "buffer", None)
        if found is None:
            found = self._own.buffer = buffer()
        return found[:length]


def buffer() -> memoryview:
    """A block of memory. At the begin of a page, where the kernel copies to it twice as fast on some CPUs."""
    return memoryview(mmap.mmap(-1, BLOCK))


class Files:
    """The files of a directory that is filled, opened for writing at their first use; some stay open."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._open: dict[str, int] = {}

    def __getitem__(self, relative: str) -> int:
        if relative in self._open:
            self._open[relative] = self._open.pop(relative)  # the newest
        else:
            if len(self._open) >= OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
            self._open[relative] = os.open(self.root / relative, flags)
        return self._open[relative]

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise DeployError(f"{path} cannot be read: {error.strerror}") from None
    try:
        yield file
    finally:
        os.close(file)


def fill(view: memoryview, file: int, offset: int, path: Path) -> None:
    """Fill a buffer from a file. Raises DeployError, which names `path`."""
    done = 0
    while done < len(view):
        try:
            count = os.preadv(file, [view[done:]], offset + done)
        except OSError as error:
            raise DeployError(f"{path} cannot be read: {error.strerror}") from None
        if not count:
            raise DeployError(f"{path} became shorter while it was read")
        done += count


def put(file: int, data: memoryview, offset: int) -> None:
    """Write all of `data` there. Raises OSError."""
    while data:
        count = os.pwrite(file, data, offset)
        data, offset = data[count:], offset + count


def pour(pipe: int, file: int, offset: int, most: int, buffer: memoryview) -> int:
    """Write what a pipe holds into a file, `most` bytes at most; the count, 0 at its end. Raises OSError."""
    splice = getattr(os, "splice", None)  # of Linux, from Python 3.10 on: it moves each byte once
    if splice is not None:
        with contextlib.suppress(OSError):  # no pipe, or not into this file system; or it comes again
            return int(splice(pipe, file, most, offset_dst=offset))
    count = os.readv(pipe, [buffer[:most]])
    put(file, buffer[:count], offset)
    return count


def widen(pipe: int) -> None:
    """Let a pipe hold as much as it may, so that its two ends wait for each other less often."""
    with contextlib.suppress(ImportError, AttributeError, OSError):
        from fcntl import fcntl

        fcntl(pipe, 1031, PIPE)  # F_SETPIPE_SZ, of Linux; Python knows its name from 3.10 on
