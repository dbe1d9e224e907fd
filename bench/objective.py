"""The objective against dense ones: python bench/objective.py [--rounds 7]

Against what public trainers do, in plain torch: cross-entropy of full logits [N·B, V] (SpecForge and NeMo
without chunks), and the KL divergence as speculators' eager loss computes it. Both sides get the same hidden
states, the same head in float32 and the same weights; slot 0 weighs nothing. Measured are

* the peak of resident memory that loss and gradient add at configuration C (V = 32,768, 1,024 slots, width
  256), each in a process of its own;
* the time of both, in turns, at the configurations A to D of the step's benchmark;
* what the looks at a sample (recall, trees, the target's choices) add to the objective alone.

First it is checked that both sides compute the same loss and gradient.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as trainer/__main__.py has it

CONFIGURATIONS = {  # V, H, N, B
    "A": (1024, 128, 32, 8),
    "B": (8192, 256, 64, 16),
    "C": (32768, 256, 64, 16),
    "D": (8192, 256, 192, 16),
}
WAYS = ("ours", "dense cross-entropy", "ours, soft", "dense KL")
MEMORY_LIMIT = 0.25  # × the dense objective
SOFT_LIMIT = 0.6  # × dense KL
LOOK_LIMIT = 0.04  # × the objective, which is at most half of a step: 2 % of that


class Problem:
    """One configuration: inputs, and the objectives over them. Each way returns its loss, divided by Σ w."""

    def __init__(self, name: str) -> None:
        import torch

        from trainer.blocks import Blocks
        from trainer.closed_form import Terms
        from trainer.data import Batch
        from trainer.loss import Objective

        vocabulary, width, blocks, size = CONFIGURATIONS[name]
        self.shape = (blocks, size)
        torch.manual_seed(0)
        self.head = torch.randn(vocabulary, width) * 0.02
        self.hidden = torch.randn(blocks * size, width).mul_(2).requires_grad_()
        self.last = torch.randn(blocks * size, width) * 2
        labels = torch.randint(0, vocabulary, self.shape)
        weights = torch.exp(-(torch.arange(size) - 1) / 7.0) * (torch.arange(size) > 0)
        self.labels, self.weights = labels.flatten(), weights.repeat(blocks)
        self.rows = self.weights.nonzero()[:, 0]
        self.hard = Objective(self.head)
        self.kl = Objective(self.head, terms=Terms(kl_weight=1.0))
        self.mixed = Objective(self.head, terms=Terms(kl_weight=0.15, temperature=2.0))
        arranged = Blocks.build([0] * blocks, list(range(blocks)), size)
        length = blocks + size
        self.states = torch.randn(1, length, width) * 2
        self.batch = Batch(
            documents=[0],
            places=[(0, 0)],
            lengths=[length],
            input_ids=torch.zeros(1, length, dtype=torch.int64),
            positions=None,
            blocks=arranged,
            block_ids=labels,
            labels=labels,
            weights=weights.expand(self.shape),
            rows=self.rows,
        )

    def _visit(self, objective: Any, top: int = 0) -> Any:
        rows = self.rows
        teacher = self.last[rows] if objective.terms.soft else None
        return objective(self.hidden[rows], self.labels[rows], self.weights[rows], teacher=teacher, top=top)

    def loss(self, way: str) -> Any:
        import torch
        import torch.nn.functional as F

        if way in ("ours", "ours, soft", "ours, mixed"):
            objective = {"ours": self.hard, "ours, soft": self.kl, "ours, mixed": self.mixed}[way]
            visit = self._visit(objective)
            return visit.loss / visit.weight
        logits = F.linear(self.hidden, self.head)
        if way == "dense cross-entropy":
            lost = F.cross_entropy(logits, self.labels, reduction="none")
        else:
            with torch.no_grad():
                targets = F.linear(self.last, self.head)
            log_q = F.log_softmax(logits, dim=-1, dtype=torch.float32)
            p = F.softmax(targets, dim=-1, dtype=torch.float32)
            lost = F.kl_div(log_q, p, reduction="none", log_target=False).sum(-1)
        return (lost * self.weights).sum() / self.weights.sum()

    def run(self, way: str) -> None:
        """Loss and gradient."""
        self.hidden.grad = None
        self.loss(way).backward()

    def look(self, tally: Any, top: int) -> None:
        """The same with a look at a sample, read at once."""
        self.hidden.grad = None
        visit = self._visit(self.hard, top)
        (visit.loss / visit.weight).backward()
        tally.add(visit, self.rows, self.batch.blocks)
        if top:
            tally.look(visit, self.batch, self.states, self.hard.choices)
            tally.read()

    def check(self) -> None:
        """Raises AssertionError if two ways differ in value or gradient."""
        import torch

        for ours, theirs in (WAYS[:2], WAYS[2:]):
            values, gradients = [], []
            for way in (ours, theirs):
                self.hidden.grad = None
                loss = self.loss(way)
                loss.backward()
                values.append(loss.detach())
                gradients.append(self.hidden.grad)
            torch.testing.assert_close(values[0], values[1], rtol=1e-5, atol=1e-6)
            largest = float(gradients[1].abs().max())
            torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5 * largest)


def memory(way: str) -> int:
    """Bytes of resident memory that `way` adds at its peak, in this process."""
    problem = Problem("C")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _status("VmRSS")
    problem.run(way)
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))


def timed(rounds: int, ways: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    """Seconds of each, in turns, every other round backwards; the first round warms up."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            began = time.perf_counter()
            ways[name]()
            found[name].append(time.perf_counter() - began)
    return {name: seconds[1:] for name, seconds in found.items()}


