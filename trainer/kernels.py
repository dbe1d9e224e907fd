"""Which fast kernels a target with recurrent layers has here, and which it lacks.

Layers of linear attention (Qwen3-Next, Qwen3.5, …) are computed by kernels from packages of their own. Where
one is missing, transformers takes its reference code in PyTorch instead, which is right and many times
slower, and at most warns. So it is said at the start, before GPUs are kept busy with that. Needs no torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import InputError

DISTRIBUTIONS = {
    "fla": "flash-linear-attention",
    "causal_conv1d": "causal-conv1d",
    "mamba_ssm": "mamba-ssm",
}  # what is imported -> what is installed
RECURRENT = ("linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding")  # kinds of layers

_ASKS_FOR = re.compile(r'use_kernel_func_from_hub_with_fallback\(\s*"\w+",\s*"(\w+)"')


@dataclass(frozen=True)
class Kernels:
    """What the layers of one target ask for, and what of it is here."""

    recurrent: int  # layers with a recurrent state
    layers: int
    active: tuple[str, ...]  # distributions
    missing: tuple[str, ...]
    broken: Mapping[str, str]  # installed, but they cannot be imported: why

    @property
    def install(self) -> str:
        return f"pip install {' '.join([*self.missing, *self.broken])}"

    @property
    def complete(self) -> bool:
        return not self.missing and not self.broken

    def line(self) -> str | None:
        """For the log; None if no layer asks for a kernel."""
        if not self.recurrent or not (self.active or self.missing or self.broken):
            return None
        states = [f"{name} active" for name in self.active]
        states += [f"{name} missing" for name in self.missing]
        states += [f"{name} cannot be imported ({why})" for name, why in self.broken.items()]
        end = "" if self.complete else f": PyTorch's own code is slow there; {self.install}"
        which = f"{self.recurrent} of the target's {self.layers} layers are recurrent"
        return f"{which} · {', '.join(states)}{end}"

    def require(self) -> None:
        """Raises InputError if one is missing (--require-fast-kernels)."""
        if self.recurrent and not self.complete:
            names = " and ".join([*self.missing, *self.broken])
            raise InputError(
                f"--require-fast-kernels: {names} cannot be used here, which {self.recurrent} of the "
                f"target's {self.layers} layers need to be fast: {self.install}"
            )


def kernels(config: Mapping[str, Any], *, load: bool = False) -> Kernels:
    """What a target's config.json asks for. `load`: try to import what is installed, as transformers will."""
    text = config.get("text_config") or config
    layers = int(text.get("num_hidden_layers") or 0)
    recurrent = _recurrent_layers(text, layers)
    active, missing, broken = [], [], {}
    for name in _packages(str(text.get("model_type") or config.get("model_type"))) if recurrent else ():
        distribution = DISTRIBUTIONS[name]
        if importlib.util.find_spec(name) is None:
            missing.append(distribution)
        elif load and (why := _why_not(name)):
            broken[distribution] = why
        else:
            active.append(distribution)
    return Kernels(recurrent, layers, tuple(active), tuple(missing), broken)


def _recurrent_layers(text: Mapping[str, Any], layers: int) -> int:
    """How many layers of a text config keep a recurrent state."""
    kinds: Sequence[str] | None = text.get("layer_types") or text.get("layers_block_type")
    if kinds:
        return sum(kind in RECURRENT for kind in kinds)
    if any(key.startswith("linear_") for key in text):  # as Qwen3-Next writes it: every n-th is not
        return layers - layers // int(text.get("full_attention_interval") or 4)
    return layers if any(key.startswith(("mamba_", "ssm_")) for key in text) else 0


def _packages(model_type: str) -> list[str]:
    """The packages that transformers' code of this kind of model takes kernels from, by its own words."""
    spec = importlib.util.find_spec("transformers")
    home = Path(next(iter(spec.submodule_search_locations or ()))) if spec else Path()
    for name in (model_type, model_type.removesuffix("_text")):
        try:
            code = (home / "models" / name / f"modeling_{name}.py").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        return sorted(set(_ASKS_FOR.findall(code)) & set(DISTRIBUTIONS), key=list(DISTRIBUTIONS).index)
    return ["fla", "causal_conv1d"]  # code that transformers does not bring


def _why_not(name: str) -> str | None:
    try:
        importlib.import_module(name)
    except Exception as error:  # a package built for another torch raises what it likes
        return " ".join(str(error).split())[:100] or type(error).__name__
    return None
