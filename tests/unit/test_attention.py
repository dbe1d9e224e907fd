"""The block mask: who sees whom, and that every execution of it agrees."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from trainer import blocks as blocks_module
from trainer.attention import allowed, dense_attention, two_part_attention
from trainer.blocks import Blocks

BLOCK = 3
LENGTH = 16


class Case(NamedTuple):
    hang: list[tuple[int, int, int]]  # row, start of the document, anchor
    slots: int = 0
    window: int | None = None

    @property
    def blocks(self) -> Blocks:
        rows, starts, anchors = zip(*self.hang, strict=True) if self.hang else ((), (), ())
        return Blocks.build(rows, anchors, BLOCK, starts=starts, slots=self.slots, window=self.window)


def unpacked(pairs: list[tuple[int, int]], slots: int = 0, window: int | None = None) -> Blocks:
    return Case([(row, 0, anchor) for row, anchor in pairs], slots, window).blocks


def tensors(
    count: int, rows: int = 2, shared: int = 2, groups: int = 2, width: int = 8
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(count, BLOCK, groups, shared, width)] + [(count, BLOCK, groups, width)] * 2
    shapes += [(rows, LENGTH, groups, width)] * 2
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


# -- the rule ----------------------------------------------------------------------------------------------

# Row 0 holds documents of positions 0…6 and 7…15; row 1 one document.
PACKED = Case([(0, 0, 4), (0, 0, 5), (0, 7, 9), (1, 0, 9)], slots=5)


def sees(case: Case, query: str, key: str) -> list[bool]:
    """What each slot of a block sees of a key told in words: "position 3 of row 0", "slot 0 of block 1"."""
    mask = allowed(case.blocks, rows=2, context_length=LENGTH)
    kind, index, _, _, where = key.split()
    columns = {"position": int(where) * LENGTH, "slot": 2 * LENGTH + int(where) * BLOCK}
    block = int(query.split()[1].rstrip(","))
    return mask[block * BLOCK : (block + 1) * BLOCK, columns[kind] + int(index)].tolist()


@pytest.mark.parametrize(
    ("query", "key", "seen"),
    [
        ("block 0, at 4 of row 0", "position 3 of row 0", True),
        ("block 0, at 4 of row 0", "position 0 of row 0", True),
        ("block 0, at 4 of row 0", "position 4 of row 0", False),  # the anchor's own feature
        ("block 0, at 4 of row 0", "position 5 of row 0", False),
        ("block 0, at 4 of row 0", "position 3 of row 1", False),
        ("block 1, at 5 of row 0", "position 4 of row 0", True),
        ("block 2, at 9 in the second document of row 0", "position 8 of row 0", True),
        ("block 2, at 9 in the second document of row 0", "position 7 of row 0", True),
        ("block 2, at 9 in the second document of row 0", "position 6 of row 0", False),  # the first one's
        ("block 2, at 9 in the second document of row 0", "position 9 of row 0", False),
        ("block 2, at 9 in the second document of row 0", "slot 0 of block 1", False),
        ("block 3, at 9 of row 1", "position 0 of row 1", True),
        ("block 3, at 9 of row 1", "position 8 of row 0", False),
        ("block 0, at 4 of row 0", "slot 0 of block 0", True),
        ("block 0, at 4 of row 0", "slot 2 of block 0", True),  # both directions
        ("block 0, at 4 of row 0", "slot 0 of block 1", False),
        ("block 1, at 5 of row 0", "slot 2 of block 0", False),
        ("block 4, which is padding", "position 0 of row 0", False),
        ("block 4, which is padding", "slot 1 of block 4", True),
        ("block 4, which is padding", "slot 1 of block 3", False),
    ],
)
def test_a_block_sees_its_document_before_its_anchor_and_itself(query: str, key: str, seen: bool) -> None:
    assert sees(PACKED, query, key) == [seen] * BLOCK  # all slots of a block see the same


@pytest.mark.parametrize(
    ("key", "seen"),
    [  # a window of 3 leaves slot o, at 9 + o, the two positions before it that lie before the anchor
        ("position 5 of row 0", [False, False, False]),
        ("position 6 of row 0", [False, False, False]),  # of another document, too
        ("position 7 of row 0", [True, False, False]),
        ("position 8 of row 0", [True, True, False]),
        ("position 9 of row 0", [False, False, False]),
        ("slot 0 of block 2", [True, True, True]),  # never cuts the block itself
        ("slot 2 of block 2", [True, True, True]),
    ],
)
def test_a_sliding_window_is_counted_from_the_slot(key: str, seen: list[bool]) -> None:
    assert sees(PACKED._replace(window=3), "block 2, at 9", key) == seen


# -- the executions ----------------------------------------------------------------------------------------

MANY = [(0, 0, a) for a in range(1, 15)] + [(1, 0, a) for a in range(3, 12)]
CASES = {
    "overlapping anchors of two rows": Case([(0, 0, 2), (0, 0, 3), (0, 0, 9), (1, 0, 1), (1, 0, 14)]),
    "padding at the end": Case([(0, 0, 2), (1, 0, 7)], slots=5),
    "an anchor without any context": Case([(0, 0, 0), (0, 0, 1)]),
    "nothing but padding": Case([], slots=2),
    "many blocks, several tiles": Case(MANY, slots=26),
    "a row without blocks": Case([(1, 0, 5)]),
    "packed rows": Case([(0, 0, 2), (0, 5, 5), (0, 5, 8), (0, 9, 14), (1, 3, 7), (1, 3, 9)], slots=7),
    "a window": Case(MANY, slots=26, window=5),
    "a window shorter than a tile": Case(MANY, window=2),
    "a window of nothing": Case([(0, 0, 4), (0, 0, 9)], window=1),
    "a window over packed rows": Case([(0, 0, 2), (0, 5, 7), (0, 5, 13), (1, 3, 9)], slots=6, window=4),
}


@pytest.mark.parametrize("case", CASES)
def test_two_part_attention_equals_dense_attention_in_value_and_gradient(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks_module, "TILE_ROWS", 4 * BLOCK)
    b = CASES[case].blocks
    inputs = tensors(len(b))
    weight = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    results = []
    for attend in (dense_attention, two_part_attention):
        out = attend(*inputs, b)
        results.append((out, *torch.autograd.grad((out * weight).sum(), inputs, allow_unused=True)))
    for dense, two_part in zip(*results, strict=True):
        torch.testing.assert_close(two_part, dense, atol=1e-12, rtol=1e-10)


def test_the_gradient_of_two_part_attention_is_that_of_finite_differences() -> None:
    b = Case([(0, 0, 2), (0, 3, 5), (1, 0, 4)], slots=4, window=3).blocks
    inputs = tensors(len(b), shared=2, groups=1, width=4)
    assert torch.autograd.gradcheck(lambda *t: two_part_attention(*t, b), inputs, fast_mode=True)


LEAKS = {
    "one document in a row": Case([(0, 0, 4), (0, 0, 6), (0, 0, 11), (1, 0, 7)]),
    "packed rows": Case([(0, 0, 3), (0, 0, 4), (0, 5, 7), (0, 5, 9), (0, 12, 14), (1, 2, 7)]),
    "a window over packed rows": Case([(0, 0, 3), (0, 5, 7), (0, 5, 11), (1, 2, 9)], window=5),
}


@pytest.mark.parametrize("case", LEAKS)
def test_nothing_that_a_block_must_not_see_changes_it_by_one_bit(case: str) -> None:
    b = LEAKS[case].blocks
    query, key, value, context_key, context_value = (t.detach() for t in tensors(len(b)))
    before = two_part_attention(query, key, value, context_key, context_value, b)
    for block, (row, start, anchor) in enumerate(LEAKS[case].hang):
        others = [i for i in range(len(b)) if i != block]
        first = max(start, anchor + 1 - b.window) if b.window else start  # of what its slot 0 sees
        k, v, ck, cv = (t.clone() for t in (key, value, context_key, context_value))
        for context in (ck, cv):
            context[row, anchor:] += 100
            context[row, :first] -= 30
            context[1 - row] -= 50
        for own in (k, v):
            own[others] *= -3
        after = two_part_attention(query, k, v, ck, cv, b)
        assert torch.equal(after[block], before[block])
        for edge in (first, anchor - 1):
            cv_seen = cv.clone()
            cv_seen[row, edge] += 1
            assert not torch.equal(two_part_attention(query, k, v, ck, cv_seen, b)[block], before[block])


# -- how blocks are arranged -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hang",
    [
        [(0, 0, 5), (0, 0, 4)],
        [(1, 0, 1), (0, 0, 4)],
        [(0, 6, 5)],  # the document begins behind the anchor
        [(0, 3, 5), (0, 0, 6)],
    ],
)
def test_blocks_out_of_order_are_refused(hang: list[tuple[int, int, int]]) -> None:
    with pytest.raises(ValueError, match=r"sorted|document"):
        _ = Case(hang).blocks


def test_tiles_cover_every_block_once_and_end_at_its_document() -> None:
    hang = (
        [(0, 0, a) for a in range(400)]
        + [(0, 400, a) for a in range(400, 450)]
        + [(2, 0, a) for a in range(3)]
    )
    b = Case(hang, slots=460).blocks
    covered = [i for tile in b.tiles for i in range(tile.first, tile.last)]
    assert covered == list(range(460))
    for tile in b.tiles[:-1]:
        assert {hang[i][:2] for i in range(tile.first, tile.last)} == {(tile.row, tile.start)}
        anchors = [hang[i][2] for i in range(tile.first, tile.last)]
        assert (tile.start, tile.end) == (hang[tile.first][1], max(anchors))
        assert tile.clear in ((tile.start, min(anchors)), (tile.end, tile.end))
    assert b.tiles[-1].end == 0


def test_the_context_ends_at_the_last_anchor_rounded_up() -> None:
    assert Blocks.build([0, 0], [3, 65], BLOCK, bucket=64).context_length == 128
    assert Blocks.build([0], [64], BLOCK, bucket=64).context_length == 64
    assert replace(Blocks.build([], [], BLOCK), kept=0).context_length == 0
