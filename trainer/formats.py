"""How a drafter is written for serving engines: which tensors there must be, and the two config.json.

Everything here follows from a `DrafterConfig` alone, never from a model in memory: engines pass silently over
a tensor whose name they do not know and serve an untrained layer in its place, so what is written is held
against a list that was made independently of it. Standard library only.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

from trainer.drafter_config import DrafterConfig

FORMATS = ("native", "speculators")
WEIGHTS = "model.safetensors"
MARK = "drafthouse"  # the key of config.json by which an export of ours is known again

# Which number means which layer has three conventions in the field; so the one that was used is written down.
CONVENTION = "counted from 0; a feature is the output of decoder layer i, which is hidden_states[i + 1]"
CONVENTION_PLUS_1 = "counted from 1: i + 1 for the output of decoder layer i, which is hidden_states[i + 1]"

# What transformer_layer_config of the speculators format takes from the native config.json. What only the
# target has (partial_rotary_factor, mrope sections, softcapping) is in neither: no drafter was trained so.
_LAYER_KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_parameters",
    "max_position_embeddings",
    "vocab_size",
    "hidden_act",
    "attention_bias",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "tie_word_embeddings",
)

Shapes = dict[str, tuple[int, ...]]


def tensors(config: DrafterConfig) -> Shapes:
    """Name and shape of every tensor of a drafter. Embedding and output head are the target's: not here."""
    width, head = config.hidden_size, config.head_dim
    queries, shared = config.num_attention_heads * head, config.num_key_value_heads * head
    layer: Shapes = {
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (shared, width),
        "self_attn.v_proj": (shared, width),
        "self_attn.o_proj": (width, queries),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "mlp.gate_proj": (config.intermediate_size, width),
        "mlp.up_proj": (config.intermediate_size, width),
        "mlp.down_proj": (width, config.intermediate_size),
    }
    found: Shapes = {
        "fc.weight": (width, len(config.target_layer_ids) * width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    for i in range(config.num_hidden_layers):
        found |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return found


def difference(found: Shapes, wanted: Shapes) -> str | None:
    """In which tensor the two lists differ, looked at from both sides; None if they are the same."""
    for name in wanted:
        if name not in found:
            return f"{name} is missing"
        if found[name] != wanted[name]:
            return f"{name} has the shape {list(found[name])} instead of {list(wanted[name])}"
    for name in found:
        if name not in wanted:
            return f"{name} is no tensor of this drafter"
    return None


def native(config: DrafterConfig, dtype: str, mark: dict[str, Any]) -> dict[str, Any]:
    """config.json of the native format, which SGLang and vLLM load. `mark` says where the drafter is from."""
    value = config.to_json()
    value["dflash_config"]["sample_from_anchor"] = False  # slot k predicts the token at anchor + k
    return {
        **value,
        "dtype": dtype,
        "torch_dtype": dtype,  # the same for engines that read the older key
        MARK: {**mark, "target_layer_ids": CONVENTION},
    }


def speculators(
    config: DrafterConfig, dtype: str, mark: dict[str, Any], verifier: str | None, architectures: list[str]
) -> dict[str, Any]:
    """config.json of the speculators format, which vLLM loads. `verifier` is the target's name or path."""
    own = config.to_json()
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "transformer_layer_config": {key: own[key] for key in _LAYER_KEYS},
        "draft_vocab_size": config.vocab_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": "sliding_attention" in own["layer_types"],  # a block sees all of itself
        "sample_from_anchor": False,
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
        "tie_word_embeddings": False,
        "dtype": dtype,
        "torch_dtype": dtype,
        MARK: {**mark, "aux_hidden_state_layer_ids": CONVENTION_PLUS_1},
    }


def commands(kind: str, target: str, drafter: str, block_size: int) -> list[tuple[str, str]]:
    """(engine, command line) for every engine that serves the format `kind`, ready to be pasted."""
    speculative = {"method": "dflash", "model": drafter, "num_speculative_tokens": block_size - 1}
    found = [("vLLM", ["vllm", "serve", target, "--speculative-config", json.dumps(speculative)])]
    if kind == "native":
        words = ["python", "-m", "sglang.launch_server", "--model-path", target]
        words += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", drafter]
        words += ["--speculative-num-draft-tokens", str(block_size)]
        found.append(("SGLang", words))
    return [(engine, shlex.join(words)) for engine, words in found]
