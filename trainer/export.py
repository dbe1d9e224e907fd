"""Write a checkpoint's drafter as serving engines load it, read it back, and compare.

python -m trainer.export CHECKPOINT|OUTPUT_DIR --format native|speculators --to DIR [--target-model DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trainer import checkpoint, formats, tensorfile
from trainer.drafter_config import DrafterConfig
from trainer.errors import InputError, to_the_end
from trainer.files import flush
from trainer.modeldir import read_config, target_digest, text_config

if TYPE_CHECKING:
    from torch import Tensor

LARGE = 250_000_000  # parameters beyond which logits are compared in float32 instead of float64
TOLERANCE = {"float64": 1e-9, "float32": 1e-3}  # of the logits' standard deviation


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message.replace("the following arguments are required", "missing"))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m trainer.export",
        description="Write a checkpoint's drafter as serving engines load it, read it back, and compare.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT|OUTPUT_DIR", help="a checkpoint, or where they lie"
    )
    parser.add_argument("--format", choices=formats.FORMATS, default="native", help="default: native")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="the directory to write")
    parser.add_argument(
        "--target-model", type=Path, metavar="DIR", help="the target: is compared with, and named in it"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights, default: float32"
    )
    return parser.parse_args(argv)


def find(given: Path) -> checkpoint.Found:
    """The checkpoint that `given` is, or the newest whole one below it: of an output directory, of one run's
    directory in it, or among what `fab pull` has brought. Raises InputError.
    """
    if not given.is_dir():
        raise InputError(f"{given}: there is no such directory; give a checkpoint, or where checkpoints lie")
    if any((given / name).exists() for name in (*checkpoint.TENSORS, "state.json")):
        found = checkpoint.examine(given)
        if isinstance(found, str):
            raise InputError(f"{given}: this checkpoint is damaged: {found}; take another one")
        return found
    whole = []
    for path in [
        *checkpoint.directories(given),
        *sorted(given.glob("step-*")),
        *sorted(given.glob("*-step-*")),
    ]:
        if isinstance(found := checkpoint.examine(path), str):
            print(f"warning: checkpoint {path} is damaged and passed over: {found}", file=sys.stderr)
        else:
            whole.append(found)
    if not whole:
        raise InputError(f"{given}: holds no checkpoint that is whole; give a checkpoint, or where they lie")
    return max(whole, key=lambda one: one.state.sequence)


def export(
    found: checkpoint.Found, kind: str, place: Path, target: Path | None = None, dtype: str = "float32"
) -> tuple[str, str]:
    """Write the drafter of `found` to the directory `place`, which appears whole, checked, by rename.

    Returns (what was compared, largest difference) for people. Raises InputError for a checkpoint or a target
    that does not fit, for a `place` that is not an earlier export, and where what was read back differs.
    """
    config = DrafterConfig.from_json(checkpoint.read_config(found))
    if not _replaceable(place):
        raise InputError(f"--to {place}: exists and is not an export of ours; give another directory")
    if target:
        _check_target(target, config, found)
    import torch  # late: wrong input is told at once

    weights = checkpoint.load(found)[0]
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    if wrong := formats.difference(shapes, formats.tensors(config)):
        raise InputError(f"{found.path}: its weights do not fit its config.json: {wrong}")
    if bad := [name for name, value in weights.items() if not bool(torch.isfinite(value).all())]:
        raise InputError(f"{found.path}: {bad[0]} holds values that are not finite")
    written = {name: value.to(getattr(torch, dtype)).contiguous() for name, value in weights.items()}
    mark = {"checkpoint": f"{found.state.run_id}, step {found.state.step}"}
    if kind == "native":
        value = formats.native(config, dtype, mark)
    else:
        architectures = read_config(target).get("architectures") if target else None
        name = str(target.resolve()) if target else None
        value = formats.speculators(config, dtype, mark, name, architectures or [])
    partial = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        tensorfile.write(partial / formats.WEIGHTS, written)
        (partial / "config.json").write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        told = _compare(partial, config, written, target)
        for file in (*partial.iterdir(), partial):
            flush(file)
        _move(partial, place)
    except OSError as error:
        raise InputError(f"--to {place}: cannot be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return told


def _check_target(target: Path, config: DrafterConfig, found: checkpoint.Found) -> None:
    theirs = text_config(target)
    shape = (theirs.hidden_size, theirs.vocab_size, theirs.num_hidden_layers)
    if shape != (config.hidden_size, config.vocab_size, config.num_target_layers):
        raise InputError(f"--target-model {target}: {found.path} was trained for a target of another shape")
    named = str(found.state.settings.get("target", "")).rpartition(" ")[2]  # "toy " may stand before it
    if named and named != target_digest(target):
        raise InputError(f"--target-model {target}: {found.path} was trained for another target ({named})")


def _replaceable(place: Path) -> bool:
    """Whether nothing but an earlier export would be lost."""
    if not place.exists() and not place.is_symlink():
        return True
    try:
        config = json.loads((place / "config.json").read_text(encoding="utf-8"))
        names = {path.name for path in place.iterdir()}
    except (OSError, ValueError):
        return False
    return formats.MARK in config and names <= {"config.json", formats.WEIGHTS} and not place.is_symlink()


def _move(partial: Path, place: Path) -> None:
    """`partial` becomes `place`; an earlier export there goes only when the new one is complete."""
    old = place.with_name(f".{place.name}.{os.getpid()}.old")
    if place.exists():
        place.rename(old)
    try:
        partial.rename(place)
    except OSError:
        if old.exists():
            old.rename(place)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _compare(
    directory: Path, config: DrafterConfig, written: dict[str, Tensor], target: Path | None
) -> tuple[str, str]:
    """Read `directory` back as an engine would and hold its logits against the trained drafter's.

    Without a target, random numbers stand for its embedding and its output head.
    """
    import torch
    from safetensors import safe_open

    from trainer.attention import Blocks
    from trainer.drafter import Drafter
    from trainer.served import Served

    with safe_open(directory / formats.WEIGHTS, "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    if wrong := formats.difference(shapes, formats.tensors(config)):
        raise InputError(f"what was written to {directory} is not what was meant: {wrong}")
    parameters = sum(value.numel() for value in written.values())
    dtype = torch.float64 if parameters <= LARGE else torch.float32
    served = Served(directory, dtype)
    drafter = Drafter(config).to(dtype).eval()
    drafter.load_state_dict(written)
    facts = (served.taps, served.mask_token_id, served.block_size)
    if facts != (list(config.target_layer_ids), config.mask_token_id, config.block_size):
        raise InputError(f"what was written to {directory} names other layers, mask token or block: {facts}")

    random = torch.Generator().manual_seed(0)
    size, width = config.block_size, config.hidden_size
    anchors = [0, 3, 3 + size]
    taps = torch.randn(1, anchors[-1], shapes["fc.weight"][1], generator=random, dtype=dtype)
    if target:
        embedding, head = (weight.to(dtype) for weight in _vocabulary(target))
        ids = torch.full((len(anchors), size), config.mask_token_id)
        ids[:, 0] = torch.randint(config.vocab_size, (len(anchors),), generator=random)
        blocks_in = embedding[ids]
    else:
        head = torch.randn(min(config.vocab_size, 1000), width, generator=random, dtype=dtype)
        blocks_in = torch.randn(len(anchors), size, width, generator=random, dtype=dtype)
    blocks = Blocks.build([0] * len(anchors), anchors, size, window=config.sliding_window)
    with torch.no_grad():
        ours = drafter(blocks_in, blocks, drafter.fuse(taps)) @ head.T
        each = [served.hidden(x, taps[0], a) for x, a in zip(blocks_in, anchors, strict=True)]
        theirs = torch.stack(each) @ head.T
    largest = float((ours - theirs).abs().max() / ours.std())
    name = str(dtype).removeprefix("torch.")
    if not largest <= TOLERANCE[name]:
        raise InputError(
            f"the drafter read back from {directory} is not the one that was trained: its logits differ by "
            f"{largest:.1e} of their standard deviation; this is a defect of the exporter, please report it"
        )
    what = f"{ours.numel():,} logits of {len(anchors)} blocks in {name}"
    return what, f"{largest:.1e} of their standard deviation"


def _vocabulary(target: Path) -> tuple[Tensor, Tensor]:
    """The target's embedding and output head, [V, H] each."""
    from trainer.target import Target

    loaded = Target.load(target)
    return loaded.model.get_input_embeddings().weight, loaded.lm_head


def run(argv: Sequence[str] | None = None) -> None:
    """Raises InputError for what can be put right by whoever typed it."""
    arguments = _arguments(argv)
    found = find(arguments.checkpoint)
    place = Path(os.path.abspath(arguments.to))
    what, largest = export(found, arguments.format, place, arguments.target_model, arguments.dtype)
    config: Any = checkpoint.read_config(found)
    print(f"{found.path} → {place}: {arguments.format} format, {arguments.dtype}")
    print(f"read back by an independent loader: {what} differ by {largest} at most")
    target = str(arguments.target_model.resolve()) if arguments.target_model else "TARGET"
    for engine, line in formats.commands(arguments.format, target, str(place), config["block_size"]):
        print(f"{engine}: {line}")
        if engine == "SGLang" and config.get("use_sliding_window"):
            print(
                "warning: SGLang lets a slot of a layer with a sliding window see no later slot of its "
                "block, which is not how they were trained; serve this drafter with vLLM"
            )


def main(argv: Sequence[str] | None = None) -> int:
    try:
        run(argv)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(to_the_end(main))
