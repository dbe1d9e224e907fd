"""Which GPUs a run gets. Pure: from what the run's file asks for and what the probe saw.

The same answer before and after a deploy: a run in progress keeps what it has, if that is what is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from deploy.sizes import age

Wanted = Literal["all"] | int | list[int] | None


@dataclass(frozen=True)
class Devices:
    """`ids` are indices as nvidia-smi gives them; None: nothing was said, and a plain process sees all."""

    ids: tuple[str, ...] | None
    problems: tuple[str, ...] = ()  # each a sentence with its remedy

    @property
    def count(self) -> int:
        return len(self.ids or ())


def there(facts: Mapping[str, Any]) -> list[str]:
    """The indices of the host's devices."""
    return [str(device["index"]) for device in (facts.get("gpus") or {}).get("devices", [])]


def files(found: Devices, facts: Mapping[str, Any]) -> tuple[str, ...]:
    """The device files of these devices on the host, and those that go with any of them."""
    gpus = facts.get("gpus") or {}
    own = [device["path"] for device in gpus.get("devices", []) if str(device["index"]) in (found.ids or ())]
    return (*own, *gpus.get("control", [])) if own else ()


def taken(facts: Mapping[str, Any], name: str) -> dict[str, str]:
    """``{"0": "0009-exp"}``: devices that runs of other names have, by their run.json."""
    found: dict[str, str] = {}
    for run in facts.get("runs", []):
        if run["alive"] and run["name"] != name:
            found |= {str(index): run["run_id"] for index in (run["run"] or {}).get("devices") or []}
    return found


def choose(wanted: Wanted, facts: Mapping[str, Any], name: str, host: str, runtime: str) -> Devices:
    """The devices of a run of `name`. Without `gpus:` a container gets all that the host has."""
    present, others = there(facts), taken(facts, name)
    if wanted is None and runtime == "process":
        return Devices(None)
    if wanted is None or wanted == 0:
        ids: list[str] = present if wanted is None else []
    elif wanted == "all":
        ids = present
        if not ids:
            return Devices((), (_none(facts, host, "gpus: all"),))
    elif isinstance(wanted, int):
        if wanted > len(present):
            return Devices((), (_fewer(facts, host, f"gpus: {wanted}", present),))
        mine = _mine(facts, name)
        free = [index for index in present if index not in others]
        ids = mine if len(mine) == wanted and set(mine) <= set(free) else free[:wanted]
        if len(ids) < wanted:
            held = ", ".join(f"{index} by {run}" for index, run in sorted(others.items()))
            return Devices(
                (),
                (
                    f"gpus: {wanted}, but only {len(free)} of the {len(present)} devices of {host} are free "
                    f"({held}); stop that run, or ask for fewer",
                ),
            )
    else:
        ids = [str(index) for index in wanted]
        if not set(ids) <= set(present):
            return Devices((), (_fewer(facts, host, f"gpus: [{', '.join(ids)}]", present),))
    problems = [
        f"device {index} of {host} is in use by {others[index]}, a run of another name; give each name "
        f"its own with gpus: in its file, like gpus: [{index}], or stop that run"
        for index in ids
        if index in others
    ]
    return Devices(tuple(ids), tuple(problems or _held(facts, name, host, ids)))


def _mine(facts: Mapping[str, Any], name: str) -> list[str]:
    live = [run for run in facts.get("runs", []) if run["alive"] and run["name"] == name and run["run"]]
    return [str(index) for index in (live[-1]["run"].get("devices") or [])] if live else []


def _held(facts: Mapping[str, Any], name: str, host: str, ids: list[str]) -> list[str]:
    """Processes that have a device open and are neither this name's run nor a daemon that always has."""
    owner = {process["pid"]: run for run in facts.get("runs", []) for process in run.get("processes", [])}
    found = []
    for device in (facts.get("gpus") or {}).get("devices", []):
        for holder in device.get("holders", []):
            run = owner.get(holder["pid"])
            if str(device["index"]) not in ids or holder.get("daemon") or (run and run["name"] == name):
                continue
            since = f", for {age(holder['age'])}" if holder.get("age") is not None else ""
            who = f"{run['run_id']}, a run of another name, as " if run else ""
            found.append(
                f"device {device['index']} of {host} is in use by {who}process {holder['pid']} "
                f"({holder['command']}{since}); end it, or choose other devices with gpus:"
            )
    return found


def _none(facts: Mapping[str, Any], host: str, asked: str) -> str:
    if not (facts.get("gpus") or {}).get("driver"):
        return (
            f"the run has {asked}, but {host} has no NVIDIA driver loaded; install it there, or set gpus: 0 "
            "to compute on the CPU"
        )
    return (
        f"the run has {asked}, but {host} shows no /dev/nvidia0 though its driver is loaded; run "
        "nvidia-modprobe -u -c0 there, or set gpus: 0"
    )


def _fewer(facts: Mapping[str, Any], host: str, asked: str, present: list[str]) -> str:
    if not present:
        return _none(facts, host, asked)
    has = f"device {present[0]} only" if len(present) == 1 else f"devices {present[0]} to {present[-1]}"
    return f"the run has {asked}, but {host} has {has}; correct gpus: in the run's file"
