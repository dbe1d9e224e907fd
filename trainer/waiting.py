"""Who waits for whom, of the processes that run the target and those that train the drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

AHEAD = 2  # micro-batches that there is room for, at each end
SHORT = 0.1  # of the time: who waits so much more than the others has too few of them


@dataclass
class Waits:
    """What was waited for since it was read last; seconds."""

    drafters: float = 0.0  # for features
    targets: float = 0.0  # for a drafter that has room
    computed: float = 0.0  # of targets, meanwhile
    depth: int = 0  # features that were there when they were wanted, summed over …
    taken: int = 0  # … so many micro-batches

    def take(self) -> list[float]:
        values = [self.drafters, self.targets, self.computed, float(self.depth), float(self.taken)]
        self.drafters = self.targets = self.computed = 0.0
        self.depth = self.taken = 0
        return values


def waiting(sums: Sequence[float], seconds: float, *, drafters: int) -> dict[str, Any]:
    """What a log line says, of the sums of `Waits.take` over all `drafters` in `seconds`."""
    for_features, for_room, computed, depth, taken = sums
    of_drafters = for_features / max(seconds * drafters, 1e-9)
    of_targets = for_room / max(for_room + computed, 1e-9)
    short = None
    if abs(of_drafters - of_targets) > SHORT:
        short = "targets" if of_drafters > of_targets else "drafters"
    queue = depth / taken if taken else 0.0
    return {"waiting": {"drafters": of_drafters, "targets": of_targets, "queue": queue, "short": short}}


def described(found: dict[str, Any]) -> str:
    """``queue 0.3/2, waiting: targets 2 %, drafters 41 % (targets are short)``"""
    short = f" ({found['short']} are short)" if found["short"] else ""
    return (
        f"queue {found['queue']:.1f}/{AHEAD}, waiting: targets {found['targets']:.0%}, "
        f"drafters {found['drafters']:.0%}{short}"
    )
