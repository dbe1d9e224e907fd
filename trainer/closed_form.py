"""What a row of logits loses, and the gradient of that, in closed form.

With z a row's logits, q = softmax(z), y its label, and p_T and q_T the target's and the drafter's
distributions at temperature T, a row loses

    (1 - β) · CE  +  β · T² · KL(p_T ‖ q_T)  +  λ · H(q) · [y alone has the largest logit]

* CE = -log q_y; its gradient by z is q - onehot(y).
* KL, soft labels (Hinton et al. 2015): the gradient of T² · KL is T · (q_T - p_T).
* H, the entropy (CAP of LLaDA 2.0, arXiv 2512.15745): where the drafter is right it learns to be sure,
  where it is wrong it is left alone. The gradient is -q_j (log q_j + H) = q_j (Σ_k q_k z_k - z_j).

Everything happens in place: a row takes one buffer of the vocabulary's width, and two with soft labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Terms:
    """What the loss is made of."""

    kl_weight: float = 0.0  # β; 0: hard labels only
    temperature: float = 1.0  # T
    cap: float = 0.0  # λ

    @property
    def soft(self) -> bool:
        return self.kl_weight > 0

    def total(self, ce: Tensor, kl: Tensor | None, entropy: Tensor | None) -> Tensor:
        """Of the same terms of rows, or of their sums; `entropy` is 0 where the drafter is wrong."""
        total = ce if not self.soft else (1 - self.kl_weight) * ce
        if kl is not None:
            total = total + self.kl_weight * kl
        return total if entropy is None else total + self.cap * entropy


class Rows(NamedTuple):
    """Of r rows."""

    ce: Tensor  # [r]
    correct: Tensor  # [r] bool: the label alone has the largest logit (a tie proves nothing, so it is wrong)
    largest: Tensor  # [r] the log of the largest probability
    kl: Tensor | None  # [r] T² · KL
    entropy: Tensor | None  # [r] H, 0 where it does not count


def close_(logits: Tensor, labels: Tensor, terms: Terms, teacher: Tensor | None, scratch: Tensor) -> Rows:
    """Turn `logits` [r, V] into their own gradient, in place.

    labels [r]; teacher [r, V]: the target's logits divided by T, overwritten; scratch [r, V]: overwritten,
    not touched where there are neither soft labels nor CAP.
    """
    label = labels[:, None]
    of_label = logits.gather(1, label)
    # The largest of the others; an argmax would take three times as long on a CPU.
    others = logits.scatter_(1, label, -torch.inf).amax(-1)
    logits.scatter_(1, label, of_label)
    of_label = of_label[:, 0]
    correct = of_label > others
    largest = torch.maximum(of_label, others)

    kl, beta, t = None, terms.kl_weight if teacher is not None else 0.0, terms.temperature
    share = 1.0 if t == 1 else 1 - beta  # of q in the gradient: with T = 1, q_T is q
    if teacher is not None:
        difference = torch.sub(teacher, logits, alpha=1 / t, out=scratch)
        teacher_largest = teacher.amax(-1)
        p = torch.softmax(teacher, -1, out=teacher)
        # KL = Σ p (log p - log q_T), and each logarithm is the logit less the row's log Σ exp.
        kl = difference.mul_(p).sum(-1) - _log_sum(teacher_largest, p)
        if t != 1:
            tempered = torch.mul(logits, 1 / t, out=scratch)
            q_t = torch.softmax(tempered, -1, out=tempered)
            kl += _log_sum(largest / t, q_t)
            p.sub_(q_t)
    if terms.cap:
        scratch.copy_(logits)
    q = torch.softmax(logits, -1, out=logits)
    log_sum = _log_sum(largest, q)
    if kl is not None:
        kl = (kl + log_sum if t == 1 else kl) * t**2
    entropy = None
    if terms.cap:
        mean = torch.linalg.vecdot(q, scratch)  # of the logits
        counts = correct.to(logits.dtype)
        entropy = (log_sum - mean) * counts
        sharpen = terms.cap * counts
        scratch.mul_(-sharpen[:, None]).add_((share + sharpen * mean)[:, None])
        q.mul_(scratch)
    elif share != 1:
        q.mul_(share)
    if teacher is not None:
        q.sub_(teacher, alpha=beta * t)
    q.scatter_add_(1, label, q.new_full((1, 1), beta - 1).expand(label.shape))
    return Rows(log_sum - of_label, correct, largest - log_sum, kl, entropy)


def _log_sum(largest: Tensor, probabilities: Tensor) -> Tensor:
    """log Σ exp of each row: its largest logit less the log of its largest probability, at least 1 / V."""
    return largest - probabilities.amax(-1).log()
