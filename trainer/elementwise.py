"""What a layer does between its matrix products, with gradients in closed form.

Autograd keeps, and walks back through, every intermediate of `x · rsqrt(mean x² + ε) · w` and its like; on
a CPU nothing fuses them. Each function here is one node: it keeps what its gradient needs and computes that
in a few passes. On other devices, where a compiler or a kernel fuses the plain formula, the plain formula it
is. Everything works in float64, too, for the tests of gradients.

In bfloat16 what is handed on and kept has that type; norms, rotations and their gradients are computed in
float32, in which their weights and the rotary angles are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

# Rotary angles [..., 1, d], the same for all heads of a position. Halves of a head are paired (as in Llama
# and Qwen), not neighbours: (left, right) becomes (left · cos - right · sin, right · cos + left · sin), which
# is x · (cos, cos) + swapped x · (-sin, sin). These are the two factors.
Rotation = tuple[Tensor, Tensor]


def add_norm(x: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + update, and its root-mean-square norm times `weight`; both [..., H]."""
    if _closed_form(x):
        return _AddNorm.apply(x, update, weight, eps)
    total = x if update is None else x + update
    return total, F.rms_norm(_wide(total), (total.shape[-1],), weight, eps).to(x.dtype)


def norm_rotate(
    x: Tensor, weight: Tensor, by: Rotation, eps: float, order: Sequence[int] | None = None
) -> Tensor:
    """Every head of x [..., d] normed, times `weight` [..., d], and rotated.

    `order`, a permutation of the dimensions, is how the result lies in memory; its shape is x's.
    """
    if _closed_form(x):
        return _NormRotate.apply(x, weight, *by, eps, order or range(x.dim()))
    normed = F.rms_norm(_wide(x), (x.shape[-1],), None, eps) * weight
    return (normed * by[0] + _swapped(normed) * by[1]).to(x.dtype)


def gated(x: Tensor) -> Tensor:
    """silu of the left half of x [..., 2·I] times the right half: [..., I]."""
    if _closed_form(x):
        return _Gated.apply(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _closed_form(x: Tensor) -> bool:
    return x.device.type == "cpu" and torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _wide(x: Tensor) -> Tensor:
    """x in float32, unless it has a wider type."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _inverse_size(x: Tensor, eps: float) -> Tensor:
    """1 / root mean square of the last dimension, which stays as 1; in float32 at least."""
    precise = torch.promote_types(x.dtype, torch.float32)
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=precise)
    return size.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()


def _swapped(x: Tensor) -> Tensor:
    return x.roll(x.shape[-1] // 2, dims=-1)


def _norm_backward(
    d: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, wanted: bool = True
) -> tuple[Tensor | None, Tensor]:
    """From the gradient `d` of x·inverse·weight: the gradient of x, if wanted, and the weight's."""
    normed = x * inverse
    summands = d * normed
    d_weight = summands.sum_to_size(weight.shape)
    if not wanted:
        return None, d_weight
    one_weight = weight.dim() == 1
    along = summands @ weight if one_weight else torch.linalg.vecdot(summands, weight.expand_as(summands))
    d_x = torch.mul(d, weight, out=summands)
    return d_x.addcmul_(normed, along.unsqueeze(-1), value=-1 / x.shape[-1]).mul_(inverse), d_weight


class _AddNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> Any:
        total = x if update is None else x + update
        inverse = _inverse_size(total, eps)
        ctx.save_for_backward(total, inverse, weight)
        ctx.set_materialize_grads(False)
        normed = (total * inverse).mul_(weight).to(total.dtype)
        return (total.view_as(total) if update is None else total), normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        total, inverse, weight = ctx.saved_tensors
        d_total, d_normed = gradients
        d_weight = None
        if d_normed is not None:
            wanted = any(ctx.needs_input_grad[:2])
            d_x, d_weight = _norm_backward(d_normed, total, inverse, weight, wanted)
            d_total = d_x if d_total is None or d_x is None else d_x.add_(d_total)
            d_total = None if d_total is None else d_total.to(total.dtype)
        return d_total, (d_total if ctx.needs_input_grad[1] else None), d_weight, None


class _NormRotate(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, order: Sequence[int]
    ) -> Tensor:
        inverse = _inverse_size(x, eps)
        ctx.save_for_backward(x, inverse, weight, cos, sin)
        back = sorted(range(x.dim()), key=lambda i: order[i])
        normed = (x * inverse).mul_(weight)
        out = normed.new_empty([x.shape[i] for i in order]).permute(back)
        return torch.mul(normed, cos, out=out).addcmul_(_swapped(normed), sin).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, inverse, weight, cos, sin = ctx.saved_tensors
        (d,) = gradients
        d = (d * cos).addcmul_(_swapped(d), sin, value=-1)  # turned back
        d_x, d_weight = _norm_backward(d, x, inverse, weight)
        return d_x if d_x is None else d_x.to(x.dtype), d_weight, None, None, None, None


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        open_ = F.silu(gate)
        ctx.save_for_backward(x, open_)
        return open_ * up

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (d,) = gradients
        x, open_ = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        d_x = torch.empty_like(x)
        d_gate, d_up = d_x.chunk(2, dim=-1)
        torch.mul(d, open_, out=d_up)
        torch.ops.aten.silu_backward(d * up, gate, grad_input=d_gate)
        return d_x
