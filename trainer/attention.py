"""Attention under the DFlash block mask (trainer/blocks.py has the rule), executed by hand.

`dense_attention` builds the whole mask (short, slow, the reference in tests). `two_part_attention` computes
only the scores that can be seen: N·B·(S + B) instead of N·B·(S + N·B) for N blocks of B slots and a context
of S. (trainer/flex.py is the third execution, for GPUs.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.blocks import Blocks


def allowed(blocks: Blocks, rows: int, context_length: int) -> Tensor:
    """The whole mask, [N·B, rows · context_length + N·B] bool; keys are [every row's context | blocks]."""
    slots = len(blocks) * blocks.block_size
    device = blocks.anchors.device
    query = torch.arange(slots, device=device)[:, None]
    key = torch.arange(rows * context_length + slots, device=device)[None]
    return blocks.visible(rows, context_length)(query, key)


Attend = Callable[..., Tensor]  # called as two_part_attention

# How two_part_attention likes its arguments to lie in memory, outermost dimension first. In another order it
# copies them.
QUERIES = (2, 0, 3, 1, 4)  # of [N, B, G, R, d]
KEYS = (2, 0, 1, 3)  # of [N, B, G, d]; values, too
CONTEXT_KEYS = (2, 0, 3, 1, 4)  # of [rows, C, layers, G, d]; values may lie as they come


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, context_key: Tensor, context_value: Tensor, blocks: Blocks
) -> Tensor:
    """`two_part_attention` by the book: all scores, the whole mask, one softmax."""
    slots, size, groups, shared, width = query.shape
    rows, length, _, _ = context_key.shape
    keys = torch.cat([context_key.reshape(-1, groups, width), key.reshape(-1, groups, width)])
    values = torch.cat([context_value.reshape(-1, groups, width), value.reshape(-1, groups, width)])
    queries = query.reshape(slots * size, groups, shared, width)
    scores = torch.einsum("qgrd,kgd->grqk", queries, keys) * width**-0.5
    scores = scores.masked_fill(~allowed(blocks, rows, length), -torch.inf)
    return torch.einsum("grqk,kgd->qgrd", scores.softmax(-1), values).reshape(query.shape)


def two_part_attention(
    query: Tensor, key: Tensor, value: Tensor, context_key: Tensor, context_value: Tensor, blocks: Blocks
) -> Tensor:
    """Attention of every block to its document's context and to itself, in one softmax over both.

    query [N, B, G, R, d] for G key heads, each shared by R query heads; key and value of the blocks
    [N, B, G, d]; of the context [rows, C, G, d] with C ≥ `blocks.context_length`. Returns [N, B, G, R, d].
    Scores are scaled by 1/√d. In bfloat16 they, and what is kept, are float32: a score's rounding would be in
    the exponent of its probability.
    """
    if query.dtype == torch.bfloat16:
        own, context = (
            (query.float(), key.float(), value.float()),
            (context_key.float(), context_value.float()),
        )
        return two_part_attention(*own, *context, blocks).to(query.dtype)
    slots, size, groups, shared, width = query.shape
    mixed = _TwoPartAttention.apply(
        query.permute(QUERIES).reshape(groups, slots, shared * size, width),
        key.permute(KEYS).contiguous(),
        value.permute(KEYS).contiguous(),
        context_key.transpose(1, 2),
        context_value.transpose(1, 2),
        blocks,
    )
    return mixed.view(groups, slots, shared, size, width).permute(1, 3, 0, 2, 4)


def _widths(blocks: Blocks, rows: int) -> list[int]:
    """Number of probabilities of each tile for one key head with `rows` query rows per block."""
    return [(t.last - t.first) * rows * (t.end - t.start + blocks.block_size) for t in blocks.tiles]


