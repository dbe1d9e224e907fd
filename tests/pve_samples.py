"""What the probe says of a Proxmox host that has all that a deploy needs, for tests of what is decided."""

# ruff: noqa: E501  (files and sentences, as they are)

from __future__ import annotations

from typing import Any

from samples import facts

from deploy.settings import HostSettings

GIB = 1 << 30
NODES = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-caps/nvidia-cap1", "nvidia0", "nvidia1"]


def proxmox(**changes: Any) -> dict[str, Any]:
    known = {
        "pct": "/usr/sbin/pct", "version": "9.1.1", "keep_env": True, "root": True, "node": "pve", "arch": "amd64",
        "mounted": True, "guests": {}, "containers": [], "bridges": ["vmbr0"], "ids": True,
        "nodes": [{"path": f"/dev/{name}", "major": 195, "minor": 0} for name in NODES],
        "libraries": [{"name": "libcuda.so.1", "path": "/usr/lib/x86_64-linux-gnu/libcuda.so.550.1", "version": "550.1"}],
        "storages": [
            {"name": "local", "type": "dir", "content": ["vztmpl"], "disabled": False, "nodes": None, "path": "/v"},
            {"name": "away", "type": "zfspool", "content": ["rootdir"], "disabled": False, "nodes": ["pve2"], "path": None},
            {"name": "zfs", "type": "zfspool", "content": ["rootdir"], "disabled": False, "nodes": None, "path": None},
        ],
    }  # fmt: skip
    gpus = {
        "devices": [
            {"index": index, "path": f"/dev/nvidia{index}", "uuid": None, "holders": []} for index in (0, 1)
        ],
        "control": ["/dev/nvidiactl", "/dev/nvidia-uvm"],
        "driver": "550.1",
        "library": "550.1",
    }
    return facts(pve={**known, **changes}, gpus=gpus, memory={"total": 200 * GIB, "available": 200 * GIB})


def host(**changes: Any) -> HostSettings:
    return HostSettings.model_validate({"name": "pve", "address": "pve", "runtime": "pct", "pct": changes})
