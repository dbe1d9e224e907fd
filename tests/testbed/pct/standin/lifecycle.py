"""Starting and stopping (API2/LXC/Status.pm), and changing the settings (API2/LXC/Config.pm update_vm)."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from . import config as configs
from . import lxc, lxcconfig, storage
from .config import Config
from .errors import Died
from .properties import Formats, parse
from .tasks import task
from .world import World


def start_command(world: World, formats: Formats, given: dict[str, Any]) -> None:
    vmid = given["vmid"]
    if configs.running(vmid):
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
        configs.apply(config, config.pending.pop("delete", ""), dict(config.pending))
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
    if not configs.running(vmid):
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
    if not configs.running(vmid):
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
    if not configs.running(vmid):
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
