"""Measure a checkpoint: real speculative decoding of prompts from a file.

python -m trainer.decode --target-model DIR --drafter CHECKPOINT --prompts FILE
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trainer.config import DEVICE
from trainer.errors import InputError, to_the_end
from trainer.journal import PERIOD
from trainer.modeldir import check_safetensors, check_weights, read_config, stop_tokens, text_config

if TYPE_CHECKING:
    from trainer.drafter import Drafter
    from trainer.evaluation import Row

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in trainer/__main__.py, before torch is imported


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m trainer.decode",
        description="Decode prompts speculatively with the drafter of a checkpoint, and report how it did.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--target-model",
        "--target",
        type=Path,
        required=True,
        dest="target",
        metavar="DIR",
        help="model directory",
    )
    add(
        "--drafter",
        type=Path,
        required=True,
        metavar="DIR",
        help="a drafter's checkpoint, or where a run's or several runs' checkpoints lie: the newest",
    )
    add("--prompts", type=Path, required=True, metavar="FILE", help="JSON, JSON lines or text; may be .gz")
    add("--chat", action="store_true", help="a prompt is a user's message: use the target's chat template")
    add("--max-prompts", type=int, metavar="N", help="the first N prompts (default: all)")
    add("--temperature", default="0,0.7", metavar="T[,T]", help="a row for each; 0: greedy (default: 0,0.7)")
    add("--new-tokens", type=int, default=128, metavar="N", help="per prompt (default: 128)")
    add(
        "--tree-budget", type=int, default=0, metavar="N", help="also decode with trees of N guesses (DDTree)"
    )
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the target")
    add("--device", default="auto", metavar="X", help="auto, cpu, cuda or cuda:N")
    add("--threads", type=int, metavar="N", help="CPU threads (default: all)")
    add("--require-fast-kernels", action="store_true", help="refuse PyTorch's slow code for recurrent layers")
    add(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="the rows as JSON to FILE, or printed instead of a table",
    )
    found = parser.parse_args(argv)
    if found.json not in (None, "-") and not (folder := Path(found.json).absolute().parent).is_dir():
        raise InputError(f"--json {found.json}: there is no directory {folder}")
    found.temperatures = [_temperature(text) for text in found.temperature.split(",")]
    try:
        DEVICE.read(found.device)
    except ValueError:
        raise InputError(f"--device {found.device} must be {DEVICE.what}") from None
    for name, least in (("new_tokens", 2), ("tree_budget", 0), ("max_prompts", 1), ("threads", 1)):
        value = getattr(found, name)
        if value is not None and value < least:
            flag = "--" + name.replace("_", "-")
            raise InputError(f"{flag} {value} must be a whole number of at least {least}")
    return found


def _temperature(text: str) -> float:
    try:
        value = float(text)
        if not 0 <= value < 100:
            raise ValueError
    except ValueError:
        raise InputError(f"--temperature {text} must be a number from 0 to below 100") from None
    return value


def _newest(directory: Path) -> Path:
    """`directory`, or the newest whole checkpoint in it if it is an output directory of the trainer."""
    from trainer import export

    if (directory / "config.json").exists() or not directory.is_dir():
        return directory
    try:
        path = export.find(directory).path
    except InputError as error:
        raise InputError(f"--drafter {error}") from None
    print(f"--drafter {directory}: its newest checkpoint is {path.name}", file=sys.stderr)
    return path


def _check_room(given: argparse.Namespace, longest: int) -> None:
    """Raises InputError if the longest prompt (in tokens) and its continuation are more than the target has
    positions for.
    """
    most = getattr(text_config(given.target), "max_position_embeddings", None)
    if isinstance(most, int) and longest + given.new_tokens > most:
        raise InputError(
            f"--new-tokens {given.new_tokens} behind a prompt of {longest} tokens is more than the {most} "
            f"positions of {given.target}: decode fewer, or leave that prompt out"
        )


class _Progress:
    """What is being decoded, to stderr: every second for a terminal, every `PERIOD` for a file or a pipe."""

    def __init__(self) -> None:
        self.period = 0.0 if sys.stderr.isatty() else PERIOD
        self.said = time.monotonic()
        self.text = ""

    def __call__(self, text: str) -> None:
        if (now := time.monotonic()) - self.said >= self.period and text != self.text:
            self.said, self.text = now, text
            print(text, file=sys.stderr, flush=True)


def load_drafter(directory: Path) -> Drafter:
    """The drafter of a checkpoint, or of an export in the native format: float32, on the CPU.

    Raises InputError if the directory is neither.
    """
    from safetensors.torch import load_file

    from trainer.drafter import Drafter
    from trainer.drafter_config import DrafterConfig

    weights = directory / "drafter.safetensors"
    if not weights.exists() and (exported := directory / "model.safetensors").exists():
        weights = exported
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--drafter {directory}: is no checkpoint ({error.strerror})") from None
    except ValueError as error:
        raise InputError(f"--drafter {directory}: is no checkpoint (config.json: {error})") from None
    try:
        shape = DrafterConfig.from_json(config)
    except (InputError, AttributeError, TypeError):  # another model's, or no object at all
        raise InputError(
            f"--drafter {directory}: its config.json is not a drafter's of ours; give a checkpoint, or where "
            "they lie"
        ) from None
    if wrong := check_safetensors(weights):
        raise InputError(f"--drafter {directory}: {weights.name} {wrong}")
    if not 0 <= shape.mask_token_id < shape.vocab_size:
        raise InputError(
            f"--drafter {directory}: its mask token {shape.mask_token_id} is not in its vocabulary of "
            f"{shape.vocab_size}, so config.json is damaged"
        )
    drafter = Drafter(shape)
    try:
        drafter.load_state_dict(load_file(weights))
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"--drafter {directory}: its weights do not fit config.json ({reason})") from None
    return drafter.eval()


def run(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 if a text is not the target's own. Raises InputError for what can be put
    right by whoever typed it.
    """
    given = _arguments(argv)
    from trainer import device, prompts
    from trainer.kernels import kernels

    try:
        config = read_config(given.target)
    except InputError as error:  # there is no toy here
        raise InputError(str(error).replace(", or toy", "")) from None
    check_weights(given.target)
    device.check(given.device)
    fast = kernels(config, load=True)
    if given.require_fast_kernels:
        fast.require()
    given.drafter = _newest(given.drafter)
    drafter = load_drafter(given.drafter)
    shape = drafter.config
    groups = prompts.read_prompts(
        given.prompts, given.target, shape.vocab_size, chat=given.chat, most=given.max_prompts
    )
    _check_room(given, max(len(prompt) for group in groups.values() for prompt in group))

    import torch

    from trainer.evaluation import Case, evaluate
    from trainer.evaluation_table import histogram, table
    from trainer.target import Target, choose_device

    if given.threads:
        torch.set_num_threads(given.threads)
    if line := fast.line():
        print(line, file=sys.stderr)
    where = choose_device(given.device)
    target = Target.load(given.target, getattr(torch, given.dtype), where)
    own = (target.config.hidden_size, target.config.vocab_size, target.num_layers)
    if own != (shape.hidden_size, shape.vocab_size, shape.num_target_layers):
        raise InputError(
            f"--drafter {given.drafter}: was trained for a target of another shape than this one"
        )
    target.tap(shape.target_layer_ids)
    cases = [Case(name, group, t) for name, group in groups.items() for t in given.temperatures]
    rows = evaluate(
        target,
        drafter.to(where),
        cases,
        given.new_tokens,
        _Progress(),
        stop_tokens(given.target),
        timed=True,
        tree_budget=given.tree_budget,
    )
    if given.json != "-":
        print("\n".join(table(rows, f"block {shape.block_size}, {given.new_tokens} tokens")))
        print("\n".join(histogram(row) for row in rows))
    if given.json:
        _write_json(given, rows, str(where))
    return 0 if all(row.lossless for row in rows) else 1


def _write_json(given: argparse.Namespace, rows: Sequence[Row], device: str) -> None:
    from trainer.evaluation import as_json

    value: dict[str, Any] = {
        "target_model": str(given.target),
        "drafter": str(given.drafter),
        "prompts": str(given.prompts),
        "chat": given.chat,
        "new_tokens": given.new_tokens,
        "dtype": given.dtype,
        "device": device,
        "lossless": all(row.lossless for row in rows),
        "rows": as_json(rows),
    }
    text = json.dumps(value, indent=1)
    if given.json == "-":
        print(text)
        return
    try:
        Path(given.json).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--json {given.json}: cannot be written ({error.strerror})") from None


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return run(argv)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code


if __name__ == "__main__":
    sys.exit(to_the_end(main))
