"""The command line: every flag, its range, and the same names in a run's file.

Settings come from three places, the later winning: the defaults below, the ``trainer:`` mapping of ``--config
FILE.yaml``, the command line. There is one table, the fields of `Settings`; argparse, the reading of YAML and
the errors are derived from it. Standard library and PyYAML only: a wrong flag is told at once, not after
torch has been imported. YAML is read as deploy/yamlfile.py reads it (trainer/yamlrules.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from trainer import roles
from trainer.errors import InputError, nearest
from trainer.kinds import (
    ADDRESS,
    DEVICE,
    DEVICES,
    DIRECTORY,
    INTEGERS,
    SWITCH,
    TEXT,
    Kind,
    integer,
    number,
    one_of,
    share,
)
from trainer.status import RUN_DIR_VARIABLE

CACHE_VARIABLE = "DRAFTHOUSE_CACHE"

# What becomes of a setting that is another one when a run resumes (trainer/resuming.py carries it out).
FREE = "free"  # it decides nothing that is learnt
TOLD = "told"  # what is learnt from then on is another; said
ORDER = "order"  # the micro-batches are others; said, and the epoch in progress begins again
FIXED = "fixed"  # what was learnt cannot be gone on with; refused
SHAPE = "shape"  # the same, judged by the drafter that comes out


def flag(
    default: Any, kind: Kind, help: str, *, learns: bool = False, resume: str = "", before: Any = None
) -> Any:
    """A field of `Settings`. `learns`: it decides what is learnt, and is kept in checkpoints. `resume`: one
    of the words above; without one, TOLD for what learns and FREE for the rest. `before`: what checkpoints
    that do not know it were trained with, if that is not the default.
    """
    resume = resume or (TOLD if learns else FREE)
    before = default if before is None else before
    about = {"kind": kind, "help": help, "learns": learns, "resume": resume, "before": before}
    return field(default=default, metadata=about)


def _cache() -> str:
    return os.environ.get(CACHE_VARIABLE) or str(Path("~/.cache/drafthouse").expanduser())


@dataclass(frozen=True)
class Settings:
    """One field per flag: ``--max-steps`` is `max_steps`, in YAML either spelling."""

    target_model: str = flag(
        "", DIRECTORY, "model directory of the target; toy: a small one, made on the spot"
    )
    data_dir: str | None = flag(None, DIRECTORY, "tokenised completions (default: the toy's, with toy)")
    output_dir: str = flag("checkpoints", DIRECTORY, "where checkpoints go")
    cache_dir: str | None = flag(
        None, DIRECTORY, f"where the toy is kept (default: ${CACHE_VARIABLE}, ~/.cache)"
    )
    run_dir: str | None = flag(None, DIRECTORY, f"the run's directory (default: ${RUN_DIR_VARIABLE})")
    resume: str = flag("auto", one_of("auto", "never"), "go on from the newest checkpoint, if unfinished")

    epochs: int = flag(6, integer(1), "passes over the data", learns=True)
    max_steps: int | None = flag(
        None, integer(1), "optimiser steps, if fewer than the epochs have", learns=True
    )
    lr: float = flag(6e-4, number(0, positive=True), "peak learning rate", learns=True)
    warmup_ratio: float = flag(0.04, number(0, 1), "part of the steps that warms up", learns=True)
    optimizer: str = flag(
        "adamw", one_of("adamw", "muon"), "muon: orthogonal updates of matrices", learns=True, resume=FIXED
    )
    weight_decay: float = flag(0.01, number(0), "AdamW's, for matrices", learns=True)
    grad_accum: int = flag(1, integer(1), "micro-batches per optimiser step", learns=True)
    grad_clip: float = flag(1.0, number(0), "largest norm of a gradient; 0: no limit", learns=True)
    max_nonfinite_steps: int = flag(
        25, integer(1), "steps in a row without a finite gradient that end the run"
    )
    token_budget: int = flag(
        16384, integer(16), "positions in a micro-batch, padding included", learns=True, resume=ORDER
    )
    max_seq_len: int = flag(3072, integer(16), "longer documents are cut here", learns=True, resume=ORDER)
    max_batch_size: int = flag(64, integer(1), "rows in a micro-batch", learns=True, resume=ORDER)
    packing: bool = flag(
        False, SWITCH, "several documents in a row, up to --max-seq-len", learns=True, resume=ORDER
    )
    max_anchors: int = flag(512, integer(1), "blocks in a micro-batch, shared by its documents", learns=True)
    seed: int = flag(
        0,
        integer(0, 2**63 - 1),
        "of the data's order, the anchors and the first weights",
        learns=True,
        resume=ORDER,
    )

    block_size: int = flag(
        16, integer(2, 256), "slots in a block, the anchor included", learns=True, resume=SHAPE
    )
    num_draft_layers: int = flag(5, integer(1, 256), "layers of the drafter", learns=True, resume=SHAPE)
    target_layer_ids: tuple[int, ...] | None = flag(
        None, INTEGERS, "target layers to tap, from 0", learns=True, resume=SHAPE
    )
    num_taps: int | None = flag(
        None, integer(1), "how many layers to tap, if not which (default: 5)", learns=True, resume=SHAPE
    )
    mask_token_id: int | None = flag(
        None, integer(0), "default: <|mask|>, else the first unused id", learns=True, resume=SHAPE
    )
    gamma: float | None = flag(
        None, number(0, positive=True), "decay of the loss along a block (default: by its size)", learns=True
    )
    sliding_window: int | None = flag(
        None,
        integer(1),
        "context positions a slot sees, itself counted (default: all)",
        learns=True,
        resume=SHAPE,
    )
    init_from_target: bool = flag(False, SWITCH, "start from the target's last layers", learns=True)
    noise_start: float = flag(0.0, number(0), "of noise on the context, at the first step", learns=True)
    noise_end: float = flag(0.0, number(0), "the same at the last step; a straight line between", learns=True)
    noise_type: str = flag(
        "uniform", one_of("uniform", "gaussian"), "up to that strength, or of that deviation", learns=True
    )

    loss_type: str = flag(
        "decay", one_of("decay", "dpace"), "how slots weigh: by --gamma, or by D-PACE", learns=True
    )
    dpace_alpha: float | None = flag(
        None, share(), "smoothing of D-PACE; 1: all equally sure (default: 0.5)", learns=True
    )
    use_soft_labels: bool = flag(False, SWITCH, "learn the target's distribution, too", learns=True)
    kl_weight: float | None = flag(
        None, share(), "of soft labels; the rest is cross-entropy (default: 0.15)", learns=True
    )
    kl_temperature: float | None = flag(
        None, number(0, positive=True), "of soft labels (default: 2.0)", learns=True
    )
    cap_lambda: float = flag(0.0, number(0), "weight of the entropy where the drafter is right", learns=True)
    loss_chunk_mb: int | None = flag(
        None, integer(1), "room for logits, in MiB (default: 64 on a CPU, 1024 on a GPU)"
    )
    sample_blocks: int = flag(
        32, integer(0), "blocks looked at now and then for tree-τ and the target's agreement; 0: none"
    )

    save_interval: int = flag(500, integer(1), "steps between checkpoints")
    keep_checkpoints: int = flag(3, integer(1), "how many of a run are kept")
    keep_every: int | None = flag(None, integer(1), "those of every so many steps are kept beside them")
    log_interval: float = flag(10.0, number(0), "seconds between log lines")
    eval_prompts: int = flag(0, integer(0), "prompts for real speculative decoding before and after; 0: none")
    eval_interval: int = flag(0, integer(0), "steps between evaluations meanwhile; 0: none")
    eval_file: str | None = flag(
        None, DIRECTORY, "held-out prompts: JSON, JSON lines or text (default: the data's, the toy's own)"
    )
    eval_chat: bool = flag(False, SWITCH, "they are a user's messages: use the target's chat template")
    eval_tokens: int = flag(128, integer(2), "tokens decoded for each prompt")
    cache_features: bool = flag(False, SWITCH, "compute the target's features once and keep them in memory")
    threads: int | None = flag(None, integer(1, 1024), "CPU threads (default: all)")
    dtype: str = flag("float32", one_of("float32", "bfloat16"), "of the target", learns=True)
    drafter_dtype: str = flag(
        "auto",
        one_of("auto", "float32", "bfloat16"),
        "of its products and what it keeps for them; its weights are float32 (auto: bfloat16 on a GPU)",
        learns=True,
        before="float32",
    )
    recompute: bool = flag(
        False, SWITCH, "keep a layer's input alone and compute it twice: less memory, more time"
    )
    require_fast_kernels: bool = flag(False, SWITCH, "refuse PyTorch's slow code for recurrent layers")
    device: str = flag("auto", DEVICE, "where to compute (auto: a GPU if there is one)")
    target_gpus: tuple[str, ...] | None = flag(
        None, DEVICES, "GPUs that run the target, a process each, in place of --device"
    )
    drafter_gpus: tuple[str, ...] | None = flag(None, DEVICES, "GPUs that train the drafter")
    nodes: int = flag(1, integer(1, 1024), "machines of this run, all with the same devices")
    node: int = flag(0, integer(0, 1023), "which of them this is; 0 writes the checkpoints")
    rendezvous: str | None = flag(
        None, ADDRESS, "where they meet: an address of node 0 and a port; the next port is used, too"
    )
    interface: str | None = flag(
        None, TEXT, "network interface between them (default: the one that leads to --rendezvous)"
    )
    stall_timeout: float = flag(
        1800.0, number(0), "seconds without a step that end a training, with all stacks; 0: never"
    )
    compile: str = flag("auto", one_of("auto", "on", "off"), "torch.compile of the drafter (auto: on a GPU)")
    fresh_compile_cache: bool = flag(False, SWITCH, "compile anew instead of from the cache")
    wandb_project: str | None = flag(None, TEXT, "also log to Weights & Biases")
    wandb_run_name: str | None = flag(None, TEXT, "the run's name there (default: the run id)")

    def learning(self) -> dict[str, Any]:
        """The settings that decide what is learnt, as JSON values; `gamma` resolved."""
        value = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata["learns"]}
        value["gamma"] = self.decay
        if self.use_soft_labels:
            value["kl_weight"], value["kl_temperature"] = self.soft_labels
        value["dpace_alpha"] = self.dpace
        if self.target_layer_ids is not None:
            value["target_layer_ids"] = list(self.target_layer_ids)
        return value

    def drafter_type(self, *, on_gpu: bool) -> str:
        """--drafter-dtype, "auto" resolved: on GPUs everybody trains in bfloat16, with weights in float32;
        a CPU gains little by it.
        """
        if self.drafter_dtype != "auto":
            return self.drafter_dtype
        return "bfloat16" if on_gpu else "float32"

    @property
    def decay(self) -> float:
        """γ of the loss: as given, else by block size, on the line through the published values."""
        if self.gamma is not None:
            return self.gamma
        known = ((2, 1.0), (8, 4.0), (10, 5.0), (16, 7.0), (32, 10.0))
        for (size, gamma), (next_size, next_gamma) in itertools.pairwise(known):
            if self.block_size <= next_size:
                return gamma + (self.block_size - size) / (next_size - size) * (next_gamma - gamma)
        return known[-1][1]

    @property
    def soft_labels(self) -> tuple[float, float]:
        """(weight, temperature) of the KL divergence; weight 0 without soft labels."""
        weight = 0.15 if self.kl_weight is None else self.kl_weight
        return weight if self.use_soft_labels else 0.0, self.kl_temperature or 2.0

    @property
    def dpace(self) -> float | None:
        """α of D-PACE; None: the slots' weights decay."""
        if self.loss_type != "dpace":
            return None
        return 0.5 if self.dpace_alpha is None else self.dpace_alpha

    @property
    def cache(self) -> Path:
        return Path(self.cache_dir or _cache())


