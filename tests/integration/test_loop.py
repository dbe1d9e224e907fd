"""The training loop where something is wrong: memory that is too small, numbers that are none, settings that
changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils._python_dispatch import TorchDispatchMode

from trainer import checkpoint, config, decode, export
from trainer.__main__ import main
from trainer.data import Batch, write_completions
from trainer.errors import InputError
from trainer.features import Here
from trainer.finite import LostSteps
from trainer.modeldir import tokenizer_digest
from trainer.monitor import Interval, Monitor, StopSignal
from trainer.target import Target
from trainer.train import Trainer

pytestmark = pytest.mark.xdist_group("trainings")

ODD = 89  # a token that one document alone has


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    home = tmp_path_factory.mktemp("model")
    target = tiny.target_directory(home / "target")
    return target, tiny.data_directory(home / "data", target)


@pytest.fixture(autouse=True)
def no_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StopSignal, "install", lambda self: None)


@pytest.fixture
def made(model: tuple[Path, Path], tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """Trainers that have loaded all that they need, and not begun."""
    started: list[Trainer] = []

    def make(**changes: object) -> Trainer:
        settings = config.parse(tiny.flags(*model, tmp_path / "out", **changes)).settings
        started.append(Trainer(settings, Monitor(None)))
        started[-1].total = 10
        return started[-1]

    yield make
    for one in started:
        one.close()


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    step = Trainer._step

    def counted(self: Trainer, interval: Interval) -> float:
        rate = step(self, interval)
        self.stop.came = self.stop.came or self.state.step == steps
        return rate

    monkeypatch.setattr(Trainer, "_step", counted)


def state(output: Path) -> dict[str, Any]:
    return json.loads((output / "latest" / "state.json").read_text())


# -- the worst step ----------------------------------------------------------------------------------------


def test_nothing_is_learnt_of_the_worst_step_and_no_random_number_drawn(made: Callable[..., Trainer]) -> None:
    trainer = made(noise_start=0.1, cache_features=True)
    before = {name: value.clone() for name, value in trainer.drafter.state_dict().items()}
    numbers = torch.get_rng_state()
    trainer._try_out()
    assert torch.equal(torch.get_rng_state(), numbers)
    assert all(torch.equal(value, before[name]) for name, value in trainer.drafter.state_dict().items())
    assert not any(bool(p.grad.any()) for p in trainer.drafter.parameters() if p.grad is not None)
    assert (trainer.state.step, trainer.state.micro_batch) == (0, 0)
    assert not trainer.features._features._kept


def test_memory_that_is_too_small_shows_before_the_first_step_in_one_sentence(
    model: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(Trainer, "_gradient", full)
    assert main(tiny.flags(*model, tmp_path / "out")) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert "the largest micro-batch, 4 × 64 positions with 24 blocks of 4, does not fit" in err
    assert "GB at most so far); give --recompute, or lower --token-budget or --max-anchors" in err
    assert "step 1" not in out


def test_torch_itself_says_so_on_a_cpu(made: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = made()
    monkeypatch.setattr(Trainer, "_gradient", lambda *_: torch.empty(1 << 55))
    with pytest.raises(InputError, match="does not fit into the memory of cpu"):
        trainer._try_out()


@pytest.mark.parametrize(("choice", "code"), [("auto", 0), ("on", 2)])
def test_what_cannot_be_compiled_runs_uncompiled_unless_that_was_asked_for(
    made: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    choice: str,
    code: int,
) -> None:
    trainer = made()

    def broken(*_: object) -> None:
        raise BackendCompilerFailed(lambda: None, RuntimeError("no C++ compiler was found\nand more"), None)

    # As on a GPU.
    trainer.draft._choice, trainer.draft.compiled, trainer.draft._run = choice, True, broken  # type: ignore[assignment]
    if code:
        with pytest.raises(InputError, match=r"--compile on: it does not work here .*give --compile off"):
            trainer._try_out()
        return
    trainer._try_out()
    said = capsys.readouterr().out
    assert "warning: torch.compile does not work here (" in said
    assert "so the drafter runs uncompiled\nthe largest micro-batch fits" in said
    assert not trainer.draft.compiled


# -- numbers that are none ---------------------------------------------------------------------------------


def test_weights_of_the_target_that_are_not_finite_are_named(
    model: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tiny.target_directory(tmp_path / "target")
    weights = load_file(target / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"][5, 6] = float("nan")
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    assert main(tiny.flags(target, model[1], tmp_path / "out")) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "model.layers.2.mlp.up_proj.weight holds values that are not finite; copy the model again" in said


def test_a_document_whose_features_are_not_finite_is_named_and_its_steps_change_nothing(
    model: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "0001-x"
    run.mkdir()
    documents = [(np.minimum(ids, ODD - 1), mask) for ids, mask in tiny.documents(24)]
    documents[13][0][2] = ODD
    meta = {"tokenizer": tokenizer_digest(model[0]), "target": "tiny"}
    write_completions(tmp_path / "data", documents, meta)
    features = Target.features

    def broken(self: Target, ids: Tensor, *more: Any) -> Any:
        """As a kernel that cannot bear one token: no weight of this target could do it."""
        taps, last = features(self, ids, *more)
        return taps.masked_fill((ids == ODD)[..., None], float("inf")), last

    monkeypatch.setattr(Target, "features", broken)
    flags = tiny.flags(model[0], tmp_path / "data", tmp_path / "out")
    assert main([*flags, "--run-dir", str(run)]) == 0
    said = capsys.readouterr().out
    assert "warning: document 13: the target's features are not finite" in said
    assert said.count("had a gradient that is not finite and changed nothing") == 2  # once an epoch
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["nonfinite_steps"] == 2
    weights = load_file(tmp_path / "out" / "latest" / "drafter.safetensors")
    assert all(bool(torch.isfinite(value).all()) for value in weights.values())


def test_a_training_that_diverges_ends_with_its_own_code_and_keeps_what_was_good(
    model: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gradient = Trainer._gradient

    def broken(self: Trainer, *arguments: Any) -> Any:
        found = gradient(self, *arguments)
        if self.state.step >= 5:
            self.drafter.fc.weight.grad[0, 0] = float("nan")
        return found

    monkeypatch.setattr(Trainer, "_gradient", broken)
    flags = tiny.flags(*model, tmp_path / "out", max_nonfinite_steps=3, save_interval=1)
    assert main([*flags, "--keep-checkpoints", "9"]) == 3
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert "3 steps in a row had a gradient that is not finite" in err
    assert "no checkpoint at step 6" in out
    assert state(tmp_path / "out")["step"] == 5
    assert not (tmp_path / "out" / "local" / "step-00000006").exists()


# -- what a step does not do -------------------------------------------------------------------------------


class Waits(TorchDispatchMode):
    """Notes every operation for which the host would have to wait for a GPU."""

    NAMES = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name in self.NAMES:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("lean", [{}, {"drafter_dtype": "bfloat16", "recompute": True}])
def test_no_step_makes_the_host_wait_for_a_gpu(
    made: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch, lean: dict[str, object]
) -> None:
    """But for the target's own pass (transformers looks at the positions of its input, once), and for the
    look at lost steps, which a CPU has in each step and a GPU now and then.
    """
    trainer = made(noise_start=0.1, grad_accum=2, use_soft_labels=True, cap_lambda=0.1, **lean)
    batches = [trainer.reader.batch(number) for number in range(2)]
    features = {id(batch): trainer.features(None, batch) for batch in batches}
    monkeypatch.setattr(trainer.ahead, "batch", lambda number: batches[number])
    monkeypatch.setattr(Batch, "to", lambda self, device: self)
    monkeypatch.setattr(Here, "__call__", lambda self, number, batch: features[id(batch)])
    monkeypatch.setattr(LostSteps, "due", False)
    with Waits() as waits:
        trainer._step(Interval())
    assert trainer.state.step == 1
    assert waits.seen == []
    with Waits() as waits:  # that it would be noticed
        float(torch.ones(()))
    assert waits.seen == ["_local_scalar_dense"]


# -- refused before it takes minutes -----------------------------------------------------------------------


def test_data_of_which_nothing_can_be_learnt_is_refused_before_the_target_is_loaded(
    model: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Target, "load", lambda *_: 1 / 0)
    (tmp_path / "theirs").mkdir()
    rows = {"input_ids": [[1] * 20] * 3, "labels": [[-100] * 20] * 3}  # as other trainers have it
    pq.write_table(pa.table(rows), tmp_path / "theirs" / "0.parquet")
    flags = tiny.flags(model[0], tmp_path / "theirs", tmp_path / "out", cache_dir=tmp_path / "cache")
    assert main(flags) == 2
    assert "in none of its 3 documents is a supervised token followed by" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_last_checkpoint_that_fails_twice_is_said_once(
    model: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tried: list[int] = []

    def full(output: Path, state: checkpoint.State, *_: object) -> Path:
        tried.append(state.step)
        raise checkpoint.SaveError(f"no checkpoint at step {state.step}: No space left on device")

    monkeypatch.setattr(checkpoint, "save", full)
    assert main(tiny.flags(*model, tmp_path / "out", max_steps=2, save_interval=1)) == 1
    assert tried == [1, 2, 2]
    said = capsys.readouterr().out
    assert [said.count(f"no checkpoint at step {step}") for step in (1, 2)] == [1, 1]


# -- less memory -------------------------------------------------------------------------------------------


def losses(trainer: Trainer, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        trainer._step(Interval())
        found.append(trainer.tally.read()["loss"])
    return found


def test_in_bfloat16_the_loss_falls_as_in_float32(
    model: tuple[Path, Path], made: Callable[..., Trainer], tmp_path: Path
) -> None:
    text = (np.arange(64) % 30).astype(np.int32)  # can be foreseen
    documents = [(text[i : i + 34], np.ones(34, np.uint8)) for i in range(24)]
    about = {"tokenizer": tokenizer_digest(model[0]), "target": "tiny"}
    write_completions(tmp_path / "counting", documents, about)
    trainers = [
        made(data_dir=tmp_path / "counting", init_from_target=True, epochs=20, drafter_dtype=kind)
        for kind in (None, "bfloat16")
    ]
    wide, narrow = (losses(trainer, 30) for trainer in trainers)
    assert wide[0] - wide[-1] > 0.2
    assert wide != narrow
    assert narrow == pytest.approx(wide, rel=1e-2)  # 0.003 at most when it was written
    learnt = [torch.cat([p.detach().flatten() for p in t.drafter.parameters()]) for t in trainers]
    assert {p.dtype for p in trainers[1].drafter.parameters()} == {torch.float32}
    assert {m.dtype for m in trainers[1].optimizer.state().values()} == {torch.float32}
    assert float((learnt[0] - learnt[1]).norm() / learnt[0].norm()) < 0.2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_computed_twice_trains_to_the_same_bits(made: Callable[..., Trainer], dtype: str) -> None:
    plain, twice = (made(drafter_dtype=dtype, recompute=recompute or None) for recompute in (False, True))
    assert losses(plain, 3) == losses(twice, 3)
    pairs = zip(plain.drafter.parameters(), twice.drafter.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_checkpoint_of_a_training_in_bfloat16_is_one_like_any_other(
    model: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lean: dict[str, object] = {"drafter_dtype": "bfloat16", "recompute": True, "max_steps": 2}
    assert main(tiny.flags(*model, tmp_path / "out", **lean)) == 0
    place = tmp_path / "out" / "latest"
    saved = load_file(place / "drafter.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.float32}
    assert any(bool((value != value.bfloat16()).any()) for value in saved.values())  # nothing was rounded
    assert state(tmp_path / "out")["settings"]["drafter_dtype"] == "bfloat16"
    assert decode.load_drafter(place).fc.weight.dtype == torch.float32
    assert export.main([str(place), "--to", str(tmp_path / "export"), "--target-model", str(model[0])]) == 0
    assert "read back by an independent loader: " in capsys.readouterr().out


# -- a resume with other settings --------------------------------------------------------------------------


@pytest.mark.slow
def test_another_order_of_the_data_begins_the_epoch_again_and_the_rest_is_trained_on_once(
    model: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patched:
        stop_after(patched, 7)  # an epoch has 5 micro-batches: in the middle of the second of three
        assert main(tiny.flags(*model, tmp_path / "out", epochs=3)) == 0
    assert main(tiny.flags(*model, tmp_path / "out", epochs=3, token_budget=128)) == 0
    said = capsys.readouterr().out
    assert "warning: resuming with other settings than before: token_budget" in said
    assert "warning: the data comes in another order now, so epoch 1 begins again" in said
    per_epoch = int(said.rpartition(" micro-batches an epoch")[0].rpartition(" ")[2])
    assert per_epoch > 5
    then = state(tmp_path / "out")
    assert (then["step"], then["micro_batch"]) == (7 + 2 * per_epoch, 3 * per_epoch)


@pytest.mark.slow
def test_a_checkpoint_of_another_experiment_is_refused(
    model: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = tiny.flags(*model, tmp_path / "out", max_steps=4)
    runs = [tmp_path / name for name in ("0001-x", "0002-y", "0003-x")]
    for run in runs:
        run.mkdir()
    with monkeypatch.context() as patched:
        stop_after(patched, 2)
        assert main([*flags, "--run-dir", str(runs[0])]) == 0
    assert main([*flags, "--run-dir", str(runs[1])]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "step-00000002 is of another experiment (x, and this run is of y)" in said
    assert main([*flags, "--run-dir", str(runs[2])]) == 0
    assert state(tmp_path / "out")["step"] == 4


def test_every_setting_says_what_becomes_of_it_at_a_resume() -> None:
    kinds = {name: field.metadata["resume"] for name, field in config.FIELDS.items()}
    words = {config.FREE, config.TOLD, config.ORDER, config.FIXED, config.SHAPE}
    assert set(kinds.values()) == words
    for name, field in config.FIELDS.items():
        assert (kinds[name] == config.FREE) == (not field.metadata["learns"]), name
    order = [name for name, kind in kinds.items() if kind == config.ORDER]
    assert order == ["token_budget", "max_seq_len", "max_batch_size", "packing", "seed"]
