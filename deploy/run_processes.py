"""The processes of runs: which they are, and what each does between two samples.

Runs ON the host, as a part of the probe. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import os
import re
import stat
import time
from pathlib import Path
from typing import Any

from deploy import cpu_time, machine, procfs
from deploy.waits import Waits

READS = 1 << 20  # bytes a second; who reads more has a file that is worth naming
MOST_FILES = 256  # open files of one process are looked at
MOST_THREADS = 32  # of one process, and ...
ALL_THREADS = 256  # ... of all of them
IDLE = ("lock", "sleep", "events", "signal", None)  # waits that say little of what the process waits for


def add(runs: list[dict[str, Any]], sample: float) -> None:
    """Give every run its processes, as they are now and, with a sample, what they did in so many seconds."""
    table = procfs.processes()
    began, booted = time.monotonic(), procfs.boot_time()
    for run in runs:
        run["processes"] = [procfs.describe(table[pid], booted) for pid in _of(run, table)]
    chosen = [process for run in runs for process in run["processes"]]
    if not chosen or sample <= 0:
        return
    first: dict[int, tuple[float, cpu_time.Look | None]] = {}
    for process in chosen:
        pid = process["pid"]
        look = cpu_time.look(pid, process["state"])
        first[pid] = (look.at if look else time.monotonic(), look)
        # The counts are read within the time that the two looks enclose, so that no rate comes out too high.
        now = procfs.stat(pid)
        if now and now["start"] == table[pid]["start"]:
            process["cpu_ticks"] = [now["ticks"]]
        process["io"] = _once(procfs.io(pid))
    time.sleep(max(0.0, sample - (time.monotonic() - began)))
    waits, budget, load = Waits(), ALL_THREADS, cpu_time.load()
    for run in runs:
        run["load"] = load if run["processes"] else None
    for process in chosen:
        start = table[process["pid"]]["start"]
        if _lives_on(process, start, *first[process["pid"]], cpu_time.crowded(load)):
            budget -= _add_waits(process, waits, min(MOST_THREADS, budget))


def _once(value: Any) -> list[Any]:
    return [] if value is None else [value]


def _of(run: dict[str, Any], table: dict[int, dict[str, Any]]) -> list[int]:
    pid, session = (int(_number(run["launch"], key) or 0) for key in ("pid", "trainer_pid"))
    if run["container"]:  # launch.json tells the numbers of another namespace
        return _contained(run, table)
    if run["alive"]:  # only then does the pid in launch.json mean anything
        return procfs.of_run(pid, session, table)
    return procfs.left_behind(run["path"], session, table)


def _contained(run: dict[str, Any], table: dict[int, dict[str, Any]]) -> list[int]:
    """The pids here of a run in a container: all in its cgroup, all that came from its first process.

    If the engine cannot tell that process, the one that holds the run's lock is looked for.
    """
    first = run["container"].get("pid") or 0
    if not first and run["alive"]:
        first = procfs.holding(str(Path(run["path"]) / "launch.lock"), table) or 0
    if first not in table:
        return []
    return sorted({*procfs.of_run(first, 0, table), *(set(procfs.of_group(first)) & set(table))})


def _lives_on(
    process: dict[str, Any], start: int, since: float, before: cpu_time.Look | None, crowded: bool
) -> bool:
    """The second sample of one process, the first one being of `since`: whether it is still there."""
    pid = process["pid"]
    now = procfs.stat(pid)
    if not now or now["start"] != start:
        process["state"] = "X"  # gone between the two samples
        return False
    process["cpu_ticks"].append(now["ticks"])
    process["state"], process["ended"] = now["state"], now["ended"]
    counts = procfs.io(pid)
    after = cpu_time.look(pid, now["state"]) if before else None
    # On a machine without a free CPU we wait for one, too: more than the pause that was asked for.
    elapsed = process["elapsed"] = (after.at if after else time.monotonic()) - since
    if before and after:
        ran, process["wanted"] = cpu_time.between(pid, before, after, crowded)
        process["ran"] = [0, ran]
    if process["io"] and counts:
        process["io"].append(counts)
        if max(counts[0] - process["io"][0][0], counts[1] - process["io"][0][1]) >= READS * elapsed:
            process["reading"] = _reading(pid)
    if process["program"] and process["program"].startswith(("python", "pypy")):
        process["stdout_file"] = _stdout_file(pid, process["stdout"])
    return True


def _add_waits(process: dict[str, Any], waits: Waits, most: int) -> int:
    """Where a process waits that did not compute, and its threads; how many of these were looked at."""
    if process["cpu_ticks"][1] > process["cpu_ticks"][0] or process["state"] in "ZX":
        return 0
    process["wait"] = waits.of(process["pid"])
    if (process["wait"] or {}).get("kind") not in IDLE or most <= 0:
        return 0
    found, count = waits.threads(process["pid"], most)
    process["threads"] = {"count": count, "waits": found}
    return min(count, most)


def _reading(pid: int) -> dict[str, Any] | None:
    """The largest file that a process is in the middle of: ``{"path", "position", "bytes"}``."""
    best: dict[str, Any] | None = None
    remote = machine.remote(pid)
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")[:MOST_FILES]
    except OSError:
        return None
    for number in numbers:
        path = procfs.link(pid, f"fd/{number}") or ""
        if not path.startswith("/") or (path.startswith("/dev/") and not path.startswith("/dev/shm/")):
            continue
        position = re.search(rb"^pos:\s*(\d+)", procfs.read(pid, f"fdinfo/{number}"))
        if not position or not int(position[1]) or (remote and os.fsencode(path).startswith(remote)):
            continue
        try:
            info = os.stat(f"/proc/{pid}/fd/{number}")
        except OSError:
            continue
        whole = info.st_size if stat.S_ISREG(info.st_mode) else 0
        if int(position[1]) < whole and (best is None or whole > best["bytes"]):
            best = {"path": path, "position": int(position[1]), "bytes": whole}
    return best


def _stdout_file(pid: int, path: str | None) -> dict[str, Any] | None:
    """``{"bytes", "modified"}`` of the file that a process prints into; None for anything else."""
    if not path or not path.startswith("/") or path.startswith("/dev/"):
        return None
    remote = machine.remote(pid)
    if remote and os.fsencode(path).startswith(remote):
        return None
    try:
        info = os.stat(f"/proc/{pid}/fd/1")
    except OSError:
        return None
    return {"bytes": info.st_size, "modified": info.st_mtime} if stat.S_ISREG(info.st_mode) else None


def memory_group(run: dict[str, Any]) -> dict[str, Any] | None:
    """``{"oom_kills", "limit"}`` of the memory cgroup of a run in progress; None if it has none of its own.

    The kills are counted since the group was made. One that we are in, too, is that of a login or of the
    machine, and its kills may be anybody's.
    """
    pid = next((one["pid"] for one in run["processes"] if one["state"] not in "ZX"), 0)
    shared = procfs.groups(os.getpid())
    for place in procfs.groups(pid) if run["alive"] and pid else ():
        if place in shared:
            continue
        for name in ("memory.events", "memory.oom_control"):
            try:
                text = Path(place, name).read_text(encoding="ascii")
            except (OSError, ValueError):
                continue
            found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
            if found:
                return {"oom_kills": int(found[1]), "limit": _limit(place)}
    return None


def _limit(place: str) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        try:
            word = Path(place, name).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            continue
        return int(word) if word.isdigit() and int(word) < 1 << 60 else None
    return None


def _number(value: dict[str, Any] | None, key: str) -> float | None:
    found = (value or {}).get(key)
    return found if isinstance(found, (int, float)) and not isinstance(found, bool) else None
