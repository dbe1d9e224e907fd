"""The pct runtime: a Proxmox container of our own for each release, rendered by templates/pct.conf.j2. Pure.

Its sibling is `compose`: the same mounts, the same launch under tini, the same user. What differs:

- A new release is a new container, made from its template while the old one works. The switch shuts that one
  down and starts the new one; the old one stays, stopped, and a rollback starts it again.
- A bind mount must not lead through a link, so the run's directory stands in the configuration itself. It is
  rendered with placeholders (`pct_conf`), which the switch fills in for each run before it starts the
  container.
- Proxmox never starts it at boot (``onboot: 0``): it would do so before the weights are in shared memory, and
  into the directory of a run that is over. The unit that we install does it, as for the other runtimes.
- An unprivileged container's user has another number on the host, by `pve.ID_OFFSET`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from deploy import budget, devices, pct_conf, pct_host, pve, render, sizes
from deploy.devices import Devices
from deploy.runtimes import compose

if TYPE_CHECKING:
    from deploy.release import Layout
    from deploy.settings import HostSettings, RunSettings
    from trainer import status

RUN_DIR = compose.RUN_DIR
RELEASE_FILE = "pct.conf"  # in a release
INIT_FILE = "app/init.sh"  # in a release whose template is not ours
VOLUME = ":vztmpl/"  # in the name of a template that lies in a storage
MIB = 1 << 20
STOP_MARGIN_SECONDS = 10  # Proxmox kills so much later than launch, which then still tells how it ended
MEMORY_MARGIN = 2 << 30  # bytes, or a quarter of what is known to be needed, if that is more
HOST_MANAGED = (9, 1)  # from here on Proxmox itself can set up a container's network
# What our image sets for its processes (the Dockerfile's ENV), for init does not read an image.
IMAGE_VARIABLES = {
    "PATH": "/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "PYTHONPATH": compose.APP,
    "HF_HUB_OFFLINE": "1",
}
FOREIGN_VARIABLES = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "PYTHONPATH": compose.APP,
    "PYTHONDONTWRITEBYTECODE": "1",
}
# The first process of a template that is not ours, and may lack tini.
INIT = """\
#!/bin/sh
# The first process in a container of {name}: launch under tini, if the template has one, as the run's user.
if command -v tini >/dev/null 2>&1; then set -- tini -- {drop} {launch}; else set -- {drop} {launch}; fi
exec "$@"
"""


@dataclass(frozen=True)
class LateMount:
    """A mount below /dev, which LXC makes anew at the start, or of a single file: not one of Proxmox's."""

    source: str
    target: str
    read_only: bool = True
    file: bool = False


@dataclass(frozen=True)
class Container:
    """All that a release's configuration says, and all that making its container takes."""

    name: str  # the experiment
    hostname: str
    arch: str
    unprivileged: bool
    cores: int | None
    memory_mib: int
    swap_mib: int
    nesting: bool
    order: int | None
    stop_seconds: int
    init: Sequence[str]
    environment: Mapping[str, str]
    mounts: Sequence[compose.Mount]
    late_mounts: Sequence[LateMount]
    devices: Sequence[str]
    shm_bytes: int
    net0: str | None
    network: Sequence[str] = ()  # what the host sets up of it, as raw lines
    files: Mapping[str, bytes] = field(default_factory=dict)  # more files of the release

    def describe(self) -> str:
        """The plan's words."""
        kind = "unprivileged" if self.unprivileged else "privileged"
        cores = f"{self.cores} cores" if self.cores else "all cores"
        return f"{self.hostname}, {kind}, {cores}, {sizes.size(self.memory_mib * MIB)} of memory, " + (
            f"network {self.net0}"
            if self.net0
            else "no network (pct: {bridge: vmbr0} in fabric.yaml gives one)"
        )


def describe(
    host: HostSettings,
    run: RunSettings,
    layout: Layout,
    facts: Mapping[str, Any],
    *,
    weights: str | None,
    weights_bytes: int,
    data: str | None,
    gpus: int,
    device_files: Sequence[str],
) -> Container:
    """The container of a release. `weights` and `data` are paths on the host, or `toy`."""
    known = facts.get("pve") or {}
    pct, foreign = host.pct, run.image.use is not None
    new = version(known) >= HOST_MANAGED
    places = mounts(run, layout, weights, data)
    own = {**compose.OWN_VARIABLES, **(FOREIGN_VARIABLES if foreign else IMAGE_VARIABLES)}
    if run.secrets:
        own["DRAFTHOUSE_SECRETS_FILE"] = compose.SECRETS
    launch = [compose.python(run), "-u", "-m", "trainer.launch", "--run-dir", RUN_DIR]
    grace = math.ceil(run.grace_seconds)
    net0, lines = network(host, run.name, known, new)
    drop = pct_host.drop_rights(user(run))
    script = INIT.format(name=run.name, drop=" ".join(drop), launch=" ".join(launch))
    return Container(
        name=run.name,
        hostname=hostname(run.name),
        arch=known.get("arch") or "amd64",
        unprivileged=pct.unprivileged,
        cores=pct.cores,
        memory_mib=math.ceil(memory(host, run, facts, weights_bytes, gpus) / MIB),
        swap_mib=(sizes.parse(pct.swap) or 0) // MIB,
        nesting=pct.nesting,
        order=pct.order,
        stop_seconds=grace + STOP_MARGIN_SECONDS,
        init=["/bin/sh", f"{compose.APP}/init.sh"] if foreign else ["tini", "--", *drop, *launch],
        environment=own,
        mounts=[one for one in places if not late(one)],
        late_mounts=[
            *(
                LateMount(one.source, one.target, one.read_only, one.source == pct_conf.SECRETS)
                for one in places
                if late(one)
            ),
            *(libraries(known) if device_files else ()),
        ],
        devices=device_files,
        shm_bytes=compose.container_shm(run, gpus),
        net0=net0,
        network=lines,
        files={INIT_FILE: script.encode()} if foreign else {},
    )


