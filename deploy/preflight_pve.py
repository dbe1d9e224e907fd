"""What must hold on a Proxmox host before a deploy to a container that we make. (See preflight_adopted.)

A part of `deploy.preflight`. Pure: fed by `deploy.pve`'s facts, each finding with the one line that mends it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from deploy import container, pve, sizes
from deploy import image as images
from deploy.checks import Check
from deploy.devices import Devices
from deploy.runtimes import compose, pct
from deploy.settings import HostSettings, RunSettings
from deploy.sizes import size
from deploy.survey import Survey

VERSION = (8, 1)  # the first whose containers take devices by name (devN)
PLAIN = (9, 1)  # the first that takes a template that is not compressed
NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm")  # without these no process can use a GPU
USED_TEMPLATE_BYTES = 10**9  # about what one's own template takes, unpacked
MIB = 1 << 20

Facts = Mapping[str, Any]


def made(survey: Survey, host: HostSettings, run: RunSettings, found: Devices) -> list[Check]:
    """All findings about Proxmox, its storages, the template, memory, devices, network and mounts."""
    facts = survey.facts
    broken = list(_proxmox(facts, host))
    if broken:
        return broken  # nothing else can be said of a host without it
    known = facts["pve"]
    weights = survey.weights.path if survey.weights else None
    places = compose.mounts(run, survey.layout, weights, survey.data)
    return [
        *container.command(run),
        *_user(host, run),
        *_name(known, host, run, survey.layout.state),
        *_ids(known, host),
        *_storages(known, survey, host, run),
        *_memory(survey, host, run, found),
        *_devices(facts, host, found),
        *_network(known, host),
        *container.places(places),
        *_paths(places, host, (survey.storages or {}).get("links") or ()),
    ] or [Check("proxmox", True)]


def _proxmox(facts: Facts, host: HostSettings) -> Iterator[Check]:
    known = facts.get("pve")
    otherwise = f"or set runtime: compose or process for {host.name} in fabric.yaml"
    if not known:
        yield bad(
            "proxmox",
            f"{host.name} has no pct command, so it is no Proxmox host",
            f"correct its address, {otherwise}",
        )
    elif not known["root"]:
        yield bad(
            "proxmox",
            f"{facts['user']} is not root on {host.name}, but only root@pam may mount its directories and "
            "devices into containers",
            f"set address: root@… for {host.name} in fabric.yaml",
        )
    elif not known["mounted"]:
        yield bad(
            "proxmox",
            f"/etc/pve/lxc is not there on {host.name}",
            "run systemctl start pve-cluster there, and see journalctl -u pve-cluster",
        )
    elif known["version"] and pct.version(known) < VERSION:
        yield bad(
            "proxmox",
            f"{host.name} has Proxmox VE {known['version']}, but 8.1 or later is needed",
            f"upgrade it, or deploy to a container that you have (container: in fabric.yaml), {otherwise}",
        )


def _user(host: HostSettings, run: RunSettings) -> Iterator[Check]:
    if host.pct.unprivileged and max(int(part) for part in pct.user(run).split(":")) >= pve.ID_COUNT:
        yield bad(
            "user",
            f"the run has user: {run.user}, but an unprivileged container has ids below {pve.ID_COUNT} only",
            "give a smaller one, or set pct: {unprivileged: false} in fabric.yaml",
        )


def _name(known: Facts, host: HostSettings, run: RunSettings, state: str) -> Iterator[Check]:
    """A container is known by its id, but people know it by its name."""
    wanted = pct.hostname(run.name)
    for one in known["containers"]:
        ours = one["ours"]
        if one["hostname"] == wanted and not (ours and ours["state"] == state):
            whose = f"of the state directory {ours['state']}" if ours else "that Drafthouse did not make"
            yield bad(
                "in use",
                f"{host.name} has a container {one['id']} called {wanted}, {whose}",
                f"run pct set {one['id']} --hostname another-name there, or take another --name",
            )


def _ids(known: Facts, host: HostSettings) -> Iterator[Check]:
    if host.pct.unprivileged and not known["ids"]:
        yield bad(
            "ids",
            f"root of {host.name} may not map the ids of unprivileged containers",
            f"run: echo root:{pve.ID_OFFSET}:{pve.ID_COUNT} | tee -a /etc/subuid /etc/subgid",
        )
    if host.pct.range:
        first, last = host.pct.range
        taken = {int(key) for key in known["guests"] if key.isdigit()}
        if not set(range(first, last + 1)) - taken:
            yield bad(
                "ids",
                f"every id from {first} to {last} is taken on {host.name}",
                "widen pct: vmid in fabric.yaml, or let fab prune remove old containers",
            )


def _storages(known: Facts, survey: Survey, host: HostSettings, run: RunSettings) -> Iterator[Check]:
    root = pct.root_storage(host, survey.facts)
    space = (survey.storages or {}).get("space") or {}
    template = host.pct.template_storage
    if run.image.use is not None and pct.VOLUME in run.image.use:
        template = run.image.use.partition(":")[0]
        if (survey.storages or {}).get("template") is False:
            yield bad(
                "template",
                f"there is no template {run.image.use} on {host.name}",
                f"look with pveam list {template} there, or correct image: in the run's file",
            )
        if run.image.use.endswith(".tar") and (0, 0) < pct.version(known) < PLAIN:
            name = run.image.use.partition(pct.VOLUME)[2]
            yield bad(
                "template",
                f"Proxmox VE {known['version']} of {host.name} takes no plain .tar like {run.image.use}",
                f"run zstd on it there, and name {name}.zst in image: in the run's file",
            )
    yield from _storage(known, host, template, "vztmpl", "template_storage", space, 0)
    need = USED_TEMPLATE_BYTES
    if isinstance(survey.image, images.Image):
        need = container.PACKAGES_BYTES["gpu" if survey.image.arguments.get("VARIANT") == "gpu" else "cpu"]
    kind = next((one["type"] for one in known["storages"] if one["name"] == root), "")
    whole = sizes.parse(host.pct.rootfs) or 0
    if whole < need:
        yield bad(
            "storage",
            f"pct: rootfs is {host.pct.rootfs}, but the image takes about {size(need)}",
            f"set it to {-(-need // (1 << 30)) + 4}g or more in fabric.yaml",
        )
    yield from _storage(known, host, root, "rootdir", "storage", space, whole if kind == "lvm" else need)


def _storage(
    known: Facts, host: HostSettings, name: str, content: str, key: str, space: Facts, need: int
) -> Iterator[Check]:
    """One storage: that it is there, takes what we put there, and has room for it."""
    found = next((one for one in known["storages"] if one["name"] == name), None)
    others = [one["name"] for one in known["storages"] if content in one["content"] and not one["disabled"]]
    instead = (
        f"set pct: {key} in fabric.yaml to {' or '.join(others)}"
        if others
        else "add one there with pvesm add"
    )
    if found is None:
        yield bad("storage", f"{host.name} has no storage {name}", instead)
    elif content not in found["content"]:
        mend = f"run pvesm set {name} --content {','.join([*found['content'], content])} there, or {instead}"
        yield bad("storage", f"the storage {name} of {host.name} does not take {content}", mend)
    elif found["disabled"] or (found["nodes"] is not None and known["node"] not in found["nodes"]):
        yield bad("storage", f"the storage {name} is not there on this node of {host.name}", instead)
    elif name in space and not space[name]["active"]:
        yield bad(
            "storage",
            f"the storage {name} of {host.name} is not active",
            f"see pvesm status there, or {instead}",
        )
    elif name in space and space[name]["free"] < need:
        yield bad(
            "storage",
            f"the storage {name} of {host.name} has {size(space[name]['free'])} free, but a container takes "
            f"about {size(need)}",
            "let fab prune remove old containers, or " + instead,
        )


def _memory(survey: Survey, host: HostSettings, run: RunSettings, found: Devices) -> Iterator[Check]:
    bytes_ = survey.weights.bytes if survey.weights else 0
    has = pct.memory(host, run, survey.facts, bytes_, found.count)
    need = pct.need(run, bytes_, found.count)
    total = (survey.facts.get("memory") or {}).get("total")
    given = run.memory or host.pct.memory
    if given and has < need:
        where = "memory: in the run's file" if run.memory else "pct: memory in fabric.yaml"
        yield bad(
            "memory",
            f"memory is {given}, but weights and run need {size(need)}: the container would be "
            "throttled, then killed",
            f"set {where} to {-(-need // (1 << 30)) + 1}g or more, or remove it",
        )
    if total is not None and (has if given else need) > total:
        yield bad(
            "memory",
            f"the container needs {size(has if given else need)} of memory, but {host.name} has "
            f"{size(total)}",
            "lower memory:, or deploy to a larger machine",
        )
    need_shm, has_shm = compose.shm_bytes(found.count), compose.container_shm(run, found.count)
    if has_shm < need_shm:
        yield bad(
            "shm",
            f"shm_size is {run.shm_size}, but PyTorch's loaders and NCCL may need {need_shm >> 20} MiB in "
            "the container's /dev/shm, and would end in a bus error",
            "remove shm_size, or enlarge it",
            warning=run.command is not None,
        )


def _devices(facts: Facts, host: HostSettings, found: Devices) -> Iterator[Check]:
    """The device files, which are missing after a boot until something loads the module; the library."""
    if not found.ids:
        return
    known = {node["path"]: node for node in facts["pve"]["nodes"]}
    missing = [path for path in NODES if path not in known]
    strange = [path for path, node in known.items() if node["major"] is None]
    if missing:
        yield bad(
            "gpus",
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not there on {host.name}, and "
            "without it no process can use a GPU",
            "run nvidia-modprobe -u -c0 there",
        )
    if strange:
        yield bad(
            "gpus",
            f"{strange[0]} on {host.name} is no device",
            f"run rm {strange[0]}; nvidia-modprobe -u -c0 there",
        )
    driver = (facts.get("gpus") or {}).get("driver")
    libraries = facts["pve"].get("libraries") or []
    if driver and not any(one["name"] == "libcuda.so.1" for one in libraries):
        yield bad(
            "driver",
            f"{host.name} has the NVIDIA driver {driver}, but not its libcuda.so.1, which a "
            "container gets from it",
            f"install the libraries of the same driver there (the whole .run file of {driver}, or libcuda1)",
        )
    for one in libraries:
        if driver and one["version"] and one["version"] != driver:
            yield bad(
                "driver",
                f"the NVIDIA driver that {host.name} has loaded is {driver}, but {one['name']} is of "
                f"{one['version']}: no CUDA call would work",
                "reboot that machine, or install the libraries of the same driver",
            )
            break


def _network(known: Facts, host: HostSettings) -> Iterator[Check]:
    bridge, ip = host.pct.bridge, host.pct.ip
    wanted = bridge or next(iter(re.findall(r"\bbridge=([^,]+)", host.pct.net0 or "")), None)
    if wanted and wanted not in known["bridges"]:
        there = " or ".join(known["bridges"]) or "none"
        yield bad(
            "network",
            f"{host.name} has no bridge {wanted}",
            f"correct pct: bridge in fabric.yaml (it has {there})",
        )
    if bridge and ip == "dhcp" and pct.version(known) < pct.HOST_MANAGED:
        yield bad(
            "network",
            f"Proxmox VE {known['version']} asks no DHCP server for a container without a system in it",
            "give it an address, like pct: {ip: 10.0.0.5/24, gateway: 10.0.0.1} in fabric.yaml",
        )


def _paths(places: Iterable[compose.Mount], host: HostSettings, links: Sequence[str]) -> Iterator[Check]:
    """Proxmox mounts no directory through a link, and cannot write down every name."""
    for mount in places:
        if re.search(r"[,=\s\x00-\x1f\x7f]", mount.source):
            yield bad(
                "mounts",
                f"{mount.source!r} has a blank, a comma or '=', which no mount of a Proxmox "
                "container can hold",
                "choose another place for it",
            )
    for path in links:
        yield bad(
            "mounts",
            f"{path} on {host.name} leads through a symbolic link, which Proxmox mounts into no container",
            "give the real path (state:, cache: in fabric.yaml, data: in the run's file)",
        )


def bad(name: str, message: str, remedy: str, *, warning: bool = False) -> Check:
    return Check(name, False, message, remedy, warning)
