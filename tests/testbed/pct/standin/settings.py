"""`pct set` (API2/LXC/Config.pm update_vm, LXC/Config.pm update_pct_config)."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from . import config as configs
from . import lxcconfig, storage
from .config import Config
from .errors import BadParameters, Died, not_simulated
from .lifecycle import check_device, check_hookscript
from .properties import Formats
from .world import World

# What changes while the container is up (LXC/Config.pm $LXC_FASTPLUG_OPTIONS, vmconfig_hotplug_pending).
# The real one can add a new mount point, device or network, too: here these wait for the next start.
AT_ONCE = {
    "description",
    "onboot",
    "startup",
    "protection",
    "hostname",
    "hookscript",
    "cores",
    "tags",
    "lock",
}
AT_ONCE |= {"memory", "swap", "cpulimit", "cpuunits"}


def set_command(world: World, formats: Formats, given: dict[str, Any]) -> None:
    """Change settings; those that a running container cannot take wait in the file for its next start."""
    vmid = given.pop("vmid")
    if not given:
        raise Died("no options specified")
    digest = given.pop("digest", "")
    deleted = [word for word in re.split(r"[\s,;\0]+", given.pop("delete", "")) if word]
    reverted = [word for word in re.split(r"[\s,;\0]+", given.pop("revert", "")) if word]
    with configs.locked(vmid):
        config = configs.load(world, formats, vmid)
        configs.check_lock(config)
        if digest and digest != config.digest:
            raise Died("detected modified configuration - file changed by other user? Try again.")
        for what, keys in (("revert", reverted), ("delete", deleted)):
            for key in keys:
                if key not in formats.keys:
                    raise _bad(what, f"unknown option '{key}'")
                if key in given:
                    raise _bad(what, f"you can't use '-{key}' and -{what} {key}' at the same time")
        for key in reverted:
            config.pending.pop(key, None)
        _check_deleted(config, vmid, deleted)
        for key, value in sorted(given.items()):
            _check(world, formats, config, vmid, key, value)
        known = {key for key in deleted if key in config.values or (key == "env" and config.env)}
        wait = {key for key in {*given, *known} if configs.running(vmid) and key not in AT_ONCE}
        configs.apply(config, ",".join(known - wait), {k: v for k, v in given.items() if k not in wait})
        config.pending.update({key: value for key, value in given.items() if key in wait})
        if wait & known:
            before = config.pending.get("delete", "")
            config.pending["delete"] = ",".join(sorted({*before.split(","), *(wait & known)} - {""}))
        if configs.running(vmid) and "memory" in given:
            _limit_now(vmid, int(given["memory"]))
        configs.write(world, vmid, config)
        lxcconfig.write(world, formats, vmid, config)


def _bad(key: str, said: str) -> BadParameters:
    return BadParameters("Parameter verification failed.", {key: said})


def _check_deleted(config: Config, vmid: str, keys: list[str]) -> None:
    for key in keys:
        if key not in config.values and key not in config.pending and not (key == "env" and config.env):
            print(f"cannot delete '{key}' - not set in current configuration!", file=sys.stderr)
        elif key in ("memory", "rootfs", "ostype"):
            raise Died(f"unable to delete required option '{key}'")
        elif key == "unprivileged":
            raise Died(f"unable to delete read-only option: '{key}'")
        elif re.match(r"(mp|unused)\d", key):
            configs.check_protection(config, f"can't remove CT {vmid} drive '{key}'")


def _check(world: World, formats: Formats, config: Config, vmid: str, key: str, value: str) -> None:
    """LXC/Config.pm update_pct_config. A directory to bind need not be there: that shows at the start."""
    if key == "unprivileged":
        raise Died(f"unable to modify read-only option: '{key}'")
    if key == "rootfs" or re.fullmatch(r"mp\d+", key):
        configs.check_protection(config, f"can't update CT {vmid} drive '{key}'")
        mount = formats.volume(key, value)
        if mount["type"] == "volume":
            name = mount["volume"].split(":")[0]
            if "rootdir" not in storage.storage(name).content:
                raise Died(f"storage '{name}' does not allow content type 'rootdir' (Container)")
            if storage.NEW.fullmatch(mount["volume"]):
                not_simulated("pct set with a new volume")
    elif key == "hookscript":
        check_hookscript(world, value)
    elif re.fullmatch(r"dev\d+", key):
        check_device(formats, key, value)


def _limit_now(vmid: str, mebibytes: int) -> None:
    """The cgroup's limit of a container that is up."""
    for path in (f"memory/lxc/{vmid}/memory.limit_in_bytes", f"lxc/{vmid}/memory.max"):
        file = Path("/sys/fs/cgroup", path)
        if file.exists():
            file.write_text(str(mebibytes << 20))
