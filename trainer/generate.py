"""Batched generation by the target: prompts of different lengths, padded on the left, one token per pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.target import Target

PADDING = 0  # any id: what stands there is hidden by the mask


@torch.no_grad()
def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    stop: Collection[int],
    *,
    temperature: float = 0.0,
    seed: int = 0,
    tick: Callable[[], None] | None = None,
) -> list[list[int]]:
    """The target's continuation of each prompt, up to and with the first token of `stop`, at most
    `limits[i]` tokens (1 at least).

    Padding stands on the left, is hidden by the attention mask and not counted by the positions, so a row's
    text does not depend on its neighbours but for rounding. Rows that have ended leave the batch once they
    are half of it. At `temperature` 0 the likeliest token is taken, else one is sampled; samples depend on
    `seed` and the batch. `tick` is called before each pass.
    """
    from transformers import DynamicCache  # late: it takes seconds

    device = target.device
    longest, most = max(map(len, prompts)), max(limits)
    ids = torch.tensor([[PADDING] * (longest - len(p)) + list(p) for p in prompts], device=device)
    real = torch.tensor([[0] * (longest - len(p)) + [1] * (len(p) + most) for p in prompts], device=device)
    positions = (real.cumsum(1) - 1).clamp_(min=0)
    stops = torch.tensor(sorted(stop), dtype=torch.int64, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    cache: Any = DynamicCache(config=target.config)
    named = {_cache_keyword(target.model): cache}
    found: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # of the batch: which prompt
    running = set(rows)
    read = 0  # positions in the cache
    while True:
        if tick is not None:
            tick()
        end = read + ids.shape[1]
        output = target.model(
            input_ids=ids,
            attention_mask=real[:, :end],
            position_ids=positions[:, read:end],
            use_cache=True,
            logits_to_keep=1,
            **named,
        )
        read = end
        chosen = _choose(output.logits[:, -1], temperature, generator)
        ending = torch.isin(chosen, stops).tolist()
        for row, token, ends in zip(rows, chosen.tolist(), ending, strict=True):
            if row in running:
                found[row].append(token)
                if ends or len(found[row]) >= limits[row]:
                    running.discard(row)
        if not running:
            break
        ids = chosen[:, None]
        if 2 * len(running) <= len(rows) and _selectable(cache):
            kept = [i for i, row in enumerate(rows) if row in running]
            index = torch.tensor(kept, device=device)
            cache.batch_select_indices(index)
            ids, real, positions = ids[index], real[index], positions[index]
            rows = [rows[i] for i in kept]
    if target.layer_ids:
        target.taken_taps()
    return found


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """[n, V] -> [n]. A sample is the largest of p / e with e exponential, which needs no sum over V."""
    if temperature == 0:
        return logits.argmax(-1)
    noise = torch.empty_like(logits, dtype=torch.float32).exponential_(generator=generator)
    return (logits.float().div(temperature).softmax(-1) / noise.clamp_(min=1e-20)).argmax(-1)


def _selectable(cache: Any) -> bool:
    """Whether rows can leave this cache: not where a layer keeps a recurrent state."""
    return all(
        hasattr(layer, "batch_select_indices") and not hasattr(layer, "recurrent_states")
        for layer in getattr(cache, "layers", ())
    )


def _cache_keyword(model: Any) -> str:
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"  # renamed in transformers 5.x
