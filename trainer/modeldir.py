"""Model directories on disk, judged without loading a weight. Needs no torch, so that a check is quick."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trainer.errors import InputError

# Which files make two tokenizers the same: the vocabulary and the merges, not the chat template.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")


def read_config(directory: str | Path) -> dict[str, Any]:
    """config.json of a model directory. Raises InputError if the directory is not one."""
    path = Path(directory) / "config.json"
    if not Path(directory).is_dir():
        raise InputError(
            f"--target-model {directory}: there is no such directory; give a model directory, or toy"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"--target-model {directory}: it has no config.json, so it is no model directory"
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(f"--target-model {directory}: config.json cannot be read ({error})") from None
    if not isinstance(value, dict) or "model_type" not in value:
        raise InputError(f"--target-model {directory}: config.json names no model_type, so it is no model's")
    return value


def check_safetensors(path: Path) -> str | None:
    """What is wrong with a safetensors file, judged by its header and its size; None if nothing is.

    A copy that broke off is found in microseconds, without reading the weights.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(8)
            if len(start) < 8:
                return f"has {size} bytes, too few for a safetensors file"
            (length,) = struct.unpack("<Q", start)
            if length > size - 8:
                return f"is cut off: its header needs {length + 8:,} bytes and the file has {size:,}"
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "has no valid safetensors header"
    expected = 8 + length + end
    if size != expected:
        return f"has {size:,} bytes where its header promises {expected:,}; copy it again"
    return None


def check_weights(directory: str | Path) -> None:
    """Raises InputError, naming the file, if the safetensors of a model directory are missing or damaged."""
    directory = Path(directory)
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            raise InputError(f"--target-model {directory}: {index.name} is damaged; copy it again") from None
    else:
        names = sorted(path.name for path in directory.glob("*.safetensors"))
    if not names:
        raise InputError(f"--target-model {directory}: it holds no .safetensors weights")
    for name in names:
        if not (directory / name).exists():
            raise InputError(f"--target-model {directory}: {name} is missing, though {index.name} lists it")
        if wrong := check_safetensors(directory / name):
            raise InputError(f"--target-model {directory}: {name} {wrong}")


def tokenizer_digest(directory: str | Path) -> str:
    """Names a tokenizer by content: 16 hex digits over its vocabulary files, as kept in data.json."""
    digest = hashlib.sha256()
    found = False
    for name in _TOKENIZER_FILES:
        path = Path(directory) / name
        if path.exists():
            found = True
            digest.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    if not found:
        raise InputError(
            f"--target-model {directory}: it has no tokenizer ({' or '.join(_TOKENIZER_FILES[:2])})"
        )
    return digest.hexdigest()[:16]


def default_mask_token(directory: str | Path, vocab_size: int) -> int:
    """The id that stands for "to be predicted": a token named ``<|mask|>`` if there is one, in any case of
    letters, else the first id of the embedding that the tokenizer does not use.

    Raises InputError where neither exists: then only --mask-token-id can say.
    """
    try:
        tokenizer = json.loads((Path(directory) / "tokenizer.json").read_text(encoding="utf-8"))
        used = dict(tokenizer["model"]["vocab"])
        used.update({token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])})
    except (OSError, ValueError, KeyError, TypeError):
        used = {}
    for name, number in used.items():
        if name.lower() == "<|mask|>":
            return int(number)
    unused = max(used.values(), default=vocab_size) + 1
    if unused >= vocab_size:
        raise InputError(
            f"--target-model {directory}: its vocabulary has no unused id that could be the mask token; "
            "give one that the target never produces with --mask-token-id"
        )
    return int(unused)


def text_config(directory: str | Path) -> SimpleNamespace:
    """The part of config.json that describes the language model, as `DrafterConfig.for_target` reads it.

    Raises InputError if it lacks what every decoder has.
    """
    config = read_config(directory)
    chosen = config.get("text_config", config)
    needed = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    missing = [key for key in needed if key not in chosen]
    if missing:
        raise InputError(
            f"--target-model {directory}: config.json lacks '{missing[0]}', so it is no decoder's"
        )
    return SimpleNamespace(**chosen)
