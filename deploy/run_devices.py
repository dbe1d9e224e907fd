"""The devices of each run: what the library says of them, and who else has them.

Runs ON the host, as a part of the probe. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import os
from typing import Any

from deploy import procfs
from trainer import status


def add(runs: list[dict[str, Any]], devices: list[dict[str, Any]], told: Any) -> None:
    """Give every run ``gpus``: its devices, each ``{index uuid lost missing error utilization memory_used
    memory_total own own_memory others [{pid command age memory run_id}]}``; `told` is the probe's "nvml".

    `own` are the pids of the run's processes on it, `others` those of anybody else, daemons aside. A run's
    devices are those of its run.json; if that names none, those that its processes have.
    """
    library = told if isinstance(told, list) else []
    if not devices and not library:
        return
    owners = {process["pid"]: run["run_id"] for run in runs for process in run["processes"]}
    merged = [_merged(device, _told_of(device, library), owners) for device in _all(devices, library)]
    for run in runs:
        named = (run["run"] or {}).get("devices")
        wanted = {str(word) for word in named} if isinstance(named, list) else set()
        found = [_seen(run, device) for device in merged]
        run["gpus"] = [
            one
            for one in found
            if one["own"]
            or "all" in wanted
            or str(one["index"]) in wanted
            or (one["uuid"] and one["uuid"] in wanted)
        ]
        known = {str(one["index"]) for one in merged} | {str(one["uuid"]) for one in merged}
        lacking = {str(word) for word in wanted} - known - {"all"}
        run["gpus"] += [_missing(word) for word in sorted(lacking) if run["alive"]]


def _all(devices: list[dict[str, Any]], library: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The devices by their files, and those that only the library knows."""
    here = {device["index"] for device in devices} | {device["uuid"] for device in devices if device["uuid"]}
    more = [one for one in library if one["index"] not in here and one["uuid"] not in here]
    return [*devices, *({**one, "path": None, "holders": []} for one in more)]


def _told_of(device: dict[str, Any], library: list[dict[str, Any]]) -> dict[str, Any]:
    by_uuid = [one for one in library if one["uuid"] and one["uuid"] == device["uuid"]]
    by_index = [one for one in library if one["index"] == device["index"]]
    if by_uuid or (by_index and not (device["uuid"] and by_index[0]["uuid"])):
        return (by_uuid or by_index)[0]
    return {"absent": True} if library else {}


def _merged(device: dict[str, Any], told: dict[str, Any], owners: dict[int, str]) -> dict[str, Any]:
    """One device with all who have it: open, or by the library's word."""
    users: dict[int, dict[str, Any]] = {}
    for one in device["holders"]:
        users[one["pid"]] = {**one, "memory": None}
    for one in told.get("processes") or []:
        unknown = {"pid": one["pid"], "command": None, "age": None, "daemon": False}
        users.setdefault(one["pid"], unknown)["memory"] = one["memory"]
    for pid, one in users.items():
        if one["command"] is None:
            words = procfs.read(pid, "cmdline").replace(b"\0", b" ").decode("utf-8", "replace").strip()
            one["command"] = "".join(char if char.isprintable() else " " for char in words)[:200] or None
        place = None if pid in owners else procfs.run_of(pid)
        one["run_id"] = owners.get(pid) or _run_id(place)
    return {
        "index": device["index"],
        "uuid": device["uuid"] or told.get("uuid"),
        "users": users,
        "missing": bool(told.get("absent")),
        **{key: told.get(key) for key in ("lost", "error", "memory_used", "memory_total")},
        "utilization": told.get("utilization") or [],
    }


def _run_id(place: str | None) -> str | None:
    """The id of a run from its directory, which has another name inside a container."""
    name = os.path.basename(place or "")
    try:
        status.split_run_id(name)
    except ValueError:
        return None
    return name


def _seen(run: dict[str, Any], device: dict[str, Any]) -> dict[str, Any]:
    users = device["users"].values()
    mine = [one for one in users if one["run_id"] == run["run_id"]]
    memory = [one["memory"] for one in mine if one["memory"] is not None]
    return {
        **{key: value for key, value in device.items() if key != "users"},
        "own": [one["pid"] for one in mine],
        "own_memory": sum(memory) if memory else None,
        "others": [
            {key: one[key] for key in ("pid", "command", "age", "memory", "run_id")}
            for one in users
            if one not in mine and not one["daemon"]
        ],
    }


def _missing(word: str) -> dict[str, Any]:
    """A device that a run was given and that this machine does not show any more."""
    nothing = dict.fromkeys(("uuid", "lost", "error", "memory_used", "memory_total", "own_memory"))
    return {"index": word, **nothing, "missing": True, "utilization": [], "own": [], "others": []}
