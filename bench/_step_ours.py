"""Drafthouse's side of bench/step.py: what a step of `python -m trainer` does once the features are there."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from _step_worker import CLIP, EPSILON, HEAD_DIM, RATE, THETA, WEIGHT_DECAY, Problem, Side
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trainer import allocator
from trainer.blocks import Blocks
from trainer.data import CONTEXT_BUCKET
from trainer.drafter import Drafter
from trainer.drafter_config import DrafterConfig
from trainer.loss import Objective
from trainer.metrics import Tally
from trainer.optim import Optimizer


def soft_labels() -> dict[str, object]:
    """The arguments that make the objective speculators' KL: nothing but soft labels, at temperature 1."""
    from trainer.closed_form import Terms

    return {"terms": Terms(kl_weight=1.0, temperature=1.0)}


class Drafthouse(Side):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        s = problem.shape
        config = DrafterConfig(
            hidden_size=s.hidden,
            intermediate_size=s.inner,
            num_hidden_layers=s.layers,
            num_attention_heads=s.heads,
            num_key_value_heads=s.key_heads,
            head_dim=HEAD_DIM,
            rms_norm_eps=EPSILON,
            rope_theta=THETA,
            vocab_size=s.vocabulary,
            block_size=s.block,
            mask_token_id=problem.mask_token,
            target_layer_ids=tuple(range(s.layers)),
            num_target_layers=s.layers + 2,
        )
        self.drafter = Drafter(config)
        problem.initialise(self.drafter, [name for name, _ in self.drafter.named_parameters()])
        self.optimizer = Optimizer(self.drafter, WEIGHT_DECAY)
        self.soft = s.loss == "kl"
        self.visit = Objective(problem.lm_head, **soft_labels()) if self.soft else Objective(problem.lm_head)
        self.tally = Tally(s.block, torch.device("cpu"), 0)
        self.ids = F.pad(problem.ids, (0, s.block))
        self.supervised = F.pad(problem.supervised, (0, s.block))
        slot = torch.arange(s.block)
        self.decay = torch.exp(-(slot - 1) / s.gamma) * (slot > 0)
        allocator.settle()  # as the trainer does before its first step

    def batch(self, anchors: list[int]) -> tuple[Blocks, Tensor, Tensor, Tensor, Tensor]:
        """Blocks, their input ids, the rows that count, labels and weights: as trainer.data has them."""
        blocks = Blocks.build([0] * len(anchors), anchors, self.problem.shape.block, bucket=CONTEXT_BUCKET)
        labels = self.ids[blocks.positions]
        weights = (self.decay * self.supervised[blocks.positions]).flatten()
        block_ids = torch.full_like(labels, self.problem.mask_token)
        block_ids[:, 0] = labels[:, 0]
        rows = weights.nonzero()[:, 0]
        return blocks, block_ids, rows, labels.flatten()[rows], weights[rows]

    def teacher(self, blocks: Blocks, rows: Tensor) -> dict[str, Tensor]:
        """With soft labels, what the target had at the positions that predict these rows."""
        return {"teacher": self.problem.last[(blocks.positions - 1).flatten()[rows]]} if self.soft else {}

    def step(self, anchors: list[int]) -> tuple[float, float]:
        blocks, block_ids, rows, labels, weights = self.batch(anchors)
        taps = self.problem.taps[None, : blocks.context_length]
        embeddings = F.embedding(block_ids, self.problem.embedding)
        hidden = self.drafter(embeddings, blocks, self.drafter.fuse(taps), rows=rows)
        visit = self.visit(hidden, labels, weights, **self.teacher(blocks, rows))
        visit.loss.backward()
        self.tally.add(visit, rows, blocks)
        weight = float(weights.sum())
        norm = self.optimizer.step(RATE, weight, CLIP)
        return float(visit.loss.detach()) / weight, float(norm)

    def objective(self, hidden: Tensor, anchors: list[int]) -> None:
        blocks, _, rows, labels, weights = self.batch(anchors)
        visit = self.visit(hidden[rows], labels, weights, **self.teacher(blocks, rows))
        visit.loss.backward()
        self.tally.add(visit, rows, blocks)
