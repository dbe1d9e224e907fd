"""`pct`: which command takes what (CLI/pct.pm $cmddef)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import config as configs
from . import create, inside, lifecycle, lxc
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
    function, schema, positional = COMMANDS[command]
    given_schema = schema(world, formats) if callable(schema) else schema
    try:
        given, extra = parse(rest, given_schema, positional, rest=command == "exec")
    except Died as died:
        if str(died).startswith("400 "):
            names = "".join(f" <{name}>" for name in positional)
            raise Died(f"{died}\npct {command}{names}{' [OPTIONS]' if given_schema else ''}") from None
        raise
    if command == "exec":
        inside.exec_command(world, formats, given, extra)
    function(world, formats, given)


def status(world: World, formats: Formats, given: dict[str, Any]) -> None:
    vmid = given["vmid"]
    config = configs.load(world, formats, vmid)
    up = lxc.running(vmid)
    if given.get("verbose") != "1":
        print(f"status: {'running' if up else 'stopped'}")
        return
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
            up = "running" if lxc.running(vmid) else "stopped"
            rows.append((str(vmid), up, config.get("lock"), config.get("hostname") or f"CT{vmid}"))
    for row in [("VMID", "Status", "Lock", "Name"), *rows] if rows else []:
        print("{:<10} {:<10} {:<12} {:<20}".format(*row))


def show_config(world: World, formats: Formats, given: dict[str, Any]) -> None:
    """With what waits for the next start, unless `--current`. The environment's variables part at NUL."""
    config = configs.load(world, formats, given["vmid"])
    if "snapshot" in given:
        not_simulated("pct config --snapshot")
    if given.get("current") != "1":
        lifecycle.apply(config, config.pending.pop("delete", ""), config.pending)
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


ONE = {"vmid": VMID}
Schema = Mapping[str, Option]


def _create(_: World, formats: Formats) -> Schema:
    return {**formats.keys, **create.SCHEMA}


def _set(_: World, formats: Formats) -> Schema:
    return {
        **formats.keys,
        "vmid": VMID,
        "delete": Option(list=True),
        "revert": Option(list=True),
        "digest": TEXT,
    }


def _exec(world: World, _: Formats) -> Schema:
    return inside.exec_schema(world)


COMMANDS: dict[str, tuple[Any, Any, Sequence[str]]] = {
    "list": (show_list, {}, []),
    "status": (status, {**ONE, "verbose": FLAG}, ["vmid"]),
    "config": (show_config, {**ONE, "current": FLAG, "snapshot": TEXT}, ["vmid"]),
    "pending": (show_pending, ONE, ["vmid"]),
    "set": (lifecycle.set_command, _set, ["vmid"]),
    "create": (create.create, _create, ["vmid", "ostemplate"]),
    "destroy": (create.destroy, create.DESTROY, ["vmid"]),
    "start": (lifecycle.start_command, lifecycle.START, ["vmid"]),
    "stop": (lifecycle.stop_command, lifecycle.STOP, ["vmid"]),
    "shutdown": (lifecycle.shutdown_command, lifecycle.SHUTDOWN, ["vmid"]),
    "reboot": (lifecycle.reboot_command, lifecycle.REBOOT, ["vmid"]),
    "unlock": (unlock, ONE, ["vmid"]),
    "exec": (inside.exec_command, _exec, ["vmid"]),
    "push": (inside.push, inside.PUSH, ["vmid", "file", "destination"]),
    "pull": (inside.pull, inside.PULL, ["vmid", "path", "destination"]),
}
