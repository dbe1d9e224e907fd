"""What stands beside a verdict: lost and shared devices, a full disk, deleted weights, kills. Pure."""

from __future__ import annotations

from typing import Any

from deploy.health_words import ago, amount, cut, number, plural, rows, table, tables

FULL = 1 << 20  # bytes; a disk with less room takes no more of a log


def beside(run: dict[str, Any], now: float, died: bool) -> list[str]:
    """What is worth saying of a run in progress, whatever its verdict; `died`: a process of it has."""
    notes = [
        under_way(run, now), disk_full(run), weights_gone(run), shared(run),
        killed_for_memory(run) if died else "",
    ]  # fmt: skip
    return [note for note in notes if note]


def under_way(run: dict[str, Any], now: float) -> str:
    """Who stops a run, or puts another one in its place; launch says so itself once it has been asked.

    "switching" are the words of the lock of the run's name.
    """
    words, path = table(run, "switching"), run.get("path")
    begun = f" by {cut(str(words.get('by') or 'somebody'), 60)}, begun {ago(now, number(words, 'since'))},"
    if words.get("what") == "stop" and not table(run, "launch").get("stopping"):
        return f"a stop{begun} is under way"
    if words.get("what") == "switch" and words.get("run_path") != path:
        following = cut(str(words.get("run_path")).rpartition("/")[2], 70)
        return f"a switch{begun} to {following} is under way"
    return ""


def lost(run: dict[str, Any]) -> str:
    """The devices of a run that fell off the bus, or that the machine does not show any more."""
    found = [gpu for gpu in tables(run, "gpus") if gpu.get("lost") is True or gpu.get("missing") is True]
    words = []
    for gpu in found:
        why = "as NVML says" if gpu.get("lost") is True else "this machine does not show it any more"
        words.append(f"GPU {cut(str(gpu.get('index')), 50)} is lost ({why})")
    return f"{', '.join(words)}; reset it or restart the machine" if words else ""


def shared(run: dict[str, Any]) -> str:
    """Who else has the devices of a run: most often what an earlier run has left behind."""
    words = []
    for gpu in tables(run, "gpus"):
        for one in tables(gpu, "others")[:3]:
            memory = number(one, "memory")
            with_memory = f" with {amount(memory)}" if memory else ""
            whose = f"left of run {cut(str(one['run_id']), 70)}" if one.get("run_id") else "not of this run"
            what = cut(str(one.get("command") or "its command is unknown"), 60)
            held = f"GPU {gpu.get('index')} is also held by pid {one.get('pid')}{with_memory}"
            words.append(f"{held}, {whose} ({what})")
    return "; ".join(words[:3])


def disk_full(run: dict[str, Any]) -> str:
    free = number(table(run, "log"), "free_bytes")
    missing = number(table(run, "launch"), "log_missing") or 0
    gone = f", and {missing:,.0f} bytes of it are missing" if missing else ""
    if free is None or free >= FULL:
        return ""
    return (
        f"the disk of its log is full ({amount(free)} free){gone}: neither output nor heartbeats can be kept"
    )


def weights_gone(run: dict[str, Any]) -> str:
    """Weights that a run in progress has loaded and that its next start would not find."""
    found = table(run, "weights")
    paths = [str(path) for path in (*rows(run, "deleted"), *rows(found, "missing"))]
    # (A process in a container has the same file at another path: the host's counts.)
    names = [cut(path, 100) for path in {path.rpartition("/")[2]: path for path in paths}.values()]
    if found.get("there") is False:
        names = [cut(str(found.get("path")), 100)]
    return f"its weights {', '.join(names[:2])} were deleted: a restart will not find them" if names else ""


def killed_for_memory(run: dict[str, Any]) -> str:
    kills = number(table(run, "memory_group"), "oom_kills")
    return f"the kernel counts {plural(int(kills), 'kill')} for want of memory in its cgroup" if kills else ""
