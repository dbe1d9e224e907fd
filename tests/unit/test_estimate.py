"""What a run will take: counted on real drafters and targets, and held against what torch counts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from test_export import CONFIG
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

from trainer import estimate
from trainer.__main__ import main
from trainer.blocks import Blocks
from trainer.compiling import twice
from trainer.config import Settings, parse
from trainer.drafter import Drafter, run_layer
from trainer.drafter_config import DrafterConfig
from trainer.loss import Objective

LENGTH, ANCHORS = 64, 16
RECIPE = Path(__file__).parents[2] / "runs" / "qwen3.6-27b-8gpu.yaml"
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


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors that are made, for as long as they are there."""

    def __init__(self, *own: torch.Tensor) -> None:
        super().__init__()
        self.peak = 0
        self._own = {tensor.untyped_storage().data_ptr() for tensor in own}
        self._alive: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        self._alive = [(storage, size) for storage, size in self._alive if not storage.expired()]
        known = {storage.cdata for storage, _ in self._alive}
        for tensor in tree_iter(out):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage and storage.data_ptr() not in self._own and storage._cdata not in known:
                self._alive.append((StorageWeakRef(storage), storage.nbytes()))
                known.add(storage._cdata)
        self.peak = max(self.peak, sum(size for _, size in self._alive))
        return out


LARGER = dataclasses.replace(
    CONFIG, hidden_size=64, intermediate_size=192, head_dim=16, num_hidden_layers=4, block_size=8
)  # fmt: skip


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("inner", [192, 512])  # in the first half of it is attention's
def test_memory_and_work_are_about_what_torch_counts(inner: int, dtype: str, recompute: bool) -> None:
    """A micro-batch of the largest size, forward and backward: products of matrices, and tensors."""
    length = 192 if inner == 192 else LENGTH
    config = dataclasses.replace(LARGER, intermediate_size=inner)
    settings = dataclasses.replace(
        SETTINGS, block_size=8, num_draft_layers=4, token_budget=2 * length, max_seq_len=length,
        drafter_dtype=dtype, recompute=recompute,
    )  # fmt: skip
    found = estimate.estimate(settings, config, SimpleNamespace(**tiny.SHAPE), 0)
    drafter = Drafter(config)
    for parameter in drafter.parameters():
        parameter.grad = torch.zeros_like(parameter)
    per_row = ANCHORS // 2
    anchors = [length * (i + 1) // (per_row + 1) for i in range(per_row)]
    blocks = Blocks.build([row for row in (0, 1) for _ in anchors], anchors * 2, 8)
    kind = getattr(torch, dtype)
    each = twice(run_layer) if recompute else run_layer
    counter = FlopCounterMode(display=False)
    live = Live(*drafter.parameters(), *(p.grad for p in drafter.parameters() if p.grad is not None))
    for mode in (counter, live):  # one after the other: counting work keeps tensors
        with mode:
            embeddings, taps = (
                torch.randn(ANCHORS, 8, 64, dtype=kind),
                torch.randn(2, length, 128, dtype=kind),
            )
            hidden = drafter(embeddings, blocks, drafter.fuse(taps), each=each)
            hidden.backward(torch.ones_like(hidden))
    work = sum(value for name, value in found.work.items() if name not in ("target", "vocabulary"))
    assert counter.get_total_flops() == pytest.approx(work, rel=0.2)
    parts = ("context", "activations", "their gradients", "weights of products")
    memory = sum(found.drafter_memory[name] for name in parts) + taps.nbytes
    assert live.peak == pytest.approx(memory, rel=0.15)


def test_the_vocabulary_s_work_is_what_torch_counts() -> None:
    found = estimate.estimate(SETTINGS, CONFIG, SimpleNamespace(**tiny.SHAPE), 0)
    hidden, labels = (
        torch.randn(ANCHORS * 3, 32).requires_grad_(),
        torch.zeros(ANCHORS * 3, dtype=torch.int64),
    )
    with FlopCounterMode(display=False) as counter:
        Objective(torch.randn(CONFIG.vocab_size, 32))(hidden, labels, torch.ones(len(labels)))
    assert counter.get_total_flops() == found.work["vocabulary"]


def test_the_reference_recipe_fits_into_its_gpus() -> None:
    """Of 96 GB, with room for what a runtime and an allocator add; in float32 it needed 140."""
    settings = parse(["--config", str(RECIPE)]).settings
    target = SimpleNamespace(
        hidden_size=5120, intermediate_size=17408, num_hidden_layers=64, num_attention_heads=24,
        num_key_value_heads=4, head_dim=256, vocab_size=248320, model_type="qwen3_5_text",
    )  # fmt: skip
    config = DrafterConfig.for_target(
        target, block_size=settings.block_size, num_layers=settings.num_draft_layers, mask_token_id=0
    )

    def needed(**changes: Any) -> int:
        changed = dataclasses.replace(settings, **changes)
        return sum(estimate.estimate(changed, config, target, 0).drafter_memory.values())

    assert needed() < 65e9
    assert needed(recompute=False) > 85e9
    assert needed(drafter_dtype="float32", recompute=False) > 130e9


def test_a_recipe_for_eight_gpus_is_estimated_where_there_is_none(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = tiny.target_directory(tmp_path / "target")
    data = tiny.data_directory(tmp_path / "data", target)
    flags = tiny.flags(target, data, tmp_path / "out", target_gpus="0,1,2,3,4", drafter_gpus="5,6,7")
    assert main([*flags, "--check-config"]) == 0
    said = capfd.readouterr().out.splitlines()
    assert "· a step: 3 × at most 256 positions with 24 blocks of 4, " in said[1]
    assert said[2].startswith("memory of each target GPU (0, 1, 2, 3, 4): ")
    assert said[3].startswith("memory of each drafter GPU (5, 6, 7): ")
    assert said[4].startswith("time: ")
    assert said[4].endswith("970 tokens × 2 epochs are at least 3 steps")
    both = tiny.flags(target, data, tmp_path / "out", target_gpus="0,1", drafter_gpus="0,1")
    assert main([*both, "--check-config"]) == 0
    assert capfd.readouterr().out.splitlines()[2].startswith("memory of each device (0, 1): ")
    assert main(flags) == 2
    assert "--target-gpus 0,1,2,3,4" in capfd.readouterr().err


def test_logits_take_no_more_than_their_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tiny.target_directory(tmp_path / "target")
    data = tiny.data_directory(tmp_path / "data", target)
    assert main([*tiny.flags(target, data, tmp_path / "out", max_anchors=2000), "--check-config"]) == 0
    rows, vocabulary = 2000 * 3, 97
    assert f"logits {rows * vocabulary * 4 / 1e6:,.0f} MB" in capsys.readouterr().out


def test_one_device_holds_what_both_halves_need_once() -> None:
    found = estimate.estimate(SETTINGS, CONFIG, SimpleNamespace(**tiny.SHAPE), 0)
    (shapes, memory, time) = estimate.lines(SETTINGS, found, 0)
    assert "output head" not in memory  # the target's
    assert memory.count("features") == 1
    assert "if" in time
    assert "0.0 M parameters" in shapes
