"""What must hold of a container that people have on a Proxmox host, seen from outside, before a deploy.

Pure: fed by `deploy.pve`'s facts, each finding with the one line that mends it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deploy import budget
from deploy.checks import Check
from deploy.preflight_pve import MIB, bad
from deploy.runtimes.pct import MEMORY_MARGIN
from deploy.settings import HostSettings, RunSettings
from deploy.sizes import size
from deploy.survey import Survey

USUAL_MEMORY = 512  # MiB, which a container has if nobody says anything

Facts = Mapping[str, Any]


def checks(survey: Survey, host: HostSettings, run: RunSettings, runtime: str) -> list[Check]:
    """The findings about the container that `host` is; none if the host around it tells nothing."""
    if host.container is None or survey.around is None:
        return []
    nodes = [str(node["path"]) for node in survey.around["nodes"]]
    count = len(run.gpus) if isinstance(run.gpus, list) else 1
    weights = (survey.weights.bytes if survey.weights else 0) or 0
    found = adopted(
        survey.around,
        host.name,
        host.container,
        need_bytes=weights + budget.working_need(run, "process", count).bytes,
        devices=wanted_devices(run.gpus, nodes),
        docker_inside=runtime == "compose",
    )
    one = next((one for one in survey.around["containers"] if one["id"] == host.container), None)
    if one is None:
        return found
    inside = (survey.facts.get("gpus") or {}).get("devices") or []
    return [*found, *_unseen(one, run, nodes, bool(inside)), *_onboot(one, survey.facts)]


def wanted_devices(gpus: Any, nodes: Sequence[str]) -> list[str]:
    """The device files that `gpus:` of a run's file asks for, of those that the host has."""
    if not gpus:
        return []
    common = [path for path in nodes if not re.fullmatch(r"/dev/nvidia\d+", path)]
    if isinstance(gpus, list):
        return [*(f"/dev/nvidia{index}" for index in gpus), *common]
    return list(nodes) or ["/dev/nvidia0"]


def _unseen(one: Facts, run: RunSettings, nodes: Sequence[str], inside: bool) -> Iterator[Check]:
    """A run that takes what there is computes on the CPU if the container has none of the host's GPUs."""
    if run.gpus is None and nodes and not inside:
        words = " ".join(f"--dev{at} {path},mode=0666" for at, path in enumerate(nodes))
        yield Check(
            "gpus",
            False,
            f"the host of container {one['id']} has GPUs, but the container has none of them",
            f"run pct set {one['id']} {words}, then pct reboot {one['id']}; or say gpus: 0 in the run's file",
            True,
        )


def _onboot(one: Facts, facts: Facts) -> Iterator[Check]:
    """After a reboot nobody starts what is in a container that nobody starts."""
    if str(one["values"].get("onboot", "0")) != "1" and facts.get("boot_unit") is not False:
        yield Check(
            "at boot",
            False,
            f"container {one['id']} is not started when its host starts, and so no run in it",
            f"run pct set {one['id']} --onboot 1",
            True,
        )


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
    """A lock keeps nobody from what is in a container that runs; but a backup may freeze or stop it."""
    if one["lock"]:
        yield Check(
            "container",
            False,
            f"container {one['id']} is locked ({one['lock']})",
            f"wait for the end of that, or run pct unlock {one['id']} if nothing is at work any more",
            bool(one["running"]),
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
        wanted = -(-(need + max(MEMORY_MARGIN, need // 4)) // MIB)
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
