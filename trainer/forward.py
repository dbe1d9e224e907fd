"""What goes to launch's stdout: whole records, and never in the way of the trainer.

A container engine keeps what it reads from stdout as records, ended by a newline or at 16 KiB. So a progress
bar, which only ever writes carriage returns, would show nothing until its end, and a stdout that nobody reads
would stop the trainer. `Records` cuts the stream, `Forward` writes it without waiting.

Standard library only and Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import stat
import time
from collections import deque

from trainer.logfile import note

PROGRESS_SECONDS = 5.0  # at most so often the state of a progress bar becomes a record
SETTLE_SECONDS = 1.0  # an unfinished line that is left alone for so long is shown as it is
PROGRESS_BYTES = 16 << 10  # an unfinished line with carriage returns keeps only its last state beyond this
RECORD_BYTES = 1 << 20  # an unfinished line longer than this is passed on in pieces
QUEUE_BYTES = 4 << 20  # so much waits for a slow stdout
PIPE_BYTES = 4096  # what a pipe that polls as writable takes without blocking (PIPE_BUF)


def last_state(line: bytes) -> bytes:
    """What a terminal shows of a line that was overwritten with carriage returns."""
    states = [state for state in line.split(b"\r") if state]
    return states[-1] if states else b""


class Records:
    """Cuts one attempt's output into records.

    Whole lines pass byte for byte, whatever their length. A line that stays unfinished for a second becomes a
    record as it is, and what follows another one. A line with carriage returns that stays unfinished is a
    progress bar: its state becomes a record at most every 5 s, and its last state always does.
    """

    def __init__(self) -> None:
        self._pending = b""  # of the unfinished line
        self._began = 0.0  # when its first byte came
        self._latest = 0.0  # when its newest byte came
        self._fresh = False  # bytes came since it was shown
        self._thinned = False  # some of its states were dropped or shown already
        self._broken = False  # the line was shown unfinished: a bare newline adds nothing
        self._shown = float("-inf")  # when a state was last shown

    def feed(self, data: bytes, now: float) -> list[tuple[bytes, int]]:
        """Take bytes that came at `now` (monotonic, s); the blocks that are complete by them."""
        out: list[tuple[bytes, int]] = []
        cut = data.rfind(b"\n") + 1
        if cut:
            body = self._finish(data[:cut])
            if body:
                out.append((body, body.count(b"\n")))
            data = data[cut:]
        if data:
            if not self._pending:
                self._began = now
            self._pending += data
            self._latest = now
            self._fresh = True
            out += self._bound()
        return out

    def _finish(self, lines: bytes) -> bytes:
        """`lines` ends the unfinished line, with its first newline, and may hold more."""
        end = lines.find(b"\n") + 1
        first, rest = self._pending + lines[:end], lines[end:]
        if self._thinned:
            changed = self._fresh or end > 1
            first = last_state(first[:-1]) + b"\n" if changed else b""
        elif self._broken and first in (b"\n", b"\r\n"):
            first = b""
        self._pending, self._fresh, self._thinned, self._broken = b"", False, False, False
        return first + rest

    def _bound(self) -> list[tuple[bytes, int]]:
        """Keep the unfinished line within its limits."""
        if len(self._pending) > PROGRESS_BYTES and b"\r" in self._pending:
            self._pending = b"\r" + last_state(self._pending)
            self._thinned = True
        if len(self._pending) > RECORD_BYTES:
            piece, self._pending, self._fresh, self._thinned = self._pending, b"", False, False
            return [(piece, 0)]
        return []

    def due(self) -> float | None:
        """When `tick` will have something to show (monotonic, s)."""
        if not self._pending or not self._fresh:
            return None
        if b"\r" in self._pending:
            return max(self._began + SETTLE_SECONDS, self._shown + PROGRESS_SECONDS)
        return self._latest + SETTLE_SECONDS

    def tick(self, now: float) -> list[tuple[bytes, int]]:
        """Show the unfinished line if its time has come."""
        due = self.due()
        if due is None or now < due:
            return []
        if b"\r" in self._pending:
            state = last_state(self._pending)
            self._pending, self._thinned, self._fresh = b"\r" + state, True, False
            self._shown = now
            return [(state + b"\n", 1)] if state else []
        piece, self._pending, self._fresh, self._broken = self._pending, b"", False, True
        return [(piece + b"\n", 1)]

    def end(self) -> list[tuple[bytes, int]]:
        """No more bytes will come: show what is left."""
        if not self._pending or not self._fresh:
            return []
        piece = last_state(self._pending) if self._thinned else self._pending
        self._pending, self._fresh = b"", False
        return [(piece + b"\n", 1)]


class Forward:
    """Writes blocks to a descriptor without ever waiting for its reader.

    Setting O_NONBLOCK on stdout would set it for every process that shares it (a shell, tini). So a pipe or a
    terminal is opened again, a socket is written with MSG_DONTWAIT, and where opening again is not allowed
    only so much is written as a pipe that polls as writable takes at once.
    """

    def __init__(
        self, descriptor: int = 1, queue_bytes: int = QUEUE_BYTES, kept: str = "; log/ has them"
    ) -> None:
        """`kept`: what is said of records that were dropped."""
        self._kept = kept
        self.dropped = 0  # records that were not written and never will be
        self.closed = False
        self._limit = queue_bytes
        self._queue: deque[tuple[bytes, int]] = deque()
        self._size = 0
        self._at_record_start = True
        self._dropping = 0  # records dropped since the queue was full
        self._socket: socket.socket | None = None
        self._small = False  # write at most PIPE_BYTES at a time, after a poll
        self.pollable = False  # may be watched by a selector
        self.descriptor = descriptor
        self._open(descriptor)

    def _open(self, descriptor: int) -> None:
        try:
            kind = os.fstat(descriptor).st_mode
        except OSError:
            self.closed = True
            return
        if stat.S_ISSOCK(kind):
            self._socket = socket.socket(fileno=os.dup(descriptor))
            self.descriptor = self._socket.fileno()
            self.pollable = True
        elif stat.S_ISFIFO(kind) or os.isatty(descriptor):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            try:
                self.descriptor = os.open(f"/proc/self/fd/{descriptor}", flags)
            except OSError:
                self._small = True
            self.pollable = True

    @property
    def waiting(self) -> int:
        """How many blocks are still to be written."""
        return len(self._queue)

    @property
    def size(self) -> int:
        """How many bytes are still to be written."""
        return self._size

    def put(self, data: bytes, records: int) -> None:
        """Queue a block and write what can be written. A block that finds the queue full is dropped whole."""
        if self.closed:
            self.dropped += records
            return
        if self._dropping or (self._queue and self._size + len(data) > self._limit):
            self._dropping += max(records, 1)
            self.dropped += max(records, 1)
        else:
            self._enqueue(data, records)
        self.pump()

    def _enqueue(self, data: bytes, records: int) -> None:
        self._queue.append((data, records))
        self._size += len(data)
        self._at_record_start = data.endswith(b"\n")

    def pump(self) -> None:
        """Write until all is written or nothing more is taken."""
        while self._queue and not self.closed:
            data, records = self._queue.popleft()
            written = self._write(data)
            self._size -= written
            if written < len(data):
                if self.closed:
                    self.dropped += records
                else:
                    rest = data[written:]
                    self._queue.appendleft((rest, rest.count(b"\n") if records else 0))
                break
        if self._dropping and self._size <= self._limit // 2 and not self.closed:
            text = f"{self._dropping:,} records are missing here: stdout was not read{self._kept}"
            line = note(text) if self._at_record_start else b"\n" + note(text)
            self._dropping = 0
            self._enqueue(line, 0)
            self.pump()
        if self.closed:
            self.abandon()

    def flush(self, patience: float, longest: float) -> None:
        """Wait for a slow reader: `longest` s in all, `patience` s for one that takes nothing."""
        until = time.monotonic() + longest
        while self._queue and self.pollable and time.monotonic() < until:
            poll = select.poll()
            poll.register(self.descriptor, select.POLLOUT)
            if not poll.poll(patience * 1000):
                break
            self.pump()

    def abandon(self) -> None:
        """Give up what is still queued, and count it."""
        self.dropped += sum(records for _, records in self._queue)
        self._queue.clear()
        self._size = 0

    def _write(self, data: bytes) -> int:
        """Write what the descriptor takes now; the number of bytes."""
        written = 0
        view = memoryview(data)
        while written < len(data):
            try:
                if self._socket is not None:
                    written += self._socket.send(view[written:], socket.MSG_DONTWAIT)
                elif self._small:
                    if not _writable(self.descriptor):
                        break
                    written += os.write(self.descriptor, view[written : written + PIPE_BYTES])
                else:
                    written += os.write(self.descriptor, view[written:])
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    self.closed = True  # no reader, or a terminal that hung up: the log goes on
                    break
                self.dropped += data.count(b"\n", written)
                return len(data)
        return written

    def close(self) -> None:
        """Give up what is queued and let go of the descriptor that was opened again (never of stdout)."""
        self.abandon()
        if self._socket is not None:
            self._socket.close()
        elif self.pollable and not self._small:
            with contextlib.suppress(OSError):
                os.close(self.descriptor)
        self.closed = True
        self.pollable = False


def _writable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(0))
