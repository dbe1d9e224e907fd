"""The next micro-batches, made ready by a thread while the step runs.

Which batch comes is asked for by number, so nothing depends on how far the thread is ahead.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import Protocol

import torch

from trainer.data import Batch

DEPTH = 2  # batches in waiting


class Source(Protocol):
    def batch(self, number: int) -> Batch: ...


class Prefetch:
    """`source.batch` by number, computed ahead as long as the numbers grow by `stride`.

    What the source raises is raised by `batch` with the number that it happened at. For a GPU the batches lie
    in pinned memory, from which they can be copied while it computes. `close` ends the thread.
    """

    def __init__(
        self, source: Source, device: torch.device | str = "cpu", depth: int = DEPTH, stride: int = 1
    ) -> None:
        self._source = source
        self._stride = stride
        self._pin = torch.device(device).type == "cuda"
        self._depth = depth
        self._next: int | None = None  # the number that the thread hands out next
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(depth)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def batch(self, number: int) -> Batch:
        """Micro-batch `number`, made ready before if it follows the one before."""
        if number != self._next:
            self.close()
            self._begin(number)
        found = self._ready.get()
        if isinstance(found, BaseException):
            self.close()
            raise found
        self._next = number + self._stride
        return found

    def _begin(self, number: int) -> None:
        # New ones, so that a thread that is still at work on a batch nobody wants cannot hand it out.
        self._ready, self._over = queue.Queue(self._depth), threading.Event()
        arguments = (number, self._ready, self._over)
        self._thread = threading.Thread(target=self._work, args=arguments, name="data", daemon=True)
        self._thread.start()

    def _work(self, number: int, ready: queue.Queue[Batch | BaseException], over: threading.Event) -> None:
        found: Batch | BaseException
        while not over.is_set():
            try:
                found = self._source.batch(number)
                if self._pin:
                    found = found.pinned()
            except BaseException as error:
                found = error
            ready.put(found)  # `close` makes room
            if isinstance(found, BaseException):
                return
            number += self._stride

    def close(self) -> None:
        """End the thread and forget what it has made ready."""
        self._over.set()
        self._next = None
        if self._thread is not None:
            with contextlib.suppress(queue.Empty):
                while True:
                    self._ready.get_nowait()
            self._thread.join()
            self._thread = None
