"""How long a training step takes, and what memory it needs, against the peers' own modules from PyPI.

    make bench-peers            once: specforge, speculators and nemo-automodel into .venv-peers
    python bench/step.py [A …] [--steps 20] [--threads N] [--against nemo-automodel,…]

A configuration is a drafter, one document and the blocks on it (DFlash on random features, fp32, offline, one
document in a batch). Each side is a process of its own (bench/_step_worker.py) that does a whole optimiser
step with the same anchors, taking turns step by step with the others; which one begins alternates. So a load
from outside meets all of them alike, and the median of the ratios, pair by pair, remains meaningful. First of
all the sides must agree: NeMo and SpecForge define the loss as we do, so loss and gradient norm of every step
must be theirs; speculators divides by another normaliser, in which the decay does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from _results import record

HERE = Path(__file__).resolve().parent
PEERS_PYTHON = HERE.parent / ".venv-peers" / "bin" / "python"
OURS, NEMO, SPECFORGE, SPECULATORS = "drafthouse", "nemo-automodel", "specforge", "speculators"
CONFIGURATIONS = {
    "A": {"hidden": 128, "layers": 2, "vocabulary": 1024, "length": 256, "anchors": 32, "block": 8},
    "B": {"hidden": 256, "layers": 2, "vocabulary": 8192, "length": 512, "anchors": 64, "block": 16},
    "C": {"hidden": 256, "layers": 4, "vocabulary": 32768, "length": 1024, "anchors": 64, "block": 16},
    "D": {"hidden": 256, "layers": 4, "vocabulary": 8192, "length": 2048, "anchors": 192, "block": 16},
}
WARM_UP = 3
GAMMA = {8: 4.0, 16: 7.0}


class Side:
    """A worker that waits for its turn."""

    def __init__(self, who: str, shape: dict[str, Any]) -> None:
        self.who = who
        self.steps: list[dict[str, float]] = []
        python = sys.executable if who == OURS else str(PEERS_PYTHON)
        self._process = subprocess.Popen(
            [python, "-W", "ignore", str(HERE / "_step_worker.py"), who, json.dumps(shape)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if who != OURS else None,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        self._answer()

    def ask(self, **question: Any) -> dict[str, float]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.who} ended: python bench/_step_worker.py {self.who} '{{…}}' says why")
        answer: dict[str, float] = json.loads(line)
        return answer

    def end(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def column(self, name: str) -> list[float]:
        return [step[name] for step in self.steps]


def draw_anchors(shape: dict[str, Any], draw: random.Random) -> list[int]:
    """Supervised positions that leave room for a whole block, which every definition allows."""
    last = shape["length"] - shape["block"]
    return sorted(draw.sample(range(shape["length"] // 4, last + 1), shape["anchors"]))


def compare(shape: dict[str, Any], whom: list[str], steps: int) -> dict[str, Side]:
    draw = random.Random(0)
    sides = {who: Side(who, shape) for who in (OURS, *whom)}
    for turn in range(WARM_UP + steps):
        anchors = draw_anchors(shape, draw)
        answers = {}
        for side in list(sides.values())[:: 1 if turn % 2 else -1]:
            answers[side.who] = side.ask(anchors=anchors)
            if turn >= WARM_UP:
                side.steps.append(answers[side.who])
        check(turn, answers, shape)
    for side in sides.values():
        side.end()
    return sides


def check(turn: int, answers: dict[str, dict[str, float]], shape: dict[str, Any]) -> None:
    """Whoever defines the loss as we do must have computed the same, step after step."""
    ours = answers[OURS]
    for who, theirs in answers.items():
        factor, tolerance = 1.0, 1e-4
        if who == SPECULATORS:
            tolerance = 1e-4 if turn == 0 else 1e-2  # AdamW's epsilon meets gradients of another size
            slots = range(1, shape["block"])
            factor = statistics.mean(2.718281828459045 ** (-(k - 1) / GAMMA[shape["block"]]) for k in slots)
            if shape["loss"] != "kl":
                continue  # its labels are the target's choices, not the data's
        for what in ("loss", "norm"):
            if abs(ours[what] * factor / theirs[what] - 1) > tolerance:
                raise SystemExit(
                    f"step {turn}: {what} {ours[what] * factor:.7g} is not {who}'s, {theirs[what]:.7g}: "
                    "the two do not train alike, so their times say nothing"
                )
        if turn == 0 and who != OURS:
            print(f"  loss of the first step {ours['loss'] * factor:.7f}, {who}'s {theirs['loss']:.7f}")


def report(name: str, sides: dict[str, Side], loss: str) -> None:
    ours = sides[OURS]
    print(f"{name}, {loss}: {'':15} best ms  median ms  ours/theirs   peak RSS MB")
    for who, side in sides.items():
        ratio = statistics.median(a / b for a, b in zip(ours.column("ms"), side.column("ms"), strict=True))
        best, median = min(side.column("ms")), statistics.median(side.column("ms"))
        print(f"  {who:20} {best:9.1f} {median:10.1f} {ratio:12.3f} {side.column('peak_mb')[-1]:13.0f}")
        if who == OURS:
            continue
        # The ratio that counts is that of the pairs, so their time is stated as what makes it so.
        record(
            f"a training step on the CPU, {name}, {loss}",
            f"{who}, paired step by step",
            ours=median * ratio,
            theirs=median,
            unit="ms",
            n=len(side.steps),
        )
        record(
            f"peak memory of a training process, {name}, {loss}",
            who,
            ours=ours.column("peak_mb")[-1],
            theirs=side.column("peak_mb")[-1],
            unit="MB",
            n=1,
        )


def objective_memory(name: str, shape: dict[str, Any], whom: list[str]) -> None:
    """What loss, gradient to the drafter's output and metrics need beyond what was there before."""
    anchors = draw_anchors(shape, random.Random(0))
    found = {}
    for who in (OURS, *whom):
        side = Side(who, shape)
        found[who] = side.ask(objective=anchors)["peak_mb"]
        side.end()
    for who in whom:
        record(
            f"memory of the objective, {name}, {shape['loss']}",
            who,
            ours=found[OURS],
            theirs=found[who],
            unit="MB",
            n=1,
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="CONFIGURATION", help="of A B C D (default: all)")
    parser.add_argument("--steps", type=int, help="turns that count (default: 40, 20, 12, 8 by size)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of every side (default: all)")
    parser.add_argument("--against", default=f"{NEMO},{SPECFORGE},{SPECULATORS}", help="which peers")
    parser.add_argument("--loss", choices=("ce", "kl"), help="only this one; kl: soft labels (speculators)")
    options = parser.parse_args()
    if not PEERS_PYTHON.exists():
        print(f"{PEERS_PYTHON} is missing: `make bench-peers` puts the peers there; nothing was measured")
        return 0
    whom = options.against.split(",")
    for name in options.names or CONFIGURATIONS:
        steps = options.steps or {"A": 40, "B": 20, "C": 12, "D": 8}[name]
        shape = {**CONFIGURATIONS[name], "threads": options.threads}
        if options.loss != "kl":
            print(f"{name}: {CONFIGURATIONS[name]}")
            report(name, compare({**shape, "loss": "ce"}, whom, steps), "ce")
            objective_memory(name, {**shape, "loss": "ce"}, whom)
        if options.loss != "ce" and SPECULATORS in whom and find_spec("trainer.closed_form"):
            report(name, compare({**shape, "loss": "kl"}, [SPECULATORS], steps), "kl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
