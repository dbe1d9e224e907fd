"""The log: segments, their index, and what happens when it cannot be written."""

from __future__ import annotations

import errno
import itertools
import os
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer import logfile
from trainer.logfile import Log, Tail, list_segments, rotation_cut


def content(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for _, path in list_segments(directory))


@given(
    st.lists(st.binary(min_size=1, max_size=60).map(lambda data: data.replace(b"\x07", b"\n"))),
    st.integers(1, 80),
)
def test_segments_hold_exactly_the_bytes_and_are_named_by_their_offset(chunks, limit):
    with tempfile.TemporaryDirectory() as place:
        log = Log(Path(place) / "log", limit, 10_000)
        for chunk in chunks:
            log.write(chunk)
        log.close()
        data = b"".join(chunks)
        assert content(log.directory) == data
        assert log.offset == len(data)
        position = 0
        for offset, path in list_segments(log.directory):
            assert offset == position
            size = path.stat().st_size
            position += size
            assert size <= 2 * limit
            ended_early = position < len(data) and data[position - 1 : position] != b"\n"
            assert not ended_early or size == 2 * limit  # only a record longer than a segment is cut


@pytest.mark.parametrize(
    ("size", "data", "at_start", "cut"),
    [
        (0, b"short\n", True, 6),
        (4, b"12345\n7890\n", False, 6),  # the last record that still fits
        (8, b"1234567890\n", True, 0),  # a new segment begins with it
        (8, b"1234567890\nx", False, 11),  # it ends what was begun, beyond the limit
        (0, b"x" * 50, True, 20),  # a record longer than a segment is cut at twice the limit
        (20, b"x", False, 0),
        (0, b"", True, 0),
    ],
)
def test_a_segment_ends_at_the_end_of_a_record(size, data, at_start, cut):
    assert rotation_cut(size, 10, data, at_start) == cut


def test_only_the_newest_segments_are_kept_and_the_index_forgets_the_others(tmp_path, monkeypatch):
    clock = iter(range(1000, 100_000, 2))
    monkeypatch.setattr(logfile.time, "time", lambda: float(next(clock)))
    log = Log(tmp_path / "log", 100, 3)
    for number in range(50):
        log.write(b"%049d\n" % number)
    kept = list_segments(log.directory)
    assert [offset for offset, _ in kept] == [2200, 2300, 2400]
    entries = [line.split() for line in (log.directory / "index").read_text().splitlines()]
    assert int(entries[0][1]) >= 2200
    assert [int(offset) for _, offset in entries] == sorted({int(offset) for _, offset in entries})
    assert all(re.fullmatch(r"\d+\.\d{3}", when) for when, _ in entries)


def test_the_index_has_at_most_one_line_a_second_and_points_at_records(tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(logfile.time, "time", lambda: now)
    log = Log(tmp_path / "log", 1 << 20, 3)
    for _ in range(100):
        log.write(b"half a line, ")
        now += 0.15
        log.write(b"its end\nnext\n")
        now += 0.15
    data = content(log.directory)
    entries = [line.split() for line in (log.directory / "index").read_text().splitlines()]
    times = [float(when) for when, _ in entries]
    assert 20 <= len(entries) <= 30
    assert all(later - earlier >= 0.999 for earlier, later in itertools.pairwise(times))
    for _, offset in entries:
        assert int(offset) == 0 or data[int(offset) - 1 : int(offset)] == b"\n"


class Disk:
    """os.write with room for so many bytes only."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.real = os.write

    def write(self, descriptor: int, data: bytes) -> int:
        data = bytes(data)[: self.room]
        if not data:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= len(data)
        return self.real(descriptor, data)


def test_missing_bytes_are_counted_and_told_and_offsets_stay_true(tmp_path, monkeypatch):
    clock = 0.0
    monkeypatch.setattr(logfile.time, "monotonic", lambda: clock)
    disk = Disk(10_005)  # the last line that fits is cut
    log = Log(tmp_path / "log", 1 << 20, 3)
    monkeypatch.setattr(log, "_index", lambda data: None)  # only the log itself writes to this disk
    monkeypatch.setattr(logfile.os, "write", disk.write)
    before = b"".join(b"line %04d\n" % n for n in range(2000))
    log.write(before)
    log.write(b"also lost\n")
    assert log.losing
    clock += 5
    assert not log.resume()  # still full
    disk.room = 7  # room for a part of the note
    clock += 5
    assert not log.resume()
    log.write(b"lost as well\n")
    disk.room = 1 << 20
    clock += 5
    log.write(b"after\n")
    log.close()
    data = content(log.directory)
    assert len(data) == log.offset
    notes = re.findall(rb"\xe2\x94\x80\xe2\x94\x80 [^\n]*\n", data)
    counts = [int(re.search(rb"([\d,]+) bytes", note)[1].replace(b",", b"")) for note in notes]
    assert sum(counts) == log.missing == 20_000 - 10_005 + len(b"also lost\n") + len(b"lost as well\n")
    assert b"No space left on device" in notes[0]
    assert data == before[:10_005] + b"\n" + b"".join(notes) + b"after\n"


def test_a_loss_at_the_very_end_is_counted_too(tmp_path, monkeypatch):
    log = Log(tmp_path / "log", 1 << 20, 3)
    monkeypatch.setattr(logfile.os, "write", Disk(0).write)
    log.write(b"gone\n")
    log.close()
    assert log.missing == 5
    assert log.offset == 0


def test_a_line_of_launch_never_lands_in_the_middle_of_another(tmp_path):
    log = Log(tmp_path / "log", 1 << 20, 3)
    log.write(b"half")
    log.write_line(b"note\n")
    log.write_line(b"note\n")
    assert content(log.directory) == b"half\nnote\nnote\n"


def test_the_tail_shows_the_last_lines_as_a_person_would_see_them():
    tail = Tail()
    tail.feed(b"".join(b"line %d\n" % n for n in range(100)))
    tail.feed(b"\r10%\r20%\n\xff\xfe binary\n\n  \nTraceback: last words")
    lines = tail.lines(20)
    assert len(lines) == 20
    assert lines[-3:] == ["20%", "\ufffd\ufffd binary", "Traceback: last words"]
    assert lines[0] == "line 83"


def test_the_tail_stays_small():
    tail = Tail(limit=1000)
    for _ in range(1000):
        tail.feed(b"x" * 999 + b"\n")
    assert len(tail._kept) <= 2000
    assert [len(line) for line in tail.lines()] == [logfile.LAST_LINE_CHARACTERS]
