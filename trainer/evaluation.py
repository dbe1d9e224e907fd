"""Acceptance length by real speculative decoding, before and after training: prompts, records, the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from trainer.data import Completions
from trainer.drafter import Drafter
from trainer.target import Target

TEMPERATURES = (0.0, 0.7)
Prompts = dict[str, list[list[int]]]
Results = dict[str, Any]


def prompts_of(completions: Completions, count: int) -> Prompts:
    """The first `count` documents' beginnings: all before the first token that the target produced."""
    found: list[list[int]] = []
    for index in range(len(completions)):
        ids, mask = completions.document(index)
        start = int(np.argmax(mask != 0))
        if start:
            found.append([int(i) for i in ids[:start]])
        if len(found) == count:
            break
    return {"training prompts": found}


def run(
    target: Target, drafter: Drafter, prompts: Prompts, new_tokens: int, report: Callable[[str], None]
) -> Results:
    """{temperature as text: what `decode.evaluate` found at it}."""
    from trainer import decode

    return {
        f"{temperature:g}": decode.evaluate(target, drafter, prompts, new_tokens, temperature, report)
        for temperature in TEMPERATURES
    }


def metrics(results: Results) -> dict[str, float]:
    """The acceptance length of the first group of prompts at temperature 0, for heartbeat and events."""
    groups = results.get("0", {})
    first = next((g for g in groups.values() if isinstance(g, dict) and "tau" in g), None)
    return {"tau": float(first["tau"])} if first else {}


def show(results: dict[str, Results], say: Callable[[str], None]) -> None:
    """Print the groups of prompts with their numbers, before and after side by side where both are known."""
    before, after = results.get("before", {}), results.get("after", {})
    for temperature in after or before:
        for group, now in (after or before)[temperature].items():
            then = before.get(temperature, {}).get(group, {}) if after else {}
            cells = [f"{name} {_both(then.get(name), value)}" for name, value in now.items()]
            say(f"T={temperature} · {group} · " + " · ".join(cells))


def _both(then: Any, now: Any) -> str:
    return _text(now) if then is None or then == now else f"{_text(then)} → {_text(now)}"


def _text(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
