"""The container engine, asked itself through its socket: quicker than its client, and it may be missing.

Every question has a deadline, since an engine that hangs must not hang us. Runs ON the host, as a part of the
probe and of the switch. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import re
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from deploy import procfs

TIMEOUT = 2.0  # seconds; an engine that is up answers in milliseconds
SOCKET = "/var/run/docker.sock"
PROJECT = "com.docker.compose.project"  # labels that Compose gives its containers
SERVICE = "com.docker.compose.service"
DIRECTORY = "com.docker.compose.project.working_dir"
ONE_OFF = "com.docker.compose.oneoff"  # True for those of `docker compose run`
OURS = "drafthouse-"  # what our projects' names begin with
VARIABLES = ("DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT", "DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY")
LONGEST_ANSWER = 16 << 20
OVER = ("created", "exited", "dead", "removing")  # what the engine calls containers without a process


class EngineError(Exception):
    """It did not do what was asked. `status` is the HTTP status of its answer, None if there was none."""

    def __init__(self, message: str, status: int | None = None, hangs: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.hangs = hangs


def variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What tells the client which engine it is to ask, and how."""
    return {name: environment[name] for name in VARIABLES if environment.get(name)}


def address(environment: Mapping[str, str] = os.environ) -> str:
    """Where the client would look for its engine: DOCKER_HOST, its context, or the default."""
    if environment.get("DOCKER_HOST"):
        return environment["DOCKER_HOST"]
    home = environment.get("HOME") or os.path.expanduser("~")
    settings = Path(environment.get("DOCKER_CONFIG") or os.path.join(home, ".docker"))
    context = environment.get("DOCKER_CONTEXT")
    try:
        context = context or json.loads((settings / "config.json").read_bytes()).get("currentContext")
        if context and context != "default":
            digest = hashlib.sha256(context.encode()).hexdigest()
            meta = json.loads((settings / "contexts" / "meta" / digest / "meta.json").read_bytes())
            return str(meta["Endpoints"]["docker"]["Host"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # settings that are not there or not the client's: then it has no context either
    return f"unix://{SOCKET}"


def absent(where: str) -> bool:
    """Whether `where` is a socket of this machine that is not there, so that no engine can answer."""
    return where.startswith("unix://") and not os.path.exists(where[len("unix://") :])


class Engine:
    """One engine, at an address like ``unix:///var/run/docker.sock``."""

    def __init__(self, where: str | None = None, timeout: float = TIMEOUT) -> None:
        self.address = where or address()
        self.timeout = timeout

    def get(self, path: str, **parameters: Any) -> Any:
        """What it answers to a GET, from its JSON. Raises EngineError."""
        return self.call("GET", path, **parameters)

    def call(self, method: str, path: str, **parameters: Any) -> Any:
        """One request; dictionaries and lists among the parameters go as JSON. Raises EngineError."""
        texts = (
            (key, value if isinstance(value, str) else json.dumps(value)) for key, value in parameters.items()
        )
        query = "&".join(f"{key}={quote(text, safe='')}" for key, text in texts)
        # HTTP/1.0: the answer comes in one piece and ends with the connection.
        head, _, body = self._exchange(f"{method} {path}{'?' if query else ''}{query}").partition(b"\r\n\r\n")
        found = re.match(rb"HTTP/1\.[01] (\d{3})", head)
        if not found:
            raise EngineError(f"what answers at {self._path()} is no Docker engine")
        status = int(found[1])
        try:
            value = json.loads(body) if body.strip() else None
        except ValueError:
            if status == 200:
                if path == "/_ping":
                    return body.decode("ascii", "replace")
                raise EngineError(f"what answers at {self._path()} is no Docker engine") from None
            value = None
        if status >= 400:
            said = value.get("message") if isinstance(value, dict) else None
            raise EngineError(str(said or f"the engine answers {status} to {method} {path}"), status)
        return value

    def _path(self) -> str:
        if not self.address.startswith("unix://"):
            raise EngineError(f"DOCKER_HOST is {self.address}, which is no unix socket of this machine")
        return self.address[len("unix://") :]

    def _connect(self) -> socket.socket:
        path = self._path()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(self.timeout)
            connection.connect(path)
        except socket.timeout:  # noqa: UP041  (TimeoutError itself only since Python 3.10)
            connection.close()
            raise self._hangs() from None
        except OSError as error:
            connection.close()
            raise EngineError(f"no engine at {path}: {error.strerror or error}") from error
        return connection

    def _exchange(self, request: str) -> bytes:
        deadline = time.monotonic() + self.timeout
        with self._connect() as connection:
            try:
                head = f"{request} HTTP/1.0\r\nHost: engine\r\nContent-Length: 0\r\n\r\n"
                connection.sendall(head.encode())
                answer = b""
                while len(answer) < LONGEST_ANSWER:
                    connection.settimeout(max(deadline - time.monotonic(), 0.001))
                    chunk = connection.recv(65536)
                    if not chunk:
                        break
                    answer += chunk
            except socket.timeout:  # noqa: UP041
                raise self._hangs() from None
            except OSError as error:
                raise EngineError(f"no engine at {self._path()}: {error.strerror or error}") from error
        return answer

    def _hangs(self) -> EngineError:
        return EngineError(
            f"the engine at {self._path()} does not answer within {self.timeout:g} s", hangs=True
        )

    # -- what we ask ---------------------------------------------------------------------------------------

    def ping(self) -> None:
        """Raises EngineError unless it answers and we may use it."""
        self.get("/_ping")

    def containers(self, project: str | None = None, service: str | None = None) -> list[dict[str, Any]]:
        """Containers, also those that have ended, newest first; of one Compose project, or all of ours."""
        labels = [f"{PROJECT}={project}" if project else PROJECT, f"{ONE_OFF}=False"]
        if service:
            labels.append(f"{SERVICE}={service}")
        found = self.get("/containers/json", all="true", filters={"label": labels})
        rows = [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []
        if project is None:
            rows = [
                item for item in rows if str((item.get("Labels") or {}).get(PROJECT, "")).startswith(OURS)
            ]
        return sorted(rows, key=lambda item: item.get("Created") or 0, reverse=True)

    def inspect(self, container: str) -> dict[str, Any]:
        """The state of a container, as `state` gives it. Raises EngineError; its status is 404 for none."""
        return state(self.get(f"/containers/{quote(container, safe='')}/json"))

    def image(self, reference: str) -> dict[str, Any]:
        found = self.get(f"/images/{quote(reference, safe='/:@')}/json")
        return found if isinstance(found, dict) else {}

    def kill(self, container: str, signal: str) -> bool:
        """Send a signal to the container's first process; False if that, or the container, is gone.

        One that is paused is let go on, since it could not act on a signal.
        """
        path = f"/containers/{quote(container, safe='')}"
        for attempt in (1, 2):
            try:
                self.call("POST", f"{path}/kill", signal=signal)
                return True
            except EngineError as error:
                if error.status not in (404, 409):
                    raise
                if attempt == 2 or "paused" not in str(error):
                    break
            self.call("POST", f"{path}/unpause")
        return False

    def logs(self, container: str, lines: int = 20) -> list[str]:
        """The last lines of what the container's first process printed to both of its outputs."""
        request = f"/containers/{quote(container, safe='')}/logs?stdout=1&stderr=1&tail={lines}"
        answer = self._exchange(f"GET {request}")
        head, _, body = answer.partition(b"\r\n\r\n")
        text = b""
        while b" 200 " in head[:16] and len(body) >= 8:  # frames: which output, three zeros, a length
            size = int.from_bytes(body[4:8], "big")
            text += body[8 : 8 + size]
            body = body[8 + size :]
        return text.decode("utf-8", "replace").splitlines()[-lines:]

    def started(self) -> float | None:
        """When the engine's process began, Unix time in seconds; None where it cannot be told.

        The socket says who listens. That is systemd where it made the socket, and then the pid file knows.
        """
        pids = []
        try:
            with self._connect() as connection:
                size = struct.calcsize("3i")
                peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
            pids.append(struct.unpack("3i", peer)[0])
        except (EngineError, OSError):
            pass
        with contextlib.suppress(OSError, ValueError):
            pids.append(int(Path("/var/run/docker.pid").read_text(encoding="ascii")))
        booted = procfs.boot_time()
        for pid in pids:
            process = procfs.stat(pid)
            if process and booted and procfs.read(pid, "comm").strip() == b"dockerd":
                return booted + process["start"] / os.sysconf("SC_CLK_TCK")
        return None


def state(value: Any) -> dict[str, Any]:
    """What we keep of a container's inspection; what it does not say is None.

    id name image image_id labels status running paused pid exit_code oom_killed error started finished
    """
    value = value if isinstance(value, dict) else {}
    told = value["State"] if isinstance(value.get("State"), dict) else {}
    config = value["Config"] if isinstance(value.get("Config"), dict) else {}
    running = bool(told.get("Running"))
    return {
        "id": value.get("Id"),
        "name": str(value.get("Name") or "").lstrip("/") or None,
        "image": config.get("Image"),
        "image_id": value.get("Image"),
        "labels": config.get("Labels") or {},
        "status": told.get("Status"),
        "running": running,
        "paused": bool(told.get("Paused")),
        "pid": told.get("Pid") or None,
        "exit_code": None if running or told.get("Status") == "created" else told.get("ExitCode"),
        "oom_killed": bool(told.get("OOMKilled")),
        "error": told.get("Error") or None,
        "started": moment(told.get("StartedAt")),
        "finished": None if running else moment(told.get("FinishedAt")),
    }


def moment(text: Any) -> float | None:
    """Unix time of ``2026-11-30T00:55:01.123456789Z``; None for the year 1, which stands for never."""
    found = re.match(r"((\d{4})-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)$", str(text))
    if not found or found[2] == "0001":
        return None
    zone = found[4]
    shift = 0 if zone == "Z" else (int(zone[1:3]) * 60 + int(zone[4:])) * (60 if zone[0] == "+" else -60)
    try:
        whole = datetime.datetime.fromisoformat(found[1]) - datetime.datetime(1970, 1, 1)
    except ValueError:
        return None
    return whole.total_seconds() - shift + float(found[3] or 0)


def end_words(container: dict[str, Any]) -> str:
    """How a container ended, for people: ``exit code 137, out of memory``."""
    parts = []
    if container.get("oom_killed"):
        parts.append("out of memory (the container's memory limit)")
    if container.get("exit_code") is not None:
        parts.append(f"exit code {container['exit_code']}")
    if container.get("error"):
        parts.append(str(container["error"]))
    return ", ".join(parts) or f"it is {container.get('status') or 'gone'}"
