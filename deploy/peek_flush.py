"""Ask a Python process to write what it holds back, in the way that Python 3.14 offers: `sys.remote_exec`.

The process runs a small script at its next safe point, between two instructions of its own; nothing is
stopped. It is used only where nothing can go wrong quietly: not where the script's reader is another one than
the process's own Python, and not where a full pipe would make the process wait. Runs ON the host. Standard
library only, Python >= 3.9.
"""

from __future__ import annotations

import array
import base64
import contextlib
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import Any

from deploy import peek_host, procfs
from deploy.errors import DeployError

PATIENCE = 5.0  # seconds for the process to come back to Python code
SINCE = (3, 14)
GETPIPE_SZ = 1032  # fcntl.F_GETPIPE_SZ, which Python names since 3.10

# Run in names of its own, so that the program finds none of ours among its own. That its file is gone says
# that it is done.
SCRIPT = """\
exec('''
import os, sys
for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
    try:
        stream.flush()
    except Exception:
        pass
try:
    os.unlink({path!r})
    os.rmdir(os.path.dirname({path!r}))
except OSError:
    pass
''', {{}})
"""
CALL = "import sys; sys.remote_exec(int(sys.argv[1]), sys.argv[2])"


def flush(pid: int) -> dict[str, Any]:
    """{flushed, left: bytes, waiting: null or the path of a script that the process has not come to yet}.

    Raises DeployError, with nothing done, where it cannot be asked.
    """
    before = peek_host.one(pid)
    if before["refused"]:
        raise DeployError(f"process {pid}: {before['refused']}")
    held = _held(before)
    if not held:
        return {"flushed": 0, "left": 0, "waiting": None}
    version = tuple(int(part) for part in before["version"].split("."))
    problem = refusal(pid, version, before)
    if problem:
        raise DeployError(f"process {pid} cannot be asked to flush: {problem}")
    python, user, group = interpreter(pid, version[:2])
    folder = Path(tempfile.mkdtemp(prefix="drafthouse-flush-"))
    script = folder / "flush.py"
    script.write_text(SCRIPT.format(path=str(script)), encoding="utf-8")
    if os.getuid() == 0:  # the process removes it
        owner, owners = owner_of(pid)
        os.chown(script, owner, owners)
        os.chown(folder, owner, owners)
    argv = [python, "-I", "-S", "-B", "-c", CALL, str(pid), str(script)]
    more: dict[str, Any] = {} if user is None else {"user": user, "group": group, "extra_groups": []}
    asked = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False, **more
    )
    if asked.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        lines = asked.stderr.decode("utf-8", "replace").strip().splitlines() or [f"{python} failed"]
        raise DeployError(f"process {pid} cannot be asked to flush: {lines[-1]}")
    deadline = time.monotonic() + PATIENCE
    while script.exists() and time.monotonic() < deadline and procfs.stat(pid):
        time.sleep(0.02)
    waiting = str(script) if script.exists() else None
    if not waiting or not procfs.stat(pid):
        shutil.rmtree(folder, ignore_errors=True)
    if waiting and not folder.exists():
        raise DeployError(f"process {pid} ended before it came to flush")
    left = _held(peek_host.one(pid))
    return {"flushed": 0 if waiting else held, "left": left, "waiting": waiting}


def refusal(pid: int, version: tuple[int, ...], found: dict[str, Any]) -> str:
    """Why a process must not be asked; empty if it may be."""
    if version[:2] < SINCE:
        dotted = ".".join(str(part) for part in version[:2])
        return (
            f"it is Python {dotted}, and the safe way (sys.remote_exec) came with 3.14; fab peek without "
            "--flush reads it, and PYTHONUNBUFFERED=1 at its start writes at once"
        )
    words = found["command"]
    if found["variables"].get("PYTHON_DISABLE_REMOTE_DEBUG") or any(
        "disable-remote-debug" in word for word in words
    ):
        return "it was started with remote debugging disabled (PYTHON_DISABLE_REMOTE_DEBUG or -X)"
    try:
        same = os.path.samestat(os.stat(f"/proc/{pid}/root"), os.stat("/"))
        same = same and os.readlink(f"/proc/{pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt")
    except OSError:
        same = False
    if not same:
        return "it sees other files than this login (it is in a container), so it could not read our script"
    for stream in found["streams"]:
        size = len(base64.b64decode(stream["held"] or ""))
        if size and not takes(pid, stream["fd"], size):
            return (
                f"{stream['name']} is a pipe that does not take {size:,} bytes now, so the process would "
                "wait for its reader; look at what reads it"
            )
    return ""


def interpreter(pid: int, version: tuple[int, ...]) -> tuple[str, int | None, int | None]:
    """(path, user, group) of a Python of the same version; a foreign one is run only as its user."""
    if tuple(sys.version_info[:2]) == tuple(version):
        return sys.executable, None, None
    path = os.readlink(f"/proc/{pid}/exe")
    if path.endswith(" (deleted)"):
        dotted = ".".join(str(part) for part in version)
        raise DeployError(
            f"process {pid} cannot be asked to flush: its program was replaced since it began, and "
            f"no other Python {dotted} is known that could ask; set python_for_tools in fabric.yaml to one"
        )
    return (path, *owner_of(pid)) if os.getuid() == 0 else (path, None, None)


def owner_of(pid: int) -> tuple[int, int]:
    """(effective user, group) of a process."""
    status = procfs.read(pid, "status").decode("ascii", "replace")
    lines = {line.partition(":")[0]: line.split()[1:] for line in status.splitlines()}
    return int(lines["Uid"][1]), int(lines["Gid"][1])


def takes(pid: int, descriptor: int | None, size: int) -> bool:
    """Whether a write of `size` bytes would not have to wait. Only of a pipe this can be told."""
    if descriptor is None:
        return True
    path = f"/proc/{pid}/fd/{descriptor}"
    with contextlib.suppress(OSError):
        if not stat.S_ISFIFO(os.stat(path).st_mode):
            return True
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            waiting = array.array("i", [0])
            fcntl.ioctl(pipe, termios.FIONREAD, waiting)
            return fcntl.fcntl(pipe, GETPIPE_SZ) - waiting[0] >= size + os.sysconf("SC_PAGE_SIZE")
        finally:
            os.close(pipe)
    return False  # nobody reads it any more: a flush would end the process with SIGPIPE's error


def _held(found: dict[str, Any]) -> int:
    return sum(len(base64.b64decode(stream["held"] or "")) for stream in found["streams"])
