"""What processes have printed but not written, and what says why. Runs ON the host, through `deploy.onhost`.

Nothing is stopped, and nothing is written into any process. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import base64
import os
import pwd
import re
import time
from collections.abc import Iterable
from typing import Any

from deploy import procfs
from deploy.peek_memory import Memory, Unreadable
from deploy.peek_python import NotPython, Python, Unknown

CAP_SYS_PTRACE = 19
SCOPE = "/proc/sys/kernel/yama/ptrace_scope"


def look(pids: Iterable[int], of_run: bool = False) -> list[dict[str, Any]]:
    """One object per process, in that order; `of_run` leaves out launch and its guard, which are ours:

    {pid nspid command [words] version: "3.11.7" or null, variables {PYTHON*: value}, waits: its wait channel,
    streams: see `peek_python.Python.streams`, with `leads_to` (what the descriptor is open to) and `held` in
    base64; confirmed, refused: null or a sentence that begins with a small letter, python: whether it is one
    (null: unknown), seconds}
    """
    return [one(pid) for pid in pids if not (of_run and procfs.is_launch(pid))]


def one(pid: int) -> dict[str, Any]:
    began = time.monotonic()
    found: dict[str, Any] = {
        "pid": pid,
        "nspid": procfs.nspid(pid),
        "command": [
            word.decode("utf-8", "replace") for word in procfs.read(pid, "cmdline").split(b"\0")[:-1]
        ],
        "variables": variables(pid),
        "waits": procfs.read(pid, "wchan").decode("ascii", "replace").strip("0\n") or None,
        "version": None,
        "streams": [],
        "confirmed": False,
        "python": None,
        "refused": None,
    }
    try:
        streams(pid, found)
    except NotPython as error:
        found.update(python=False, refused=str(error))
    except Unknown as error:
        found["refused"] = str(error)
    except Unreadable:
        found["refused"] = "its memory is not what it should be; it may be starting or ending: try again"
    except OSError as error:
        found["refused"] = refusal(pid, error)
    found["seconds"] = time.monotonic() - began
    return found


def streams(pid: int, found: dict[str, Any]) -> None:
    before = procfs.stat(pid)
    if before is None:
        raise Unknown("there is no such process")
    if before["state"] in ("Z", "X"):
        raise Unknown("it has ended already, and its parent has not asked how (a zombie)")
    if procfs.is_kernel(procfs.read(pid, "stat")):
        raise NotPython("it is a thread of the kernel, which prints nothing")
    with Memory(pid) as memory:
        if not memory.mappings:
            raise NotPython("it has no memory any more: it is ending")
        python = Python(memory)
        kept, found["confirmed"] = python.streams()
    now = procfs.stat(pid)
    if now is None or now["start"] != before["start"]:
        raise Unknown("it has ended while it was read")
    found["version"] = ".".join(str(part) for part in python.version)
    found["python"] = True
    found["streams"] = [
        {
            **stream,
            "leads_to": leads_to(pid, stream.get("fd")),
            "held": base64.b64encode(stream["held"]).decode("ascii") if "held" in stream else None,
        }
        for stream in kept
    ]


def variables(pid: int) -> dict[str, str]:
    """Python's variables among those that the process was started with; no other leaves the host."""
    items = (item.partition(b"=") for item in procfs.read(pid, "environ").split(b"\0"))
    return {
        key.decode("ascii", "replace"): value.decode("utf-8", "replace")
        for key, _, value in items
        if key.startswith(b"PYTHON")
    }


def leads_to(pid: int, descriptor: int | None) -> str | None:
    """``pipe:[123]``, ``/dev/pts/3``, a path; None if it is closed or not known."""
    try:
        return None if descriptor is None else os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except OSError:
        return None


def refusal(pid: int, error: OSError) -> str:
    """Why the memory of a process may not be read, and by whom it may."""
    if isinstance(error, (FileNotFoundError, ProcessLookupError)):
        return "it has ended while it was read"
    if not isinstance(error, PermissionError):
        return f"its memory cannot be read: {error.strerror}"
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        owner = -1
    return denied(owner, os.getuid(), ptrace_scope(), may_trace(procfs.read(os.getpid(), "status")))


def ptrace_scope() -> int:
    """Yama's restriction; 0 without Yama."""
    try:
        with open(SCOPE, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0


def may_trace(status: bytes) -> bool:
    """Whether a text of /proc/<pid>/status has CAP_SYS_PTRACE among its effective capabilities."""
    found = re.search(rb"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return bool(found and int(found[1], 16) >> CAP_SYS_PTRACE & 1)


def denied(owner: int, user: int, scope: int, traces: bool) -> str:
    """The sentence for `user`, whom the kernel does not let read a process of `owner`.

    `scope` is Yama's, `traces` whether the user has CAP_SYS_PTRACE.
    """
    if user == 0:
        if not traces:
            return (
                "root has no CAP_SYS_PTRACE here, as in most containers; ask from the machine itself, or "
                "give the container that capability"
            )
        if scope >= 3:
            return (
                f"the kernel lets nobody read it (kernel.yama.ptrace_scope is {scope}, which only a reboot "
                "takes away); set it lower at boot"
            )
        return (
            "root has CAP_SYS_PTRACE here, but not over that process: it lies in a user namespace outside "
            "this one, or a security module (Landlock, AppArmor, SELinux) guards it; ask from the machine "
            "itself"
        )
    if owner != user:
        whom = name_of(owner)
        ask = "root" if whom == "root" else f"{whom} or as root"
        return f"it belongs to {whom}, and we are {name_of(user)}; ask as {ask}"
    if scope:
        return (
            f"the kernel lets only its parent or root read it (kernel.yama.ptrace_scope is {scope}); ask as "
            "root, or allow it with: sysctl kernel.yama.ptrace_scope=0"
        )
    return "it has rights of its own or hides its memory (PR_SET_DUMPABLE); ask as root"


def name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except (KeyError, OverflowError):
        return f"user {user}" if user >= 0 else "somebody else"
