"""The way of features from the processes that run the target to those that train the drafter.

Who computes which micro-batch and who trains on it follows from its number alone (`World.mine`), so nothing
depends on timing. A drafter asks for its next micro-batches as soon as it has room for their features; a
target computes ahead as far as it has room, says when features are there, and sends them. So neither runs
away from the other, and a transfer begins only when both ends are ready: a receiving GPU never waits inside a
kernel for a sender that still computes.

Between each pair travel, by gloo: the number that is asked for (or END), and a notice that says what comes;
then the features themselves, by NCCL between GPUs.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.data import Batch, Reader
from trainer.waiting import AHEAD, Waits
from trainer.world import World, peers

END = -1
ASK, NOTICE = 1, 2  # tags; the features have none
LAST_EVERY = 100  # of a drafter's micro-batches one comes with the target's last hidden states

Compute = Callable[[int], tuple[Tensor, Tensor | None]]


def with_last(number: int, drafters: int, *, always: bool) -> bool:
    """Whether micro-batch `number` travels with the target's last hidden states: for soft labels always, else
    now and then, to see whether the labels are what the target would write.
    """
    return always or number // drafters % LAST_EVERY == 0


@dataclass
class _Room:
    """Memory for the features of one micro-batch."""

    taps: Tensor
    last: Tensor | None
    free: torch.cuda.Event | None = None  # when what was there is no longer read
    there: torch.cuda.Event | None = None  # when what comes is there


@dataclass(frozen=True)
class _Arrived:
    number: int
    room: _Room
    rows: int
    length: int
    has_last: bool
    waited: float
    computed: float


class Incoming:
    """A drafter's end: the features of its micro-batches, received ahead into memory that stays."""

    def __init__(
        self,
        world: World,
        reader: Reader,
        taps_width: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        soft: bool,
    ) -> None:
        positions = max(rows * length for rows, length in reader.shapes())
        self._world = world
        self._device = device
        self._dtype = dtype
        self._soft = soft
        self._taps_width, self._width = taps_width, width

        def room(columns: int) -> Tensor:
            return torch.empty(positions * columns, dtype=dtype, device=device)

        self._rooms = [_Room(room(taps_width), room(width)) for _ in range(AHEAD)]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._mail: list[tuple[dist.Work, Tensor]] = []
        self._numbers: Iterator[int] = iter(())
        self._asked: queue.Queue[tuple[int, _Room] | None] = queue.Queue()
        self._arrived: queue.Queue[_Arrived | BaseException] = queue.Queue()
        self._held: _Room | None = None
        self._thread: threading.Thread | None = None
        self.waits = Waits()

    def begin(self, first: int, end: int) -> None:
        """Ask for the micro-batches of `first` … `end` - 1 that are this drafter's."""
        self._numbers = iter(self._world.mine(first, end))
        self._asked, self._arrived, self._held = queue.Queue(), queue.Queue(), None
        self._thread = threading.Thread(target=self._receive, name="features", daemon=True)
        self._thread.start()
        for room in self._rooms:
            self._ask(room)

    def __call__(self, number: int | None, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """(taps [b, C, K·H] of the context, the last hidden states [b, S, H] if they came). They stay as they
        are until `release`. A batch without number, which only has the size of one, gets zeros.
        """
        rows, length = batch.input_ids.shape
        if number is None:
            nothing = torch.zeros(rows, length, self._width, dtype=self._dtype, device=self._device)
            taps = nothing.new_zeros(rows, batch.blocks.context_length, self._taps_width)
            return taps, nothing if self._soft else None
        self.waits.depth += self._arrived.qsize()
        self.waits.taken += 1
        began = time.perf_counter()
        found = self._arrived.get()
        self.waits.drafters += time.perf_counter() - began
        if isinstance(found, BaseException):
            raise found
        context = batch.blocks.context_length
        if (found.number, found.rows, found.length) != (number, rows, context):
            raise RuntimeError(
                f"micro-batch {number} of {rows} × {context} positions was asked for, {found.number} of "
                f"{found.rows} × {found.length} came: the processes of this run do not read the same data"
            )
        self.waits.targets += found.waited
        self.waits.computed += found.computed
        room = self._held = found.room
        if room.there is not None:
            torch.cuda.current_stream(self._device).wait_event(room.there)
        taps = _view(room.taps, rows, context, self._taps_width)
        last = None
        if found.has_last:
            assert room.last is not None
            last = _view(room.last, rows, length, self._width)
        return taps, last

    def has_last(self, number: int) -> bool:
        return with_last(number, len(self._world.team), always=self._soft)

    def last(self, batch: Batch) -> Tensor | None:
        """Nothing but what came can be had."""
        return None

    def skip(self, number: int, batch: Batch) -> None:
        """Nothing of this micro-batch is wanted."""
        self(number, batch)
        self.release()

    def release(self) -> None:
        """What was handed out is no longer needed: its place is there for another micro-batch."""
        room, self._held = self._held, None
        if room is None:
            return
        if self._device.type == "cuda":
            room.free = torch.cuda.Event()
            room.free.record(torch.cuda.current_stream(self._device))
        self._ask(room)

    def end(self) -> None:
        """Ask for no more. What is under way still comes, and is dropped."""
        if self._thread is None:
            return
        for target in self._world.targets:
            self._post(END, target.number)
        self._asked.put(None)
        self._thread.join()
        self._thread = None
        with peers():
            for work, _ in self._mail:
                work.wait()
        self._mail = []
        with contextlib.suppress(queue.Empty):
            while True:
                if isinstance(found := self._arrived.get_nowait(), BaseException):
                    raise found

    def _ask(self, room: _Room) -> None:
        number = next(self._numbers, None)
        if number is None:
            return
        targets = self._world.targets
        self._post(number, targets[number % len(targets)].number)
        self._asked.put((number, room))

    def _post(self, number: int, to: int) -> None:
        """Not waited for: gloo hands a message over when the other end takes it."""
        self._mail = [(work, message) for work, message in self._mail if not work.is_completed()]
        message = torch.tensor([number])
        with peers():
            work = dist.isend(message, dst=to, group=self._world.channels, tag=ASK)
        assert work is not None
        self._mail.append((work, message))

    def _receive(self) -> None:
        try:
            while (asked := self._asked.get()) is not None:
                self._arrived.put(self._take(*asked))
        except BaseException as error:
            self._arrived.put(error)

    def _take(self, number: int, room: _Room) -> _Arrived:
        targets = self._world.targets
        source = targets[number % len(targets)].number
        notice = torch.empty(6, dtype=torch.float64)
        with peers():
            dist.recv(notice, src=source, group=self._world.channels, tag=NOTICE)
        told, rows, length, full, waited, computed = notice.tolist()
        found = _Arrived(int(told), room, int(rows), int(length), full > 0, waited, computed)
        with contextlib.ExitStack() as stack:
            if self._stream is not None:
                stack.enter_context(torch.cuda.stream(self._stream))
                if room.free is not None:
                    self._stream.wait_event(room.free)
            stack.enter_context(peers())
            dist.recv(room.taps[: found.rows * found.length * self._taps_width], src=source)
            if found.has_last:
                assert room.last is not None
                dist.recv(room.last[: found.rows * int(full) * self._width], src=source)
            if self._stream is not None:
                room.there = torch.cuda.Event()
                room.there.record(self._stream)
        return found


class Outgoing:
    """A target's end: computes the features of its micro-batches, ahead of those who want them."""

    def __init__(self, world: World, device: torch.device) -> None:
        self._world = world
        self._device = device

    def serve(self, first: int, end: int, compute: Compute) -> None:
        """Compute and send micro-batches of `first` … `end` - 1 until these are over or the drafters want no
        more. `compute` gives the taps of the context [b, C, K·H], and the last hidden states [b, S, H] or
        None.
        """
        serving = _Serving(self._world, self._device)
        for number in self._world.mine(first, end):
            began = time.perf_counter()
            serving.room.acquire()
            waited = time.perf_counter() - began
            if serving.over.is_set():
                break
            taps, last = compute(number)
            event = None
            if self._device.type == "cuda":
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(self._device))
            computed = time.perf_counter() - began - waited
            serving.ready.put((number, taps.contiguous(), last, event, waited, computed))
        serving.ready.put(None)
        serving.join()


