"""What only a Proxmox host knows of a container on it: what its memory's limit leaves.

Proxmox sets the limits one cgroup above the one that the container has as its root, and /proc/meminfo
there has them only by grace of lxcfs. So the host is asked, with plain sh, as it need not have a Python.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deploy.host import Local
    from deploy.ssh import Ssh

LOOK_TIMEOUT = 20.0
# Argument: the container. Of cgroups v2 and v1; what is not there is left out.
_LOOK = """\
for top in /sys/fs/cgroup/lxc/"$1" /sys/fs/cgroup/memory/lxc/"$1"; do
  for file in memory.max memory.current memory.limit_in_bytes memory.usage_in_bytes; do
    [ ! -e "$top/$file" ] || echo "$file $(cat "$top/$file")"
  done
  [ ! -e "$top/memory.stat" ] || cat "$top/memory.stat"
done
sed -n 's/^MemAvailable: *\\([0-9]*\\) kB$/available \\1/p' /proc/meminfo
"""


def add(outer: Local | Ssh, container: int, facts: dict[str, Any]) -> None:
    """Complete a container's `facts` (of the probe, or of `deploy.room`) with what its Proxmox host says.

    "memory" then counts what the host has, and as room what the container's limit leaves; "proxmox" is
    {container: its number}.
    """
    argv = ["/bin/sh", "-c", _LOOK, "look", str(container)]
    done = outer.run(argv, timeout=LOOK_TIMEOUT, check=False)
    told = dict(re.findall(r"^([\w.]+) +(\d+)$", done.text, re.MULTILINE))
    memory = dict(facts.get("memory") or {})
    host = int(told["available"]) * 1024 if "available" in told else None
    memory["available"] = least(memory.get("available"), host)
    memory["room"] = least(memory.get("room"), room(told))
    facts["memory"] = memory
    facts["proxmox"] = {"container": container}


def room(told: Mapping[str, str]) -> int | None:
    """Bytes that the container's limit leaves, by its cgroup's files; None without a limit. Pure.

    Files that the kernel only keeps at hand count as room: it drops them first.
    """
    most = int(told.get("memory.max", told.get("memory.limit_in_bytes", 1 << 60)))
    if most >= 1 << 60:
        return None
    used = int(told.get("memory.current", told.get("memory.usage_in_bytes", 0)))
    for prefix in ("total_", ""):
        if f"{prefix}inactive_file" in told:
            used -= int(told[f"{prefix}inactive_file"]) + int(told.get(f"{prefix}active_file", 0))
            break
    return max(0, most - max(0, used))


def least(*amounts: int | None) -> int | None:
    return min((one for one in amounts if one is not None), default=None)
