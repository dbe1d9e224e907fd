"""What a process computes between two looks, and what it would have computed with CPUs of its own.

The ticks of /proc/PID/stat are too coarse to tell a little work every few milliseconds from none, and they
are silent on threads that are ready to run while others have every CPU: such a process is not idle. The
kernel counts both for each thread, in /proc/PID/task/TID/schedstat: nanoseconds on a CPU, nanoseconds ready
without one (added only once it gets one), turns on a CPU. One look reads each of these files once.
Runs ON the host, as a part of the probe. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass

from deploy import procfs

MOST_THREADS = 128  # of one process are looked at; one that has more is left to its ticks
MOST_READY = 32  # threads of one process are asked whether they are ready to run
LITTLE = 0.05  # of the time between two looks; only below that it matters who is ready and never had a turn
ALONE = 2  # threads that are ready: the probe and another one
READY = "R"


@dataclass(frozen=True)
class Look:
    at: float  # time.monotonic()
    threads: dict[int, tuple[int, int, int]]  # nanoseconds computed, nanoseconds ready without a CPU, turns
    slept: int | None  # how often the main thread went to sleep by itself so far; None unless it is ready


def look(pid: int, state: str) -> Look | None:
    """The counts of every thread of a process now, which is in `state`; None where the kernel tells none."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return None
    if len(tasks) > MOST_THREADS:
        return None
    threads = {}
    for task in tasks:
        try:
            ran, waited, turns = map(int, procfs.read(pid, f"task/{task}/schedstat").split())
        except ValueError:  # it is gone, or the kernel does not count
            continue
        threads[int(task)] = (ran, waited, turns)
    return Look(time.monotonic(), threads, _slept(pid) if state == READY else None) if threads else None


def between(pid: int, before: Look, after: Look, crowded: bool) -> tuple[int, int]:
    """Nanoseconds that the threads computed, and that they would have computed with a CPU for each.

    A thread that works for w and then sleeps for s works w / (w + s) of the time, however long it has to wait
    for its CPU in between. So what it got is held against the time in which it did not wait for a CPU.
    Of threads that had no turn at all, only their state tells: they are asked if it may be so (`crowded`).
    """
    elapsed = max(1, int((after.at - before.at) * 1e9))
    ran = wanted = 0
    without: list[int] = []
    for task, counts in after.threads.items():
        old = before.threads.get(task, (0, 0, 0))
        got = min(max(0, counts[0] - old[0]), elapsed)
        waited = min(max(0, counts[1] - old[1]), elapsed - got)
        ran += got
        if task == pid and after.slept is not None and after.slept == before.slept:
            wanted += elapsed  # ready at both looks, and it did not sleep in between
        elif waited < elapsed:
            wanted += elapsed * got // (elapsed - waited)
        else:
            wanted += elapsed
        if task != pid and counts[2] == old[2] and task in before.threads:
            without.append(task)
    if crowded and wanted < LITTLE * elapsed:
        wanted += elapsed * sum(_is_ready(pid, task) for task in without[:MOST_READY])
    return ran, wanted


def load() -> dict[str, float] | None:
    """``{"average", "ready", "cpus"}``: threads of this machine that want a CPU, over a minute and now."""
    try:
        words = procfs.read_path("/proc/loadavg").split()
        average, ready = float(words[0]), int(words[3].partition(b"/")[0])
    except (IndexError, ValueError):
        return None
    return {"average": average, "ready": ready, "cpus": len(os.sched_getaffinity(0))}


def crowded(load: dict[str, float] | None) -> bool:
    """Whether a thread may wait for a CPU: not if none is ready but the probe, which asks, and one more."""
    return load is None or load["ready"] > ALONE


def _slept(pid: int) -> int | None:
    found = re.search(rb"^voluntary_ctxt_switches:\s*(\d+)$", procfs.read(pid, "status"), re.MULTILINE)
    return int(found[1]) if found else None


def _is_ready(pid: int, task: int) -> bool:
    """Whether a thread that had no turn is ready for one."""
    return procfs.read(pid, f"task/{task}/stat").rpartition(b")")[2].split()[:1] == [READY.encode()]
