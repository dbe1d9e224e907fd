"""Processes: as /proc shows them, and how those of a run begin.

Runs ON the host as a part of the probe and of the switch. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainer import status

GROUPS = "/sys/fs/cgroup"
PAGE = os.sysconf("SC_PAGE_SIZE")
TICK = os.sysconf("SC_CLK_TCK")
PF_KTHREAD = 0x00200000  # among the flags in /proc/<pid>/stat
RANKS = (b"WORLD_SIZE", b"RANK", b"LOCAL_WORLD_SIZE", b"LOCAL_RANK")  # as torchrun and its like give them
BLOCK = 1 << 14  # bytes that are read at once
LOOPBACK = (b"localhost", b"127.0.0.1", b"::1")


def begin(start: dict[str, Any], errors: Any) -> subprocess.Popen[bytes]:
    """Start what a switch is to start, in a session of its own. Raises OSError."""
    return subprocess.Popen(
        start["argv"],
        env=start["environment"],
        cwd=start["working_directory"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        start_new_session=True,
    )


def parse(pid: int, text: str) -> dict[str, Any] | None:
    """What a text of /proc/<pid>/stat says; None if it is none. Times in clock ticks, rss in bytes.

    `ended` is the wait status of a process that has ended and that nobody has waited for, where it is told.
    """
    fields = text.rpartition(")")[2].split()  # the name before may hold blanks and parentheses
    try:
        return {
            "pid": pid,
            "state": fields[0],
            "ppid": int(fields[1]),
            "session": int(fields[3]),
            "ticks": int(fields[11]) + int(fields[12]),
            "start": int(fields[19]),
            "rss": int(fields[21]) * PAGE,
            "ended": int(fields[49]) if fields[0] in "ZX" and len(fields) > 49 else None,
        }
    except (IndexError, ValueError):
        return None


def stat(pid: int) -> dict[str, Any] | None:
    """The same of a process here; None if it is gone."""
    return parse(pid, read(pid, "stat").decode("utf-8", "replace"))


def is_kernel(text: bytes) -> bool:
    """Whether a text of /proc/<pid>/stat is that of a thread of the kernel, without memory of its own."""
    fields = text.rpartition(b")")[2].split()
    return len(fields) > 6 and fields[6].isdigit() and bool(int(fields[6]) & PF_KTHREAD)


def is_launch(pid: int) -> bool:
    """Whether a process is launch itself, its guard, or the init before it: they say nothing of the run."""
    words = read(pid, "cmdline").split(b"\0")
    return b"trainer.launch" in words or read(pid, "comm").strip() == b"launch-guard"


def processes() -> dict[int, dict[str, Any]]:
    """Every process that can be seen, by pid."""
    found = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if entry.isdigit():
            process = stat(int(entry))
            if process:
                found[process["pid"]] = process
    return found


def of_run(launch: int, session: int, table: dict[int, dict[str, Any]]) -> list[int]:
    """The pids of a run in progress: launch, its descendants, and the trainer's session (0: none)."""
    chosen = {launch} & set(table)
    grew = bool(chosen)
    while grew:
        more = {
            pid
            for pid, item in table.items()
            if item["ppid"] in chosen or (session > 0 and item["session"] == session)
        }
        grew = not more <= chosen
        chosen |= more
    return sorted(chosen)


def nspid(pid: int) -> int:
    """The number that a process has where it lives: in its container, for one that is in a container."""
    found = re.search(rb"^NSpid:(?:\t\d+)*\t(\d+)$", read(pid, "status"), re.MULTILINE)
    return int(found[1]) if found else pid


def holding(path: str, pids: Iterable[int]) -> int | None:
    """Which of the processes has the file `path` open; the oldest of several, None for none.

    So a run's launch is found by its lock, whatever number launch has in its container.
    """
    return min((pid for pid in pids if has_open(pid, path)), default=None, key=_age)


def _age(pid: int) -> tuple[int, int]:
    process = stat(pid)
    return (process["start"] if process else 1 << 62, pid)


def run_of(pid: int) -> str | None:
    """The directory of the run that a process was started in, as its environment says."""
    mark = f"{status.RUN_DIR_VARIABLE}=".encode()
    for item in read(pid, "environ").split(b"\0"):
        if item.startswith(mark):
            return os.fsdecode(item[len(mark) :])
    return None


def of_group(pid: int) -> list[int]:
    """The processes in the cgroup of `pid` and below it: also those that were put there from outside.

    Only for a process that has a group of its own, as the first one of a container has.
    """
    found = set()
    for place in groups(pid):
        for folder, _, names in os.walk(place):
            if "cgroup.procs" in names:
                try:
                    words = Path(folder, "cgroup.procs").read_text(encoding="ascii").split()
                except OSError:
                    continue
                found |= {int(word) for word in words if word.isdigit()} - {0}
        if found:
            break
    return sorted(found)


