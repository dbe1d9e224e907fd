"""The heartbeat, the log line, the requests and the records beside the log."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trainer import monitor, sinks
from trainer.monitor import PARTS, Interval, Monitor, line
from trainer.roles import Rank
from trainer.sinks import MetricsFile, Project, Records, TensorBoard, Wandb, _flat, wandb_mode
from trainer.status import PROGRESS_VARIABLE, RANK_VARIABLE, RunDir, write_json


def wait_for(condition, seconds: float = 20) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    (tmp_path / "0003-x").mkdir()
    return RunDir(tmp_path / "0003-x")


RECORD = {
    "loss": 3.4123,
    "tau_hat": 1.619,
    "accuracy": 0.25,
    "tokens_per_second": 18432.4,
    "lr": 5.8e-4,
    "phase_seconds": dict(zip(PARTS, (0.002, 0, 0.041, 0.018, 0.060, 0.005), strict=True)),
    "memory": {"now": 812_000_000},
}


def test_the_log_line_reads_as_agreed() -> None:
    assert line(120, 600, RECORD) == (
        "step 120/600 · 18,432 tok/s · loss 3.412 · τ̂ 1.62 · lr 5.8e-04 · "
        "data 2 target 0 forward 41 objective 18 backward 60 optimizer 5 ms · mem 812 MB"
    )


def test_memory_now_is_never_above_its_peak() -> None:
    for _ in range(20):
        kept = bytearray(1 << 20)
        now, peak = monitor.memory()
        assert kept is not None
        assert now <= peak


def test_a_line_without_any_label_says_so() -> None:
    assert " · loss – · τ̂ – · " in line(1, 2, {**RECORD, "loss": None, "tau_hat": None})


def test_a_tree_that_was_measured_is_in_the_line() -> None:
    assert " · τ̂ 1.62 · tree-τ 2.25 · lr " in line(
        1, 2, {**RECORD, "tree_tau": {"16": 1.9, "32": 2.0, "64": 2.25}}
    )


def test_an_interval_has_what_was_learnt_in_it_and_how_long_that_took() -> None:
    interval = Interval(steps=2, tokens=100)
    with interval.part("forward"):
        pass
    summary = interval.summary(0.1, {}, {"loss": 2.0, "slots": {"accuracy": [0.5]}})
    assert summary["loss"] == 2.0
    assert summary["slots"] == {"accuracy": [0.5]}
    assert summary["tokens_per_second"] > 0
    assert list(summary["phase_seconds"]) == list(PARTS)


def test_progress_is_said_once_while_it_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    monitor = Monitor(None)
    for text in ("0 of 2", "0 of 2", "1 of 2", "0 of 2"):
        monitor.report(text)
        assert monitor.heartbeat.detail == text
    assert capsys.readouterr().out.splitlines() == ["0 of 2", "1 of 2", "0 of 2"]


def test_the_heartbeat_comes_by_itself_and_tells_the_phase(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTHOUSE_ATTEMPT", "2")
    monitor = Monitor(run_dir.path)
    try:
        wait_for(lambda: 0 in run_dir.heartbeats())
        assert run_dir.heartbeats()[0].phase == "starting"
        assert run_dir.heartbeats()[0].attempt == 2
        assert run_dir.heartbeats()[0].pid == os.getpid()
        monitor.phase("loading", "target")
        wait_for(lambda: run_dir.heartbeats()[0].phase == "loading")
        first = run_dir.heartbeats()[0]
        wait_for(lambda: run_dir.heartbeats()[0].sequence > first.sequence)  # also while nothing happens
        assert run_dir.heartbeats()[0].time - first.time > 0.9  # at most once a second
        assert run_dir.heartbeats()[0].memory["now"] > 0
    finally:
        monitor.close()


def test_the_last_heartbeat_holds_the_last_state(run_dir: RunDir) -> None:
    monitor = Monitor(run_dir.path)
    monitor.progress(0, 10)
    monitor.step_done(4, seconds=0.5, tokens=100)
    monitor.record(RECORD)
    monitor.checkpoint(Path("/c/step-4"), 4)
    monitor.link("wandb", "https://example.org/r")
    monitor.metrics(tau=2.5)
    monitor.phase("finishing")
    monitor.close()
    last = run_dir.heartbeats()[0]
    assert (last.phase, last.step, last.total, last.loss) == ("finishing", 4, 10, 3.4123)
    assert last.tokens_per_second == {"now": 18432.4, "median": 200.0}
    assert last.metrics == {"tau_hat": 1.619, "accuracy": 0.25, "lr": 5.8e-4, "tau": 2.5}
    assert last.last_checkpoint is not None
    assert last.last_checkpoint["path"] == "/c/step-4"
    assert last.links == {"wandb": "https://example.org/r"}


def test_without_a_run_directory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monitor = Monitor(None)
    monitor.phase("training")
    monitor.close()
    assert monitor.run_id == "local"
    assert monitor.asked() is None
    assert list(tmp_path.iterdir()) == []


def test_a_request_is_seen_once_and_answered(run_dir: RunDir) -> None:
    monitor = Monitor(run_dir.path)
    try:
        assert monitor.asked() is None
        request = run_dir.ask("checkpoint", by="me")
        seen = monitor.asked()
        assert seen == request
        assert monitor.asked() is None
        monitor.answer(request, "done")
        wait_for(lambda: 0 in run_dir.heartbeats())
        wait_for(lambda: (run_dir.heartbeats()[0].answered or {}).get("id") == request.id)
        again = run_dir.ask("checkpoint-and-stop", by="me")
        assert monitor.asked() == again
        run_dir.ask("dump-stacks", by="me")  # launch's to answer
        assert monitor.asked() is None
    finally:
        monitor.close()


def test_the_next_attempt_does_not_answer_again(run_dir: RunDir) -> None:
    first = Monitor(run_dir.path)
    request = run_dir.ask("checkpoint-and-stop", by="me")
    assert first.asked() is not None
    first.answer(request, "done")
    first.close()
    second = Monitor(run_dir.path)
    try:
        assert second.asked() is None
    finally:
        second.close()


def test_a_broken_request_is_passed_over_aloud(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    monitor = Monitor(run_dir.path)
    try:
        for text in ("{", "[1]", '{"id": 3}'):
            (run_dir.path / "request.json").write_text(text)
            os.utime(run_dir.path / "request.json", ns=(time.time_ns(), time.time_ns()))
            assert monitor.asked() is None
            assert "request.json is passed over" in capsys.readouterr().out
    finally:
        monitor.close()


def steps(path: Path) -> list[int]:
    return [json.loads(text)["step"] for text in path.read_text().splitlines()]


def test_metrics_hold_each_step_once_also_after_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, resumed_at=0)
    for step in (1, 2, 3, 4):
        first.write(step, {"loss": 1.0, "memory": {"now": 1}})
    first.close()
    with open(path, "a") as file:
        file.write('{"step": 5, "lo')  # killed in the middle of a line
    second = MetricsFile(path, resumed_at=2)
    second.write(3, {"loss": 2.0})
    second.close()
    assert steps(path) == [1, 2, 3]
    assert json.loads(path.read_text().splitlines()[0])["memory"] == {"now": 1}


def test_tensorboard_reads_the_numbers_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resumed_at, written in ((0, (1, 2, 3)), (1, (2,))):
        sink = TensorBoard(tmp_path, resumed_at)
        for step in written:
            sink.write(step, {"loss": step / 2, "memory": {"now": 5}, "name": "text", "nothing": None})
        sink.close()
        time.sleep(1.1)  # event files are named by the second
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert sorted(read.Tags()["scalars"]) == ["loss", "memory/now"]
    assert [event.step for event in read.Scalars("loss")] == [
        1,
        2,
    ]  # what was beyond the resumed step is gone


def test_only_numbers_reach_the_curves() -> None:
    values = {"a": 1, "b": {"c": 2.5, "d": {"e": 3}}, "text": "x", "flag": True, "none": None}
    assert _flat(values) == {"a": 1, "b/c": 2.5, "b/d/e": 3}


@pytest.mark.parametrize(
    ("environment", "netrc", "mode"),
    [
        ({}, "", "offline"),
        ({}, "machine api.wandb.ai login user password k", "online"),
        ({"WANDB_API_KEY": "k"}, "", "online"),
        ({"WANDB_MODE": "disabled", "WANDB_API_KEY": "k"}, "", "disabled"),
    ],
)
def test_wandb_is_offline_without_a_key(
    tmp_path: Path, environment: dict[str, str], netrc: str, mode: str
) -> None:
    (tmp_path / ".netrc").write_text(netrc)
    assert wandb_mode(environment, tmp_path) == mode


def wandb_records(file: Path) -> list[Any]:
    """A .wandb file is LevelDB's log: 7 bytes, then (checksum, length, kind) before each record."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, found = file.read_bytes(), 7, []
    while at + 7 <= len(data):
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if kind == 1:  # whole; the longer ones that go on in the next block are of no interest here
            found.append(Record.FromString(data[at + 7 : at + 7 + length]))
        at += 7 + length
    return found


