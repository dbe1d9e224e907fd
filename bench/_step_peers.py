"""The peers' sides of bench/step.py: their own modules from PyPI, in the environment of `make bench-peers`.

Nothing of theirs is changed, but that they are handed the anchors instead of drawing them.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from _step_worker import (
    BETAS,
    CLIP,
    EPSILON,
    HEAD_DIM,
    RATE,
    THETA,
    WEIGHT_DECAY,
    Problem,
    Shape,
    Side,
)
from torch import Tensor, nn
from transformers import Qwen3Config


def config(shape: Shape, problem: Problem) -> Qwen3Config:
    made = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        head_dim=HEAD_DIM,
        rms_norm_eps=EPSILON,
        rope_parameters={"rope_theta": THETA, "rope_type": "default"},
        max_position_embeddings=32768,
        tie_word_embeddings=False,
    )
    made.num_target_layers = shape.layers + 2
    made.block_size = shape.block
    made.dflash_config = {
        "mask_token_id": problem.mask_token,
        "target_layer_ids": list(range(shape.layers)),
        "block_size": shape.block,
    }
    made._attn_implementation = "sdpa"
    return made


def frozen(module: nn.Module, weight: Tensor) -> nn.Module:
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


class Peer(Side):
    """`train` is the peer's training module around `drafter`; both set by the subclass."""

    train: nn.Module

    def ready(self) -> None:
        trained = [(n, p) for n, p in self.drafter.named_parameters() if p.requires_grad]
        self.problem.initialise(self.drafter, [name for name, _ in trained])
        self.parameters = [p for _, p in trained]
        groups = [
            {"params": [p for p in self.parameters if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in self.parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, fused=True)
        self.anchors: Tensor
        self.inputs = (self.problem.ids[None], self.problem.taps[None], self.problem.supervised[None])

    def drawn(self, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """In place of the peer's own drawing."""
        return self.anchors[None], torch.ones_like(self.anchors, dtype=torch.bool)[None]

    @abstractmethod
    def loss(self) -> Tensor:
        """Of the blocks at `anchors`."""

    def step(self, anchors: list[int]) -> tuple[float, float]:
        self.anchors = torch.tensor(anchors)
        loss = self.loss()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss), float(norm)

    def objective(self, hidden: Tensor, anchors: list[int]) -> None:
        """Their forward pass with `hidden` in place of what their drafter computes."""
        self.anchors = torch.tensor(anchors)
        self.train.draft_model = Given(hidden, self.train.draft_model)
        self.loss().backward()


class Given(nn.Module):
    """Stands where the drafter stood, and answers at once."""

    def __init__(self, hidden: Tensor, drafter: nn.Module) -> None:
        super().__init__()
        self.hidden = hidden
        self.sliding_window = None
        self.input_embedding_scale = 1.0
        self.compute_logits = getattr(drafter, "compute_logits", None)

    def forward(self, *_: object, **__: object) -> Tensor:
        return self.hidden[None]


class NeMo(Peer):
    def __init__(self, problem: Problem) -> None:
        from nemo_automodel.components.speculative.dflash.core import DFlashTrainerModule
        from nemo_automodel.components.speculative.dflash.draft_qwen3 import Qwen3DFlashDraftModel

        super().__init__(problem)
        s = problem.shape
        self.drafter = Qwen3DFlashDraftModel(config(s, problem))
        self.train = DFlashTrainerModule(
            self.drafter,
            frozen(nn.Linear(1, 1, bias=False), problem.lm_head),
            frozen(nn.Embedding(1, 1), problem.embedding),
            mask_token_id=problem.mask_token,
            block_size=s.block,
            attention_backend="sdpa",
            num_anchors=s.anchors,
            loss_decay_gamma=s.gamma,
        )
        self.train._sample_anchor_positions = self.drawn
        self.ready()

    def loss(self) -> Tensor:
        return self.train(*self.inputs).loss


class SpecForge(Peer):
    def __init__(self, problem: Problem) -> None:
        from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
        from specforge.modeling.draft.dflash import DFlashDraftModel

        super().__init__(problem)
        s = problem.shape
        self.drafter = DFlashDraftModel(config(s, problem))
        self.train = OnlineDFlashModel(
            self.drafter,
            frozen(nn.Linear(1, 1, bias=False), problem.lm_head),
            frozen(nn.Embedding(1, 1), problem.embedding),
            mask_token_id=problem.mask_token,
            block_size=s.block,
            attention_backend="sdpa",
            num_anchors=s.anchors,
            loss_decay_gamma=s.gamma,
        )
        self.train._sample_anchor_positions = self.drawn
        self.ready()

    def loss(self) -> Tensor:
        return self.train(*self.inputs)[0]


class Speculators(Peer):
    def __init__(self, problem: Problem) -> None:
        from speculators.losses import resolve_loss_config
        from speculators.models.dflash import DFlashSpeculatorConfig, core

        super().__init__(problem)
        s = problem.shape
        self.drafter = self.train = core.DFlashDraftModel(
            DFlashSpeculatorConfig(
                transformer_layer_config=config(s, problem),
                draft_vocab_size=s.vocabulary,
                block_size=s.block,
                aux_hidden_state_layer_ids=list(range(1, s.layers + 1)),
                mask_token_id=problem.mask_token,
            )
        )
        frozen(self.drafter.embed_tokens, problem.embedding)
        frozen(self.drafter.lm_head, problem.lm_head)
        frozen(self.drafter.verifier_lm_head, problem.lm_head)
        core.select_anchors = lambda *_: (self.anchors, torch.ones_like(self.anchors, dtype=torch.bool))
        self.settings = {
            "loss_config": resolve_loss_config("kl_div" if s.loss == "kl" else "ce", "eager"),
            "gamma": s.gamma,
            "max_anchors": s.anchors,
        }
        self.ready()

    def loss(self) -> Tensor:
        documents = torch.zeros(1, self.problem.shape.length, dtype=torch.long)
        return self.train(
            self.inputs[1],
            self.inputs[0],
            self.inputs[2],
            self.problem.last[None],
            documents,
            **self.settings,
        )[1]

    def objective(self, hidden: Tensor, anchors: list[int]) -> None:
        self.anchors = torch.tensor(anchors)
        self.drafter.layers = nn.ModuleList()
        self.drafter.norm = Given(hidden, self.drafter)
        self.loss().backward()


PEERS: dict[str, type[Peer]] = {"nemo-automodel": NeMo, "specforge": SpecForge, "speculators": Speculators}