FIELDS = {f.name: f for f in dataclasses.fields(Settings)}


@dataclass(frozen=True)
class Request:
    """A parsed command line."""

    settings: Settings
    print_config: bool
    check_config: bool
    gpu_memory: float | None = None  # GB of each GPU, for a check of a machine that is elsewhere


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message.replace("the following arguments are required", "missing"))


def parser() -> argparse.ArgumentParser:
    made = _Parser(
        prog="python -m trainer",
        description="Trains a DFlash drafter for a frozen target.",
        allow_abbrev=False,
    )
    for name, f in FIELDS.items():
        kind: Kind = f.metadata["kind"]
        option = "--" + name.replace("_", "-")
        if kind is SWITCH:
            made.add_argument(
                option, action=argparse.BooleanOptionalAction, default=None, help=f.metadata["help"]
            )
        else:
            made.add_argument(option, metavar="X", default=None, help=_help(f))
    made.add_argument("--config", metavar="FILE", help="a run's file; its `trainer:` mapping has these flags")
    made.add_argument("--print-config", action="store_true", help="print the resolved settings and end")
    made.add_argument("--check-config", action="store_true", help="check settings, target and data, and end")
    made.add_argument(
        "--gpu-memory",
        metavar="X",
        help="with --check-config: GB of a GPU, to say how many a target needs (default: of those here)",
    )
    return made


