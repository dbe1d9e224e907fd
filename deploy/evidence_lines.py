"""The evidence behind one run's verdict, as lines for `status --verbose`. Pure; untrusted text is cleaned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deploy.health import cut, number, table
from deploy.overview import Row
from deploy.sizes import age, size

COMMAND = 100  # characters of a command line
NOTED = 0.05  # CPUs that a process wants and does not get
PROCESSES = 12  # are shown; a run with many loaders has hundreds


def lines(row: Row) -> Iterator[str]:
    """Processes, heartbeats, reference, GPUs, log, disks. Nothing is said of what is not known."""
    told = dict(row.evidence)
    yield from _processes(told)
    for rank, beat in table(told, "ranks").items():
        role = f" ({cut(str(beat['role']), 20)})" if len(table(told, "ranks")) > 1 else ""
        yield f"rank {rank}{role}: {_rank(beat)}"
    if row.reference:
        speed = f"{row.reference['tokens_per_second']:,.0f} tok/s"
        yield f"reference: {cut(str(row.reference['run_id']))} at {speed}"
    for gpu in row.gpus:
        yield f"GPU {gpu['index']}: {_gpu(gpu)}"
    if row.gpus_unknown:
        yield f"GPUs: unknown, {cut(row.gpus_unknown)}"
    yield from _log(table(told, "log"))
    yield from _space(told)


def _processes(told: dict[str, Any]) -> Iterator[str]:
    found = told.get("processes") or []
    for item in found[:PROCESSES]:
        words = [f"state {item['state']}"]
        if item["wchan"]:
            words.append(f"in {cut(str(item['wchan']), 40)}")
        if item["cpus"] is not None:
            wants = item["cpus_wanted"]
            short = f" of {wants:.2f} wanted" if wants - item["cpus"] >= NOTED else ""
            words.append(f"{item['cpus']:.2f} CPUs{short}")
        if item["rss"]:
            words.append(size(item["rss"]))
        command = " ".join(item["command"]) or "a command line that may not be read"
        yield f"process {item['pid']}: {', '.join(words)}: {cut(command, COMMAND)}"
    if len(found) > PROCESSES:
        yield f"and {len(found) - PROCESSES} more processes"


def _rank(beat: Mapping[str, Any]) -> str:
    beat = dict(beat)
    words = [cut(str(beat.get("phase")), 20)]
    if beat["phase_age"] is not None:
        words[0] += f" for {age(beat['phase_age'])}"
    if (step := number(beat, "step")) is not None:
        target = beat["role"] == "target"
        words.append(f"{step:.0f} micro-batches served" if target else f"step {step:.0f}")
    if beat["step_age"] is not None:
        words.append(f"last step {age(beat['step_age'])} ago")
    if beat["beat_age"] is not None:
        words.append(f"heartbeat {age(beat['beat_age'])} ago")
    parts = {
        key: value for key in table(beat, "phase_seconds") if (value := number(beat["phase_seconds"], key))
    }
    if parts:
        words.append(
            " ".join(f"{cut(str(key), 20)} {1000 * value:.0f}" for key, value in parts.items()) + " ms"
        )
    saved = number(table(beat, "last_checkpoint"), "step")
    if saved is not None:
        words.append(f"checkpoint of step {saved:.0f}")
    return ", ".join(words)


def _gpu(gpu: Mapping[str, Any]) -> str:
    words = []
    if gpu["utilization"] is not None:
        words.append(f"{gpu['utilization']:.0f} % busy")
    if gpu["memory_used"] is not None:
        of = f" of {size(gpu['memory_total'])}" if gpu["memory_total"] else ""
        words.append(f"{size(gpu['memory_used'])}{of} in use")
    if gpu["own"]:
        words.append(f"{size(gpu['own'])} by this run")
    return ", ".join(words) or "nothing is known"


def _log(log: dict[str, Any]) -> Iterator[str]:
    if log.get("bytes") is None:
        return
    when = f", the newest {age(log['age'])} ago" if log.get("age") is not None else ""
    yield f"log: {log['bytes']:,.0f} bytes{when}"
    yield from (f"  │ {cut(line)}" for line in log.get("tail") or ())


def _space(told: dict[str, Any]) -> Iterator[str]:
    words = []
    for key, name in (("state", "disk"), ("shm", "shared memory")):
        free = number(table(table(told, "disk"), key), "free_bytes")
        total = number(table(table(told, "disk"), key), "total_bytes")
        if free is not None and total:
            words.append(f"{name} {size(free)} of {size(total)}")
    available, total = (number(table(told, "host_memory"), key) for key in ("available", "total"))
    if available is not None and total:
        words.append(f"memory {size(available)} of {size(total)}")
    if words:
        yield f"free: {', '.join(words)}"
