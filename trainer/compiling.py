"""torch.compile of the drafter: when, with which cache, and how often it happened.

Each process compiles for itself and in its main thread alone, since tracing is not safe among threads. What
was compiled lies in a directory named by what it depends on, and is found again by the next start; another
torch, GPU, code or drafter has another directory, so that nothing stale can be found.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trainer.attention import Attend, two_part_attention
from trainer.blocks import Blocks
from trainer.config import Settings
from trainer.drafter import Drafter, run_layer
from trainer.drafter_config import DrafterConfig
from trainer.errors import InputError

Run = Callable[[Tensor, Blocks, Tensor, Tensor], Tensor]
RunLayer = Callable[..., tuple[Tensor, Tensor]]  # called as run_layer

BACKEND = "inductor"
# Modules of this package whose change makes other kernels.
CODE = ("attention", "blocks", "drafter", "elementwise", "flex")


def wanted(choice: str, device: torch.device) -> bool:
    """`choice` is --compile: on a CPU it takes a minute and gains nothing, so "auto" leaves it out there."""
    return choice == "on" or (choice == "auto" and device.type == "cuda")


def facts(device: torch.device, config: DrafterConfig) -> dict[str, Any]:
    """What compiled code depends on."""
    code = hashlib.sha256()
    for name in CODE:
        file = Path(__file__).with_name(f"{name}.py")
        code.update(name.encode() + (file.read_bytes() if file.exists() else b""))
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"{gpu.name} {gpu.major}.{gpu.minor}" if gpu else platform.machine(),
        "code": code.hexdigest(),
        "drafter": config.to_json(),
    }


def cache_directory(cache: Path, of: dict[str, Any], *, fresh: bool = False) -> Path:
    """The directory below `cache` for what depends on `of`, made and handed to torch and Triton. `fresh`
    empties this one, no other.
    """
    name = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:16]
    place = cache / "compiled" / name
    if fresh:
        shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True, exist_ok=True)
    (place / "depends-on.json").write_text(json.dumps(of, indent=1) + "\n", encoding="utf-8")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(place / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(place / "triton")
    return place


def twice(each: RunLayer) -> RunLayer:
    """`each`, of which a layer's input alone is kept; the way back computes the layer once more, to the same
    bits.
    """
    return partial(checkpoint, each, use_reentrant=False, preserve_rng_state=False)


class Drafting:
    """The drafter as training runs it: from (embeddings [N, B, H], blocks, taps [b, C, K·H], rows [M]) to the
    hidden states [M, H] of the slots `rows`, compiled or not, with the execution of attention that the device
    has. What comes in is turned into the type that --drafter-dtype asks for, and so is what comes out.

    Compiled, at the first call, sizes that change become variables after their first change, so that the few
    shapes of training do not each compile anew.
    """

    def __init__(
        self, drafter: Drafter, settings: Settings, device: torch.device, report: Callable[[str], None]
    ) -> None:
        self._drafter = drafter
        self._choice = settings.compile
        self.recompute = settings.recompute
        self.dtype: torch.dtype = getattr(torch, settings.drafter_type(on_gpu=device.type == "cuda"))
        self._report = report
        self.compiled = wanted(settings.compile, device)
        self.cache: Path | None = None
        self._attend: Attend = two_part_attention
        if self.compiled or device.type == "cuda":  # before anything is compiled, flex_attention too
            of = facts(device, drafter.config)
            self.cache = cache_directory(settings.cache, of, fresh=settings.fresh_compile_cache)
        if device.type == "cuda":
            from trainer import flex  # takes a second to import, which a CPU need not wait for

            c = drafter.config
            shared = c.num_attention_heads // c.num_key_value_heads
            self._attend = flex.choose(device, c.num_key_value_heads, shared, c.head_dim, report, self.dtype)
        self._run = self._compiled() if self.compiled else self._plain()

    def _plain(self) -> Run:
        return self._draft(self._attend, twice(run_layer) if self.recompute else run_layer)

    def _draft(self, attend: Attend, each: RunLayer) -> Run:
        drafter = self._drafter

        def draft(embeddings: Tensor, blocks: Blocks, taps: Tensor, rows: Tensor) -> Tensor:
            return drafter(embeddings, blocks, drafter.fuse(taps), attend, rows, each)

        return draft

    def _compiled(self) -> Run:
        # Attention by tiles stays as it is: its sizes are others in every micro-batch. flex_attention has its
        # kernel compiled by itself, and keeps its mask from layer to layer.
        own = self._attend is two_part_attention
        attend = torch.compiler.disable(self._attend, recursive=own)
        torch._dynamo.config.recompile_limit = 64  # beyond it torch would go on uncompiled without a word
        each = run_layer
        if self.recompute:  # a graph is not broken inside of what is computed twice, so that is one by itself
            each = torch.compiler.disable(twice(torch.compile(run_layer, backend=BACKEND)))
        return torch.compile(self._draft(attend, each), backend=BACKEND)

    def __call__(self, embeddings: Tensor, blocks: Blocks, taps: Tensor, rows: Tensor) -> Tensor:
        return self._run(embeddings.to(self.dtype), blocks, taps.to(self.dtype), rows)

    def give_up(self, error: Exception) -> None:
        """Go on uncompiled if `error` is of compiling and that was not asked for; else raise."""
        why = why_failed(error) if self.compiled else None
        if why is None:
            raise error
        if self._choice == "on":
            raise InputError(f"--compile on: it does not work here ({why}); give --compile off") from None
        self._report(f"warning: torch.compile does not work here ({why}), so the drafter runs uncompiled")
        self.compiled, self._run = False, self._plain()


def why_failed(error: BaseException) -> str | None:
    """What is wrong with compiling, in a line; None if `error` is of something else."""
    if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return None
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__


class Compilations:
    """How many pieces of code were compiled since the last look."""

    def __init__(self) -> None:
        self._seen = self._count()

    @staticmethod
    def _count() -> int:
        utils = sys.modules.get("torch._dynamo.utils")  # to import it takes seconds
        return int(utils.counters["stats"]["unique_graphs"]) if utils else 0

    def new(self) -> int:
        count = self._count()
        before, self._seen = self._seen, count
        return count - before
