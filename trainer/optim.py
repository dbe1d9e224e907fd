"""AdamW and Muon over flat buffers, their schedule and clipping."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn

BETAS = (0.9, 0.95)
EPSILON = 1e-8
PIECE = 4096

Members = list[tuple[str, nn.Parameter]]


def learning_rate(step: int, total: int, peak: float, warmup_ratio: float) -> float:
    """The rate of step 1 … total: linear to `peak` over the warm-up, then half a cosine towards zero."""
    warmup = math.ceil(warmup_ratio * total)
    if step <= warmup:
        return peak * step / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup + 1)))


class Optimizer:
    """AdamW with one update for all matrices and one for all vectors (norms), which do not decay; or Muon.

    The parameters of the module become views of flat buffers, and so do their gradients: a step is a handful
    of operations instead of one per parameter, which on a small drafter is the difference between 5 ms and 1
    ms.

    With `kind` "muon" the update of a hidden matrix is its momentum made orthogonal (Jordan et al. 2024),
    scaled to the size that AdamW's updates have, so that one learning rate serves both (Liu et al. 2025,
    arXiv 2502.16982); embeddings and vectors keep AdamW. It needs several times fewer steps on the small
    models here (docs/experiments.md).
    """

    def __init__(self, module: nn.Module, weight_decay: float, kind: str = "adamw") -> None:
        named = list(module.named_parameters())
        matrices = [(n, p) for n, p in named if p.dim() > 1]
        vectors = [(n, p) for n, p in named if p.dim() <= 1]
        hidden: Members = []
        if kind == "muon":
            hidden = [(n, p) for n, p in matrices if p.dim() == 2 and "embed" not in n]
            matrices = [(n, p) for n, p in matrices if not (p.dim() == 2 and "embed" not in n)]
        groups = [(matrices, weight_decay), (vectors, 0.0)]
        self._adam = [_AdamW(members, decay) for members, decay in groups if members]
        self._muon = _Muon(hidden, weight_decay) if hidden else None

    @property
    def gradients(self) -> list[Tensor]:
        """Flat, and summed over micro-batches; other processes' are added here before a step."""
        parts: list[_AdamW | _Muon] = [*self._adam, *([self._muon] if self._muon else [])]
        return [part.flat.grad for part in parts if part.flat.grad is not None]

    def step(self, rate: float, divisor: float | Tensor, clip: float) -> Tensor:
        """Apply the summed gradients divided by `divisor`, their norm clipped to `clip` (0: not); then clear
        them.

        Returns the norm before clipping, a scalar on the device: nothing here waits for a GPU. Where it is
        not finite nothing was changed but the gradients, which are cleared.
        """
        norm = torch.cat([_norms(gradient) for gradient in self.gradients]).norm() / divisor
        lost = ~torch.isfinite(norm)
        excess = (norm / clip).clamp(min=1.0) if clip > 0 else torch.ones_like(norm)
        scale = excess * divisor
        for part in self._adam:
            part.step(rate, scale, lost)
        if self._muon:
            self._muon.step(rate, scale, lost)
        for gradient in self.gradients:
            gradient.zero_()
        return norm

    def state(self) -> dict[str, Tensor]:
        """The moments under their parameters' names (so that another layout of buffers can read them)."""
        found = {"step": self._adam[0].steps}
        for kind in ("exp_avg", "exp_avg_sq"):
            for part in self._adam:
                views = _views(getattr(part, kind), part.members)
                found.update({f"{kind}.{n}": view for (n, _), view in zip(part.members, views, strict=True)})
        if self._muon:
            found.update({f"momentum.{name}": view for name, view in self._muon.moments()})
        return found

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """The reverse of `state`. Raises KeyError or RuntimeError if it belongs to another drafter."""
        for name, value in self.state().items():
            value.copy_(state[name])
        for part in self._adam[1:]:
            part.steps.copy_(state["step"])


class _AdamW:
    """Of parameters that decay alike. PyTorch's fused kernel without its optimizer around it, which takes
    longer than the kernel.
    """

    def __init__(self, members: Members, weight_decay: float) -> None:
        self.members = members
        self.weight_decay = weight_decay
        self.flat = _flatten(members)
        self.exp_avg = torch.zeros_like(self.flat, requires_grad=False)
        self.exp_avg_sq = torch.zeros_like(self.flat, requires_grad=False)
        self.steps = torch.zeros((), dtype=torch.float32, device=self.flat.device)

    @torch.no_grad()
    def step(self, rate: float, divisor: Tensor, lost: Tensor) -> None:
        """The gradient divided by `divisor`; where `lost`, a scalar, is true, nothing changes."""
        assert self.flat.grad is not None
        self.steps += ~lost
        torch._fused_adamw_(
            [self.flat],
            [self.flat.grad],
            [self.exp_avg],
            [self.exp_avg_sq],
            [],
            [self.steps],
            lr=rate,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=self.weight_decay,
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
            found_inf=lost.to(torch.float32),
        )


class _Muon:
    """Momentum of matrices [rows, columns], orthogonal. Matrices of one shape are updated together."""

    MOMENTUM = 0.95

    def __init__(self, members: Members, weight_decay: float) -> None:
        members = sorted(members, key=lambda member: tuple(member[1].shape))  # one shape lies together
        self.members = members
        self.weight_decay = weight_decay
        self.flat = _flatten(members)
        self.momentum = torch.zeros_like(self.flat)
        runs = [list(run) for _, run in itertools.groupby(p.shape for _, p in members)]
        self._shapes = [(len(run), *run[0]) for run in runs]

    def moments(self) -> list[tuple[str, Tensor]]:
        return [
            (n, view) for (n, _), view in zip(self.members, _views(self.momentum, self.members), strict=True)
        ]

    @torch.no_grad()
    def step(self, rate: float, divisor: Tensor, lost: Tensor) -> None:
        """The gradient divided by `divisor`; where `lost`, a scalar, is true, nothing changes."""
        assert self.flat.grad is not None
        gradient = torch.where(lost, self.momentum, self.flat.grad / divisor)  # the momentum leads to itself
        self.momentum.lerp_(gradient, 1 - self.MOMENTUM)
        ahead = gradient.lerp_(self.momentum, self.MOMENTUM)  # Nesterov's
        sizes = [math.prod(shape) for shape in self._shapes]
        taken = torch.where(lost, 0.0, rate)
        self.flat.data.mul_(1 - taken * self.weight_decay)
        for part, update, shape in zip(
            self.flat.data.split(sizes), ahead.split(sizes), self._shapes, strict=True
        ):
            scale = 0.2 * max(shape[1:]) ** 0.5  # the root mean square of AdamW's updates is about 0.2
            part.sub_(orthogonal(update.view(shape)).reshape(-1) * (taken * scale))


def orthogonal(x: Tensor) -> Tensor:
    """x [n, rows, columns] with all singular values brought close to 1, by the published quintic
    Newton-Schulz iteration; five rounds leave them between about 0.7 and 1.2, save for those near zero.
    """
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.mT if tall else x


def _norms(flat: Tensor) -> Tensor:
    """Norms of the pieces of `flat`, which as a whole has the norm of these. In one go a CPU's float32 sum
    over 50 million squares is 0.4 % off.
    """
    whole = len(flat) // PIECE * PIECE
    pieces = torch.linalg.vector_norm(flat[:whole].view(-1, PIECE), dim=1)
    return torch.cat([pieces, torch.linalg.vector_norm(flat[whole:])[None]])


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
