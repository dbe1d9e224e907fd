"""The frozen target: any Hugging Face causal LM, and the hidden states that the drafter learns from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainer.drafter import decoder_of
from trainer.errors import InputError, counted
from trainer.modeldir import check_weights, read_config
from trainer.placement import human, spread


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


def choose_devices(place: str) -> tuple[torch.device, ...]:
    """Those of a place in `roles.Roles`, several joined by + for a target that is spread over them. Raises
    InputError.
    """
    return tuple(choose_device(name) for name in place.split("+"))


class Target:
    """A frozen causal LM. Hooks tap its layers, since Hugging Face's own list norms the last entry.

    It may be spread over several devices; what goes in and what comes out is on the first of them (`device`).
    """

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
        device: str | torch.device | Sequence[torch.device] = "cpu",
    ) -> Target:
        """Load a model directory. Raises InputError if it is damaged, no decoder that can be a target, or too
        large for the several devices over which it is to be spread.

        Its safetensors are mapped: on the CPU they stay so, and a device gets them tensor by tensor, without
        a second copy in memory. With another `dtype` than the files' own ("auto") they are converted, into a
        copy. Of a model with a vision part (Qwen3.5, …) the language model alone is loaded, where
        transformers has a class for that.
        """
        config = read_config(directory)
        check_weights(directory)
        from transformers.utils import logging  # late: it takes seconds

        made_by = _auto_class(directory, config)
        logging.disable_progress_bar()
        verbosity = logging.get_verbosity()
        logging.set_verbosity(logging.CRITICAL)  # what it reports of weights that do not fit is said below
        try:
            model, found = made_by.from_pretrained(
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
        if isinstance(device, str | torch.device):
            return cls(model.to(device))
        if len(device) == 1:
            return cls(model.to(device[0]))
        return cls(_spread_over(model, device, [_free(one) for one in device]))

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
        """Where it takes ids, and gives hidden states; of one that is spread, the first."""
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
        taps = torch.cat([self._taps[i].to(self.device) for i in self.layer_ids], dim=-1)
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
        return self.taken_taps(), last.to(self.device)


def _spread_over(model: Any, devices: Sequence[torch.device], room: Sequence[float]) -> Any:
    """`model` with its parts on `devices`, of which `room` bytes each are free. Raises InputError."""
    from accelerate import dispatch_model  # late: only a spread target needs it

    device_map, share = placed(model, [str(one) for one in devices], room)
    if share > 1:
        names = "+".join(str(one).removeprefix("cuda:") for one in devices)
        raise InputError(
            f"--target-gpus {names}: the target's weights take {human(_bytes(model))}, in whole layers, and "
            f"{' + '.join(human(size) for size in room)} are free there; spread it over more GPUs"
        )
    # Caches stay with their layers.
    skipped = getattr(model, "_skip_keys_device_placement", None)
    return dispatch_model(model, device_map, main_device=str(devices[0]), skip_keys=skipped, force_hooks=True)


def placed(model: Any, devices: Sequence[str], room: Sequence[float]) -> tuple[dict[str, str], float]:
    """accelerate's device map of a model, and the largest share of a device's `room` that it takes.

    The first device has all but the decoder's layers, which are divided, and its final norm, on the last.
    """
    decoder = decoder_of(model)
    layers, norm = list(decoder.layers), getattr(decoder, "norm", None)
    last = 0 if norm is None else _bytes(norm)
    sizes = [_bytes(layer) for layer in layers]
    of_layer, share = spread(sizes, _bytes(model) - sum(sizes) - last, last, room)
    device_of = {layer: devices[number] for layer, number in zip(layers, of_layer, strict=True)}
    if norm is not None:
        device_of[norm] = devices[-1]
    inside = {id(part) for part in (decoder, decoder.layers)}
    found: dict[str, str] = {}

    def walk(module: nn.Module, name: str) -> None:
        for part_name, part in module.named_children():
            whole = f"{name}{part_name}"
            if id(part) in inside or any(one is decoder for one in part.modules()):
                walk(part, f"{whole}.")
            else:
                found[whole] = device_of.get(part, devices[0])

    walk(model, "")
    return found, share


def _bytes(module: nn.Module) -> int:
    """Of its parameters and buffers, each counted once."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def _free(device: torch.device) -> float:
    """Bytes; of a device that does not tell, more than any target takes."""
    return float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 1e18


def _auto_class(directory: str | Path, config: dict[str, Any]) -> Any:
    """Which of transformers' classes loads the language model of a config.json. Raises InputError."""
    import transformers
    from transformers.models.auto import modeling_auto

    kind = config["model_type"]
    if kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return transformers.AutoModelForCausalLM
    if kind in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return transformers.AutoModelForImageTextToText  # the whole of it; only its decoder will be run
    raise InputError(
        f"--target-model {directory}: its config.json has the model_type {kind!r}, and transformers "
        f"{transformers.__version__} knows no causal language model of that type; install a transformers "
        "that does, or choose another target"
    )


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
