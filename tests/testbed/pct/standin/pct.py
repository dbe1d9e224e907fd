"""`pct`: which command takes what (CLI/pct.pm $cmddef)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import config as configs
from .config import Config
from .errors import Died, not_simulated
from .options import FLAG, TEXT, VMID, Option, parse
from .properties import Formats
from .world import World

_NOT_HERE = """
clone console cpusets delsnapshot df enter fsck fstrim listsnapshot migrate mount move-volume move_volume
remote-migrate rescan resize restore resume rollback snapshot suspend template unmount
"""
REAL_BUT_NOT_HERE = set(_NOT_HERE.split())


def main(world: World, words: Sequence[str]) -> None:
    if not words:
        raise Died("ERROR: no command specified\nUSAGE: pct <COMMAND> [ARGS] [OPTIONS]")
    formats = Formats(world)
    command, *rest = words
    if command in REAL_BUT_NOT_HERE:
        not_simulated(f"pct {command}")
    if command not in COMMANDS:
        raise Died(f"ERROR: unknown command 'pct {command}'\nUSAGE: pct <COMMAND> [ARGS] [OPTIONS]")
    module, name, schema, positional = COMMANDS[command]
    # What a command does not need is not loaded: `pct exec` is called often.
    function = getattr(importlib.import_module(f"{__package__}.{module}"), name)
    given_schema = schema(world, formats)
    try:
        given, extra = parse(rest, given_schema, positional, rest=command == "exec")
    except Died as died:
        if str(died).startswith("400 "):
            names = "".join(f" <{name}>" for name in positional)
            raise Died(f"{died}\npct {command}{names}{' [OPTIONS]' if given_schema else ''}") from None
        raise
    if command == "exec":
        given["extra-args"] = extra
    function(world, formats, given)


def status(world: World, formats: Formats, given: dict[str, Any]) -> None:
    vmid = given["vmid"]
    config = configs.load(world, formats, vmid)
    up = configs.running(vmid)
    if given.get("verbose") != "1":
        print(f"status: {'running' if up else 'stopped'}")
        return
    from . import lxc

    facts = {
        "cpus": config.get("cores") or config.get("cpulimit") or "1",
        "disk": "0",
        "diskread": "0",
        "diskwrite": "0",
        "lock": config.get("lock"),
        "maxdisk": str(4 << 30),
        "maxmem": str(int(config.get("memory") or 512) << 20),
        "maxswap": str(int(config.get("swap") or 0) << 20),
        "mem": str(lxc.memory_bytes(vmid) if up else 0),
        "name": config.get("hostname") or f"CT{vmid}",
        "netin": "0",
        "netout": "0",
        "pid": str(lxc.init_pid(vmid)) if up else "",
        "status": "running" if up else "stopped",
        "swap": "0",
        "tags": config.get("tags"),
        "type": "lxc",
        "uptime": "1" if up else "0",
        "vmid": vmid,
    }
    for key, value in facts.items():
        if value:
            print(f"{key}: {value}")


def show_list(world: World, formats: Formats, _: dict[str, Any]) -> None:
    rows = []
    for vmid, node in sorted(world.guests().items()):
        if node == world.node:
            config = configs.load(world, formats, str(vmid))
            up = "running" if configs.running(vmid) else "stopped"
            rows.append((str(vmid), up, config.get("lock"), config.get("hostname") or f"CT{vmid}"))
    for row in [("VMID", "Status", "Lock", "Name"), *rows] if rows else []:
        print("{:<10} {:<10} {:<12} {:<20}".format(*row))


def show_config(world: World, formats: Formats, given: dict[str, Any]) -> None:
    """With what waits for the next start, unless `--current`. The environment's variables part at NUL."""
    config = configs.load(world, formats, given["vmid"])
    if "snapshot" in given:
        not_simulated("pct config --snapshot")
    if given.get("current") != "1":
        configs.apply(config, config.pending.pop("delete", ""), config.pending)
    values = dict(config.values)
    if config.env:
        values["env"] = "\0".join(config.env)
    if "description" in values:
        values["description"] = values["description"].replace("%", "%25").replace("\n", "%0A")
    for key in sorted(values):
        print(f"{key}: {values[key]}")
    for key, value in config.raw:
        print(f"{key}: {value}")


