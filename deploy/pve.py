"""A Proxmox host: its version, its containers, its storages. Runs ON the host, as a part of the probe.

Files are read rather than programs asked, since each of Proxmox's own, being Perl, takes half a second to
start. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

from deploy import gpus, machine, pct_conf, procfs

TIMEOUT = 30.0  # seconds; a storage on a network that is away takes its time
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "riscv64": "riscv64"}  # as Proxmox calls them
ID_OFFSET = 100000  # where the ids of an unprivileged container begin on the host, unless somebody maps them
ID_COUNT = 65536
SPACE = re.compile(
    r"no space left|not enough|out of space|insufficient|disk quota|cannot allocate", re.IGNORECASE
)
LIBRARIES = (  # of the driver, loaded by CUDA and NVML
    "libcuda.so.1",
    "libnvidia-ml.so.1",
    "libnvidia-ptxjitcompiler.so.1",
    "libnvidia-nvvm.so.4",
)
ROOTS = ("zfspool", "lvmthin", "btrfs")  # kinds of storage that take root file systems without being told
KEEP_ENV = (8, 2)  # the version since which `pct exec` has --keep-env
_COMMAND = re.compile(r"@(/\S*)/(\d+)/command$")  # the abstract socket of a running container


def conf_path(vmid: int | str) -> str:
    """Where this node has the configuration of a container."""
    return f"{gpus.root()}/etc/pve/lxc/{vmid}.conf"


def facts() -> dict[str, Any] | None:
    """What the probe says of Proxmox; None where there is no `pct`.

    {pct, version, keep_env (null: not known), root, node, arch, mounted (whether /etc/pve is there),
    guests {id: {node, type}} (of the whole cluster), containers [{id, hostname, running, lock, values, lxc,
    ours}] (of this node), storages [{name, type, content [word], disabled, nodes [name] or null, path}],
    bridges [name], ids (whether the host may map the ids of unprivileged containers), nodes [{path, major,
    minor}] (all of NVIDIA's device files), libraries [{name, path, version}] (the driver's, that CUDA needs)}
    """
    pct = machine.program("pct")
    if pct is None:
        return None
    running = active()
    return {
        "pct": pct,
        "version": version(),
        "keep_env": keep_env(),
        "root": os.geteuid() == 0,
        "node": node(),
        "arch": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "mounted": os.path.isdir(f"{gpus.root()}/etc/pve/lxc"),
        "guests": guests(),
        "containers": [one for one in (_container(vmid, running) for vmid in ids()) if one],
        "storages": storages(),
        "bridges": sorted(path.parent.name for path in Path("/sys/class/net").glob("*/bridge")),
        "ids": mapped_ids(),
        "nodes": device_nodes(),
        "libraries": driver_libraries(),
    }


# -- the host ----------------------------------------------------------------------------------------------


def version() -> str | None:
    """Proxmox VE's version, ``9.1.1``; None if nothing says it."""
    text = _text(f"{gpus.root()}/usr/share/perl5/PVE/pvecfg.pm")
    found = re.search(r"'version'\s*=>\s*'(\d+(?:\.\d+)+)", text)
    if found is None:
        told = _run("pveversion")
        found = re.match(r"pve-manager/(\d+(?:\.\d+)+)", told[0] if told else "")
    return found[1] if found else None


def keep_env() -> bool | None:
    """Whether `pct exec` can be kept from handing on its caller's environment; None if that is not known."""
    text = _text(f"{gpus.root()}/usr/share/perl5/PVE/CLI/pct.pm")
    if text:
        return "'keep-env'" in text
    found = re.match(r"(\d+)\.(\d+)", version() or "")
    return (int(found[1]), int(found[2])) >= KEEP_ENV if found else None


def node() -> str:
    """What this machine is called as a node of a cluster."""
    link = machine.link(Path(f"{gpus.root()}/etc/pve/local"))
    return link or os.uname().nodename.partition(".")[0]