class _TwoPartAttention(torch.autograd.Function):
    """Shapes: query [G, N, R·B, d], key and value [G, N, B, d], context [rows, G, C, d]. Query heads that
    share a key head are more rows of the same product.

    For each tile and key head the scores of the context and of the own block lie side by side in one matrix,
    so that one softmax covers both. The probabilities are kept for the backward pass. (Joining two separate
    attentions by their log-sum-exp looks simpler, but PyTorch's private CPU kernel drops the gradient of the
    log-sum-exp.)
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context_key: Tensor,
        context_value: Tensor,
        blocks: Blocks,
    ) -> Tensor:
        groups, _, rows, width = query.shape
        size, scale = blocks.block_size, width**-0.5
        own = query.new_empty(*query.shape[:3], size)  # scores, then probabilities
        _each_block(query, key.mT, own, scale)
        out = torch.empty_like(query)
        sizes = _widths(blocks, rows)
        probabilities = query.new_empty(groups, sum(sizes)).split(sizes, dim=1)
        for tile, margins, flat in zip(blocks.tiles, blocks.margins, probabilities, strict=True):
            row, first, last, start, end, _ = tile
            length = end - start
            for group in range(groups):
                p = flat[group].view((last - first) * rows, length + size)
                p[:, length:] = own[group, first:last].reshape(-1, size)
                if length:
                    queries = query[group, first:last].view(-1, width)
                    _scaled_product(queries, context_key[row, group, start:end].T, scale, p[:, :length])
                for margin in margins:
                    slots = p.view(last - first, -1, margin.bias.shape[2], length + size)
                    slots[..., margin.begin - start : margin.end - start] += margin.bias
                torch.softmax(p, -1, out=p)
                own[group, first:last] = p[:, length:].view(last - first, rows, size)
                values = context_value[row, group, start:end]
                torch.mm(p[:, :length], values, out=out[group, first:last].view(-1, width))
        _each_block(own, value, out, add=True)
        ctx.save_for_backward(query, key, value, context_key, context_value, own, *probabilities)
        ctx.blocks = blocks
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, context_key, context_value, own, *probabilities = ctx.saved_tensors
        blocks: Blocks = ctx.blocks
        groups, _, rows, width = query.shape
        size, scale = blocks.block_size, width**-0.5
        d_out = gradients[0].contiguous()
        d_own, d_key, d_value = torch.empty_like(own), torch.empty_like(key), torch.empty_like(value)
        _each_block(d_out, value.mT, d_own)  # the gradient of probabilities, then of scores
        _each_block(own.mT, d_out, d_value)
        d_query = torch.empty_like(query)
        d_context_key = torch.zeros(context_key.shape, dtype=key.dtype, device=key.device)
        d_context_value = torch.zeros_like(d_context_key)
        workspace = query.new_empty(max(_widths(blocks, rows), default=0))
        for tile, flat in zip(blocks.tiles, probabilities, strict=True):
            row, first, last, start, end, _ = tile
            length = end - start
            for group in range(groups):
                p = flat[group].view((last - first) * rows, length + size)
                d_p = workspace[: p.numel()].view_as(p)
                d_rows = d_out[group, first:last].view(-1, width)
                if length:
                    torch.mm(d_rows, context_value[row, group, start:end].T, out=d_p[:, :length])
                    d_context_value[row, group, start:end].addmm_(p[:, :length].T, d_rows)
                d_p[:, length:] = d_own[group, first:last].reshape(-1, size)
                torch._softmax_backward_data(d_p, p, -1, p.dtype, grad_input=d_p)
                d_own[group, first:last] = d_p[:, length:].view(last - first, rows, size)
                keys = context_key[row, group, start:end]
                _scaled_product(d_p[:, :length], keys, scale, d_query[group, first:last].view(-1, width))
                if length:
                    queries = query[group, first:last].view(-1, width)
                    d_context_key[row, group, start:end].addmm_(d_p[:, :length].T, queries, alpha=scale)
        _each_block(d_own, key, d_query, scale, add=True)
        _each_block(d_own.mT, query, d_key, scale)
        return d_query, d_key, d_value, d_context_key, d_context_value, None


def _scaled_product(left: Tensor, right: Tensor, scale: float, out: Tensor) -> None:
    torch.addmm(out, left, right, beta=0, alpha=scale, out=out)  # with beta 0 what `out` held is not read


def _each_block(left: Tensor, right: Tensor, out: Tensor, scale: float = 1.0, *, add: bool = False) -> None:
    """`out` [G, N, …] = scale · left @ right for every key head and block, added to what it held if asked."""
    out.flatten(0, 1).baddbmm_(left.flatten(0, 1), right.flatten(0, 1), beta=float(add), alpha=scale)