def conf_file(container: Container) -> str:
    """The text of a release's pct.conf, with placeholders for what only a run knows."""
    values = {
        key: value
        for key, value in asdict(container).items()
        if key not in ("files", "mounts", "late_mounts")
    }
    return render.render(
        "pct.conf.j2",
        mark=f"{pct_conf.MARK} name={container.name} release={pct_conf.RELEASE} state={pct_conf.STATE}",
        variable=pct_conf.VARIABLE,
        title="fab deploy makes a container for each release and starts it; fab prune removes old ones.",
        rootfs=pct_conf.ROOTFS,
        directory=RUN_DIR,
        mounts=container.mounts,
        late_mounts=container.late_mounts,
        **values,
    )


# -- its parts ---------------------------------------------------------------------------------------------


def version(known: Mapping[str, Any]) -> tuple[int, int]:
    """Proxmox VE's version as numbers; (0, 0) if nobody knows it."""
    found = re.match(r"(\d+)\.(\d+)", known.get("version") or "")
    return (int(found[1]), int(found[2])) if found else (0, 0)


def hostname(name: str) -> str:
    """A container's name, as DNS permits it; another one for each experiment."""
    text = compose.project(name).replace("_", "-")
    if text == f"drafthouse-{name}" and len(text) <= 63:
        return text
    return f"{text[:56].rstrip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def user(run: RunSettings) -> str:
    """uid:gid inside the container."""
    if run.user is not None:
        return "0:0" if run.user == "root" else run.user
    return f"{compose.IMAGE_USER}:{compose.IMAGE_USER}"


def owner(run: RunSettings, unprivileged: bool) -> str:
    """The same as the host numbers them: whom the run's files belong to."""
    shift = pve.ID_OFFSET if unprivileged else 0
    return ":".join(str(int(part) + shift) for part in user(run).split(":"))


def mounts(run: RunSettings, layout: Layout, weights: str | None, data: str | None) -> list[compose.Mount]:
    """What a container sees of the host: as with compose, but that nothing is reached through a link."""
    found = [compose.Mount(pct_conf.RUN, RUN_DIR)]
    if run.secrets:
        found.append(compose.Mount(pct_conf.SECRETS, compose.SECRETS, read_only=True))
    found += [compose.Mount(path, path) for path in (layout.checkpoints, layout.cache)]
    found += [compose.Mount(path, path, True) for path in (weights, data) if path and path.startswith("/")]
    if run.image.use is not None:
        found.append(
            compose.Mount(f"{layout.home}/releases/{pct_conf.RELEASE}/app", compose.APP, read_only=True)
        )
    return found


def late(mount: compose.Mount) -> bool:
    """Whether a mount has to be LXC's own: a file, or below /dev, which would be hidden by LXC's."""
    return mount.source == pct_conf.SECRETS or mount.target.startswith("/dev/")


def need(run: RunSettings, weights_bytes: int, gpus: int) -> int:
    """Bytes that the run is known to need: its weights, since pages of them may count as the container's,
    its processes, and its own shared memory.
    """
    return weights_bytes + budget.working_need(run, "pct", gpus).bytes