@pytest.mark.slow
def test_wandb_without_a_key_keeps_the_run_on_the_disk_and_gives_no_link(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    sink = Wandb(Project("p", "n", "0a1b"), tmp_path, {"lr": 6e-4})
    assert sink.link is None
    for step in (7, 3):  # a resumed run does some steps again
        sink.write(step, {"loss": 1.0})
    sink.close()
    (file,) = tmp_path.glob("wandb/offline-run-*-0a1b/run-0a1b.wandb")
    records = wandb_records(file)
    keys = [{item.key or item.nested_key[0]: item.value_json for item in r.history.item} for r in records]
    logged = [(int(one["step"]), float(one["loss"])) for one in keys if "loss" in one]
    assert logged == [(7, 1.0), (3, 1.0)]
    metrics = {r.metric.glob_name or r.metric.name: r.metric.step_metric for r in records}
    assert metrics["*"] == "step"


def test_wandb_that_is_not_installed_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    from trainer.errors import InputError

    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match="--wandb-project needs the package wandb"):
        Wandb(Project("p", "n", "0a1b"), tmp_path, {})
    with pytest.raises(InputError, match="--wandb-project needs the package wandb"):
        Records().open(None, 0, Project("p", "n", "0a1b"), tmp_path, {})


def test_a_sink_that_cannot_be_opened_is_said_and_passed_over(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def no_network(*_: object) -> None:
        raise RuntimeError("the service\ndid not reply")  # W&B's errors are no OSError

    monkeypatch.setattr(sinks, "MetricsFile", full)
    monkeypatch.setattr(sinks, "Wandb", no_network)
    records = Records()
    records.open(run_dir, 0, Project("p", "n", "0a1b"), run_dir.path, {})
    records.write(1, {"loss": 1.0})
    records.close()
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "warning: metrics.jsonl cannot be opened, so nothing is written there (No space left on device)",
        "warning: Weights & Biases cannot be opened, so nothing is written there (the service did not reply)",
    ]
    assert list(run_dir.events.iterdir())
    assert list(records.links) == ["tensorboard"]


