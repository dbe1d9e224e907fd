"""What every benchmark does with its figures: print them and add them to bench/results.json."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import platform
from pathlib import Path

RESULTS = Path(__file__).with_name("results.json")


def machine() -> str:
    """The machine in a few words: two results are only compared if these are equal."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next(
                (line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), model
            )
    except OSError:
        pass
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    return f"{os.cpu_count()} × {model}, {system}"


def percentile(values: list[float], percent: float) -> float:
    """The value that `percent` % of `values` do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * percent / 100), len(ordered) - 1)]


def record(claim: str, against: str, *, ours: float, theirs: float, unit: str, n: int) -> float:
    """Add one comparison; returns the ratio ours / theirs, below 1 when we are better.

    `claim`: what is measured; `against`: the named alternative from the same run; `n`: how often measured.
    """
    ratio = ours / theirs if theirs else float("inf")
    entry = {
        "claim": claim,
        "against": against,
        "ratio": round(ratio, 6),
        "ours": ours,
        "theirs": theirs,
        "unit": unit,
        "n": n,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
    }
    lock = os.open(RESULTS.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # benchmarks may run side by side
        entries = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
        temporary = RESULTS.with_suffix(".new")
        temporary.write_text(json.dumps([*entries, entry], ensure_ascii=False, indent=1) + "\n")
        temporary.replace(RESULTS)
    finally:
        os.close(lock)
    print(f"{claim}\n  ours {ours:.4g} {unit}, {against}: {theirs:.4g} {unit}; ratio {ratio:.4g} (n = {n})")
    return ratio
