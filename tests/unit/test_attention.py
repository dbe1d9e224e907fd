"""The block mask: who sees whom, and that both executions of it agree."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trainer import attention
from trainer.attention import Blocks, allowed, dense_attention, two_part_attention

BLOCK = 3
LENGTH = 16


def blocks(pairs: list[tuple[int, int]], slots: int = 0) -> Blocks:
    return Blocks.build([d for d, _ in pairs], [a for _, a in pairs], BLOCK, slots=slots)


def tensors(
    count: int, documents: int = 2, heads: int = 4, groups: int = 2, width: int = 8
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(count, BLOCK, heads, width)] + [(count, BLOCK, groups, width)] * 2
    shapes += [(documents, LENGTH, groups, width)] * 2
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


@pytest.mark.parametrize(
    ("query", "key", "sees"),
    [
        ("block 0 of document 0 at 4", "position 3 of document 0", True),
        ("block 0 of document 0 at 4", "position 4 of document 0", False),  # the anchor's own feature
        ("block 0 of document 0 at 4", "position 5 of document 0", False),
        ("block 0 of document 0 at 4", "position 3 of document 1", False),
        ("block 1 of document 0 at 5", "position 4 of document 0", True),
        ("block 2 of document 1 at 9", "position 8 of document 1", True),
        ("block 2 of document 1 at 9", "position 8 of document 0", False),
        ("block 0 of document 0 at 4", "slot 0 of block 0", True),
        ("block 0 of document 0 at 4", "slot 2 of block 0", True),  # both directions
        ("block 0 of document 0 at 4", "slot 0 of block 1", False),
        ("block 1 of document 0 at 5", "slot 2 of block 0", False),
        ("block 3, which is padding", "position 0 of document 0", False),
        ("block 3, which is padding", "slot 1 of block 3", True),
        ("block 3, which is padding", "slot 1 of block 2", False),
    ],
)
def test_a_block_sees_its_document_before_its_anchor_and_itself(query: str, key: str, sees: bool) -> None:
    mask = allowed(blocks([(0, 4), (0, 5), (1, 9)], slots=4), documents=2, context_length=LENGTH)
    words = key.split()
    if words[0] == "position":
        column = int(words[4]) * LENGTH + int(words[1])
    else:
        column = 2 * LENGTH + int(words[4]) * BLOCK + int(words[1])
    block = int(query.split()[1].rstrip(","))
    rows = mask[block * BLOCK : (block + 1) * BLOCK, column]
    assert rows.tolist() == [sees] * BLOCK  # all slots of a block see the same


CASES = {
    "overlapping anchors of two documents": ([(0, 2), (0, 3), (0, 9), (1, 1), (1, 14)], 0),
    "padding at the end": ([(0, 2), (1, 7)], 5),
    "an anchor without any context": ([(0, 0), (0, 1)], 0),
    "nothing but padding": ([], 2),
    "many blocks, several tiles": ([(0, a) for a in range(1, 15)] + [(1, a) for a in range(3, 12)], 26),
    "a document without blocks": ([(1, 5)], 0),
}


@pytest.mark.parametrize("case", CASES)
def test_two_part_attention_equals_dense_attention_in_value_and_gradient(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "TILE_ROWS", 4 * BLOCK)
    pairs, slots = CASES[case]
    b = blocks(pairs, slots)
    inputs = tensors(len(b))
    weight = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    results = []
    for attend in (dense_attention, two_part_attention):
        out = attend(*inputs, b)
        results.append((out, *torch.autograd.grad((out * weight).sum(), inputs, allow_unused=True)))
    for dense, two_part in zip(*results, strict=True):
        torch.testing.assert_close(two_part, dense, atol=1e-12, rtol=1e-10)


def test_the_gradient_of_two_part_attention_is_that_of_finite_differences() -> None:
    b = blocks([(0, 2), (0, 5), (1, 4)], slots=4)
    inputs = tensors(len(b), heads=2, groups=1, width=4)
    assert torch.autograd.gradcheck(lambda *t: two_part_attention(*t, b), inputs)


def test_nothing_at_or_after_the_anchor_changes_a_block_by_one_bit() -> None:
    b = blocks([(0, 4), (0, 6), (0, 11), (1, 7)])
    query, key, value, context_key, context_value = (t.detach() for t in tensors(len(b)))
    before = two_part_attention(query, key, value, context_key, context_value, b)
    for block, (document, anchor) in enumerate([(0, 4), (0, 6), (0, 11), (1, 7)]):
        others = [i for i in range(len(b)) if i != block]
        k, v, ck, cv = (t.clone() for t in (key, value, context_key, context_value))
        for context in (ck, cv):
            context[document, anchor:] += 100
            context[1 - document] -= 50
        for own in (k, v):
            own[others] *= -3
        after = two_part_attention(query, k, v, ck, cv, b)
        assert torch.equal(after[block], before[block])
        ck[document, anchor - 1] += 1
        assert not torch.equal(two_part_attention(query, k, v, ck, cv, b)[block], before[block])


def test_blocks_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="sorted"):
        blocks([(0, 5), (0, 4)])
    with pytest.raises(ValueError, match="sorted"):
        blocks([(1, 1), (0, 4)])


def test_tiles_cover_every_block_once_and_end_at_its_document() -> None:
    pairs = [(0, a) for a in range(400)] + [(2, a) for a in range(3)]
    b = blocks(pairs, slots=410)
    covered = [i for tile in b.tiles for i in range(tile.first, tile.last)]
    assert covered == list(range(410))
    for tile in b.tiles[:-1]:
        assert {pairs[i][0] for i in range(tile.first, tile.last)} == {tile.document}
        assert tile.longest == max(pairs[i][1] for i in range(tile.first, tile.last))
        assert tile.visible == min(pairs[i][1] for i in range(tile.first, tile.last))
    assert b.tiles[-1].longest == 0


def test_the_context_ends_at_the_last_anchor_rounded_up() -> None:
    assert Blocks.build([0, 0], [3, 65], BLOCK, bucket=64).context_length == 128
    assert Blocks.build([0], [64], BLOCK, bucket=64).context_length == 64
    assert replace(Blocks.build([], [], BLOCK), kept=0).context_length == 0
