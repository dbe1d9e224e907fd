"""deploy/segments.py: a log in segments, read as one stream."""

from __future__ import annotations

import os
import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.segments import Segments


def write(directory, *segments: bytes) -> int:
    """Segments one after the other; the offset behind the last."""
    directory.mkdir(exist_ok=True)
    offset = 0
    for data in segments:
        (directory / f"{offset:020d}.log").write_bytes(data)
        offset += len(data)
    return offset


def read_all(log: Segments, offset: int = 0) -> tuple[list[tuple[int, int]], bytes]:
    """(gaps, bytes) from `offset` to the end."""
    gaps, parts = [], b""
    while True:
        start, data = log.read(offset)
        if not data:
            return gaps, parts
        if start > offset:
            gaps.append((offset, start))
        parts += data
        offset = start + len(data)


def test_segments_read_as_one_stream(tmp_path):
    write(tmp_path / "log", b"one\ntwo\n", b"three\n", b"four")
    assert read_all(Segments(tmp_path / "log")) == ([], b"one\ntwo\nthree\nfour")


@pytest.mark.parametrize("offset", range(19))
def test_any_offset_is_a_place_to_begin(tmp_path, offset):
    end = write(tmp_path / "log", b"one\ntwo\n", b"three\n", b"four")
    assert read_all(Segments(tmp_path / "log"), offset)[1] == b"one\ntwo\nthree\nfour"[offset:end]


def test_a_log_that_is_not_there_is_empty(tmp_path):
    log = Segments(tmp_path / "none")
    assert (log.starts(), log.end(), log.read(0), log.last_lines(5)) == ([], 0, (0, b""), 0)


def test_other_files_in_the_directory_are_left_alone(tmp_path):
    write(tmp_path / "log", b"one\n")
    (tmp_path / "log" / "index").write_text("1.0 0\n")
    (tmp_path / "log" / "x.log").write_text("no")
    assert read_all(Segments(tmp_path / "log")) == ([], b"one\n")


def test_bytes_that_came_after_the_end_was_reached_are_read_on(tmp_path):
    write(tmp_path / "log", b"one\n")
    log = Segments(tmp_path / "log")
    assert log.read(0) == (0, b"one\n")
    assert log.read(4) == (4, b"")
    with open(tmp_path / "log" / f"{0:020d}.log", "ab") as file:
        file.write(b"two\n")
    assert log.read(4) == (4, b"two\n")


def test_bytes_written_to_a_segment_just_before_the_next_one_began_are_not_lost(tmp_path):
    write(tmp_path / "log", b"one\n")
    log = Segments(tmp_path / "log")
    log.read(0)
    with open(tmp_path / "log" / f"{0:020d}.log", "ab") as file:
        file.write(b"two\n")
    (tmp_path / "log" / f"{8:020d}.log").write_bytes(b"three\n")
    assert read_all(log, 4) == ([], b"two\nthree\n")


def test_a_segment_that_is_open_is_read_to_its_end_although_it_was_removed(tmp_path):
    write(tmp_path / "log", b"x" * 100_000, b"new\n")
    log = Segments(tmp_path / "log")
    _, data = log.read(0)
    os.unlink(tmp_path / "log" / f"{0:020d}.log")
    assert read_all(log, len(data)) == ([], b"x" * (100_000 - len(data)) + b"new\n")


def test_segments_that_were_removed_unread_leave_a_gap_that_can_be_counted(tmp_path):
    write(tmp_path / "log", b"one\n", b"two\n", b"three\n")
    log = Segments(tmp_path / "log")
    log.read(0)
    for offset in (0, 4):
        os.unlink(tmp_path / "log" / f"{offset:020d}.log")
    assert read_all(log, 4) == ([(4, 8)], b"three\n")
    assert read_all(Segments(tmp_path / "log"), 0) == ([(0, 8)], b"three\n")


def test_an_empty_new_segment_is_waited_for(tmp_path):
    write(tmp_path / "log", b"one\n", b"")
    log = Segments(tmp_path / "log")
    assert read_all(log) == ([], b"one\n")
    with open(tmp_path / "log" / f"{4:020d}.log", "ab") as file:
        file.write(b"two\n")
    assert read_all(log, 4) == ([], b"two\n")


@settings(max_examples=200)
@given(
    st.binary(max_size=60).map(lambda data: data.replace(b"\x00", b"\n")), st.integers(0, 12), st.randoms()
)
def test_the_last_lines_are_those_of_the_whole_text(tmp_path_factory, data, count, random_):
    directory = tmp_path_factory.mktemp("log")
    cuts = sorted(random_.sample(range(len(data) + 1), min(3, len(data) + 1)))
    write(directory, *[data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if b > a])
    lines = data.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    expected = len(b"\n".join(lines[-count:])) if count and lines else 0
    expected += int(bool(count and lines and data.endswith(b"\n")))
    assert Segments(directory).last_lines(count) == len(data) - expected


def test_the_end_of_a_large_log_costs_no_memory(tmp_path):
    lines = b"".join(b"%d %s\n" % (n, random.Random(n).randbytes(30).hex().encode()) for n in range(100_000))
    write(tmp_path / "log", lines, lines, lines)
    log = Segments(tmp_path / "log")
    tracemalloc.start()
    try:
        offset = log.last_lines(10)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert read_all(log, offset)[1] == b"".join(lines.splitlines(keepends=True)[-10:])
    assert peak < 1 << 20
