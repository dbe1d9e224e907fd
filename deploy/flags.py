"""The trainer's flags, as far as a client needs them: name, type, range.

The client has no torch and does not import the trainer, yet a mistyped or impossible flag has to be refused
here, not after the old run was stopped. So this table says a second time what trainer/config.py says;
tests/unit/test_flags.py compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deploy.errors import either


@dataclass(frozen=True)
class Flag:
    """One flag. `low` and `high` are inclusive unless `above`/`below` (exclusive) are used."""

    kind: str  # int | float | text | switch | integers
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()

    def wanted(self) -> str:
        """``a number above 0``, ``a whole number from 2 to 64``, ``one of auto or never``."""
        if self.choices:
            return either(self.choices)
        noun = {
            "int": "a whole number",
            "float": "a number",
            "text": "a text",
            "switch": "true or false",
            "integers": "a list of whole numbers, like [1, 3, 5]",
        }[self.kind]
        parts = []
        if self.low is not None and self.high is not None:
            parts.append(f"from {self.low:g} to {self.high:g}")
        elif self.low is not None:
            parts.append(f"of at least {self.low:g}")
        elif self.above is not None:
            parts.append(f"above {self.above:g}")
        if self.below is not None:
            parts.append(f"below {self.below:g}")
        return " ".join([noun, " and ".join(parts)]).strip()

    def fits(self, value: Any) -> bool:
        if self.kind == "switch":
            return isinstance(value, bool)
        if self.kind == "integers":
            return (
                isinstance(value, list)
                and bool(value)
                and all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value)
            )
        if self.kind == "text":
            # A model directory may be called 7: a number is a text that YAML has typed.
            if isinstance(value, bool) or not isinstance(value, str | int | float) or "\0" in str(value):
                return False
            return not self.choices or str(value) in self.choices
        number = int if self.kind == "int" else (int, float)
        if isinstance(value, bool) or not isinstance(value, number) or not math.isfinite(value):
            return False
        return not (
            (self.low is not None and value < self.low)
            or (self.high is not None and value > self.high)
            or (self.above is not None and value <= self.above)
            or (self.below is not None and value >= self.below)
        )


_COUNT = Flag("int", low=1)
_TEXT = Flag("text")

FLAGS: dict[str, Flag] = {
    "target-model": _TEXT,
    "data-dir": _TEXT,
    "epochs": _COUNT,
    "max-steps": _COUNT,
    "lr": Flag("float", above=0),
    "warmup-ratio": Flag("float", low=0, high=1),
    "weight-decay": Flag("float", low=0),
    "grad-accum": _COUNT,
    "grad-clip": Flag("float", above=0),
    "token-budget": _COUNT,
    "max-seq-len": _COUNT,
    "max-batch-size": _COUNT,
    "block-size": Flag("int", low=2),
    "max-anchors": _COUNT,
    "num-draft-layers": _COUNT,
    "gamma": Flag("float", above=0),
    "save-interval": _COUNT,
    "keep-checkpoints": _COUNT,
    "wandb-project": _TEXT,
    "wandb-run-name": _TEXT,
    "seed": Flag("int", low=0),
    "threads": _COUNT,
    "dtype": _TEXT,
    "device": _TEXT,
    "resume": Flag("text", choices=("auto", "never")),
    "log-interval": Flag("float", low=0),
    "target-layer-ids": Flag("integers"),
    "num-taps": _COUNT,
    "mask-token-id": Flag("int", low=0),
    "cache-features": Flag("switch"),
    "init-from-target": Flag("switch"),
    "eval-prompts": Flag("int", low=0),
    "eval-tokens": _COUNT,
}

# Set by deploy/ itself, so that state, logs and checkpoints lie where the other tasks look for them.
RESERVED: dict[str, str] = {
    "output-dir": "checkpoints lie with the name, under names/<name>/checkpoints",
    "cache-dir": "caches lie with the name; a host's `cache:` in fabric.yaml moves them",
    "run-dir": "every run gets its own directory",
    "config": "the run's file is already the configuration",
    "print-config": "use `fab render`",
    "check-config": "use `fab plan`",
}


def spelled(name: str) -> str:
    """`grad_accum` and `grad-accum` are one flag."""
    return name.replace("_", "-")


def argv(values: Mapping[str, Any]) -> list[str]:
    """The command line for checked values, in the table's order: equal settings are equal bytes."""
    words: list[str] = []
    for name in sorted(values, key=list(FLAGS).index):
        flag, value = FLAGS[name], values[name]
        if flag.kind == "switch":
            words += [f"--{name}"] if value else []
            continue
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        # "--flag=-x": argparse takes a separate word that begins with a dash for the next flag.
        words += [f"--{name}={text}"] if text.startswith("-") or not text else [f"--{name}", text]
    return words
