"""deploy/figures.py: what is read of a run's records, in constant memory, whatever stands in them."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from deploy import figures
from deploy.errors import DeployError
from trainer import status
from trainer.monitor import Interval
from trainer.sinks import MetricsFile


def record(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step, "time": 1000.0 + step / 2, "kind": "training", "loss": 8.0 - step / 1000,
        "tokens_per_second": 18_000.0, "phase_seconds": {"data": 0.01, "target": 0.2},
        "memory": {"min": 5, "now": 7, "peak": 9}, **changes,
    }  # fmt: skip


def run(root: Path, records: list[Any], name: str = "demo") -> status.RunDir:
    made = status.allocate_run(root / "runs", name)
    made.metrics.write_text("".join(json.dumps(one) + "\n" for one in records))
    return made


def test_figures_are_medians_over_the_last_records(tmp_path: Path) -> None:
    rows = [record(step, tokens_per_second=1.0) for step in range(0, 100, 10)]
    rows += [record(step) for step in range(100, 150, 10)] + [record(150, tokens_per_second=1e9)]
    found = figures.read(run(tmp_path, rows), 6)
    assert (found["records"], found["used"], found["first_step"], found["last_step"]) == (16, 6, 0, 150)
    assert found["tokens_per_second"] == 18_000
    assert found["step_seconds"] == 0.5
    assert found["tokens_per_step"] == 9_000
    assert found["phase_seconds"] == {"data": 0.01, "target": 0.2}
    assert found["memory"] == {"min": 5, "now": 7, "peak": 9}
    assert found["seconds"] == 75


def test_records_of_the_trainer_itself_are_understood(tmp_path: Path) -> None:
    made = status.allocate_run(tmp_path / "runs", "demo")
    sink = MetricsFile(made.metrics, 0)
    learnt = {"loss": 3.0, "tau_hat": 1.5, "accuracy": 0.2, "slots": {"accuracy": [0.3, None]}}
    summary = Interval(steps=2, tokens=100).summary(1e-3, {"now": 7, "peak": 9}, learnt)
    for step in (2, 4, 6):
        sink.write(step, {"kind": "training", **summary})
    sink.write(6, {"kind": "evaluation", "tau": 3.5})
    sink.close()
    found = figures.read(made, 10)
    assert found["records"] == 3
    assert found["tokens_per_second"] > 0
    assert list(found["phase_seconds"]) == list(summary["phase_seconds"])
    assert (found["loss"], found["metrics"]["tau"]) == (3.0, 3.5)


def test_ranks_count_by_the_largest_one(tmp_path: Path) -> None:
    made = run(tmp_path, [record(1)])
    made.write_heartbeat(status.Heartbeat(rank=1, memory={"now": 70, "peak": 90}, total=600))
    found = figures.read(made, 5)
    assert (found["memory"]["now"], found["memory"]["peak"], found["total"]) == (70, 90, 600)


@pytest.mark.parametrize(
    "strange",
    ["[1]", "no JSON", "{\"step\": \"x\", \"phase_seconds\": 7, \"memory\": [], \"tokens_per_second\": null}",
     "[" * 5000, "{}", "\x00\xff", "x" * 200_000],
)  # fmt: skip
def test_what_somebody_else_wrote_into_the_records_breaks_nothing(tmp_path: Path, strange: str) -> None:
    made = run(tmp_path, [record(1), record(2)])
    with open(made.metrics, "a", errors="surrogateescape") as file:
        file.write(f"{strange}\n{json.dumps(record(3))}\n{json.dumps(record(4))[:20]}")
    found = figures.read(made, 10)
    assert found["last_step"] == 3
    assert found["tokens_per_second"] == 18_000
    (made.path / "run.json").write_text("[]")
    (made.path / "exit.json").write_text("{")
    assert any("exit.json" in problem for problem in figures.read(made, 10)["problems"])


def test_a_run_without_records_has_no_figures_and_says_so_by_none(tmp_path: Path) -> None:
    found = figures.read(status.allocate_run(tmp_path / "runs", "demo"), 10)
    assert (found["records"], found["tokens_per_second"], found["step_seconds"]) == (0, None, None)
    assert found["curves"] == []
    assert found["problems"] == []


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000])
def test_a_curve_keeps_every_record_in_its_means_and_its_last_step(count: int) -> None:
    curve = figures.Curve(8)
    for step in range(count):
        curve.add({"step": step, "time": step, "loss": float(step)})
    points = curve.points()
    assert len(points) <= 8
    assert [point["step"] for point in points] == sorted({point["step"] for point in points})
    if count:
        assert points[-1]["step"] == count - 1
        assert points[0]["loss"] <= points[-1]["loss"] <= count - 1
    if count == 1000:  # 7 whole points of 128 records, one of 104
        assert points[0] == {"step": 127, "time": 127, "loss": 63.5, "tokens_per_second": None}


@pytest.mark.slow
def test_memory_does_not_grow_with_the_records(tmp_path: Path) -> None:
    peaks = []
    for count in (1_000, 10_000):
        made = run(tmp_path, [record(step) for step in range(count)])
        tracemalloc.start()
        figures.read(made, 50)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] + 50_000


def test_a_name_means_its_run_in_progress_else_the_newest_with_records(tmp_path: Path) -> None:
    run(tmp_path, [record(1)])
    status.allocate_run(tmp_path / "runs", "demo")
    run(tmp_path, [record(1)], "exp")
    assert figures.of(str(tmp_path), "demo", 5, "box")["run_id"] == "0001-demo"
    assert figures.of(str(tmp_path), "0002-demo", 5, "box")["run_id"] == "0002-demo"
    with pytest.raises(DeployError, match=r"^there is no run demi on box; did you mean demo\?$"):
        figures.of(str(tmp_path), "demi", 5, "box")
    with pytest.raises(DeployError, match=r"fab runs --host box lists what there is"):
        figures.of(str(tmp_path), "zzzz", 5, "box")


def test_settings_come_from_the_release_and_from_the_newest_checkpoint(tmp_path: Path) -> None:
    made = run(tmp_path, [record(1)])
    made.write_run(status.Run(made.path.name, "demo", ["x"], release={"id": "abc"}, git={"commit": "c"}))
    home = tmp_path / "names" / "demo"
    (home / "releases" / "abc").mkdir(parents=True)
    (home / "releases" / "abc" / "run.yaml").write_text("trainer: {lr: 0.1}\n")
    for step, lr in ((1, 0.1), (20, 0.2)):
        place = home / "checkpoints" / made.path.name / f"step-{step:08d}"
        place.mkdir(parents=True)
        status.write_json(place / "state.json", {"settings": {"lr": lr}})
    found = figures.of(str(tmp_path), "0001-demo", 5, "box")
    assert found["release_settings"] == "trainer: {lr: 0.1}\n"
    assert found["learnt"] == {"lr": 0.2}
    assert found["run"]["git"] == {"commit": "c"}
    assert "command" in found["run"]


def test_the_newest_points_of_a_curve_are_those_at_the_end_of_a_long_file(tmp_path: Path) -> None:
    made = run(tmp_path, [record(step) for step in range(3000)])
    assert made.metrics.stat().st_size > figures.RECENT
    found = figures.recent(str(made.path), 2)
    assert found == [
        {"step": step, "loss": 8.0 - step / 1000, "tokens_per_second": 18_000.0} for step in (2998, 2999)
    ]
    assert figures.recent(str(tmp_path / "none"), 2) == []
