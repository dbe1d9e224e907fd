"""How much room a host has, and where ours is: its places, their file systems, and its memory.

Runs ON the host, as a part of the probe and where weights come. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from deploy import procfs


def look(state: str | None, shm: str | None) -> dict[str, Any]:
    """The probe's "state", "shm" and "memory", at places that may be left to the host."""
    memory_root = Path(shm or shm_root())
    return {
        "state": directory(Path(state or state_root())),
        "shm": {**directory(memory_root), "is_tmpfs": filesystem(memory_root) == "tmpfs"},
        "memory": memory(),
    }


def state_root() -> str:
    default = "/var/lib/drafthouse" if os.getuid() == 0 else "~/.local/state/drafthouse"
    return os.path.expanduser(os.environ.get("DRAFTHOUSE_STATE") or default)


def shm_root() -> str:
    return os.environ.get("DRAFTHOUSE_SHM") or "/dev/shm/drafthouse"


def memory() -> dict[str, int | None]:
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return {"total": None, "available": None, "room": None}
    values = {key: int(value) * 1024 for key, value in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    return {"total": values.get("MemTotal"), "available": values.get("MemAvailable"), "room": memory_room()}


def memory_room() -> int | None:
    """What the memory limits of our cgroup and of those above it leave, in bytes; None without one.

    Files that the kernel only keeps at hand count as room: it drops them first.
    """
    found = []
    for place in _memory_groups():
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            try:
                most = int((place / limit).read_text(encoding="ascii"))
                if most < 1 << 60:
                    taken = int((place / used).read_text(encoding="ascii")) - _dropped_first(place)
                    found.append(max(0, most - taken))
            except (OSError, ValueError):  # "max" is no number, and no limit
                continue
    return min(found, default=None)


def _memory_groups() -> list[Path]:
    """Our memory cgroup and those above it. A container sees its own as the root."""
    found = [Path(procfs.GROUPS), Path(procfs.GROUPS, "memory")]
    for place in map(Path, procfs.groups(os.getpid())):
        found += [place, *(above for above in place.parents if above.is_relative_to(procfs.GROUPS))]
    return list(dict.fromkeys(found))


def _dropped_first(group: Path) -> int:
    """Bytes of files on disk that a cgroup holds in the page cache."""
    try:
        text = (group / "memory.stat").read_text(encoding="ascii")
    except OSError:
        return 0
    values = dict(re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE))
    cached = sum(int(values.get(key, 0)) for key in ("total_inactive_file", "total_active_file"))
    return cached or sum(int(values.get(key, 0)) for key in ("inactive_file", "active_file"))


def directory(path: Path) -> dict[str, Any]:
    """Space and rights of a directory, or of what is there of it, where it would be made."""
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    result: dict[str, Any] = {"root": str(path), "exists": path.is_dir()}
    try:
        space = os.statvfs(there)
        result.update(free_bytes=space.f_bavail * space.f_frsize, total_bytes=space.f_blocks * space.f_frsize)
        result["owner_uid"] = there.stat().st_uid
    except OSError:
        result.update(free_bytes=None, total_bytes=None, owner_uid=None)
    result["writable"] = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    return result


def filesystem(path: Path) -> str | None:
    """The type of the file system that holds `path`."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    resolved = os.path.realpath(path)
    best, kind = "", None
    for line in mounts.splitlines():
        point = line.split(" ")[1].replace("\\040", " ")
        below = resolved == point or resolved.startswith(point.rstrip("/") + "/")
        if below and len(point) >= len(best):
            best, kind = point, line.split(" ")[2]
    return kind
