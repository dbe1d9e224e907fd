"""Noise on the context features, so that a drafter tolerates features that are a little off when it serves.

Off by default. Its strength falls (or rises) along a straight line over the run. What is drawn for a document
depends on the seed, the epoch and the document alone, so a run that resumes repeats it bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_STREAM = 1  # tells these draws from those of the anchors, which have the same seeds


@dataclass(frozen=True)
class Noise:
    """`start` and `end` are the strength at the first and at the last step of the run.

    "uniform" adds (rand - 1/2) · 2 · strength, "gaussian" adds randn · strength.
    """

    start: float = 0.0
    end: float = 0.0
    kind: str = "uniform"
    seed: int = 0

    def __bool__(self) -> bool:
        return bool(self.start or self.end)

    def strength(self, step: int, total: int) -> float:
        """That of optimiser step 1 … `total`."""
        return self.start + (self.end - self.start) * (step - 1) / max(total - 1, 1)

    def add(
        self, features: Tensor, spans: Sequence[tuple[int, int, int, int]], epoch: int, strength: float
    ) -> Tensor:
        """`features` [rows, C, width] with noise where they belong to a document; padding stays as it is.

        `spans`: (document, its row, first position, tokens) of each. Nothing here waits for a GPU.
        """
        if not strength:
            return features
        noisy = features.clone()  # they may be cached, or the target's own
        width = features.shape[-1]
        for document, row, begin, length in spans:
            seen = min(length, features.shape[1] - begin)
            if seen <= 0:
                continue
            seeds = np.random.SeedSequence([self.seed, epoch, document, _STREAM]).generate_state(2, np.uint32)
            random = torch.Generator(features.device)
            random.manual_seed(int(seeds[0]) << 31 ^ int(seeds[1]))
            # Always for the whole document: how much of it the context has must not change what is drawn.
            shape = (length, width)
            if self.kind == "uniform":
                drawn = torch.rand(shape, generator=random, device=features.device).sub_(0.5).mul_(2)
            else:
                drawn = torch.randn(shape, generator=random, device=features.device)
            noisy[row, begin : begin + seen] += (drawn[:seen] * strength).to(features.dtype)
        return noisy
