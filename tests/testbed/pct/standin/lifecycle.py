"""Starting and stopping (API2/LXC/Status.pm), and changing the settings (API2/LXC/Config.pm update_vm)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from . import config as configs
from . import lxc, lxcconfig, storage
from .config import Config
from .errors import BadParameters, Died
from .options import FLAG, VMID, Option
from .properties import Formats, parse
from .tasks import task
from .world import World

START = {"vmid": VMID, "skiplock": FLAG, "debug": FLAG}
STOP = {"vmid": VMID, "skiplock": FLAG, "overrule-shutdown": FLAG}
SHUTDOWN = {"vmid": VMID, "timeout": Option("integer", 0), "forceStop": FLAG}
REBOOT = {"vmid": VMID, "timeout": Option("integer", 0)}
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


def start_command(world: World, formats: Formats, given: dict[str, Any]) -> None:
    vmid = given["vmid"]
    if lxc.running(vmid):
        raise Died(f"CT {vmid} already running")
    task(lambda: start(world, formats, vmid, skip_lock=given.get("skiplock") == "1"))


def start(world: World, formats: Formats, vmid: str, *, skip_lock: bool = False) -> None:
    with configs.locked(vmid):
        _start(world, formats, vmid, skip_lock)


def _start(world: World, formats: Formats, vmid: str, skip_lock: bool) -> None:
    config = configs.load(world, formats, vmid)
    if config.get("template") == "1":
        raise Died("you can't start a CT if it's a template")
    if not skip_lock:
        configs.check_lock(config, but="mounted")
    if config.pending:
        apply(config, config.pending.pop("delete", ""), dict(config.pending))
        config.pending.clear()
        configs.write(world, vmid, config)
    if "rootfs" not in config.values:
        raise Died("missing 'rootfs' configuration")
    for key in ("ostype", "arch"):
        if key not in config.values:
            raise Died(f"missing '{key}' - internal error")
    lxcconfig.write(world, formats, vmid, config)
    for key, value in [("rootfs", config.values["rootfs"]), *config.numbered("mp")]:
        mount = formats.volume(key, value)  # activate_volumes
        if mount["type"] == "volume" and not storage.volume(world, mount["volume"]).path.exists():
            raise Died(f"volume '{mount['volume']}' does not exist")
    run_hookscript(world, config, vmid, "pre-start", stop_on_error=True)
    lxc.start(vmid)
    run_hookscript(world, config, vmid, "post-start")


def stop_command(world: World, formats: Formats, given: dict[str, Any]) -> None:
    """At once: nobody in the container is asked."""
    vmid = given["vmid"]
    if not lxc.running(vmid):
        raise Died(f"CT {vmid} not running")

    def work() -> None:
        with configs.locked(vmid):
            config = configs.load(world, formats, vmid)
            if given.get("skiplock") != "1":
                configs.check_lock(config, but="mounted")
            _stop(world, config, vmid, kill=True)

    task(work)


def shutdown_command(world: World, formats: Formats, given: dict[str, Any]) -> None:
    """Its halt signal, and a wait of 60 s; it is left running if it does not end, without forceStop."""
    vmid = given["vmid"]
    if not lxc.running(vmid):
        raise Died(f"CT {vmid} not running")

    def work() -> None:
        with configs.locked(vmid):
            config = configs.load(world, formats, vmid)
            configs.check_lock(config)
            seconds, force = int(given.get("timeout", "60")), given.get("forceStop") == "1"
            _stop(world, config, vmid, kill=False, timeout=seconds, kill_after=force)

    task(work)


def reboot_command(world: World, formats: Formats, given: dict[str, Any]) -> None:
    """A shutdown that kills in the end, and a start."""
    vmid = given["vmid"]
    configs.load(world, formats, vmid)
    if not lxc.running(vmid):
        raise Died(f"CT {vmid} not running")

    def work() -> None:
        with configs.locked(vmid):
            config = configs.load(world, formats, vmid)
            seconds = int(given["timeout"]) if "timeout" in given else None
            _stop(world, config, vmid, kill=False, timeout=seconds, kill_after=True)
            _start(world, formats, vmid, skip_lock=True)

    task(work)


def _stop(world: World, config: Config, vmid: str, **how: Any) -> None:
    run_hookscript(world, config, vmid, "pre-stop")
    lxc.stop(vmid, **how)
    run_hookscript(world, config, vmid, "post-stop")


def check_hookscript(world: World, volume: str) -> None:
    """GuestHelpers.pm check_hookscript: a snippet that is there and may be executed."""
    found = storage.volume(world, volume)
    if found.kind != "snippets":
        raise Died(f"'{volume}' is not in the snippets directory")
    if not found.path.exists():
        raise Died(f"script '{volume}' does not exist")
    if not os.access(found.path, os.X_OK):
        raise Died(f"script '{volume}' is not executable")


def run_hookscript(
    world: World, config: Config, vmid: str, phase: str, *, stop_on_error: bool = False
) -> None:
    if not (volume := config.get("hookscript")):
        return
    path = storage.volume(world, volume).path
    done = subprocess.run([path, vmid, phase], stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        said = f"hookscript error for {vmid} on {phase}: command '{path} {vmid} {phase}' failed: "
        said += f"exit code {done.returncode}"
        if stop_on_error:
            raise Died(said)
        print(said, file=sys.stderr)


def check_device(formats: Formats, key: str, value: str) -> None:
    device = parse(formats.device, value, "path")
    if "path" not in device:
        raise Died(f"Path is not defined for passthrough device {key}")
    lxcconfig.device_numbers(device["path"])


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
        wait = {key for key in {*given, *known} if lxc.running(vmid) and key not in AT_ONCE}
        apply(config, ",".join(known - wait), {k: v for k, v in given.items() if k not in wait})
        config.pending.update({key: value for key, value in given.items() if key in wait})
        if wait & known:
            before = config.pending.get("delete", "")
            config.pending["delete"] = ",".join(sorted({*before.split(","), *(wait & known)} - {""}))
        if lxc.running(vmid) and "memory" in given:
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
                raise Died("the test stand-in for Proxmox does not simulate pct set with a new volume", 254)
    elif key == "hookscript":
        check_hookscript(world, value)
    elif re.fullmatch(r"dev\d+", key):
        check_device(formats, key, value)


def apply(config: Config, deleted: str, changed: dict[str, str]) -> None:
    for key in filter(None, deleted.split(",")):
        if key == "env":
            config.env = []
        elif key.startswith("mp") and not config.get(key, "/").startswith("/"):
            volume = config.values.pop(key).split(",")[0]
            free = next(f"unused{n}" for n in range(256) if f"unused{n}" not in config.values)
            config.values[free] = volume
        else:
            config.values.pop(key, None)
    for key, value in changed.items():
        if key == "env":
            config.env = value.split("\0")
        else:
            config.values[key] = value


def _limit_now(vmid: str, mebibytes: int) -> None:
    """The cgroup's limit of a container that is up."""
    for path in (f"memory/lxc/{vmid}/memory.limit_in_bytes", f"lxc/{vmid}/memory.max"):
        file = Path("/sys/fs/cgroup", path)
        if file.exists():
            file.write_text(str(mebibytes << 20))
