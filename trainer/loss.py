"""The training objective over the slots of all blocks, in one visit of the vocabulary.

A row's logits are computed once. While they are there they give the loss, whether the row is right, its top K
where somebody wants to know, and, turned in place into their own gradient, the gradient of the hidden state.
So a row costs two products with the vocabulary (three with soft labels: their teacher's logits are one, too),
and its logits are never kept or computed again: with V = 248,320 that is what a step mostly consists of.

Loss and gradient are sums, Σ w · (loss of a row), not means. The trainer divides once per optimiser step by
Σ w over all its micro-batches; only so does a step not depend on how its tokens are spread over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.blocks import Blocks
from trainer.closed_form import Rows, Terms, close_

# Bytes of logits that exist at one time. A product with few rows reads the head more often than it pays: at
# V = 32,768 a quarter of this took 1.4 times as long on a CPU.
CHUNK_BYTES = {"cpu": 64 << 20}
CHUNK_BYTES_OF_A_GPU = 1 << 30
# Soft labels and CAP need one buffer more; it is for a few rows, which they go through one after the other.
SCRATCH_SHARE = 16  # of a chunk's rows, one in so many,
SCRATCH_BYTES = 2 << 20  # but as many as have this size: it stays in a CPU's cache


class Top(NamedTuple):
    """The K most probable tokens of M rows."""

    first: Tensor  # [M] the drafter's choice
    logs: Tensor  # [M, K] log-probabilities, falling
    rank: Tensor  # [M] of the label, from 0; K: it is not among them. Among equals it is the last


@dataclass(frozen=True)
class Visit:
    """What one visit of M rows gives."""

    loss: Tensor  # scalar, Σ w · (loss of a row); its gradient reaches the hidden states
    weight: Tensor  # scalar, Σ w
    parts: dict[
        str, Tensor
    ]  # scalars "ce", "kl", "cap": what the loss is made of, each Σ w · (part of a row)
    correct: Tensor  # [M] bool: the label alone has the largest logit (a tie proves nothing, so it is wrong)
    top: Top | None = None


class Objective:
    """The loss against the frozen output head of the target, weight [V, H].

    `dpace`: α of D-PACE, whose weights take the place of those given. `chunk_bytes`: how much room the logits
    of a chunk may take, all buffers of their size together.
    """

    def __init__(
        self,
        lm_head: Tensor,
        chunk_bytes: int | None = None,
        *,
        terms: Terms | None = None,
        dpace: float | None = None,
    ) -> None:
        self.lm_head = lm_head
        self.terms = terms or Terms()
        self.dpace = dpace
        # A softmax in bfloat16 is worth nothing.
        self.precise = torch.promote_types(lm_head.dtype, torch.float32)
        if chunk_bytes is None:
            chunk_bytes = CHUNK_BYTES.get(lm_head.device.type, CHUNK_BYTES_OF_A_GPU)
        width = self.precise.itemsize * (2 if self.terms.soft else 1)
        if lm_head.dtype != self.precise:
            width += lm_head.dtype.itemsize
        self.chunk_rows = max(32, chunk_bytes // (lm_head.shape[0] * width))
        # Allocated once: a fresh buffer of this size costs its page faults at every step.
        self._buffers: dict[str, Tensor] = {}

    def _buffer(self, name: str, rows: int, dtype: torch.dtype | None = None) -> Tensor:
        """The buffer of that name, [rows, V]; larger from now on if it must be."""
        found = self._buffers.get(name)
        if found is None or len(found) < rows:
            self._buffers[name] = self.lm_head.new_empty(0)  # gives the old one back before
            found = self.lm_head.new_empty(rows, self.lm_head.shape[0], dtype=dtype or self.precise)
            self._buffers[name] = found
        return found[:rows]

    def _chunks(self, rows: int) -> list[slice]:
        """As few as there can be, all of about the same size."""
        count = -(-rows // self.chunk_rows)
        return [slice(rows * i // count, rows * (i + 1) // count) for i in range(count)]

    def __call__(
        self,
        hidden: Tensor,
        labels: Tensor,
        weights: Tensor,
        *,
        teacher: Tensor | None = None,
        rows: Tensor | None = None,
        shape: tuple[int, int] | None = None,
        top: int = 0,
    ) -> Visit:
        """hidden [M, H], labels [M], weights [M]: only rows that count; drop those of weight zero before.

        With soft labels `teacher` [M, H] holds the target's last hidden states (after its final norm) at the
        positions that predict these labels. With D-PACE `rows` [M] says which slots these are, as indices
        into N·B, and `shape` is (N, B). `top`: how many of the most probable tokens to return.
        """
        count = len(hidden)
        gradient = torch.empty_like(hidden) if hidden.requires_grad and torch.is_grad_enabled() else None
        with torch.no_grad():
            chunks = [
                self._visit(hidden, labels, teacher, top, part, gradient) for part in self._chunks(count)
            ]
            of, tops = _joined([rows for rows, _ in chunks], hidden), [found for _, found in chunks if found]
            if self.dpace is not None:
                assert rows is not None
                assert shape is not None
                weights = dpace_weights(of.ce, rows, shape, self.dpace)
            weights = weights.to(of.ce.dtype)
            parts = {"ce": (of.ce * weights).sum()}
            if of.kl is not None:
                parts["kl"] = (of.kl * weights).sum()
            if of.entropy is not None:
                parts["cap"] = (of.entropy * weights).sum()
            loss = self.terms.total(parts["ce"], parts.get("kl"), parts.get("cap"))
            if gradient is not None:
                gradient.mul_(weights[:, None])
        if gradient is not None:
            loss = _Known.apply(hidden, loss, gradient)
        best = Top(*(torch.cat(found) for found in zip(*tops, strict=True))) if tops else None
        return Visit(loss, weights.sum(), parts, of.correct, best)

    def _visit(
        self,
        hidden: Tensor,
        labels: Tensor,
        teacher: Tensor | None,
        top: int,
        part: slice,
        gradient: Tensor | None,
    ) -> tuple[Rows, Top | None]:
        """One chunk of rows."""
        terms, count = self.terms, part.stop - part.start
        logits = self._product(hidden[part], self._buffer("logits", count))
        soft = None
        if terms.soft:
            assert teacher is not None
            soft = self._product(teacher[part], self._buffer("teacher", count), 1 / terms.temperature)
        found = logits.topk(min(top, logits.shape[1])) if top else None
        of_label = logits.gather(1, labels[part, None]) if found else None
        size, scratch = count, logits
        if terms.soft or terms.cap:
            few = max(-(-count // SCRATCH_SHARE), SCRATCH_BYTES // (logits.shape[1] * logits.itemsize))
            size = min(count, few)
            scratch = self._buffer("scratch", size)
        rows = _joined(
            [
                close_(
                    logits[i : i + size],
                    labels[part][i : i + size],
                    terms,
                    None if soft is None else soft[i : i + size],
                    scratch[: min(size, count - i)],
                )
                for i in range(0, count, size)
            ],
            hidden,
        )
        if gradient is not None:
            if hidden.dtype == self.lm_head.dtype == logits.dtype:
                torch.mm(logits, self.lm_head, out=gradient[part])
            else:
                gradient[part] = self._head_typed(logits) @ self.lm_head
        if not found or of_label is None:
            return rows, None
        values = found.values
        rank = (values >= of_label).sum(-1) - (of_label[:, 0] >= values[:, -1]).to(torch.int64)
        logs = values - values[:, :1] + rows.largest[:, None]
        return rows, Top(found.indices[:, 0], logs, rank)

    def _product(self, hidden: Tensor, out: Tensor, scale: float = 1.0) -> Tensor:
        """`out` [r, V]: the logits of `hidden` [r, H], times `scale`."""
        if hidden.dtype == self.lm_head.dtype == out.dtype:
            return torch.mm(hidden if scale == 1 else hidden * scale, self.lm_head.T, out=out)
        if self.lm_head.dtype == out.dtype:
            torch.mm(hidden.to(out.dtype), self.lm_head.T, out=out)
        else:
            half = self._buffer("half", len(hidden), self.lm_head.dtype)
            out.copy_(torch.mm(hidden.to(self.lm_head.dtype), self.lm_head.T, out=half))
        return out if scale == 1 else out.mul_(scale)

    def _head_typed(self, logits: Tensor) -> Tensor:
        """`logits` in the type of the head."""
        if logits.dtype == self.lm_head.dtype:
            return logits
        return self._buffer("half", len(logits), self.lm_head.dtype).copy_(logits)

    @torch.no_grad()
    def choices(self, hidden: Tensor) -> Tensor:
        """The most probable token of each row [M, H] of hidden states, [M]. One product a row more."""
        found = [
            self._product(hidden[part], self._buffer("logits", part.stop - part.start)).argmax(-1)
            for part in self._chunks(len(hidden))
        ]
        return torch.cat(found) if found else hidden.new_zeros(0, dtype=torch.int64)


class _Known(torch.autograd.Function):
    """A value whose gradient by `hidden` is known already."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        (gradient,) = ctx.saved_tensors
        assert gradients[0] is not None
        return gradient * gradients[0], None, None


