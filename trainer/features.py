"""The target's features of a micro-batch: computed as it comes, or once and kept."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trainer.data import Batch, Reader
from trainer.target import Target


class Features:
    """Tapped hidden states of a micro-batch's rows, [b, S, K·H].

    With `keep` each document is computed once and kept in memory (4 bytes · tokens · K · H for float32).
    Documents are computed in fixed groups of like length, whichever of them is asked for first: rounding
    depends on the shape of a batch, and a run that resumes must get the same bits as one that was never
    stopped.
    """

    def __init__(self, target: Target, reader: Reader, *, keep: bool) -> None:
        self.target = target
        self.reader = reader
        self.keep = keep
        self._kept: dict[int, Tensor] = {}
        self._groups: list[np.ndarray] = reader.groups() if keep else []
        self._group_of = {int(i): number for number, group in enumerate(self._groups) for i in group}

    def __call__(self, batch: Batch) -> Tensor:
        if not self.keep or not batch.documents:  # none: a micro-batch that only has the size of one
            return self.target.features(batch.input_ids, batch.positions)[0]
        for number in sorted({self._group_of[i] for i in batch.documents if i not in self._kept}):
            self._compute(self._groups[number])
        taps = [self._kept[i] for i in batch.documents]
        out = taps[0].new_zeros(*batch.input_ids.shape, taps[0].shape[1])
        for (row, start), kept in zip(batch.places, taps, strict=True):
            out[row, start : start + len(kept)] = kept
        return out

    def _compute(self, group: np.ndarray) -> None:
        ids = self.reader.padded(group)
        taps, _ = self.target.features(torch.from_numpy(ids).to(self.target.device))
        for document, row in zip(group, taps, strict=True):
            self._kept[int(document)] = row[: self.reader.length(int(document))].clone()
