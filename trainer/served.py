"""A drafter as a serving engine would read it: from the written files alone, by the format's own rules.

This is a second implementation, on purpose: it knows config.json and tensor names, and shares no code with
trainer/drafter.py, trainer/attention.py or trainer/drafter_config.py. Whatever the exporter gets wrong in a
name, a shape, a layer id or the rotary style shows as other logits. One block at a time, no cache, no mask:
slow and plain.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Served:
    """Reads either format. `taps` are the 0-based target layers whose outputs it wants, in this order."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        from safetensors.torch import load_file

        config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        if config["architectures"] == ["DFlashDraftModel"]:
            self.shape = config
            dflash = config["dflash_config"]
            self.taps = list(dflash["target_layer_ids"])
            self.mask_token_id = dflash["mask_token_id"]
            self.block_size = dflash["block_size"]
        else:
            self.shape = config["transformer_layer_config"]
            self.taps = [number - 1 for number in config["aux_hidden_state_layer_ids"]]
            self.mask_token_id = config["mask_token_id"]
            self.block_size = config["block_size"]
        self._weights = load_file(directory / "model.safetensors")
        self._dtype = dtype

    def _weight(self, name: str) -> Tensor:
        return self._weights[f"{name}.weight"].to(self._dtype)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self._weight(name).T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.shape["rms_norm_eps"])
        return x * scale * self._weight(name)

    def _heads(self, x: Tensor, count: int) -> Tensor:
        """[n, count · d] -> [count, n, d]"""
        return x.view(x.shape[0], count, self.shape["head_dim"]).transpose(0, 1)

    def hidden(self, embeddings: Tensor, taps: Tensor, anchor: int) -> Tensor:
        """Hidden states [B, H] of the block whose input is `embeddings` [B, H] and whose anchor is at
        position `anchor`, from the target's features `taps` [≥ anchor, K·H] of the positions before it.
        """
        context = self._norm(self._linear(taps[:anchor], "fc"), "hidden_norm")
        x = embeddings
        for i in range(self.shape["num_hidden_layers"]):
            h = self._norm(x, f"layers.{i}.input_layernorm")
            mixed = self._attention(f"layers.{i}.self_attn", h, context, self._window(i))
            x = x + self._linear(mixed, f"layers.{i}.self_attn.o_proj")
            h = self._norm(x, f"layers.{i}.post_attention_layernorm")
            gate = self._linear(h, f"layers.{i}.mlp.gate_proj")
            up = self._linear(h, f"layers.{i}.mlp.up_proj")
            x = x + self._linear(gate * torch.sigmoid(gate) * up, f"layers.{i}.mlp.down_proj")
        return self._norm(x, "norm")

    def _window(self, layer: int) -> int | None:
        sliding = self.shape["layer_types"][layer] == "sliding_attention"
        return self.shape["sliding_window"] if sliding else None

    def _attention(self, name: str, h: Tensor, context: Tensor, window: int | None) -> Tensor:
        heads, groups = self.shape["num_attention_heads"], self.shape["num_key_value_heads"]
        anchor, size = len(context), len(h)
        positions = torch.arange(anchor + size)
        source = torch.cat([context, h])
        theta = self.shape["rope_parameters"]["rope_theta"]
        q = self._norm(self._heads(self._linear(h, f"{name}.q_proj"), heads), f"{name}.q_norm")
        k = self._norm(self._heads(self._linear(source, f"{name}.k_proj"), groups), f"{name}.k_norm")
        v = self._heads(self._linear(source, f"{name}.v_proj"), groups)
        q, k = neox(q, positions[anchor:], theta), neox(k, positions, theta)
        k, v = (t.repeat_interleave(heads // groups, dim=0) for t in (k, v))
        scores = q @ k.transpose(1, 2) / math.sqrt(self.shape["head_dim"])
        if window is not None:
            far = positions[anchor:, None] - positions[None] >= window
            far[:, anchor:] = False  # a block sees all of itself
            scores = scores.masked_fill(far, -torch.inf)
        return (torch.softmax(scores, -1) @ v).transpose(0, 1).reshape(size, -1)


def neox(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate x [heads, n, d] as GPT-NeoX, Llama and Qwen do, and engines assume: element j is paired with
    element j + d/2 (and not, as in GPT-J, with its neighbour), by the angle position · theta^(-2j/d).
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = (positions.double()[:, None] * frequencies).repeat(1, 2)
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * angles.cos().to(x.dtype) + turned * angles.sin().to(x.dtype)
