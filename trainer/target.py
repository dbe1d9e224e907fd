"""The frozen target: any Hugging Face causal LM, and the hidden states that the drafter learns from."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.drafter import decoder_of
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


class Target:
    """A frozen causal LM. Hooks tap its layers, since Hugging Face's own list norms the last entry."""

    def __init__(self, model: Any, layer_ids: tuple[int, ...] = ()) -> None:
        self.model = model.eval().requires_grad_(False)
        self.decoder = decoder_of(model)
        self.config = model.config.get_text_config()
        self.num_layers = len(self.decoder.layers)
        self._taps: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        self.layer_ids: tuple[int, ...] = ()
        self.tap(layer_ids)

    @classmethod
    def load(
        cls, directory: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
    ) -> Target:
        """Load a model directory; its safetensors are mapped, not read twice. Raises InputError if it is
        damaged.
        """
        read_config(directory)
        check_weights(directory)
        from transformers import AutoModelForCausalLM  # late: it takes seconds
        from transformers.utils import logging

        logging.disable_progress_bar()
        try:
            model = AutoModelForCausalLM.from_pretrained(str(directory), dtype=dtype, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())[:300]
            raise InputError(f"--target-model {directory}: transformers cannot load it ({reason})") from None
        return cls(model.to(device))

    def tap(self, layer_ids: tuple[int, ...] | list[int]) -> None:
        """Choose the layers whose outputs `features` returns, in this order."""
        for hook in self._hooks:
            hook.remove()
        self.layer_ids = tuple(layer_ids)
        self._hooks = [
            self.decoder.layers[i].register_forward_hook(
                lambda _module, _inputs, output, i=i: self._taps.__setitem__(
                    i, output[0] if isinstance(output, tuple) else output
                )
            )
            for i in self.layer_ids
        ]

    @property
    def device(self) -> torch.device:
        return self.lm_head.device

    @property
    def lm_head(self) -> Tensor:
        """Weight of the output head, [V, H]."""
        return self.model.get_output_embeddings().weight

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """[...] -> [..., H]"""
        return self.model.get_input_embeddings()(ids)

    def taken_taps(self) -> Tensor:
        """The tapped layers' outputs of the last forward pass, side by side: [b, S, K·H]."""
        taps = torch.cat([self._taps[i] for i in self.layer_ids], dim=-1)
        self._taps.clear()
        return taps

    @torch.no_grad()
    def features(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """One pass over documents [b, S], padded on the right (a causal model's real positions do not see
        that).

        Returns the tapped layers' outputs [b, S, K·H] and the last hidden state after the final norm [b, S,
        H].
        """
        last = self.decoder(input_ids=input_ids, use_cache=False).last_hidden_state
        return self.taken_taps(), last
