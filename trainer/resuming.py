"""Whether the newest checkpoint may be gone on from, and what is said about it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from trainer import checkpoint
from trainer.checkpoint import Found
from trainer.config import FIELDS, FIXED, ORDER, Settings
from trainer.drafter_config import DrafterConfig
from trainer.errors import InputError
from trainer.modeldir import target_digest

_OF_TARGET = ("vocab_size", "hidden_size", "num_target_layers")
_OF_SETTINGS = ("block_size", "num_hidden_layers", "target_layer_ids", "mask_token_id", "sliding_window")
_RUN_ID = re.compile(r"\d+-(.+)")  # a number, then the name
TOY = "toy "  # before the digest of a target that the trainer made itself


def target_name(digest: str, *, toy: bool) -> str:
    """A target as State.settings names it."""
    return f"{TOY}{digest}" if toy else digest


def superseded(found: Found, ours: dict[str, Any]) -> str | None:
    """Why a run starts at step 0 although there is a checkpoint; None if it should go on from it.

    A toy is cut by wall-clock time: made anew, it is another target, and nobody has asked for that one.
    """
    if found.state.finished:
        return f"the newest checkpoint, {found.path}, is of a finished run: starting at step 0"
    theirs = found.state.settings.get("target")
    both_toys = str(theirs).startswith(TOY) and str(ours["target"]).startswith(TOY)
    if both_toys and theirs != ours["target"]:
        return (
            f"the newest checkpoint, {found.path}, was trained for an earlier toy target, which has been "
            "made anew since (its cache was lost, or its recipe or code changed): starting at step 0"
        )
    return None


def refusal(found: Found, shape: DrafterConfig, wanted: DrafterConfig, ours: dict[str, Any]) -> str | None:
    """Why `found`, whose drafter has `shape`, cannot be gone on from with these settings; None if it can."""
    theirs = found.state.settings
    if theirs.get("target", ours["target"]) != ours["target"]:
        return (
            f"--resume auto: {found.path} was trained for another target ({theirs['target']} instead of "
            f"{ours['target']}); use the same --target-model, or --resume never to start at step 0"
        )
    if shape != wanted:
        return (
            f"--resume auto: {found.path} holds another drafter ({_difference(shape, wanted)}); "
            "use the same settings, or --resume never to start at step 0"
        )
    for name in _of_kind(FIXED):
        if (kind := theirs.get(name, FIELDS[name].metadata["before"])) != ours[name]:
            return (
                f"--resume auto: {found.path} was trained with --{name.replace('_', '-')} {kind}; "
                "use the same, or --resume never to start at step 0"
            )
    return None


def of_another_name(found: Found, run_id: str) -> str | None:
    """Why `found` is no checkpoint of the name of the run `run_id`; None if it is, or one has no name."""
    theirs, ours = (_RUN_ID.fullmatch(one) for one in (found.state.run_id, run_id))
    if not theirs or not ours or theirs[1] == ours[1]:
        return None
    return (
        f"--resume auto: {found.path} is of another experiment ({theirs[1]}, and this run is of {ours[1]}); "
        "give each its own --output-dir, or --resume never to start at step 0"
    )


def changed(found: Found, ours: dict[str, Any]) -> list[str]:
    """Names of the settings that decide what is learnt and are not what they were. One that the checkpoint
    does not know had the value of before it was there: mostly the default.
    """
    theirs = found.state.settings
    default = {name: FIELDS[name].metadata["before"] for name in ours if name in FIELDS}
    return [key for key in ours if theirs.get(key, default.get(key)) != ours[key]]


def per_step(found: Found, ours: dict[str, Any], wanted: int) -> int:
    """Micro-batches of a step: as before, however many devices there are now, unless --grad-accum is another;
    then `wanted`.
    """
    before = found.state.settings.get("grad_accum", FIELDS["grad_accum"].default)
    return wanted if before != ours["grad_accum"] else found.state.per_step or before


def begins_again(changed: Collection[str]) -> bool:
    """Whether the micro-batches are others than those that the epoch in progress began with."""
    return bool({"data", *_of_kind(ORDER)} & set(changed))


def _of_kind(resume: str) -> list[str]:
    return [name for name, field in FIELDS.items() if field.metadata["resume"] == resume]


def _difference(theirs: DrafterConfig, ours: DrafterConfig) -> str:
    return ", ".join(
        f"{name} {value} instead of {getattr(ours, name)}"
        for name, value in vars(theirs).items()
        if value != getattr(ours, name)
    )


def check(settings: Settings, drafter: DrafterConfig) -> None:
    """Raise InputError if the newest checkpoint cannot be gone on from with these settings and `drafter`.

    A deploy asks before it stops the run in progress, so nothing of it may be left for the start to refuse.
    Of a toy, which need not have been made yet, only its recipe is known.
    """
    if settings.resume == "never" or settings.node:  # node 0 has the checkpoints
        return
    output = Path(settings.output_dir)
    coming = checkpoint.announced(output)  # the stop will leave one, which is newer than all that are there
    found = coming[0] if coming else checkpoint.newest(output, lambda text: None, verify=False)
    if found is None or found.state.finished:
        return
    shape = DrafterConfig.from_json(coming[1] if coming else checkpoint.read_config(found))
    theirs = str(found.state.settings.get("target"))
    if settings.target_model != TOY.strip():
        unread = settings.target_model if theirs.startswith(TOY) else theirs
        target = _digest(settings.target_model) or unread
    elif not theirs.startswith(TOY):
        target = "the toy"
    elif any(getattr(shape, name) != getattr(drafter, name) for name in _OF_TARGET):
        return  # of another recipe's toy: see superseded
    else:
        target = theirs
    wanted = dataclasses.replace(shape, **{name: getattr(drafter, name) for name in _OF_SETTINGS})
    if wrong := refusal(found, shape, wanted, {**settings.learning(), "target": target}):
        raise InputError(wrong)


def _digest(directory: str) -> str | None:
    """Of a target whose weights may not be there yet."""
    try:
        return target_digest(directory)
    except InputError:
        return None
