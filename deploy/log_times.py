"""When the bytes of a log were written, by the index that launch keeps beside it (`trainer.logfile`).

A line ``<unix time> <offset>`` of ``log/index`` says of the bytes from its offset up to the next line's that
they were written at that time or within the second after it. So a moment is found to the second: what was
written since then is shown whole, and of what came before it at most one second's. A clock that was put back
makes it more, never less.

Runs ON the host. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

from deploy.segments import Segments

PRECISION = 1.0  # seconds that a line of the index covers
BLOCK = 1 << 20


def find_since(log: Segments, moment: float) -> Generator[None, None, int]:
    """The offset of the first line that may have been written at `moment` (Unix time) or later.

    The end of the log if there is none. It is the value of a generator, which yields now and then. A line
    counts by its first byte; of a progress bar, which is one long line, it begins within it.
    """
    starts = log.starts()
    end = log.end()
    if not starts:
        return end
    first = True
    rest = b""
    try:
        with open(log.directory / "index", "rb") as file:
            while block := file.read(BLOCK):
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    time, offset = parse(line)
                    if offset < 0:
                        continue
                    if time > moment - PRECISION:
                        # What lies before the index's first line is as old as nobody knows.
                        return starts[0] if first else min(max(offset, starts[0]), end)
                    first = False
                yield
    except OSError:
        pass
    return unindexed(log, starts, moment) if first else end


def parse(line: bytes) -> tuple[float, int]:
    """(time, offset) of a line of the index; an offset of -1 if it is none."""
    time, _, offset = line.partition(b" ")
    try:
        return float(time), int(offset)
    except ValueError:
        return 0.0, -1


def unindexed(log: Segments, starts: list[int], moment: float) -> int:
    """For a log without an index: the first segment that was written to since then."""
    for start in starts:
        try:
            if os.stat(Path(log.directory, f"{start:020d}.log")).st_mtime >= moment - PRECISION:
                return start
        except OSError:
            continue
    return log.end()
