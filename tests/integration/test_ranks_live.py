"""Several ranks under the real launch: what is seen of them, what is asked of them, and their end."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from deployed import HOST
from launching import Launched, gone, launched, wait_for

from deploy import evidence, stacks_host
from deploy.details import evidence as details
from deploy.health import Verdict, verdict

pytestmark = pytest.mark.slow

# The trainer's own launcher and heartbeats; only what a rank computes is made up.
RANKS = """
import faulthandler, signal, sys, time
from trainer import ranks
from trainer.monitor import Monitor, StopSignal, say
from trainer.roles import Rank
from trainer.status import RunDir
import os

places = [Rank(0, "drafter", 0, "cpu:2"), Rank(1, "target", 0, "cpu:0"), Rank(2, "target", 1, "cpu:1")]
own, stall = ranks.own(places), float(sys.argv[1])
if own is None:
    sys.exit(ranks.launch([sys.executable, "-u", __file__, *sys.argv[1:]], places, stall_timeout=stall))
faulthandler.register(signal.SIGUSR1, all_threads=True)
run = os.environ["DRAFTHOUSE_RUN_DIR"]
monitor = Monitor(__import__("pathlib").Path(run), own, stall)
monitor.phase("loading")
stop = StopSignal()
if own.number == 0: stop.install()
monitor.progress(0, 600)
monitor.phase("training")
step = 0

def steps():
    global step
    saved = os.path.join(run, "saved")
    while not (stop.came if own.number == 0 else os.path.exists(saved)):
        step += 1 if own.number == 0 else 40
        monitor.step_done(step, 0.05, 100)
        say(f"at {step}")
        time.sleep(0.05)
        while os.path.exists(os.path.join(run, "hang")): time.sleep(0.01)

steps()
if own.number == 0:
    monitor.phase("checkpointing")
    open(os.path.join(run, "saved"), "w").close()
monitor.phase("finishing")
monitor.close()
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Launched]:
    script = tmp_path / "train.py"
    script.write_text(RANKS)
    with launched(
        tmp_path / "runs" / "0001-demo",
        [sys.executable, "-u", str(script), "4"],
        popen={"env": {**os.environ, "PYTHONPATH": os.getcwd(), "TMPDIR": str(tmp_path)}},
    ) as started:
        for rank in range(3):
            started.wait_for_log(b"[%d] at " % rank)
        wait_for(lambda: all(beat.step for beat in started.directory.heartbeats().values()))
        yield started


def pids(run: Launched) -> list[int]:
    return [beat.pid for beat in run.directory.heartbeats().values()]


def seen(run: Launched, later: float = 0) -> tuple[dict[str, Any], dict[str, Any], Verdict]:
    """(the run's evidence, all facts, its verdict so many seconds later)"""
    root = run.directory.path.parent.parent
    facts = evidence.collect(HOST, str(root), str(root / "shm"))
    (found,) = facts["runs"]
    return found, facts, verdict(found, facts["time"] + later, sample=facts["sample_seconds"])


def test_each_rank_is_seen_and_asked_and_a_stop_ends_all(run: Launched, monkeypatch) -> None:
    found, facts, told = seen(run)
    assert told.word == "training"
    step = int(re.match(r"step (\d+)/600, ", told.reason)[1])  # type: ignore[index]
    assert step < run.directory.heartbeats()[1].step
    assert [(rank, one["role"]) for rank, one in details(found, facts)["ranks"].items()] == [
        ("0", "drafter"), ("1", "target"), ("2", "target"),
    ]  # fmt: skip

    request = run.directory.ask("dump-stacks", "ada")
    answer = wait_for(lambda: (state := run.directory.launch()) and state.answered)
    assert answer["id"] == request.id
    assert "gave no answer" not in answer["outcome"]
    start, end = answer["log"]
    dumped = run.raw_log[start:end].decode()
    for rank, pid in enumerate(pids(run)):
        assert f"── stacks of rank {rank} (pid {pid})\n" in dumped
        assert re.search(rf'^\[{rank}]   File .*train.py", line \d+ in steps$', dumped, re.MULTILINE)
    monkeypatch.setattr(stacks_host, "find_tool", lambda _: None)  # py-spy needs no answer
    looked = stacks_host.of_run(str(run.directory.path), 0, "ada")
    ranked = [one for one in looked["processes"] if one["rank"] is not None]
    assert sorted(one["rank"] for one in ranked) == [0, 1, 2]
    for one in ranked:
        assert one["by"] == "faulthandler"
        assert "steps" in [frame["function"] for frame in one["threads"][0]["frames"]]

    everybody, below = pids(run), run.tree()[1:]
    run.term()
    record = run.finish()
    assert (record.reason, record.code, record.signal) == ("stopped", 0, None)
    assert record.last_step == run.directory.heartbeats()[0].step
    assert len(everybody) == 3
    assert all(map(gone, below))
    assert not any("left behind" in line for line in run.notes)


