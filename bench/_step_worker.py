"""One side of bench/step.py: a process that trains one drafter, a step for each line it is given.

    python bench/_step_worker.py WHO SHAPE        SHAPE: the fields of `Shape` as JSON

Every side draws the same target features, embeddings, output head and initial weights, and is handed the same
anchors: {"anchors": [3, 17, …]} trains one step on these blocks and answers with its loss, the norm of its
gradient and its time; {"objective": …} measures the memory of the objective alone. The optimiser is AdamW in
PyTorch's fused form with the same settings for all, so that losses must stay equal step after step where
definitions agree.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

RATE, WEIGHT_DECAY, BETAS, CLIP = 6e-4, 0.01, (0.9, 0.95), 1.0
THETA, EPSILON, HEAD_DIM = 10000.0, 1e-6, 64


@dataclass(frozen=True)
class Shape:
    """A configuration: the drafter, one document, and how many blocks hang on it."""

    hidden: int
    layers: int  # of the drafter, and as many tapped layers of the target
    vocabulary: int
    length: int  # positions of the document
    anchors: int
    block: int
    loss: str = "ce"  # or "kl": against the target's distribution, as speculators has it
    threads: int = 0  # 0: as many as there are

    @property
    def heads(self) -> int:
        return max(1, self.hidden // HEAD_DIM)

    @property
    def key_heads(self) -> int:
        return max(1, self.heads // 2)

    @property
    def inner(self) -> int:
        return 3 * self.hidden

    @property
    def gamma(self) -> float:
        return {8: 4.0, 16: 7.0}[self.block]

    @property
    def first_supervised(self) -> int:
        return self.length // 4


class Problem:
    """What every side is given."""

    def __init__(self, shape: Shape) -> None:
        self.shape = s = shape
        draw = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, s.vocabulary - 2, (s.length,), generator=draw)
        self.taps = torch.randn(s.length, s.layers * s.hidden, generator=draw)
        last = torch.randn(s.length, s.hidden, generator=draw)
        self.last = last * torch.rsqrt(
            last.pow(2).mean(-1, keepdim=True) + EPSILON
        )  # as after its final norm
        self.embedding = 0.02 * torch.randn(s.vocabulary, s.hidden, generator=draw)
        self.lm_head = 0.02 * torch.randn(s.vocabulary, s.hidden, generator=draw)
        self.mask_token = s.vocabulary - 1
        self.supervised = torch.zeros(s.length)
        self.supervised[s.first_supervised :] = 1
        self._draw = draw

    @torch.no_grad()
    def initialise(self, drafter: nn.Module, names: list[str]) -> None:
        """The same weights for the parameters `names`, which are those of every DFlash drafter."""
        parameters = dict(drafter.named_parameters())
        for name in sorted(names):
            p = parameters[name]
            values = torch.randn(p.shape, generator=self._draw)
            p.copy_(0.02 * values if p.dim() == 2 else 1 + 0.1 * values)


class Side(ABC):
    """A trainer's own modules around one `Problem`."""

    drafter: nn.Module

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @abstractmethod
    def step(self, anchors: list[int]) -> tuple[float, float]:
        """Loss and norm of the gradient of one optimiser step."""

    @abstractmethod
    def objective(self, hidden: Tensor, anchors: list[int]) -> None:
        """Loss and its gradient to the drafter's output [N·B, H], nothing else."""


def memory(field: str) -> float:
    """VmRSS or VmHWM (the peak of it), MB."""
    text = Path("/proc/self/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def side(who: str, problem: Problem) -> Side:
    if who == "drafthouse":
        from _step_ours import Drafthouse

        return Drafthouse(problem)
    from _step_peers import PEERS

    return PEERS[who](problem)


def main() -> int:
    shape = Shape(**json.loads(sys.argv[2]))
    if shape.threads:
        torch.set_num_threads(shape.threads)
    trained = side(sys.argv[1], Problem(shape))
    print(
        json.dumps({"ready": True, "parameters": sum(p.numel() for p in trained.drafter.parameters())}),
        flush=True,
    )
    for line in sys.stdin:
        asked = json.loads(line)
        if "objective" in asked:
            hidden = torch.randn(shape.anchors * shape.block, shape.hidden, requires_grad=True)
            before = memory("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
            trained.objective(hidden, asked["objective"])
            answer = {"peak_mb": memory("VmHWM") - before}
        else:
            cpu, started = time.process_time(), time.perf_counter()
            loss, norm = trained.step(asked["anchors"])
            answer = {
                "ms": 1000 * (time.perf_counter() - started),
                "cpu_ms": 1000 * (time.process_time() - cpu),
                "loss": loss,
                "norm": norm,
                "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.modules["_step_worker"] = sys.modules["__main__"]  # one copy of the classes for both sides' modules
    sys.exit(main())
