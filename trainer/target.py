"""The frozen target: any Hugging Face causal LM, and the hidden states that the drafter learns from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.drafter import decoder_of
from trainer.errors import InputError
from trainer.modeldir import check_weights, read_config


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
        """Load a model directory. Raises InputError if it is damaged.

        Its safetensors are mapped: on the CPU they stay so, and a device gets them tensor by tensor, without
        a second copy in memory. With another `dtype` than the files' own they are converted, into a copy.
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
        if more := _more_than_a_product(model):
            raise InputError(
                f"--target-model {directory}: its output head is more than a product with a matrix ({more}), "
                "and the training objective knows no other; choose another target"
            )
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


def _more_than_a_product(model: Any) -> str | None:
    """What an output head does besides one product with a matrix; None if nothing."""
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        return "a bias"
    config = model.config.get_text_config()
    if getattr(config, "final_logit_softcapping", None):
        return "final_logit_softcapping"
    for name in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
        if (getattr(config, name, None) or 1) != 1:
            return name
    return None
