"""The DFlash drafter (arXiv 2602.06036): a small transformer that predicts a whole block in one pass.

It has no embedding and no output head of its own: both are the frozen target's. Hidden states of K target
layers are fused by one matrix and enter every layer as additional keys and values, never as queries. A block
is one known token, the anchor, and mask tokens; slot k predicts the token at anchor + k.

Letters in shapes: N blocks, B slots in a block, b documents, S positions, H hidden width (the target's), K
tapped layers, d head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.attention import CONTEXT_KEYS, KEYS, QUERIES, Attend, two_part_attention
from trainer.blocks import Blocks, sees_context
from trainer.drafter_config import DrafterConfig
from trainer.elementwise import Rotation, add_norm, gated, norm_rotate
from trainer.errors import InputError


class Linear(nn.Linear):
    """Multiplies in the type of its input, whatever type its weight, the master, has."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def joined(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Matrices over one another in the type of a product, [Σ outputs, inputs]."""
    return torch.cat([weight.to(dtype) for weight in weights])


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor, update: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x + update, and that normed."""
        return add_norm(x, update, self.weight, self.eps)


def rotation(positions: Tensor, width: int, theta: float, dtype: torch.dtype) -> Rotation:
    """Rotary angles of `positions` [...], in float32 at least, whatever the model's type."""
    precise = torch.promote_types(dtype, torch.float32)
    steps = torch.arange(0, width, 2, dtype=precise, device=positions.device)
    angles = positions[..., None, None].to(precise) * theta ** (-steps / width)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


class Attention(nn.Module):
    """Projections around an attention that the caller supplies. G key heads, R query heads for each."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.width = config.head_dim
        self.groups = config.num_key_value_heads
        inner, shared = config.num_attention_heads * self.width, self.groups * self.width
        self.q_proj = Linear(config.hidden_size, inner)
        self.k_proj = Linear(config.hidden_size, shared)
        self.v_proj = Linear(config.hidden_size, shared)
        self.o_proj = Linear(inner, config.hidden_size)
        self.q_norm = RMSNorm(self.width, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.width, config.rms_norm_eps)

    def project(self, x: Tensor, by: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """[..., H] -> queries [..., G, R, d], keys and values [..., G, d]; one product for the three."""
        weights = [self.q_proj.weight, self.k_proj.weight, self.v_proj.weight]
        parts = F.linear(x, joined(weights, x.dtype)).split([len(weight) for weight in weights], dim=-1)
        heads = [part.unflatten(-1, (self.groups, -1, self.width)) for part in parts]
        queries, keys, values = heads[0], heads[1].squeeze(-2), heads[2].squeeze(-2)
        cos, sin = by
        queries = norm_rotate(
            queries,
            self.q_norm.weight,
            (cos.unsqueeze(-2), sin.unsqueeze(-2)),
            self.q_norm.eps,
            QUERIES if queries.dim() == len(QUERIES) else None,
        )
        order = KEYS if keys.dim() == len(KEYS) else None
        return queries, norm_rotate(keys, self.k_norm.weight, by, self.k_norm.eps, order), values


class MLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        weights = [self.gate_proj.weight, self.up_proj.weight]
        return self.down_proj(gated(F.linear(x, joined(weights, x.dtype))))


class Layer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        update: Tensor | None,
        by: Rotation,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The stream x [..., B, H] and what is still to be added to it, before and after this layer.

        `attend` mixes queries, keys and values of the block with the context. Each addition waits for the
        norm that follows it, so that both are one pass. With `rows` [M], indices into all slots, only these
        go on after the attention: [M, H] each.
        """
        x, h = self.input_layernorm(x, update)
        mixed = attend(*self.self_attn.project(h, by)).flatten(-3)
        if rows is not None:
            x, mixed = (t.flatten(0, -2).index_select(0, rows) for t in (x, mixed))
        x, h = self.post_attention_layernorm(x, self.self_attn.o_proj(mixed))
        return x, self.mlp(h)


def run_layer(layer: Layer, *given: Any) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = layer(*given)
    return result


