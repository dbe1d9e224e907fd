"""trainer.healthcheck: one word about the newest run of a name."""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.healthcheck import SILENT_SECONDS, judge, judge_run, main
from trainer.status import Heartbeat, Run, RunDir, allocate_run

NOW = 1_000_000.0


@pytest.fixture
def living(tmp_path: Path) -> Iterator[RunDir]:
    """A run whose lock is held, as launch does while it lives."""
    run = allocate_run(tmp_path / "runs", "demo")
    with open(run.lock, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield run


def beat(run: RunDir, age: float, rank: int = 0) -> None:
    run.write_heartbeat(Heartbeat(rank=rank, phase="training", step=12, time=NOW - age))


def test_without_a_run_there_is_nothing_healthy(tmp_path: Path) -> None:
    assert judge(tmp_path, "demo", NOW) == (False, "demo: no run yet")


def test_a_run_that_speaks_is_healthy(tmp_path: Path, living: RunDir) -> None:
    beat(living, age=2)
    assert judge(tmp_path, "demo", NOW) == (True, "0001-demo: rank 0 training, step 12, heartbeat 2 s ago")


def test_one_silent_rank_is_enough_to_be_unhealthy(tmp_path: Path, living: RunDir) -> None:
    beat(living, age=2, rank=0)
    beat(living, age=SILENT_SECONDS + 1, rank=1)
    healthy, word = judge(tmp_path, "demo", NOW)
    assert not healthy
    assert "rank 1" in word


def test_a_rank_that_is_through_makes_nothing_unhealthy_and_a_target_counts_no_steps(
    tmp_path: Path, living: RunDir
) -> None:
    beat(living, age=2, rank=0)
    for rank, phase in ((1, "training"), (2, "finishing")):
        age = 3 if rank == 1 else SILENT_SECONDS + 1
        living.write_heartbeat(Heartbeat(rank=rank, role="target", phase=phase, step=480, time=NOW - age))
    assert judge(tmp_path, "demo", NOW) == (True, "0001-demo: rank 1 training, step 12, heartbeat 3 s ago")


def test_a_command_without_heartbeats_is_healthy_while_it_lives(tmp_path: Path, living: RunDir) -> None:
    assert judge(tmp_path, "demo", NOW)[0]


def test_a_run_that_ended_is_not_healthy_whatever_its_last_heartbeat(tmp_path: Path) -> None:
    run = allocate_run(tmp_path / "runs", "demo")
    beat(run, age=0)
    assert judge(tmp_path, "demo", NOW) == (False, "0001-demo: not running")


def test_the_newest_run_of_that_name_counts(tmp_path: Path, living: RunDir) -> None:
    beat(living, age=1)
    allocate_run(tmp_path / "runs", "other")
    assert judge(tmp_path, "demo", NOW)[0]
    allocate_run(tmp_path / "runs", "demo")
    assert not judge(tmp_path, "demo", NOW)[0]


def test_one_run_is_judged_by_its_directory_where_a_container_has_nothing_else(
    tmp_path: Path, living: RunDir
) -> None:
    beat(living, age=2)
    living.write_run(Run(run_id="0001-demo", name="demo", command=[]))
    elsewhere = tmp_path / "drafthouse"
    living.path.rename(elsewhere)
    assert judge_run(RunDir(elsewhere), NOW) == (
        True,
        "0001-demo: rank 0 training, step 12, heartbeat 2 s ago",
    )
    (elsewhere / "run.json").write_text("[]")
    assert judge_run(RunDir(elsewhere), NOW)[0] is False


@pytest.mark.parametrize(
    "words", [[], ["--state", "/x"], ["--run-dir", "/x", "--state", "/x", "--name", "x"]]
)
def test_either_a_run_or_a_name_is_asked_for(words: list[str], monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["trainer.healthcheck", *words])
    with pytest.raises(SystemExit):
        main()
    assert "give either --run-dir, or --state and --name" in capsys.readouterr().err
