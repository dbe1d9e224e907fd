"""flex_attention, the execution for GPUs, computes what the others compute; here on the CPU, uncompiled."""

from __future__ import annotations

import pytest
import torch
from test_attention import CASES, LENGTH, Case, tensors
from torch.nn.attention import flex_attention as torch_flex

from trainer import flex
from trainer.attention import dense_attention, two_part_attention
from trainer.blocks import Blocks
from trainer.flex import FlexAttention, block_mask, choose


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch refuses gradients of flex_attention on a CPU, though its uncompiled form can compute them."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex, "TILE", 8)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", CASES)
def test_flex_attention_equals_dense_attention_in_value_and_gradient(case: str) -> None:
    b = CASES[case].blocks
    inputs = tensors(len(b))
    weight = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    results = []
    for attend in (dense_attention, FlexAttention()):
        out = attend(*inputs, blocks=b)
        results.append((out, *torch.autograd.grad((out * weight).sum(), inputs)))
    for dense, flexed in zip(*results, strict=True):
        torch.testing.assert_close(flexed, dense, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_the_tiles_are_those_that_the_rule_gives_entry_by_entry(case: str) -> None:
    b = CASES[case].blocks
    made = block_mask(b, 2, LENGTH)
    rule, slots = b.visible(2, LENGTH), len(b) * b.block_size
    by_entry = torch_flex.create_block_mask(
        lambda batch, head, query, key: rule(query, key),
        B=None, H=None, Q_LEN=slots, KV_LEN=2 * LENGTH + slots, BLOCK_SIZE=8, device="cpu",
    )  # fmt: skip
    assert torch.equal(made.to_dense(), by_entry.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks"):
        assert torch.equal(getattr(made, name), getattr(by_entry, name))


def test_layers_share_one_mask_and_other_blocks_get_their_own() -> None:
    made: list[object] = []
    flexed = FlexAttention(lambda query, *_, block_mask, **__: (made.append(block_mask), query)[1])
    one, other = (Case([(0, 0, a)]).blocks for a in (3, 4))
    for b in (one, one, other):
        flexed(*tensors(1), blocks=b)
    assert made[0] is made[1]
    assert made[2] is not made[0]


def test_what_flex_cannot_do_here_is_said_and_done_in_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    assert choose(torch.device("cpu"), 2, 2, 64, said.append) is two_part_attention
    assert not said
    monkeypatch.setattr(Blocks, "to", lambda self, device: 1 / 0)
    assert choose(torch.device("cuda"), 2, 2, 64, said.append) is two_part_attention
    assert said == [
        "flex_attention does not work here (ZeroDivisionError: division by zero): attention runs in two parts"
    ]
