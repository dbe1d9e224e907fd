"""What of ours is still on the machine: `.ci/run` ends with this, and fails if there is anything."""

from __future__ import annotations

import contextlib
from pathlib import Path

from . import engine, gpubox, network
from .pct import box as pve
from .place import CHECKOUT, RUN, work_directory


def found() -> list[str]:
    """One line for each process, mount, namespace, cgroup or directory that a test session left."""
    lines = [f"process {pid}: {line[:120]}" for pid, line in engine.processes()]
    lines += [f"process {pid}: {line[:120]}" for pid, line in _ours()]
    lines += [f"mount {point}" for point in engine.mounts()]
    lines += [f"cgroup {path}" for path in engine.cgroups()]
    if network.is_up():
        lines.append(f"network namespace {network.NAMESPACE}")
    lines += [f"gpu-box {number}" for number in gpubox.left()]
    lines += [f"cgroup {path}" for path in pve.cgroups_left()]
    lines += [f"directory {path}" for path in (RUN, engine.LOCK) if path.exists()]
    return lines


def _ours() -> list[tuple[int, str]]:
    """sshd of the tests, runs and switches: programs that only the tests start, from our own directories."""
    roots = (str(work_directory()), str(CHECKOUT))
    modules = ("trainer.launch", "sshd", "switch.py", "drafthouse")
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                ours = any(module in line for module in modules) and any(root in line for root in roots)
                if ours and "tests.testbed" not in line:
                    found.append((int(entry.name), line))
    return found
