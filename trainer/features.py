"""The target's hidden states of a micro-batch: computed as it comes, or once and kept."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trainer.data import Batch, Reader
from trainer.target import Target
from trainer.waiting import Waits


class Features:
    """Tapped hidden states of a micro-batch's rows, [b, S, K·H], and the last ones, [b, S, H].

    With `keep` each document is computed once and kept in memory (4 bytes · tokens · K · H for float32).
    Documents are computed in fixed groups of like length, whichever of them is asked for first: rounding
    depends on the shape of a batch, and a run that resumes must get the same bits as one that was never
    stopped. The last hidden states are kept, as one layer more, only with `keep_last`.
    """

    def __init__(self, target: Target, reader: Reader, *, keep: bool, keep_last: bool = False) -> None:
        self.target = target
        self.reader = reader
        self.keep = keep
        self.keep_last = keep_last
        self._kept: dict[int, list[Tensor]] = {}
        self._groups: list[np.ndarray] = reader.groups() if keep else []
        self._group_of = {int(i): number for number, group in enumerate(self._groups) for i in group}

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """(taps, the last hidden states; None if they are not kept)"""
        if not self.keep or not batch.documents:  # none: a micro-batch that only has the size of one
            return self.target.features(batch.input_ids, batch.positions)
        for number in sorted({self._group_of[i] for i in batch.documents if i not in self._kept}):
            self._compute(self._groups[number])
        kept = zip(*(self._kept[i] for i in batch.documents), strict=True)
        taps, *last = (_placed(list(rows), batch) for rows in kept)
        return taps, last[0] if last else None

    def last(self, batch: Batch) -> Tensor:
        """The last hidden states, computed if they are not kept."""
        found = self(batch)[1] if self.keep_last else None
        return self.target.features(batch.input_ids, batch.positions)[1] if found is None else found

    def _compute(self, group: np.ndarray) -> None:
        ids = self.reader.padded(group)
        found = self.target.features(torch.from_numpy(ids).to(self.target.device))
        for document, *rows in zip(group, *found[: 1 + self.keep_last], strict=True):
            length = self.reader.length(int(document))
            self._kept[int(document)] = [row[:length].clone() for row in rows]


class Here:
    """Features that this process computes itself, when they are wanted."""

    def __init__(self, features: Features) -> None:
        self._features = features
        self.waits = Waits()

    def __call__(self, number: int | None, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """(taps [b, C, K·H] of the context, the last hidden states [b, S, H]; None if they are not kept)"""
        taps, last = self._features(batch)
        return taps[:, : batch.blocks.context_length], last

    def has_last(self, number: int) -> bool:
        return True

    def last(self, batch: Batch) -> Tensor | None:
        """The last hidden states, computed if they are not kept."""
        return self._features.last(batch)

    def skip(self, number: int, batch: Batch) -> None:
        """Nothing of this micro-batch is wanted."""

    def release(self) -> None:
        """What was handed out is no longer needed."""

    def end(self) -> None:
        """Nothing more is wanted for now."""


def _placed(documents: list[Tensor], batch: Batch) -> Tensor:
    """States of documents [·, W] where these lie in the batch, zero elsewhere: [b, S, W]."""
    out = documents[0].new_zeros(*batch.input_ids.shape, documents[0].shape[1])
    for (row, start), states in zip(batch.places, documents, strict=True):
        out[row, start : start + len(states)] = states
    return out
