"""Storages and the volumes on them (Storage.pm, Storage/Plugin.pm, Storage/ZFSPoolPlugin.pm).

Both kinds that are known here keep a container's volume in a directory. For `zfspool` that is so in Proxmox
too (a subvol); for `dir` it would be a raw image on a loop device, whose name the directory bears.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from .errors import Died, not_simulated
from .world import ETC, World

VOLUME = re.compile(r"([a-zA-Z][a-zA-Z0-9\-_.]*[a-zA-Z0-9]):(.+)", re.S)
NEW = re.compile(r"([^:\s]+):(\d+(?:\.\d+)?)")
SUBDIRECTORIES = {"vztmpl": "template/cache", "snippets": "snippets", "backup": "dump", "iso": "template/iso"}


class Storage(NamedTuple):
    name: str
    type: str  # dir | zfspool
    options: dict[str, str]

    @property
    def content(self) -> set[str]:
        return set(self.options.get("content", "images,rootdir").split(","))

    @property
    def disabled(self) -> bool:
        return "disable" in self.options

    @property
    def path(self) -> Path:
        if self.type == "zfspool":
            return Path(self.options.get("mountpoint") or f"/{self.options['pool']}")
        return Path(self.options["path"])

    def room(self) -> tuple[int, int, int]:
        """Bytes: in all, used, available."""
        found = os.statvfs(self.path)
        total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
        return total, total - found.f_bfree * found.f_frsize, free


class Volume(NamedTuple):
    """`kind` is vztmpl, snippets, …, or images; `owner` a vmid, or empty."""

    storage: Storage
    name: str
    kind: str
    owner: str
    path: Path


def storages() -> dict[str, Storage]:
    """What storage.cfg says."""
    found: dict[str, Storage] = {}
    current: Storage | None = None
    for line in (ETC / "storage.cfg").read_text().splitlines():
        if match := re.fullmatch(r"(\w+):\s*(\S+)\s*", line):
            current = found[match[2]] = Storage(match[2], match[1], {})
        elif line.strip() and current:
            key, _, value = line.strip().partition(" ")
            current.options[key] = value.strip()
    return found


def storage(name: str) -> Storage:
    """Raises Died if there is no such storage, or it is switched off (storage_check_enabled)."""
    found = storages().get(name)
    if found is None:
        raise Died(f"storage '{name}' does not exist")
    if found.disabled:
        raise Died(f"storage '{name}' is disabled")
    return found


def is_volume(text: str) -> bool:
    return VOLUME.fullmatch(text) is not None


def volume(world: World, text: str) -> Volume:
    """The volume of an id such as "local:vztmpl/x.tar.zst", there or not (parse_volume_id, parse_volname)."""
    match = VOLUME.fullmatch(text)
    if not match:
        raise Died(f"unable to parse volume ID '{text}'")
    kept, name = storage(match[1]), match[2]
    if kept.type == "zfspool":
        found = re.fullmatch(r"(?:base|basevol|vm|subvol)-(\d+)-\S+", name)
        if not found:
            raise Died(f"unable to parse zfs volume name '{name}'")
        return Volume(kept, name, "images", found[1], kept.path / name)
    if found := re.fullmatch(r"(\d+)/(\S+)", name):
        return Volume(kept, name, "images", found[1], kept.path / "images" / found[1] / found[2])
    kind, _, file = name.partition("/")
    if kind not in SUBDIRECTORIES or not file or "/" in file or not _name_fits(world, kind, file):
        raise Died(f"unable to parse directory volume name '{name}'")
    return Volume(kept, name, kind, "", kept.path / SUBDIRECTORIES[kind] / file)


def _name_fits(world: World, kind: str, file: str) -> bool:
    if kind != "vztmpl":
        return True
    # Storage.pm $VZTMPL_EXT_RE_1; a plain .tar since OCI archives are taken
    plain = r"|\.tar" if world.has("6.0.15") else ""
    return re.search(rf"(\.tar\.(gz|xz|zst|bz2){plain})$", file, re.I) is not None


def archive_path(world: World, text: str) -> Path:
    """The file behind a volume id or a path (abs_filesystem_path)."""
    if is_volume(text):
        found = volume(world, text)
        if not found.path.exists():  # activate_volumes
            raise Died(f"volume '{text}' does not exist")
        return found.path
    path = Path(text)
    if not path.is_file():
        raise Died(f"can't find file '{text}'")
    return path.resolve()


def allocate(name: str, vmid: str, gigabytes: float) -> tuple[str, Path]:
    """A new empty volume for a container: its id and directory (LXC.pm alloc_disk)."""
    kept = storage(name)
    if "rootdir" not in kept.content:
        raise Died(f"content type 'rootdir' is not available or configured on storage '{name}'")
    for number in range(1000):
        if kept.type == "zfspool":
            file = f"subvol-{vmid}-disk-{number}"
            path = kept.path / file
        else:
            kind = f"vm-{vmid}-disk-{number}.raw" if gigabytes else f"subvol-{vmid}-disk-{number}.subvol"
            file = f"{vmid}/{kind}"
            path = kept.path / "images" / file
        if not path.exists():
            try:
                path.mkdir(parents=True)
            except OSError as error:
                raise Died(f"unable to create image: {error.strerror}") from None
            return f"{name}:{file}", path
    not_simulated("a thousand volumes")


def free(world: World, text: str) -> None:
    """Remove a volume with what is in it."""
    path = volume(world, text).path
    if os.path.ismount(path):
        subprocess.run(["umount", "-l", path], check=True)
    if path.is_dir():
        shutil.rmtree(path)
        if path.parent.name.isdigit() and not any(path.parent.iterdir()):
            path.parent.rmdir()
    else:
        path.unlink(missing_ok=True)