def guests() -> dict[str, dict[str, str]]:
    """All guests of the cluster, on whatever node: ``{"200": {"node", "type"}}``."""
    try:
        known = json.loads(_text(f"{gpus.root()}/etc/pve/.vmlist"))["ids"]
        return {str(key): {"node": str(one["node"]), "type": str(one["type"])} for key, one in known.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    found = {}
    for kind, folder in (("lxc", "lxc"), ("qemu", "qemu-server")):
        for path in Path(f"{gpus.root()}/etc/pve/nodes").glob(f"*/{folder}/*.conf"):
            found[path.stem] = {"node": path.parent.parent.name, "type": kind}
    return found


def mapped_ids() -> bool:
    """Whether root may give an unprivileged container the ids that Proxmox gives it.

    LXC insists on it where there is the tool that hands ids out, so that nobody else gets them.
    """
    if machine.program("newuidmap") is None:
        return True
    return all(_hands_out(_text(f"{gpus.root()}/etc/{name}")) for name in ("subuid", "subgid"))


def _hands_out(text: str) -> bool:
    """Whether a subuid(5) gives root all of those ids, in one of its ranges."""
    ranges = re.findall(r"^(?:root|0):(\d+):(\d+)\s*$", text, re.MULTILINE)
    last = ID_OFFSET + ID_COUNT
    return any(int(first) <= ID_OFFSET and int(first) + int(count) >= last for first, count in ranges)


def device_nodes() -> list[dict[str, Any]]:
    """NVIDIA's device files, with the numbers that they have since the module was loaded."""
    top = f"{gpus.root()}/dev"
    names = [
        name for name in _entries(top) if re.fullmatch(r"nvidia(\d+|ctl|-uvm|-uvm-tools|-modeset)", name)
    ]
    names += [f"nvidia-caps/{name}" for name in _entries(f"{top}/nvidia-caps")]
    found = []
    for name in names:
        with contextlib.suppress(OSError):
            info = os.stat(f"{top}/{name}")
            number = info.st_rdev if stat.S_ISCHR(info.st_mode) else None
            found.append(
                {
                    "path": f"/dev/{name}",
                    "major": None if number is None else os.major(number),
                    "minor": None if number is None else os.minor(number),
                }
            )
    return found


def driver_libraries() -> list[dict[str, Any]]:
    """The driver's libraries, by the names under which programs load them. A container has none itself."""
    found: dict[str, dict[str, Any]] = {}
    for place in gpus.LIBRARY_PLACES:
        for name in LIBRARIES:
            path = f"{gpus.root()}{place}/{name}"
            if name not in found and os.path.exists(path):
                real = os.path.realpath(path)
                version_ = re.search(r"\.so\.(\d+(?:\.\d+)+)$", real)
                found[name] = {"name": name, "path": real, "version": version_[1] if version_ else None}
    return list(found.values())


# -- containers --------------------------------------------------------------------------------------------


def ids() -> list[int]:
    """The containers of this node."""
    names = (name.partition(".conf") for name in _entries(f"{gpus.root()}/etc/pve/lxc"))
    return sorted(int(number) for number, end, rest in names if number.isdigit() and end and not rest)


def active() -> dict[int, str]:
    """The containers that run, by their open command sockets, as Proxmox tells it: id -> LXC's directory."""
    found = {}
    for line in procfs.read_path("/proc/net/unix").decode("utf-8", "replace").splitlines():
        match = _COMMAND.search(line)
        if match:
            found[int(match[2])] = match[1]
    return found


def first_process(vmid: int, place: str) -> int | None:
    """The pid here of a container's first process; None if it is not running."""
    program = machine.program("lxc-info")
    told = _run(program, "-P", place, "-n", str(vmid), "-p", "-H") if program else None
    word = told[0].strip() if told else ""
    return int(word) if word.isdigit() and int(word) > 0 else None


def _container(vmid: int, running: dict[int, str]) -> dict[str, Any] | None:
    try:
        conf = pct_conf.read(conf_path(vmid))
    except OSError:
        conf = pct_conf.Conf({})  # (unreadable)
    if conf is None:
        return None
    told = pct_conf.facts(conf)
    return {"id": vmid, "hostname": conf.values.get("hostname"), "running": vmid in running, **told}


# -- storages ----------------------------------------------------------------------------------------------


def storages() -> list[dict[str, Any]]:
    """The storages as Proxmox is set up, without asking them, with what holds where nothing is said."""
    found: list[dict[str, Any]] = []
    for line in _text(f"{gpus.root()}/etc/pve/storage.cfg").splitlines():
        head = re.fullmatch(r"([a-z]+):\s*(\S+)\s*", line)
        item = re.fullmatch(r"\s+([a-z\-]+)(?:\s+(.*?))?\s*", line)
        if head:
            found.append(_storage(head[2], head[1]))
        elif item and found:
            key, value = item[1], item[2] or ""
            if key in ("content", "nodes"):
                found[-1][key] = [word for word in value.split(",") if word]
            elif key == "path":
                found[-1]["path"] = value
            elif key == "disable":
                found[-1]["disabled"] = value in ("", "1")
    if not any(one["name"] == "local" for one in found):
        content = ["backup", "images", "iso", "rootdir", "snippets", "vztmpl"]
        found.insert(0, {**_storage("local", "dir"), "content": content, "path": "/var/lib/vz"})
    for one in found:
        one["content"] = one["content"] or ["images", *(["rootdir"] if one["type"] in ROOTS else [])]
    return found


def _storage(name: str, kind: str) -> dict[str, Any]:
    return {"name": name, "type": kind, "content": [], "disabled": False, "nodes": None, "path": None}


def space() -> dict[str, dict[str, Any]]:
    """What `pvesm status` says of each storage: ``{"active", "total", "used", "free"}``, in bytes."""
    told = _run("pvesm", "status")
    found = {}
    for line in (told[0] if told else "").splitlines()[1:]:
        words = line.split()
        if len(words) >= 6 and all(word.isdigit() for word in words[3:6]):
            total, used, free = (int(word) << 10 for word in words[3:6])
            found[words[0]] = {"active": words[2] == "active", "total": total, "used": used, "free": free}
    return found


def has_template(volume: str) -> bool | None:
    """Whether there is a template like ``local:vztmpl/debian.tar.zst``; None if that cannot be told."""
    storage, _, name = volume.partition(":")
    known = next((one for one in storages() if one["name"] == storage), None)
    if known and known["path"] and name.startswith("vztmpl/"):
        return os.path.isfile(f"{known['path']}/template/cache/{name[len('vztmpl/') :]}")
    told = _run("pvesm", "list", storage, "--content", "vztmpl")
    return None if told is None else any(line.split()[:1] == [volume] for line in told[0].splitlines())


# -- helpers -----------------------------------------------------------------------------------------------


def run(*argv: str, timeout: float = TIMEOUT) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a program of Proxmox. Raises OSError or subprocess.TimeoutExpired."""
    program = machine.program(argv[0]) or argv[0]
    done = subprocess.run(
        [program, *argv[1:]],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=timeout,
        env=environment(),
    )
    return done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")


def environment() -> dict[str, str]:
    """For Proxmox's programs: nothing of whoever asks, in the language that we read."""
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "LC_ALL": "C.UTF-8",
    }


def cause(text: str) -> str:
    """Of all that a failing `pct` prints, the line that says why."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = next((at for at, line in enumerate(lines, 1) if "Parameter verification failed" in line), 0)
    if told and told < len(lines):  # which ones, each on a line; how pct is called may follow
        wrong = itertools.takewhile(lambda line: re.match(r"[\w.-]+: ", line), lines[told:])
        return "; ".join(wrong) or lines[told]
    telling = [line for line in lines if SPACE.search(line)] or [
        line for line in lines if re.search(r"unable|error|fail|cannot|not |4\d\d ", line, re.IGNORECASE)
    ]
    return re.sub(r"command '(\S+) .*' failed", r"\1 failed", (telling or lines or [""])[-1])


def last_line(text: str) -> str:
    """The last line of what a program said, without its blanks; empty for none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _run(*argv: str) -> tuple[str, str] | None:
    try:
        code, out, err = run(*argv)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (out, err) if code == 0 else None


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _entries(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []
