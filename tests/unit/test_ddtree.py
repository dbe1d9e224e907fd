"""A tree of guesses: the best one, and a text that stays the target's own."""

from __future__ import annotations

import itertools

import drafting
import pytest
import torch
from drafting import NEW, PROMPTS, one_thread  # noqa: F401

from trainer.cached import tree_refusal
from trainer.ddtree import Tree, ancestors, best_tree, tree_speculative
from trainer.speculative import BlockDrafter, Choice, plain, speculative


@pytest.mark.parametrize("budget", [1, 7, 20, 200])
def test_the_tree_holds_the_most_probable_prefixes(budget: int) -> None:
    """Against all of them, listed."""
    logits = 2 * torch.randn(3, 5, generator=torch.Generator().manual_seed(budget))
    p = logits.log_softmax(-1).tolist()
    prefixes = [word for length in (1, 2, 3) for word in itertools.product(range(5), repeat=length)]
    best = sorted(prefixes, key=lambda word: -sum(p[slot][token] for slot, token in enumerate(word)))
    tree = best_tree(logits, budget)
    words: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        words.append((*(words[parent] if parent >= 0 else ()), token))
    assert words == best[:budget]
    assert tree.depths == [len(word) for word in words]


def test_a_node_sees_itself_and_what_leads_to_it() -> None:
    tree = Tree([5, 6, 7, 8], [-1, 0, -1, 1], [1, 2, 1, 3])
    assert ancestors(tree).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 0, 0, 1, 0],
        [1, 1, 1, 0, 1],
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_text_is_the_targets_own_and_takes_fewer_cycles_than_a_chain(temperature: float) -> None:
    target, drafter = drafting.target(), drafting.trained()
    trees, chains = [], []
    for seed, prompt in enumerate(PROMPTS[:2]):
        choice = Choice(temperature, seed)
        own = plain(target, [prompt], NEW, [choice])[0][0]
        found = tree_speculative(target, BlockDrafter(target, drafter), prompt, NEW, 24, choice)
        assert found.tokens == own.tokens
        assert sum(found.cycles) == NEW - 1
        trees += found.cycles
        chains += speculative(target, BlockDrafter(target, drafter), prompt, NEW, choice).cycles
    assert len(trees) < len(chains)
    assert max(trees) > 1


def test_a_target_of_another_kind_verifies_trees_too() -> None:
    target, drafter = drafting.target("llama"), drafting.untrained()
    found = tree_speculative(target, BlockDrafter(target, drafter), PROMPTS[0], NEW, 40)
    assert found.tokens == plain(target, PROMPTS[:1], NEW)[0][0].tokens
    assert max(found.cycles) > 1


def test_a_text_ends_at_a_stop_token_within_a_branch() -> None:
    target, choice = drafting.target(), Choice()
    stop = plain(target, PROMPTS[:1], NEW)[0][0].continuation[3]
    own = plain(target, PROMPTS[:1], NEW, [choice], (stop,))[0][0]
    drafter = BlockDrafter(target, drafting.trained())
    assert tree_speculative(target, drafter, PROMPTS[0], NEW, 24, choice, (stop,)).tokens == own.tokens


def test_a_target_that_reads_one_text_at_a_time_is_told() -> None:
    assert tree_refusal(drafting.target()) is None
    assert "leave --tree-budget out" in str(tree_refusal(drafting.target("qwen3_5")))
