"""Speculative decoding changes how many passes a text takes, never the text; and what is measured of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest
import tiny
import torch

from trainer import decode, evaluation
from trainer.blocks import Blocks
from trainer.cached import CachedTarget
from trainer.data import Completions, Portions, Reader, write_completions
from trainer.drafter import Drafter
from trainer.drafter_config import DrafterConfig
from trainer.errors import InputError
from trainer.evaluation import (
    Case,
    as_json,
    data_cases,
    digest,
    distinct_ngrams,
    evaluate,
    from_json,
    metrics,
    toy_cases,
)
from trainer.evaluation_table import table
from trainer.loss import Objective
from trainer.optim import Optimizer
from trainer.speculative import (
    BlockDrafter,
    Choice,
    Decoded,
    PromptLookup,
    agreement,
    plain,
    replay,
    speculative,
)
from trainer.target import Target

BLOCK = 5
PROMPTS = [[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8], [1, 6, 1, 8, 0, 3]]
NEW = 24
MASK = 96


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only lose by sharing their work, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny.qwen3(), (0, 2))


def config(**changes: object) -> DrafterConfig:
    shape = SimpleNamespace(**tiny.SHAPE)
    chosen = {"block_size": BLOCK, "num_layers": 2, "target_layer_ids": (0, 2), "mask_token_id": MASK}
    return DrafterConfig.for_target(shape, **{**chosen, **changes})


@pytest.fixture(scope="module")
def untrained() -> Drafter:
    torch.manual_seed(1)
    return Drafter(config()).eval()


@pytest.fixture(scope="module")
def trained(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    """A drafter that has learnt a little of what this target says to PROMPTS: some guesses are right."""
    texts, _ = plain(target, PROMPTS, NEW + BLOCK)
    place = tmp_path_factory.mktemp("learnt") / "data"
    rows = [(t.tokens, [0] * t.prompt + [1] * len(t.continuation)) for t in texts]
    write_completions(place, rows, {"tokenizer": "x", "target": "tiny"})
    portions = Portions(512, 8, 64, BLOCK, max_anchors=64, gamma=2.0, mask_token_id=MASK)
    reader = Reader(Completions.open(place), portions)
    torch.manual_seed(2)
    drafter = Drafter(config())
    drafter.init_from_target(target.model)
    objective, optimizer = Objective(target.lm_head), Optimizer(drafter, 0.0)
    for number in range(40):
        batch = reader.batch(number)
        context = drafter.fuse(target.features(batch.input_ids)[0][:, : batch.blocks.context_length])
        hidden = drafter(target.embed(batch.block_ids), batch.blocks, context).flatten(0, 1)[batch.rows]
        weights = batch.weights.flatten()[batch.rows]
        objective(hidden, batch.labels.flatten()[batch.rows], weights).loss.backward()
        optimizer.step(0.01, float(weights.sum()), 1.0)
    return drafter.eval()


class Scripted:
    """Proposes what is known to follow, right up to `right` tokens and then wrong, as a drafter could."""

    def __init__(self, text: list[int], right: int, guesses: int = BLOCK - 1) -> None:
        self.text, self.right, self.guesses = text, right, guesses
        self.taken = 0

    def take(self, taps: torch.Tensor | None) -> None:
        assert taps is not None
        self.taken += len(taps)

    def propose(self, tokens: list[int]) -> list[int]:
        assert self.taken == len(tokens) - 1, "the target's states of all but the newest token are there"
        guess = self.text[len(tokens) : len(tokens) + self.guesses]
        return [t if i < self.right else (t + 1) % tiny.VOCABULARY for i, t in enumerate(guess)]


# -- the text stays the target's own -----------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("which", ["untrained", "trained"])
def test_the_decoded_text_is_the_targets_own(
    target: Target, which: str, temperature: float, request: pytest.FixtureRequest
) -> None:
    drafter = request.getfixturevalue(which)
    choices = [Choice(temperature, seed) for seed in range(len(PROMPTS))]
    own, _ = plain(target, PROMPTS, NEW, choices)
    cycles = []
    for prompt, choice, text in zip(PROMPTS, choices, own, strict=True):
        found = speculative(target, BlockDrafter(target, drafter), prompt, NEW, choice)
        assert found.tokens == text.tokens
        assert sum(found.cycles) == NEW - 1, "the first token comes from the prefill"
        cycles += found.cycles
    if which == "trained" and temperature == 0:
        assert max(cycles) > 1, "a drafter that is never right would prove little"


@pytest.mark.parametrize("right", range(BLOCK))
def test_the_targets_cache_is_cut_back_to_what_was_accepted(target: Target, right: int) -> None:
    own = plain(target, PROMPTS[:1], 41)[0][0]
    longer = plain(target, PROMPTS[:1], 41 + BLOCK)[0][0].tokens
    found = speculative(target, Scripted(longer, right), PROMPTS[0], 41)
    assert found.tokens == own.tokens
    assert set(found.cycles[:-1]) == {right + 1}


def test_a_cache_that_is_cut_back_gives_the_same_logits_as_one_that_never_read_further(
    target: Target,
) -> None:
    ids = torch.tensor([PROMPTS[0]])
    cut, fresh = CachedTarget(target), CachedTarget(target)
    cut.read(ids)
    cut.read(torch.tensor([[7, 8, 9, 10]]))
    cut.forget(3)
    fresh.read(ids)
    fresh.read(torch.tensor([[7]]))
    after = torch.tensor([[11, 12]])
    torch.testing.assert_close(cut.read(after)[0], fresh.read(after)[0], rtol=1e-5, atol=1e-6)


def test_a_target_with_a_sliding_window_is_rolled_back_past_its_window(untrained: Drafter) -> None:
    sliding = tiny.qwen3(use_sliding_window=True, sliding_window=6, max_window_layers=1)
    assert "sliding_attention" in sliding.config.layer_types
    target = Target(sliding, (0, 2))
    own = plain(target, PROMPTS[:1], NEW)[0][0]
    longer = plain(target, PROMPTS[:1], NEW + BLOCK)[0][0].tokens
    for right in (0, 2, BLOCK - 1):
        assert speculative(target, Scripted(longer, right), PROMPTS[0], NEW).tokens == own.tokens


def test_a_target_that_cannot_be_rolled_back_is_refused_in_one_sentence(target: Target) -> None:
    cached = CachedTarget(target)
    cached.cache = SimpleNamespace(is_croppable=False)
    with pytest.raises(InputError, match=r"recurrent state that cannot be rolled back.*--eval-prompts 0"):
        cached.forget(1)


def test_a_target_that_is_not_tapped_can_still_be_helped_by_prompt_lookup() -> None:
    bare = Target(tiny.qwen3())
    own = plain(bare, PROMPTS[:1], NEW)[0][0]
    assert speculative(bare, PromptLookup(BLOCK), PROMPTS[0], NEW).tokens == own.tokens


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_both_ways_of_decoding_stop_at_a_stop_token(
    target: Target, trained: Drafter, temperature: float
) -> None:
    choice = Choice(temperature, 5)
    whole = plain(target, PROMPTS[:1], NEW, [choice])[0][0].continuation
    stop = whole[NEW // 2]
    own = plain(target, PROMPTS[:1], NEW, [choice], stop=(stop,))[0][0]
    assert own.continuation == whole[: whole.index(stop) + 1]
    drafter = BlockDrafter(target, trained)
    assert speculative(target, drafter, PROMPTS[0], NEW, choice, stop=(stop,)).tokens == own.tokens


# -- acceptance length -------------------------------------------------------------------------------------


def test_an_oracle_reaches_the_block_size_and_a_fool_one(target: Target) -> None:
    text = plain(target, PROMPTS[:1], 1 + 4 * BLOCK)[0][0].tokens
    oracle = speculative(target, Scripted(text, BLOCK - 1), PROMPTS[0], 1 + 4 * BLOCK)
    fool = speculative(target, Scripted(text, 0), PROMPTS[0], 1 + 4 * BLOCK)
    assert oracle.cycles == [BLOCK] * 4
    assert fool.cycles == [1] * 4 * BLOCK
    assert oracle.tokens == fool.tokens == text


def test_agreement_is_the_length_of_the_common_prefix() -> None:
    assert agreement([], [1]) == 0
    assert agreement([1, 2, 3], [1, 2, 3, 4]) == 3
    assert agreement([1, 9, 3], [1, 2, 3, 4]) == 1


def test_prompt_lookup_copies_what_followed_the_newest_tokens_last_time() -> None:
    lookup = PromptLookup(block_size=4)
    assert lookup.propose([1, 2, 3, 4, 5, 1, 2, 3]) == [4, 5, 1]
    assert lookup.propose([1, 2, 8, 1, 2, 9, 1, 2]) == [9, 1, 2], "the latest occurrence, not the first"
    assert lookup.propose([5, 2, 7, 9, 2]) == [7, 9, 2], "a shorter match if there is no longer one"
    assert lookup.propose([1, 2, 3]) == []
    assert lookup.propose([4]) == []


def test_prompt_lookup_on_a_text_that_repeats_adds_a_whole_block_at_a_time() -> None:
    text = Decoded([1, 2, 3, 4] * 8, prompt=7)
    assert replay(PromptLookup(BLOCK), text) == [BLOCK] * 4 + [4]
    assert replay(PromptLookup(BLOCK), Decoded(list(range(30)), prompt=7)) == [1] * 22


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_replaying_prompt_lookup_on_the_text_counts_what_decoding_with_it_counts(
    target: Target, temperature: float
) -> None:
    for seed, prompt in enumerate(PROMPTS):
        choice = Choice(temperature, seed)
        own = plain(target, [prompt], NEW, [choice])[0][0]
        real = speculative(target, PromptLookup(BLOCK), prompt, NEW, choice)
        assert real.tokens == own.tokens
        assert replay(PromptLookup(BLOCK), own) == real.cycles


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_every_guess_while_decoding_is_what_the_training_forward_gives_at_that_anchor(
    target: Target, trained: Drafter, temperature: float
) -> None:
    guesses: dict[int, list[int]] = {}

    class Noted(BlockDrafter):
        def propose(self, tokens: Sequence[int]) -> list[int]:
            guess = super().propose(tokens)
            guesses[len(tokens) - 1] = guess
            return guess

    text = speculative(target, Noted(target, trained), PROMPTS[0], NEW, Choice(temperature, 1)).tokens
    anchors = sorted(guesses)
    assert len(anchors) > 5
    blocks = Blocks.build([0] * len(anchors), anchors, BLOCK)
    ids = torch.full((len(anchors), BLOCK), MASK)
    ids[:, 0] = torch.tensor(text)[anchors]
    with torch.no_grad():
        context = trained.fuse(target.features(torch.tensor([text]))[0])
        hidden = trained(target.embed(ids), blocks, context)[:, 1:]
        expected = (hidden @ target.lm_head.T).argmax(-1).tolist()
    assert [guesses[anchor] for anchor in anchors] == expected


# -- sampling ----------------------------------------------------------------------------------------------


def test_the_noise_depends_on_seed_and_position_alone() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    together = Choice(1.0, seed=3).scores(logits, 10)
    apart = torch.stack([Choice(1.0, seed=3).scores(logits[i : i + 1], 10 + i)[0] for i in range(4)])
    assert torch.equal(together, apart)
    assert not torch.equal(together, Choice(1.0, seed=4).scores(logits, 10))
    assert not torch.equal(together, Choice(1.0, seed=3).scores(logits, 11))


def test_the_noise_of_positions_that_are_done_is_not_kept() -> None:
    choice = Choice(1.0, seed=3)
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    first = choice.scores(logits, 10)
    for position in range(12, 500, 2):
        choice.scores(logits, position)
    assert len(choice._noise) == 4
    assert torch.equal(choice.scores(logits, 10), first)


def test_sampling_follows_the_softmax_at_the_temperature() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    temperature = 0.8
    drawn = [Choice(temperature, seed)(logits, position)[0] for seed in range(40) for position in range(100)]
    share = torch.bincount(torch.tensor(drawn), minlength=4) / len(drawn)
    torch.testing.assert_close(share, (logits[0] / temperature).softmax(-1), rtol=0, atol=0.03)


def test_temperature_zero_takes_the_likeliest() -> None:
    assert Choice(0.0)(torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]]), 5) == [1, 0]


# -- the evaluation ----------------------------------------------------------------------------------------


def test_distinct_3_grams_counted_by_hand() -> None:
    assert distinct_ngrams([1, 2, 3, 4, 5]) == 1.0
    assert distinct_ngrams([1, 1, 1, 1, 1]) == pytest.approx(1 / 3)
    assert distinct_ngrams([1, 2, 1, 2, 1, 2]) == pytest.approx(2 / 4)
    assert distinct_ngrams([1, 2]) == 1.0


def test_an_evaluation_pools_cycles_and_counts_identical_texts(target: Target, trained: Drafter) -> None:
    said: list[str] = []
    prompts = [*PROMPTS, [9, 9, 9]]  # of two lengths
    rows = evaluate(target, trained, [Case("a", prompts), Case("b", prompts[:2], 0.7)], NEW, said.append)
    first, second = rows
    assert (first.identical, first.prompts, first.tokens) == (4, 4, 4 * NEW)
    assert (second.identical, second.prompts) == (2, 2)
    assert first.lead_at_difference is None
    cycles = sum(first.histogram)
    assert sum((i + 1) * n for i, n in enumerate(first.histogram)) == 4 * (NEW - 1)
    assert first.tau == pytest.approx(4 * (NEW - 1) / cycles)
    assert metrics(rows) == {
        "tau/a": first.tau,
        "tau_prompt_lookup/a": first.lookup_tau,
        "tau/b_T0.7": second.tau,
        "tau_prompt_lookup/b_T0.7": second.lookup_tau,
    }
    assert from_json(json.loads(json.dumps(as_json(rows)))) == rows


def test_a_text_that_differs_is_counted_and_told(
    target: Target, untrained: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*arguments: object) -> Decoded:
        text = speculative(*arguments)  # type: ignore[arg-type]
        return Decoded([*text.tokens[:-1], (text.tokens[-1] + 1) % tiny.VOCABULARY], text.prompt, text.cycles)

    monkeypatch.setattr(evaluation, "speculative", wrong)
    rows = evaluate(target, untrained, [Case("a", PROMPTS)], 6)
    assert rows[0].identical == 0
    assert rows[0].lead_at_difference is not None
    assert rows[0].lead_at_difference > 0
    assert "3 texts differ; where they part" in table(rows, "x")[-1]


def test_the_table_is_aligned_and_shows_before_and_after(target: Target, untrained: Drafter) -> None:
    rows = evaluate(target, untrained, [Case("known text", PROMPTS), Case("other", PROMPTS[:1], 0.7)], 6)
    lines = table(rows, "block 5", before=rows)
    assert len({len(text) for text in lines}) == 1
    assert f"{rows[0].tau:.2f} → {rows[0].tau:.2f}" in lines[1]
    assert lines[1].startswith("known text, greedy ")
    assert lines[2].startswith("other, T=0.7 ")
    assert lines[1].endswith("3/3")
    assert f"– → {rows[0].tau:.2f}" in table(rows, "block 5", before=None)[1]
    assert "→" not in table(rows, "block 5")[1]


def test_texts_that_end_at_once_have_no_acceptance_length(target: Target, untrained: Drafter) -> None:
    said: list[str] = []
    every = range(tiny.VOCABULARY)
    rows = evaluate(target, untrained, [Case("a", PROMPTS), Case("a", PROMPTS, 0.7)], 6, said.append, every)
    lines = table(rows, "x", before=rows)
    assert "0.00" not in lines[1].partition("1.00")[0]
    assert lines[1].split()[2:6] == ["–", "→", "–", "–"]
    assert lines[-1] == "a, T=0.7: every text ended with its first token, so nothing could be drafted"
    assert metrics(rows) == {}


def test_curves_are_named_by_what_was_decoded(target: Target, untrained: Drafter) -> None:
    cases = toy_cases({"known": PROMPTS, "held_out": PROMPTS}, 1)
    assert [name for name in metrics(evaluate(target, untrained, cases, 3)) if name.startswith("tau/")] == [
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
    assert said[0] == "the target's own continuations of a, greedy: 3 prompts"


def test_decoding_can_be_ended_before_every_cycle(target: Target) -> None:
    ticks = []
    text = plain(target, PROMPTS[:1], 10)[0][0].tokens
    speculative(target, Scripted(text, 0), PROMPTS[0], 10, tick=lambda: ticks.append(1))
    assert len(ticks) == 9


def test_the_cases_of_the_toy_and_of_any_data(tmp_path: object) -> None:
    known, unseen = [[i] for i in range(8)], [[i] for i in range(100, 108)]
    cases = toy_cases({"known": known, "held_out": unseen}, 6)
    assert [(c.label, len(c.prompts), c.temperature) for c in cases] == [
        ("known text", 6, 0.0),
        ("held-out text", 3, 0.0),
        ("known text", 3, 0.7),
    ]
    place = tmp_path / "data"  # type: ignore[operator]
    write_completions(place, tiny.documents(20, prompt=5), {"tokenizer": "x", "target": "y"})
    cases = data_cases(Completions.open(place), 4)
    assert [(len(c.prompts), c.temperature) for c in cases] == [(4, 0.0), (2, 0.7)]
    assert {len(prompt) for prompt in cases[0].prompts} == {5}


# -- the command -------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path, trained: Drafter):
    from safetensors.torch import save_file

    place = tmp_path / "step-00000040"
    place.mkdir()
    save_file(trained.state_dict(), place / "drafter.safetensors")
    (place / "config.json").write_text(json.dumps(trained.config.to_json()))
    return place


def command(tmp_path, checkpoint, prompts: object, *more: str) -> list[str]:
    target = tmp_path / "target"
    if not target.exists():
        tiny.target_directory(target)
    file = tmp_path / "prompts.json"
    file.write_text(prompts if isinstance(prompts, str) else json.dumps(prompts))
    return ["--target", str(target), "--drafter", str(checkpoint), "--prompts", str(file), *more]


def test_the_command_measures_a_checkpoint(tmp_path, checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command(tmp_path, checkpoint, {"mine": PROMPTS}, "--new-tokens", "8")
    assert decode.main(arguments) == 0
    assert "mine, greedy" in capsys.readouterr().out
    assert decode.main([*arguments, "--temperature", "0.7", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert (rows[0]["identical"], rows[0]["temperature"]) == (3, 0.7)


def test_a_text_ends_where_the_targets_generation_config_says(
    tmp_path, checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command(tmp_path, checkpoint, PROMPTS, "--new-tokens", "8", "--json")
    assert decode.main(arguments) == 0
    assert json.loads(capsys.readouterr().out)[0]["tokens"] == 3 * 8
    ends = {"eos_token_id": list(range(tiny.VOCABULARY))}
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps(ends))
    assert decode.main(arguments) == 0
    row = json.loads(capsys.readouterr().out)[0]
    assert (row["tokens"], row["identical"]) == (3, 3)


@pytest.mark.parametrize(
    ("prompts", "more", "sentence"),
    [
        ("{", (), "is not valid JSON"),
        ({"a": 3}, (), "must hold a list of prompts"),
        ([], (), "holds no prompt"),
        ([[1, 97]], (), "token ids from 0 to 96"),
        ([[True]], (), "token ids from 0 to 96"),
        ([[]], (), "token ids from 0 to 96"),
        ([[1]], ("--new-tokens", "1"), "--new-tokens 1 must be"),
        ([[1]], ("--temperature", "-1"), "--temperature -1 must be"),
        ([[1]], ("--temprature", "1"), "unrecognized arguments: --temprature"),
    ],
)
def test_bad_input_to_the_command_is_one_sentence_and_exit_2(
    tmp_path, checkpoint, capsys: pytest.CaptureFixture[str], prompts: object, more: tuple, sentence: str
) -> None:
    arguments = command(tmp_path, checkpoint, prompts, *more)
    capsys.readouterr()  # the first test that needs the tiny model makes it, with a progress bar
    assert decode.main(arguments) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_a_damaged_checkpoint_or_one_for_another_target_is_named(
    tmp_path, checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command(tmp_path, checkpoint, [[1]])
    weights = checkpoint / "drafter.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-10])
    assert decode.main(arguments) == 2
    assert "drafter.safetensors has" in capsys.readouterr().err
    weights.write_bytes(whole)
    settings = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**settings, "num_target_layers": 9}))
    assert decode.main(arguments) == 2
    assert "for a target of another shape" in capsys.readouterr().err
    assert decode.main([*arguments[:2], "--drafter", str(tmp_path), *arguments[4:]]) == 2
    assert "is no checkpoint" in capsys.readouterr().err
    assert decode.main(["--target", str(tmp_path / "no"), *arguments[2:]]) == 2
    assert f"--target {tmp_path / 'no'}: there is no such directory" in capsys.readouterr().err
