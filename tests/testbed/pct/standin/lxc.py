"""The container itself, as LXC has it: is it up, who is its init."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from .config import running
from .errors import Died
from .world import LXC, RUN


def init_pid(vmid: int | str) -> int:
    """Its init's pid, on this node."""
    done = subprocess.run(["lxc-info", "-n", str(vmid), "-p", "-H"], capture_output=True, text=True)
    try:
        return int(done.stdout)
    except ValueError:
        raise Died(f"unable to get PID for CT {vmid} (not running?)") from None


def start(vmid: str) -> None:
    """Bring it up, as the unit pve-container@.service does: what its init prints goes nowhere.

    Raises Died as LXC.pm monitor_start does; what lxc-start said goes to stderr before that.
    """
    errors = RUN / f"ct-{vmid}.stderr"
    directory = LXC / vmid
    with open(errors, "wb") as log:
        process = subprocess.Popen(
            ["lxc-start", "-F", "-n", vmid, "-f", str(directory / "start.config")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            cwd="/",
            env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
            start_new_session=True,
        )
    deadline = time.monotonic() + 10
    while process.poll() is None and time.monotonic() < deadline:
        done = subprocess.run(["lxc-info", "-n", vmid, "-s", "-H"], capture_output=True, text=True)
        if done.stdout.strip() == "RUNNING":
            return
        time.sleep(0.01)
    for line in errors.read_text(errors="replace").splitlines():
        print(line.removeprefix("lxc-start: ").removeprefix(f"{vmid}: "), file=sys.stderr)
    raise Died(f"startup for container '{vmid}' failed")


def stop(vmid: str, *, kill: bool, timeout: int | None = None, kill_after: bool = False) -> None:
    """LXC.pm vm_stop: its halt signal and a wait, or SIGKILL. Raises Died if it is still up then."""
    command = ["lxc-stop", "-n", vmid]
    if kill:
        command.append("--kill")
    else:
        if not kill_after:
            command.append("--nokill")
        if timeout is not None:
            command += ["--timeout", str(timeout)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        print(f"command '{' '.join(command)}' failed: exit code {done.returncode}", file=sys.stderr)
    else:
        deadline = time.monotonic() + 10
        while running(vmid) and time.monotonic() < deadline:
            time.sleep(0.01)
    if running(vmid):
        raise Died("container did not stop")


def memory_bytes(vmid: str) -> int:
    """What its processes and their files in memory take, in bytes."""
    for path in (f"memory/lxc/{vmid}/memory.usage_in_bytes", f"lxc/{vmid}/memory.current"):
        try:
            return int(Path("/sys/fs/cgroup", path).read_text())
        except OSError:
            continue
    return 0
