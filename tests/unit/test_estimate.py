"""What a run will take: counted on real drafters and targets, and held against what torch counts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from test_export import CONFIG
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

from trainer import estimate
from trainer.__main__ import main
from trainer.blocks import Blocks
from trainer.config import Settings
from trainer.drafter import Drafter
from trainer.drafter_config import DrafterConfig
from trainer.loss import Objective

LENGTH, ANCHORS = 64, 16
SETTINGS = Settings(
    target_model="toy", block_size=4, num_draft_layers=2, num_taps=2, token_budget=2 * LENGTH,
    max_seq_len=LENGTH, max_anchors=ANCHORS, device="cpu",
)  # fmt: skip


@pytest.mark.parametrize("changes", [{}, {"num_layers": 3, "num_taps": 3}, {"block_size": 16}])
def test_parameters_of_the_drafter_are_exact(changes: dict[str, Any]) -> None:
    chosen = {"block_size": 4, "num_layers": 2, "num_taps": 2, "mask_token_id": 96, **changes}
    config = DrafterConfig.for_target(SimpleNamespace(**tiny.SHAPE), **chosen)
    assert estimate.drafter_parameters(config) == sum(p.numel() for p in Drafter(config).parameters())


def qwen3_5() -> torch.nn.Module:
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    heads = {"linear_key_head_dim": 8, "linear_value_head_dim": 16}
    with torch.device("meta"):
        return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**tiny.SHAPE, **linear, **heads))


@pytest.mark.parametrize(
    "model", [tiny.qwen3, tiny.llama, qwen3_5, lambda: tiny.qwen3(tie_word_embeddings=True)]
)
def test_parameters_of_a_target_are_exact(model: Any) -> None:
    made = model()
    counted = sum(p.numel() for p in made.parameters())
    assert estimate.target_parameters(SimpleNamespace(**made.config.to_dict()))[0] == counted


def test_work_and_memory_are_about_what_torch_counts() -> None:
    """A micro-batch of the largest size, forward and backward: products of matrices, and what is kept."""
    found = estimate.estimate(SETTINGS, CONFIG, SimpleNamespace(**tiny.SHAPE), 0)
    drafter = Drafter(CONFIG)
    per_row = ANCHORS // 2
    anchors = [LENGTH * (i + 1) // (per_row + 1) for i in range(per_row)]
    blocks = Blocks.build([row for row in (0, 1) for _ in anchors], anchors * 2, 4)
    embeddings, taps = torch.randn(ANCHORS, 4, 32), torch.randn(2, LENGTH, 64)
    labels = torch.zeros(ANCHORS * 3, dtype=torch.int64)
    own = {p.untyped_storage().data_ptr() for p in drafter.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            hidden = drafter(embeddings, blocks, drafter.fuse(taps))
        objective = Objective(torch.randn(CONFIG.vocab_size, 32))
        objective(hidden[:, 1:].reshape(-1, 32), labels, torch.ones(len(labels))).loss.backward()
    work = sum(value for name, value in found.work.items() if name != "target")
    assert counter.get_total_flops() == pytest.approx(work, rel=0.25)
    memory = found.drafter_memory
    assert sum(kept.values()) == pytest.approx(memory["activations"] + memory["context"], rel=0.3)


def test_a_recipe_for_eight_gpus_is_estimated_where_there_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tiny.target_directory(tmp_path / "target")
    data = tiny.data_directory(tmp_path / "data", target)
    flags = tiny.flags(target, data, tmp_path / "out", target_gpus="0,1,2,3,4", drafter_gpus="5,6,7")
    assert main([*flags, "--check-config"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "· a step: 3 × at most 256 positions with 24 blocks of 4, " in said[1]
    assert said[2].startswith("memory of each target GPU (0, 1, 2, 3, 4): ")
    assert said[3].startswith("memory of each drafter GPU (5, 6, 7): ")
    assert said[4].startswith("time: ")
    assert said[4].endswith("970 tokens × 2 epochs are at least 3 steps")
    assert main(flags) == 2
    assert "--target-gpus 0,1,2,3,4" in capsys.readouterr().err


def test_one_device_holds_what_both_halves_need_once() -> None:
    found = estimate.estimate(SETTINGS, CONFIG, SimpleNamespace(**tiny.SHAPE), 0)
    (shapes, memory, time) = estimate.lines(SETTINGS, found, 0)
    assert "output head" not in memory  # the target's
    assert memory.count("features") == 1
    assert "if" in time
    assert "0.0 M parameters" in shapes
