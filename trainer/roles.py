"""Which device does what: some run the target, some train the drafter, or each does both. Needs no torch.

One process per device, a rank each: the drafters first, since rank 0 keeps the books. Of several machines
(nodes) each has the same devices.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trainer.errors import InputError
from trainer.status import RANK_VARIABLE, STORE_VARIABLE

if TYPE_CHECKING:
    from trainer.config import Settings

Role = Literal["target", "drafter", "colocated"]


@dataclass(frozen=True)
class Rank:
    """One process: its number among all, its number among those of its role, and where it computes."""

    number: int
    role: Role
    index: int
    device: str  # a target that is spread over several has them joined by +
    node: int | None = None  # the machine; None if there is only one

    def __str__(self) -> str:
        """``rank 3 (target 1 on cuda:1)``, of several machines ``rank 3 (target 1 on cuda:1 of node 1)``"""
        which = self.role if self.role == "colocated" else f"{self.role} {self.index}"
        where = "" if self.node is None else f" of node {self.node}"
        return f"rank {self.number} ({which} on {self.device}{where})"


def own_rank() -> int:
    """The number of this process among those of its run."""
    return int(os.environ.get(RANK_VARIABLE) or 0)


def store() -> str | None:
    """Where the processes of this run find each other, as torch.distributed's init_method."""
    place = os.environ.get(STORE_VARIABLE)
    if not place or "://" in place:
        return place
    return f"file://{place}"


@dataclass(frozen=True)
class Roles:
    """Names of devices, as torch has them ("auto": still to be found out); "cpu:1" is a second process.
    Those of one machine; all have the same.
    """

    targets: tuple[str, ...]
    drafters: tuple[str, ...]
    nodes: int = 1

    @property
    def devices(self) -> tuple[str, ...]:
        every = (device for place in (*self.targets, *self.drafters) for device in place.split("+"))
        return tuple(dict.fromkeys(every))

    @property
    def colocated(self) -> bool:
        """Whether each process does both."""
        return set(self.targets) == set(self.drafters)

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """Of all machines: the drafters of node 0, of node 1, …, then the targets likewise."""
        nodes = range(self.nodes) if self.nodes > 1 else (None,)

        def made(role: Role, devices: tuple[str, ...], first: int) -> list[Rank]:
            places = [(device, node) for node in nodes for device in devices]
            return [Rank(first + i, role, i, *place) for i, place in enumerate(places)]

        if self.colocated:
            return tuple(made("colocated", self.drafters, 0))
        drafters = made("drafter", self.drafters, 0)
        return (*drafters, *made("target", self.targets, len(drafters)))


def of(settings: Settings) -> Roles:
    """Raises InputError for --target-gpus and --drafter-gpus that cannot be meant."""
    targets, drafters = settings.target_gpus, settings.drafter_gpus
    if targets is None and drafters is None:
        return Roles((settings.device,), (settings.device,), settings.nodes)
    if targets is None or drafters is None:
        given, other = ("--target-gpus", "--drafter-gpus")[:: -1 if targets is None else 1]
        raise InputError(f"{given} needs {other} beside it: say which GPUs do the other half of the work")
    if settings.device != "auto":
        raise InputError(f"--device {settings.device} and --target-gpus exclude each other: give one of them")
    if wrong := conflict(targets, drafters):
        raise InputError(wrong)
    return Roles(tuple(map(_torch_name, targets)), tuple(map(_torch_name, drafters)), settings.nodes)


def conflict(targets: Sequence[str], drafters: Sequence[str]) -> str | None:
    """What is wrong with the devices of both flags together, as one sentence; None if nothing is."""
    flags = {"--target-gpus": targets, "--drafter-gpus": drafters}
    pieces = {flag: [device for place in places for device in place.split("+")]
              for flag, places in flags.items()}  # fmt: skip
    for flag, devices in pieces.items():
        if twice := next((device for device in devices if devices.count(device) > 1), None):
            return f"{flag} {','.join(flags[flag])} names {_called(twice)} twice; name each once"
    every = [device.startswith("cpu") for devices in pieces.values() for device in devices]
    named = " and ".join(f"{flag} {','.join(places)}" for flag, places in flags.items())
    if any(every) and not all(every):
        return f"{named} mix processes on the CPU with GPUs: take one kind"
    if spread := [place for place in drafters if "+" in place]:
        return (
            f"--drafter-gpus {spread[0]}: a drafter is trained on one GPU each, only a target is spread over "
            f"several; give {spread[0].replace('+', ',')}"
        )
    both = set(pieces["--target-gpus"]) & set(pieces["--drafter-gpus"])
    if both and set(targets) != set(drafters):
        return f"{named} share {_called(min(both))}: give each GPU one role, or both flags the same GPUs"
    return None


def _called(device: str) -> str:
    return device if device.startswith("cpu") else f"GPU {device}"


def _torch_name(place: str) -> str:
    return "+".join(device if device.startswith("cpu") else f"cuda:{device}" for device in place.split("+"))