def paired(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def times(name: str, rounds: int) -> bool:
    """Compare at one configuration; returns whether a limit was passed."""
    import torch

    from bench._results import record
    from trainer.metrics import EVERY, TOP, Tally

    problem = Problem(name)
    problem.check()
    tally = Tally(problem.shape[1], torch.device("cpu"), 32)
    ways: dict[str, Callable[[], None]] = {
        way: functools.partial(problem.run, way) for way in (*WAYS, "ours, mixed")
    }
    ways["with metrics"] = functools.partial(problem.look, tally, 0)
    ways["with a look"] = functools.partial(problem.look, tally, TOP)
    found = timed(rounds, ways)
    for way, seconds in found.items():
        best, median = min(seconds) * 1e3, statistics.median(seconds) * 1e3
        print(f"{name} {way:20} best {best:8.1f} ms, median {median:8.1f} ms")
    too_much = False
    for ours, theirs in (WAYS[:2], WAYS[2:], ("ours, mixed", "dense KL")):
        ratio = paired(found[ours], found[theirs])
        other = statistics.median(found[theirs]) * 1e3
        claim = f"time of loss and gradient at {name} ({ours}; median of paired ratios)"
        record(claim, theirs, ours=ratio * other, theirs=other, unit="ms", n=rounds)
        too_much |= ours == "ours, soft" and ratio > SOFT_LIMIT
    more = statistics.median(a - b for a, b in zip(found["with a look"], found["with metrics"], strict=True))
    share = more / EVERY / statistics.median(found["ours"])
    claim = f"what a look in {EVERY} micro-batches adds to the objective at {name}"
    record(claim, "2 % of a step", ours=100 * share, theirs=100 * LOOK_LIMIT, unit="%", n=rounds)
    return too_much or share > LOOK_LIMIT


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=7, help="paired rounds, ten times as many at A (default 7)"
    )
    parser.add_argument("--memory", metavar="WAY", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        print(json.dumps(memory(options.memory)))
        return 0
    from bench._results import record

    too_much = False
    peaks = {}
    for way in WAYS:
        argv = [sys.executable, __file__, "--memory", way]
        peaks[way] = json.loads(subprocess.run(argv, stdout=subprocess.PIPE, check=True).stdout)
    for ours, theirs in (WAYS[:2], WAYS[2:]):
        claim = f"peak memory of the objective at C ({ours})"
        mine, other = peaks[ours] / 2**20, peaks[theirs] / 2**20
        too_much |= record(claim, theirs, ours=mine, theirs=other, unit="MiB", n=1) > MEMORY_LIMIT

    for name in CONFIGURATIONS:
        too_much |= times(name, options.rounds * (10 if name == "A" else 1))  # a turn at A takes milliseconds
    return int(too_much)


if __name__ == "__main__":
    sys.exit(main())
