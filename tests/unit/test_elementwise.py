"""The drafter's elementwise parts: closed forms equal the plain formulas, in value and gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trainer import elementwise
from trainer.elementwise import add_norm, gated, norm_rotate


def drawn(*shape: int) -> Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape))
    ).requires_grad_()


ANGLES = drawn(3, 1, 1, 4).detach()
BY = (torch.cat([ANGLES.cos()] * 2, dim=-1), torch.cat([-ANGLES.sin(), ANGLES.sin()], dim=-1))
CALLS = {
    "norm": (lambda x, w: add_norm(x, None, w, 1e-6), [(5, 8), (8,)]),
    "norm, its input unused after it": (lambda x, w: add_norm(x, None, w, 1e-6)[1], [(5, 8), (8,)]),
    "add and norm": (lambda x, u, w: add_norm(x, u, w, 1e-6), [(3, 5, 8), (3, 5, 8), (8,)]),
    "add and norm, the sum alone used": (lambda x, u, w: add_norm(x, u, w, 1e-6)[0], [(5, 8), (5, 8), (8,)]),
    "norm and rotate": (lambda x, w: norm_rotate(x, w, BY, 1e-6), [(2, 3, 2, 2, 8), (8,)]),
    "norm and rotate, a weight for each head": (
        lambda x, w: norm_rotate(x, w, BY, 1e-6, (2, 0, 3, 1, 4)),
        [(2, 3, 2, 2, 8), (2, 1, 8)],
    ),
    "gated": (lambda x: gated(x), [(3, 5, 8)]),
}


@pytest.mark.parametrize("name", CALLS)
def test_closed_forms_equal_the_plain_formula_in_value_and_gradient(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, shapes = CALLS[name]
    inputs = [drawn(*shape) for shape in shapes]
    results = []
    for closed in (True, False):
        monkeypatch.setattr(elementwise, "_closed_form", lambda x, closed=closed: closed)
        out = call(*inputs)
        outs = out if isinstance(out, tuple) else (out,)
        total = sum((o.cos() * (i + 1)).sum() for i, o in enumerate(outs))
        results.append(
            (*outs, *torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True))
        )
    for closed_form, plain in zip(*results, strict=True):
        torch.testing.assert_close(closed_form, plain, atol=1e-12, rtol=1e-10)


def test_the_result_lies_in_memory_as_asked() -> None:
    x = drawn(2, 3, 2, 2, 8)
    found = norm_rotate(x, drawn(8), BY, 1e-6, (2, 0, 3, 1, 4))
    assert found.shape == x.shape
    assert found.permute(2, 0, 3, 1, 4).is_contiguous()