def memory(
    host: HostSettings, run: RunSettings, facts: Mapping[str, Any], weights_bytes: int, gpus: int
) -> int:
    """Bytes that the container may have: as the files say, else what is needed and a margin.

    What a command of one's own needs nobody knows: it may have all that the host has, as with Docker.
    """
    for given in (run.memory, host.pct.memory):
        if given and (wanted := sizes.parse(given)):
            return wanted
    total = (facts.get("memory") or {}).get("total")
    needed = need(run, weights_bytes, gpus)
    margin = max(MEMORY_MARGIN, needed // 4)
    if run.command is not None:
        return int(total or needed + margin)
    return min(needed + margin, total) if total else needed + margin


def network(
    host: HostSettings, name: str, known: Mapping[str, Any], new: bool
) -> tuple[str | None, tuple[str, ...]]:
    """(net0, raw lines): on newer hosts Proxmox sets the address up, on older ones LXC, if it is a fixed one.

    Nothing in the container does it: there is no system in it. Its hardware address stays the same for all
    containers of a name, of which one runs at a time, so that a DHCP server gives them the same address.
    """
    pct = host.pct
    if pct.net0 is not None:
        return pct.net0, ()
    if pct.bridge is None:
        return None, ()
    digest = hashlib.sha256(f"{known.get('node')}\0{name}".encode()).hexdigest()
    address = ":".join(["02", *(digest[at : at + 2] for at in range(0, 10, 2))]).upper()
    words = [f"name=eth0,bridge={pct.bridge},hwaddr={address},ip={pct.ip}"]
    words += [f"gw={pct.gateway}"] if pct.gateway else []
    if new:
        return ",".join([*words, "host-managed=1"]), ()
    lines = [] if pct.ip == "dhcp" else [f"ipv4.address: {pct.ip}", "flags: up"]
    lines += [f"ipv4.gateway: {pct.gateway}"] if pct.gateway and lines else []
    return ",".join(words), tuple(lines)


def device_files(found: Devices, facts: Mapping[str, Any]) -> tuple[str, ...]:
    """The device files that a run's container gets: its GPUs', and all that belong to no single one."""
    if not found.ids:
        return ()
    known = [str(node["path"]) for node in (facts.get("pve") or {}).get("nodes") or ()]
    common = [path for path in known if not re.fullmatch(r"/dev/nvidia\d+", path)]
    own = [path for path in devices.files(found, facts) if path not in common]
    return (*own, *common)


def libraries(known: Mapping[str, Any]) -> list[LateMount]:
    """The driver's libraries: they have to be the host's, whose module they talk to, as with Docker."""
    triplet = {"arm64": "aarch64-linux-gnu"}.get(known.get("arch") or "", "x86_64-linux-gnu")
    return [
        LateMount(one["path"], f"/usr/lib/{triplet}/{one['name']}", file=True)
        for one in known.get("libraries") or ()
    ]


# -- starting it -------------------------------------------------------------------------------------------


def container_spec(
    plan_name: str, release_id: str, layout: Layout, facts: Mapping[str, Any], image: str | None
) -> dict[str, Any]:
    """What says to the host which container is meant: see `deploy.pct_host`."""
    return {
        "pct": (facts.get("pve") or {}).get("pct") or "pct",
        "name": plan_name,
        "release": release_id,
        "state": layout.state,
        "conf": f"{layout.release(release_id)}/{RELEASE_FILE}",
        "image": image,
    }


def making(host: HostSettings, facts: Mapping[str, Any], template: str) -> dict[str, Any]:
    """What `pct create` is told besides what the release's configuration says."""
    storage = root_storage(host, facts)
    bytes_ = sizes.parse(host.pct.rootfs) or 0
    return {
        "template": template,
        "template_storage": host.pct.template_storage,
        "rootfs": f"{storage}:{max(1, math.ceil(bytes_ / (1 << 30)))}",
        "range": list(host.pct.range) if host.pct.range else None,
    }


def root_storage(host: HostSettings, facts: Mapping[str, Any]) -> str:
    """Where root file systems go: as fabric.yaml says, else the first storage that takes them here."""
    if host.pct.storage:
        return host.pct.storage
    known = facts.get("pve") or {}
    for one in known.get("storages") or ():
        here = one["nodes"] is None or known.get("node") in one["nodes"]
        if "rootdir" in one["content"] and here and not one["disabled"]:
            return str(one["name"])
    return "local"


def start_spec(run: status.Run, container: Mapping[str, Any], vmid: int) -> dict[str, Any]:
    """What the switch starts for `run`; see `deploy.switch_job`. The command returns when it runs."""
    return {
        "argv": [container["pct"], "start", str(vmid)],
        "environment": pve.environment(),
        "working_directory": "/",
        "container": {**container, "vmid": vmid},
        "user": None if run.user is None else [int(part) for part in run.user.split(":")],
        "devices": list(run.devices or []),
    }


def trial(run: status.Run, layout: Layout, run_path: str) -> dict[str, Any]:
    """What a container of this release looks at before the run in progress is touched; see `pct_host.trial`.

    It finds a container that does not start, devices that are not there, places that the container's user
    cannot write, a program that is not in the template, and settings that the trainer refuses.
    """
    ours = run.command[1:4] == ["-u", "-m", "trainer"]
    variables = IMAGE_VARIABLES if ours else FOREIGN_VARIABLES
    asked = {
        "written": [RUN_DIR, layout.checkpoints, layout.cache],
        "read": [compose.SECRETS] if run.secrets_file else [],
        "environment": run.environment,
        "command": run.command,
        "directory": run.working_directory,
        "check": ours,
    }
    interpreter = run.command[0] if ours else "python3"
    return {
        "run": run_path,
        "secrets": run.secrets_file,
        "user": run.user,
        "environment": {**compose.OWN_VARIABLES, **variables},
        "argv": [interpreter, "-c", compose.TRIAL, json.dumps(asked)],
    }
