"""Measure a checkpoint: real speculative decoding of prompts from a file.

python -m trainer.decode --target DIR --drafter CHECKPOINT --prompts FILE.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trainer.errors import InputError
from trainer.modeldir import check_safetensors, check_weights, read_config, stop_tokens

if TYPE_CHECKING:
    from trainer.drafter import Drafter
    from trainer.evaluation import Prompts


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m trainer.decode",
        description="Decode prompts speculatively with the drafter of a checkpoint, and report how it did.",
        allow_abbrev=False,
    )
    parser.add_argument("--target", type=Path, required=True, metavar="DIR", help="model directory")
    parser.add_argument("--drafter", type=Path, required=True, metavar="DIR", help="a drafter's checkpoint")
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE", help="JSON: text or token ids")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: greedy (default)")
    parser.add_argument("--new-tokens", type=int, default=128, metavar="N", help="per prompt (default: 128)")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    found = parser.parse_args(argv)
    if not 0 <= found.temperature < 100:
        raise InputError(f"--temperature {found.temperature:g} must be a number from 0 to below 100")
    if found.new_tokens < 2:
        raise InputError(f"--new-tokens {found.new_tokens} must be a whole number of at least 2")
    return found


def read_prompts(path: Path, target: Path, vocabulary: int) -> Prompts:
    """Named lists of prompts from a JSON file: ``{"name": ["text", [token, …], …]}``, or one bare list.

    Text is tokenised with the target's tokenizer. Raises InputError naming file and prompt.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--prompts {path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise InputError(f"--prompts {path}: is not valid JSON ({error})") from None
    groups = {"prompts": value} if isinstance(value, list) else value
    if not isinstance(groups, dict) or not all(isinstance(group, list) for group in groups.values()):
        raise InputError(f'--prompts {path}: must hold a list of prompts, or {{"name": [prompt, …], …}}')
    tokenizer: Any = None
    found: dict[str, list[list[int]]] = {}
    for name, group in groups.items():
        found[name] = []
        for number, prompt in enumerate(group):
            if isinstance(prompt, str):
                tokenizer = tokenizer or _tokenizer(target)
                prompt = tokenizer.encode(prompt).ids
            valid = isinstance(prompt, list) and all(type(i) is int and 0 <= i < vocabulary for i in prompt)
            if not valid or not prompt:
                raise InputError(
                    f"--prompts {path}: prompt {number} of '{name}' must be text that is not empty, or "
                    f"token ids from 0 to {vocabulary - 1}"
                )
            found[name].append(prompt)
    if not any(found.values()):
        raise InputError(f"--prompts {path}: holds no prompt")
    return found


def _tokenizer(target: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(target / "tokenizer.json"))
    except Exception as error:  # the library raises Exception itself for a missing or broken file
        raise InputError(f"--target {target}: tokenizer.json cannot be used ({error})") from None


def load_drafter(directory: Path) -> Drafter:
    """The drafter of a checkpoint, float32, on the CPU. Raises InputError if the directory is not one."""
    from safetensors.torch import load_file

    from trainer.drafter import Drafter
    from trainer.drafter_config import DrafterConfig

    weights = directory / "drafter.safetensors"
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"--drafter {directory}: is no checkpoint (config.json: {error})") from None
    if wrong := check_safetensors(weights):
        raise InputError(f"--drafter {directory}: {weights.name} {wrong}")
    drafter = Drafter(DrafterConfig.from_json(config))
    try:
        drafter.load_state_dict(load_file(weights))
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"--drafter {directory}: its weights do not fit config.json ({reason})") from None
    return drafter.eval()


def run(argv: Sequence[str] | None = None) -> None:
    """Raises InputError for what can be put right by whoever typed it."""
    arguments = _arguments(argv)
    try:
        read_config(arguments.target)
        check_weights(arguments.target)
    except InputError as error:  # the same checks as the trainer's, under this command's name of the flag
        sentence = str(error).replace("--target-model", "--target").replace(", or toy", "")
        raise InputError(sentence) from None

    from trainer.evaluation import Case, as_json, evaluate, table
    from trainer.target import Target

    drafter = load_drafter(arguments.drafter)
    target = Target.load(arguments.target)
    config = drafter.config
    shape = (target.config.hidden_size, target.config.vocab_size, target.num_layers)
    if shape != (config.hidden_size, config.vocab_size, config.num_target_layers):
        raise InputError(
            f"--drafter {arguments.drafter}: was trained for a target of another shape than this one"
        )
    target.tap(config.target_layer_ids)
    groups = read_prompts(arguments.prompts, arguments.target, config.vocab_size)
    cases = [Case(name, prompts, arguments.temperature) for name, prompts in groups.items()]
    rows = evaluate(target, drafter, cases, arguments.new_tokens, stop=stop_tokens(arguments.target))
    if arguments.json:
        print(json.dumps(as_json(rows), indent=1))
    else:
        print("\n".join(table(rows, f"block {config.block_size}, {arguments.new_tokens} tokens")))


def main(argv: Sequence[str] | None = None) -> int:
    try:
        run(argv)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
