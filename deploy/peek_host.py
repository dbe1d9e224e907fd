"""What processes have printed but not written, and what says why. Runs ON the host, through `deploy.onhost`.

Nothing is stopped, and nothing is written into any process. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import base64
import os
import pwd
import time
from collections.abc import Iterable
from typing import Any

from deploy import procfs
from deploy.peek_memory import Memory, Unreadable
from deploy.peek_python import NotPython, Python, Unknown

SCOPE = "/proc/sys/kernel/yama/ptrace_scope"


def look(pids: Iterable[int]) -> list[dict[str, Any]]:
    """One object per process, in that order:

    {pid nspid command [words] version: "3.11.7" or null, variables {PYTHON*: value}, waits: its wait channel,
    streams: see `peek_python.Python.streams`, with `leads_to` (what the descriptor is open to) and `held` in
    base64; confirmed, refused: null or a sentence that begins with a small letter, python: whether it is one
    (null: unknown), seconds}
    """
    return [one(pid) for pid in pids]


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
    with Memory(pid) as memory:
        if not memory.mappings:
            raise NotPython("it has no memory of its own: a part of the kernel, or ending")
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
        with open(SCOPE, encoding="ascii") as file:
            scope = int(file.read())
    except FileNotFoundError:
        scope = 0
    except (OSError, ValueError):
        owner, scope = -1, 0
    return denied(owner, os.getuid(), scope)


def denied(owner: int, user: int, scope: int) -> str:
    """The sentence for `user`, whom the kernel does not let read a process of `owner`; scope: Yama's."""
    if user == 0:
        return (
            "root may not read it here: this login is in a container without CAP_SYS_PTRACE, or the kernel "
            "forbids it (ptrace_scope 3, lockdown); ask from the machine itself"
        )
    if owner != user:
        return (
            f"it belongs to {name_of(owner)}, and we are {name_of(user)}; ask as {name_of(owner)} or as root"
        )
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
