"""What is measured of a drafter, and how it is told."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import drafting
import pytest
import tiny
import torch
from drafting import NEW, PROMPTS, one_thread  # noqa: F401

from trainer import evaluation
from trainer.cached import CachedTarget
from trainer.completions import Completions, write_completions
from trainer.drafter import Drafter
from trainer.errors import InputError
from trainer.evaluation import (
    Case,
    Own,
    Row,
    as_json,
    data_cases,
    digest,
    distinct_ngrams,
    evaluate,
    file_cases,
    from_json,
    metrics,
    toy_cases,
)
from trainer.evaluation_table import histogram, table
from trainer.speculative import Decoded, speculative
from trainer.target import Target

ROW = Row("a", 0.0, 4, 64, 2.0, 1.5, 0.9, 4, None, [10, 5, 0, 10, 5], 1.0)


@pytest.fixture
def target() -> Target:
    return drafting.target()


@pytest.fixture
def untrained() -> Drafter:
    return drafting.untrained()


def test_distinct_3_grams_counted_by_hand() -> None:
    assert distinct_ngrams([1, 2, 3, 4, 5]) == 1.0
    assert distinct_ngrams([1, 1, 1, 1, 1]) == pytest.approx(1 / 3)
    assert distinct_ngrams([1, 2, 1, 2, 1, 2]) == pytest.approx(2 / 4)
    assert distinct_ngrams([1, 2]) == 1.0


def test_an_evaluation_pools_cycles_and_counts_identical_texts(target: Target) -> None:
    said: list[str] = []
    prompts = [*PROMPTS[:2], [9, 9, 9]]  # of two lengths
    cases = [Case("a", prompts), Case("b", prompts[:2], 0.7)]
    rows = evaluate(target, drafting.trained(), cases, NEW, said.append)
    first, second = rows
    assert (first.identical, first.prompts, first.tokens) == (3, 3, 3 * NEW)
    assert (second.identical, second.prompts) == (2, 2)
    assert first.lead_at_difference is None
    assert first.lossless
    cycles = sum(first.histogram)
    assert sum((i + 1) * n for i, n in enumerate(first.histogram)) == 3 * (NEW - 1)
    assert first.tau == pytest.approx(3 * (NEW - 1) / cycles)
    assert metrics(rows) == {
        "tau/a": first.tau,
        "tau_prompt_lookup/a": first.lookup_tau,
        "tau/b_T0.7": second.tau,
        "tau_prompt_lookup/b_T0.7": second.lookup_tau,
    }
    assert from_json(json.loads(json.dumps(as_json(rows)))) == rows


def test_speed_and_trees_are_measured_in_the_same_run(target: Target) -> None:
    case = Case("a", PROMPTS[:2])
    rows = evaluate(target, drafting.trained(), [case], NEW, timed=True, tree_budget=24)
    (row,) = rows
    assert (row.identical, row.tree_identical, row.tree_budget) == (2, 2, 24)
    assert row.tree_tau is not None
    assert row.tree_tau > row.tau > 1
    assert row.tokens_per_second
    assert row.plain_tokens_per_second
    assert from_json(as_json(rows)) == rows
    head, line = table(rows, "x")
    assert "τ of trees of 24" in head
    assert head.split()[-4:] == ["target", "alone", "faster", "by"]
    assert f"{row.tree_tau:.2f}" in line
    assert line.endswith("×")


def test_trees_are_refused_where_they_cannot_be_verified() -> None:
    with pytest.raises(InputError, match="leave --tree-budget out"):
        evaluate(drafting.target("qwen3_5"), drafting.untrained(), [], NEW, tree_budget=8)


def test_the_targets_own_texts_are_decoded_once(target: Target, untrained: Drafter) -> None:
    known: dict[str, Own] = {}
    cases = [Case("a", PROMPTS[:1])]
    first = evaluate(target, untrained, cases, 6, known=known)
    (theirs, leads) = known["a, greedy"][0]
    changed = Decoded([*theirs.tokens[:-1], 95], theirs.prompt)
    known["a, greedy"][0] = (changed, leads)
    second = evaluate(target, untrained, cases, 6, known=known)
    assert (first[0].identical, second[0].identical) == (1, 0), "what is known was used"


def test_a_text_that_differs_is_counted_and_told(
    target: Target, untrained: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*arguments: object) -> Decoded:
        text = speculative(*arguments)  # type: ignore[arg-type]
        return Decoded([*text.tokens[:-1], (text.tokens[-1] + 1) % tiny.VOCABULARY], text.prompt, text.cycles)

    monkeypatch.setattr(evaluation, "speculative", wrong)
    (row,) = evaluate(target, untrained, [Case("a", PROMPTS)], 6)
    assert row.identical == 0
    assert row.lead_at_difference is not None
    assert row.lead_at_difference > 0
    assert row.beyond_rounding == 3
    assert not row.lossless
    assert "3 texts differ; where they part" in table([row], "x")[-1]
    assert "in 3 that is more than rounding, so the decoding is wrong" in table([row], "x")[-1]


def test_a_difference_where_two_tokens_are_as_good_as_equal_is_rounding() -> None:
    """In bfloat16, with logits of which every other one is the one before it, a tie up to a rounding."""
    model = tiny.qwen3(**drafting.SHARP)
    with torch.no_grad():
        head = model.lm_head.weight
        head[1::2] = head[:-1:2]
    target = Target(model.to(torch.bfloat16), drafting.TAPS)
    mine = speculative

    def other(*arguments: object) -> Decoded:
        text = mine(*arguments)  # type: ignore[arg-type]
        return Decoded([*text.tokens[:-1], text.tokens[-1] ^ 1], text.prompt, text.cycles)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "speculative", other)
        (row,) = evaluate(target, drafting.untrained(), [Case("a", PROMPTS[:2], 0.0)], 6)
    assert (row.identical, row.beyond_rounding) == (0, 0)
    assert row.lossless
    assert table([row], "x")[-1].endswith("by 0 logits at most, which is rounding")


def test_the_table_is_aligned_and_shows_before_and_after() -> None:
    rows = [ROW, dataclasses.replace(ROW, label="other text", temperature=0.7)]
    lines = table(rows, "block 5", before=rows)
    assert len({len(text) for text in lines}) == 1
    assert "2.00 → 2.00" in lines[1]
    assert lines[1].startswith("a, greedy ")
    assert lines[2].startswith("other text, T=0.7 ")
    assert lines[1].endswith("4/4")
    assert "– → 2.00" in table(rows, "block 5", before=None)[1]
    assert "→" not in table(rows, "block 5")[1]


def test_the_cycles_are_told_by_the_tokens_they_added() -> None:
    assert histogram(ROW) == (
        "a, greedy: 30 cycles, by the tokens they added · 1: 33% · 2: 17% · 4: 33% · 5: 17%"
    )


def test_texts_that_end_at_once_have_no_acceptance_length(target: Target, untrained: Drafter) -> None:
    said: list[str] = []
    every = range(tiny.VOCABULARY)
    cases = [Case("a", PROMPTS[:2]), Case("a", PROMPTS[:2], 0.7)]
    rows = evaluate(target, untrained, cases, 6, said.append, every, timed=True)
    lines = table(rows, "x", before=rows)
    assert "0.00" not in lines[1].partition("1.00")[0]
    assert lines[1].split()[2:6] == ["–", "→", "–", "–"]
    assert lines[1].endswith("–")
    assert lines[-1] == "a, T=0.7: every text ended with its first token, so nothing could be drafted"
    assert metrics(rows) == {}


def test_curves_are_named_by_what_was_decoded() -> None:
    rows = [dataclasses.replace(ROW, label=case.label, temperature=case.temperature)
            for case in toy_cases({"known": PROMPTS, "held_out": PROMPTS}, 1)]  # fmt: skip
    assert [name for name in metrics(rows) if name.startswith("tau/")] == [
        "tau/known",
        "tau/held_out",
        "tau/known_T0.7",
    ]


def test_cases_have_one_name_for_one_content() -> None:
    cases = [Case("a", PROMPTS), Case("b", PROMPTS[:1], 0.7)]
    others = (
        [Case("a", PROMPTS[::-1]), cases[1]],
        [Case("c", PROMPTS), cases[1]],
        [cases[0], Case("b", PROMPTS[:1], 0.8)],
    )
    assert digest(list(cases)) == digest([Case("a", tuple(PROMPTS)), cases[1]])
    assert digest(cases) not in [digest(other) for other in others]


def test_an_evaluation_can_be_ended_at_every_token_of_the_targets_own_text(
    target: Target, untrained: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that waits for the whole text would outlast the time that a stop leaves it."""

    class Enough(Exception):
        pass

    said: list[str] = []
    passes = []
    read = CachedTarget.read

    def report(text: str) -> None:
        said.append(text)
        if len(said) == 3:
            raise Enough

    monkeypatch.setattr(evaluation.time, "monotonic", itertools.count(0, 2).__next__)
    monkeypatch.setattr(CachedTarget, "read", lambda *a, **k: passes.append(1) or read(*a, **k))
    with pytest.raises(Enough):
        evaluate(target, untrained, [Case("a", PROMPTS)], NEW, report)
    assert len(passes) == 2
    of = "the target's own continuations of a, greedy: prompts 1 to"
    assert said[0].startswith(of)
    assert [text.partition(" of 3, ")[2] for text in said] == [f"token {i} of {NEW}" for i in (1, 2, 3)]


def test_the_cases_of_the_toy_of_a_file_and_of_any_data(tmp_path: Path) -> None:
    known, unseen = [[i] for i in range(8)], [[i] for i in range(100, 108)]
    cases = toy_cases({"known": known, "held_out": unseen}, 6)
    assert [(c.label, len(c.prompts), c.temperature) for c in cases] == [
        ("known text", 6, 0.0),
        ("held-out text", 3, 0.0),
        ("known text", 3, 0.7),
    ]
    cases = file_cases({"HumanEval": known})
    assert [(c.label, len(c.prompts), c.temperature) for c in cases] == [
        ("HumanEval", 8, 0.0),
        ("HumanEval", 4, 0.7),
    ]
    write_completions(tmp_path / "data", tiny.documents(20, prompt=5), {"tokenizer": "x", "target": "y"})
    cases = data_cases(Completions.open(tmp_path / "data"), 4)
    assert [(len(c.prompts), c.temperature) for c in cases] == [(4, 0.0), (2, 0.7)]
    assert {len(prompt) for prompt in cases[0].prompts} == {5}
