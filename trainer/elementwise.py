"""What a layer does between its matrix products, with gradients in closed form.

Autograd keeps, and walks back through, every intermediate of `x · rsqrt(mean x² + ε) · w` and its like; on
a CPU nothing fuses them. Each function here is one node: it keeps what its gradient needs and computes that
in a few passes. On other devices, where a compiler or a kernel fuses the plain formula, the plain formula it
is. Everything works in float64, too, for the tests of gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

Rotation = tuple[Tensor, Tensor]  # cosine and sine, [..., 1, d/2]: one angle for all heads of a position


def add_norm(x: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + update, and its root-mean-square norm times `weight`; both [..., H]."""
    if _closed_form(x):
        return _AddNorm.apply(x, update, weight, eps)
    total = x if update is None else x + update
    return total, F.rms_norm(total, (total.shape[-1],), weight, eps)


def norm_rotate(
    x: Tensor, weight: Tensor, by: Rotation, eps: float, order: Sequence[int] | None = None
) -> Tensor:
    """Every head of x [..., d] normed, times `weight` [..., d], and rotated; halves are paired (as in Llama
    and Qwen), not neighbours.

    `order`, a permutation of the dimensions, is how the result lies in memory; its shape is x's.
    """
    if _closed_form(x):
        return _NormRotate.apply(x, weight, *by, eps, order or range(x.dim()))
    cos, sin = by
    left, right = (F.rms_norm(x, (x.shape[-1],), None, eps) * weight).chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def gated(x: Tensor) -> Tensor:
    """silu of the left half of x [..., 2·I] times the right half: [..., I]."""
    if _closed_form(x):
        return _Gated.apply(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _closed_form(x: Tensor) -> bool:
    return x.device.type == "cpu" and torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _inverse_size(x: Tensor, eps: float) -> Tensor:
    """1 / root mean square of the last dimension, which stays as 1."""
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return size.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()


def _norm_backward(d: Tensor, x: Tensor, inverse: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """From the gradient `d` of x·inverse·weight: the gradient of x, and the summands of the weight's."""
    normed = x * inverse
    summands = d * normed
    scaled = d * weight
    along = torch.linalg.vecdot(scaled, normed).mul_(-1 / x.shape[-1]).unsqueeze(-1)
    return scaled.addcmul_(normed, along).mul_(inverse), summands


class _AddNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> Any:
        total = x if update is None else x + update
        inverse = _inverse_size(total, eps)
        ctx.save_for_backward(total, inverse, weight)
        ctx.set_materialize_grads(False)
        normed = (total * inverse).mul_(weight)
        return (total.view_as(total) if update is None else total), normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        total, inverse, weight = ctx.saved_tensors
        d_total, d_normed = gradients
        d_weight = None
        if d_normed is not None:
            d_x, summands = _norm_backward(d_normed, total, inverse, weight)
            d_weight = summands.flatten(0, -2).sum(0)
            d_total = d_x if d_total is None else d_x.add_(d_total)
        return d_total, (d_total if ctx.needs_input_grad[1] else None), d_weight, None


class _NormRotate(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, order: Sequence[int]
    ) -> Tensor:
        inverse = _inverse_size(x, eps)
        ctx.save_for_backward(x, inverse, weight, cos, sin)
        back = sorted(range(x.dim()), key=lambda i: order[i])
        out = x.new_empty([x.shape[i] for i in order]).permute(back)
        return _rotated((x * inverse).mul_(weight), cos, sin, out, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, inverse, weight, cos, sin = ctx.saved_tensors
        d = _rotated(gradients[0], cos, sin, torch.empty(x.shape, dtype=x.dtype), -1)
        d_x, summands = _norm_backward(d, x, inverse, weight)
        return d_x, summands.sum_to_size(weight.shape), None, None, None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, sign: int) -> Tensor:
    """`out`, holding x turned by the angles, forwards (sign 1) or back (-1)."""
    half = x.shape[-1] // 2
    left, right = x[..., :half], x[..., half:]
    torch.mul(left, cos, out=out[..., :half]).addcmul_(right, sin, value=-sign)
    torch.mul(right, cos, out=out[..., half:]).addcmul_(left, sin, value=sign)
    return out


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
