"""The log of a run: its exact bytes in segments, and an index of when they came.

``log/<offset, 20 digits>.log`` holds the bytes from that offset on; a segment ends where the next one begins,
so a reader needs nothing but a byte offset to go on where it was. ``log/index`` has one line
``<unix time, ms precision> <offset>`` at most once a second, when something is written: what lies from that
offset up to the next line's was written at that time or within the second after it. Old lines go with the
segments that they are about.

Standard library only and Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

RETRY_SECONDS = 1.0  # between two attempts to write again to a log that could not be written
INDEX_SECONDS = 1.0  # between two lines of the index, at least
INDEX_OWED_BYTES = 4096  # so much of the index waits for a disk that takes nothing
TAIL_BYTES = 64 << 10
LAST_LINE_CHARACTERS = 500


def note(text: str) -> bytes:
    """A line of launch's own, told from the trainer's by its first characters."""
    return f"── {text}\n".encode("utf-8", "backslashreplace")


def segment_name(offset: int) -> str:
    return f"{offset:020d}.log"


def list_segments(directory: Path) -> list[tuple[int, Path]]:
    """The segments in `directory` as (offset of the first byte, path), oldest first."""
    found = []
    for entry in os.listdir(directory):
        if entry.endswith(".log") and entry[:-4].isdigit():
            found.append((int(entry[:-4]), directory / entry))
    return sorted(found)


def rotation_cut(size: int, limit: int, data: bytes, at_record_start: bool) -> int:
    """How many bytes of `data` still belong into a segment that holds `size` bytes and may hold `limit`.

    A segment ends at the end of a record, before the limit if it can and after it if it must; only a record
    that is longer than a whole segment is cut, at twice the limit.
    """
    room = limit - size
    if len(data) <= room:
        return len(data)
    before = data.rfind(b"\n", 0, room) + 1 if room > 0 else 0
    if before:
        return before
    if at_record_start and size:
        return 0
    after = data.find(b"\n", max(room, 0)) + 1
    return min(after or len(data), max(2 * limit - size, 0))


class Log:
    """Writes the log. No error of the disk ever reaches the caller: what could not be written is counted.

    Offsets count the bytes that are in the log. Where some are missing, a line says how many, as soon as
    there is room for it; so a reader's offsets stay true and nothing is lost in silence.
    """

    def __init__(self, directory: Path, segment_bytes: int, segments: int) -> None:
        """`directory` is made if need be. Raises OSError if that cannot be."""
        self.directory = directory
        self.limit = max(segment_bytes, 1)
        self.keep = max(segments, 2)
        self.offset = 0  # of the next byte
        self.missing = 0  # bytes that are not in the log and never will be
        self.at_record_start = True
        self._start = 0  # offset of the current segment
        self._segment = -1  # its descriptor
        self._owed = b""  # the rest of a note that was written in part
        self._lost = 0  # bytes lost since the last note about that
        self._error = ""
        self._retry_at = 0.0
        self._indexed_at = 0.0
        self._index_owed = b""  # what the index could not take yet
        directory.mkdir(exist_ok=True)

    @property
    def losing(self) -> bool:
        """Whether bytes are missing that no line in the log tells of yet."""
        return self._lost > 0 or bool(self._owed)

    def write(self, data: bytes) -> None:
        if self.losing and not self.resume():
            self._lose(data)
            return
        self._index(data)
        while data:
            cut = rotation_cut(self.offset - self._start, self.limit, data, self.at_record_start)
            if cut == 0:
                self._rotate()
                continue
            written = self._append(data[:cut])
            if written < cut:
                self._lose(data[written:])
                return
            data = data[cut:]

    def write_line(self, line: bytes) -> None:
        """Write a line of launch's own, on a line of its own."""
        self.write(line if self.at_record_start else b"\n" + line)

    def resume(self) -> bool:
        """Write what the log owes its reader: how much is missing. True once that is done."""
        now = time.monotonic()
        if now < self._retry_at:
            return False
        self._retry_at = now + RETRY_SECONDS
        while self._owed or self._lost:
            if not self._owed:
                text = f"{self._lost:,} bytes are missing here: the log could not be written ({self._error})"
                line = note(text)
                self._owed = line if self.at_record_start else b"\n" + line
                self.missing += self._lost
                self._lost = 0
                self._index(self._owed)
            written = self._append(self._owed)
            self._owed = self._owed[written:]
            if self._owed:
                return False
        return True

    def close(self) -> None:
        """End the log: the last note about a loss is tried once more, and the disk is waited for."""
        self._retry_at = 0.0
        if self.losing:
            self.resume()
        self.missing += self._lost
        self._lost = 0
        if self._segment >= 0:
            with contextlib.suppress(OSError):
                os.fsync(self._segment)
            os.close(self._segment)
            self._segment = -1

    def _lose(self, data: bytes) -> None:
        self._lost += len(data)

    def _append(self, data: bytes) -> int:
        """Write to the current segment; how many bytes got there."""
        written = 0
        try:
            if self._segment < 0:
                path = self.directory / segment_name(self._start)
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._segment = os.open(path, flags, 0o644)
            while written < len(data):
                written += os.write(self._segment, data[written:] if written else data)
        except OSError as error:
            self._error = error.strerror or str(error)
            self._retry_at = time.monotonic() + RETRY_SECONDS
        self.offset += written
        if written:
            self.at_record_start = data[written - 1 : written] == b"\n"
        return written

    def _rotate(self) -> None:
        if self._segment >= 0:
            os.close(self._segment)
            self._segment = -1
        self._start = self.offset
        with contextlib.suppress(OSError):
            kept = list_segments(self.directory)
            old = kept[: max(len(kept) + 1 - self.keep, 0)]  # + 1: the one that is made next
            for _, path in old:
                path.unlink()
            if old:
                self._prune_index(kept[len(old)][0] if len(old) < len(kept) else self.offset)

    def _index(self, data: bytes) -> None:
        """Note the time of the first record that begins in `data`, at most once a second."""
        now = time.time()
        if 0 <= now - self._indexed_at < INDEX_SECONDS:
            return
        begin = 0 if self.at_record_start else (data.find(b"\n") + 1) % len(data) if data else 0
        self._indexed_at = now
        if len(self._index_owed) < INDEX_OWED_BYTES:  # a disk that takes none of it takes no log either
            self._index_owed += f"{now:.3f} {self.offset + begin}\n".encode("ascii")
        try:
            descriptor = os.open(
                self.directory / "index", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
            )
        except OSError:
            return
        try:
            written = os.write(descriptor, self._index_owed)
            self._index_owed = self._index_owed[written:]
        except OSError:
            pass  # the log itself is what counts; the next second tries again
        finally:
            os.close(descriptor)

    def _prune_index(self, oldest: int) -> None:
        """Forget the times of bytes before `oldest`, which are no longer there; the line about it stays."""
        path = self.directory / "index"
        lines = path.read_text("ascii").splitlines(True)
        first = max((at for at, line in enumerate(lines) if 0 <= _offset_of(line) <= oldest), default=0)
        temporary = self.directory / ".index"
        temporary.write_text("".join(lines[first:]), "ascii")
        temporary.replace(path)


def _offset_of(line: str) -> int:
    _, _, offset = line.rstrip("\n").partition(" ")
    return int(offset) if offset.isdigit() else -1


class Tail:
    """The last lines of one attempt, kept in memory to be told in exit.json."""

    def __init__(self, limit: int = TAIL_BYTES) -> None:
        self._limit = limit
        self._kept = bytearray()
        self._cut = False

    def feed(self, data: bytes) -> None:
        self._kept += data[-self._limit :]
        if len(data) > self._limit or len(self._kept) > 2 * self._limit:
            del self._kept[: -self._limit]
            self._cut = True

    def lines(self, count: int = 20) -> list[str]:
        """At most `count` lines as text: of a progress line its last state, of binary what can be shown."""
        raw = bytes(self._kept).split(b"\n")
        if self._cut and len(raw) > 1:
            raw = raw[1:]
        shown = []
        for line in raw:
            states = [state for state in line.split(b"\r") if state.strip()]
            if states:
                shown.append(states[-1].decode("utf-8", "replace")[:LAST_LINE_CHARACTERS])
        return shown[-count:]
