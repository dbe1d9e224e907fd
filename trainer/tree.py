"""The draft tree of DDTree (Ringel & Romano, arXiv 2604.12989), and how far a text gets in it.

A drafter gives each slot of a block a distribution, independent of the other slots. A node of the tree is
a prefix of tokens, one per slot from the first on, and is as probable as the product of theirs. Taken
best first, the tree of `budget` nodes holds the `budget` most probable prefixes: nothing is more probable
than what it begins with, so the beginnings of every prefix are in the tree, too. The target verifies the
tree in one pass; a text is accepted as deep as its own path is in the tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Node(NamedTuple):
    score: float  # its log-probability
    path: tuple[int, ...]  # the rank of the token at each slot, from 0: the most probable one


def best_first(logs: Sequence[Sequence[float]]) -> Iterator[Node]:
    """The nodes, most probable first; without the root, which is the anchor.

    `logs`: for each slot the log-probabilities of its K most probable tokens, falling. Its first K nodes are
    those that the whole vocabulary would give. When a node is taken, two become candidates: the same prefix
    with its last token's successor in rank, and the prefix with the next slot's first.
    """
    if not logs or not logs[0]:
        return
    heap: list[tuple[float, tuple[int, ...]]] = [(-logs[0][0], (0,))]
    while heap:
        cost, path = heapq.heappop(heap)
        yield Node(-cost, path)
        here, rank = logs[len(path) - 1], path[-1]
        if rank + 1 < len(here):
            heapq.heappush(heap, (cost + here[rank] - here[rank + 1], (*path[:-1], rank + 1)))
        if len(path) < len(logs):
            heapq.heappush(heap, (cost - logs[len(path)][0], (*path, 0)))


def depths(logs: Sequence[Sequence[float]], path: Sequence[int], budgets: Sequence[int]) -> list[int]:
    """How many slots of `path` are in the tree, for each of the `budgets`, which rise.

    `path`: the rank of the text's token at each slot; one that is not among the K ends it.
    """
    path = tuple(path)
    found, depth, taken = [], 0, 0
    nodes = best_first(logs)
    for budget in budgets:
        while taken < budget and (node := next(nodes, None)):
            taken += 1
            if len(node.path) == depth + 1 and node.path == path[: depth + 1]:
                depth += 1
        found.append(depth)
    return found
