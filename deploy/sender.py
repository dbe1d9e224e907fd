"""Sends a directory to a host: several connections of OpenSSH side by side, each feeding a receiver there.

One ssh process encrypts on one core, and over a long way its window holds 2 MiB: so there are several,
started one after another, since sshd refuses what knocks at once (MaxStartups). They go by `Host.bulk`, so
that the user's ssh_config, agent and jump hosts do what they always do. `deploy.receiver` is the other end.

A chunk counts as sent when the host says that it is written; when all are, the host reads them back and says
which are not what they should be. What is missing when a connection breaks goes over another one, or over new
ones; what is missing when we die is all that the next try sends.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy import manifest, onhost, receiver
from deploy import pieces as piecewise
from deploy.errors import DeployError
from deploy.host import Host, HostError
from deploy.manifest import Chunk, Progress
from deploy.meter import Meter
from deploy.sender_control import SILENCE, Control, Lost
from deploy.sizes import size

MOST = 16  # streams that can be asked for
ROUND_TRIP = 0.015  # seconds: for each one more stream, since at most 2 MiB of each are on their way
PAUSES = (1.0, 2.0, 5.0, 10.0, 20.0)  # seconds before each further try after a lost link
SAME = 3  # times that a chunk may arrive damaged


@dataclass(frozen=True)
class Sent:
    """What a push has done. `bytes` is what the host has written of it, `there` what it had already."""

    bytes: int
    there: int
    seconds: float
    streams: int


def send(
    host: Host,
    source: Path,
    wanted: Mapping[str, Any],
    target: str,
    *,
    durable: bool,
    link: bool,
    streams: int | None = None,
    progress: Progress = manifest.silent,
    meter: Meter | None = None,
    again: str = "the same command",
    pauses: tuple[float, ...] = PAUSES,
) -> Sent:
    """Have the directory `source`, whose manifest is `wanted`, at `target` on the host, whole and read back.

    `durable`: on disk for good when this returns; `link`: ``<name>`` points there; `again`: the command that
    goes on, for the sentence if the link does not come back. Raises DeployError; what was there stays.
    """
    began = time.monotonic()
    sending = _Sending(host, source, wanted, target, durable, link, meter or Meter(progress))
    tries = 0
    while True:
        before = sending.sent
        try:
            with sending.meter:
                sending.attempt(streams)
            return Sent(sending.sent, sending.there, time.monotonic() - began, sending.streams)
        except KeyboardInterrupt:
            sending.progress(f"{sending.so_far()}; {again} goes on from there")
            raise
        except Lost as error:
            tries = 1 if sending.sent > before else tries + 1
            if tries > len(pauses):
                how = f"{error}, and it did not come back"
                raise DeployError(f"{how}: {sending.so_far()}; {again} goes on from there") from None
            sending.progress(f"{error}; trying again in {pauses[tries - 1]:g} s")
            time.sleep(pauses[tries - 1])


class _Sending:
    """One push, over all its tries."""

    def __init__(
        self,
        host: Host,
        source: Path,
        wanted: Mapping[str, Any],
        target: str,
        durable: bool,
        link: bool,
        meter: Meter,
    ) -> None:
        self.host, self.source, self.wanted, self.target = host, source, dict(wanted), target
        self.durable, self.link, self.progress, self.meter = durable, link, meter.tell, meter
        self.pieces = manifest.chunks(self.wanted)
        self.total = sum(one.length for one in self.pieces)
        self.reader = manifest.Reader(source, self.wanted["hash"])
        self.sent = self.there = self.arrived = self.streams = 0  # bytes, bytes, bytes, count
        self.damaged: dict[int, int] = {}
        self.connected = False  # at least once: who fails later is tried again
        self.changed = threading.Condition()
        self.pending: deque[int] = deque()
        self.live: list[_Stream] = []
        self.failure: DeployError | None = None

    def so_far(self) -> str:
        done = size(self.there + self.arrived)
        return f"{done} of {size(self.total)} of {self.source} have arrived"

    def attempt(self, streams: int | None) -> None:
        """Send what is missing. Raises Lost if all connections broke off, DeployError for all else."""
        words = (self.target, self.wanted, self.durable, self.link)
        with contextlib.ExitStack() as stack:
            if not self.connected:  # (a link that was lost is tried by one)
                self._begin_ahead(stack)
            try:
                process = onhost.open(self.host, "deploy.receiver:control", *words, bulk=True)
            except HostError as error:
                if self.connected:
                    raise Lost(str(error)) from None
                raise
            control = Control(self.host, process)
            stack.callback(control.close)
            if self.connected:
                self._begin_ahead(stack)
            self.connected = True
            said = control.answer(self.progress, "missing", "there")
            if "there" in said:
                self.there = self.total
                return
            self._missing(said["missing"])
            count = streams or _count(said["cpus"], said["kernel"], control.round_trip())
            while self.pending:
                self._send((said["incoming"], self.wanted["digest"], said["pid"]), count)
                self._refuse_changed()
                control.say("finish")
                answer = control.answer(self.progress, "missing", "done")
                if "done" in answer:
                    return
                self._missing(answer["missing"])
                self._look_again()
            control.say("finish")  # all was there, but not yet under its name
            control.answer(self.progress, "done")

    def _begin_ahead(self, stack: contextlib.ExitStack) -> None:
        """Begin the first stream's connection, while `control` comes about and the host makes room."""
        self.ahead = onhost.Ahead(self.host)
        stack.callback(self.ahead.close)

    def _missing(self, runs: list[list[int]]) -> None:
        self.pending = deque(number for first, end in runs for number in range(first, end))
        left = sum(self.pieces[number].length for number in self.pending)
        self.there, self.arrived = self.total - left, 0
        self.meter.begin(self.pieces, set(self.pending))

    def _refuse_changed(self) -> None:
        """Raise DeployError if a file is not what it was: also one of which what was announced has gone."""
        now, then = manifest.stamp_of(self.source), self.wanted["stamp"]
        for name in sorted({*now, *then}):
            if now.get(name) != then.get(name):
                what = f"{self.source / name} changed while it was sent"
                raise DeployError(f"{what}; push it again when it is whole")

    def _look_again(self) -> None:
        """Whether what did not arrive as announced is still here as it was announced. Raises DeployError."""
        for number in self.pending:
            one = self.pieces[number]
            self.damaged[number] = self.damaged.get(number, 0) + 1
            if self.reader.hash(one).hex() != one.hash:
                what = f"{self.source / one.relative} changed while it was sent"
                raise DeployError(f"{what}; push it again when it is whole")
            if self.damaged[number] > SAME:
                where = f"{self.source / one.relative} from byte {one.offset:,} on arrived damaged"
                raise DeployError(f"{where} {SAME + 1} times; look at the memory of {self.host.name}")

    def _send(self, words: tuple[Any, ...], count: int) -> None:
        self.failure = None
        self.outstanding = 0
        self.streams = 0
        self.live = []
        self.words = ""
        try:
            for _ in range(min(count, len(self.pending))):
                self._open(words)
            self._watch()
        finally:
            with self.changed:
                self.pending.clear()
                self.changed.notify_all()
            for one in self.live:
                one.end(kill=self.failure is not None or self.outstanding > 0)

    def _open(self, words: tuple[Any, ...]) -> None:
        if self.failure or not self.pending:
            return
        try:
            process = self.ahead.open("deploy.receiver:stream", *words)
        except HostError as error:
            if not any(one.alive for one in self.live):
                raise Lost(str(error)) from None
            return  # then with those that there are
        with self.changed:
            self.streams += 1
            self.live.append(_Stream(self, process))

    def _watch(self) -> None:
        """Until all chunks are written. Raises Lost, or what a stream found."""
        last, moved = self.sent, time.monotonic()
        with self.changed:
            while (self.pending or self.outstanding) and self.failure is None:
                if not any(one.alive for one in self.live):
                    raise Lost(f"{self.host.name}: the connection was lost{self.words}")
                self.changed.wait(0.5)
                if self.sent != last:
                    last, moved = self.sent, time.monotonic()
                if time.monotonic() - moved > SILENCE:
                    raise Lost(f"{self.host.name}: nothing arrived there for {SILENCE:g} s")
                self.meter.show()
        if self.failure is not None:
            raise self.failure

    # -- what the streams ask and tell ---------------------------------------------------------------------

    def next(self, stream: _Stream) -> int | None:
        """The next chunk to send; None when nothing is left to do."""
        with self.changed:
            while not self.pending and self.outstanding and stream.alive and self.failure is None:
                self.changed.wait()
            if not self.pending or not stream.alive or self.failure is not None:
                return None
            number = self.pending.popleft()
            stream.underway.add(number)
            self.outstanding += 1
            return number

    def written(self, stream: _Stream, number: int) -> None:
        """The host has said that it has written a chunk."""
        one = self.pieces[number]
        with self.changed:
            stream.underway.discard(number)
            self.outstanding -= 1
            self.sent += one.length
            self.arrived += one.length
            self.meter.add(one)
            self.changed.notify_all()

    def fail(self, error: DeployError) -> None:
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def ended(self, stream: _Stream, words: str) -> None:
        """A stream is over: others take what it had under way."""
        with self.changed:
            stream.alive = False
            self.words = f" ({words})" if words else ""
            self.outstanding -= len(stream.underway)
            self.pending.extendleft(sorted(stream.underway, reverse=True))
            stream.underway.clear()
            self.changed.notify_all()


