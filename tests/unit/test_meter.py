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


def test_a_narrow_line_keeps_what_is_said_of_it_all_and_no_rate_comes_of_a_few_bytes(
    clock: list[float],
) -> None:
    shown = Meter(lambda text: None)
    pieces = [Chunk("config.json", 0, 22, ""), Chunk("model-00001-of-00012.safetensors", 0, 60_000_000, "")]
    pieces += [Chunk("model-00002-of-00012.safetensors", 0, 60_000_000, "")]
    shown.begin(pieces, {0, 1, 2})
    clock[0] += 0.3
    shown.add(pieces[0])
    assert shown.line(79) == "config.json 22 B of 22 B · all 22 B of 120 MB"
    clock[0] += 0.7
    shown.add(pieces[1])
    assert shown.line(79) == "…of-00012.safetensors 60 MB of 60 MB · all 60 MB of 120 MB at 60 MB/s, 1 s left"
    assert shown.line(100).startswith("model-00001-of-00012.safetensors 60 MB of 60 MB · all 60 MB")


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
            line = "a [2J.bin 4.0 MB of 8.0 MB · all 4.0 MB of 10 MB at 4.0 MB/s, 2 s left"
            assert drawn.decode() == f"\r\x1b[K{line}"
            assert b"\n" not in drawn
            assert len(drawn.decode()) < len("\r\x1b[K") + meter.WIDTH
            shown.tell("the connection was lost")
            assert os.read(ours, 4096) == b"\r\x1b[K"
            assert said == ["the connection was lost"]
    os.close(ours)