def groups(pid: int, controller: str = "memory") -> list[str]:
    """Where the cgroup of `pid` may be seen from here, of version 2 and of a `controller` of version 1.

    The root is nobody's own group and is left out.
    """
    found = []
    for line in read(pid, "cgroup").decode("utf-8", "replace").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if path in ("", "/") or "/../" in f"{path}/":
            continue
        if number == "0" and not controllers:
            found += [f"{GROUPS}{path}", f"{GROUPS}/unified{path}"]
        elif controller in controllers.split(","):
            found.insert(0, f"{GROUPS}/{controller}{path}")
    return [place for place in found if os.path.isdir(place)]


def left_behind(run_path: str, session: int, table: dict[int, dict[str, Any]]) -> list[int]:
    """The pids that a run which has ended left in its trainer's session.

    Session numbers are used again, so a process counts only if it also carries the run's directory in its
    environment.
    """
    mark = f"{status.RUN_DIR_VARIABLE}={run_path}".encode()
    return sorted(
        pid
        for pid, item in table.items()
        if session > 0
        and item["session"] == session
        and item["state"] != "Z"
        and mark in read(pid, "environ").split(b"\0")
    )


def has_open(pid: int, path: str) -> bool:
    """Whether process `pid` has the file `path` open: proof of what it is, which a number is not."""
    try:
        wanted = os.stat(path)
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for descriptor in descriptors:
        try:
            if os.path.samestat(os.stat(f"/proc/{pid}/fd/{descriptor}"), wanted):
                return True
        except OSError:
            continue
    return False


def describe(process: dict[str, Any], booted: float | None) -> dict[str, Any]:
    """What a verdict may lean on. What cannot be read (another user's process) is None or empty.

    `booted` is `boot_time()`; `ranks` are the numbers that a distributed run gives its processes.
    """
    pid = process["pid"]
    arguments = read(pid, "cmdline").split(b"\0")[:-1]
    variables = dict(item.partition(b"=")[::2] for item in read(pid, "environ").split(b"\0") if item)
    unbuffered = variables.get(b"PYTHONUNBUFFERED")
    stdout = link(pid, "fd/1")
    return {
        "pid": pid,
        "nspid": nspid(pid),
        "ppid": process["ppid"],
        "session": process["session"],
        "state": process["state"],
        "wchan": read(pid, "wchan").decode("ascii", "replace").strip("0\n") or None,
        "wait": None,
        "threads": None,
        "cpu_ticks": [process["ticks"]],
        "ran": [],
        "wanted": None,
        "io": [],
        "rss": process["rss"],
        "cmdline": [word.decode("utf-8", "replace") for word in arguments],
        "program": os.path.basename((link(pid, "exe") or "").replace(" (deleted)", "")) or None,
        "started": booted + process["start"] / TICK if booted else None,
        "ended": process["ended"],
        "stdout": stdout,
        "unbuffered": None if unbuffered is None else unbuffered.decode("utf-8", "replace"),
        "ranks": _ranks(variables),
    }


def ranks(pid: int) -> dict[str, int]:
    """The numbers that a launcher has given a process: those of RANKS that are in its environment."""
    return _ranks(dict(item.partition(b"=")[::2] for item in read(pid, "environ").split(b"\0") if item))


def _ranks(variables: dict[bytes, bytes]) -> dict[str, int]:
    told = {name.decode(): int(variables[name]) for name in RANKS if variables.get(name, b"").isdigit()}
    if "WORLD_SIZE" in told and variables.get(b"MASTER_ADDR") in LOOPBACK:  # then all of them are here
        told.setdefault("LOCAL_WORLD_SIZE", told["WORLD_SIZE"])
    return told


def io(pid: int) -> list[int] | None:
    """[bytes read, of these from a disk, bytes written] so far; None where that may not be known."""
    found = dict(line.split(b": ") for line in read(pid, "io").splitlines() if b": " in line)
    try:
        return [int(found[key]) for key in (b"rchar", b"read_bytes", b"wchar")]
    except (KeyError, ValueError):
        return None


def oom_kills() -> int | None:
    """How many processes the kernel of this machine has killed for want of memory since it started."""
    try:
        text = Path("/proc/vmstat").read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else None


def link(pid: int, name: str) -> str | None:
    """Where a link of /proc/<pid> points to."""
    try:
        return os.readlink(f"/proc/{pid}/{name}")
    except OSError:
        return None


def read(pid: int, name: str) -> bytes:
    """A file of /proc/<pid>; empty if the process is gone or not ours to read."""
    return read_path(f"/proc/{pid}/{name}")


def read_path(path: str) -> bytes:
    """A file of /proc, of which a probe reads thousands: a third quicker than through a file object."""
    parts = []
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        while part := os.read(descriptor, BLOCK):
            parts.append(part)
    except OSError:
        return b""
    finally:
        os.close(descriptor)
    return b"".join(parts)


def boot_time() -> float | None:
    """When the machine started, Unix time in seconds."""
    try:
        match = re.search(r"^btime (\d+)$", Path("/proc/stat").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return float(match[1]) if match else None


def container_time() -> float | None:
    """When the container that we are in started, else the machine; up to a second early."""
    booted, first = boot_time(), stat(1)
    return booted + first["start"] / TICK if booted is not None and first else booted
