"""The target reading on with a cache that can be taken back, as verifying a guess needs it.

Keys and values of positions can be cut off again. A recurrent state (linear attention, Mamba, convolutions)
cannot: it is one sum over all that was read. So targets that have one are taken back by a snapshot from
before the guess, and what was accepted of the guess is read once more. To save passes that is not done at
once: what is to be read again goes in front of the next guess, until it is worth a pass of its own.

Letters in shapes: b sequences, n new positions, V vocabulary, K tapped layers, H width.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.errors import InputError
from trainer.target import Target

LONGEST_UNREAD = 16  # accepted positions that wait to be read again

Snapshot = list[dict[str, Any]]  # the attributes of each layer of a cache


class CachedTarget:
    """The target reading on: keys, values and states of what it has read are kept, and can be taken back."""

    def __init__(self, target: Target, *, rollback: bool = True) -> None:
        """Raises InputError if this kind of target has no cache that is known here."""
        from transformers import DynamicCache  # late: it takes seconds

        self.target = target
        parameters = inspect.signature(target.decoder.forward).parameters
        names = [name for name in ("cache", "past_key_values") if name in parameters]  # renamed in 5.x
        if not names:
            raise InputError(
                f"{type(target.model).__name__} has no cache that is known here, so nothing can be decoded "
                "with it; leave the evaluation out (--eval-prompts 0)"
            )
        self._keyword = names[0]
        self.cache = DynamicCache(config=target.config)
        self.recurrent = any(hasattr(layer, "recurrent_states") for layer in self.cache.layers)
        self.rollback = rollback
        if rollback and not self.recurrent:
            self.cache.activate_past_recording()  # sliding windows keep what a cut may bring back
        self._before: Snapshot = []  # of the cache, from before the last read
        self._last: Tensor | None = None  # what was read last, [b, …]
        self._unread: Tensor | None = None  # accepted, but the snapshot is from before it

    def read(self, ids: Tensor, last: int = 0, **how: Any) -> tuple[Tensor, Tensor | None]:
        """Read on with `ids` [b, n]. Returns logits [b, n, V], or of only the `last` positions, and the
        tapped layers' outputs [b, n, K·H] (None if none is tapped). `how` goes to the decoder.
        """
        count = ids.shape[1]
        if self._unread is not None:
            ids = torch.cat([self._unread, ids], dim=1)
        if self.rollback and self.recurrent:
            self._before = _snapshot(self.cache)
        self._last = ids
        hidden = self._run(ids, **how)[:, -(last or count) :]
        taps = self.target.taken_taps()[:, -count:] if self.target.layer_ids else None
        return self.target.head(hidden), taps

    def _run(self, ids: Tensor, **how: Any) -> Tensor:
        arguments: dict[str, Any] = {self._keyword: self.cache, **how}
        return self.target.decoder(input_ids=ids, use_cache=True, **arguments).last_hidden_state

    def forget(self, count: int) -> None:
        """Take the newest `count` positions back; they are of what was read last.

        Raises InputError if this kind of target cannot be taken back.
        """
        if self.recurrent:
            self._restore(count)
            return
        if not getattr(self.cache, "is_croppable", True):
            raise InputError(
                f"{type(self.target.model).__name__} has a cache that cannot be taken back, so it cannot "
                "verify a guess here; leave the evaluation out (--eval-prompts 0)"
            )
        # Negative: how many to remove. Transformers refuses a positive count, once the length to keep.
        self.cache.crop(-count)

    def _restore(self, count: int) -> None:
        assert self._last is not None
        if not count:
            self._unread, self._before = None, []
            return
        for layer, state in zip(self.cache.layers, self._before, strict=True):
            vars(layer).clear()
            vars(layer).update(state)
        self._unread, self._before = self._last[:, :-count], []
        if self._unread.shape[1] > LONGEST_UNREAD:
            self._run(self._unread)
            if self.target.layer_ids:
                self.target.taken_taps()  # known already, from the first time
            self._unread = None

    def keep(self, rows: Sequence[int]) -> None:
        """Of what was read last keep only these rows, in this order: the branch of a tree that was right.

        For targets for which `tree_refusal` is None.
        """
        assert self._last is not None
        for layer in self.cache.layers:
            start = layer.keys.shape[-2] - self._last.shape[1]
            chosen = start + torch.tensor(rows, device=layer.keys.device)
            kept = torch.cat([torch.arange(start, device=layer.keys.device), chosen])
            layer.keys, layer.values = layer.keys[..., kept, :], layer.values[..., kept, :]


def tree_refusal(target: Target) -> str | None:
    """Why this target cannot verify a tree of guesses in one pass; None if it can."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    if all(type(layer) is DynamicLayer for layer in DynamicCache(config=target.config).layers):
        return None
    return (
        f"{type(target.model).__name__} has layers with a recurrent state or a window, and those read one "
        "text at a time, not the branches of a tree; leave --tree-budget out"
    )


def _snapshot(cache: Any) -> Snapshot:
    """All that the layers of a cache hold. Recurrent states are copied, since they change in place; keys and
    values are not: what is appended to them makes new tensors.
    """
    return [{name: _held(value) for name, value in vars(layer).items()} for layer in cache.layers]


def _held(value: Any) -> Any:
    if isinstance(value, dict):  # by number, one for each state of the layer
        return {key: item.clone() if isinstance(item, Tensor) else item for key, item in value.items()}
    return value
