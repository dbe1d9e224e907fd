"""What a drafter's progress is told by, from the logits of the loss: no product with the vocabulary more.

Of every micro-batch: loss and its parts, τ̂, and for each slot its accuracy and its conditional
acceptance. Of one micro-batch now and then, since it takes time: how often the label is among the K most
probable tokens, how deep the text gets in a draft tree (`trainer.tree`), and whether the data is what the
target itself would write (that alone takes products, of a few blocks). All of it is kept on the device
and read when a log line is due: nothing in a step waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.agreement import FOREIGN
from trainer.blocks import Blocks
from trainer.data import Batch
from trainer.loss import Top, Visit
from trainer.tree import depths

RECALL = (1, 2, 4, 8, 16)  # K
BUDGETS = (16, 32, 64)  # nodes of a tree
TOP = max(*RECALL, *BUDGETS)  # a tree of n nodes never needs a slot's tokens beyond the first n
EVERY = 100  # micro-batches from one look to the next, at least
FOLD = 64  # micro-batches that are kept one by one until they are summed
ENOUGH = 500  # labels, before anything is said of the data


@dataclass(frozen=True)
class Look:
    """What is kept of a micro-batch that is looked at; n sampled blocks, B - 1 slots."""

    recall: Tensor  # [len(RECALL), B - 1] labels that are among the K
    labelled: Tensor  # [B - 1]
    logs: Tensor  # [n, B - 1, TOP] log-probabilities, falling
    rank: Tensor  # [n, B - 1] of the label among them
    valid: Tensor  # [n, B - 1] bool: there is a label
    agrees: Tensor | None  # [n, B - 1] bool: the label is the target's own choice
    drafted: Tensor | None  # [n, B - 1] bool: the drafter's choice is the target's


@dataclass
class Sums:
    """What one process has summed."""

    values: dict[str, float]  # loss, its parts, weight
    slots: list[list[int]]  # [4][B - 1]: labelled, right, right up to here, right before here
    blocks: int
    look: tuple[dict[str, Any], dict[str, list[float | None]]] | None = None

    def add(self, other: Sums) -> None:
        for name, value in other.values.items():
            self.values[name] = self.values.get(name, 0.0) + value
        self.slots = [
            [a + b for a, b in zip(mine, theirs, strict=True)]
            for mine, theirs in zip(self.slots, other.slots, strict=True)
        ]
        self.blocks += other.blocks
        self.look = self.look or other.look


class Tally:
    """Sums over the micro-batches from one log line to the next. `sample`: blocks of a look; 0: no looks."""

    def __init__(self, block_size: int, device: torch.device, sample: int) -> None:
        self.block_size = block_size
        self.sample = sample
        self.same = self.seen = 0  # labels that are the target's choice, of so many, since the start
        self._warned = False
        self._since: int | None = None  # micro-batches since the last look, its own included
        self._device = device
        self._clear()

    def _clear(self) -> None:
        self._values: list[dict[str, Tensor]] = []  # of micro-batches that are not in the sums yet
        self._outcomes: list[Tensor] = []  # of the same: [N·B] 0 without a label, 1 wrong, 2 right
        self._sums: dict[str, Tensor] = {}
        self._slots = torch.zeros(4, self.block_size - 1, dtype=torch.int64, device=self._device)
        self._blocks = 0
        self._look: Look | None = None

    def due(self) -> bool:
        """Whether the coming micro-batch should be looked at."""
        if not self.sample or self._look:
            return False
        return self._since is None or self._since >= EVERY

    def add(self, visit: Visit, rows: Tensor, blocks: Blocks) -> None:
        """Take in the visit of a micro-batch's `rows` [M], indices into N·B."""
        self._values.append({"loss": visit.loss.detach(), "weight": visit.weight, **visit.parts})
        outcome = torch.zeros(len(blocks) * self.block_size, dtype=torch.uint8, device=self._device)
        outcome[rows] = visit.correct.to(torch.uint8) + 1
        self._outcomes.append(outcome)
        if len(self._values) == FOLD:
            self._fold()
        self._blocks += blocks.kept
        if self._since is not None:
            self._since += 1

    def _fold(self) -> None:
        """Add what was taken in to the sums: many micro-batches in few operations."""
        for name in self._values[0] if self._values else ():
            added = torch.stack([values[name] for values in self._values]).double().sum()
            self._sums[name] = self._sums[name] + added if name in self._sums else added
        if self._outcomes:
            outcomes = torch.cat(self._outcomes).view(-1, self.block_size)[:, 1:]
            labelled, right = outcomes > 0, outcomes > 1
            streak = right.cumprod(1)  # a slot without a label ends it
            reached = torch.cat([torch.ones_like(streak[:, :1]), streak[:, :-1]], 1) * labelled
            self._slots += torch.stack([labelled.sum(0), right.sum(0), streak.sum(0), reached.sum(0)])
        self._values, self._outcomes = [], []

    def look(
        self, visit: Visit, batch: Batch, last: Tensor | None, choices: Callable[[Tensor], Tensor]
    ) -> None:
        """Look at a micro-batch whose visit returned its top. `last` [b, S, H]: the target's last hidden
        states; `choices`: the most probable tokens of such rows.
        """
        assert visit.top is not None
        self._look = look(visit.top, batch, self.sample, last, choices)
        self._since = 1

    def take(self) -> Sums:
        """What was summed since the last time; begins anew. Here the device is waited for, once."""
        self._fold()
        names = list(self._sums)
        found = torch.stack([self._sums[n] for n in names]).tolist() if names else []
        taken = Sums(dict(zip(names, found, strict=True)), self._slots.tolist(), self._blocks)
        if self._look:
            taken.look = summary(self._look)
        self._clear()
        return taken

    def read(self) -> dict[str, Any]:
        """The figures since the last reading; begins anew."""
        return self.figures([self.take()])

    def figures(self, taken_by_each: Sequence[Sums]) -> dict[str, Any]:
        """The figures of what one or more processes took."""
        taken, *others = taken_by_each
        for other in others:
            taken.add(other)
        sums, blocks = taken.values, taken.blocks
        labelled, right, streak, reached = taken.slots
        weight = sums.pop("weight", 0.0)
        total, mean = sums.pop("loss", 0.0), {}
        if len(sums) > 1:  # more than cross-entropy alone
            mean["loss_parts"] = {name: _ratio(value, weight) for name, value in sums.items()}
        figures = {
            "loss": _ratio(total, weight),
            "tau_hat": 1 + sum(streak) / blocks if blocks else None,
            "accuracy": _ratio(sum(right), sum(labelled)),
            **mean,
        }
        slots: dict[str, Any] = {
            "accuracy": _ratios(right, labelled),
            "acceptance": _ratios(streak, reached),
        }
        if taken.look:
            more, recall = taken.look
            if "agreement" in more:
                self.same += int(more.pop("same"))
                self.seen += int(more.pop("seen"))
            figures |= more
            slots["recall"] = recall
        return figures | {"slots": slots}

    def warning(self) -> str | None:
        """What is to be said of the data, once."""
        if self._warned or self.seen < ENOUGH or self.same >= FOREIGN * self.seen:
            return None
        self._warned = True
        return (
            f"only {self.same / self.seen:.0%} of the labels ({self.seen:,} were looked at) are what the "
            "target would write: this data is hardly its own, so the drafter learns to guess somebody else; "
            "let the target write the answers"
        )


