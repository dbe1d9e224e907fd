"""A function applied to items by several processes, the results in the order of the items.

Bounded: no more items are taken than the processes have to do and a few in waiting. The processes are forked,
so what the function holds (a tokenizer) is there without being loaded again, and they end with us, however we
end.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from typing import Any, TypeVar

from trainer.errors import InputError
from trainer.processes import PR_SET_PDEATHSIG, prctl

Item = TypeVar("Item")
Result = TypeVar("Result")

WAITING = 2  # items in waiting for each process
PAYS = 4  # with fewer items than this no process is started
_function: Callable[[Any], Any] | None = None  # in a worker


def available() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ordered(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Generator[Result]:
    """`function` of every item. What it raises is raised here; a process that is killed is an InputError."""
    items = iter(items)
    first = list(islice(items, PAYS))
    if workers < 2 or len(first) < PAYS or sys.platform != "linux":
        yield from map(function, chain(first, items))
        return
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("fork"), initializer=_begin, initargs=(function, os.getpid())
    )
    waiting: deque[Future[Any]] = deque()
    try:
        for item in chain(first, items):
            waiting.append(pool.submit(_apply, item))
            if len(waiting) > workers * (1 + WAITING):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise InputError(
            f"one of the {workers} processes was killed, perhaps for its memory; give fewer with --workers"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin(function: Callable[[Any], Any], parent: int) -> None:
    global _function
    _function = function
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches us too; the parent ends the work
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(OSError):
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _apply(item: Any) -> Any:
    assert _function is not None
    return _function(item)
