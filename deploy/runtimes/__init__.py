"""How a run is started on a host: `process` (no engine), `compose` (Docker) or `pct` (Proxmox). Pure.

`choose` says which of them a deploy takes, from what the host's entry says and from what the probe saw.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deploy.settings import HostSettings

CONTAINED = ("compose", "pct")  # the runtimes whose runs live in a container
ENGINE = (20, 10)
COMPOSE = (2, 17)


def choose(host: HostSettings, facts: Mapping[str, Any], name: str | None = None) -> tuple[str, str]:
    """(runtime, why).

    A run in progress keeps its runtime, unless fabric.yaml says otherwise: an engine that does not answer for
    a moment must not turn a container into a process.
    """
    if host.container is not None and host.runtime != "compose":
        return "process", f"in container {host.container}, of which nothing is replaced"
    if host.runtime != "auto":
        return host.runtime, f"as {host.name} has it in fabric.yaml"
    for run in reversed(facts.get("runs", [])):
        known = (run.get("run") or {}).get("runtime")
        if name is not None and run["name"] == name and run["alive"] and known in (*CONTAINED, "process"):
            return known, f"as {run['run_id']}, which is in progress"
    engine, missing = facts["engine"], lacking(facts["engine"])
    if host.is_local:
        there = "" if missing else f" (a Docker engine answers, version {engine['version']})"
        return "process", f"on this machine, unless fabric.yaml says runtime: compose{there}"
    proxmox = facts.get("pve") or {}
    if missing and proxmox.get("mounted"):
        return "pct", f"Proxmox VE {proxmox.get('version') or ''}".rstrip() + " is there, and no engine"
    if missing:
        return "process", missing
    return "compose", f"Docker Engine {engine['version']} with Compose {engine['compose']} answers"


def lacking(engine: Mapping[str, Any]) -> str:
    """What an engine lacks for the compose runtime, in words; empty if nothing."""
    if engine.get("permitted") is False:
        return f"the Docker engine does not permit us ({engine.get('error') or 'permission denied'})"
    if not engine["answers"]:
        return f"no Docker engine answers ({engine.get('error') or 'there is none'})"
    if version(engine.get("version")) < ENGINE:
        return f"Docker Engine {engine.get('version')} is older than 20.10"
    if not engine.get("compose"):
        return f"the Docker engine has no Compose v2 ({no_compose(engine)})"
    if version(engine["compose"]) < COMPOSE:
        return f"Compose {engine['compose']} is older than 2.17"
    return ""


def no_compose(engine: Mapping[str, Any]) -> str:
    """Why `docker compose` does not answer. A client without it only says where its help is."""
    error = str(engine.get("error") or "")
    return error if error and "--help" not in error else "docker compose is no command there"


def version(text: str | None) -> tuple[int, int]:
    """``(2, 40)`` of ``v2.40.3-desktop.1``; (0, 0) of what is no version."""
    found = re.match(r"v?(\d+)\.(\d+)", text or "")
    return (int(found[1]), int(found[2])) if found else (0, 0)
