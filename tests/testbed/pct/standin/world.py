"""Where Proxmox keeps things, and which Proxmox this box is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

ETC = Path("/etc/pve")
LXC = Path("/var/lib/lxc")
RUN = Path("/run/pve")
LOCKS = Path("/run/lock/lxc")


class Release(NamedTuple):
    """What `pveversion` says of a release, and the pve-container that came with it."""

    manager: str
    kernel: str
    container: str
    lxc: str
    suite: str


# What was new in pve-container's debian/changelog decides what a release can do:
#   5.0.5   dev0…                             5.0.9   pct exec --keep-env
#   5.2.0   dev0's deny-write                 6.0.15  OCI archives, entrypoint:, env:, net0's host-managed
#   6.0.19  mp0's keepattrs                   6.1.0   an OCI image's User
#   6.1.6   mp0's idmap                       6.1.10  a tmpfs on /dev/shm beside a custom entrypoint
RELEASES = {
    "8.1": Release("8.1.4/ec5affc9e41f1d79", "6.5.11-8-pve", "5.0.8", "5.0.2-4", "bookworm"),
    "8.4": Release("8.4.1/2a5fa54a8503f96d", "6.8.12-9-pve", "5.2.6", "6.0.0-1", "bookworm"),
    "9.0": Release("9.0.10/deb1ca707ec72a89", "6.14.11-2-pve", "6.0.13", "6.0.5-1", "trixie"),
    "9.1": Release("9.1.1/42db4a6cf33dac83", "6.17.2-1-pve", "6.0.18", "6.0.5-3", "trixie"),
    "9.2": Release("9.2.0/5f2b7d4c0ae98d31", "7.0.2-1-pve", "6.1.10", "7.0.0-1", "trixie"),
}


class World:
    """The box's settings: a JSON file with `version`, `node` and the names of `other_nodes`."""

    def __init__(self, settings: str) -> None:
        read = json.loads(Path(settings).read_text())
        self.version: str = read["version"]
        self.release = RELEASES[self.version]
        self.node: str = read["node"]
        self.other_nodes: list[str] = read["other_nodes"]

    def has(self, container: str) -> bool:
        """Whether pve-container is at least that version."""
        return _numbers(self.release.container) >= _numbers(container)

    def config_path(self, vmid: int | str, node: str = "") -> Path:
        return ETC / "nodes" / (node or self.node) / "lxc" / f"{vmid}.conf"

    def guests(self) -> dict[int, str]:
        """Every container's id in the cluster, and its node."""
        found = {}
        for node in (self.node, *self.other_nodes):
            for path in (ETC / "nodes" / node / "lxc").glob("[1-9]*.conf"):
                if path.stem.isdigit():
                    found[int(path.stem)] = node
        return found

    def write_vmlist(self) -> None:
        """What the cluster's file system shows as .vmlist (there, it is made at the moment of reading)."""
        ids = {str(i): {"node": n, "type": "lxc", "version": 1} for i, n in sorted(self.guests().items())}
        temporary = ETC / f".vmlist.{os.getpid()}"
        temporary.write_text(json.dumps({"version": 1, "ids": ids}, indent=1) + "\n")
        temporary.rename(ETC / ".vmlist")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
