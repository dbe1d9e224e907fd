"""How a stream of bytes is cut into records for stdout."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.forward import (
    PROGRESS_BYTES,
    PROGRESS_SECONDS,
    RECORD_BYTES,
    SETTLE_SECONDS,
    Records,
    last_state,
)


def joined(blocks: list[tuple[bytes, int]]) -> bytes:
    return b"".join(data for data, _ in blocks)


def chunks_of(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(st.lists(st.binary(max_size=40)), st.lists(st.integers(0, 10_000), max_size=20))
def test_lines_pass_byte_for_byte_however_they_arrive(lines, cuts):
    data = b"".join(line.replace(b"\n", b"") + b"\n" for line in lines)
    records, out = Records(), []
    for chunk in chunks_of(data, cuts):
        out += records.feed(chunk, 0.0)
        out += records.tick(0.0)
    out += records.end()
    assert joined(out) == data
    assert sum(count for _, count in out) == len(lines)


@given(st.binary(max_size=200), st.lists(st.integers(0, 10_000), max_size=20))
def test_the_end_of_the_output_ends_its_last_record(data, cuts):
    records, out = Records(), []
    for chunk in chunks_of(data, cuts):
        out += records.feed(chunk, 0.0)
    out += records.end()
    assert joined(out) == data + (b"" if not data or data.endswith(b"\n") else b"\n")


def test_a_line_of_50000_bytes_is_one_record():
    line = b"x" * 49_999 + b"\n"
    records, out = Records(), []
    for at in range(0, len(line), 4096):
        out += records.feed(line[at : at + 4096], 0.0)
    assert out == [(line, 1)]


def test_an_unfinished_line_beyond_the_limit_is_passed_on_in_pieces():
    records = Records()
    out = records.feed(b"x" * (RECORD_BYTES + 1), 0.0) + records.feed(b"y\nz\n", 0.0)
    assert joined(out) == b"x" * (RECORD_BYTES + 1) + b"y\nz\n"
    assert sum(count for _, count in out) == 2


def test_a_progress_bar_shows_a_state_at_most_every_five_seconds_and_always_its_last():
    records, shown = Records(), []
    for tick in range(301):  # 30 s, ten updates a second
        now = tick / 10
        out = records.feed(b"\r%3d%%|bar" % (tick // 3), now) + records.tick(now)
        shown += [(now, data) for data, _ in out]
    shown += [(30.1, data) for data, _ in records.feed(b"\r100%|done\n", 30.1)]
    times = [now for now, _ in shown]
    assert times[0] == pytest.approx(SETTLE_SECONDS)
    assert all(later - earlier >= PROGRESS_SECONDS for earlier, later in itertools.pairwise(times[:-1]))
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) < 5.2
    assert shown[-1][1] == b"100%|done\n"
    assert all(data.count(b"\n") == 1 and b"\r" not in data for _, data in shown)


def test_a_progress_bar_that_is_never_finished_shows_its_last_state_at_the_end():
    records = Records()
    records.feed(b"\r10%\r20%", 0.0)
    assert records.tick(SETTLE_SECONDS) == [(b"20%\n", 1)]
    records.feed(b"\r30%", 1.5)
    assert records.end() == [(b"30%\n", 1)]


def test_a_state_that_was_shown_is_not_shown_again():
    records = Records()
    records.feed(b"\r100%", 0.0)
    assert records.tick(SETTLE_SECONDS) == [(b"100%\n", 1)]
    assert records.due() is None
    assert records.feed(b"\n", 9.0) == []
    assert records.feed(b"next\n", 9.0) == [(b"next\n", 1)]


def test_a_progress_bar_does_not_grow_in_memory():
    records = Records()
    for step in range(100_000):
        records.feed(b"\rstep %d" % step, 0.0)
    assert len(records._pending) <= PROGRESS_BYTES + 20
    assert records.end() == [(b"step 99999\n", 1)]


def test_an_unfinished_line_is_shown_when_it_is_left_alone_and_its_rest_follows():
    records = Records()
    assert records.feed(b"loading ...", 0.0) == []
    assert records.tick(SETTLE_SECONDS - 0.01) == []
    assert records.tick(SETTLE_SECONDS) == [(b"loading ...\n", 1)]
    assert records.feed(b" done\n", 40.0) == [(b" done\n", 1)]


def test_an_unfinished_line_that_was_shown_needs_no_empty_record_for_its_newline():
    records = Records()
    records.feed(b"Proceed? ", 0.0)
    records.tick(SETTLE_SECONDS)
    assert records.feed(b"\n", 5.0) == []
    assert records.feed(b"\n", 5.0) == [(b"\n", 1)]


@pytest.mark.parametrize(
    ("line", "state"),
    [
        (b"", b""),
        (b"plain", b"plain"),
        (b"\r1\r2", b"2"),
        (b"1\r2\r", b"2"),
        (b"\r\r", b""),
        (b"a\r\n", b"\n"),
    ],
)
def test_the_last_state_is_what_a_terminal_would_show(line, state):
    assert last_state(line) == state