def test_a_sink_that_cannot_be_written_is_said_once_and_again_after_it_could(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = iter([RuntimeError("gone"), OSError(28, "full"), None, RuntimeError("gone")])

    def write(*_: object) -> None:
        if outcome := next(outcomes):
            raise outcome

    monkeypatch.setattr(MetricsFile, "write", write)
    records = Records()
    records.open(run_dir, 0, None, run_dir.path, {})
    for step in range(4):
        records.write(step, {})
    monkeypatch.setattr(MetricsFile, "close", lambda _: 1 / 0)
    records.close()
    assert capsys.readouterr().out == "warning: MetricsFile could not be written (gone)\n" * 2


def test_a_loss_that_is_not_finite_is_null_wherever_json_is_written(run_dir: RunDir, tmp_path: Path) -> None:
    nan = float("nan")
    sink = MetricsFile(tmp_path / "metrics.jsonl", resumed_at=0)
    sink.write(1, {"loss": nan, "phase_seconds": {"data": float("inf")}, "lr": 0.1})
    sink.close()
    record = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert (record["loss"], record["phase_seconds"], record["lr"]) == (None, {"data": None}, 0.1)
    monitor = Monitor(run_dir.path)
    monitor.record({**RECORD, "loss": nan, "tau_hat": nan})
    monitor.close()
    assert run_dir.heartbeats()[0].loss is None
    assert run_dir.heartbeats()[0].metrics["tau_hat"] is None


def test_an_evaluation_that_is_repeated_stands_in_the_metrics_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, resumed_at=0)
    for step, kind in ((0, "evaluation"), (1, "training"), (2, "training"), (2, "evaluation")):
        first.write(step, {"kind": kind})
    first.close()
    MetricsFile(path, resumed_at=2).close()
    assert [(r["step"], r["kind"]) for r in map(json.loads, path.read_text().splitlines())] == [
        (0, "evaluation"),
        (1, "training"),
        (2, "training"),
    ]
    MetricsFile(path, resumed_at=0).close()  # nothing was saved: it starts over, with the evaluation
    assert path.read_text() == ""


