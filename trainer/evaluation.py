"""How well a drafter drafts: real speculative decoding, and beside it what keeps the figure honest.

An acceptance length alone misleads. A target that goes round in circles is easy to draft for, so the share of
distinct 3-grams stands beside it; text that repeats its prompt needs no drafter, so the acceptance length of
prompt lookup stands beside it; and sampling is harder than greedy decoding, so there is a row for it. That
the decoded text is the target's own is not assumed but compared.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer.cached import tree_refusal
from trainer.completions import Completions
from trainer.ddtree import tree_speculative
from trainer.drafter import Drafter
from trainer.errors import InputError
from trainer.speculative import BlockDrafter, Choice, Decoded, PromptLookup, plain, replay, speculative
from trainer.target import Target

SAMPLING = 0.7  # temperature of the sampled row
LONGEST_PROMPT = 512  # tokens; the front of a longer one is cut away
ROUNDINGS = 4  # so many roundings of the largest logit may lie between two ways of computing it

Prompts = Mapping[str, Sequence[Sequence[int]]]
Report = Callable[[str], None]
Own = list[tuple[Decoded, list[float]]]  # per prompt: the target's own text, and each token's lead


@dataclass(frozen=True)
class Case:
    """Prompts that are decoded in one way: one row of the table."""

    label: str
    prompts: Sequence[Sequence[int]]
    temperature: float = 0.0

    @property
    def name(self) -> str:
        return _name(self.label, self.temperature)


@dataclass(frozen=True)
class Row:
    """What one case gave."""

    label: str
    temperature: float
    prompts: int
    tokens: int  # decoded, without the prompts
    tau: float  # tokens per cycle of draft and verification, pooled over all prompts
    lookup_tau: float  # the same for prompt lookup on the same texts
    distinct3: float  # distinct 3-grams / 3-grams of a continuation, mean over prompts
    identical: int  # texts that equal the target's own, token for token
    lead_at_difference: float | None  # by how much the target had preferred its own token at most, in logits
    histogram: list[int]  # how many cycles added 1, 2, … B tokens
    seconds: float
    beyond_rounding: int = 0  # texts that differ where the target's choice was clear: a defect
    tokens_per_second: float | None = None  # after the prefill, one text at a time; None: not timed
    plain_tokens_per_second: float | None = None  # of the target alone, in the same run
    tree_budget: int = 0
    tree_tau: float | None = None  # as tau, with trees of so many guesses
    tree_identical: int | None = None

    @property
    def name(self) -> str:
        return _name(self.label, self.temperature)

    @property
    def lossless(self) -> bool:
        """Up to rounding: every text is the target's own, or parts from it where its choice was a tie."""
        return not self.beyond_rounding

    @property
    def drafted(self) -> bool:
        """Whether there was a cycle at all: a text that ends with its first token leaves nothing to draft."""
        return any(self.histogram)


def _name(label: str, temperature: float) -> str:
    return f"{label}, {'greedy' if temperature == 0 else f'T={temperature:g}'}"


def distinct_ngrams(tokens: Sequence[int], n: int = 3) -> float:
    """Distinct n-grams / n-grams; 1.0 for a text too short to have one."""
    grams = list(zip(*(tokens[i:] for i in range(n)), strict=False))
    return len(set(grams)) / len(grams) if grams else 1.0


# -- which prompts -----------------------------------------------------------------------------------------