class ContextCache:
    """Keys and values of the context, per layer, for decoding: rows are appended, never changed."""

    def __init__(self, layers: int) -> None:
        self.length = 0
        self._buffers: list[tuple[Tensor, Tensor] | None] = [None] * layers

    def append(self, keys_values: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add n rows: for each layer keys and values [n, kv heads, d]."""
        for layer, (keys, values) in enumerate(keys_values):
            self.with_block(layer, keys, values)
        self.length += keys_values[0][0].shape[0]

    def with_block(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of `layer` followed by those given, [length + n, kv heads, d].

        The block is written behind the context, where the next block or the next context overwrites it.
        """
        end = self.length + keys.shape[0]
        buffers = self._buffers[layer]
        if buffers is None or buffers[0].shape[0] < end:
            room = max(2 * end, 64)
            grown = (keys.new_empty(room, *keys.shape[1:]), values.new_empty(room, *values.shape[1:]))
            if buffers is not None:
                grown[0][: self.length] = buffers[0][: self.length]
                grown[1][: self.length] = buffers[1][: self.length]
            buffers = self._buffers[layer] = grown
        buffers[0][self.length : end] = keys
        buffers[1][self.length : end] = values
        return buffers[0][:end], buffers[1][:end]


class Drafter(nn.Module):
    """Parameters have the names that serving engines load: fc, hidden_norm, norm, layers.{i}.…"""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        taps = len(config.target_layer_ids)
        self.fc = Linear(taps * config.hidden_size, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def _layers(self) -> Iterator[Layer]:
        yield from self.layers  # type: ignore[misc]

    def _rotation(self, positions: Tensor, like: Tensor) -> Rotation:
        return rotation(positions, self.config.head_dim, self.config.rope_theta, like.dtype)

    def fuse(self, taps: Tensor) -> Tensor:
        """Target hidden states [..., K·H], layers side by side in the order of their ids -> [..., H]."""
        return self.hidden_norm(self.fc(taps))[1]

    def context_keys_values(self, context: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Fused context [..., C, H] at `positions` [C] -> for each layer keys, values [..., C, G, d].

        One product for all layers, since the context is the same for all.
        """
        attentions = [layer.self_attn for layer in self._layers()]
        matrices = [w for a in attentions for w in (a.k_proj.weight, a.v_proj.weight)]
        weights = joined(matrices, context.dtype)
        shape = (len(attentions), 2, self.config.num_key_value_heads, self.config.head_dim)
        keys, values = F.linear(context, weights).unflatten(-1, shape).unbind(-3)  # [..., C, layers, G, d]
        norms = torch.stack([a.k_norm.weight for a in attentions])[:, None]
        cos, sin = self._rotation(positions, context)
        by = (cos.unsqueeze(-2), sin.unsqueeze(-2))
        keys = norm_rotate(
            keys,
            norms,
            by,
            self.config.rms_norm_eps,
            CONTEXT_KEYS if keys.dim() == len(CONTEXT_KEYS) else None,
        )
        return list(zip(keys.unbind(-3), values.unbind(-3), strict=True))

    def forward(
        self,
        block_embeddings: Tensor,
        blocks: Blocks,
        context: Tensor,
        attend: Attend = two_part_attention,
        rows: Tensor | None = None,
        each: Callable[..., tuple[Tensor, Tensor]] = run_layer,
    ) -> Tensor:
        """Training: all blocks of a micro-batch at once.

        block_embeddings [N, B, H] of [anchor token, mask, mask, …]; context [b, C, H] from `fuse`, with C at
        least `blocks.context_length`. Returns the normed hidden states [N, B, H]; times the target's output
        head they are logits. With `rows` [M], indices into N·B, only those of these slots, [M, H]: what no
        later layer needs of the others is not computed.

        Products are in the type of block_embeddings and context, which must be the same. `each` runs a layer,
        called as `run_layer`.
        """
        assert blocks.window == self.config.sliding_window, "the blocks were cut for another sliding window"
        context = context[:, : blocks.context_length]
        by = self._rotation(blocks.positions, block_embeddings)
        every = self.context_keys_values(context, torch.arange(context.shape[1], device=context.device))
        x, update = block_embeddings, None
        last = len(every) - 1
        for i, (layer, (keys, values)) in enumerate(zip(self._layers(), every, strict=True)):
            mix = partial(attend, context_key=keys, context_value=values, blocks=blocks)
            x, update = each(layer, x, update, by, mix, rows if i == last else None)
        return self.norm(x, update)[1]

    def new_cache(self) -> ContextCache:
        return ContextCache(self.config.num_hidden_layers)

    @torch.no_grad()
    def append_context(self, cache: ContextCache, taps: Tensor) -> None:
        """Decoding: take in target hidden states [n, K·H] of the n positions that follow those in `cache`."""
        positions = torch.arange(cache.length, cache.length + taps.shape[0], device=taps.device)
        cache.append(self.context_keys_values(self.fuse(taps), positions))

    @torch.no_grad()
    def draft(self, block_embeddings: Tensor, start: int, cache: ContextCache) -> Tensor:
        """Decoding: one block [B, H] whose anchor stands at `start`; the cache holds positions 0 … start - 1.

        Returns the normed hidden states [B, H]. The cache is not changed: the block leaves nothing behind.
        """
        assert cache.length == start, f"the context ends at {cache.length}, the block starts at {start}"
        positions = torch.arange(start, start + block_embeddings.shape[0], device=block_embeddings.device)
        by = self._rotation(positions, block_embeddings)
        x, update = block_embeddings, None
        seen = None
        if (window := self.config.sliding_window) is not None:
            slot = torch.arange(x.shape[0], device=x.device)[:, None]
            context = sees_context(torch.arange(start, device=x.device), 0, start, slot, window)
            seen = F.pad(context, (0, x.shape[0]), value=True)
        for i, layer in enumerate(self._layers()):
            x, update = layer(x, update, by, partial(_attend_to_cache, cache=cache, layer=i, seen=seen))
        return self.norm(x, update)[1]

    @torch.no_grad()
    def init_from_target(self, model: nn.Module) -> None:
        """Start from the target's last layers and its final norm instead of from noise.

        `model` is a Hugging Face causal LM with Qwen3- or Llama-like layers; what the target does not have
        (per-head norms in Llama) keeps its initial value. Raises InputError if the shapes do not fit.
        """
        decoder = decoder_of(model)
        wanted = self.config.num_hidden_layers
        if wanted > len(decoder.layers):
            raise InputError(
                f"--init-from-target needs at least --num-draft-layers {wanted} layers in the target, "
                f"which has {len(decoder.layers)}"
            )
        pairs: list[tuple[str, Tensor, Tensor]] = [("norm", self.norm.weight, decoder.norm.weight)]
        for mine, theirs in zip(self._layers(), list(decoder.layers)[-wanted:], strict=True):
            there = dict(theirs.named_parameters())
            for name, goal in mine.named_parameters():
                if name in there:
                    pairs.append((name, goal, there[name]))
                elif "norm" not in name:
                    raise InputError(
                        f"--init-from-target cannot read this kind of target: its layers have no {name}"
                    )
        for name, own, source in pairs:
            if source.shape != own.shape:
                raise InputError(
                    f"--init-from-target cannot copy the target's {name} of shape {tuple(source.shape)} "
                    f"into the drafter's of shape {tuple(own.shape)}; leave the flag out"
                )
            own.copy_(source)


def _attend_to_cache(
    query: Tensor, key: Tensor, value: Tensor, cache: ContextCache, layer: int, seen: Tensor | None
) -> Tensor:
    """One block against the cache and itself, [B, G, R, d]; `seen` [B, keys] bool leaves out what a window
    hides.
    """
    keys, values = cache.with_block(layer, key, value)
    q, k, v = (t.transpose(0, 1)[None] for t in (query.flatten(1, 2), keys, values))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)[0]
    return mixed.transpose(0, 1).view(query.shape)


def decoder_of(model: Any) -> Any:
    """The part of a Hugging Face causal LM that has `layers` and the final `norm`."""
    decoder = model.get_decoder()
    if not hasattr(decoder, "layers"):
        raise InputError(f"{type(model).__name__} is not a decoder whose layers can be tapped")
    return decoder