def look(
    top: Top, batch: Batch, sample: int, last: Tensor | None, choices: Callable[[Tensor], Tensor]
) -> Look:
    """See `Tally.look`. The sampled blocks lie evenly among the kept ones."""
    slots, size = batch.labels.shape
    device = batch.labels.device
    row = torch.full((slots * size,), -1, device=device)  # of each slot
    row[batch.rows] = torch.arange(len(batch.rows), device=device)
    ranks = torch.full((slots * size,), TOP, device=device)
    ranks[batch.rows] = top.rank
    ranks = ranks.view(slots, size)[:, 1:]
    count = min(sample, batch.blocks.kept)
    chosen = torch.tensor([i * batch.blocks.kept // count for i in range(count)], device=device)
    rows = row.view(slots, size)[chosen, 1:]
    valid, rows = rows >= 0, rows.clamp(min=0)
    agrees = drafted = None
    if last is not None:
        choice = choices(predicting(last, batch.blocks, chosen).flatten(0, 1)).view(rows.shape)
        agrees = (choice == batch.labels[chosen, 1:]) & valid
        drafted = (choice == top.first[rows]) & valid
    return Look(
        recall=torch.stack([(ranks < k).sum(0) for k in RECALL]),
        labelled=(row.view(slots, size)[:, 1:] >= 0).sum(0),
        logs=top.logs[rows],
        rank=ranks[chosen],
        valid=valid,
        agrees=agrees,
        drafted=drafted,
    )


def predicting(last: Tensor, blocks: Blocks, chosen: Tensor) -> Tensor:
    """The target's last hidden states [b, S, H] at the position before each slot of `chosen` blocks.

    [n, B - 1, H]; a slot beyond the end gets one that stands for nothing.
    """
    positions = (blocks.positions[chosen, 1:] - 1).clamp(max=last.shape[1] - 1)
    return last[blocks.rows[chosen][:, None], positions]


def summary(look: Look) -> tuple[dict[str, Any], dict[str, list[float | None]]]:
    """(figures of a look, its recall per slot)."""
    labelled, recall = look.labelled.tolist(), look.recall.tolist()
    figures: dict[str, Any] = {
        "recall": {str(k): _ratio(sum(row), sum(labelled)) for k, row in zip(RECALL, recall, strict=True)}
    }
    lengths = look.valid.cumprod(1).sum(1).tolist()  # a slot without a label ends a block
    reached = [
        depths(logs[:length], rank, BUDGETS)
        for logs, rank, length in zip(look.logs.tolist(), look.rank.tolist(), lengths, strict=True)
    ]
    figures["tree_tau"] = {
        str(budget): 1 + sum(found) / len(reached)
        for budget, found in zip(BUDGETS, zip(*reached, strict=True), strict=True)
    }
    if look.agrees is not None and look.drafted is not None:
        same, seen = int(look.agrees.sum()), int(look.valid.sum())
        figures |= {
            "agreement": _ratio(same, seen),
            "tau_hat_target": 1 + int(look.drafted.cumprod(1).sum()) / len(reached),
            "same": same,
            "seen": seen,
        }
    return figures, {str(k): _ratios(row, labelled) for k, row in zip(RECALL, recall, strict=True)}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _ratios(parts: list[int], wholes: list[int]) -> list[float | None]:
    """To four places: they are many, and each of them is a share."""
    return [None if not whole else round(part / whole, 4) for part, whole in zip(parts, wholes, strict=True)]
