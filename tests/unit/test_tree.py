"""The draft tree: the most probable prefixes, and how deep a text is in it."""

from __future__ import annotations

import itertools

import pytest
import torch

from trainer.tree import best_first, depths


def drafted(slots: int, ranks: int, seed: int = 0) -> list[list[float]]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(slots, ranks, generator=generator, dtype=torch.float64)
    return logits.log_softmax(-1).sort(-1, descending=True).values.tolist()


def every_prefix(logs: list[list[float]]) -> dict[tuple[int, ...], float]:
    paths = [
        path
        for depth in range(1, len(logs) + 1)
        for path in itertools.product(*(range(len(slot)) for slot in logs[:depth]))
    ]
    return {path: sum(logs[i][rank] for i, rank in enumerate(path)) for path in paths}


@pytest.mark.parametrize("seed", range(4))
def test_nodes_come_in_the_order_of_their_probability(seed: int) -> None:
    logs = drafted(4, 5, seed)
    scores = every_prefix(logs)
    nodes = list(best_first(logs))
    assert [node.path for node in nodes] == sorted(scores, key=lambda path: -scores[path])
    assert [node.score for node in nodes] == pytest.approx([scores[node.path] for node in nodes])


@pytest.mark.parametrize("budget", range(1, 7))
def test_no_other_tree_of_this_size_is_more_probable(budget: int) -> None:
    """Against every set of nodes that holds the beginnings of all that it holds."""
    logs = drafted(3, 2)
    weight = {path: torch.tensor(score).exp().item() for path, score in every_prefix(logs).items()}
    best = max(
        sum(weight[path] for path in chosen)
        for chosen in itertools.combinations(weight, budget)
        if all(path[:-1] in chosen for path in chosen if len(path) > 1)
    )
    taken = [node.path for node in itertools.islice(best_first(logs), budget)]
    assert sum(weight[path] for path in taken) == pytest.approx(best)
    assert all(path[:-1] in taken for path in taken if len(path) > 1)


def test_as_many_ranks_as_nodes_are_as_good_as_the_whole_vocabulary() -> None:
    logs = drafted(5, 40)
    whole = [node.path for node in itertools.islice(best_first(logs), 16)]
    assert [node.path for node in itertools.islice(best_first([s[:16] for s in logs]), 16)] == whole


def test_a_text_is_as_deep_in_the_tree_as_its_path() -> None:
    logs = drafted(4, 6)
    budgets = (1, 4, 16, 64)
    for path in [(0, 0, 0, 0), (0, 1, 0, 2), (2, 0, 1, 0), (5, 5, 5, 5), (6, 0, 0, 0), (0, 6, 0, 0)]:
        expected = []
        for budget in budgets:
            taken = {node.path for node in itertools.islice(best_first(logs), budget)}
            expected.append(sum(path[:depth] in taken for depth in range(1, 5)))
        assert depths(logs, path, budgets) == expected
    assert depths(logs, (0, 0, 0, 0), (10**6,)) == [4]
    assert depths([], (), (16, 32)) == [0, 0]


def test_a_tree_of_one_chain_is_the_drafters_first_choices() -> None:
    sure = [[0.0, -100.0]] * 5
    assert depths(sure, (0, 0, 1, 0, 0), (3, 5)) == [2, 2]
    assert depths(sure, (0, 0, 0, 0, 0), (3, 5)) == [3, 5]
