"""deploy/stacks_ranks.py: which processes are ranks, by the environment that a launcher gave them."""

from __future__ import annotations

from deploy import stacks_ranks


def given(rank: int, world: int = 2, **local: int) -> dict[str, int]:
    return {"RANK": rank, "WORLD_SIZE": world, **local}


def torchrun(rank: int, local: int) -> dict[str, int]:
    return given(rank, 4, LOCAL_RANK=local, LOCAL_WORLD_SIZE=2)


def test_a_launcher_is_no_rank_and_neither_is_a_worker() -> None:
    told = {10: {}, 11: given(0), 12: given(1), 13: given(1)}
    assert stacks_ranks.find(told, {11: 10, 12: 10, 13: 12, 10: 1}) == {11: 0, 12: 1}


def test_a_launcher_that_has_the_number_of_its_node_is_told_by_its_children() -> None:
    told = {10: given(0), 11: given(0), 12: given(1), 13: given(0)}
    assert stacks_ranks.find(told, {11: 10, 12: 10, 13: 11}) == {11: 0, 12: 1}


def test_a_shell_between_a_rank_and_its_launcher_changes_nothing() -> None:
    told = {10: {}, 12: given(0), 14: given(1), 15: given(1)}
    assert stacks_ranks.find(told, {12: 11, 11: 10, 14: 13, 13: 10, 15: 16, 16: 14}) == {12: 0, 14: 1}


def test_a_single_process_without_numbers_is_none() -> None:
    assert stacks_ranks.find({10: {}}, {}) == {}
    assert stacks_ranks.lacking({10: {}}, {}) == ([], [])


def test_who_has_ended_is_told_by_the_size_of_this_host_and_else_only_that_it_is_not_here() -> None:
    told = {11: torchrun(3, 1)}
    assert stacks_ranks.lacking(told, {11: 3}) == ([2], [])
    told = {11: given(0, 4), 12: given(2, 4)}
    assert stacks_ranks.lacking(told, {11: 0, 12: 2}) == ([], [1, 3])