def test_a_heartbeat_that_does_not_fit_on_the_disk_ends_nothing(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunDir, "write_heartbeat", full)
    monitor = Monitor(run_dir.path)
    monitor.close()
    write_json(run_dir.path / "x.json", {})


# -- one of several ranks, and a process that hangs -------------------------------------------------------


def test_a_rank_writes_its_own_heartbeat_and_tells_its_progress(run_dir: RunDir, monkeypatch) -> None:
    reading, writing = os.pipe()
    monkeypatch.setenv(RANK_VARIABLE, "3")
    monkeypatch.setenv(PROGRESS_VARIABLE, str(writing))
    rank = Monitor(run_dir.path, Rank(3, "target", 1, "cpu:1"), 0.01)
    for name in ("loading", "loading", "training"):
        rank.phase(name, "some words")
    rank.step_done(17, 0.1, 100)
    rank.close()
    assert os.read(reading, 4096) == b"phase loading\nphase training\nstep 17\n"
    (beat,) = run_dir.heartbeats().values()
    assert (beat.rank, beat.role, beat.step, beat.trains) == (3, "target", 17, False)
    for step in range(20_000):  # more than the pipe takes: nobody waits for its reader
        rank.step_done(step, 0.1, 100)
    os.close(reading)
    rank.step_done(1, 0.1, 100)
    os.close(writing)


ALONE = """
import sys, time
from trainer import monitor
from trainer.monitor import Monitor
monitor.PERIOD, monitor.PAUSED = 0.05, 0.5
alone = Monitor(None, None, float(sys.argv[1]))
def hangs(): time.sleep(float(sys.argv[3]))
alone.phase("training")
alone.phase(sys.argv[2])
for step in range(10):
    time.sleep(0.1)
    alone.step_done(step, 0.1, 1)
print("steps", flush=True)
hangs()
"""


def alone(*words: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", ALONE, *words], stdout=pipe, stderr=pipe, text=True)


def test_a_training_without_a_step_for_too_long_ends_with_its_stacks() -> None:
    process = alone("0.7", "training", "600")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (4, "steps\n")
    assert "in hangs" in err
    assert err.splitlines()[-1].startswith("error: no step for 0.7 s (--stall-timeout) while training")


@pytest.mark.parametrize(("stall", "phase"), [("0.7", "evaluating"), ("0", "training")])
def test_what_has_no_steps_or_no_limit_does_not_hang(stall, phase) -> None:
    process = alone(stall, phase, "1.5")
    assert process.communicate(timeout=60) == ("steps\n", "")
    assert process.returncode == 0


def test_the_time_in_which_a_process_was_halted_does_not_count() -> None:
    process = alone("0.7", "training", "0.3")
    assert process.stdout
    process.stdout.readline()
    process.send_signal(signal.SIGSTOP)
    time.sleep(1)
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 0
