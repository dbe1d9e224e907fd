"""Evaluations in the middle of a training: real, told, stopped at once, and of no trace in what is learnt."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import tiny
import torch
from drafting import one_thread  # noqa: F401
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from trainer import checkpoint, evaluation
from trainer.__main__ import main
from trainer.cached import CachedTarget
from trainer.monitor import StopSignal
from trainer.status import RunDir
from trainer.train import Trainer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    home = tmp_path_factory.mktemp("model")
    target = tiny.target_directory(home / "target")
    return target, tiny.data_directory(home / "data", target)


@pytest.fixture(autouse=True)
def a_report_at_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StopSignal, "install", lambda self: None)
    monkeypatch.setattr(evaluation.time, "monotonic", itertools.count(0, 2).__next__)


def latest(output: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for name in checkpoint.TENSORS:
        for key, value in load_file(output / "latest" / name).items():
            tensors[f"{name}:{key}"] = value
    return tensors


def state(output: Path) -> dict:
    return json.loads((output / "latest" / "state.json").read_text())


def test_evaluations_leave_no_trace_in_the_training_and_wait_for_nobody(
    model: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "held-out.json"
    prompts.write_text("[[1, 2, 3, 4], [5, 6, 7]]")
    how = {"max_steps": 6, "optimizer": "adamw"}
    assert main(tiny.flags(*model, tmp_path / "none", **how)) == 0

    run = RunDir(tmp_path / "0001-x")
    run.path.mkdir()
    flags = tiny.flags(
        *model, tmp_path / "some", run_dir=run.path, eval_interval=2, eval_prompts=2, eval_tokens=4,
        eval_file=prompts, **how,
    )  # fmt: skip
    phases = set()
    asked = {2: "checkpoint", 4: "checkpoint-and-stop"}  # in the evaluation after which step
    progress = Trainer._evaluation_progress

    def told(self: Trainer, text: str) -> None:
        if action := asked.pop(self.state.step, None):
            run.ask(action, by="test")
        progress(self, text)
        phases.add((self.state.step, self.monitor.heartbeat.phase))

    read = CachedTarget.read
    draws = lambda *a, **k: (torch.rand(3), read(*a, **k))[1]  # noqa: E731  as if decoding drew numbers
    monkeypatch.setattr(CachedTarget, "read", draws)
    monkeypatch.setattr(Trainer, "_evaluation_progress", told)
    assert main(flags) == 0
    assert state(tmp_path / "some")["step"] == 4
    assert (tmp_path / "some" / run.path.name / "step-00000002").is_dir(), "saved while evaluating"
    answered = run.heartbeats()[0].answered or {}
    assert (answered["action"], answered["outcome"]) == ("checkpoint-and-stop", "done")
    assert main(flags) == 0

    whole, parts = latest(tmp_path / "none"), latest(tmp_path / "some")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[key], parts[key]) for key in whole)
    assert state(tmp_path / "none")["rng"] == state(tmp_path / "some")["rng"]
    assert phases == {(0, "evaluating"), (2, "evaluating"), (4, "evaluating"), (6, "finishing")}
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    steps = [record["step"] for record in records if record["kind"] == "evaluation"]
    assert steps == [0, 2, 4, 6], "the one that was stopped was repeated"
    names = ("tau/held_out", "tau/held_out_T0.7")
    assert all(record[name] >= 1 for record in records if "tau/held_out" in record for name in names)
    events = [event for file in run.events.iterdir() for event in EventFileLoader(str(file)).Load()]
    curve = {event.step for event in events for value in event.summary.value if value.tag == names[0]}
    assert curve == {0, 2, 4, 6}


def test_held_out_prompts_that_cannot_be_used_are_told_before_anything_is_loaded(
    model: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for content, sentence in (("[[1, 97]]", "prompt 0 of 'p' must be text"), ("[]", "holds no prompt")):
        (tmp_path / "p.json").write_text(content)
        flags = tiny.flags(*model, tmp_path / "out", eval_prompts=1, eval_file=tmp_path / "p.json")
        assert main(flags) == 2
        told = capsys.readouterr().err
        assert told.startswith(f"error: --eval-file {tmp_path / 'p.json'}: ")
        assert sentence in told
        assert told.count("\n") == 1
    assert not (tmp_path / "out").exists()
