"""The checkpoints of a run: what is in the trainer's hands is saved, or taken from the newest one that is
whole.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import torch

from trainer import checkpoint, resuming
from trainer.config import Settings
from trainer.drafter import Drafter
from trainer.drafter_config import DrafterConfig
from trainer.errors import InputError
from trainer.finite import first_not_finite
from trainer.monitor import LOCAL, Monitor, say
from trainer.optim import Optimizer


class Saving:
    """Where a run stands (`state`), and the last checkpoint that says so (`saved`)."""

    def __init__(
        self,
        settings: Settings,
        monitor: Monitor,
        state: checkpoint.State,
        drafter: Drafter,
        optimizer: Optimizer,
    ) -> None:
        self.state = state
        self.saved: checkpoint.Found | None = None  # of this run; its state is of its step
        self._said = ""  # what went wrong at the last save
        self._settings = settings
        self._output = Path(settings.output_dir)
        self._monitor = monitor
        self._drafter = drafter
        self._optimizer = optimizer

    def save(self) -> str | None:
        """Save a checkpoint; returns what went wrong, which is also said, and does not end the training."""
        self._monitor.phase("checkpointing")
        try:
            self.state.rng = bytes(torch.get_rng_state().tolist()).hex()
            path = self._write()
        except Exception as error:  # whatever it is, what has been learnt is worth another attempt
            self.saved = None
            wrong = " ".join(str(error).split())
            if not isinstance(error, checkpoint.SaveError):
                wrong = f"no checkpoint at step {self.state.step}: {type(error).__name__}: {wrong}"
            if wrong != self._said:  # the last step's is tried again after the evaluation
                say(f"warning: {wrong}")
            self._said = wrong
            self._monitor.phase("training", f"checkpoint failed: {wrong}")
            return wrong
        self.saved = checkpoint.Found(path, dataclasses.replace(self.state))
        self._said = ""
        say(f"checkpoint {path}")
        self._monitor.checkpoint(path, self.state.step)
        self._monitor.phase("training")
        return None

    def _write(self) -> Path:
        """Once per step: the tensors of a step are what they are, so a second save renews the state alone."""
        if self.saved and self.saved.state.step == self.state.step:
            checkpoint.finish(checkpoint.Found(self.saved.path, self.state))
            return self.saved.path
        return checkpoint.save(
            self._output,
            self.state,
            self._drafter.state_dict(),
            self._optimizer.state(),
            self._drafter.config.to_json(),
            self._settings.keep_checkpoints,
            self._settings.keep_every,
        )

    def resume(self, batches_per_epoch: int) -> None:
        """Go on from the newest whole checkpoint, if there is one and nothing speaks against it.

        Raises InputError for one that cannot be gone on from with these settings.
        """
        found = self._to_go_on_from()
        if self.state.run_id == LOCAL:  # nobody numbers these, so whose checkpoints are whose is told here
            self.state.run_id = self._place(found)
        if found is None:
            return
        ours = self.state.settings
        shape = DrafterConfig.from_json(checkpoint.read_config(found))
        if wrong := resuming.of_another_name(found, self.state.run_id):
            raise InputError(wrong)
        if wrong := resuming.refusal(found, shape, self._drafter.config, ours):
            raise InputError(wrong)
        self._load(found)
        self.state.step = found.state.step
        self.state.micro_batch = found.state.micro_batch
        self.state.epoch = found.state.epoch
        self.state.per_step = resuming.per_step(found, ours, self.state.per_step)
        if changed := resuming.changed(found, ours):
            say(f"warning: resuming with other settings than before: {', '.join(changed)}")
            if resuming.begins_again(changed):
                self.state.micro_batch = self.state.epoch * batches_per_epoch
                say(f"warning: the data comes in another order now, so epoch {self.state.epoch} begins again")
        self.state.results = {
            when: result for when, result in found.state.results.items() if isinstance(result, dict)
        }
        self.state.wandb_id = found.state.wandb_id
        if found.path.parent == self._output / self.state.run_id:  # an earlier attempt of this run
            self.saved = found
            self.state.sequence = found.state.sequence
            self.state.digests = found.state.digests
        self._monitor.checkpoint(found.path, found.state.step)
        say(f"resumed from {found.path} at step {found.state.step}")

    def _to_go_on_from(self) -> checkpoint.Found | None:
        if self._settings.resume == "never":
            return None
        found = checkpoint.newest(self._output, say)
        if found is None:
            if checkpoint.directories(self._output):
                say(f"warning: {self._output} holds no whole checkpoint: starting at step 0")
            return None
        if why := resuming.superseded(found, self.state.settings):
            say(why)
            return None
        return found

    def _place(self, found: checkpoint.Found | None) -> str:
        """The directory of a run without a number: that of the run it goes on with, else one that holds
        nothing yet, so that no finished run loses what it left.
        """
        if found and re.fullmatch(rf"{LOCAL}(-\d+)?", found.path.parent.name):
            return found.path.parent.name
        names = (LOCAL if n == 1 else f"{LOCAL}-{n}" for n in itertools.count(1))
        return next(name for name in names if not any((self._output / name).glob("step-*")))

    def _load(self, found: checkpoint.Found) -> None:
        drafter, optimizer = checkpoint.load(found)
        tensors: dict[str, Any] = {**drafter, **optimizer}
        if bad := first_not_finite(tensors.items()):
            raise InputError(
                f"--resume auto: {found.path}: {bad} holds values that are not finite; remove this "
                "checkpoint to go on from the one before, or give --resume never to start at step 0"
            )
        self._drafter.load_state_dict(drafter)
        self._optimizer.load(optimizer)
        torch.set_rng_state(torch.tensor(list(bytes.fromhex(found.state.rng)), dtype=torch.uint8))

    def finish(self, *, anew: bool) -> Path | None:
        """Mark the last checkpoint as that of a finished run; `anew`: save one, since the last save failed.

        Returns where it is; None if that could not be written, which is said.
        """
        self.state.finished = True
        if anew and self.save() is not None:
            return None
        assert self.saved is not None
        try:
            checkpoint.finish(checkpoint.Found(self.saved.path, self.state))
        except checkpoint.SaveError as error:
            say(f"warning: {error}")
            return None
        return self.saved.path
