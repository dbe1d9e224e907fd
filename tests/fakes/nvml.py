"""Builds the stand-in for NVIDIA's management library, and writes what it tells. See nvml.c."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

STATE = "FAKE_NVML_STATE"  # the variable that names the file with what it tells


def build(directory: Path) -> Path:
    """Compile the library into `directory`; its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "libnvidia-ml.so.1"
    source = Path(__file__).with_suffix(".c")
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run(["gcc", *flags, "-o", str(path), str(source)], check=True)
    return path


def device(
    uuid: str,
    *,
    lost: bool = False,
    used: int = 1000,
    total: int = 81559,
    percent: int = 0,
    processes: Sequence[tuple[int, int, int]] = (),
) -> str:
    """A line of the state: memory in MiB, `processes` as (pid, MiB, percent)."""
    words = [
        uuid,
        "lost" if lost else "well",
        used,
        total,
        percent,
        *(word for one in processes for word in one),
    ]
    return " ".join(map(str, words)) + "\n"
