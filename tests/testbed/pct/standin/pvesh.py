"""`pvesh get`, for the few paths that a deployer asks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from . import config as configs
from . import storage
from .errors import Died, not_simulated
from .options import FLAG, TEXT, Option, parse
from .properties import Formats
from .world import World

FORMATS = ("text", "json", "json-pretty", "yaml")


def main(world: World, words: Sequence[str]) -> None:
    if not words:
        raise Died("ERROR: no command specified\nUSAGE: pvesh <COMMAND> [ARGS] [OPTIONS]")
    if words[0] != "get":
        not_simulated(f"pvesh {words[0]}")
    schema = {
        "api_path": Option(required=True),
        "output-format": Option(enum=FORMATS),
        "noborder": FLAG,
        "noheader": FLAG,
        "quiet": FLAG,
        "human-readable": FLAG,
        "type": TEXT,
        "vmid": TEXT,
        "content": TEXT,
    }
    given, _ = parse(words[1:], schema, ["api_path"])
    answer = _answer(world, given["api_path"].strip("/"), given)
    form = given.get("output-format", "text")
    if form == "json":
        print(json.dumps(answer, separators=(",", ":")))
    elif form == "json-pretty":
        print(json.dumps(answer, indent=3))
    elif form == "text" and isinstance(answer, str):
        print(answer)
    else:
        not_simulated("pvesh's tables and YAML: ask for --output-format json")


def _answer(world: World, path: str, given: dict[str, Any]) -> Any:
    here = f"nodes/{world.node}"
    if path == "version":
        version, _, repoid = world.release.manager.partition("/")
        return {"release": world.version, "repoid": repoid, "version": version}
    if path == "nodes":
        names = [world.node, *world.other_nodes]
        return [{"node": name, "status": "online", "type": "node", "id": f"node/{name}"} for name in names]
    if path == "cluster/nextid":
        return _next_id(world, given.get("vmid"))
    if path == "cluster/resources" and given.get("type", "vm") == "vm":
        return [_guest(world, vmid, node) for vmid, node in sorted(world.guests().items())]
    if path in (f"{here}/lxc", "nodes/localhost/lxc"):
        return [
            _guest(world, vmid, node) for vmid, node in sorted(world.guests().items()) if node == world.node
        ]
    if path in (f"{here}/storage", "nodes/localhost/storage"):
        return [_storage(one) for one in storage.storages().values()]
    if path.split("/")[0] in ("access", "cluster", "nodes", "pools", "storage"):
        not_simulated(f"pvesh get /{path}")
    raise Died(f"No '{given['api_path']}' handler defined for 'get'")


def _next_id(world: World, wanted: str | None) -> str:
    """A string, also as JSON. Nothing is reserved: two who ask at once get the same."""
    taken = world.guests()
    if wanted is not None:
        if int(wanted) in taken:
            raise Died(f"400 Parameter verification failed.\nvmid: VM {wanted} already exists")
        return wanted
    return str(next(number for number in range(100, 1_000_000) if number not in taken))


def _guest(world: World, vmid: int, node: str) -> dict[str, Any]:
    status = "running" if node == world.node and configs.running(vmid) else "stopped"
    fact: dict[str, Any] = {"id": f"lxc/{vmid}", "node": node, "status": status, "type": "lxc", "vmid": vmid}
    if node == world.node:
        config = configs.load(world, Formats(world), str(vmid))
        fact["name"] = config.get("hostname") or f"CT{vmid}"
        fact["maxmem"] = int(config.get("memory") or 512) << 20
        if config.get("lock"):
            fact["lock"] = config.get("lock")
    return fact


def _storage(one: storage.Storage) -> dict[str, Any]:
    total, used, free = (0, 0, 0) if one.disabled else one.room()
    return {
        "storage": one.name,
        "type": one.type,
        "content": ",".join(sorted(one.content)),
        "active": int(not one.disabled),
        "enabled": int(not one.disabled),
        "shared": 0,
        "total": total,
        "used": used,
        "avail": free,
    }
