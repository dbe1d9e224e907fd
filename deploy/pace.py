"""How fast a run gets on by the clock, with what its steps do not count: saving, evaluating, waiting.

Runs ON the host, as a part of the probe. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

SPAN = 3600.0  # seconds that are looked back: what comes less often than once an hour weighs little
STEPS = 20  # at least so many tell a pace
BLOCK = 1 << 15  # bytes; about 60 records


def pace(metrics: Path, since: float) -> dict[str, float] | None:
    """``{"steps", "seconds"}`` from the first record of a run's metrics that is no older than `since` (when
    this attempt began) and than an hour before the newest one, to the newest one. None if that is too little.

    The file may have hundreds of MB: its records are in the order of their times, so few blocks are read.
    """
    try:
        with open(metrics, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            newest = list(_records(file, max(0, size - BLOCK), BLOCK))[-1:]
            begin = max(since, newest[0][0] - SPAN) if newest else 0.0
            low, high = 0, size
            while high - low > BLOCK:
                middle = (low + high) // 2
                first = next(_records(file, middle, BLOCK), None)
                low, high = (middle, high) if first is not None and first[0] < begin else (low, middle)
            oldest = [found for found in _records(file, low, 3 * BLOCK) if found[0] >= begin][:1]
    except OSError:
        return None
    if not oldest or not newest:
        return None
    (began, first_step), (ended, last_step) = oldest[0], newest[0]
    if last_step - first_step < STEPS or ended <= began:
        return None
    return {"steps": last_step - first_step, "seconds": ended - began}


def _records(file: BinaryIO, offset: int, count: int) -> Iterator[tuple[float, float]]:
    """(time, step) of the records that begin within `count` bytes from `offset` on, and end there, too."""
    file.seek(offset)
    lines = file.read(count).split(b"\n")[:-1]
    for line in lines[1:] if offset else lines:  # (the first one may have begun before)
        try:
            record: Any = json.loads(line)
            yield float(record["time"]), float(record["step"])
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
