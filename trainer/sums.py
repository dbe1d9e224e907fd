"""The gradient of a step: a sum over its micro-batches, wherever these were trained on."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.optim import Optimizer
from trainer.world import World


class GradientSum:
    """Adds the micro-batches of a step up, in this process and over the team.

    On a CPU in float64: then the float32 that comes out does not depend on how the micro-batches were spread
    over processes, and neither does anything that is learnt. In float32 it is another one in its last bits,
    which a training that follows tiny gradients turns into another loss within some twenty steps. On a GPU
    that would take 8 more bytes a parameter, so there the sum is as the hardware makes it.
    """

    def __init__(self, world: World, optimizer: Optimizer, device: torch.device, per_step: int) -> None:
        self._world = world
        self._optimizer = optimizer
        self._weight = torch.zeros((), dtype=torch.float64, device=device)
        exact = device.type == "cpu" and per_step > 1
        self._sums = [torch.zeros_like(g, dtype=torch.float64) for g in optimizer.gradients] if exact else []

    def add(self, weight: Tensor | float) -> None:
        """A micro-batch's gradient has been added to the parameters'; `weight`: its Σ w."""
        self._weight += weight
        for total, gradient in zip(self._sums, self._optimizer.gradients, strict=False):
            total += gradient
            gradient.zero_()

    def close(self) -> Tensor:
        """Put the whole sum into the parameters' gradients, in every process of the team; the whole Σ w."""
        gradients = self._optimizer.gradients
        self._world.sum_([self._weight, *(self._sums or gradients)])
        for total, gradient in zip(self._sums, gradients, strict=False):
            gradient.copy_(total)
            total.zero_()
        weight = self._weight.to(torch.float32)
        self._weight.zero_()
        return weight