class _Stream:
    """One connection: a thread that feeds it, and one that hears what has been written."""

    def __init__(self, sending: _Sending, process: subprocess.Popen[bytes]) -> None:
        self.sending, self.process = sending, process
        self.alive = True
        self.underway: set[int] = set()
        assert process.stdin
        assert process.stdout
        piecewise.widen(process.stdin.fileno())
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._feed, self._hear)]
        for thread in self._threads:
            thread.start()

    def _feed(self) -> None:
        assert self.process.stdin
        out = self.process.stdin.fileno()
        try:
            while (number := self.sending.next(self)) is not None:
                _write(out, b"%0*d" % (receiver.HEAD, number))
                _pour(self.sending.source, self.sending.pieces[number], out)
        except DeployError as error:  # a file here is gone, or short
            self.sending.fail(error)
        except OSError:  # the connection; the other thread sees it end
            onhost.kill(self.process)
            return
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.close()

    def _hear(self) -> None:
        assert self.process.stdout
        with contextlib.suppress(OSError, ValueError):
            for line in self.process.stdout:
                self.sending.written(self, int(line))
        words = onhost.last_words(self.process) if self.underway else ""
        if self.process.returncode == 1 and not words.startswith("exit code"):  # it has met an error there
            self.sending.fail(DeployError(f"{self.sending.host.name}: {words}"))
        self.sending.ended(self, words)

    def end(self, kill: bool) -> None:
        if kill:
            onhost.kill(self.process)
        for thread in self._threads:
            thread.join(onhost.END)
        onhost.close(self.process)


