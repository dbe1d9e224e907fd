"""A run's log as one stream of bytes: segments in a directory, each named by the offset of its first byte.

Standard library only. Memory stays constant whatever the log's size.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

BLOCK = 1 << 16


class Segments:
    """Reads the log directory of one run while launch writes, rotates and removes segments in it."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._file: int | None = None
        self._start = 0  # offset of the first byte of the open segment

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def starts(self) -> list[int]:
        """The offsets of the segments that are there, in order."""
        try:
            entries = os.listdir(self.directory)
        except OSError:
            return []
        return sorted(int(entry[:-4]) for entry in entries if entry.endswith(".log") and entry[:-4].isdigit())

    def end(self) -> int:
        """The offset behind the last byte written so far."""
        for start in reversed(self.starts()):
            try:
                return start + os.stat(self._path(start)).st_size
            except OSError:
                continue
        return 0

    def read(self, offset: int) -> tuple[int, bytes]:
        """Up to 64 KiB from `offset` on: (the offset of what was read, the bytes; none if there are none).

        The returned offset is greater than `offset` if bytes in between are gone, because their segment was
        removed before anybody read it. A segment that is open is read to its end even if it is removed.
        """
        if self._file is not None and offset >= self._start:
            data = os.pread(self._file, BLOCK, offset - self._start)
            if data:
                return offset, data
            if not self._superseded(offset):
                return offset, b""
            # The next segment is there, so this one is final; but it may have grown since we looked.
            data = os.pread(self._file, BLOCK, offset - self._start)
            if data:
                return offset, data
        return self._open(offset)

    def _superseded(self, offset: int) -> bool:
        """Whether reading goes on in another segment. Cheap while all is well: this is asked all the time."""
        if offset > self._start and self._path(offset).exists():
            return True
        assert self._file is not None
        if os.fstat(self._file).st_nlink:
            return False
        return any(start > self._start for start in self.starts())  # ours was removed under us

    def _open(self, offset: int) -> tuple[int, bytes]:
        self.close()
        starts = self.starts()
        containing = [start for start in starts if start <= offset][-1:]
        for start in containing + [start for start in starts if start > offset]:
            try:
                self._file = os.open(self._path(start), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:  # removed since it was listed
                continue
            self._start = start
            offset = max(offset, start)
            data = os.pread(self._file, BLOCK, offset - start)
            last = start == starts[-1]
            if data or last:
                return offset, data
            self.close()  # all of it is known; a newer segment goes on, after a gap or not
        return offset, b""

    def _path(self, start: int) -> Path:
        return self.directory / f"{start:020d}.log"

    # -- from the end --------------------------------------------------------------------------------------

    def backwards(self) -> Iterator[tuple[int, bytes]]:
        """What is there now as (offset, at most 64 KiB), from its end to its beginning.

        Ends early where a segment is removed meanwhile: what lies before that goes, too.
        """
        end = self.end()
        for start in reversed(self.starts()):
            try:
                with open(self._path(start), "rb") as file:
                    position = min(os.fstat(file.fileno()).st_size, end - start)
                    while position > 0:
                        size = min(BLOCK, position)
                        position -= size
                        file.seek(position)
                        yield start + position, file.read(size)
            except FileNotFoundError:
                return

    def last_lines(self, count: int) -> int:
        """The offset at which the last `count` lines begin (of those that are still there).

        A last line that is not finished yet counts as one.
        """
        search = self.find_last(count)
        while True:
            try:
                next(search)
            except StopIteration as found:
                offset: int = found.value
                return offset

    def find_last(self, count: int) -> Generator[None, None, int]:
        """The same as the value of a generator, which yields now and then: a large log takes its time."""
        oldest = self.end()
        if count <= 0:
            return oldest
        wanted = count
        first = True
        for offset, block in self.backwards():
            oldest = offset
            stop = len(block)
            if first and block.endswith(b"\n"):
                stop -= 1  # this newline ends the last line; it does not begin one
            first = False
            while (found := block.rfind(b"\n", 0, stop)) >= 0:
                wanted -= 1
                if not wanted:
                    return offset + found + 1
                stop = found
            yield
        return oldest
