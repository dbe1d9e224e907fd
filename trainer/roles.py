"""Which device does what: some run the target, some train the drafter, or one does both. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.errors import InputError

if TYPE_CHECKING:
    from trainer.config import Settings


@dataclass(frozen=True)
class Roles:
    """Names of devices, as torch has them ("auto": still to be found out)."""

    targets: tuple[str, ...]
    drafters: tuple[str, ...]

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.targets, *self.drafters)))


def of(settings: Settings) -> Roles:
    """Raises InputError for --target-gpus and --drafter-gpus that cannot be meant."""
    targets, drafters = settings.target_gpus, settings.drafter_gpus
    if targets is None and drafters is None:
        return Roles((settings.device,), (settings.device,))
    if targets is None or drafters is None:
        given, other = ("--target-gpus", "--drafter-gpus")[:: -1 if targets is None else 1]
        raise InputError(f"{given} needs {other} beside it: say which GPUs do the other half of the work")
    if settings.device != "auto":
        raise InputError(f"--device {settings.device} and --target-gpus exclude each other: give one of them")
    for name, numbers in (("--target-gpus", targets), ("--drafter-gpus", drafters)):
        if len(set(numbers)) < len(numbers):
            raise InputError(f"{name} {_list(numbers)} names a GPU twice; name each once")
    both = set(targets) & set(drafters)
    if both and not len(targets) == len(drafters) == 1:
        raise InputError(
            f"--target-gpus {_list(targets)} and --drafter-gpus {_list(drafters)} share GPU {min(both)}: "
            "give each GPU one role, or one GPU both"
        )
    return Roles(tuple(f"cuda:{n}" for n in targets), tuple(f"cuda:{n}" for n in drafters))


def one_device(settings: Settings) -> str:
    """The device of a run that uses one. Raises InputError for a run that would use several."""
    roles = of(settings)
    if len(roles.devices) > 1:
        raise InputError(
            f"--target-gpus {_list(settings.target_gpus)} --drafter-gpus {_list(settings.drafter_gpus)}: "
            "a run uses one device so far; give the same GPU twice, as in --target-gpus 0 --drafter-gpus 0"
        )
    return roles.devices[0]


def _list(numbers: tuple[int, ...] | None) -> str:
    return ",".join(map(str, numbers or ()))
