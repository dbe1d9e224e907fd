"""DDTree (arXiv 2604.12989): the target verifies a tree of guesses at once, not one chain of them.

A pass of the drafter gives a distribution for every slot of a block. A prefix of guesses is as probable as
the product of its tokens; the tree holds the `budget` most probable prefixes (trainer/tree.py). The target
reads all nodes in one pass in which a node sees the text before it and its own ancestors, and its choices
lead from the root along one branch, as far as the tree goes. It needs no other training of the drafter.

This is the reference: what it costs in time says nothing of a serving engine's kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.cached import CachedTarget
from trainer.speculative import BlockDrafter, Choice, Decoded, now, until
from trainer.target import Target
from trainer.tree import best_first


@dataclass(frozen=True)
class Tree:
    """Nodes in the order in which they were taken, so that a parent comes before its children."""

    tokens: list[int]
    parents: list[int]  # numbers of nodes; -1: the root, which is the newest token of the text
    depths: list[int]  # 1 for a child of the root


def best_tree(logits: Tensor, budget: int) -> Tree:
    """The `budget` most probable prefixes of a block whose slots have `logits` [B - 1, V], independently."""
    best = logits.float().log_softmax(-1).topk(min(budget, logits.shape[-1]), dim=-1)
    scores, ids = best.values.tolist(), best.indices.tolist()
    tree = Tree([], [], [])
    numbers: dict[tuple[int, ...], int] = {(): -1}  # of the prefixes that are in the tree
    for node in itertools.islice(best_first(scores), budget):
        *before, rank = node.path
        numbers[node.path] = len(tree.tokens)
        tree.tokens.append(ids[len(before)][rank])
        tree.parents.append(numbers[tuple(before)])
        tree.depths.append(len(node.path))
    return tree


def ancestors(tree: Tree) -> Tensor:
    """[n + 1, n + 1], true where a row, root or node, may see a column: itself and what leads to it."""
    seen = torch.eye(len(tree.tokens) + 1, dtype=torch.bool)
    for number, parent in enumerate(tree.parents, start=1):
        seen[number] |= seen[parent + 1]
    return seen


@torch.no_grad()
def tree_speculative(
    target: Target,
    drafter: BlockDrafter,
    prompt: Sequence[int],
    new_tokens: int,
    budget: int,
    choice: Choice | None = None,
    stop: Collection[int] = (),
    tick: Callable[[], None] | None = None,
) -> Decoded:
    """Decode one text with trees of `budget` guesses; the same text as `plain` gives with the same `choice`.

    `tick` is called before each cycle; what it raises ends the decoding. For targets for which
    `trainer.cached.tree_refusal` is None.
    """
    choice = choice or Choice()
    cached = CachedTarget(target)
    goal = len(prompt) + new_tokens
    logits, taps = cached.read(torch.tensor([list(prompt)], device=target.device), last=1)
    assert taps is not None
    drafter.take(taps[0])
    tokens = [*prompt, *choice(logits[0], len(prompt))]
    cycles: list[int] = []
    began = now(target.device)
    while len(tokens) < goal and tokens[-1] not in stop:
        if tick is not None:
            tick()
        tree = best_tree(drafter.logits(tokens), budget)
        logits, taps = _read_tree(cached, tokens, tree)
        branch, answers = _walk(tree, logits[0], choice, len(tokens))
        cached.keep(branch)
        assert taps is not None
        drafter.take(taps[0, branch])
        added = until(answers, stop)[: goal - len(tokens)]
        tokens += added
        cycles.append(len(added))
    return Decoded(tokens, len(prompt), cycles, now(target.device) - began)


def _read_tree(cached: CachedTarget, tokens: Sequence[int], tree: Tree) -> tuple[Tensor, Tensor | None]:
    """One pass over the newest token and the tree: logits [1, n + 1, V], taps [1, n + 1, K·H]."""
    device, dtype = cached.target.device, cached.target.lm_head.dtype
    before = len(tokens) - 1
    seen = torch.cat([torch.ones(len(tree.tokens) + 1, before, dtype=torch.bool), ancestors(tree)], dim=1)
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
    positions = before + torch.tensor([[0, *tree.depths]], device=device)
    ids = torch.tensor([[tokens[-1], *tree.tokens]], device=device)
    return cached.read(ids, attention_mask=mask[None, None].to(device), position_ids=positions)


def _walk(tree: Tree, logits: Tensor, choice: Choice, position: int) -> tuple[list[int], list[int]]:
    """The rows, from the root's on, along which the target's choices lead, and these choices."""
    nodes = zip(tree.parents, tree.tokens, strict=True)
    children = {(parent + 1, token): row for row, (parent, token) in enumerate(nodes, start=1)}
    branch, answers = [0], list[int]()
    while True:
        answers += choice(logits[branch[-1]][None], position + len(answers))
        following = children.get((branch[-1], answers[-1]))
        if following is None:
            return branch, answers
        branch.append(following)