def toy_cases(prompts: Prompts, count: int) -> list[Case]:
    """Three rows from the toy's prompts: `count` of text that the target knows, half as many of the
    others.
    """
    fewer = max(1, count // 2)
    return [
        Case("known text", prompts["known"][:count]),
        Case("held-out text", prompts["held_out"][:fewer]),
        Case("known text", prompts["known"][:fewer], SAMPLING),
    ]


def data_cases(completions: Completions, count: int) -> list[Case]:
    """Two rows from any data directory: what stands before the first supervised token of `count` documents,
    spread evenly over it.
    """
    prompts = []
    count = min(count, len(completions))
    for number in range(count):
        ids, mask = completions.document(document := number * len(completions) // count)
        completions.check_ids(ids, [document])
        start = int((mask != 0).argmax())
        if start:
            prompts.append([int(i) for i in ids[max(0, start - LONGEST_PROMPT) : start]])
    fewer = max(1, count // 2)
    return [Case("training prompts", prompts), Case("training prompts", prompts[:fewer], SAMPLING)]


def file_cases(groups: Prompts) -> list[Case]:
    """Two rows for each list of prompts from a file: all greedily, and half of them sampled."""
    cases = []
    for label, prompts in groups.items():
        fewer = max(1, len(prompts) // 2)
        cases += [Case(label, prompts), Case(label, prompts[:fewer], SAMPLING)]
    return cases


def digest(cases: Sequence[Case]) -> str:
    """Names what is decoded, and how: 16 hex digits."""
    text = json.dumps([[case.label, case.temperature, [list(p) for p in case.prompts]] for case in cases])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# -- measuring ---------------------------------------------------------------------------------------------


def evaluate(
    target: Target,
    drafter: Drafter,
    cases: Sequence[Case],
    new_tokens: int,
    report: Report | None = None,
    stop: Collection[int] = (),
    *,
    timed: bool = False,
    tree_budget: int = 0,
    known: dict[str, Own] | None = None,
) -> list[Row]:
    """Decode every case with the drafter, and once more plainly, and compare.

    `report` is told what is being decoded, about once a second; what it raises ends the evaluation. `timed`:
    measure tokens per second, for which every text is decoded by itself, plainly and right after that with
    the drafter. `tree_budget`: decode with trees of so many guesses, too. `known`: the target's own texts by
    case, which are used where they are there and put there where not; they depend on the target, the prompts,
    `new_tokens` and `stop` alone. `target` must be tapped at the drafter's layers. Raises InputError if the
    target's cache cannot be taken back.
    """
    if tree_budget and (why := tree_refusal(target)):
        raise InputError(why)
    how = _How(target, drafter, new_tokens, stop, timed, tree_budget, report)
    texts = {} if known is None else known
    return [how.evaluate(case, texts) for case in cases if case.prompts]


@dataclass
class _How:
    """One evaluation, from case to case."""

    target: Target
    drafter: Drafter
    new_tokens: int
    stop: Collection[int]
    timed: bool
    tree_budget: int
    report: Report | None
    doing: str = ""
    said: float = 0.0

    def tick(self) -> None:
        if self.report is not None and time.monotonic() - self.said >= 1:
            self.said = time.monotonic()
            self.report(self.doing)

    def evaluate(self, case: Case, texts: dict[str, Own]) -> Row:
        started = self.said = time.monotonic()
        choices = [Choice(case.temperature, seed=number) for number in range(len(case.prompts))]
        if self.timed:
            self._warm_up(case.prompts[0])
        elif case.name not in texts:
            texts[case.name] = self._own_texts(case, choices)
        own: Own = []
        sums = _Sums()
        lookup = PromptLookup(self.drafter.config.block_size)
        for number, (prompt, choice) in enumerate(zip(case.prompts, choices, strict=True)):
            self.doing = f"speculative decoding of {case.name}: {number} of {len(case.prompts)} prompts"
            theirs, leads = self._alone(prompt, choice) if self.timed else texts[case.name][number]
            own.append((theirs, leads))
            ours = self._speculative(prompt, choice)
            sums.cycles += ours.cycles
            sums.lookup_cycles += replay(lookup, theirs)
            sums.seconds += ours.seconds
            sums.plain_seconds += theirs.seconds
            sums.identical += self._compare(ours, theirs, leads, case.temperature, sums)
            if self.tree_budget:
                tree = self._tree(prompt, choice)
                sums.tree_cycles += tree.cycles
                sums.tree_identical += self._compare(tree, theirs, leads, case.temperature, sums)
        return self._row(case, own, sums, time.monotonic() - started)

    def _row(self, case: Case, own: Own, sums: _Sums, seconds: float) -> Row:
        added = Counter(sums.cycles)
        distinct = [distinct_ngrams(text.continuation) for text, _ in own]
        tokens = sum(len(text.continuation) for text, _ in own)
        later = tokens - len(own)  # without the first ones, which the prefill gives
        return Row(
            label=case.label,
            temperature=case.temperature,
            prompts=len(case.prompts),
            tokens=tokens,
            tau=sum(sums.cycles) / max(len(sums.cycles), 1),
            lookup_tau=sum(sums.lookup_cycles) / max(len(sums.lookup_cycles), 1),
            distinct3=sum(distinct) / len(distinct),
            identical=sums.identical,
            lead_at_difference=max(sums.leads, default=None),
            histogram=[added[count] for count in range(1, self.drafter.config.block_size + 1)],
            seconds=seconds,
            beyond_rounding=sums.beyond,
            tokens_per_second=later / max(sums.seconds, 1e-9) if self.timed else None,
            plain_tokens_per_second=later / max(sums.plain_seconds, 1e-9) if self.timed else None,
            tree_budget=self.tree_budget,
            tree_tau=sum(sums.tree_cycles) / max(len(sums.tree_cycles), 1) if self.tree_budget else None,
            tree_identical=sums.tree_identical if self.tree_budget else None,
        )

    # -- ways of decoding --------------------------------------------------------------------

    def _own_texts(self, case: Case, choices: Sequence[Choice]) -> Own:
        """Each prompt's plain continuation and the lead of each of its tokens; those of one length side by
        side.
        """
        prompts = case.prompts
        found: dict[int, tuple[Decoded, list[float]]] = {}
        for members in _by_length(prompts):
            chosen = [choices[i] for i in members]
            group = f"prompts {len(found) + 1} to {len(found) + len(members)} of {len(prompts)}"
            passes = 0

            def tick(group: str = group) -> None:
                nonlocal passes
                passes += 1
                self.doing = (
                    f"the target's own continuations of {case.name}: {group}, token {passes} of "
                    f"{self.new_tokens}"
                )
                self.tick()

            texts, leads = plain(
                self.target, [prompts[i] for i in members], self.new_tokens, chosen, self.stop, tick
            )
            found.update(zip(members, zip(texts, leads, strict=True), strict=True))
        return [found[i] for i in range(len(prompts))]

    def _alone(self, prompt: Sequence[int], choice: Choice) -> tuple[Decoded, list[float]]:
        texts, leads = plain(self.target, [prompt], self.new_tokens, [choice], self.stop, self.tick)
        return texts[0], leads[0]

    def _speculative(self, prompt: Sequence[int], choice: Choice) -> Decoded:
        proposer = BlockDrafter(self.target, self.drafter)
        return speculative(self.target, proposer, prompt, self.new_tokens, choice, self.stop, self.tick)

    def _tree(self, prompt: Sequence[int], choice: Choice) -> Decoded:
        proposer = BlockDrafter(self.target, self.drafter)
        return tree_speculative(
            self.target, proposer, prompt, self.new_tokens, self.tree_budget, choice, self.stop, self.tick
        )

    def _warm_up(self, prompt: Sequence[int]) -> None:
        """What is done for the first time takes longer, and is not what is timed."""
        plain(self.target, [prompt], 4)
        speculative(self.target, BlockDrafter(self.target, self.drafter), prompt, 4)

    # -- losslessness ------------------------------------------------------------------------

    def _compare(
        self, ours: Decoded, theirs: Decoded, leads: Sequence[float], temperature: float, sums: _Sums
    ) -> bool:
        """Whether both are one text; else it is noted by how much the target had preferred its own."""
        if ours.tokens == theirs.tokens:
            return True
        lead = leads[_first_difference(ours, theirs)]
        sums.leads.append(lead)
        sums.beyond += lead > self._rounding(ours, theirs, temperature)
        return False

    @torch.no_grad()
    def _rounding(self, ours: Decoded, theirs: Decoded, temperature: float) -> float:
        """By how much scores may differ between two ways of computing them where the texts part: a few
        roundings of the largest logit there.
        """
        end = theirs.prompt + _first_difference(ours, theirs)
        ids = torch.tensor([theirs.tokens[:end]], device=self.target.device)
        logits = self.target.head(self.target.features(ids)[1][:, -1])
        rounding = torch.finfo(logits.dtype).eps * float(logits.abs().max())
        return ROUNDINGS * rounding / (temperature or 1.0)


@dataclass
class _Sums:
    """What is pooled over the prompts of a case."""

    cycles: list[int] = field(default_factory=list)
    lookup_cycles: list[int] = field(default_factory=list)
    tree_cycles: list[int] = field(default_factory=list)
    leads: list[float] = field(default_factory=list)  # where a text differs
    beyond: int = 0
    identical: int = 0
    tree_identical: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0


def _by_length(prompts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    for length in sorted({len(prompt) for prompt in prompts}):
        yield [i for i, prompt in enumerate(prompts) if len(prompt) == length]


def _first_difference(ours: Decoded, theirs: Decoded) -> int:
    """The number of the first token of the continuations that differs; of the last one where one text goes
    on after the other's end.
    """
    pairs = list(zip(ours.continuation, theirs.continuation, strict=False))
    return next((i for i, (mine, its) in enumerate(pairs) if mine != its), len(pairs) - 1)


# -- records -------------------------------------------------------------------------------------------


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(row) for row in rows]


def from_json(values: Sequence[dict[str, Any]]) -> list[Row]:
    """The reverse of `as_json`, for rows kept in a checkpoint."""
    return [Row(**value) for value in values]


def metrics(rows: Sequence[Row]) -> dict[str, float]:
    """For heartbeat and events: every row's acceptance length, and prompt lookup's, by what was decoded:
    tau/known, tau/held_out, tau/known_T0.7, tau_prompt_lookup/known, …
    """
    found = {}
    for row in rows:
        if not row.drafted:
            continue
        name = re.sub(r"\W+", "_", row.label.removesuffix(" text"))
        if row.temperature:
            name += f"_T{row.temperature:g}"
        found[f"tau/{name}"] = row.tau
        found[f"tau_prompt_lookup/{name}"] = row.lookup_tau
    return found
