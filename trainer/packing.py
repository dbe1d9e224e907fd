"""Packing: several documents behind one another in a row, so that little of a micro-batch is padding.

How the rows are composed is a function of the lengths alone (best fit, longest first, all documents of one
length at a time); which documents of a length go where is drawn anew each epoch. So every epoch has the same
number of rows, and a million documents are packed in a moment.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import Any

import numpy as np

from trainer.errors import InputError

FINENESS = (
    64  # lengths are rounded up to about a 64th of their mean, so that many documents can change places
)
ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")  # layers that a mask can divide


def check_packing(config: Any) -> None:
    """Raises InputError if a layer of the target carries something from one document into the next.

    `config`: the target's text config, as an object or a mapping.
    """
    kinds = config.get("layer_types") if isinstance(config, Mapping) else getattr(config, "layer_types", None)
    other = sorted(set(kinds or ()) - set(ATTENTION))
    if other:
        raise InputError(
            f"--packing: the target has layers of the kind {', '.join(other)}, whose state would go from one "
            "document into the next of its row; leave the flag out"
        )


def rounded(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Lengths as they are packed: rounded up, at most `capacity`."""
    step = max(1, int(lengths.mean()) // FINENESS)
    return np.minimum(-(-lengths // step) * step, capacity)


def pack(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Rows for documents of `lengths` (in descending order, none above `capacity`): [D], the row of each,
    from 0 without a gap.
    """
    sizes, counts = np.unique(lengths, return_counts=True)
    by_room: dict[int, np.ndarray] = {}  # rows by what still fits into them
    rooms: list[int] = []  # its keys, in order
    rows = 0
    placed: list[np.ndarray] = []

    def put(room: int, some: np.ndarray) -> None:
        if room in by_room:
            by_room[room] = np.concatenate([by_room[room], some])
        elif len(some):
            by_room[room] = some
            bisect.insort(rooms, room)

    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        left = count
        while left and (at := bisect.bisect_left(rooms, size)) < len(rooms):
            room = rooms.pop(at)
            some = by_room.pop(room)
            placed.append(some[:left])
            put(room - size, some[:left])
            put(room, some[left:])
            left -= len(placed[-1])
        if left:  # none of the rows has room
            each = capacity // size
            full, rest = divmod(left, each)
            placed.append(rows + np.arange(left) // each)
            put(capacity - each * size, rows + np.arange(full))
            put(capacity - rest * size, rows + np.arange(full, full + (rest > 0)))
            rows += full + (rest > 0)
    return np.concatenate(placed)
