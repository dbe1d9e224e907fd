"""`pct create` and `pct destroy` (API2/LXC.pm create_vm, destroy_vm)."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from . import config as configs
from . import lxc, oci, storage
from .config import Config
from .errors import BadParameters, Died, not_simulated
from .lifecycle import check_device, check_hookscript, start
from .lxcconfig import SHIFT
from .properties import Formats
from .tasks import task
from .world import LXC, World

OSTYPES = {
    "debian": "debian",
    "ubuntu": "ubuntu",
    "alpine": "alpine",
    "fedora": "fedora",
    "arch": "archlinux",
}


def create(world: World, formats: Formats, given: dict[str, Any]) -> None:
    """A container from a template: an OCI archive, or a root file system's. Nothing is left if it fails."""
    vmid, template = given.pop("vmid"), given.pop("ostemplate")
    for key in ("restore", "unique", "ha-managed", "pool"):
        if given.pop(key, "0") != "0":
            not_simulated(f"pct create --{key}")
    for key in ("force", "bwlimit", "ignore-unpack-errors", "password", "ssh-public-keys"):
        given.pop(key, None)
    begin = given.pop("start", "0") == "1"
    unprivileged = given.pop("unprivileged", "1") == "1"
    default = given.pop("storage", "local")
    if (node := world.guests().get(int(vmid))) is not None:  # check_vmid_unused
        raise Died(f"CT {vmid} already exists on node '{node}'")
    if template == "-":
        raise Died("pipe can only be used with restore tasks")
    if storage.is_volume(template):
        found = storage.volume(world, template)
        if found.kind != "vztmpl":
            raise Died(f"unable to use volume {template} - content type needs to be 'vztmpl'")
    volumes = _volumes(given, default)
    if volumes and "rootfs" not in volumes:
        raise Died("mount points configured, but 'rootfs' not set - aborting")
    for key, value in volumes.items():
        mount = formats.volume(key, value)
        if mount["type"] == "volume":
            _check_storage(mount["volume"].split(":")[0])
    if not volumes:
        _check_storage(default)
        volumes = {"rootfs": f"{default}:4"}
    for key, value in given.items():
        if key.startswith("dev"):
            check_device(formats, key, value)
        elif key == "hookscript":
            check_hookscript(world, value)
    env = given.pop("env", "").split("\0")
    config = Config(dict(given), [variable for variable in env if variable])
    if unprivileged:
        config.values["unprivileged"] = "1"

    def work() -> None:
        with configs.locked(vmid):
            configs.write(world, vmid, Config({"lock": "create"}))
            made: list[str] = []
            try:
                _fill(world, formats, vmid, template, config, volumes, made)
            except BaseException as error:
                for volume in made:
                    storage.free(world, volume)
                world.config_path(vmid).unlink(missing_ok=True)
                shutil.rmtree(LXC / vmid, ignore_errors=True)
                world.write_vmlist()
                if isinstance(error, Died):
                    raise Died(f"unable to create CT {vmid} - {error}") from None
                raise
        if begin:
            start(world, formats, vmid)

    task(work)


def _volumes(given: dict[str, Any], default: str) -> dict[str, str]:
    """rootfs and mount points, taken out of `given`; a bare number is a size on the default storage."""
    found = {}
    for key in [key for key in given if key == "rootfs" or re.fullmatch(r"mp\d+", key)]:
        value = given.pop(key)
        found[key] = f"{default}:{value}" if re.fullmatch(r"\d+(\.\d+)?", value) else value
    for key in [key for key in given if key.startswith("unused")]:
        print(f"ignoring '{key}', cannot create/restore with unused volume", file=sys.stderr)
        del given[key]
    return found


def _check_storage(name: str) -> None:
    if "rootdir" not in storage.storage(name).content:
        said = f"storage '{name}' does not support container directories"
        raise BadParameters("Parameter verification failed.", {"storage": said})


