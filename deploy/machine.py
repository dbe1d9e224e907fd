"""What a machine is: programs, space, memory, and whether its container engine answers.

Runs ON the host as a part of the probe. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

ENGINE_TIMEOUT = 2.0  # seconds; an engine that is up answers in milliseconds
HANGS = f"does not answer within {ENGINE_TIMEOUT:g} s"
ENGINE_SOCKET = "/var/run/docker.sock"
PROGRAM_PATHS = ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # SSH logins lack some


def program(name: str) -> str | None:
    """Where a program is, also where an SSH login would not look."""
    return shutil.which(name, path=os.environ.get("PATH", "") + PROGRAM_PATHS)


def user_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's user without an entry in passwd
        return str(os.getuid())


def memory() -> dict[str, int | None]:
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return {"total": None, "available": None}
    values = {key: int(value) * 1024 for key, value in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    return {"total": values.get("MemTotal"), "available": values.get("MemAvailable")}


def directory(path: Path) -> dict[str, Any]:
    """Space and rights of a directory, or of what is there of it, where it would be made."""
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    result: dict[str, Any] = {"root": str(path), "exists": path.is_dir()}
    try:
        space = os.statvfs(there)
        result.update(free_bytes=space.f_bavail * space.f_frsize, total_bytes=space.f_blocks * space.f_frsize)
        result["owner_uid"] = there.stat().st_uid
    except OSError:
        result.update(free_bytes=None, total_bytes=None, owner_uid=None)
    result["writable"] = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    return result


def filesystem(path: Path) -> str | None:
    """The type of the file system that holds `path`."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    resolved = os.path.realpath(path)
    best, kind = "", None
    for line in mounts.splitlines():
        point = line.split(" ")[1].replace("\\040", " ")
        below = resolved == point or resolved.startswith(point.rstrip("/") + "/")
        if below and len(point) >= len(best):
            best, kind = point, line.split(" ")[2]
    return kind


def link(path: Path) -> str | None:
    """The last part of what a symlink points to."""
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return None


def tree_bytes(path: Path) -> int:
    """The size of all files below `path`."""
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    return total


# -- the container engine ----------------------------------------------------------------------------------


def engine() -> dict[str, Any]:
    """Ask the engine itself: an installed client proves nothing."""
    client = program("docker")
    version, error = ask_socket()
    compose = None
    if client and version is None and HANGS not in (error or ""):
        # Another context, or a DOCKER_HOST that is no socket: only the client knows where to ask.
        version, other = ask(client, "version", "--format", "{{.Server.Version}}")
        error = other or error
    if client and version:
        compose, error = ask(client, "compose", "version", "--short")
    return {
        "client": client,
        "answers": version is not None,
        "version": version,
        "compose": compose,
        "error": error,
    }


def ask_socket() -> tuple[str | None, str | None]:
    """(the engine's version, None) or (None, why not), through the engine's socket."""
    address = os.environ.get("DOCKER_HOST", f"unix://{ENGINE_SOCKET}")
    if not address.startswith("unix://"):
        return None, f"DOCKER_HOST is {address}"
    path = address[len("unix://") :]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ENGINE_TIMEOUT)
            connection.connect(path)
            connection.sendall(b"GET /version HTTP/1.0\r\nHost: engine\r\n\r\n")
            answer = b""
            while len(answer) < 1 << 20:
                chunk = connection.recv(65536)
                if not chunk:
                    break
                answer += chunk
        return str(json.loads(answer.partition(b"\r\n\r\n")[2])["Version"]), None
    except socket.timeout:  # noqa: UP041  (TimeoutError itself only since Python 3.10)
        return None, f"the engine at {path} {HANGS}"
    except OSError as error:
        return None, f"no engine at {path}: {error.strerror or error}"
    except (ValueError, KeyError, TypeError):
        return None, f"what answers at {path} is no Docker engine"


def ask(*argv: str) -> tuple[str | None, str | None]:
    """(first line of output, None) or (None, why not)."""
    try:
        result = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=ENGINE_TIMEOUT)
    except subprocess.TimeoutExpired:
        return None, f"{argv[0]} {argv[1]} {HANGS}"
    except OSError as error:
        return None, f"{argv[0]}: {error.strerror}"
    line = result.stdout.decode("utf-8", "replace").strip().partition("\n")[0]
    if result.returncode == 0 and line:
        return line, None
    words = result.stderr.decode("utf-8", "replace").strip().splitlines()
    return None, words[-1] if words else f"{argv[0]} {argv[1]} ended with {result.returncode}"
