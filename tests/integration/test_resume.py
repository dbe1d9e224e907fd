"""Stopping and going on gives the bits of a run that was never stopped."""

from __future__ import annotations

import functools
import itertools
import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

from trainer import checkpoint, toy
from trainer.__main__ import main
from trainer.monitor import StopSignal
from trainer.status import RunDir
from trainer.sums import GradientSum
from trainer.train import Trainer

pytestmark = pytest.mark.slow


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


CHANGES: dict[str, dict[str, object]] = {
    "plain": {},
    "two micro-batches a step": {"grad_accum": 2, "epochs": 4},
    "kept features": {"cache_features": True},
    "muon": {"optimizer": "muon"},
    "few anchors": {"init_from_target": True, "max_anchors": 7},
    "noise": {"noise_start": 0.5, "noise_end": 0.1, "noise_type": "gaussian"},
}


@pytest.fixture(scope="module")
def unbroken(model: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The output directory of ten steps that nothing interrupted; each kind of run is made once."""

    @functools.cache
    def made(changes: str) -> Path:
        output = tmp_path_factory.mktemp("whole")
        assert main(tiny.flags(*model, output, **CHANGES[changes])) == 0
        return output

    return made


@pytest.mark.parametrize(
    ("how", "stop", "changes"),  # an epoch has 5 micro-batches: stops inside, at and beyond its end
    [
        ("signal", 1, "plain"),
        ("request", 4, "plain"),
        ("signal", 5, "plain"),
        ("request", 7, "two micro-batches a step"),
        ("signal", 2, "two micro-batches a step"),
        ("signal", 7, "kept features"),
        ("signal", 4, "muon"),
        ("request", 3, "few anchors"),
        ("signal", 7, "noise"),
    ],
)
def test_k_steps_and_the_rest_after_a_resume_give_the_bits_of_all_steps_at_once(
    model: tuple[Path, Path],
    unbroken: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    stop: int,
    changes: str,
) -> None:
    whole = state(unbroken(changes))
    assert whole["step"] == 10
    runs = [tmp_path / name for name in ("0001-x", "0002-x")]
    for run in runs:
        run.mkdir()
    flags = tiny.flags(*model, tmp_path / "parts", **CHANGES[changes])
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
    assert same(latest(unbroken(changes)), latest(tmp_path / "parts"))


def test_a_target_in_bfloat16_trains(
    model: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(tiny.flags(*model, tmp_path / "out", dtype="bfloat16", cache_features=True)) == 0
    assert "step 10/10" in capsys.readouterr().out
    assert all(value.dtype == torch.float32 for value in latest(tmp_path / "out").values())


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
    seen: list[float] = []
    add = GradientSum.add

    def noted(self: GradientSum, weight: torch.Tensor) -> None:
        seen.append(float(weight))
        add(self, weight)

    monkeypatch.setattr(GradientSum, "add", noted)
    divisors: list[float] = []
    from trainer.optim import Optimizer

    step = Optimizer.step
    monkeypatch.setattr(
        Optimizer,
        "step",
        lambda self, rate, divisor, clip: divisors.append(float(divisor)) or step(self, rate, divisor, clip),
    )
    assert main(tiny.flags(*model, tmp_path / "out", grad_accum=2, max_steps=2)) == 0
    assert len(seen) == 4
    assert divisors == pytest.approx([seen[0] + seen[1], seen[2] + seen[3]], rel=1e-6)


def test_a_damaged_newest_checkpoint_costs_only_the_steps_since_the_one_before(
    model: tuple[Path, Path],
    unbroken: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
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
    assert same(latest(unbroken("plain")), latest(tmp_path / "parts"))


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


def test_a_checkpoint_for_another_target_is_refused(
    model: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of the same shape and with the same tokenizer: nothing but its weights tells it apart."""
    with monkeypatch.context() as patched:
        stop_after(patched, 2, "signal")
        assert main(tiny.flags(*model, tmp_path / "out")) == 0
    other = tiny.target_directory(tmp_path / "other", tiny.qwen3(initializer_range=0.3))
    flags = tiny.flags(other, model[1], tmp_path / "out")
    assert main(flags) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "was trained for another target" in said
    assert "--resume never to start at step 0" in said
    assert state(tmp_path / "out")["step"] == 2
    assert main([*flags, "--resume", "never"]) == 0
    moved = tiny.target_directory(tmp_path / "moved")  # the first one's content elsewhere
    with monkeypatch.context() as patched:
        stop_after(patched, 2, "signal")
        assert main([*tiny.flags(*model, tmp_path / "again")]) == 0
    assert main(tiny.flags(moved, model[1], tmp_path / "again")) == 0
    assert "at step 2" in capsys.readouterr().out


def test_a_toy_that_was_made_anew_starts_at_step_0_and_says_why(
    model: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is cut by wall-clock time, so what was trained for the one before is of no use."""
    made = [model[0], tiny.target_directory(tmp_path / "anew", tiny.qwen3(initializer_range=0.3))]

    def ensure(*_: object) -> toy.Toy:
        prompts = {"known": [[1, 2, 3]], "held_out": [[4, 5, 6]]}
        return toy.Toy(made[0], model[1], "digest", prompts, made=True)

    monkeypatch.setattr(toy, "ensure", ensure)
    flags = tiny.flags(Path("toy"), model[1], tmp_path / "out")
    with monkeypatch.context() as patched:
        stop_after(patched, 2, "signal")
        assert main(flags) == 0
    with monkeypatch.context() as patched:
        stop_after(patched, 3, "signal")
        assert main(flags) == 0  # the same toy: it goes on
    assert "at step 2" in capsys.readouterr().out
    made.reverse()
    assert main(flags) == 0
    said = capsys.readouterr().out
    assert "earlier toy target, which has been made anew since" in said
    assert "starting at step 0" in said
    assert "step 1/10" in said
    assert state(tmp_path / "out")["finished"]


def test_an_evaluation_is_not_compared_with_one_of_other_prompts_or_lengths(
    model: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = tiny.flags(*model, tmp_path / "out", eval_prompts=2, eval_tokens=4)
    for changes, differing in (
        ((), None),
        (("--eval-tokens", "5"), "eval_tokens"),
        (("--eval-prompts", "3"), "prompts, eval_prompts"),
    ):
        with monkeypatch.context() as patched:
            stop_after(patched, 2, "signal")
            assert main([*flags, "--resume", "never"]) == 0
        capsys.readouterr()
        assert main([*flags, *changes]) == 0
        said = capsys.readouterr().out
        assert ("– → " in said) == bool(changes)
        assert bool(re.search(r"\d → ", said)) == (not changes)
        assert ("–: was measured with other" in said) == bool(changes)
        assert (differing or "") in said


def test_an_evaluation_ends_a_text_where_the_target_would(model: tuple[Path, Path], tmp_path: Path) -> None:
    target = tiny.target_directory(tmp_path / "target")
    ends = {"eos_token_id": list(range(tiny.VOCABULARY))}
    (target / "generation_config.json").write_text(json.dumps(ends))
    assert main(tiny.flags(target, model[1], tmp_path / "out", eval_prompts=2, max_steps=1)) == 0
    rows = state(tmp_path / "out")["results"]["after"]["rows"]
    assert [row["tokens"] for row in rows] == [row["prompts"] for row in rows]


def test_a_step_is_saved_once_whatever_asks_for_it(
    model: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second save would have to move the first one away, and for a moment there would be none."""
    saved: list[int] = []
    save = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *a: saved.append(a[1].step) or save(*a))
    (tmp_path / "0001-x").mkdir()
    flags = [
        *tiny.flags(*model, tmp_path / "out", save_interval=4, keep_checkpoints=1),
        *("--run-dir", str(tmp_path / "0001-x")),
    ]
    with monkeypatch.context() as patched:
        stop_after(patched, 4, "signal")
        assert main(flags) == 0
    assert saved == [4]
    with monkeypatch.context() as patched:  # the next attempt of this run, stopped before its first step
        patched.setattr(Trainer, "_boundary", lambda self: self._save() or 0)
        assert main(flags) == 0
    assert saved == [4]
    assert state(tmp_path / "out")["sequence"] == 1
    assert main(flags) == 0
    assert saved == [4, 8, 10]


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_its_own_run_of_weights_and_biases(
    model: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))

    def ids(output: Path) -> list[str]:
        found = sorted(output.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
        return [path.stem.removeprefix("run-") for path in found]

    flags = tiny.flags(*model, tmp_path / "out", wandb_project="p")
    with monkeypatch.context() as patched:
        stop_after(patched, 2, "signal")
        assert main(flags) == 0
    (first,) = ids(tmp_path / "out")
    assert f"wandb run {first} is offline" in capsys.readouterr().out
    time.sleep(1.1)  # its directories are named by the second
    assert main(flags) == 0
    assert set(ids(tmp_path / "out")) == {first}
    assert state(tmp_path / "out")["wandb_id"] == first
    assert main(tiny.flags(*model, tmp_path / "other", wandb_project="p")) == 0  # also called "local"
    assert ids(tmp_path / "other") != [first]


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


def test_a_request_in_the_last_evaluation_is_answered_too(
    model: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "0001-x").mkdir()
    flags = [
        *tiny.flags(*model, tmp_path / "out", eval_prompts=1, eval_tokens=4),
        "--run-dir",
        str(tmp_path / "0001-x"),
    ]
    run_dir = RunDir(tmp_path / "0001-x")
    evaluate: Callable[..., None] = Trainer._evaluate

    def asked(self: Trainer, when: str) -> None:
        if when == "after":
            first = run_dir.ask("checkpoint", by="test")
            self._evaluation_progress("decoding")
            assert (self.monitor.heartbeat.answered or {})["id"] == first.id
            run_dir.ask("checkpoint-and-stop", by="test")
            self._evaluation_progress("decoding")
        evaluate(self, when)

    monkeypatch.setattr(Trainer, "_evaluate", asked)
    assert main(flags) == 0
    answered = run_dir.heartbeats()[0].answered or {}
    assert (answered["action"], answered["outcome"]) == ("checkpoint-and-stop", "done")
    assert not state(tmp_path / "out")["finished"]


def test_a_run_without_a_number_never_takes_the_place_of_a_finished_one(
    model: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"

    def there() -> list[str]:
        return sorted(str(path.relative_to(out)) for path in out.glob("*/step-*"))

    first = tiny.flags(*model, out, max_steps=4, save_interval=3, keep_every=2, keep_checkpoints=1)
    assert main(first) == 0
    finished = [f"local/step-0000000{step}" for step in (2, 4)]
    assert there() == finished
    again = [*first, "--lr", "0.02"]
    with monkeypatch.context() as patched:
        stop_after(patched, 1, "signal")
        assert main(again) == 0
    assert "of a finished run: starting at step 0" in capsys.readouterr().out
    assert there() == ["local-2/step-00000001", *finished]
    assert main(again) == 0  # goes on with the second, in its place
    assert there() == ["local-2/step-00000002", "local-2/step-00000004", *finished]
    for path in out.glob("*/*/drafter.safetensors"):
        path.write_bytes(b"")
    capsys.readouterr()
    assert main(again) == 0
    assert "holds no whole checkpoint: starting at step 0" in capsys.readouterr().out
    assert [name for name in there() if name.startswith("local-3/")]
