"""NVIDIA devices without NVIDIA's tools: which there are, who has them open, which driver.

After a stop a process may hold memory of a device that nvidia-smi does not list, so holders are looked for by
what they have open. Runs ON the host, as a part of the probe and of the switch. Standard library only,
Python >= 3.9.
"""

from __future__ import annotations

import glob
import os
import re
import stat
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from deploy import procfs

# Where /dev, /proc/driver and the libraries are looked for: another directory in tests.
ROOT_VARIABLE = "DRAFTHOUSE_MACHINE_ROOT"
# They hold devices open for as long as the machine is up, and no memory that a run would miss.
DAEMONS = frozenset(
    (
        *("nvidia-persistenced", "nvidia-smi", "nvtop", "nvitop", "Xorg", "gnome-shell"),
        *("nv-hostengine", "nv-fabricmanager", "dcgm-exporter", "dcgm", "dcgmi"),
        *("nvidia_gpu_exporter", "nvidia-device-plugin", "gpu-feature-discovery"),
        *("telegraf", "netdata", "node_exporter"),
    )
)
CUT_DAEMONS = frozenset(name[:15] for name in DAEMONS)  # as the kernel keeps a process's name
LIBRARY = "libnvidia-ml.so.1"
LIBRARY_PLACES = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/lib64",
)
CONTROL = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")  # needed beside any device


def root() -> str:
    return os.environ.get(ROOT_VARIABLE, "")


def devices() -> list[dict[str, Any]]:
    """``{"index", "path", "uuid"}`` of every device, by the index that CUDA_DEVICE_ORDER=PCI_BUS_ID gives."""
    nodes = {}
    for path in glob.glob(f"{root()}/dev/nvidia[0-9]*"):
        number = os.path.basename(path)[len("nvidia") :]
        if number.isdigit():
            nodes[int(number)] = path
    by_minor = {minor: (bus, uuid) for bus, minor, uuid in _information()}
    # A minor number is given at probing, an index goes by the bus: mostly the same, but not always.
    order = sorted(nodes, key=lambda minor: (by_minor.get(minor, ("~", None))[0], minor))
    return [
        {"index": index, "path": nodes[minor], "uuid": by_minor.get(minor, (None, None))[1]}
        for index, minor in enumerate(order)
    ]


def control() -> list[str]:
    """The device files that belong to no single device, as far as they are there."""
    return [f"/dev/{name}" for name in CONTROL if os.path.exists(f"{root()}/dev/{name}")]


def _information() -> list[tuple[str, int, str | None]]:
    """(bus address, minor number, UUID) of every device, as the driver tells them."""
    found = []
    for path in glob.glob(f"{root()}/proc/driver/nvidia/gpus/*/information"):
        try:
            text = Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        minor = re.search(r"^Device Minor:\s*(\d+)", text, re.MULTILINE)
        uuid = re.search(r"^GPU UUID:\s*(\S+)", text, re.MULTILINE)
        if minor:
            found.append((os.path.basename(os.path.dirname(path)), int(minor[1]), uuid[1] if uuid else None))
    return found


def chosen(wanted: Sequence[str]) -> list[dict[str, Any]]:
    """The devices that a run names: by index, by UUID, or ``all``."""
    words = {str(word) for word in wanted}
    return [
        device
        for device in devices()
        if "all" in words or str(device["index"]) in words or device["uuid"] in words
    ]


def holders(paths: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """Who has each of the device files open: ``{path: [{pid, command, age, daemon}]}``, age in seconds.

    Processes of other users can be seen by root only.
    """
    wanted = {}
    for path in paths:
        identity = _identity(path)
        if identity:
            wanted[identity] = path
    found: dict[str, list[dict[str, Any]]] = {path: [] for path in wanted.values()}
    if not found:
        return found
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            for path in _open(entry, wanted):
                told = _describe(int(entry))
                if told:
                    found[path].append(told)
    return found


def _open(pid: str, wanted: dict[tuple[Any, ...], str]) -> set[str]:
    """Those of the `wanted` files that process `pid` has open."""
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return set()
    found = set()
    for number in numbers:
        link = f"/proc/{pid}/fd/{number}"
        try:
            if not os.path.basename(os.readlink(link)).startswith("nvidia"):
                continue  # cheaper than a stat, of which a busy machine would need a hundred thousand
        except OSError:
            continue
        path = wanted.get(_identity(link) or ())
        if path:
            found.add(path)
    return found


def _identity(path: str) -> tuple[Any, ...] | None:
    """What tells a file from another: of a device its number, as containers have nodes of their own."""
    try:
        info = os.stat(path)
    except OSError:
        return None
    return ("device", info.st_rdev) if stat.S_ISCHR(info.st_mode) else ("file", info.st_dev, info.st_ino)


def _describe(pid: int) -> dict[str, Any] | None:
    process = procfs.stat(pid)
    if process is None or process["state"] in "ZX":
        return None
    words = procfs.read(pid, "cmdline").rstrip(b"\0").split(b"\0")
    name = procfs.read(pid, "comm").decode("utf-8", "replace").strip()
    command = b" ".join(words).decode("utf-8", "replace") or f"[{name}]"
    command = "".join(char if char.isprintable() else " " for char in command)
    booted = procfs.boot_time()
    began = booted + process["start"] / os.sysconf("SC_CLK_TCK") if booted else None
    program = os.path.basename(words[0].decode("utf-8", "replace"))
    return {
        "pid": pid,
        "command": command[:200],
        "age": max(0.0, time.time() - began) if began else None,
        "daemon": program in DAEMONS or name in CUT_DAEMONS,
    }


def driver() -> str | None:
    """The version of the loaded kernel module; None if there is none."""
    try:
        text = Path(f"{root()}/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", text)
    return found[1] if found else None


def library() -> str | None:
    """The version of the user-space library, which must be the module's; None if there is none."""
    places = [place for place in os.environ.get("LD_LIBRARY_PATH", "").split(":") if place]
    for place in [*places, *(f"{root()}{place}" for place in LIBRARY_PLACES)]:
        path = os.path.join(place, LIBRARY)
        if os.path.exists(path):
            found = re.search(r"\.so\.(\d+(?:\.\d+)+)$", os.path.realpath(path))
            if found:
                return found[1]
    return None