def _write(out: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(out, view) :]


def _pour(source: Path, one: Chunk, out: int) -> None:
    """Send a chunk of a file into a pipe. Raises DeployError for the file, OSError for the pipe."""
    path = source / one.relative
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise DeployError(f"{path} cannot be read: {error.strerror}") from None
    try:
        offset, end, spliced = one.offset, one.offset + one.length, True
        while offset < end:
            if spliced:
                try:
                    count = os.sendfile(out, file, offset, end - offset)
                except BrokenPipeError:
                    raise
                except OSError:  # not into a pipe (macOS), or not from this file system
                    spliced = False
                    continue
            else:
                try:
                    data = os.pread(file, min(piecewise.PIPE, end - offset), offset)
                except OSError as error:
                    raise DeployError(f"{path} cannot be read: {error.strerror}") from None
                _write(out, data)
                count = len(data)
            if not count:
                raise DeployError(f"{path} became shorter while it was sent; push it again when it is whole")
            offset += count
    finally:
        os.close(file)


def _count(cpus: int, kernel: str, round_trip: float) -> int:
    """How many streams: one for each core that both sides have, and more over a long way.

    Where both sides are the same machine (a container, a network namespace), they share its cores.
    """
    cores = min(os.cpu_count() or 1, cpus, 8)
    if kernel and kernel == receiver.kernel():
        cores = max(1, cores // 2)
    return max(1, min(max(cores, round(round_trip / ROUND_TRIP)), 8))
