"""Where a process waits: for a lock, a socket and whose, a pipe, a file, its children. From /proc alone.

The system call it is in (/proc/PID/syscall) is only told to who may trace the process: root, and the same
user unless the machine forbids it. The kernel function (wchan) is told to more. Neither stops the process.
Runs ON the host, as a part of the probe. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from typing import Any

from deploy import procfs

MOST_DESCRIPTORS = 64  # of one poll or epoll are looked at
SHOWN = 3  # ... and told
# (x86_64, aarch64): name. Only calls in which a process waits.
CALLS = {
    (0, 63): "read", (1, 64): "write", (17, 67): "pread64", (18, 68): "pwrite64", (19, 65): "readv",
    (20, 66): "writev", (295, 69): "preadv", (296, 70): "pwritev", (40, 71): "sendfile", (275, 76): "splice",
    (45, 207): "recvfrom", (47, 212): "recvmsg", (299, 243): "recvmmsg", (44, 206): "sendto",
    (46, 211): "sendmsg", (42, 203): "connect", (43, 202): "accept", (288, 242): "accept4",
    (7, None): "poll", (271, 73): "ppoll", (23, None): "select", (270, 72): "pselect6",
    (232, None): "epoll_wait", (281, 22): "epoll_pwait", (441, 441): "epoll_pwait2",
    (202, 98): "futex", (449, 449): "futex_waitv", (73, 32): "flock", (72, 25): "fcntl",
    (65, 193): "semop", (220, 192): "semtimedop", (61, 260): "wait4", (247, 95): "waitid",
    (35, 101): "nanosleep", (230, 115): "clock_nanosleep", (34, None): "pause", (128, 137): "rt_sigtimedwait",
    (130, 133): "rt_sigsuspend", (219, 128): "restart_syscall", (74, 82): "fsync", (75, 83): "fdatasync",
    (257, 56): "openat", (2, None): "open", (4, None): "stat", (262, 79): "newfstatat", (332, 291): "statx",
    (16, 29): "ioctl", (231, 94): "exit_group", (60, 93): "exit",
    (9, 222): "mmap", (11, 215): "munmap", (28, 233): "madvise",
}  # fmt: skip
ON_DESCRIPTOR = frozenset((
    "read", "write", "pread64", "pwrite64", "readv", "writev", "preadv", "pwritev", "sendfile", "splice",
    "recvfrom", "recvmsg", "recvmmsg", "sendto", "sendmsg", "connect", "accept", "accept4", "flock", "fcntl",
    "fsync", "fdatasync", "ioctl",
))  # fmt: skip
KINDS = {
    "futex": "lock", "futex_waitv": "lock", "flock": "file lock", "semop": "lock", "semtimedop": "lock",
    "wait4": "child", "waitid": "child", "nanosleep": "sleep", "clock_nanosleep": "sleep", "pause": "sleep",
    "rt_sigtimedwait": "signal", "rt_sigsuspend": "signal", "exit_group": "exit", "exit": "exit",
    "poll": "events", "ppoll": "events", "select": "events", "pselect6": "events", "epoll_wait": "events",
    "epoll_pwait": "events", "epoll_pwait2": "events",
}  # fmt: skip
FUNCTIONS = (  # the beginning of a kernel function's name: what is waited for there
    ("futex", "lock"), ("pipe_", "pipe"), ("anon_pipe", "pipe"), ("do_wait", "child"),
    ("kernel_wait4", "child"), ("hrtimer_nanosleep", "sleep"), ("do_nanosleep", "sleep"),
    ("nfs", "network disk"), ("rpc_", "network disk"), ("cifs", "network disk"), ("fuse_", "network disk"),
    ("request_wait_answer", "network disk"),
    ("do_epoll", "events"), ("ep_poll", "events"), ("do_poll", "events"),
    ("poll_schedule", "events"), ("do_select", "events"), ("sk_wait", "socket"), ("tcp_", "socket"),
    ("inet_", "socket"), ("unix_", "socket"), ("skb_wait", "socket"), ("__skb_wait", "socket"),
    ("folio_wait", "disk"), ("io_schedule", "disk"), ("wait_on_page", "disk"), ("jbd2", "disk"),
    ("do_signal_stop", "halt"), ("flock", "file lock"), ("locks_", "file lock"), ("do_exit", "exit"),
)  # fmt: skip
PLACE = {"x86_64": 0, "aarch64": 1}.get(os.uname().machine)
NAMES = {pair[PLACE]: name for pair, name in CALLS.items()} if PLACE is not None else {}


class Waits:
    """Answers for one probe; what many processes share is read once."""

    def __init__(self) -> None:
        self._sockets: dict[str, dict[str, str]] = {}

    def of(self, pid: int, task: int | None = None) -> dict[str, Any] | None:
        """``{"call", "kind", "on"}`` of a process's main thread, or of its thread `task`.

        `kind` is one of KINDS and FUNCTIONS, "running", or None if it cannot be told; `on` are the ends of
        sockets or the names of files that it waits for. None if nothing at all can be read.
        """
        base = f"task/{task}/" if task else ""
        words = procfs.read(pid, f"{base}syscall").decode("ascii", "replace").split()
        function = procfs.read(pid, f"{base}wchan").decode("ascii", "replace").strip("0\n")
        known = next((kind for start, kind in FUNCTIONS if function.startswith(start)), None)
        if words[:1] == ["running"]:
            return {"call": None, "kind": "running", "on": []}
        if len(words) < 4 or words[0] == "-1":
            return {"call": None, "kind": known, "on": []} if known else None
        name = NAMES.get(int(words[0]))
        kind, on = KINDS.get(name or "", known), []
        try:
            first, second = int(words[1], 16), int(words[2], 16)
            if name in ON_DESCRIPTOR:
                found = self.behind(pid, first)
                kind, on = (kind if kind == "file lock" else found[0]), ([found[1]] if found[1] else [])
            elif kind == "events":
                kind, on = self.events(pid, str(name), first, second)
        except (OSError, ValueError, struct.error):
            pass
        if known == "network disk":
            kind = known
        return {"call": name, "kind": kind, "on": on}

    def threads(self, pid: int, most: int) -> tuple[list[dict[str, Any]], int]:
        """(where the other threads of a process wait, at most `most` of them; how many there are)."""
        try:
            tasks = [int(entry) for entry in os.listdir(f"/proc/{pid}/task") if entry != str(pid)]
        except OSError:
            return [], 0
        return [found for task in tasks[:most] if (found := self.of(pid, task))], len(tasks)

    def events(self, pid: int, name: str, first: int, second: int) -> tuple[str, list[str]]:
        """What a poll, select or epoll waits for: a socket or pipe if there is one among it."""
        if name.startswith("epoll"):
            text = procfs.read(pid, f"fdinfo/{first}").decode("ascii", "replace")
            numbers = [int(word) for word in re.findall(r"^tfd:\s*(\d+)", text, re.MULTILINE)]
        elif name.endswith("poll"):
            count = min(second, MOST_DESCRIPTORS)
            numbers = [one[0] for one in struct.iter_unpack("iHH", memory(pid, first, 8 * count))]
        else:
            size = min(first, 1024)
            numbers = bits(memory(pid, second, -(-size // 64) * 8), size) if second else []
        if not numbers:
            return "sleep" if name.endswith(("poll", "select", "pselect6")) else "events", []
        ends = [self.behind(pid, number) for number in numbers[:MOST_DESCRIPTORS] if number >= 0]
        for kind in ("socket", "pipe"):
            told = [on for found, on in ends if found == kind]
            if told:
                return kind, sorted({on for on in told if on})[:SHOWN]
        return "events", []

    def behind(self, pid: int, descriptor: int) -> tuple[str, str]:
        """(kind, name) of an open file; nothing is asked of the file itself, whose disk may hang."""
        link = os.readlink(f"/proc/{pid}/fd/{descriptor}")
        if link.startswith("socket:["):
            return "socket", self.sockets(pid).get(link[8:-1], "")
        if link.startswith("pipe:"):
            return "pipe", ""
        if link.startswith("/dev/nvidia"):
            return "device", link
        if link.startswith(("/dev/pts/", "/dev/tty")):
            return "terminal", link
        return ("file", link) if link.startswith("/") else ("events", "")

    def sockets(self, pid: int) -> dict[str, str]:
        """The other end of every socket in a process's network, by inode."""
        try:
            space = os.readlink(f"/proc/{pid}/ns/net")
        except OSError:
            space = str(pid)
        if space not in self._sockets:
            self._sockets[space] = sockets(pid)
        return self._sockets[space]


