"""The training objective: decayed cross-entropy over the slots of all blocks, in one visit of the vocabulary.

A row's logits are computed once. While they are there they give the loss, whether the row is right, and,
turned in place into their own gradient, the gradient of the hidden state. So a row costs two products with
the vocabulary and its logits are never kept or computed again: with V = 248,320 that is what a step mostly
consists of.

Loss and gradient are sums, Σ w·CE, not means. The trainer divides once per optimiser step by Σ w over all its
micro-batches; only so does a step not depend on how its tokens are spread over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 16 << 20  # logits that exist at one time


@dataclass(frozen=True)
class Visit:
    """What one visit of M rows gives."""

    loss: Tensor  # scalar, Σ w·CE; its gradient reaches the hidden states
    correct: Tensor  # [M] bool: the label alone has the largest logit (a tie proves nothing, so it is wrong)


class Objective:
    """Decayed cross-entropy against the frozen output head of the target, weight [V, H]."""

    def __init__(self, lm_head: Tensor, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.lm_head = lm_head
        vocabulary = lm_head.shape[0]
        precise = torch.promote_types(lm_head.dtype, torch.float32)  # a softmax in bfloat16 is worth nothing
        self.chunk_rows = max(32, chunk_bytes // (vocabulary * precise.itemsize))
        # Allocated once: a fresh buffer of this size costs its page faults at every step.
        self._workspace = lm_head.new_empty(self.chunk_rows, vocabulary, dtype=precise)

    def __call__(self, hidden: Tensor, labels: Tensor, weights: Tensor) -> Visit:
        """hidden [M, H], labels [M], weights [M]: only rows that count; drop those of weight zero before."""
        loss, correct = _OneVisit.apply(hidden, labels, weights, self.lm_head, self._workspace)
        return Visit(loss, correct)


class _OneVisit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, labels: Tensor, weights: Tensor, lm_head: Tensor, workspace: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows = hidden.shape[0]
        losses = hidden.new_empty(rows, dtype=workspace.dtype)
        correct = torch.empty(rows, dtype=torch.bool, device=hidden.device)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, rows, workspace.shape[0]):
            part = slice(start, min(start + workspace.shape[0], rows))
            logits = workspace[: part.stop - part.start]
            if hidden.dtype == lm_head.dtype == logits.dtype:
                torch.mm(hidden[part], lm_head.T, out=logits)
            else:
                logits.copy_(hidden[part].to(lm_head.dtype) @ lm_head.T)
            label = labels[part, None]
            of_label = logits.gather(1, label)
            # The largest of the others; an argmax would take nine times as long on a CPU.
            others = logits.scatter_(1, label, -torch.inf).amax(-1)
            logits.scatter_(1, label, of_label)
            of_label = of_label[:, 0]
            correct[part] = of_label > others
            largest = torch.maximum(of_label, others)
            p = torch.softmax(logits, -1, out=logits)
            # log Σ exp = largest - log(largest probability), and that one is at least 1 / V.
            losses[part] = largest - p.amax(-1).log() - of_label
            if gradient is not None:  # d CE / d logits = p - onehot(label)
                p.scatter_add_(1, label, p.new_full((1, 1), -1.0).expand(label.shape))
                p.mul_(weights[part, None].to(p.dtype))
                gradient[part] = p.to(lm_head.dtype) @ lm_head
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(correct)
        return (losses * weights).sum(), correct

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        (gradient,) = ctx.saved_tensors
        assert gradients[0] is not None
        return gradient * gradients[0], None, None, None, None


def accepted_tokens(correct: Tensor, rows: Tensor, slots: int, block_size: int) -> int:
    """Σ over blocks of the slots that are right before the first one that is not.

    `correct` [M] belongs to the slots `rows` [M] of `slots` blocks; all other slots count as wrong. Divided
    by the number of blocks, plus one for the token that verification always gives, it is τ̂: the acceptance
    length if the target's own continuation were the data. Pool it as (sum, count): a product of mean
    accuracies is biased, because slots of a block are right or wrong together.
    """
    grid = torch.zeros(slots * block_size, dtype=torch.int64, device=correct.device)
    grid[rows] = correct.to(torch.int64)
    return int(grid.view(slots, block_size)[:, 1:].cumprod(1).sum())
