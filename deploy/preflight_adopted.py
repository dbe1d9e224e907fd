"""What must hold of a container that people have on a Proxmox host, seen from outside, before a deploy.

Pure: fed by `deploy.pve`'s facts, each finding with the one line that mends it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deploy.checks import Check
from deploy.preflight_pve import MIB, bad
from deploy.sizes import size

USUAL_MEMORY = 512  # MiB, which a container has if nobody says anything

Facts = Mapping[str, Any]


def adopted(
    known: Facts | None,
    host: str,
    vmid: int,
    *,
    need_bytes: int = 0,
    devices: Sequence[str] = (),
    docker_inside: bool = False,
) -> list[Check]:
    """All findings about an existing container. `known` is the Proxmox host's facts (`pve.facts`), `host` its
    name, `need_bytes` what weights and run need, `devices` the device files that the run needs there.
    """
    if not known:
        return [
            bad(
                "proxmox",
                f"{host} has no pct command, so it has no containers",
                "correct its address in fabric.yaml",
            )
        ]
    if not known["root"]:
        return [
            bad(
                "proxmox",
                f"only root may enter containers of {host}",
                f"set address: root@… for {host} in fabric.yaml",
            )
        ]
    one = next((one for one in known["containers"] if one["id"] == vmid), None)
    guest = known["guests"].get(str(vmid))
    if guest and guest["type"] != "lxc":
        return [
            bad(
                "container",
                f"{vmid} on {host} is a virtual machine, not a container",
                "give it a host entry of its own, with its address",
            )
        ]
    if one is None and guest and guest["node"] != known["node"]:
        node = guest["node"]
        return [
            bad(
                "container",
                f"container {vmid} is on the node {node}, not on {known['node']}",
                f"set address: to that of {node} in fabric.yaml",
            )
        ]
    if one is None:
        there = ", ".join(str(item["id"]) for item in known["containers"]) or "none"
        return [
            bad(
                "container",
                f"there is no container {vmid} on {host}",
                f"correct container: in fabric.yaml (pct list shows: {there})",
            )
        ]
    if one["ours"]:
        name = one["ours"]["name"]
        return [
            bad(
                "container",
                f"container {vmid} on {host} was made by Drafthouse for {name}",
                f"deploy {name} without container:, or choose another one",
            )
        ]
    return [
        *_locked(one),
        *_running(one, host),
        *_enough(one, need_bytes),
        *_passed_on(one, devices, known),
        *_nesting(one, docker_inside),
    ] or [Check("container", True)]


def _locked(one: Facts) -> Iterator[Check]:
    if one["lock"]:
        yield bad(
            "container",
            f"container {one['id']} is locked ({one['lock']})",
            f"wait for the end of that, or run pct unlock {one['id']} if nothing is at work any more",
        )


def _running(one: Facts, host: str) -> Iterator[Check]:
    if not one["running"]:
        yield bad(
            "container", f"container {one['id']} on {host} is stopped", f"run pct start {one['id']} there"
        )


def _enough(one: Facts, need: int) -> Iterator[Check]:
    text = str(one["values"].get("memory", USUAL_MEMORY))
    has = int(text) if text.isdigit() else USUAL_MEMORY
    if has * MIB < need:
        wanted = -(-need // MIB)
        yield bad(
            "memory",
            f"container {one['id']} may have {size(has * MIB)} of memory, but weights and run "
            f"need {size(need)}",
            f"run pct set {one['id']} --memory {wanted}",
        )


def _passed_on(one: Facts, wanted: Sequence[str], known: Facts) -> Iterator[Check]:
    """Device files that the container has not; by an entry of its own or by raw lines, as people do it."""
    raw = " ".join(value for _, value in one["lxc"])
    here = {node["path"] for node in known["nodes"]}
    has = [
        value.partition(",")[0].removeprefix("path=")
        for key, value in one["values"].items()
        if key.startswith("dev")
    ]
    for path in wanted:
        if path not in here:
            yield bad(
                "gpus",
                f"{path} is not there on the host of container {one['id']}",
                "run nvidia-modprobe -u -c0 there",
            )
    missing = [
        path for path in wanted if path in here and path not in has and not re.search(rf"{path}(\s|$)", raw)
    ]
    if missing and "/dev " not in raw:
        used = [int(key[3:]) for key in one["values"] if re.fullmatch(r"dev\d+", key)]
        first = max(used, default=-1) + 1
        words = " ".join(f"--dev{first + at} {path},mode=0666" for at, path in enumerate(missing))
        yield bad(
            "gpus",
            f"container {one['id']} has no {', '.join(missing)}",
            f"run pct set {one['id']} {words}, then pct reboot {one['id']}",
        )


def _nesting(one: Facts, docker_inside: bool) -> Iterator[Check]:
    if docker_inside and "nesting=1" not in one["values"].get("features", ""):
        yield bad(
            "nesting",
            f"Docker runs in container {one['id']}, which may start no containers itself",
            f"run pct set {one['id']} --features nesting=1,keyctl=1, then pct reboot {one['id']}",
        )
