"""Numbers that are none: in weights, in the target's features, in gradients.

Looking at a number makes the host wait for a GPU. So what is looked at in every step leaves a small tensor
behind, and those are read together: at each step on a CPU, where it costs nothing, else now and then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from trainer.errors import InputError
from trainer.monitor import say

NOT_FINITE = 3  # exit code of a training that can only go on with other settings


class Diverged(InputError):
    """Too many steps in a row had no finite gradient."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code=NOT_FINITE)


def first_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first tensor that holds NaN or infinity; each device is waited for once."""
    named = [(name, value) for name, value in tensors if value.is_floating_point() and value.numel()]
    flags = [torch.isfinite(value.detach()).all() for _, value in named]
    by_device: dict[torch.device, list[int]] = {}
    for number, one in enumerate(flags):
        by_device.setdefault(one.device, []).append(number)
    for numbers in by_device.values():
        whole = torch.stack([flags[i] for i in numbers]).tolist()
        for number, fine in zip(numbers, whole, strict=True):
            if not fine:
                return named[number][0]
    return None


class FeatureCheck:
    """Notes which rows of which micro-batch had features that are not finite."""

    def __init__(self) -> None:
        self._noted: list[tuple[Tensor, list[list[int]]]] = []

    def note(self, features: Tensor, spans: Sequence[tuple[int, int, int, int]]) -> None:
        """features [rows, S, width]; `spans` (`Batch.spans`) say which documents are in them."""
        # A sum in float32 is finite exactly if all of its terms are: they are far from float32's end.
        fine = torch.isfinite(features.sum(dim=(1, 2), dtype=torch.float32))
        of_row: list[list[int]] = [[] for _ in range(len(features))]
        for document, row, _, _ in spans:
            of_row[row].append(document)
        self._noted.append((fine, of_row))

    def read(self) -> list[int]:
        """The documents of the rows that were not finite since the last time."""
        noted, self._noted = self._noted, []
        if not noted or bool(torch.cat([fine for fine, _ in noted]).all()):
            return []
        bad: dict[int, None] = {}
        for fine, of_row in noted:
            for row, right in enumerate(fine.tolist()):
                if not right:
                    bad.update(dict.fromkeys(of_row[row]))
        return list(bad)


class LostSteps:
    """Counts steps whose gradient was not finite: they change nothing."""

    def __init__(self, most: int, device: torch.device) -> None:
        self.total = self.in_a_row = 0  # as of the last look
        self._most = most
        self._counts = torch.zeros(3, dtype=torch.int64, device=device)  # all, in a row, most in a row
        self._since = 0  # steps noted since the last look

    def note(self, norm: Tensor | float | None) -> None:
        """The norm of a step's gradient; None is known already not to be finite."""
        lost = torch.ones((), dtype=torch.bool) if norm is None else ~torch.isfinite(torch.as_tensor(norm))
        lost = lost.to(self._counts.device, non_blocking=True)
        row = torch.where(lost, self._counts[1] + 1, 0)
        self._counts = torch.stack([self._counts[0] + lost, row, torch.maximum(self._counts[2], row)])
        self._since += 1

    @property
    def due(self) -> bool:
        """Whether it is time to look: always on a CPU; on a GPU often enough to end a run that diverges."""
        return self._counts.device.type == "cpu" or self._since >= self._most

    def read(self) -> int:
        """How many steps were lost since the last look. Raises Diverged beyond the most in a row."""
        self._since = 0
        total, self.in_a_row, longest = self._counts.tolist()
        new, self.total = total - self.total, total
        if longest >= self._most:
            raise Diverged(
                f"{longest} steps in a row had a gradient that is not finite and changed nothing, so the "
                "training has diverged; the last checkpoint is from before: go on from it with a lower --lr, "
                "or without the documents that were named"
            )
        return new


class Watch:
    """Both for a run: what is noted in its steps, and said when there is time for it."""

    def __init__(self, most: int, device: torch.device) -> None:
        self.features = FeatureCheck()
        self.steps = LostSteps(most, device)

    def look(self, step: int) -> None:
        """Say what of the steps up to `step` came to nothing. Raises Diverged if it is too much."""
        for document in self.features.read():
            say(
                f"warning: document {document}: the target's features are not finite, so a step that it is "
                "in changes nothing"
            )
        if lost := self.steps.read():
            which = f"{lost} of the steps up to step {step}" if lost > 1 else f"step {step}"
            say(f"warning: {which} had a gradient that is not finite and changed nothing")
