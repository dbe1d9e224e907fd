"""The shape of a drafter, and how it follows from its target. Needs no torch, so that a check is quick."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer.errors import InputError


def default_layer_ids(layers: int, taps: int | None = None) -> list[int]:
    """Which decoder layers of a target with `layers` of them are tapped; an id is the *output* of that layer.

    Evenly spaced over [1, layers - 3], as published checkpoints do; over [0, layers - 2] where that range is
    too short to give `taps` different ids. The last layer is never tapped. `taps` defaults to 5, or what
    there is. Raises InputError if the target has too few layers.
    """
    if layers < 2:
        raise InputError(f"the target has {layers} layer: a drafter needs one with at least 2")
    taps = min(5, layers - 1) if taps is None else taps
    if not 1 <= taps <= layers - 1:
        raise InputError(
            f"--num-taps {taps} is out of range: this target has {layers} layers, so 1 to {layers - 1}"
        )
    if taps == 1:
        return [min(layers // 2, layers - 2)]
    for first, last in ((1, layers - 3), (0, layers - 2)):
        if last - first >= taps - 1:
            return [round(first + i * (last - first) / (taps - 1)) for i in range(taps)]
    raise AssertionError("unreachable: layers - 1 different ids always fit")


def check_layer_ids(ids: Sequence[int], layers: int) -> list[int]:
    """`ids` if each is a layer that may be tapped, in growing order; else InputError."""
    found = list(ids)
    if not found or found != sorted(set(found)) or found[0] < 0 or found[-1] > layers - 2:
        raise InputError(
            f"--target-layer-ids {','.join(map(str, found))} does not fit a target of {layers} layers: "
            f"give different ids from 0 to {layers - 2} in growing order (the last layer cannot be tapped)"
        )
    return found


@dataclass(frozen=True)
class DrafterConfig:
    """All that determines the drafter's shape; written to config.json beside its weights."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    max_position_embeddings: int = 32768
    sliding_window: int | None = None  # positions of the context that a slot sees, itself counted; None: all

    @classmethod
    def for_target(
        cls,
        target_config: Any,
        *,
        block_size: int = 16,
        num_layers: int = 5,
        target_layer_ids: Sequence[int] | None = None,
        num_taps: int | None = None,
        mask_token_id: int,
        sliding_window: int | None = None,
    ) -> DrafterConfig:
        """A drafter with the width, heads and rotary base of a target (its Hugging Face text config).

        Raises InputError for layer ids or a mask token that the target does not have.
        """
        layers = int(target_config.num_hidden_layers)
        vocab = int(target_config.vocab_size)
        if not 0 <= mask_token_id < vocab:
            raise InputError(f"--mask-token-id {mask_token_id} is not in the target's vocabulary of {vocab}")
        ids = (
            check_layer_ids(target_layer_ids, layers)
            if target_layer_ids
            else default_layer_ids(layers, num_taps)
        )
        heads = int(target_config.num_attention_heads)
        rope = getattr(target_config, "rope_parameters", None) or {}
        rope = rope.get("full_attention", rope)  # some targets have one for each kind of layer
        theta = rope.get("rope_theta") or getattr(target_config, "rope_theta", None) or 10000.0
        return cls(
            hidden_size=int(target_config.hidden_size),
            intermediate_size=int(target_config.intermediate_size),
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            num_key_value_heads=int(getattr(target_config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(target_config, "head_dim", None) or target_config.hidden_size // heads),
            rms_norm_eps=float(getattr(target_config, "rms_norm_eps", 1e-6)),
            rope_theta=float(theta),
            vocab_size=vocab,
            block_size=block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=tuple(ids),
            num_target_layers=layers,
            max_position_embeddings=int(getattr(target_config, "max_position_embeddings", 32768)),
            sliding_window=sliding_window,
        )

    def to_json(self) -> dict[str, Any]:
        """The keys under which serving engines look for a DFlash drafter.

        A window is written everywhere they look for one, with `causal` false: within the block it was trained
        in both directions.
        """
        window = self.sliding_window
        value = dataclasses.asdict(self)
        del value["mask_token_id"], value["target_layer_ids"]
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            **value,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "hidden_act": "silu",
            "attention_bias": False,
            "layer_types": ["sliding_attention" if window else "full_attention"] * self.num_hidden_layers,
            "use_sliding_window": window is not None,
            "max_window_layers": 0 if window else self.num_hidden_layers,  # the first with a window
            "dtype": "float32",
            "tie_word_embeddings": False,
            "is_causal": False,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
                "block_size": self.block_size,
                "causal": False,
                **({"use_swa": True, "swa_window_size": window} if window else {}),
            },
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> DrafterConfig:
        """The reverse of `to_json`. Raises InputError if a key is missing."""
        flat = {**value, **value.get("dflash_config", {})}
        names = [field.name for field in dataclasses.fields(cls)]
        missing = [name for name in names if name not in flat]
        if missing:
            raise InputError(f"config.json of a drafter lacks the key '{missing[0]}'; it is not one of ours")
        chosen = {name: flat[name] for name in names}
        chosen["target_layer_ids"] = tuple(chosen["target_layer_ids"])
        return cls(**chosen)
