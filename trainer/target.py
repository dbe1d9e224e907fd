"""The frozen target: any Hugging Face causal LM, and the hidden states that the drafter learns from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from trainer.drafter import decoder_of
from trainer.errors import InputError, counted
from trainer.modeldir import check_weights, read_config


def choose_device(name: str) -> torch.device:
    """Raises InputError if it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cpu"):  # "cpu:1" is a second process, and the same device
        return torch.device("cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"--device {name}: this process sees {torch.cuda.device_count()} GPUs")
    return device


class Target:
    """A frozen causal LM. Hooks tap its layers, since Hugging Face's own list norms the last entry."""

    def __init__(self, model: Any, layer_ids: tuple[int, ...] = ()) -> None:
        self.model = model.eval().requires_grad_(False)
        self.decoder = decoder_of(model)
        self.config = model.config.get_text_config()
        self.num_layers = len(self.decoder.layers)
        self.head = model.get_output_embeddings()
        self._taps: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        self.layer_ids: tuple[int, ...] = ()
        self.tap(layer_ids)

    @classmethod
    def load(
        cls,
        directory: str | Path,
        dtype: torch.dtype | Literal["auto"] = torch.float32,
        device: str | torch.device = "cpu",
    ) -> Target:
        """Load a model directory. Raises InputError if it is damaged, or no decoder that can be a target.

        Its safetensors are mapped: on the CPU they stay so, and a device gets them tensor by tensor, without
        a second copy in memory. With another `dtype` than the files' own ("auto") they are converted, into a
        copy. Of a model with a vision part (Qwen3.5, …) the language model alone is loaded, where
        transformers has a class for that.
        """
        config = read_config(directory)
        check_weights(directory)
        from transformers.utils import logging  # late: it takes seconds

        logging.disable_progress_bar()
        verbosity = logging.get_verbosity()
        logging.set_verbosity(logging.CRITICAL)  # what it reports of weights that do not fit is said below
        try:
            model, found = _auto_class(config).from_pretrained(
                str(directory),
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
            )
        except Exception as error:  # transformers raises what it likes for what is wrong with its input
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise InputError(f"--target-model {directory}: transformers cannot load it ({reason})") from None
        finally:
            logging.set_verbosity(verbosity)
        # Without this, transformers would leave random numbers there and only warn.
        if wrong := _unfit(found):
            raise InputError(
                f"--target-model {directory}: its weights do not fit its config.json: {wrong}; "
                "copy the model again"
            )
        if more := _more_than_a_product(model):
            raise InputError(
                f"--target-model {directory}: its output head is more than a product with a matrix ({more}), "
                "and the training objective knows no other; choose another target"
            )
        return cls(model.to(device))

    @classmethod
    def load_ends(cls, directory: str | Path, dtype: torch.dtype, device: str | torch.device) -> Target:
        """Only embedding and output head are put on `device`, which is all that training a drafter needs of a
        target that runs elsewhere. Its layers stay mapped from the files: `model` can be read, and is not
        run.
        """
        found = cls.load(directory, "auto", "cpu")
        embedding, head = found.model.get_input_embeddings(), found.head
        embedding.to(device, dtype)
        if head.weight is not embedding.weight:
            head.to(device, dtype)
        return found

    def tap(self, layer_ids: tuple[int, ...] | list[int]) -> None:
        """Choose the layers whose outputs `features` returns, in this order.

        Raises InputError for a layer that is not there, and for the last one: what Hugging Face lists as its
        output has gone through the final norm, so there would be two meanings of that id.
        """
        if wrong := [i for i in layer_ids if not 0 <= i < self.num_layers - 1]:
            raise InputError(
                f"layer {wrong[0]} of a target of {self.num_layers} layers cannot be tapped: give ids from 0 "
                f"to {self.num_layers - 2} (the last layer cannot be tapped)"
            )
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
        return self.head.weight

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
    def features(self, input_ids: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One pass over rows [b, S], padded on the right (a causal model's real positions do not see that).

        `positions` [b, S] is needed where several documents are packed into a row: it begins at 0 with each,
        from which transformers tells that they must not see each other.

        Returns the tapped layers' outputs [b, S, K·H] and the last hidden state after the final norm [b, S,
        H].
        """
        packed = {} if positions is None else {"position_ids": positions}
        last = self.decoder(input_ids=input_ids, use_cache=False, **packed).last_hidden_state
        return self.taken_taps(), last


def _auto_class(config: dict[str, Any]) -> Any:
    """Which of transformers' classes loads the language model of a config.json."""
    import transformers
    from transformers.models.auto import modeling_auto

    kind = config["model_type"]
    if kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return transformers.AutoModelForCausalLM
    if kind in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return transformers.AutoModelForImageTextToText  # the whole of it; only its decoder will be run
    raise ValueError(f"it knows no causal language model of the type '{kind}'")


def _unfit(found: dict[str, Any]) -> str | None:
    """What is missing or misshapen by transformers' report of a loading, the first by name; None if
    nothing is.
    """
    wrong = {str(name): "is missing" for name in found["missing_keys"]}
    for name, *shapes in found["mismatched_keys"]:
        theirs, wanted = (list(shape) for shape in shapes)
        wrong[str(name)] = f"has the shape {theirs} and not {wanted}"
    if not wrong:
        return None
    first = min(wrong)
    others = counted(len(wrong) - 1, "other")
    return f"{first} {wrong[first]}" + (f", and {others} like it" if len(wrong) > 1 else "")


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