def show_pending(world: World, formats: Formats, given: dict[str, Any]) -> None:
    config = configs.load(world, formats, given["vmid"])
    for key, value in sorted(config.values.items()):
        print(f"cur {key}: {value}")
    for key, value in sorted(config.pending.items()):
        print(f"del {value}" if key == "delete" else f"new {key}: {value}")


def unlock(world: World, formats: Formats, given: dict[str, Any]) -> None:
    with configs.locked(given["vmid"]):
        config: Config = configs.load(world, formats, given["vmid"])
        if "lock" not in config.values:
            raise Died("no lock found trying to remove any lock")
        del config.values["lock"]
        configs.write(world, given["vmid"], config)


Schema = Mapping[str, Option]


def _only(**options: Option) -> Callable[[World, Formats], Schema]:
    return lambda world, formats: {name.replace("_", "-"): option for name, option in options.items()}


def _exec(world: World, formats: Formats) -> Schema:
    return {"vmid": VMID, "keep-env": FLAG} if world.has("5.0.9") else {"vmid": VMID}


def _create(world: World, formats: Formats) -> Schema:
    return {**formats.keys, **CREATE}


def _set(world: World, formats: Formats) -> Schema:
    changes = {"delete": Option(list=True), "revert": Option(list=True), "digest": TEXT}
    return {**formats.keys, **changes, "vmid": VMID}


CREATE = {
    "vmid": VMID,
    "ostemplate": Option(longest=255),
    "password": Option(shortest=5),
    "storage": TEXT,
    "force": FLAG,
    "restore": FLAG,
    "unique": FLAG,
    "pool": TEXT,
    "ignore-unpack-errors": FLAG,
    "ssh-public-keys": TEXT,
    "bwlimit": Option("number", 0),
    "start": FLAG,
    "ha-managed": FLAG,
}
SECONDS = Option("integer", 0)
_FILE = {"vmid": VMID, "destination": TEXT, "user": TEXT, "group": TEXT, "perms": TEXT}
ONE = _only(vmid=VMID)
# command: its module, function, options, and which of them have no name on the command line
COMMANDS: dict[str, tuple[str, str, Callable[[World, Formats], Schema], Sequence[str]]] = {
    "list": ("pct", "show_list", _only(), []),
    "status": ("pct", "status", _only(vmid=VMID, verbose=FLAG), ["vmid"]),
    "config": ("pct", "show_config", _only(vmid=VMID, current=FLAG, snapshot=TEXT), ["vmid"]),
    "pending": ("pct", "show_pending", ONE, ["vmid"]),
    "unlock": ("pct", "unlock", ONE, ["vmid"]),
    "exec": ("inside", "exec_command", _exec, ["vmid"]),
    "push": ("inside", "push", _only(**_FILE, file=TEXT), ["vmid", "file", "destination"]),
    "pull": ("inside", "pull", _only(**_FILE, path=TEXT), ["vmid", "path", "destination"]),
    "create": ("create", "create", _create, ["vmid", "ostemplate"]),
    "destroy": (
        "create",
        "destroy",
        _only(vmid=VMID, force=FLAG, purge=FLAG, destroy_unreferenced_disks=FLAG),
        ["vmid"],
    ),
    "set": ("settings", "set_command", _set, ["vmid"]),
    "start": ("lifecycle", "start_command", _only(vmid=VMID, skiplock=FLAG, debug=FLAG), ["vmid"]),
    "stop": ("lifecycle", "stop_command", _only(vmid=VMID, skiplock=FLAG, overrule_shutdown=FLAG), ["vmid"]),
    "shutdown": (
        "lifecycle",
        "shutdown_command",
        _only(vmid=VMID, timeout=SECONDS, forceStop=FLAG),
        ["vmid"],
    ),
    "reboot": ("lifecycle", "reboot_command", _only(vmid=VMID, timeout=SECONDS), ["vmid"]),
}
