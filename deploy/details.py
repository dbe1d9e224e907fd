"""The figures and the evidence that `status` shows beside a verdict: GPUs, time left, reference, processes.

Evidence in, plain values out; only `round_trip` asks a host. What cannot be known is None or a "because".
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Mapping
from typing import Any

from deploy import health_work, mask
from deploy.health import number, rows, table
from deploy.host import Host, HostError

PINGS = 3  # the quickest of them counts: the others met a busy machine
PING_PATIENCE = 5.0  # seconds


def eta(beat: Mapping[str, Any], pace: dict[str, Any]) -> float | None:
    """Seconds to the last step; None if a heartbeat does not tell.

    From what a step takes now, or from the clock of the last hour (`deploy.pace`), which has saving and
    evaluating in it: whichever is slower.
    """
    beat = dict(beat)
    step, total = number(beat, "step"), number(beat, "total")
    parts = table(beat, "phase_seconds")
    seconds = sum(value for key in parts if (value := number(parts, key)) is not None)
    if step is None or total is None or seconds <= 0 or total <= step:
        return None
    steps, took = number(pace, "steps"), number(pace, "seconds")
    return (total - step) * max(seconds, took / steps if steps and took else 0.0)


def against_reference(
    facts: Mapping[str, Any], run: Mapping[str, Any], speed: float | None
) -> dict[str, Any] | None:
    """``{run_id, tokens_per_second, share}`` of the name's reference; the share is None without a speed."""
    found = table(table(dict(facts.get("names") or {}), run["name"]), "reference")
    base = number(found, "tokens_per_second")
    if not base or base <= 0:
        return None
    share = speed / base if speed is not None else None
    return {"run_id": str(found.get("run_id")), "tokens_per_second": base, "share": share}


def gpus_of(run: Mapping[str, Any], facts: Mapping[str, Any]) -> tuple[tuple[dict[str, Any], ...], str]:
    """(the GPUs that a run uses, why they are not known).

    ``{index uuid utilization (percent) memory_used memory_total own}``, in bytes; `own`
    is what this run's processes hold of it. They are those on which a process of the run computes, else those
    that were given to it.
    """
    told = (facts.get("gpus") or {}).get("nvml")
    if isinstance(told, dict):
        return (), str(told.get("unknown") or "")
    pids = {item.get("pid") for item in run.get("processes") or () if isinstance(item, dict)}
    given = {str(word) for word in (run.get("run") or {}).get("devices") or ()}
    used, named = [], []
    for gpu in told if isinstance(told, list) else ():
        if not isinstance(gpu, dict):
            continue
        mine = [item for item in rows(gpu, "processes") if isinstance(item, dict) and item.get("pid") in pids]
        samples = [value for value in rows(gpu, "utilization") if isinstance(value, int | float)]
        shown = {
            "index": gpu.get("index"),
            "uuid": gpu.get("uuid"),
            "utilization": sum(samples) / len(samples) if samples else None,
            "memory_used": number(gpu, "memory_used"),
            "memory_total": number(gpu, "memory_total"),
            "own": sum(number(item, "memory") or 0 for item in mine) if mine else None,
        }
        if mine:
            used.append(shown)
        elif given & {str(gpu.get("index")), str(gpu.get("uuid")), "all"} or "all" in given:
            named.append(shown)
    return tuple(used or named), ""


def evidence(run: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a verdict leans on, as it was read: processes, heartbeats, log, disks, checkpoint, exit.

    What looks like a secret on a command line is masked.
    """
    run, now = dict(run), facts["time"]
    log = table(run, "log")
    sample = facts.get("sample_seconds") or 0
    return {
        "processes": [_process(item, sample) for item in rows(run, "processes") if isinstance(item, dict)],
        "ranks": {
            rank: _rank(beat, now)
            for rank, beat in sorted(table(run, "heartbeats").items(), key=lambda item: (len(item[0]), item))
            if isinstance(beat, dict)
        },
        "log": {
            "bytes": number(log, "bytes"),
            "age": _age(now, number(log, "last_write")),
            "tail": [str(line) for line in rows(log, "tail")],
        },
        "disk": {
            key: {name: number(table(dict(facts), key), name) for name in ("free_bytes", "total_bytes")}
            for key in ("state", "shm")
        },
        "host_memory": dict(facts.get("memory") or {}),
        "exit": run.get("exit"),
        "container": run.get("container"),
    }


def _process(item: dict[str, Any], sample: float) -> dict[str, Any]:
    used, wanted = health_work.cpus(item, sample) or (None, None)
    words = [str(word) for word in rows(item, "cmdline")]
    return {
        **{key: item.get(key) for key in ("pid", "state", "wchan", "rss", "stdout")},
        "cpus": used,
        "cpus_wanted": wanted,
        "command": mask.words(words),
    }


def _rank(beat: dict[str, Any], now: float) -> dict[str, Any]:
    return {
        **{key: beat.get(key) for key in ("role", "phase", "detail", "attempt", "step", "last_checkpoint")},
        "phase_seconds": table(beat, "phase_seconds"),
        "memory": table(beat, "memory"),
        "metrics": table(beat, "metrics"),
        "phase_age": _age(now, number(beat, "phase_since")),
        "beat_age": _age(now, number(beat, "time")),
        "step_age": _age(now, number(beat, "last_step_time")),
    }


def _age(now: float, moment: float | None) -> float | None:
    return None if moment is None else max(0.0, now - moment)


def round_trip(host: Host) -> float | None:
    """Seconds that a byte takes to `host` and back over the connection that there is; None if none comes."""
    try:
        process = host.open_stream(["cat"])
    except HostError:
        return None
    try:
        return _quickest(process)
    finally:
        with contextlib.suppress(OSError):
            assert process.stdin
            process.stdin.close()
        try:
            process.wait(1)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _quickest(process: subprocess.Popen[bytes]) -> float | None:
    assert process.stdin
    assert process.stdout
    found = []
    poll = select.poll()
    poll.register(process.stdout.fileno(), select.POLLIN | select.POLLHUP)
    for _ in range(1 + PINGS):  # the first one also waits for the program to start
        began = time.monotonic()
        try:
            os.write(process.stdin.fileno(), b".")
        except OSError:
            return None
        if not poll.poll(PING_PATIENCE * 1000) or not os.read(process.stdout.fileno(), 1):
            return None
        found.append(time.monotonic() - began)
    return min(found[1:])
