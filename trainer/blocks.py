"""Which keys a DFlash block sees: the one rule, and the blocks of a micro-batch arranged for it.

A block hangs on an anchor, a position of one document; a document lies alone in its row of the batch, or is
packed behind others. A query slot of the block sees two kinds of keys:

* **context**: target features of its own document at positions strictly before the anchor. Strictly, because
  when the drafter serves, the anchor has been sampled but the target has not processed it yet. The comparison
  is between *positions*: comparing block numbers leaks the answer once blocks overlap. A sliding window W
  leaves the W - 1 positions before the slot itself, as serving engines count it;
* **its own block**: every slot of it, in both directions, whatever the window.

`sees_context` is the first half of that rule, and the only place where it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

TILE_ROWS = 512  # query slots that share one product with the context; more rows see more that is masked


def sees_context(
    position: Tensor, start: Tensor | int, anchor: Tensor | int, slot: Tensor, window: int | None
) -> Tensor:
    """Whether the context at `position` may be seen from `slot` of a block at `anchor`, both in one row, in a
    document that begins at `start`.
    """
    seen = (start <= position) & (position < anchor)
    if window is not None:
        seen = seen & (anchor + slot - position < window)
    return seen


class Tile(NamedTuple):
    """A range of blocks of one document that attend to its context together."""

    row: int  # of the batch
    first: int  # blocks first … last - 1
    last: int
    start: int  # no slot of the tile sees a position outside start … end - 1,
    end: int
    clear: tuple[int, int]  # every slot sees all positions clear[0] … clear[1] - 1


class Margin(NamedTuple):
    """Positions begin … end - 1, which some slots of a tile see and others do not."""

    begin: int
    end: int
    bias: Tensor  # [blocks of the tile, 1, B or 1, end - begin]: -inf where it must not be seen, else 0


@dataclass(frozen=True)
class Blocks:
    """Where the N blocks of a micro-batch hang: sorted by row, then anchor; padding last.

    `kept` of them are real. A padding block stands at position 0, so it sees no context, only itself: no
    softmax is ever empty.
    """

    rows: Tensor  # [N] int64: row of the batch
    anchors: Tensor  # [N] int64: position in that row
    starts: Tensor  # [N] int64: where, in that row, the anchor's document begins; 0 unless packed
    kept: int
    block_size: int
    context_length: int  # no kept block sees a position at or after this one
    tiles: tuple[Tile, ...]
    window: int | None = None

    @classmethod
    def build(
        cls,
        rows: Sequence[int],
        anchors: Sequence[int],
        block_size: int,
        *,
        starts: Sequence[int] | None = None,
        slots: int = 0,
        bucket: int = 1,
        window: int | None = None,
    ) -> Blocks:
        """Arrange blocks given in order of (row, anchor), padded to at least `slots` of them.

        `starts` is needed where several documents lie in one row. `context_length` is the largest anchor,
        rounded up to a multiple of `bucket`. Raises ValueError if the blocks are out of order or a document
        begins behind its anchor.
        """
        pairs = list(zip(rows, anchors, strict=True))
        if pairs != sorted(pairs):
            raise ValueError("blocks must be sorted by row, then anchor")
        begins = list(starts) if starts is not None else [0] * len(pairs)
        documents = list(zip(rows, begins, strict=True))
        if documents != sorted(documents) or any(s > a for s, a in zip(begins, anchors, strict=True)):
            raise ValueError(
                "the start of a block's document must lie at or before its anchor, and not go back"
            )
        kept = len(pairs)
        padding = [0] * max(slots - kept, 0)
        tiles = []
        first = 0
        while first < kept:
            last = first
            while last < kept and documents[last] == documents[first] and last - first < _blocks(block_size):
                last += 1
            tiles.append(_tile(first, last, *documents[first], anchors[first:last], block_size, window))
            first = last
        if padding:
            tiles.append(Tile(0, kept, kept + len(padding), 0, 0, (0, 0)))
        longest = max(anchors, default=0)
        return cls(
            rows=torch.tensor([*rows, *padding], dtype=torch.int64),
            anchors=torch.tensor([*anchors, *padding], dtype=torch.int64),
            starts=torch.tensor([*begins, *padding], dtype=torch.int64),
            kept=kept,
            block_size=block_size,
            context_length=-(-longest // bucket) * bucket,
            tiles=tuple(tiles),
            window=window,
        )

    def __len__(self) -> int:
        return len(self.anchors)

    @property
    def positions(self) -> Tensor:
        """[N, B]: slot o of a block stands at position anchor + o."""
        return self.anchors[:, None] + torch.arange(self.block_size, device=self.anchors.device)

    def to(self, device: torch.device | str) -> Blocks:
        moved = {name: getattr(self, name).to(device) for name in ("rows", "anchors", "starts")}
        return replace(self, **moved)

    def visible(self, rows: int, context_length: int) -> Callable[[Tensor, Tensor], Tensor]:
        """The whole rule by index: whether query slot q, of N·B, sees key k, of [every row's context |
        blocks], that is rows · context_length + N·B of them.
        """
        context_keys = rows * context_length

        def rule(query: Tensor, key: Tensor) -> Tensor:
            block, slot = query // self.block_size, query % self.block_size
            row, position = key // max(context_length, 1), key % max(context_length, 1)
            seen = sees_context(position, self.starts[block], self.anchors[block], slot, self.window)
            context = (key < context_keys) & (row == self.rows[block]) & seen
            own = (key >= context_keys) & ((key - context_keys) // self.block_size == block)
            return context | own

        return rule

    def context_intervals(self, context_length: int) -> tuple[Tensor, Tensor]:
        """For each of the N·B slots the first key of the context that it sees, and the one behind the last,
        in the numbering of `visible`.
        """
        positions = self.positions
        lowest, highest = (t[:, None].expand_as(positions) for t in (self.starts, self.anchors))
        if self.window is not None:
            lowest = torch.maximum(lowest, positions + 1 - self.window).minimum(highest)
        row = self.rows[:, None] * context_length
        return (row + lowest).flatten(), (row + highest).flatten()

    @cached_property
    def margins(self) -> list[list[Margin]]:
        """For each tile what must be hidden from its blocks between `start` and `end`."""
        every = [((t.start, t.clear[0]), (t.clear[1], t.end)) for t in self.tiles]
        return [
            [self._margin(tile, *span) for span in spans if span[0] < span[1]]
            for tile, spans in zip(self.tiles, every, strict=True)
        ]

    def _margin(self, tile: Tile, begin: int, end: int) -> Margin:
        device = self.anchors.device
        slots = 1 if self.window is None else self.block_size  # without a window all slots see the same
        slot = torch.arange(slots, device=device)[:, None]
        position = torch.arange(begin, end, device=device)
        anchor = self.anchors[tile.first : tile.last, None, None]
        hidden = ~sees_context(position, tile.start, anchor, slot, self.window)
        # To add a number is several times faster on a CPU than to fill where a mask is set.
        bias = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)
        return Margin(begin, end, bias[:, None])


def _blocks(block_size: int) -> int:
    return max(1, TILE_ROWS // block_size)


def _tile(
    first: int, last: int, row: int, start: int, anchors: Sequence[int], block_size: int, window: int | None
) -> Tile:
    """The tile of blocks first … last - 1, which hang on `anchors` of a document that begins at `start`."""
    end, clear = anchors[-1], (start, anchors[0])
    if window is not None:
        clear = (max(start, anchors[-1] + block_size - window), anchors[0])
        start = max(start, anchors[0] + 1 - window)
    start = min(start, end)
    if clear[0] >= clear[1]:
        clear = (end, end)
    return Tile(row, first, last, start, end, clear)