def _joined(parts: list[Rows], like: Tensor) -> Rows:
    if len(parts) == 1:
        return parts[0]
    if not parts:
        none = like.new_zeros(0)
        return Rows(none, none.bool(), none, None, None)
    kl, entropy = ([getattr(part, name) for part in parts] for name in ("kl", "entropy"))
    return Rows(
        ce=torch.cat([part.ce for part in parts]),
        correct=torch.cat([part.correct for part in parts]),
        largest=torch.cat([part.largest for part in parts]),
        kl=None if kl[0] is None else torch.cat(kl),
        entropy=None if entropy[0] is None else torch.cat(entropy),
    )


def dpace_weights(ce: Tensor, rows: Tensor, shape: tuple[int, int], alpha: float) -> Tensor:
    """The weights of D-PACE (arXiv 2605.18810), [M], from the cross-entropies [M] of the slots
    `rows` [M], indices into N·B; `shape`: (N, B).

    With q̃ = (1 - α) · exp(-CE) + α, slot j of a block weighs Σ over m ≥ j of ∏ over i ≤ m of q̃_i: what of the
    expected accepted length hangs on it. A slot without a label neither weighs nor ends anything. They are
    constants: no gradient goes through them. Weights need a block's slots after slot j; since the gradient of
    a row is scaled after its product with the vocabulary, chunks may end anywhere nevertheless.
    """
    slots, size = shape
    likely = ce.new_ones(slots * size)
    counts = ce.new_zeros(slots * size)
    likely[rows] = (1 - alpha) * (-ce).exp() + alpha
    counts[rows] = 1
    reached = likely.view(shape).cumprod(1) * counts.view(shape)
    return reached.flip(1).cumsum(1).flip(1).flatten()[rows]


def teacher_rows(last: Tensor, blocks: Blocks, rows: Tensor) -> Tensor:
    """Of the target's last hidden states [b, S, H], those that predict the labels of the slots `rows` [M] of
    N·B: the ones at the position before. [M, H]
    """
    block, slot = rows // blocks.block_size, rows % blocks.block_size
    # Only slots that stand for the size of a batch can lie behind its end.
    position = (blocks.anchors[block] + slot - 1).clamp(max=last.shape[1] - 1)
    return last[blocks.rows[block], position]