def test_one_dead_rank_ends_the_run_which_names_it(run: Launched) -> None:
    everybody = pids(run)
    os.kill(everybody[1], signal.SIGKILL)
    record = run.finish()
    assert (record.reason, record.code) == ("failed", 137)
    words = "error: rank 1 (target 0 on cpu:0) failed first, by SIGKILL"
    assert record.last_lines[-1] == words
    assert all(map(gone, everybody))
    _, _, told = seen(run)
    assert told.word == "failed"
    assert told.reason.endswith(f"last line: {words}")


def test_a_rank_that_stays_behind_is_named_and_a_hang_ends_with_all_stacks(run: Launched) -> None:
    os.kill(pids(run)[2], signal.SIGSTOP)
    before = run.directory.heartbeats()[2].time
    wait_for(lambda: run.directory.heartbeats()[0].time > before + 1.5)
    _, _, told = seen(run, later=600)
    assert told.word == "stalled"
    assert told.reason.startswith("rank 2 (target) training: no progress for 10 min after step ")
    (run.directory.path / "hang").touch()
    record = run.finish()
    assert (record.reason, record.code) == ("failed", 4)
    assert "no step of any rank for 4 s (--stall-timeout)" in record.last_lines[-1]
    for rank in range(2):
        assert re.search(
            rf'^\[{rank}]   File .*train.py", line \d+ in steps$', run.log.decode(), re.MULTILINE
        )


def test_when_launch_is_killed_no_rank_is_left(run: Launched) -> None:
    everybody = pids(run)
    os.kill(run.launch_pid(), signal.SIGKILL)
    wait_for(lambda: all(map(gone, everybody)), "the ranks' end")


def test_the_trainer_itself_stops_resumes_and_names_a_rank_that_was_killed(tmp_path: Path) -> None:
    target = tiny.target_directory(tmp_path / "target")
    data = tiny.data_directory(tmp_path / "data", target)
    devices = {"target_gpus": "cpu:0", "drafter_gpus": "cpu:1,cpu:2"}
    flags = tiny.flags(target, data, tmp_path / "out", epochs=100_000, log_interval=0, **devices)
    command = [sys.executable, "-u", "-m", "trainer", *flags]
    environment = {"env": {**os.environ, "PYTHONPATH": os.getcwd(), "TMPDIR": str(tmp_path)}}

    with launched(tmp_path / "runs" / "0001-demo", command, popen=environment) as run:
        run.wait_for_log(b"[0] step 3/")
        below = run.tree()[1:]
        run.term()
        record = run.finish()
    assert (record.reason, record.code) == ("stopped", 0)
    assert record.last_checkpoint
    assert record.last_step == record.last_checkpoint["step"] >= 3
    assert all(map(gone, below))
    assert not list(tmp_path.glob("drafthouse-*"))
    assert run.log.count(b"target " + os.fsencode(target)) == 1  # what can be told at once is said once

    with launched(tmp_path / "runs" / "0002-demo", command, popen=environment) as run:
        run.wait_for_log(b"[0] step %d/" % (record.last_step + 1))
        assert [beat.role for beat in run.directory.heartbeats().values()] == ["drafter", "drafter", "target"]
        os.kill(pids(run)[2], signal.SIGKILL)
        killed = run.finish()
    assert (killed.reason, killed.code) == ("failed", 137)
    assert killed.last_lines[-1] == "error: rank 2 (target 0 on cpu:0) failed first, by SIGKILL"
    assert killed.last_checkpoint
    assert killed.last_checkpoint["step"] > record.last_step  # what was learnt since is kept
