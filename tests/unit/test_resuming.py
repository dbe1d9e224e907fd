"""trainer/resuming.py: what a deploy learns of the newest checkpoint before it stops the run in progress."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch

from trainer import checkpoint, config, resuming
from trainer.drafter_config import DrafterConfig
from trainer.errors import InputError
from trainer.modeldir import target_digest

SHAPE = DrafterConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    head_dim=16, rms_norm_eps=1e-6, rope_theta=1e4, vocab_size=64, block_size=8, mask_token_id=63,
    target_layer_ids=(0, 2), num_target_layers=4, max_position_embeddings=512,
)  # fmt: skip


def settings(output: Path, **changes: object) -> config.Settings:
    base = config.Settings(
        target_model="toy", output_dir=str(output), block_size=8, num_draft_layers=2, num_taps=2
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def drafter(given: config.Settings) -> DrafterConfig:
    """What the command line makes of a target like SHAPE's, as __main__ does it."""
    target = SimpleNamespace(**{**vars(SHAPE), "num_hidden_layers": 4})
    return DrafterConfig.for_target(
        target,
        block_size=given.block_size,
        num_layers=given.num_draft_layers,
        target_layer_ids=given.target_layer_ids,
        num_taps=given.num_taps,
        mask_token_id=63 if given.mask_token_id is None else given.mask_token_id,
    )


def check(given: config.Settings) -> None:
    resuming.check(given, drafter(given))


def store(output: Path, **changes: object) -> None:
    state = checkpoint.State(
        step=7,
        micro_batch=7,
        epoch=0,
        total=9,
        run_id="0001-x",
        settings={"optimizer": "adamw", "target": "toy abc"},
    )
    tensors = {"a": torch.zeros(2)}
    checkpoint.save(output, dataclasses.replace(state, **changes), tensors, tensors, SHAPE.to_json(), 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_size": 4}, "block_size 8 instead of 4"),
        ({"num_draft_layers": 3}, "num_hidden_layers 2 instead of 3"),
        ({"target_layer_ids": (0, 1)}, r"target_layer_ids \(0, 2\) instead of \(0, 1\)"),
        ({"num_taps": 3}, r"target_layer_ids \(0, 2\) instead of \(0, 1, 2\)"),
        ({"target_model": "/some/model"}, "trained for another target"),
        ({"mask_token_id": 5}, "mask_token_id 63 instead of 5"),
        ({"optimizer": "muon"}, "was trained with --optimizer adamw"),
    ],
)
def test_settings_that_cannot_go_on_are_refused_before_anything_is_stopped(
    tmp_path: Path, change: dict, said: str
) -> None:
    store(tmp_path)
    check(settings(tmp_path))
    with pytest.raises(InputError, match=said):
        check(settings(tmp_path, **change))
    check(settings(tmp_path, resume="never", **change))


def test_the_checkpoint_that_the_run_in_progress_will_leave_counts_before_it_is_there(tmp_path: Path) -> None:
    store(tmp_path / "out", finished=True)
    given = settings(tmp_path / "out", num_taps=3)
    state = checkpoint.State(
        step=0, micro_batch=0, epoch=0, total=9, run_id="0002-x", settings={"target": "toy abc"}
    )
    with checkpoint.output_directory(tmp_path / "out") as output:
        check(given)
        checkpoint.announce(output, state, SHAPE.to_json())
        with pytest.raises(InputError, match=r"target_layer_ids \(0, 2\) instead of \(0, 1, 2\)"):
            check(given)
        left = (output / ".coming.json").read_bytes()
    check(given)
    (output / ".coming.json").write_bytes(left)  # of a trainer that was killed
    check(given)


def test_without_a_checkpoint_and_after_a_finished_run_every_shape_is_right(tmp_path: Path) -> None:
    check(settings(tmp_path, block_size=4))
    store(tmp_path, finished=True)
    check(settings(tmp_path, block_size=4))


def test_the_target_of_the_checkpoint_is_known_again(tmp_path: Path) -> None:
    target, other = (tiny.target_directory(tmp_path / name) for name in ("target", "other"))
    store(tmp_path / "out", settings={"target": target_digest(target)})
    check(settings(tmp_path / "out", target_model=str(target)))
    (other / "config.json").write_text((other / "config.json").read_text().replace("0.02", "0.03"))
    for wrong in (str(other), "toy"):
        with pytest.raises(InputError, match="trained for another target"):
            check(settings(tmp_path / "out", target_model=wrong))


def test_a_toy_of_another_recipe_supersedes_what_was_trained_for_the_one_before(tmp_path: Path) -> None:
    store(tmp_path)
    given = settings(tmp_path, num_taps=3)
    resuming.check(given, dataclasses.replace(drafter(given), num_target_layers=9))


def test_a_checkpoint_from_before_the_flag_was_trained_in_float32(tmp_path: Path) -> None:
    ours = {**settings(tmp_path).learning(), "drafter_dtype": "float32"}
    state = checkpoint.State(
        step=7, micro_batch=7, epoch=0, total=9, run_id="0001-x",
        settings={name: value for name, value in ours.items() if name != "drafter_dtype"},
    )  # fmt: skip
    found = checkpoint.Found(tmp_path, state)
    assert resuming.changed(found, ours) == []
    assert resuming.changed(found, {**ours, "drafter_dtype": "bfloat16"}) == ["drafter_dtype"]
