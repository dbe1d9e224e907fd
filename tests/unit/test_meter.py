"""How far a transfer is: the line that people see, on a real terminal and without one."""

from __future__ import annotations

import os
import types

import pytest

from deploy import meter
from deploy.manifest import Chunk
from deploy.meter import Meter

PIECES = [Chunk("sub/a\x1b[2J.bin", 0, 4_000_000, ""), Chunk("sub/a\x1b[2J.bin", 4_000_000, 4_000_000, "")]
PIECES += [Chunk("b.bin", 0, 2_000_000, "")]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(meter, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_the_line_has_bytes_rate_and_time_left_of_the_file_and_in_all(clock: list[float]) -> None:
    said: list[str] = []
    shown = Meter(said.append)
    shown.begin(PIECES, {1, 2})
    clock[0] += 11
    shown.show()
    assert said == []  # nothing has arrived yet
    shown.add(PIECES[2])
    shown.show()
    clock[0] += 1
    shown.show()  # not yet again
    assert said == ["b.bin 2.0 MB of 2.0 MB · all 6.0 MB of 10 MB at 182 kB/s, 22 s left"]
    clock[0] += 10
    shown.add(PIECES[1])
    shown.show()
    assert said[1].startswith("a [2J.bin 8.0 MB of 8.0 MB · all 10 MB of 10 MB at ")
    assert "left" not in said[1]


def test_on_a_terminal_one_line_is_drawn_anew_and_wiped_for_other_words(clock: list[float]) -> None:
    ours, theirs = os.openpty()
    said: list[str] = []
    with os.fdopen(theirs, "w") as terminal:
        shown = Meter(said.append, terminal)
        with shown:
            shown.begin(PIECES, {0, 1, 2})
            clock[0] += 1
            shown.add(PIECES[0])
            shown.show()
            drawn = os.read(ours, 4096)
            assert drawn.startswith(b"\r\x1b[Ka [2J.bin 4.0 MB of 8.0 MB, ")
            assert b"\n" not in drawn
            assert len(drawn.decode()) < len("\r\x1b[K") + meter.WIDTH
            shown.tell("the connection was lost")
            assert os.read(ours, 4096) == b"\r\x1b[K"
            assert said == ["the connection was lost"]
    os.close(ours)
