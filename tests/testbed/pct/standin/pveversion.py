"""`pveversion`: one line, or one for each package."""

from __future__ import annotations

from collections.abc import Sequence

from .options import FLAG, parse
from .world import World


def main(world: World, words: Sequence[str]) -> None:
    given, _ = parse(["--verbose" if word == "-v" else word for word in words], {"verbose": FLAG}, [])
    release = world.release
    if given.get("verbose") != "1":
        print(f"pve-manager/{release.manager} (running kernel: {release.kernel})")
        return
    version, _, hexes = release.manager.partition("/")
    print(f"proxmox-ve: {world.version}.0 (running kernel: {release.kernel})")
    print(f"pve-manager: {version} (running version: {version}/{hexes})")
    print(f"lxc-pve: {release.lxc}")
    print(f"lxcfs: {release.lxc.split('-')[0]}-pve1")
    print(f"pve-container: {release.container}")
