"""Model directories on disk, judged without loading a weight. Needs no torch, so that a check is quick."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trainer.errors import InputError

# Which files make two tokenizers the same: the vocabulary and the merges, not the chat template.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
_LEFT_OVER = re.compile(r"^[<\[].*(reserved|unused|empty_output).*[>\]]$")  # names of tokens
_MASK = re.compile(r"^[<\[].*mask.*[>\]]$", re.IGNORECASE)
_SAMPLE = 1 << 20  # bytes at either end of a weight file that stand for it
_HASHED_WHOLE = 64 << 20  # bytes of weights up to which every byte is read


def read_config(directory: str | Path) -> dict[str, Any]:
    """config.json of a model directory. Raises InputError if the directory is not one."""
    path = Path(directory) / "config.json"
    if str(directory).endswith(".gguf") and Path(directory).is_file():
        raise InputError(
            f"--target-model {directory}: is a GGUF file; make a model directory of it with python -m "
            f"trainer.gguf {directory} DIR, and give that"
        )
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
    for name in weight_files(directory):
        if wrong := check_safetensors(directory / name):
            raise InputError(f"--target-model {directory}: {name} {wrong}")


def weight_files(directory: Path) -> list[str]:
    """Names of the safetensors that hold the weights. Raises InputError if one is missing, or all are."""
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
    return names


def target_digest(directory: str | Path) -> str:
    """Names a target by content: 16 hex digits over config.json and the weights.

    Of large weights only names, sizes, headers and a mebibyte at either end are read: enough to tell another
    model, another size or another training apart, and quick for any size. Raises InputError if there are
    none.
    """
    directory = Path(directory)
    names = weight_files(directory)
    whole = sum((directory / name).stat().st_size for name in names) <= _HASHED_WHOLE
    digest = hashlib.sha256(json.dumps(read_config(directory), sort_keys=True).encode())
    for name in names:
        size = (directory / name).stat().st_size
        digest.update(f"\0{name}\0{size}\0".encode())
        with open(directory / name, "rb") as file:
            if whole:
                digest.update(hashlib.file_digest(file, "sha256").digest())
                continue
            start = file.read(8)
            digest.update(start + file.read(struct.unpack("<Q", start)[0] + _SAMPLE))
            file.seek(max(size - _SAMPLE, 0), os.SEEK_SET)
            digest.update(file.read())
    return digest.hexdigest()[:16]


def stop_tokens(directory: str | Path) -> frozenset[int]:
    """The tokens that end a text: `eos_token_id` of generation_config.json, else of config.json, if any."""
    config = read_config(directory)
    try:
        generation = json.loads((Path(directory) / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        generation = None
    for part in (generation, config, config.get("text_config")):
        value = part.get("eos_token_id") if isinstance(part, dict) else None
        tokens: Iterable[object] = value if isinstance(value, list) else [value]
        if found := frozenset(token for token in tokens if type(token) is int):
            return found
    return frozenset()


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
    letters, else the first id of the embedding that the tokenizer does not use, else the last token that its
    makers had left over, by its name (``<|reserved_special_token_247|>``, SmolLM2's ``<empty_output>``).

    Raises InputError where none exists: then only --mask-token-id can say.
    """
    used = _used_tokens(Path(directory))
    for name, number in used.items():
        if name.lower() == "<|mask|>":
            return int(number)
    unused = max(used.values(), default=vocab_size) + 1
    if unused >= vocab_size:
        left_over = [i for name, i in used.items() if _LEFT_OVER.search(name) and i < vocab_size]
        if left_over:
            return int(max(left_over))
        raise InputError(
            f"--target-model {directory}: its vocabulary has no unused id that could be the mask token; "
            "give one that the target never produces with --mask-token-id"
        )
    return int(unused)


def _used_tokens(directory: Path) -> dict[str, int]:
    """The ids of all tokens by name, as tokenizer.json has them; none if it cannot be read."""
    try:
        tokenizer = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
        used = dict(tokenizer["model"]["vocab"])
        used.update({token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])})
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return used


def mask_token_warning(directory: str | Path, mask: int) -> str | None:
    """What to say of a mask token that was asked for and may stand in a text. Raises InputError for one that
    ends a text: it is in every answer.
    """
    directory = Path(directory)
    names = {number: name for name, number in _used_tokens(directory).items()}
    name = names.get(mask)
    eos = _tokenizer_config(directory).get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    if mask in stop_tokens(directory) or (name is not None and name == eos):
        raise InputError(
            f"--mask-token-id {mask} is {name or 'a token'}, which ends the target's answers; give one that "
            "the target never produces, or leave the flag out"
        )
    if name is None or _MASK.search(name) or _LEFT_OVER.search(name):
        return None
    return (
        f"warning: --mask-token-id {mask} is the token {name!r} of the target's vocabulary, which texts may "
        "hold; one that the target never produces is better, and without the flag one is chosen"
    )


def template_digest(directory: str | Path) -> str | None:
    """Names the chat template by content as data.json does (`Chat.facts`), without loading the tokenizer;
    None if there is none, or several in files of their own.
    """
    directory = Path(directory)
    if (directory / "additional_chat_templates").exists():
        return None
    try:
        template: Any = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    except (OSError, ValueError):
        template = _tokenizer_config(directory).get("chat_template")
    if isinstance(template, list):
        try:
            template = {one["name"]: one["template"] for one in template}
        except (KeyError, TypeError):
            return None
    if not template:
        return None
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:16]


def _tokenizer_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json, or nothing where it cannot be read: who needs it loads the tokenizer."""
    try:
        value = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


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
