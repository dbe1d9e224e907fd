"""What every process of a run loads before it does its part: target, data, and the shape of the drafter."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer import evaluation, resuming
from trainer.completions import Completions
from trainer.config import Settings
from trainer.data import Portions, Reader, check_usable
from trainer.drafter_config import DrafterConfig
from trainer.errors import InputError
from trainer.evaluating import Evaluations
from trainer.finite import first_not_finite
from trainer.foreign import open_completions
from trainer.modeldir import default_mask_token, stop_tokens, target_digest, tokenizer_digest
from trainer.monitor import Monitor, say
from trainer.packing import check_packing
from trainer.target import Target

SHM_VARIABLE = "DRAFTHOUSE_SHM"  # where weights lie in memory


@dataclass(frozen=True)
class Loaded:
    target_dir: str
    target: Target  # with `ends`: embedding and output head alone are on the device
    completions: Completions
    config: DrafterConfig
    reader: Reader
    toy_prompts: evaluation.Prompts | None  # with the toy target
    name: str  # of the target, by content

    def evaluations(self, settings: Settings) -> Evaluations:
        """Raises InputError if the prompts' file is wrong."""
        stop = stop_tokens(self.target_dir)
        return Evaluations(
            settings, self.target, self.target_dir, self.name, self.completions, self.toy_prompts, stop
        )


def load(
    settings: Settings, monitor: Monitor, devices: Sequence[torch.device], *, ends: bool = False
) -> Loaded:
    """The target on `devices`. `ends`: for a process that only trains the drafter.

    Raises InputError for what does not fit together.
    """
    monitor.phase("loading")
    toy_prompts = None
    if settings.target_model == "toy":
        from trainer import toy

        shm = Path(os.environ.get(SHM_VARIABLE) or "/dev/shm/drafthouse")
        made = toy.ensure(settings.cache, shm, monitor.report)  # now, if it is not there
        toy_prompts = made.prompts
        target_dir, data_dir = str(made.target_dir), settings.data_dir or str(made.data_dir)
    else:
        assert settings.data_dir
        target_dir, data_dir = settings.target_model, settings.data_dir
    monitor.phase("loading", f"target {target_dir}")
    completions = open_completions(data_dir, settings.cache, say)
    check_usable(completions, settings.block_size, settings.max_seq_len)  # before what takes minutes
    dtype = getattr(torch, settings.dtype)
    if ends:
        target = Target.load_ends(target_dir, dtype, devices[0])
    else:
        target = Target.load(target_dir, dtype, devices)
    if not ends and (bad := first_not_finite(target.model.named_parameters())):
        raise InputError(
            f"--target-model {target_dir}: {bad} holds values that are not finite; copy the model again"
        )
    vocabulary = target.config.vocab_size
    completions.check_target(tokenizer_digest(target_dir), vocabulary)
    if settings.packing:
        check_packing(target.config)
    mask = settings.mask_token_id
    config = DrafterConfig.for_target(
        target.config,
        block_size=settings.block_size,
        num_layers=settings.num_draft_layers,
        target_layer_ids=settings.target_layer_ids,
        num_taps=settings.num_taps,
        sliding_window=settings.sliding_window,
        mask_token_id=default_mask_token(target_dir, vocabulary) if mask is None else mask,
    )
    if not ends:
        target.tap(config.target_layer_ids)
    return Loaded(
        target_dir=target_dir,
        target=target,
        completions=completions,
        config=config,
        reader=Reader(completions, Portions.of(settings, config.mask_token_id)),
        toy_prompts=toy_prompts,
        name=resuming.target_name(target_digest(target_dir), toy=settings.target_model == "toy"),
    )
