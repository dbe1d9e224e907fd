"""Stopping and going on gives the bits of a run that was never stopped."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

from trainer import checkpoint
from trainer.__main__ import main
from trainer.train import StopSignal, Trainer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    home = tmp_path_factory.mktemp("model")
    target = tiny.target_directory(home / "target")
    return target, tiny.data_directory(home / "data", target)


@pytest.fixture(autouse=True)
def no_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StopSignal, "install", lambda self: None)


def latest(output: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for name in checkpoint.TENSORS:
        for key, value in load_file(output / "latest" / name).items():
            tensors[f"{name}:{key}"] = value
    return tensors


def state(output: Path) -> dict:
    return json.loads((output / "latest" / "state.json").read_text())


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int, how: str) -> None:
    """Ask for a stop once `steps` more steps are done, as a signal or a request would."""
    done = itertools.count(1)
    step = Trainer._step

    def counted(self: Trainer, *args: object) -> float:
        rate = step(self, *args)  # type: ignore[arg-type]
        if next(done) == steps:
            if how == "signal":
                self.stop.came = True
            else:
                assert self.monitor.run_dir
                self.monitor.run_dir.ask("checkpoint-and-stop", by="test")
        return rate

    monkeypatch.setattr(Trainer, "_step", counted)


@pytest.mark.parametrize("how", ["signal", "request"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"grad_accum": 2, "epochs": 4},
        {"cache_features": True},
        {"init_from_target": True, "max_anchors": 7},
    ],
    ids=["plain", "two micro-batches a step", "kept features", "few anchors"],
)
@pytest.mark.parametrize("stop", [1, 4, 7])  # an epoch has 5 micro-batches: inside, beside and beyond its end
def test_k_steps_and_the_rest_after_a_resume_give_the_bits_of_all_steps_at_once(
    model: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    changes: dict[str, object],
    stop: int,
) -> None:
    assert main(tiny.flags(*model, tmp_path / "whole", **changes)) == 0
    whole = state(tmp_path / "whole")
    assert whole["step"] == 10
    runs = [tmp_path / name for name in ("0001-x", "0002-x")]
    for run in runs:
        run.mkdir()
    flags = tiny.flags(*model, tmp_path / "parts", **changes)
    with monkeypatch.context() as patched:
        stop_after(patched, stop, how)
        assert main([*flags, "--run-dir", str(runs[0])]) == 0
    assert state(tmp_path / "parts")["step"] == stop
    assert not state(tmp_path / "parts")["finished"]
    torch.manual_seed(12345)  # whatever the next process would start with
    assert main([*flags, "--run-dir", str(runs[1])]) == 0
    parts = state(tmp_path / "parts")
    assert parts["run_id"] == "0002-x"
    assert parts["finished"]
    assert {k: parts[k] for k in ("step", "micro_batch", "epoch", "rng")} == {
        k: whole[k] for k in ("step", "micro_batch", "epoch", "rng")
    }
    assert same(latest(tmp_path / "whole"), latest(tmp_path / "parts"))


def test_another_seed_gives_other_weights(model: tuple[Path, Path], tmp_path: Path) -> None:
    for seed in (0, 1):
        assert main(tiny.flags(*model, tmp_path / f"{seed}", seed=seed, max_steps=2)) == 0
    assert not same(latest(tmp_path / "0"), latest(tmp_path / "1"))


def test_two_micro_batches_weigh_like_one_of_their_size(
    model: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Σ w of the whole step divides, so that a micro-batch with few labels does not count as much as a full
    one.
    """
    seen: list[tuple[float, float]] = []
    micro_batch = Trainer._micro_batch

    def noted(self: Trainer, *args: object) -> float:
        weight = micro_batch(self, *args)  # type: ignore[arg-type]
        gradient = torch.cat([p.grad.flatten() for p in self.drafter.parameters()])
        seen.append((weight, float(gradient.norm())))
        return weight

    monkeypatch.setattr(Trainer, "_micro_batch", noted)
    divisors: list[float] = []
    from trainer.optim import Optimizer

    step = Optimizer.step
    monkeypatch.setattr(
        Optimizer,
        "step",
        lambda self, rate, divisor, clip: divisors.append(divisor) or step(self, rate, divisor, clip),
    )
    assert main(tiny.flags(*model, tmp_path / "out", grad_accum=2, max_steps=2)) == 0
    assert len(seen) == 4
    assert divisors == [seen[0][0] + seen[1][0], seen[2][0] + seen[3][0]]


def test_a_damaged_newest_checkpoint_costs_only_the_steps_since_the_one_before(
    model: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(tiny.flags(*model, tmp_path / "whole")) == 0
    flags = tiny.flags(*model, tmp_path / "parts", save_interval=3)
    with monkeypatch.context() as patched:
        stop_after(patched, 5, "signal")
        assert main(flags) == 0
    broken = tmp_path / "parts" / "latest" / "drafter.safetensors"
    broken.write_bytes(broken.read_bytes()[:500])
    assert main(flags) == 0
    said = capsys.readouterr().out
    assert "step-00000005 is damaged and passed over" in said
    assert "at step 3" in said
    assert same(latest(tmp_path / "whole"), latest(tmp_path / "parts"))


def test_a_checkpoint_of_another_shape_is_refused_and_never_starts_over_it(
    model: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = tiny.flags(*model, tmp_path / "out")
    with monkeypatch.context() as patched:
        stop_after(patched, 2, "signal")
        assert main(flags) == 0
    assert main([*flags, "--num-draft-layers", "1"]) == 2
    assert "num_hidden_layers 2 instead of 1" in capsys.readouterr().err
    assert state(tmp_path / "out")["step"] == 2
    assert main([*flags, "--num-draft-layers", "1", "--resume", "never"]) == 0


def test_other_settings_that_matter_are_named_when_resuming(
    model: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = tiny.flags(*model, tmp_path / "out")
    with monkeypatch.context() as patched:
        stop_after(patched, 2, "signal")
        assert main(flags) == 0
    assert main([*flags, "--lr", "0.02", "--log-interval", "5"]) == 0
    assert "warning: resuming with other settings than before: lr" in capsys.readouterr().out


def test_metrics_of_a_second_attempt_hold_each_step_once(
    model: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "0001-x"
    run.mkdir()
    flags = [*tiny.flags(*model, tmp_path / "out", save_interval=3), "--run-dir", str(run)]

    class Crash(Exception):
        pass

    def crash(self: Trainer, *_: object) -> None:
        if self.state.step == 5:
            raise Crash

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_boundary", crash)
        with pytest.raises(Crash):
            main(flags)
    assert main(flags) == 0
    steps = [json.loads(text)["step"] for text in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 11))


def test_a_stop_in_the_last_evaluation_loses_no_training(
    model: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = tiny.flags(*model, tmp_path / "out", eval_prompts=1, eval_tokens=4)
    evaluate: Callable[..., None] = Trainer._evaluate

    def stopped(self: Trainer, when: str) -> None:
        if when == "after":
            self.stop.came = True
            self._evaluation_progress("decoding")
        evaluate(self, when)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_evaluate", stopped)
        assert main(flags) == 0
    assert state(tmp_path / "out")["step"] == 10
    assert not state(tmp_path / "out")["finished"]
    assert set(state(tmp_path / "out")["results"]) == {"before"}
    assert main(flags) == 0
    assert "at step 10" in capsys.readouterr().out
    assert state(tmp_path / "out")["finished"]
    assert set(state(tmp_path / "out")["results"]) == {"before", "after"}
