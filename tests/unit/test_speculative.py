"""Speculative decoding changes how many passes a text takes, never the text."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import drafting
import pytest
import tiny
import torch
from drafting import BLOCK, MASK, NEW, PROMPTS, one_thread  # noqa: F401
from transformers import Lfm2Config, Lfm2ForCausalLM

from trainer import cached
from trainer.blocks import Blocks
from trainer.cached import CachedTarget
from trainer.drafter import Drafter
from trainer.errors import InputError
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

KINDS = ("qwen3", "qwen3_5")  # keys and values alone; half of the layers recurrent


@pytest.fixture
def target() -> Target:
    return drafting.target()


class Scripted:
    """Proposes what is known to follow, right up to `right` tokens and then wrong, as a drafter could.

    `right` may be a list, of one number for each cycle, over and over.
    """

    def __init__(self, text: list[int], right: int | list[int], guesses: int = BLOCK - 1) -> None:
        self.text, self.guesses = text, guesses
        self.right = [right] if isinstance(right, int) else right
        self.taken: list[torch.Tensor] = []
        self.cycles = 0

    def take(self, taps: torch.Tensor | None) -> None:
        assert taps is not None
        self.taken.append(taps)

    def propose(self, tokens: list[int]) -> list[int]:
        taken = sum(len(taps) for taps in self.taken)
        assert taken == len(tokens) - 1, "the target's states of all but the newest token are there"
        right = self.right[self.cycles % len(self.right)]
        self.cycles += 1
        guess = self.text[len(tokens) : len(tokens) + self.guesses]
        return [t if i < right else (t + 1) % tiny.VOCABULARY for i, t in enumerate(guess)]


# -- the text stays the target's own -----------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("which", ["untrained", "trained"])
def test_the_decoded_text_is_the_targets_own(target: Target, which: str, temperature: float) -> None:
    drafter: Drafter = getattr(drafting, which)()
    prompts = PROMPTS if which == "trained" else PROMPTS[:1]
    choices = [Choice(temperature, seed) for seed in range(len(prompts))]
    own, _ = plain(target, prompts, NEW, choices)
    cycles = []
    for prompt, choice, text in zip(prompts, choices, own, strict=True):
        found = speculative(target, BlockDrafter(target, drafter), prompt, NEW, choice)
        assert found.tokens == text.tokens
        assert sum(found.cycles) == NEW - 1, "the first token comes from the prefill"
        cycles += found.cycles
    if which == "trained" and temperature == 0:
        assert max(cycles) > 1, "a drafter that is never right would prove little"


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("kind", KINDS)
def test_the_target_is_taken_back_to_what_was_accepted(
    kind: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a recurrent state, which no cut brings back; what it reads again waits for 2 or 16 positions."""
    target = drafting.target(kind)
    choice = Choice(temperature, 4)
    longer, length = plain(target, PROMPTS[:1], 21 + BLOCK, [choice])[0][0].tokens, len(PROMPTS[0]) + 21
    for right, unread in (([0, 2, BLOCK - 1, 1, 3], 2), ([0, 1], 16)):
        monkeypatch.setattr(cached, "LONGEST_UNREAD", unread)
        script = Scripted(longer, right)
        found = speculative(target, script, PROMPTS[0], 21, choice)
        assert found.tokens == longer[:length]
        wanted = [right[i % len(right)] + 1 for i in range(len(found.cycles))]
        assert found.cycles[:-1] == wanted[:-1]
        taps = target.features(torch.tensor([longer]))[0][0]
        taken = torch.cat(script.taken)
        torch.testing.assert_close(taken, taps[: len(taken)], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_that_was_taken_back_gives_the_logits_of_one_that_never_read_further(kind: str) -> None:
    target = drafting.target(kind)
    ids = torch.tensor([PROMPTS[0]])
    back, fresh = CachedTarget(target), CachedTarget(target)
    back.read(ids)
    back.forget(0)
    back.read(torch.tensor([[7, 8, 9, 10]]))
    back.forget(3)
    fresh.read(ids)
    fresh.forget(0)
    fresh.read(torch.tensor([[7]]))
    fresh.forget(0)
    after = torch.tensor([[11, 12]])
    torch.testing.assert_close(back.read(after)[0], fresh.read(after)[0], rtol=1e-5, atol=1e-5)


def test_a_recurrent_target_reads_accepted_tokens_again_in_front_of_the_next_guess() -> None:
    """A pass of their own for them after each guess would cost as much as the guess."""
    target = drafting.target("qwen3_5")
    longer = plain(target, PROMPTS[:1], 21 + BLOCK)[0][0].tokens
    passes = []
    hook = target.decoder.layers[0].register_forward_hook(lambda _m, i, _o: passes.append(i[0].shape[1]))
    found = speculative(target, Scripted(longer, 1), PROMPTS[0], 21)
    hook.remove()
    assert found.cycles == [2] * 10
    assert len(passes) == 1 + 10 + 1, "the prompt, the guesses, and one pass to catch up"
    assert max(passes) <= cached.LONGEST_UNREAD + BLOCK + 2


@pytest.mark.parametrize("kind", ["windows", "convolutions"])
def test_windows_and_convolutions_are_taken_back_too(kind: str) -> None:
    if kind == "windows":
        model = tiny.qwen3(use_sliding_window=True, sliding_window=6, max_window_layers=1, **drafting.SHARP)
        assert "sliding_attention" in model.config.layer_types
    else:
        torch.manual_seed(0)
        layers = ["conv", "full_attention"] * 2
        model = Lfm2ForCausalLM(Lfm2Config(**tiny.SHAPE, layer_types=layers, **drafting.SHARP)).eval()
    target = Target(model, drafting.TAPS)
    longer = plain(target, PROMPTS[:1], NEW + BLOCK)[0][0].tokens
    for right in (0, 2, BLOCK - 1):
        found = speculative(target, Scripted(longer, right), PROMPTS[0], NEW)
        assert found.tokens == longer[: len(found.tokens)]
        assert found.cycles[0] == right + 1


def test_a_target_that_cannot_be_taken_back_is_refused_in_one_sentence(target: Target) -> None:
    one = CachedTarget(target)
    one.cache = SimpleNamespace(is_croppable=False)
    with pytest.raises(InputError, match=r"cache that cannot be taken back.*--eval-prompts 0"):
        one.forget(1)


def test_a_target_that_is_not_tapped_can_still_be_helped_by_prompt_lookup() -> None:
    bare = Target(tiny.qwen3())
    own = plain(bare, PROMPTS[:1], NEW)[0][0]
    assert speculative(bare, PromptLookup(BLOCK), PROMPTS[0], NEW).tokens == own.tokens


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_both_ways_of_decoding_stop_at_a_stop_token(target: Target, temperature: float) -> None:
    choice = Choice(temperature, 5)
    whole = plain(target, PROMPTS[:1], NEW, [choice])[0][0].continuation
    stop = whole[NEW // 2]
    own = plain(target, PROMPTS[:1], NEW, [choice], stop=(stop,))[0][0]
    assert own.continuation == whole[: whole.index(stop) + 1]
    drafter = BlockDrafter(target, drafting.trained())
    assert speculative(target, drafter, PROMPTS[0], NEW, choice, stop=(stop,)).tokens == own.tokens


# -- acceptance length -------------------------------------------------------------------------------------


def test_an_oracle_reaches_the_block_size_and_a_fool_one(target: Target) -> None:
    text = plain(target, PROMPTS[:1], 1 + 3 * BLOCK)[0][0].tokens
    oracle = speculative(target, Scripted(text, BLOCK - 1), PROMPTS[0], 1 + 3 * BLOCK)
    fool = speculative(target, Scripted(text, 0), PROMPTS[0], 1 + 3 * BLOCK)
    assert oracle.cycles == [BLOCK] * 3
    assert fool.cycles == [1] * 3 * BLOCK
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
def test_replaying_prompt_lookup_on_the_text_counts_what_decoding_with_it_counts(temperature: float) -> None:
    target = Target(tiny.qwen3(), drafting.TAPS)  # whose texts repeat themselves
    for seed, prompt in enumerate(PROMPTS[:2]):
        choice = Choice(temperature, seed)
        own = plain(target, [prompt], NEW, [choice])[0][0]
        real = speculative(target, PromptLookup(BLOCK), prompt, NEW, choice)
        assert real.tokens == own.tokens
        assert replay(PromptLookup(BLOCK), own) == real.cycles


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_every_guess_while_decoding_is_what_the_training_forward_gives_at_that_anchor(
    target: Target, temperature: float
) -> None:
    trained = drafting.trained()
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


def test_decoding_can_be_ended_before_every_cycle(target: Target) -> None:
    ticks = []
    text = plain(target, PROMPTS[:1], 10)[0][0].tokens
    speculative(target, Scripted(text, 0), PROMPTS[0], 10, tick=lambda: ticks.append(1))
    assert len(ticks) == 9


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
    drawn = [Choice(temperature, seed)(logits, position)[0] for seed in range(20) for position in range(80)]
    share = torch.bincount(torch.tensor(drawn), minlength=4) / len(drawn)
    torch.testing.assert_close(share, (logits[0] / temperature).softmax(-1), rtol=0, atol=0.04)


def test_temperature_zero_takes_the_likeliest() -> None:
    assert Choice(0.0)(torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]]), 5) == [1, 0]
