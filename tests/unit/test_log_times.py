"""deploy/log_times.py against trainer/logfile.py: which bytes were written since a moment."""

from __future__ import annotations

import os
import random
import types
from pathlib import Path

import pytest

from deploy import log_times
from deploy.segments import Segments
from trainer import logfile


def since(directory: Path, moment: float) -> int:
    search = log_times.find_since(Segments(directory), moment)
    while True:
        try:
            next(search)
        except StopIteration as found:
            return found.value


@pytest.mark.parametrize("seed", range(12))
def test_nothing_written_since_a_moment_is_left_out_and_at_most_a_second_more_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance = random.Random(seed)
    clock = [1_000_000.0]
    fake = types.SimpleNamespace(time=lambda: clock[0], monotonic=lambda: clock[0])
    monkeypatch.setattr(logfile, "time", fake)
    log = logfile.Log(tmp_path / "log", chance.choice((300, 2000, 1 << 20)), chance.choice((3, 1000)))
    written = []  # (time, offset) of each line
    for number in range(600):
        written.append((clock[0], log.offset))
        log.write(b"%d\n" % number)
        clock[0] += chance.choice((0, 0, 0.01, 0.3, 1, 2, 40))
    oldest = logfile.list_segments(log.directory)[0][0]
    there = [(time, offset) for time, offset in written if offset >= oldest]
    for moment in [chance.uniform(1_000_000 - 5, clock[0] + 5) for _ in range(200)] + [t for t, _ in there]:
        offset = since(log.directory, moment)
        shown = [time for time, at in there if at >= offset]
        assert len(shown) >= sum(time >= moment for time, _ in there)
        assert all(time > moment - log_times.PRECISION for time in shown)


def test_what_the_index_could_not_take_on_a_full_disk_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, full, write = [1000.0], [False], os.write
    monkeypatch.setattr(
        logfile, "time", types.SimpleNamespace(time=lambda: clock[0], monotonic=lambda: clock[0])
    )

    def limited(descriptor: int, data: bytes) -> int:
        if full[0] and os.readlink(f"/proc/self/fd/{descriptor}").endswith("/index"):
            full[0] = False
            return write(descriptor, data[:5])  # the rest has no room
        return write(descriptor, data)

    monkeypatch.setattr(logfile.os, "write", limited)
    log = logfile.Log(tmp_path / "log", 1 << 20, 3)
    for number in range(6):
        full[0] = number == 2
        log.write(b"%d\n" % number)
        clock[0] += 10
    times = [float(line.split()[0]) for line in (log.directory / "index").read_text().splitlines()]
    assert times == [1000, 1010, 1020, 1030, 1040, 1050]
    assert [since(log.directory, 1000 + 10 * n) for n in range(6)] == [0, 2, 4, 6, 8, 10]


def log_of(directory: Path, index: str | None, *segments: bytes) -> Path:
    offset = 0
    for data in segments:
        (directory / f"{offset:020d}.log").write_bytes(data)
        offset += len(data)
    if index is not None:
        (directory / "index").write_text(index)
    return directory


def test_a_clock_that_was_put_back_makes_it_more_and_never_less(tmp_path: Path) -> None:
    log_of(tmp_path, "1000.0 0\n2000.0 10\n1500.0 20\n1600.0 30\n", b"x" * 40)
    assert since(tmp_path, 1600) == 10
    assert since(tmp_path, 1400) == 10


def test_lines_that_are_no_lines_of_an_index_are_passed_over(tmp_path: Path) -> None:
    log_of(tmp_path, "junk\n1000.0 0\n\nx y z\n1010.0 10\n10", b"x" * 40)
    assert since(tmp_path, 1005) == 10


def test_before_the_first_line_of_an_index_nothing_is_known_so_all_is_shown(tmp_path: Path) -> None:
    log_of(tmp_path, "1000.0 30\n1010.0 40\n", b"x" * 50)
    assert since(tmp_path, 999.5) == 0
    assert since(tmp_path, 1005) == 40
    assert since(tmp_path, 2000) == 50


def test_without_an_index_the_segments_times_are_what_is_known(tmp_path: Path) -> None:
    log_of(tmp_path, None, b"x" * 10, b"y" * 10, b"z" * 10)
    for number, offset in enumerate((0, 10, 20)):
        os.utime(tmp_path / f"{offset:020d}.log", (1000 + 100 * number, 1000 + 100 * number))
    assert [since(tmp_path, moment) for moment in (900, 1050, 1150, 1300)] == [0, 10, 20, 30]


def test_a_run_without_a_log_has_nothing_since_any_moment(tmp_path: Path) -> None:
    assert since(tmp_path / "none", 0) == 0
