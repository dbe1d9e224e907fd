"""Attention under the DFlash mask as PyTorch's flex_attention: the execution for GPUs.

One kernel over [every row's context | blocks], which skips the tiles of it that no slot sees. Which tiles
these are follows from the interval of keys that each slot sees, so the mask is never evaluated as a whole:
for 1,024 blocks of 32 slots over 8,192 positions it would have 1.3 billion entries. The rule itself
(`Blocks.visible`) is asked only about tiles that are seen in part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from trainer.attention import Attend, two_part_attention
from trainer.blocks import Blocks

TILE = 128  # query slots and keys that the kernel takes together


def choose(
    device: torch.device,
    groups: int,
    shared: int,
    width: int,
    report: Callable[[str], None],
    dtype: torch.dtype = torch.float32,
) -> Attend:
    """The execution for `device`: flex_attention on a GPU where it works, else two-part attention.

    Whether it works is tried with heads of this kind and type, forwards and backwards: a GPU may lack the
    shared memory, an installation the compiler.
    """
    if device.type != "cuda":
        return two_part_attention
    flex = FlexAttention(torch.compile(flex_attention, dynamic=False))
    try:
        blocks = Blocks.build([0, 0], [1, TILE], 16).to(device)
        shapes = [
            (2, 16, groups, shared, width),
            *[(2, 16, groups, width)] * 2,
            *[(1, TILE, groups, width)] * 2,
        ]
        q, k, v, ck, cv = (
            torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes
        )
        flex(q, k, v, ck, cv, blocks).sum().backward()
    except Exception as error:  # whatever the compiler, the driver or the kernel found wrong
        why = " ".join(str(error).split())[:200]
        report(
            f"flex_attention does not work here ({type(error).__name__}: {why}): attention runs in two parts"
        )
        return two_part_attention
    return flex


class FlexAttention:
    """Takes the place of `two_part_attention`. `kernel` is flex_attention, compiled or not."""

    def __init__(self, kernel: Callable[..., Any] = flex_attention) -> None:
        self._kernel = kernel
        self._mask: tuple[Blocks, tuple[int, int], BlockMask] | None = (
            None  # of the last blocks: layers share it
        )

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context_key: Tensor,
        context_value: Tensor,
        blocks: Blocks,
    ) -> Tensor:
        slots, size, groups, shared, width = query.shape
        rows, length = context_key.shape[:2]
        if self._mask is None or self._mask[0] is not blocks or self._mask[1] != (rows, length):
            self._mask = (blocks, (rows, length), block_mask(blocks, rows, length))
        queries = query.permute(2, 3, 0, 1, 4).reshape(1, groups * shared, slots * size, width)
        mixed = self._kernel(
            queries,
            _joined(context_key, key),
            _joined(context_value, value),
            block_mask=self._mask[2],
            enable_gqa=shared > 1,
        )
        return mixed.view(groups, shared, slots, size, width).permute(2, 3, 0, 1, 4)


def _joined(context: Tensor, own: Tensor) -> Tensor:
    """Of the context [rows, C, G, d] and the blocks [N, B, G, d]: [1, G, rows·C + N·B, d]."""
    return torch.cat([context.flatten(0, 1), own.flatten(0, 1)]).transpose(0, 1)[None]


def block_mask(blocks: Blocks, rows: int, length: int) -> BlockMask:
    """Which tiles of [N·B, rows · length + N·B] are seen in part or as a whole; the same for all heads."""
    lowest, highest = blocks.context_intervals(length)
    slot = torch.arange(len(lowest), device=lowest.device)
    own = rows * length + slot // blocks.block_size * blocks.block_size
    keys = rows * length + len(slot)
    begin = torch.arange(0, keys, TILE, device=lowest.device)
    some = whole = torch.zeros(len(slot), len(begin), dtype=torch.bool, device=lowest.device)
    for first, last in (
        (lowest[:, None], highest[:, None]),
        (own[:, None], own[:, None] + blocks.block_size),
    ):
        some = some | ((first < begin + TILE) & (begin < last) & (first < last))
        whole = whole | ((first <= begin) & (begin + TILE <= last))
    padding = (0, 0, 0, -len(slot) % TILE)  # rows of the last tile that do not exist see nothing
    some = F.pad(some, padding).view(-1, TILE, len(begin)).any(1)
    whole = F.pad(whole, padding).view(-1, TILE, len(begin)).all(1)
    return BlockMask.from_kv_blocks(
        *_listed(some & ~whole),
        *_listed(whole),
        BLOCK_SIZE=TILE,
        mask_mod=_as_mask_mod(blocks.visible(rows, length)),
        seq_lengths=(len(slot), keys),
    )


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """[query tiles, key tiles] bool -> how many of each row, and which, those first; for all heads."""
    order = torch.argsort(tiles.to(torch.int8), dim=1, descending=True, stable=True)
    return tiles.sum(1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


def _as_mask_mod(rule: Callable[[Tensor, Tensor], Tensor]) -> Any:
    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return rule(query, key)

    return mask_mod