def _help(f: Any) -> str:
    default = "" if f.default in (None, "") else f" (default: {f.default})"
    return f.metadata["help"].replace("%", "%%") + default


def parse(argv: Sequence[str] | None = None) -> Request:
    """Raises InputError, one sentence naming the flag or the file and key."""
    made = parser()
    arguments, unknown = made.parse_known_args(argv)
    if unknown:
        word = unknown[0].split("=")[0]
        options = [option for action in made._actions for option in action.option_strings]
        raise InputError(f"unrecognized argument {unknown[0]}{nearest(word, options)}")
    values = read_file(arguments.config) if arguments.config else {}
    for name, f in FIELDS.items():
        given = getattr(arguments, name)
        if isinstance(given, bool):
            values[name] = given
        elif given is not None:
            values[name] = _read(f.metadata["kind"], given, "--" + name.replace("_", "-"))
    settings = Settings(**values)
    check(settings)
    memory = arguments.gpu_memory
    if memory is not None and not arguments.check_config:
        raise InputError("--gpu-memory means nothing without --check-config: add that, or leave it out")
    gigabytes = None if memory is None else _read(number(0, positive=True), memory, "--gpu-memory")
    return Request(settings, arguments.print_config, arguments.check_config, gigabytes)


def read_file(path: str) -> dict[str, Any]:
    """The ``trainer:`` mapping of a run's file. Raises InputError naming file and key."""
    import yaml

    from trainer.yamlrules import load

    try:
        value = load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--config {path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise InputError(f"--config {path}: is not valid YAML ({' '.join(str(error).split())})") from None
    mapping = value.get("trainer") if isinstance(value, dict) else None
    if not isinstance(mapping, dict):
        raise InputError(f"--config {path}: has no `trainer:` mapping with flags")
    # The run's file names weights and data once, for deploy/ too.
    found = {
        name: DIRECTORY.read(str(value[key]))
        for key, name in (("weights", "target_model"), ("data", "data_dir"))
        if value.get(key) and not (key == "data" and value[key] == "toy")
    }
    for key, item in mapping.items():
        name = str(key).replace("-", "_")
        if name not in FIELDS:
            dashed = "_" not in str(key)  # it is answered as it is spelt
            known = [field.replace("_", "-") if dashed else field for field in FIELDS]
            raise InputError(f"--config {path}: unknown key trainer.{key}{nearest(str(key), known)}")
        if item is not None:
            found[name] = _from_yaml(FIELDS[name].metadata["kind"], item, f"--config {path}: trainer.{key}")
    return found


def _from_yaml(kind: Kind, item: Any, name: str) -> Any:
    if not isinstance(item, str):
        if not isinstance(item, kind.types) or (isinstance(item, bool) and kind is not SWITCH):
            raise InputError(f"{name} is {item!r} and must be {kind.what}")
        item = ",".join(map(str, item)) if isinstance(item, list) else str(item)
    return _read(kind, item, name)


def _read(kind: Kind, text: str, name: str) -> Any:
    try:
        return kind.read(text)
    except (ValueError, KeyError):
        raise InputError(f"{name} {text!r} must be {kind.what}") from None


def check(settings: Settings) -> None:
    """What flags must have in common. Raises InputError."""
    if not settings.target_model:
        raise InputError("--target-model is missing: give a model directory, or toy")
    if settings.target_model != "toy" and not settings.data_dir:
        raise InputError(
            "--data-dir is missing: give tokenised completions of the target (only toy brings its own)"
        )
    if settings.max_seq_len > settings.token_budget:
        raise InputError(
            f"--max-seq-len {settings.max_seq_len} does not fit into --token-budget {settings.token_budget}: "
            "one document must fit into a micro-batch"
        )
    if settings.block_size >= settings.max_seq_len:
        raise InputError(
            f"--block-size {settings.block_size} leaves no room in --max-seq-len {settings.max_seq_len}"
        )
    if not settings.eval_prompts and (settings.eval_file or settings.eval_interval):
        which = "--eval-file" if settings.eval_file else "--eval-interval"
        raise InputError(f"{which} evaluates nothing by itself: say on how many prompts with --eval-prompts")
    if settings.target_layer_ids is not None and settings.num_taps is not None:
        raise InputError("--target-layer-ids and --num-taps exclude each other: give one of them")
    for name in ("kl_weight", "kl_temperature"):
        if getattr(settings, name) is not None and not settings.use_soft_labels:
            option = "--" + name.replace("_", "-")
            raise InputError(f"{option} means nothing without --use-soft-labels: add that, or leave it out")
    if settings.dpace_alpha is not None and settings.loss_type != "dpace":
        raise InputError("--dpace-alpha means nothing without --loss-type dpace: add that, or leave it out")
    if settings.gamma is not None and settings.loss_type == "dpace":
        raise InputError(
            "--gamma and --loss-type dpace exclude each other: D-PACE's weights take the place of the decay"
        )
    roles.of(settings)
    if settings.node >= settings.nodes:
        raise InputError(
            f"--node {settings.node} is none of --nodes {settings.nodes}: give a number from 0 to "
            f"{settings.nodes - 1}, another one on each machine"
        )
    if settings.nodes > 1 and settings.rendezvous is None:
        raise InputError("--nodes needs --rendezvous HOST:PORT beside it: say where the machines meet")
    for name in ("rendezvous", "interface"):
        if settings.nodes == 1 and getattr(settings, name) is not None:
            raise InputError(
                f"--{name} means nothing without --nodes of at least 2: add that, or leave it out"
            )
    if settings.nodes > 1 and settings.target_model == "toy":
        raise InputError(
            "--target-model toy is made on each machine and comes out differently on each: "
            "give several --nodes a model directory, the same on all"
        )
