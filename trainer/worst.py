"""The worst step of a run, before its first: what does not fit into memory shows at once, not in an hour."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import nn

from trainer.blocks import Blocks
from trainer.compiling import Compilations, Drafting
from trainer.data import CONTEXT_BUCKET, Batch, Reader
from trainer.errors import InputError
from trainer.monitor import Monitor, say


def worst_batches(reader: Reader) -> list[Batch]:
    """The micro-batches that need most: the one with most positions, and the one with the longest rows, if
    that is another. Every block is there, as late in its row as it can be, and every slot has a label.

    They belong to no document, and no random number is drawn for them.
    """
    shapes = reader.shapes()
    most = max(shapes, key=lambda shape: (shape[0] * shape[1], shape[1]))
    longest = max(shapes, key=lambda shape: (shape[1], shape[0]))
    return [_batch(reader, *shape) for shape in dict.fromkeys((most, longest))]


def _batch(reader: Reader, rows: int, length: int) -> Batch:
    p = reader.portions
    slots = p.max_anchors
    # Spread evenly over the rows; a row of length S has no more than S - 1 anchors.
    per_row = [min(slots // rows + (row < slots % rows), max(length - 1, 1)) for row in range(rows)]
    of_row = [row for row, count in enumerate(per_row) for _ in range(count)]
    anchors = [position for count in per_row for position in range(length - count, length)]
    blocks = Blocks.build(of_row, anchors, p.block_size, bucket=CONTEXT_BUCKET, window=p.sliding_window)
    blocks = replace(blocks, context_length=min(blocks.context_length, length))
    weights = torch.ones(len(blocks), p.block_size)
    weights[:, 0] = 0
    return Batch(
        documents=[],
        places=[],
        input_ids=torch.zeros(rows, length, dtype=torch.int64),
        lengths=[],
        positions=_positions(rows, length) if p.packing else None,
        blocks=blocks,
        block_ids=torch.zeros(len(blocks), p.block_size, dtype=torch.int64),
        labels=torch.zeros(len(blocks), p.block_size, dtype=torch.int64),
        weights=weights,
        rows=weights.flatten().nonzero()[:, 0],
    )


def _positions(rows: int, length: int) -> torch.Tensor:
    """Of two documents in each row: with one alone the target would need no mask, and that takes memory."""
    return torch.arange(length).remainder(max(length // 2, 1)).repeat(rows, 1)


def rehearse(
    reader: Reader,
    device: torch.device,
    drafter: nn.Module,
    drafting: Drafting,
    gradient: Callable[[Batch], object],
    monitor: Monitor,
) -> None:
    """The worst step with `gradient`, of which nothing is learnt; says what came of it. What does not fit
    into memory shows now, and what is to be compiled is.

    Raises InputError if a micro-batch does not fit, or if compiling was asked for and does not work.
    """
    began, compilations = time.monotonic(), Compilations()
    if drafting.compiled:
        monitor.phase("compiling", f"cache {drafting.cache}")
    try:
        said = _try_out(reader, device, drafter, drafting, gradient, monitor)
    except InputError:
        raise
    except Exception as error:
        drafting.give_up(error)
        said = _try_out(reader, device, drafter, drafting, gradient, monitor)
    if drafting.compiled:
        pieces, seconds = compilations.new(), time.monotonic() - began
        say(f"compiled {pieces} pieces of code in {seconds:.0f} s, kept in {drafting.cache}")
    say(said)


def _try_out(
    reader: Reader,
    device: torch.device,
    drafter: nn.Module,
    drafting: Drafting,
    gradient: Callable[[Batch], object],
    monitor: Monitor,
) -> str:
    tried = ""
    for batch in worst_batches(reader):
        try:
            with refused(batch, device, monitor, recompute=drafting.recompute):
                gradient(batch.to(device))
                tried = described(batch)
        finally:
            for parameter in drafter.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
    return f"the largest micro-batch fits: {tried}, {monitor.memory()['peak'] / 1e9:,.1f} GB at most"


@contextlib.contextmanager
def refused(
    batch: Batch, device: torch.device, monitor: Monitor, *, recompute: bool = True
) -> Iterator[None]:
    """Raises InputError if what is done with the largest micro-batch `batch` does not fit into memory;
    `recompute`: --recompute is given, or would not help.
    """
    try:
        yield
    except Exception as error:
        if not out_of_memory(error):
            raise
        peak = monitor.memory()["peak"] / 1e9
        first = "" if recompute else "give --recompute, or "
        raise InputError(
            f"the largest micro-batch, {described(batch)}, does not fit into the memory of {device} "
            f"({peak:,.1f} GB at most so far); {first}lower --token-budget or --max-anchors"
        ) from None


def described(batch: Batch) -> str:
    rows, length = batch.input_ids.shape
    slots, size = batch.labels.shape
    return f"{rows} × {length:,} positions with {slots:,} blocks of {size}"


def out_of_memory(error: BaseException) -> bool:
    """Whether torch says that memory ran out, on a GPU or, in its own words, on the host."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
