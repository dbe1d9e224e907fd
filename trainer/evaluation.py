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
from dataclasses import dataclass
from typing import Any

from trainer.data import Completions
from trainer.drafter import Drafter
from trainer.speculative import BlockDrafter, Choice, Decoded, PromptLookup, plain, replay, speculative
from trainer.target import Target

SAMPLING = 0.7  # temperature of the sampled row
LONGEST_PROMPT = 512  # tokens; the front of a longer one is cut away

Prompts = Mapping[str, Sequence[Sequence[int]]]
Report = Callable[[str], None]


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

    @property
    def name(self) -> str:
        return _name(self.label, self.temperature)

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
        ids, mask = completions.document(number * len(completions) // count)
        start = int((mask != 0).argmax())
        if start:
            prompts.append([int(i) for i in ids[max(0, start - LONGEST_PROMPT) : start]])
    fewer = max(1, count // 2)
    return [Case("training prompts", prompts), Case("training prompts", prompts[:fewer], SAMPLING)]


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
) -> list[Row]:
    """Decode every case with the drafter, and once more plainly, and compare.

    `report` is told what is being decoded, about once a second; what it raises ends the evaluation. `target`
    must be tapped at the drafter's layers. Raises InputError if the target's cache cannot be cut back.
    """
    return [_evaluate(target, drafter, case, new_tokens, report, stop) for case in cases if case.prompts]


def _evaluate(
    target: Target,
    drafter: Drafter,
    case: Case,
    new_tokens: int,
    report: Report | None,
    stop: Collection[int],
) -> Row:
    started = said = time.monotonic()
    doing = ""

    def tick() -> None:
        nonlocal said
        if report is not None and time.monotonic() - said >= 1:
            said = time.monotonic()
            report(doing)

    choices = [Choice(case.temperature, seed=number) for number in range(len(case.prompts))]
    doing = f"the target's own continuations of {case.name}: {len(case.prompts)} prompts"
    own = _own_texts(target, case.prompts, choices, new_tokens, stop, tick)
    lookup = PromptLookup(drafter.config.block_size)
    cycles: list[int] = []
    lookup_cycles: list[int] = []
    leads: list[float] = []
    for number, (prompt, choice) in enumerate(zip(case.prompts, choices, strict=True)):
        doing = f"speculative decoding of {case.name}: {number} of {len(case.prompts)} prompts"
        theirs, margins = own[number]
        ours = speculative(target, BlockDrafter(target, drafter), prompt, new_tokens, choice, stop, tick)
        cycles += ours.cycles
        lookup_cycles += replay(lookup, theirs)
        if ours.tokens != theirs.tokens:
            leads.append(_lead_where_they_part(ours, theirs, margins))
    added = Counter(cycles)
    distinct = [distinct_ngrams(text.continuation) for text, _ in own]
    return Row(
        label=case.label,
        temperature=case.temperature,
        prompts=len(case.prompts),
        tokens=sum(len(text.continuation) for text, _ in own),
        tau=sum(cycles) / max(len(cycles), 1),
        lookup_tau=sum(lookup_cycles) / max(len(lookup_cycles), 1),
        distinct3=sum(distinct) / len(distinct),
        identical=len(case.prompts) - len(leads),
        lead_at_difference=max(leads, default=None),
        histogram=[added[count] for count in range(1, drafter.config.block_size + 1)],
        seconds=time.monotonic() - started,
    )


def _own_texts(
    target: Target,
    prompts: Sequence[Sequence[int]],
    choices: Sequence[Choice],
    new_tokens: int,
    stop: Collection[int],
    tick: Callable[[], None],
) -> list[tuple[Decoded, list[float]]]:
    """Each prompt's plain continuation and the lead of each of its tokens; those of one length side by
    side.
    """
    found: dict[int, tuple[Decoded, list[float]]] = {}
    for members in _by_length(prompts):
        texts, leads = plain(
            target, [prompts[i] for i in members], new_tokens, [choices[i] for i in members], stop, tick
        )
        found.update(zip(members, zip(texts, leads, strict=True), strict=True))
    return [found[i] for i in range(len(prompts))]


def _by_length(prompts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    for length in sorted({len(prompt) for prompt in prompts}):
        yield [i for i, prompt in enumerate(prompts) if len(prompt) == length]


def _lead_where_they_part(ours: Decoded, theirs: Decoded, leads: Sequence[float]) -> float:
    pairs = list(zip(ours.continuation, theirs.continuation, strict=False))
    first = next((i for i, (mine, its) in enumerate(pairs) if mine != its), len(pairs) - 1)
    return leads[first]


# -- records and the table ---------------------------------------------------------------------------------


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


def table(rows: Sequence[Row], title: str, before: Sequence[Row] | None = ()) -> list[str]:
    """The rows for people, aligned. With `before`, the same rows measured earlier, τ reads "1.00 → 2.61".

    `before` is None if what was measured earlier cannot be compared; then τ reads "– → 2.61".
    """
    earlier = {row.name: _tau(row) for row in before or ()}
    cells = [(title, "τ", "prompt lookup's τ", "distinct 3-grams", "text = target's own")]
    for row in rows:
        then = "–" if before is None else earlier.get(row.name)
        cells.append(
            (
                row.name,
                _tau(row) if then is None else f"{then} → {_tau(row)}",
                f"{row.lookup_tau:.2f}" if row.drafted else "–",
                f"{row.distinct3:.2f}",
                f"{row.identical}/{row.prompts}",
            )
        )
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = []
    for name, *numbers in cells:
        aligned = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *aligned]))
    for row in rows:
        if not row.drafted:
            lines.append(f"{row.name}: every text ended with its first token, so nothing could be drafted")
        if row.lead_at_difference is not None:
            lines.append(
                f"{row.name}: {row.prompts - row.identical} texts differ; where they part, the target had "
                f"preferred its own token by {row.lead_at_difference:.2g} logits at most"
            )
    return lines


def _tau(row: Row) -> str:
    return f"{row.tau:.2f}" if row.drafted else "–"
