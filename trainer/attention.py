"""Attention under the DFlash block mask (trainer/blocks.py has the rule), executed in two ways.

`dense_attention` builds the whole mask (short, slow, the reference in tests). `two_part_attention` computes
only the scores that can be seen: N·B·(S + B) instead of N·B·(S + N·B) for N blocks of B slots and a context
of S.
"""

from __future__ import annotations

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


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, context_key: Tensor, context_value: Tensor, blocks: Blocks
) -> Tensor:
    """`two_part_attention` by the book: all scores, the whole mask, one softmax."""
    slots, size, heads, width = query.shape
    rows, length, groups, _ = context_key.shape
    keys = torch.cat([context_key.reshape(-1, groups, width), key.reshape(-1, groups, width)])
    values = torch.cat([context_value.reshape(-1, groups, width), value.reshape(-1, groups, width)])
    keys = keys.repeat_interleave(heads // groups, dim=1)
    values = values.repeat_interleave(heads // groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.reshape(-1, heads, width), keys) * width**-0.5
    scores = scores.masked_fill(~allowed(blocks, rows, length), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).reshape(slots, size, heads, width)


def two_part_attention(
    query: Tensor, key: Tensor, value: Tensor, context_key: Tensor, context_value: Tensor, blocks: Blocks
) -> Tensor:
    """Attention of every block to its document's context and to itself, in one softmax over both.

    query [N, B, heads, d]; key and value of the blocks [N, B, kv heads, d]; of the context [rows, C, kv
    heads, d] with C ≥ `blocks.context_length`. Returns [N, B, heads, d]. Scores are scaled by 1/√d. Query
    heads that share a key head (grouped-query attention) become more rows of the same product.
    """
    slots, size, heads, width = query.shape
    groups = key.shape[2]
    shared = heads // groups
    rows = (query * width**-0.5).view(slots, size, groups, shared, width).permute(2, 0, 3, 1, 4)
    mixed = _TwoPartAttention.apply(
        rows.reshape(groups, slots, shared * size, width),
        key.permute(2, 0, 1, 3).contiguous(),
        value.permute(2, 0, 1, 3).contiguous(),
        context_key.permute(0, 2, 1, 3).contiguous(),
        context_value.permute(0, 2, 1, 3).contiguous(),
        blocks,
    )
    return mixed.view(groups, slots, shared, size, width).permute(1, 3, 0, 2, 4).reshape(query.shape)


def _widths(blocks: Blocks, rows: int) -> list[int]:
    """Number of probabilities of each tile for one key head with `rows` query rows per block."""
    return [(t.last - t.first) * rows * (t.end - t.start + blocks.block_size) for t in blocks.tiles]


class _TwoPartAttention(torch.autograd.Function):
    """Shapes: query [G, N, R, d], key and value [G, N, B, d], context [rows, G, C, d]; G key heads,
    R = B · (query heads per key head).

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
        size = blocks.block_size
        own = torch.matmul(query, key.transpose(-1, -2))  # [G, N, R, B]: scores, then probabilities
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
                    keys = context_key[row, group, start:end]
                    torch.mm(query[group, first:last].reshape(-1, width), keys.T, out=p[:, :length])
                for margin in margins:
                    slots = p.view(last - first, -1, margin.hidden.shape[1], length + size)
                    seen = slots[..., margin.begin - start : margin.end - start]
                    seen.masked_fill_(margin.hidden[:, None], -torch.inf)
                torch.softmax(p, -1, out=p)
                own[group, first:last] = p[:, length:].view(last - first, rows, size)
                values = context_value[row, group, start:end]
                torch.mm(p[:, :length], values, out=out[group, first:last].view(-1, width))
        out += torch.matmul(own, value)
        ctx.save_for_backward(query, key, value, context_key, context_value, own, *probabilities)
        ctx.blocks = blocks
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, context_key, context_value, own, *probabilities = ctx.saved_tensors
        blocks: Blocks = ctx.blocks
        groups, _, rows, width = query.shape
        size = blocks.block_size
        d_out = gradients[0].contiguous()
        d_own = torch.matmul(d_out, value.transpose(-1, -2))  # gradients of probabilities, then of scores
        d_value = torch.matmul(own.transpose(-1, -2), d_out)
        d_query = torch.empty_like(query)
        d_context_key = torch.zeros_like(context_key)
        d_context_value = torch.zeros_like(context_value)
        workspace = query.new_empty(max(_widths(blocks, rows), default=0))
        for tile, flat in zip(blocks.tiles, probabilities, strict=True):
            row, first, last, start, end, _ = tile
            length = end - start
            for group in range(groups):
                p = flat[group].view((last - first) * rows, length + size)
                d_p = workspace[: p.numel()].view_as(p)
                d_rows = d_out[group, first:last].view(-1, width)
                keys = context_key[row, group, start:end]
                values = context_value[row, group, start:end]
                if length:
                    torch.mm(d_rows, values.T, out=d_p[:, :length])
                    d_context_value[row, group, start:end].addmm_(p[:, :length].T, d_rows)
                d_p[:, length:] = d_own[group, first:last].reshape(-1, size)
                torch._softmax_backward_data(d_p, p, -1, p.dtype, grad_input=d_p)
                d_own[group, first:last] = d_p[:, length:].view(last - first, rows, size)
                torch.mm(d_p[:, :length], keys, out=d_query[group, first:last].view(-1, width))
                if length:
                    queries = query[group, first:last].reshape(-1, width)
                    d_context_key[row, group, start:end].addmm_(d_p[:, :length].T, queries)
        d_query += torch.matmul(d_own, key)
        d_key = torch.matmul(d_own.transpose(-1, -2), query)
        return d_query, d_key, d_value, d_context_key, d_context_value, None