class _Serving:
    """One time of serving: a thread sends what is ready, in order."""

    def __init__(self, world: World, device: torch.device) -> None:
        self._world = world
        self.room = threading.Semaphore(AHEAD)
        self.ready: queue.Queue[
            tuple[int, Tensor, Tensor | None, torch.cuda.Event | None, float, float] | None
        ] = queue.Queue()
        self.over = threading.Event()  # the drafters want no more, or something is wrong
        self._error: BaseException | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ended: set[int] = set()  # drafters that want no more
        self._thread = threading.Thread(target=self._send_all, name="features", daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _send_all(self) -> None:
        try:
            while (item := self.ready.get()) is not None:
                if self.over.is_set():
                    continue
                number, taps, last, event, waited, computed = item
                drafter = self._world.team[number % len(self._world.team)]
                if not self._wanted(drafter.number, number):
                    self.over.set()
                    self.room.release()
                    continue
                if event is not None:
                    event.synchronize()
                self._send(drafter.number, number, taps, last, waited, computed)
                self.room.release()
            for drafter in self._world.team:  # each of them says when it wants no more
                if drafter.number not in self._ended and self._wanted(drafter.number, END):
                    raise RuntimeError(f"{drafter} wants a micro-batch that nobody was to send any more")
        except BaseException as error:
            self._error = error
            self.over.set()
            self.room.release()

    def _wanted(self, drafter: int, number: int) -> bool:
        """Wait for `drafter` to ask for `number`; False if it wants no more."""
        asked = torch.empty(1, dtype=torch.int64)
        with peers():
            dist.recv(asked, src=drafter, group=self._world.channels, tag=ASK)
        if int(asked) == END:
            self._ended.add(drafter)
            return False
        if int(asked) != number:
            raise RuntimeError(f"rank {drafter} asked for micro-batch {int(asked)}, and {number} was next")
        return True

    def _send(
        self, drafter: int, number: int, taps: Tensor, last: Tensor | None, waited: float, computed: float
    ) -> None:
        rows, length = taps.shape[:2]
        full = last.shape[1] if last is not None else 0
        notice = torch.tensor([number, rows, length, full, waited, computed], dtype=torch.float64)
        with contextlib.ExitStack() as stack:
            stack.enter_context(peers())
            dist.send(notice, dst=drafter, group=self._world.channels, tag=NOTICE)
            if self._stream is not None:
                stack.enter_context(torch.cuda.stream(self._stream))
            dist.send(taps.view(-1), dst=drafter)
            if last is not None:
                dist.send(last.contiguous().view(-1), dst=drafter)
            if self._stream is not None:
                self._stream.synchronize()  # until then the memory of these is not another's


def _view(room: Tensor, rows: int, length: int, width: int) -> Tensor:
    return room[: rows * length * width].view(rows, length, width)
