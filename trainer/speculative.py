"""Speculative decoding: a cheap proposer guesses several tokens, the target confirms a prefix of them at
once.

One cycle (arXiv 2602.06036): the proposer guesses the tokens after the newest one; the target reads the
newest token and the guess in one pass; the longest prefix on which its own choices agree is kept, and its
choice after that prefix, the bonus, comes for free. The rest is taken back (trainer/cached.py). The text is
the target's own, token for token, at any temperature: a proposer decides only how many passes it takes.
Acceptance length τ is the mean number of tokens that a cycle adds.

Letters in shapes: b sequences, n new positions, V vocabulary, B slots in a block, K tapped layers, H width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from trainer.cached import CachedTarget
from trainer.drafter import Drafter
from trainer.target import Target


@dataclass(frozen=True)
class Decoded:
    """A text and how it came about. Tokens that a cycle confirmed beyond the end of the text do not count."""

    tokens: list[int]  # prompt and continuation
    prompt: int  # tokens of the prompt
    cycles: list[int] = field(default_factory=list)  # tokens that each cycle added; the prefill adds one
    seconds: float = field(default=0.0, compare=False)  # from the first token, the prefill's, to the last

    @property
    def continuation(self) -> list[int]:
        return self.tokens[self.prompt :]


# -- the target's choice -----------------------------------------------------------------------------------


class Choice:
    """Which token the target chooses at a position: its likeliest, or one sampled at a temperature.

    Sampling adds Gumbel noise to the logits and takes the largest (which is a sample of the softmax). The
    noise depends on seed and position alone, so two ways of decoding that agree on the logits agree on
    the sample: only so can it be checked that speculative decoding changes nothing. Noise is kept only
    from the position last asked for on, since a text is decoded forwards; further back it is drawn again.
    """

    def __init__(self, temperature: float = 0.0, seed: int = 0) -> None:
        self.temperature = temperature
        self.seed = seed
        self._noise: dict[int, Tensor] = {}

    def _noise_at(self, position: int, vocabulary: int) -> Tensor:
        if position not in self._noise:
            generator = torch.Generator().manual_seed((self.seed << 24) + position)
            uniform = torch.rand(vocabulary, generator=generator, dtype=torch.float64)
            self._noise[position] = -torch.log(-torch.log(uniform.clamp_(1e-12, 1 - 1e-12))).float()
        return self._noise[position]

    def scores(self, logits: Tensor, position: int) -> Tensor:
        """[n, V] logits for the tokens at `position`, `position` + 1, … -> [n, V]; the largest is chosen."""
        if self.temperature == 0:
            return logits
        self._noise = {at: noise for at, noise in self._noise.items() if at >= position}
        noise = torch.stack([self._noise_at(position + i, logits.shape[-1]) for i in range(len(logits))])
        return logits.float() / self.temperature + noise.to(logits.device)

    def __call__(self, logits: Tensor, position: int) -> list[int]:
        return self.scores(logits, position).argmax(-1).tolist()


# -- the target alone ----------------------------------------------------------------------------------------


@torch.no_grad()
def plain(
    target: Target,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    choices: Sequence[Choice] | None = None,
    stop: Collection[int] = (),
    tick: Callable[[], None] | None = None,
) -> tuple[list[Decoded], list[list[float]]]:
    """The target's own text for prompts of one length, read side by side, one token per pass.

    `choices` has one entry per prompt (default: the likeliest token). A text ends after `new_tokens` or
    after a token of `stop`. `tick` is called before each pass; what it raises ends the decoding. The second
    result gives by how much each chosen token led over the runner-up,
    in logits: where it is of the order of rounding, another order of summation may choose otherwise.
    Raises ValueError for prompts of different lengths.
    """
    if len({len(prompt) for prompt in prompts}) != 1:
        raise ValueError("prompts that are decoded side by side must have one length")
    cached = CachedTarget(target, rollback=False)
    ids = torch.tensor([list(prompt) for prompt in prompts], device=target.device)
    start = ids.shape[1]
    chosen, leads = [], []
    running = set(range(len(prompts)))
    began = 0.0
    for position in range(start, start + new_tokens):
        if tick is not None:
            tick()
        logits = cached.read(ids, last=1)[0][:, -1]
        if choices is not None and any(choice.temperature for choice in choices):
            pairs = zip(choices, logits, strict=True)
            logits = torch.cat([choice.scores(row[None], position) for choice, row in pairs])
        best = logits.float().topk(2, dim=-1)
        ids = best.indices[:, :1]
        chosen.append(ids)
        leads.append(best.values[:, 0] - best.values[:, 1])
        began = began or now(target.device)
        if stop:
            running -= {row for row, token in enumerate(ids[:, 0].tolist()) if token in stop}
            if not running:
                break
    found = []
    seconds = now(target.device) - began
    for prompt, row in zip(prompts, torch.cat(chosen, 1).tolist(), strict=True):
        found.append(Decoded([*prompt, *until(row, stop)], start, seconds=seconds))
    return found, torch.stack(leads, 1).tolist()


def now(device: torch.device) -> float:
    """Seconds on a clock, once `device` has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def until(tokens: Sequence[int], stop: Collection[int]) -> list[int]:
    """`tokens` up to and with the first that is in `stop`."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in stop), len(tokens))
    return list(tokens[:end])


# -- proposers ---------------------------------------------------------------------------------------------


class Proposer(Protocol):
    def take(self, taps: Tensor | None) -> None:
        """Hidden states [n, K·H] of the next n tokens of the text, once the target has confirmed them."""

    def propose(self, tokens: Sequence[int]) -> list[int]:
        """A guess of the tokens after `tokens`, whose last one the target has chosen but not yet read."""


class BlockDrafter:
    """A DFlash drafter as a proposer: one pass for a whole block, its likeliest token in every slot."""

    def __init__(self, target: Target, drafter: Drafter) -> None:
        if target.layer_ids != tuple(drafter.config.target_layer_ids):
            raise ValueError(f"the target is tapped at {target.layer_ids}, the drafter was made for others")
        self.target = target
        self.drafter = drafter
        self.cache = drafter.new_cache()
        config = drafter.config
        self._block = torch.full((config.block_size,), config.mask_token_id, device=target.device)

    def take(self, taps: Tensor | None) -> None:
        assert taps is not None
        self.drafter.append_context(self.cache, taps.to(self.drafter.norm.weight.dtype))

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """What the drafter makes of the slots after the newest of `tokens`: [B - 1, V]."""
        self._block[0] = tokens[-1]
        embedded = self.target.embed(self._block).to(self.drafter.norm.weight.dtype)
        hidden = self.drafter.draft(embedded, len(tokens) - 1, self.cache)[1:]
        return self.target.head(hidden.to(self.target.lm_head.dtype))

    def propose(self, tokens: Sequence[int]) -> list[int]:
        return self.logits(tokens).argmax(-1).tolist()


class PromptLookup:
    """What costs nothing: copy what followed the last time that the newest tokens occurred in this very text.

    It tells how much of an acceptance length is mere repetition.
    """

    def __init__(self, block_size: int, longest: int = 3) -> None:
        self.guesses = block_size - 1
        self.longest = longest

    def take(self, taps: Tensor | None) -> None:
        pass

    def propose(self, tokens: Sequence[int]) -> list[int]:
        tokens = list(tokens)
        for size in range(min(self.longest, len(tokens) - 1), 0, -1):
            newest = tokens[-size:]
            for start in range(len(tokens) - size - 1, -1, -1):
                if tokens[start : start + size] == newest:
                    return tokens[start + size : start + size + self.guesses]
        return []


# -- the cycle ---------------------------------------------------------------------------------------------


def agreement(guess: Sequence[int], answers: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    count = 0
    for guessed, answer in zip(guess, answers, strict=False):
        if guessed != answer:
            break
        count += 1
    return count


@torch.no_grad()
def speculative(
    target: Target,
    proposer: Proposer,
    prompt: Sequence[int],
    new_tokens: int,
    choice: Choice | None = None,
    stop: Collection[int] = (),
    tick: Callable[[], None] | None = None,
) -> Decoded:
    """Decode one text with `proposer`; the same text as `plain` gives with the same `choice`.

    `tick` is called before each cycle; what it raises ends the decoding.
    Raises InputError if the target's cache cannot be taken back.
    """
    choice = choice or Choice()
    cached = CachedTarget(target)
    goal = len(prompt) + new_tokens

    def read(tokens: Sequence[int], last: int = 0) -> tuple[Tensor, Tensor | None]:
        logits, taps = cached.read(torch.tensor([list(tokens)], device=target.device), last)
        return logits[0], None if taps is None else taps[0]

    logits, taps = read(prompt, last=1)
    cached.forget(0)
    proposer.take(taps)
    tokens = [*prompt, *choice(logits[-1:], len(prompt))]
    cycles: list[int] = []
    began = now(target.device)
    while len(tokens) < goal and tokens[-1] not in stop:
        if tick is not None:
            tick()
        guess = proposer.propose(tokens)
        logits, taps = read([tokens[-1], *guess])
        answers = choice(logits, len(tokens))
        accepted = agreement(guess, answers)
        cached.forget(len(guess) - accepted)
        proposer.take(None if taps is None else taps[: accepted + 1])
        added = until(answers[: accepted + 1], stop)[: goal - len(tokens)]
        tokens += added
        cycles.append(len(added))
    return Decoded(tokens, len(prompt), cycles, now(target.device) - began)


def replay(proposer: Proposer, text: Decoded) -> list[int]:
    """The cycles that a proposer which reads nothing but the text would have needed for `text`.

    Exact at any temperature, and without the target, since the text does not depend on the proposer.
    """
    end = text.prompt + 1
    cycles = []
    while end < len(text.tokens):
        rest = text.tokens[end:]
        added = min(agreement(proposer.propose(text.tokens[:end]), rest) + 1, len(rest))
        cycles.append(added)
        end += added
    return cycles
