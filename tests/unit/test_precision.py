"""--drafter-dtype bfloat16 and --recompute: what stays float32, how close it is, what is the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import test_elementwise
import torch
from test_elementwise import CALLS, drawn
from test_export import CONFIG
from torch import Tensor

from trainer import elementwise
from trainer.attention import dense_attention, two_part_attention
from trainer.blocks import Blocks
from trainer.closed_form import Terms
from trainer.compiling import twice
from trainer.drafter import Drafter, run_layer
from trainer.loss import Objective

BF16, F32 = torch.bfloat16, torch.float32
SHAPE = dataclasses.replace(
    CONFIG, hidden_size=64, intermediate_size=192, head_dim=16, num_hidden_layers=4, vocab_size=1024,
    block_size=8,
)  # fmt: skip
ANCHORS = list(range(40, 136, 6))


def relative(found: Tensor, exact: Tensor) -> float:
    found, exact = found.detach().double(), exact.detach().double()
    return float((found - exact).norm() / exact.norm())


@pytest.fixture(scope="module")
def gradient() -> Callable[..., tuple[Tensor, Tensor]]:
    """Loss and gradient of a micro-batch, computed as it is asked."""
    torch.manual_seed(0)
    drafter = Drafter(SHAPE)
    blocks = Blocks.build([0] * len(ANCHORS), ANCHORS, 8)
    embeddings, taps = torch.randn(len(ANCHORS), 8, 64), torch.randn(1, 144, 128)
    rows = torch.tensor([i for i in range(len(ANCHORS) * 8) if i % 8])
    labels, weights = torch.randint(0, 1024, (len(rows),)), torch.rand(len(rows))
    head, teacher = 0.12 * torch.randn(1024, 64), torch.randn(len(rows), 64)

    def computed(
        dtype: torch.dtype = F32, head_dtype: torch.dtype = F32, soft: bool = False, recompute: bool = False
    ) -> tuple[Tensor, Tensor]:
        drafter.zero_grad()
        each = twice(run_layer) if recompute else run_layer
        hidden = drafter(embeddings.to(dtype), blocks, drafter.fuse(taps.to(dtype)), rows=rows, each=each)
        assert hidden.dtype == dtype
        terms = Terms(0.15, 2.0, 0.1) if soft else Terms()
        visit = Objective(head.to(head_dtype), terms=terms)(hidden, labels, weights, teacher=teacher)
        visit.loss.backward()
        assert {p.grad.dtype for p in drafter.parameters() if p.grad is not None} == {F32}
        return visit.loss.detach(), torch.cat([p.grad.flatten() for p in drafter.parameters()])  # type: ignore[union-attr]

    return computed


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize(
    ("dtype", "head_dtype", "loss_off", "gradient_off"),
    [
        (BF16, BF16, 1e-4, 0.015),  # as --drafter-dtype bfloat16 trains; 4e-5 and 0.007 were seen
        (F32, BF16, 1e-4, 0.005),  # the output head alone; 4e-5 and 0.0025 were seen
    ],
)
def test_the_gradient_in_bfloat16_is_close_to_that_in_float32(
    gradient: Callable[..., tuple[Tensor, Tensor]],
    soft: bool,
    dtype: torch.dtype,
    head_dtype: torch.dtype,
    loss_off: float,
    gradient_off: float,
) -> None:
    loss, exact = gradient(soft=soft)
    loss_found, found = gradient(dtype, head_dtype, soft)
    assert loss_found.dtype == F32
    assert abs(float(loss_found / loss) - 1) < loss_off
    assert 1e-4 < relative(found, exact) < gradient_off  # not the same: the products were in bfloat16


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_what_is_computed_twice_gives_the_same_gradient_to_the_bit(
    gradient: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype
) -> None:
    once, again = gradient(dtype), gradient(dtype, recompute=True)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_norms_and_rotations_are_rounded_once(
    name: str, closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the type of what comes in; weights are float32, and so are their gradients."""
    call, shapes = CALLS[name]
    monkeypatch.setattr(test_elementwise, "BY", tuple(table.float() for table in test_elementwise.BY))
    weights = len(shapes) - 1 if "norm" in name else len(shapes)
    inputs = [
        drawn(*shape).detach().to(F32 if i >= weights else BF16).requires_grad_()
        for i, shape in enumerate(shapes)
    ]
    exact = [value.detach().double().requires_grad_() for value in inputs]
    results = []
    for given, chosen in ((inputs, closed), (exact, False)):
        monkeypatch.setattr(elementwise, "_closed_form", lambda x, chosen=chosen: chosen)
        out = call(*given)
        outs = out if isinstance(out, tuple) else (out,)
        total = sum((o.double() * torch.linspace(-1, 1, o.numel()).view(o.shape)).sum() for o in outs)
        found = torch.autograd.grad(total, given, allow_unused=True, materialize_grads=True)
        assert [g.dtype for g in found] == [value.dtype for value in given]
        assert all(o.dtype == given[0].dtype for o in outs)
        results.append([*outs, *found])
    for i, (ours, wide) in enumerate(zip(*results, strict=True)):
        if name.startswith("norm") and i < len(outs):  # the others have two roundings: of a sum, of the gate
            assert bool(((ours - wide).abs() <= 2**-7.99 * wide.abs()).all())
        if wide.any():
            assert relative(ours, wide) < 2**-7


def test_the_angles_are_float32() -> None:
    """At position 30,000 an angle in bfloat16 would point anywhere."""
    drafter = Drafter(CONFIG)
    by = drafter._rotation(torch.tensor([30_000]), torch.zeros(1, dtype=BF16))
    assert {table.dtype for table in by} == {F32}
    assert torch.equal(by[0], drafter._rotation(torch.tensor([30_000]), torch.zeros(1))[0])


def test_attention_has_its_softmax_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 2, 2, 16), *[(2, 4, 2, 16)] * 2, *[(1, 24, 2, 16)] * 2]
    inputs = [6 * torch.randn(shape, generator=generator).to(BF16) for shape in shapes]  # scores up to 100
    blocks = Blocks.build([0, 0], [9, 20], 4)
    found = two_part_attention(*inputs, blocks=blocks)
    assert found.dtype == BF16
    assert relative(found, dense_attention(*(t.double() for t in inputs), blocks=blocks)) < 2**-8
