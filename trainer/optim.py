"""AdamW over flat buffers, its schedule and clipping."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

BETAS = (0.9, 0.95)


def learning_rate(step: int, total: int, peak: float, warmup_ratio: float) -> float:
    """The rate of step 1 … total: linear to `peak` over the warm-up, then half a cosine towards zero."""
    warmup = math.ceil(warmup_ratio * total)
    if step <= warmup:
        return peak * step / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup + 1)))


class Optimizer:
    """AdamW with one update for all matrices and one for all vectors (norms), which do not decay.

    The parameters of the module become views of two flat buffers, and so do their gradients: a step is a
    handful of operations instead of one per parameter, which on a small drafter is the difference between 5
    ms and 1 ms.
    """

    def __init__(self, module: nn.Module, weight_decay: float) -> None:
        named = list(module.named_parameters())
        matrices = [(n, p) for n, p in named if p.dim() > 1]
        vectors = [(n, p) for n, p in named if p.dim() <= 1]
        self._flat = [_flatten(group) for group in (matrices, vectors) if group]
        self._members = [group for group in (matrices, vectors) if group]
        decays = [weight_decay if group is matrices else 0.0 for group in (matrices, vectors) if group]
        self._adam = torch.optim.AdamW(
            [{"params": [flat], "weight_decay": d} for flat, d in zip(self._flat, decays, strict=True)],
            betas=BETAS,
            fused=True,
        )
        for flat in self._flat:  # made now, so that a checkpoint can be read into it
            self._adam.state[flat] = {
                "step": torch.zeros((), dtype=torch.float32, device=flat.device),
                "exp_avg": torch.zeros_like(flat),
                "exp_avg_sq": torch.zeros_like(flat),
            }

    @property
    def _gradients(self) -> list[Tensor]:
        return [flat.grad for flat in self._flat if flat.grad is not None]

    def step(self, rate: float, divisor: float, clip: float) -> float | None:
        """Apply the summed gradients divided by `divisor`, their norm clipped to `clip` (0: not); then clear
        them.

        Returns the norm before clipping; None if it was not finite: then nothing was changed but the
        gradients, which are cleared.
        """
        norm = float(torch.stack([g.norm() for g in self._gradients]).norm()) / divisor
        finite = math.isfinite(norm)
        if finite:
            scale = min(1.0, clip / (norm + 1e-12)) if clip > 0 else 1.0
            for gradient in self._gradients:
                gradient.mul_(scale / divisor)
            for group in self._adam.param_groups:
                group["lr"] = rate
            self._adam.step()
        for gradient in self._gradients:
            gradient.zero_()
        return norm if finite else None

    def state(self) -> dict[str, Tensor]:
        """The moments under their parameters' names (so that another layout of buffers can read them)."""
        found = {"step": self._adam.state[self._flat[0]]["step"]}
        for kind in ("exp_avg", "exp_avg_sq"):
            for flat, members in zip(self._flat, self._members, strict=True):
                for (name, _), view in zip(
                    members, _views(self._adam.state[flat][kind], members), strict=True
                ):
                    found[f"{kind}.{name}"] = view
        return found

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """The reverse of `state`. Raises KeyError or RuntimeError if it belongs to another drafter."""
        for name, value in self.state().items():
            value.copy_(state[name])
        for flat in self._flat[1:]:
            self._adam.state[flat]["step"].copy_(state["step"])


Members = list[tuple[str, nn.Parameter]]


def _flatten(members: Members) -> nn.Parameter:
    """One buffer for all members, which become views of it; the same for their gradients."""
    flat = nn.Parameter(torch.cat([p.detach().reshape(-1) for _, p in members]))
    flat.grad = torch.zeros_like(flat)
    values, gradients = _views(flat.data, members), _views(flat.grad, members)
    for (_, parameter), value, gradient in zip(members, values, gradients, strict=True):
        parameter.data = value
        parameter.grad = gradient
    return flat


def _views(flat: Tensor, members: Members) -> list[Tensor]:
    parts = flat.split([p.numel() for _, p in members])
    return [part.view(p.shape) for part, (_, p) in zip(parts, members, strict=True)]
