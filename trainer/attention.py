"""The DFlash block mask, and attention under it.

A query belongs to a block; the block hangs on an anchor, a position of one document. It sees two kinds of
keys:

* **context**: target features of the same document at positions strictly before the anchor. Strictly, because
  when the drafter serves, the anchor has been sampled but the target has not processed it yet. The comparison
  is between *positions*: comparing block numbers leaks the answer once blocks overlap.
* **its own block**: every slot of it, in both directions.

`allowed` is that rule, and the only place where it is written. It is executed twice: `dense_attention` builds
the whole mask (short, slow, the reference in tests), `two_part_attention` computes only the scores that can
be seen: N·B·(S + B) instead of N·B·(S + N·B) for N blocks of B slots and a context of S.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

TILE_ROWS = 512  # query slots that share one product with the context; more rows see more that is masked


class Tile(NamedTuple):
    """A range of blocks of one document that attend to its context together."""

    document: int  # row of the batch
    first: int  # blocks first … last - 1
    last: int
    visible: int  # every block of the tile sees the context 0 … visible - 1,
    longest: int  # and none sees beyond longest - 1


@dataclass(frozen=True)
class Blocks:
    """Where the N blocks of a micro-batch hang: sorted by document, then anchor; padding last.

    `kept` of them are real. A padding block sees no context, only itself, so that no softmax is ever empty.
    """

    documents: Tensor  # [N] int64: row of the batch
    anchors: Tensor  # [N] int64: position in that document
    kept: int
    block_size: int
    context_length: int  # no kept block sees a position at or after this one
    tiles: tuple[Tile, ...]

    @classmethod
    def build(
        cls, documents: list[int], anchors: list[int], block_size: int, *, slots: int = 0, bucket: int = 1
    ) -> Blocks:
        """Arrange blocks given in order of (document, anchor), padded to at least `slots` of them.

        `context_length` is the largest anchor, rounded up to a multiple of `bucket`.
        Raises ValueError if they are out of order.
        """
        pairs = list(zip(documents, anchors, strict=True))
        if pairs != sorted(pairs):
            raise ValueError("blocks must be sorted by document, then anchor")
        kept = len(pairs)
        padding = max(slots - kept, 0)
        per_tile = max(1, TILE_ROWS // block_size)
        tiles = []
        first = 0
        while first < kept:
            last = first
            while last < kept and documents[last] == documents[first] and last - first < per_tile:
                last += 1
            tiles.append(Tile(documents[first], first, last, anchors[first], anchors[last - 1]))
            first = last
        if padding:
            tiles.append(Tile(0, kept, kept + padding, 0, 0))
        longest = max(anchors, default=0)
        return cls(
            documents=torch.tensor(list(documents) + [0] * padding, dtype=torch.int64),
            anchors=torch.tensor(list(anchors) + [0] * padding, dtype=torch.int64),
            kept=kept,
            block_size=block_size,
            context_length=-(-longest // bucket) * bucket,
            tiles=tuple(tiles),
        )

    def __len__(self) -> int:
        return len(self.anchors)

    @property
    def positions(self) -> Tensor:
        """[N, B]: slot o of a block stands at position anchor + o."""
        return self.anchors[:, None] + torch.arange(self.block_size, device=self.anchors.device)

    def to(self, device: torch.device | str) -> Blocks:
        return replace(self, documents=self.documents.to(device), anchors=self.anchors.to(device))


def before_anchor(position: Tensor, anchor: Tensor) -> Tensor:
    """Whether a context position may be seen from a block: this comparison keeps the answer hidden."""
    return position < anchor


def allowed(blocks: Blocks, documents: int, context_length: int) -> Tensor:
    """The whole mask, [N·B, documents · context_length + N·B] bool; keys are [every document's context |
    blocks].
    """
    device = blocks.anchors.device
    query_block = torch.arange(len(blocks), device=device).repeat_interleave(blocks.block_size)[:, None]
    kept = query_block < blocks.kept
    position = torch.arange(context_length, device=device).repeat(documents)[None]
    document = torch.arange(documents, device=device).repeat_interleave(context_length)[None]
    same_document = document == blocks.documents[query_block]
    context = kept & same_document & before_anchor(position, blocks.anchors[query_block])
    own = query_block == query_block.T
    return torch.cat([context, own], dim=1)


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, context_key: Tensor, context_value: Tensor, blocks: Blocks
) -> Tensor:
    """`two_part_attention` by the book: all scores, the whole mask, one softmax."""
    slots, size, heads, width = query.shape
    documents, length, groups, _ = context_key.shape
    keys = torch.cat([context_key.reshape(-1, groups, width), key.reshape(-1, groups, width)])
    values = torch.cat([context_value.reshape(-1, groups, width), value.reshape(-1, groups, width)])
    keys = keys.repeat_interleave(heads // groups, dim=1)
    values = values.repeat_interleave(heads // groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.reshape(-1, heads, width), keys) * width**-0.5
    scores = scores.masked_fill(~allowed(blocks, documents, length), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).reshape(slots, size, heads, width)


def two_part_attention(
    query: Tensor, key: Tensor, value: Tensor, context_key: Tensor, context_value: Tensor, blocks: Blocks
) -> Tensor:
    """Attention of every block to its document's context and to itself, in one softmax over both.

    query [N, B, heads, d]; key and value of the blocks [N, B, kv heads, d]; of the context [documents, C, kv
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
    return [(t.last - t.first) * rows * (t.longest + blocks.block_size) for t in blocks.tiles]


class _TwoPartAttention(torch.autograd.Function):
    """Shapes: query [G, N, R, d], key and value [G, N, B, d], context [documents, G, C, d]; G key heads,
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
        for tile, flat in zip(blocks.tiles, probabilities, strict=True):
            document, first, last, visible, length = tile
            hidden = None
            if visible < length:
                position = torch.arange(visible, length, device=query.device)
                hidden = ~before_anchor(position, blocks.anchors[first:last, None])[:, None]
            for group in range(groups):
                p = flat[group].view((last - first) * rows, length + size)
                p[:, length:] = own[group, first:last].reshape(-1, size)
                if length:
                    keys = context_key[document, group, :length]
                    torch.mm(query[group, first:last].reshape(-1, width), keys.T, out=p[:, :length])
                if hidden is not None:
                    p.view(last - first, rows, -1)[:, :, visible:length].masked_fill_(hidden, -torch.inf)
                torch.softmax(p, -1, out=p)
                own[group, first:last] = p[:, length:].view(last - first, rows, size)
                values = context_value[document, group, :length]
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
            document, first, last, _, length = tile
            for group in range(groups):
                p = flat[group].view((last - first) * rows, length + size)
                d_p = workspace[: p.numel()].view_as(p)
                d_rows = d_out[group, first:last].view(-1, width)
                keys = context_key[document, group, :length]
                values = context_value[document, group, :length]
                if length:
                    torch.mm(d_rows, values.T, out=d_p[:, :length])
                    d_context_value[document, group, :length].addmm_(p[:, :length].T, d_rows)
                d_p[:, length:] = d_own[group, first:last].reshape(-1, size)
                torch._softmax_backward_data(d_p, p, -1, p.dtype, grad_input=d_p)
                d_own[group, first:last] = d_p[:, length:].view(last - first, rows, size)
                torch.mm(d_p[:, :length], keys, out=d_query[group, first:last].view(-1, width))
                if length:
                    queries = query[group, first:last].reshape(-1, width)
                    d_context_key[document, group, :length].addmm_(d_p[:, :length].T, queries)
        d_query += torch.matmul(d_own, key)
        d_key = torch.matmul(d_own.transpose(-1, -2), query)
        return d_query, d_key, d_value, d_context_key, d_context_value, None
