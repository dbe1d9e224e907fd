"""Tiny targets and data for tests: real formats, random weights, made in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from trainer.completions import write_completions
from trainer.modeldir import tokenizer_digest

VOCABULARY = 97
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}


def qwen3(**changes: object) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, **changes})).eval()


def llama(**changes: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes})).eval()


HYBRID = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}  # as Qwen3.5 has it: linear attention in some layers, and rotary keys of its own


def qwen3_5(**changes: object) -> Qwen3_5ForCausalLM:
    torch.manual_seed(0)
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**SHAPE, **HYBRID, **changes})).eval()


def qwen3_5_with_vision() -> Qwen3_5ForConditionalGeneration:
    """As Qwen3.5 is published: a text_config inside, and a vision part beside the language model."""
    torch.manual_seed(0)
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen3_5Config(text_config={**SHAPE, **HYBRID}, vision_config=vision)
    return Qwen3_5ForConditionalGeneration(config).eval()


def target_directory(path: Path, model: torch.nn.Module | None = None) -> Path:
    """A model directory with weights and a tokenizer.json of 90 tokens, so that ids from 90 on are unused."""
    (model or qwen3()).save_pretrained(path)
    vocabulary = {f"t{i}": i for i in range(90)}
    tokenizer = {"model": {"type": "WordLevel", "vocab": vocabulary}, "added_tokens": []}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def documents(count: int, seed: int = 0, prompt: int = 5) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    found = []
    for length in rng.integers(20, 60, count):
        mask = np.ones(length, dtype=np.uint8)
        mask[:prompt] = 0
        found.append((rng.integers(0, 90, length).astype(np.int32), mask))
    return found


def data_directory(path: Path, target: Path, count: int = 24) -> Path:
    write_completions(path, documents(count), {"tokenizer": tokenizer_digest(target), "target": "tiny"})
    return path


def flags(target: Path, data: Path, output: Path, **changes: object) -> list[str]:
    """A command line that trains in seconds."""
    chosen: dict[str, object] = {
        "target-model": target,
        "data-dir": data,
        "output-dir": output,
        "token-budget": 256,
        "max-seq-len": 64,
        "max-anchors": 24,
        "block-size": 4,
        "num-draft-layers": 2,
        "num-taps": 2,
        "epochs": 2,
        "lr": 0.01,
        "log-interval": 0,
        "threads": 1,
        **{name.replace("_", "-"): value for name, value in changes.items()},
    }
    found = []
    for name, value in chosen.items():
        if value is True:
            found.append(f"--{name}")
        elif value is not None:
            found += [f"--{name}", str(value)]
    return found
