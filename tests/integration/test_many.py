"""Several processes train what one process trains: the same bits, however many there are."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import many
import pytest
import tiny
import torch
from many import Ranks
from safetensors.torch import load_file

from trainer import checkpoint
from trainer.status import RunDir

pytestmark = pytest.mark.slow

ONE, THREE = ("cpu:0", "cpu:0"), ("cpu:0", "cpu:1,cpu:2,cpu:3")
LAST = "cpu:0,cpu:1,cpu:2", "cpu:3,cpu:4"
PER_STEP = 6  # micro-batches


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    home = tmp_path_factory.mktemp("model")
    target = tiny.target_directory(home / "target")
    return target, tiny.data_directory(home / "data", target, 60)


@pytest.fixture
def flags(model: tuple[Path, Path], tmp_path: Path) -> Callable[..., list[str]]:
    """Of a run of its own: output and run directory are called by its name."""

    def made(name: str, drafters: int, **changes: object) -> list[str]:
        (tmp_path / "runs" / name).mkdir(parents=True, exist_ok=True)
        chosen = {
            "grad_accum": PER_STEP // drafters,
            "epochs": 3000,
            "max_steps": 8,
            "sample_blocks": 4,
            "run_dir": tmp_path / "runs" / name,
            **changes,
        }
        return tiny.flags(*model, tmp_path / "out" / name, **chosen)

    return made


def losses(tmp_path: Path, name: str) -> dict[int, float]:
    lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines) if row["kind"] == "training"}


def weights(tmp_path: Path, name: str) -> dict[str, torch.Tensor]:
    found = {}
    for file in checkpoint.TENSORS:
        tensors = load_file(tmp_path / "out" / name / "latest" / file)
        found.update({f"{file}:{key}": value for key, value in tensors.items()})
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@contextlib.contextmanager
def ended(ranks: Ranks) -> Iterator[Ranks]:
    try:
        yield ranks
    finally:
        ranks.kill()


def until(true: Callable[[], object], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


# -- the same result ---------------------------------------------------------------------------------------


def test_any_number_of_processes_learns_the_same_over_sixty_steps(
    flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    many.run(tmp_path / "a", *ONE, flags("one", 1, max_steps=60))
    many.run(tmp_path / "b", *THREE, flags("three", 3, max_steps=60))
    several = many.run(tmp_path / "c", *LAST, flags("two", 2, max_steps=60))
    assert len(losses(tmp_path, "one")) == 60
    assert losses(tmp_path, "one") == losses(tmp_path, "three") == losses(tmp_path, "two")
    assert same(weights(tmp_path, "one"), weights(tmp_path, "three"))
    assert same(weights(tmp_path, "one"), weights(tmp_path, "two"))
    assert "queue " in several.said()
    assert "waiting: targets " in several.said()


@pytest.mark.parametrize(
    "changes",
    [
        {"use_soft_labels": True, "noise_start": 0.1, "packing": True},
        {"cache_features": True, "optimizer": "muon", "init_from_target": True, "loss_type": "dpace"},
    ],
    ids=["soft, noise, packing", "cached, muon, from the target, dpace"],
)
def test_so_it_is_with_whatever_else_is_asked_for(
    flags: Callable[..., list[str]], tmp_path: Path, changes: dict[str, object]
) -> None:
    many.run(tmp_path / "a", *ONE, flags("one", 1, **changes))
    many.run(tmp_path / "b", "cpu:0,cpu:1", "cpu:2,cpu:3", flags("two", 2, **changes))
    many.run(tmp_path / "c", "cpu:0,cpu:1", "cpu:0,cpu:1", flags("both", 2, **changes))
    assert losses(tmp_path, "one") == losses(tmp_path, "two") == losses(tmp_path, "both")
    assert same(weights(tmp_path, "one"), weights(tmp_path, "two"))
    assert same(weights(tmp_path, "one"), weights(tmp_path, "both"))


def test_a_resume_on_other_devices_goes_on_with_the_same_steps(
    flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    many.run(tmp_path / "a", *ONE, flags("whole", 1, max_steps=9))
    plan = {"max_steps": 9, "save_interval": 4}
    with ended(many.start(tmp_path / "b", *THREE, flags("parts", 3, **plan))) as ranks:
        until(lambda: "step 4/" in ranks.said())
        ranks.processes[0].send_signal(signal.SIGTERM)
        assert set(ranks.wait()) == {0}
    parts = json.loads((tmp_path / "out" / "parts" / "latest" / "state.json").read_text())
    assert parts["per_step"] == PER_STEP
    assert 4 <= parts["step"] < 9
    # --grad-accum as it was: a step stays what it is, on two drafters as on three
    again = many.run(tmp_path / "c", "cpu:0", "cpu:1,cpu:2", flags("parts", 3, **plan))
    assert f"resumed from {tmp_path}/out/parts" in again.said()
    assert "resuming with other settings" not in again.said()
    assert same(weights(tmp_path, "whole"), weights(tmp_path, "parts"))


def test_another_accumulation_at_a_resume_makes_other_steps_and_is_said(
    flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    first = flags("run", 3, max_steps=9)
    with ended(many.start(tmp_path / "a", *THREE, first)) as ranks:
        until(lambda: "step 2/" in ranks.said())
        ranks.processes[0].send_signal(signal.SIGTERM)
        assert set(ranks.wait()) == {0}
    again = many.run(tmp_path / "b", *ONE, flags("run", 3, max_steps=9, grad_accum=1))
    assert "resuming with other settings than before: grad_accum" in again.said()
    assert json.loads((tmp_path / "out" / "run" / "latest" / "state.json").read_text())["per_step"] == 1


# -- evaluations -------------------------------------------------------------------------------------------


def test_the_first_target_decodes_with_the_drafter_of_rank_0(
    flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    plan = {"max_steps": 4, "eval_prompts": 2, "eval_tokens": 8, "eval_interval": 2}

    def evaluated(name: str) -> list[object]:
        lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if row["kind"] == "evaluation"]
        return [[(key, value) for key, value in row.items() if "second" not in key and key != "time"]
                for row in rows]  # fmt: skip

    many.run(tmp_path / "a", *ONE, flags("one", 1, **plan))
    many.run(tmp_path / "b", "cpu:0,cpu:1", "cpu:2,cpu:3", flags("two", 2, **plan))
    assert len(evaluated("one")) == 3  # before, at step 2, after
    assert evaluated("one") == evaluated("two")
    assert losses(tmp_path, "one") == losses(tmp_path, "two")


# -- ends --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_reaches_all_at_one_step_whoever_was_told(
    flags: Callable[..., list[str]], tmp_path: Path, rank: int
) -> None:
    with ended(many.start(tmp_path / "a", *THREE, flags("run", 3, max_steps=4000))) as ranks:
        until(lambda: "step 3/" in ranks.said())
        ranks.processes[rank].send_signal(signal.SIGTERM)
        assert ranks.wait() == [0, 0, 0, 0]
    why = "SIGTERM received" if rank == 0 else "another process of this run was told to stop: saving"
    assert why in ranks.said()
    steps = json.loads((tmp_path / "out" / "run" / "latest" / "state.json").read_text())["step"]
    assert f"step-{steps:08}" in ranks.said()
    beats = RunDir(tmp_path / "runs" / "run").heartbeats()
    assert [beats[number].role for number in range(4)] == ["drafter", "drafter", "drafter", "target"]
    assert {beats[number].step for number in range(3)} == {steps}


def test_a_checkpoint_that_is_asked_for_is_saved_and_all_go_on(
    flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    with ended(many.start(tmp_path / "a", *THREE, flags("run", 3, max_steps=4000))) as ranks:
        until(lambda: "step 2/" in ranks.said())
        directory = RunDir(tmp_path / "runs" / "run")
        asked = directory.ask("checkpoint", "a test")
        until(lambda: (directory.heartbeats()[0].answered or {}).get("id") == asked.id)
        assert (tmp_path / "out" / "run" / "latest").exists()
        at = len(ranks.said())
        until(lambda: "step " in ranks.said()[at:])
        asked = directory.ask("checkpoint-and-stop", "a test")
        assert ranks.wait() == [0, 0, 0, 0]
    answered = directory.heartbeats()[0].answered
    assert answered is not None
    assert (answered["id"], answered["outcome"]) == (asked.id, "done")


@pytest.mark.parametrize("lost", [1, 3], ids=["a drafter", "the target"])
def test_when_another_process_is_lost_rank_0_keeps_what_was_learnt(
    flags: Callable[..., list[str]], tmp_path: Path, lost: int
) -> None:
    with ended(many.start(tmp_path / "a", *THREE, flags("run", 3, max_steps=4000))) as ranks:
        until(lambda: "step 3/" in ranks.said())
        ranks.processes[lost].kill()
        codes = ranks.wait(60)
    assert codes[lost] == -signal.SIGKILL
    assert set(codes[:lost] + codes[lost + 1 :]) == {1}
    assert "saving what has been learnt, since another process of this run is gone" in ranks.said()
    saved = json.loads((tmp_path / "out" / "run" / "latest" / "state.json").read_text())
    last = max(losses(tmp_path, "run"))
    assert saved["step"] in (last, last + 1)  # the line of a step comes after it
    assert saved["micro_batch"] == saved["step"] * PER_STEP
    assert "Traceback" not in "".join(ranks.said(number) for number in range(4))


def test_features_that_are_no_numbers_end_all_together(
    model: tuple[Path, Path], flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    """The gradients are summed, so all drafters know of it at the same step."""
    broken = tiny.qwen3()
    with torch.no_grad():
        for part in ("up_proj", "down_proj"):  # finite, and their product is not
            getattr(broken.model.layers[0].mlp, part).weight.fill_(1e30)
    target = tiny.target_directory(tmp_path / "target", broken)
    data = tiny.data_directory(tmp_path / "data", target, 60)
    more = {"target_model": target, "data_dir": data, "max_nonfinite_steps": 2, "max_steps": 4000}
    with ended(many.start(tmp_path / "a", "cpu:0", "cpu:1,cpu:2", flags("run", 2, **more))) as ranks:
        codes = ranks.wait(120)
    assert codes[:2] == [3, 3]
    assert "the training has diverged" in ranks.said(0)
    assert "the training has diverged" in ranks.said(1)
