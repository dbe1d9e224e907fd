"""Which copies go so that others fit in, and what a run needs besides its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from samples import facts, recipe, run

from deploy import budget
from deploy.budget import Eviction

MINE = run(weights={"path": "/s/old@1"}, processes=[{"pid": 7}])


def copy(name: str, memory: int, *pids: int, where: str = "memory") -> dict[str, Any]:
    stem, _, digest = name.partition("@")
    return {
        "path": f"/s/{name}",
        "name": stem,
        "digest": digest,
        "where": where,
        "memory": memory,
        "processes": list(pids),
    }


@pytest.mark.parametrize(
    ("copies", "short", "gone"),
    [
        ([copy("m@2", 10)], 5, [Eviction("/s/m@2", 10)]),
        ([copy("m@2", 3), copy("m@3", 4)], 5, [Eviction("/s/m@3", 4), Eviction("/s/m@2", 3)]),
        ([copy("m@2", 10, 7), copy("m@3", 5)], 5, [Eviction("/s/m@3", 5)]),  # who is not used goes first
        ([copy("m@2", 10, 7)], 5, [Eviction("/s/m@2", 10, held=True)]),
        ([copy("old@1", 10)], 5, [Eviction("/s/old@1", 10, held=True)]),  # what the run began with
        ([copy("m@2", 10, 7, 8)], 5, []),  # another process has it
        ([copy("m@2", 10)], 11, []),  # not enough: then nothing goes
        ([copy("m@2", 10) | {"partial": True}], 5, []),  # what is counted as held
        ([copy("m@9", 10), copy("n@2", 10), copy("m@2", 10, where="disk")], 5, []),
    ],
)
def test_only_what_nobody_else_uses_goes_and_no_more_than_needed(
    copies: list[dict[str, Any]], short: int, gone: list[Eviction]
) -> None:
    assert list(budget.evictions(copies, "/s/m@9", "m", MINE, short)) == gone


@pytest.mark.parametrize(
    ("text", "runtime", "devices", "need", "words"),
    [
        ("weights: /m\ntrainer: {}", "process", 2, 2_000_000_000, "2 processes"),
        ("weights: /m\ntrainer: {}\nmemory: 64g", "compose", 2, 64 << 30, "memory: 64g"),
        ("command: [a]\nmemory: 64g", "compose", 0, 64 << 30, "memory: 64g"),
        ("command: [a]", "compose", 0, 0, "what its command needs besides is not known"),
        ("weights: /m\ntrainer: {}", "compose", 0, 10**9 + 2**30, "1 process and its container's /dev/shm"),
    ],
)  # fmt: skip
def test_a_run_needs_what_its_file_says_or_what_our_trainer_is_known_to_need(
    text: str, runtime: str, devices: int, need: int, words: str, tmp_path: Path
) -> None:
    settings = recipe(text, tmp_path).settings
    assert budget.own_need(settings, runtime, devices, None) == budget.Own(need, words)
    assert budget.own_need(settings, runtime, devices, MINE).bytes == 0


def test_each_thing_that_is_short_is_a_sentence_of_its_own() -> None:
    found = facts(shm={"free_bytes": 10, "is_tmpfs": True}, memory={"available": 30, "room": 20})
    said = budget.shortages(found, "box", 25, budget.Own(10, "x"), held=4)
    assert [(one.where, one.bytes) for one in said] == [("shm", 11), ("memory", 1), ("memory", 11)]
    assert [one.sentence for one in said] == [
        "/dev/shm/drafthouse has 14 B free, but the weights need 25 B: 11 B too little",
        "box has 34 B of memory free, but the weights (25 B) and the run (10 B: x) need 35 B: 1 B too little",
        "the container of box has 24 B of memory free, but the weights (25 B) and the run (10 B: x) need "
        "35 B: 11 B too little",
    ]
    assert budget.shortages(facts(shm={"free_bytes": 25}), "box", 25) == []
