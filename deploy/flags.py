"""The trainer's flags, as far as a client needs them: name, type, range.

The client has no torch and does not import the trainer, yet a mistyped or impossible flag has to be refused
here, not after the old run was stopped. So this table says a second time what trainer/config.py says;
tests/unit/test_flags.py compares the two.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deploy.errors import either


@dataclass(frozen=True)
class Flag:
    """One flag. `low` and `high` are inclusive unless `above`/`below` (exclusive) are used."""

    kind: str  # int | float | text | switch | integers | devices
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    pattern: str = ""
    described: str = ""  # of the pattern, for people

    def wanted(self) -> str:
        """``a number above 0``, ``a whole number from 2 to 64``, ``one of auto or never``."""
        if self.choices:
            return either(self.choices)
        if self.described:
            return self.described
        noun = {
            "int": "a whole number",
            "float": "a number",
            "text": "a text",
            "switch": "true or false",
            "integers": "a list of whole numbers, like [1, 3, 5]",
            "devices": "a list of GPUs, like [0, 1] (0+1: one target over both; cpu:0: no GPU)",
        }[self.kind]
        parts = []
        if self.low is not None and self.high is not None:
            parts.append(f"from {self.low} to {self.high}")
        elif self.low is not None:
            parts.append(f"of at least {self.low}")
        elif self.above is not None:
            parts.append(f"above {self.above}")
        if self.below is not None:
            parts.append(f"below {self.below}")
        return " ".join([noun, " and ".join(parts)]).strip()

    def fits(self, value: Any) -> bool:
        if self.kind == "switch":
            return isinstance(value, bool)
        if self.kind == "integers":
            return (
                isinstance(value, list)
                and bool(value)
                and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
                and all(0 <= item <= LARGEST for item in value)
            )
        if self.kind == "devices":
            return all(_PLACE.fullmatch(place) for place in _places(value))
        if self.kind == "text":
            # A model directory may be called 7: a number is a text that YAML has typed.
            if isinstance(value, bool) or not isinstance(value, str | int | float) or "\0" in str(value):
                return False
            if self.pattern:
                return re.fullmatch(self.pattern, str(value)) is not None
            return not self.choices or str(value) in self.choices
        number = int if self.kind == "int" else (int, float)
        if isinstance(value, bool) or not isinstance(value, number):
            return False
        if not -LARGEST_FLOAT <= value <= LARGEST_FLOAT:  # no NaN, no infinity, nothing of 400 digits
            return False
        return not (
            (self.low is not None and value < self.low)
            or (self.high is not None and value > self.high)
            or (self.above is not None and value <= self.above)
            or (self.below is not None and value >= self.below)
        )


_PLACE = re.compile(r"\d{1,4}(\+\d{1,4})*|cpu(:\d{1,4})?")
LARGEST = 2**31 - 1
LARGEST_FLOAT = sys.float_info.max

_COUNT = Flag("int", low=1, high=LARGEST)
_TEXT = Flag("text")
_SWITCH = Flag("switch")

FLAGS: dict[str, Flag] = {
    "target-model": _TEXT,
    "data-dir": _TEXT,
    "resume": Flag("text", choices=("auto", "never")),
    "epochs": _COUNT,
    "max-steps": _COUNT,
    "lr": Flag("float", above=0),
    "warmup-ratio": Flag("float", low=0, below=1),
    "optimizer": Flag("text", choices=("adamw", "muon")),
    "weight-decay": Flag("float", low=0),
    "grad-accum": _COUNT,
    "grad-clip": Flag("float", low=0),
    "token-budget": Flag("int", low=16, high=LARGEST),
    "max-seq-len": Flag("int", low=16, high=LARGEST),
    "max-batch-size": _COUNT,
    "packing": _SWITCH,
    "max-nonfinite-steps": _COUNT,
    "max-anchors": _COUNT,
    "seed": Flag("int", low=0, high=2**63 - 1),
    "block-size": Flag("int", low=2, high=256),
    "num-draft-layers": Flag("int", low=1, high=256),
    "target-layer-ids": Flag("integers"),
    "num-taps": _COUNT,
    "mask-token-id": Flag("int", low=0, high=LARGEST),
    "gamma": Flag("float", above=0),
    "sliding-window": _COUNT,
    "init-from-target": _SWITCH,
    "noise-start": Flag("float", low=0),
    "noise-end": Flag("float", low=0),
    "noise-type": Flag("text", choices=("uniform", "gaussian")),
    "loss-type": Flag("text", choices=("decay", "dpace")),
    "dpace-alpha": Flag("float", low=0, high=1),
    "use-soft-labels": _SWITCH,
    "kl-weight": Flag("float", low=0, high=1),
    "kl-temperature": Flag("float", above=0),
    "cap-lambda": Flag("float", low=0),
    "loss-chunk-mb": _COUNT,
    "sample-blocks": Flag("int", low=0, high=LARGEST),
    "save-interval": _COUNT,
    "keep-checkpoints": _COUNT,
    "keep-every": _COUNT,
    "log-interval": Flag("float", low=0),
    "eval-prompts": Flag("int", low=0, high=LARGEST),
    "eval-interval": Flag("int", low=0, high=LARGEST),
    "eval-file": _TEXT,
    "eval-chat": _SWITCH,
    "eval-tokens": Flag("int", low=2, high=LARGEST),
    "cache-features": _SWITCH,
    "threads": Flag("int", low=1, high=1024),
    "require-fast-kernels": _SWITCH,
    "dtype": Flag("text", choices=("float32", "bfloat16")),
    "drafter-dtype": Flag("text", choices=("auto", "float32", "bfloat16")),
    "recompute": _SWITCH,
    "device": Flag("text", pattern=r"auto|cpu|cuda(:\d+)?", described="auto, cpu, cuda or cuda:N"),
    "target-gpus": Flag("devices"),
    "drafter-gpus": Flag("devices"),
    "stall-timeout": Flag("float", low=0),
    "compile": Flag("text", choices=("auto", "on", "off")),
    "fresh-compile-cache": _SWITCH,
    "wandb-project": _TEXT,
    "wandb-run-name": _TEXT,
}

# The trainer's own values, as far as flags have to agree with each other.
DEFAULTS: dict[str, int] = {"token-budget": 16384, "max-seq-len": 3072, "block-size": 16}

# Set by deploy/ itself, so that state, logs and checkpoints lie where the other tasks look for them.
RESERVED: dict[str, str] = {
    "output-dir": "checkpoints lie with the name, under names/<name>/checkpoints",
    "cache-dir": "caches lie with the name; a host's `cache:` in fabric.yaml moves them",
    "run-dir": "every run gets its own directory",
    "config": "the run's file is already the configuration",
    "print-config": "use `fab render`",
    "check-config": "use `fab plan`",
    "nodes": "it follows from the hosts that are given",
    "node": "each host has its own number",
    "rendezvous": "it is the first of the hosts that are given",
    "interface": "it is a host's, not the run's",
    "gpu-memory": "only --check-config takes it",
}


def spelled(name: str) -> str:
    """`grad_accum` and `grad-accum` are one flag."""
    return name.replace("_", "-")


def conflict(values: Mapping[str, Any]) -> tuple[str, str] | None:
    """(flag, what is wrong) for flags that are fine alone and impossible together; None if there are none."""
    whole = {**DEFAULTS, **values}
    if whole["max-seq-len"] > whole["token-budget"]:
        return (
            "max-seq-len",
            f"is {whole['max-seq-len']}, but must fit into token-budget, {whole['token-budget']}",
        )
    if whole["block-size"] >= whole["max-seq-len"]:
        return (
            "block-size",
            f"is {whole['block-size']}, but must be below max-seq-len, {whole['max-seq-len']}",
        )
    if "target-layer-ids" in values and "num-taps" in values:
        return "num-taps", "cannot be given together with target-layer-ids; keep one of them"
    for name in ("kl-weight", "kl-temperature"):
        if name in values and not values.get("use-soft-labels"):
            return name, "means nothing without use-soft-labels: true; add that, or leave it out"
    paced = values.get("loss-type") == "dpace"
    if "dpace-alpha" in values and not paced:
        return "dpace-alpha", "means nothing without loss-type: dpace; add that, or leave it out"
    if "gamma" in values and paced:
        return "gamma", "cannot be given together with loss-type: dpace; keep one of them"
    for name in ("eval-file", "eval-interval"):
        if values.get(name) and not values.get("eval-prompts"):
            return name, "evaluates nothing by itself: say on how many prompts with eval-prompts"
    return _roles(values.get("target-gpus"), values.get("drafter-gpus"), values.get("device", "auto"))


def _places(value: Any) -> list[str]:
    """Devices as they are named one by one, whether YAML gives a list, a text or a number."""
    every = value if isinstance(value, list) else str(value).split(",")
    return ["" if isinstance(one, bool) else str(one) for one in every] or [""]


def _roles(targets: Any, drafters: Any, device: str) -> tuple[str, str] | None:
    """What is wrong with the devices that are named."""
    if targets is None and drafters is None:
        return None
    if targets is None or drafters is None:
        given, other = (
            ("target-gpus", "drafter-gpus") if drafters is None else ("drafter-gpus", "target-gpus")
        )
        return given, f"needs {other} beside it: say which GPUs do the other half of the work"
    if device != "auto":
        return "device", "cannot be given together with target-gpus; keep one of them"
    places = {"target-gpus": _places(targets), "drafter-gpus": _places(drafters)}
    pieces = {name: [part for one in given for part in one.split("+")] for name, given in places.items()}
    for name, numbers in pieces.items():
        if len(set(numbers)) < len(numbers):
            return name, "names a GPU twice; name each once"
    if len({part.startswith("cpu") for parts in pieces.values() for part in parts}) > 1:
        return "drafter-gpus", "and target-gpus mix processes on the CPU with GPUs: take one kind"
    if any("+" in one for one in places["drafter-gpus"]):
        return "drafter-gpus", "spreads a drafter over several GPUs: only a target can be, give it one each"
    shared = set(pieces["target-gpus"]) & set(pieces["drafter-gpus"])
    if shared and set(places["target-gpus"]) != set(places["drafter-gpus"]):
        return "drafter-gpus", "shares a GPU with target-gpus: give each GPU one role, or both the same GPUs"
    return None


def argv(values: Mapping[str, Any]) -> list[str]:
    """The command line for checked values, in the table's order: equal settings are equal bytes."""
    words: list[str] = []
    for name in sorted(values, key=list(FLAGS).index):
        flag, value = FLAGS[name], values[name]
        if flag.kind == "switch":
            words.append(f"--{name}" if value else f"--no-{name}")
            continue
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        # "--flag=-x": argparse takes a separate word that begins with a dash for the next flag.
        words += [f"--{name}={text}"] if text.startswith("-") or not text else [f"--{name}", text]
    return words