def sockets(pid: int) -> dict[str, str]:
    found = {}
    for name in ("tcp", "tcp6", "udp", "udp6"):
        for line in procfs.read(pid, f"net/{name}").decode("ascii", "replace").splitlines()[1:]:
            words = line.split()
            if len(words) > 9:
                listens = words[3] == "0A" and name.startswith("tcp")
                end = address(words[1] if listens else words[2])
                found[words[9]] = f"{'callers at ' if listens else ''}{end}"
    for line in procfs.read(pid, "net/unix").decode("utf-8", "replace").splitlines()[1:]:
        words = line.split(None, 7)
        if len(words) > 6:
            found[words[6]] = words[7].strip() if len(words) > 7 else "another process here"
    return found


def address(text: str) -> str:
    """``0100007F:7236`` as people write it: ``127.0.0.1:29238``."""
    host, _, port = text.partition(":")
    try:
        number = int(port, 16)
        raw = b"".join(
            struct.pack("=I", int(host[place : place + 8], 16)) for place in range(0, len(host), 8)
        )
        if len(raw) == 4:
            return f"{socket.inet_ntop(socket.AF_INET, raw)}:{number}"
        text = socket.inet_ntop(socket.AF_INET6, raw)
        return f"{text[7:]}:{number}" if text.startswith("::ffff:") else f"[{text}]:{number}"
    except (ValueError, OSError, struct.error):
        return ""


def memory(pid: int, address: int, count: int) -> bytes:
    """Bytes of another process's memory, which is not stopped. Raises OSError."""
    descriptor = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(descriptor, count, address)
    finally:
        os.close(descriptor)


def bits(data: bytes, size: int) -> list[int]:
    """The numbers in an fd_set."""
    return [number for number in range(min(size, 8 * len(data))) if data[number // 8] >> (number % 8) & 1]
