"""Whether a process ended because memory ran out, by the kernel's own counters.

Standard library only and Python >= 3.9; Linux.
"""

from __future__ import annotations

from dataclasses import dataclass


def _counter(path: str) -> int | None:
    """The number behind `oom_kill` in a file of "name value" lines."""
    try:
        with open(path, encoding="ascii") as file:
            for line in file:
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
    except (OSError, ValueError):
        pass
    return None


@dataclass(frozen=True)
class Kills:
    """How many processes the kernel has killed for want of memory so far; None where it does not say."""

    group: int | None  # in our cgroup
    machine: int | None


def memory_events(membership: str, root: str = "/sys/fs/cgroup") -> list[str]:
    """The files that may count our cgroup's out-of-memory kills, by /proc/self/cgroup's text; best first.

    In a container the path may be the host's; then the group is mounted as the root itself.
    """
    files = []
    for line in membership.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        path = path.rstrip("/")
        if number == "0" and not controllers:
            files += [f"{root}{path}/memory.events", f"{root}/memory.events"]
        elif "memory" in controllers.split(","):
            files += [f"{root}/memory{path}/memory.oom_control", f"{root}/memory/memory.oom_control"]
    return files


def count_kills() -> Kills:
    try:
        with open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:
            files = memory_events(file.read())
    except OSError:
        files = []
    counts = (_counter(path) for path in files)
    return Kills(next((count for count in counts if count is not None), None), _counter("/proc/vmstat"))


def out_of_memory(before: Kills, after: Kills, killed: bool) -> bool | None:
    """Whether a process that ended badly, by a KILL that nobody asked for if `killed`, ran out of memory.

    Our cgroup's counter decides where it can be read: then also when a worker was killed and the main process
    gave up. The machine's counts other groups' kills too, so it only explains a KILL.
    """
    if before.group is not None and after.group is not None:
        return after.group > before.group
    if not killed:
        return False
    if before.machine is not None and after.machine is not None:
        return after.machine > before.machine
    return None