def _fill(
    world: World,
    formats: Formats,
    vmid: str,
    template: str,
    config: Config,
    volumes: dict[str, str],
    made: list[str],
) -> None:
    root: Path | None = None
    owner = SHIFT if config.unprivileged else 0
    for key, value in volumes.items():
        mount = formats.volume(key, value)
        name = mount["volume"]
        if (new := storage.NEW.fullmatch(name)) is not None:
            size = float(new[2])
            name, path = storage.allocate(new[1], vmid, size)
            made.append(name)
            os.chown(path, owner, owner)
            value = re.sub(r"^(volume=)?[^,]+", lambda _, name=name: name, value)
            value += f",size={size:g}G" if size == int(size) else f",size={int(size * 1024)}M"
        elif mount["type"] == "volume":
            path = storage.volume(world, name).path
        else:
            path = Path(name)
        config.values[key] = value
        root = path if key == "rootfs" else root
    assert root
    oci_archive = False
    if world.has("6.0.15"):
        with contextlib.suppress(Died):  # said again below
            oci_archive = oci.is_archive(storage.archive_path(world, template))
    archive = storage.archive_path(world, template)
    if oci_archive:
        print("Detected OCI archive", flush=True)
        oci.unpack(archive, root, config, with_user=world.has("6.1.0"))
    else:
        oci.unpack_root(archive, root, config.unprivileged)
    _set_up(root, config, vmid, owner)
    config.values.setdefault("hostname", f"CT{vmid}")
    config.values.setdefault("memory", "512")
    config.values.setdefault("swap", "512")
    (LXC / vmid / "rootfs").mkdir(parents=True, exist_ok=True)
    configs.write(world, vmid, config)


def _set_up(root: Path, config: Config, vmid: str, owner: int) -> None:
    """LXC/Setup.pm: find out which system it is, and tell it its name; `unmanaged` is left alone."""
    config.values.setdefault("arch", "amd64")
    if config.get("ostype") == "unmanaged":
        return
    release = root / "etc/os-release"
    found = re.search(r'^ID="?([^"\n]+)', release.read_text(), re.M) if release.is_file() else None
    kind = OSTYPES.get(found[1], "") if found else ""
    if not kind and release.is_file():
        raise Died("unable to detect OS distribution")
    if not kind:
        said = "/etc/os-release file not found and autodetection failed, falling back to 'unmanaged'"
        print(said, file=sys.stderr)
    expected = config.values.setdefault("ostype", kind or "unmanaged")
    if expected != (kind or "unmanaged"):
        print(f"got unexpected ostype ({kind} != {expected})", file=sys.stderr)
    if kind:
        hostname = root / "etc/hostname"
        hostname.write_text(f"{config.get('hostname') or f'CT{vmid}'}\n")
        os.chown(hostname, owner, owner)


def destroy(world: World, formats: Formats, given: dict[str, Any]) -> None:
    """The container with all its volumes; what was bound into it stays."""
    vmid = given["vmid"]

    def check() -> Config:
        config = configs.load(world, formats, vmid)
        configs.check_protection(config, f"can't remove CT {vmid}")
        configs.check_lock(config)
        return config

    check()
    if given.get("force") != "1" and configs.running(vmid):
        raise Died(f"unable to destroy CT {vmid} - container is running")

    def work() -> None:
        with configs.locked(vmid):
            config = check()
            if configs.running(vmid):
                print(f"forced to stop CT {vmid} before destroying!", file=sys.stderr)
                lxc.stop(vmid, kill=True)
            for key, value in [("rootfs", config.get("rootfs")), *config.numbered("mp")]:
                mount = formats.volume(key, value)
                if mount["type"] == "volume":
                    storage.free(world, mount["volume"])
            for _, value in config.numbered("unused"):
                storage.free(world, value)
            subprocess.run(["rm", "-rf", "--one-file-system", LXC / vmid], check=True)
            if given.get("purge") == "1":
                print(f"purging CT {vmid} from related configurations..")
            world.config_path(vmid).unlink()
            world.write_vmlist()

    task(work)
