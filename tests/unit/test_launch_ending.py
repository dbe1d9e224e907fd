"""Which end leads to another attempt, and what is said of the last one."""

from __future__ import annotations

import dataclasses

import pytest

from trainer.ending import FIRST_DELAY, End, conclude, from_wait_status, how, newest, next_attempt, write_exit
from trainer.status import Exit, Heartbeat, Run, RunDir

RUN = Run(run_id="0001-demo", name="demo", command=["x"], restart_attempts=2, restart_minutes=10)


def test_the_last_step_is_one_of_the_training_not_of_a_target() -> None:
    beats = [
        Heartbeat(rank=0, role="drafter", step=12, time=5.0, last_checkpoint={"step": 10}),
        Heartbeat(rank=1, role="target", step=480, time=6.0),
    ]
    assert newest(beats) == (12, {"step": 10})


@pytest.mark.parametrize(
    ("end", "stopping", "again"),
    [
        (End(0), None, False),
        (End(1), None, True),
        (End(255), None, True),
        (End(2), None, False),
        (End(126), None, False),
        (End(127), None, False),
        (End(137, 9), None, True),
        (End(130, 2), None, True),
        (End(143, 15), "SIGTERM", False),
        (End(1), "somebody", False),
        (End(127, sentence="not found"), None, False),
    ],
)
def test_only_a_crash_that_nobody_asked_for_is_followed_by_another_attempt(end, stopping, again):
    assert (next_attempt(end, [0.0], RUN, stopping) is not None) == again


def test_the_delay_doubles_with_each_crash():
    run = dataclasses.replace(RUN, restart_attempts=20)
    delays = [next_attempt(End(1), [0.0] * count, run, None) for count in range(1, 10)]
    assert delays[:3] == [FIRST_DELAY, 2 * FIRST_DELAY, 4 * FIRST_DELAY]
    assert delays[-1] == 30.0


def test_restarts_are_counted_within_their_minutes_only():
    assert next_attempt(End(1), [0, 1, 2], RUN, None) is None
    assert next_attempt(End(1), [0, 1, 601.5], RUN, None) == FIRST_DELAY  # the first two are long ago
    assert next_attempt(End(1), [0, 1, 600.5], RUN, None) == 2 * FIRST_DELAY


def test_no_restarts_means_none():
    assert next_attempt(End(1), [0.0], dataclasses.replace(RUN, restart_attempts=0), None) is None


@pytest.mark.parametrize(
    ("end", "attempts", "stopping", "reason", "words"),
    [
        (End(0, seconds=61), 1, None, "finished", "finished after 1 min 1 s"),
        (End(0), 2, "ann@laptop", "stopped", "stopped by ann@laptop"),
        (End(143, 15), 1, "SIGTERM", "stopped", "by SIGTERM"),
        (End(143, 15), 0, "SIGTERM", "stopped", "before the trainer was started"),
        (End(1), 4, None, "failed", "exit code 1 after 0.0 s (attempt 4"),
        (End(2), 1, None, "failed", "settings are wrong"),
        (End(139, 11), 1, None, "failed", "by SIGSEGV"),
        (End(137, 9, True), 1, None, "failed", "out of memory"),
        (End(137, 9, None), 1, None, "failed", "could not be read"),
        (End(127, sentence="the command x was not found"), 1, None, "failed", "failed: the command x"),
    ],
)
def test_the_end_is_told_in_one_sentence(end, attempts, stopping, reason, words):
    found, message = conclude(end, attempts, RUN, stopping)
    assert found == reason
    assert words in message
    assert "\n" not in message


def test_one_restart_is_one_restart():
    run = Run(run_id="0001-demo", name="demo", command=["x"], restart_attempts=1, restart_minutes=10)
    assert conclude(End(1), 2, run, None)[1].endswith("(attempt 2; at most 1 restart in 10 min)")


def test_a_signal_becomes_the_code_that_a_shell_reports():
    assert from_wait_status(7) == (7, None)
    assert from_wait_status(-9) == (137, 9)
    assert how(End(128 + 40, 40)) == "by signal 40"


def test_the_last_step_and_checkpoint_are_the_newest_that_any_rank_told():
    old = Heartbeat(rank=0, time=1.0, step=10, last_checkpoint={"step": 10})
    new = Heartbeat(rank=1, time=2.0, step=12)
    assert newest([new, old]) == (12, {"step": 10})
    assert newest([]) == (None, None)


def test_the_record_is_written_into_the_reserve_when_the_disk_is_full(tmp_path, monkeypatch):
    reserve = tmp_path / ".reserve"
    reserve.write_bytes(b"x")
    real = RunDir.write_exit

    def write(self, record):
        if reserve.exists():
            raise OSError(28, "No space left on device")
        real(self, record)

    monkeypatch.setattr(RunDir, "write_exit", write)
    write_exit(RunDir(tmp_path), Exit(reason="finished", code=0), reserve)
    assert RunDir(tmp_path).exit().reason == "finished"
