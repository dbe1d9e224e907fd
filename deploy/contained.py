"""A run in a container, on the host's side: its container.json, its signals, its end.

The run's lock says whether it lives, in a container or not. The engine is asked for what only it knows, and a
signal reaches the run also while the engine hangs. Runs ON the host, as a part of the switch. Standard
library only, Python >= 3.9.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from deploy import engine, procfs
from trainer import status

FILE = "container.json"
START_TIMEOUT = 120.0  # seconds for `docker compose up`, which starts but does not build or pull
ASK_AGAIN = 0.2  # seconds between two questions to the engine about the same container
TELLING = re.compile(r"error|cannot|denied|no such|not found|failed|unknown|invalid", re.IGNORECASE)
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Container:
    """The container of one run."""

    def __init__(self, run: status.RunDir, kept: dict[str, Any]) -> None:
        self.run = run
        self.kept = kept
        self.id = str(kept.get("id"))
        self.engine = engine.Engine(kept.get("engine"), timeout=5.0)
        self._asked = 0.0
        self._state: dict[str, Any] | None = None

    def words(self) -> str:
        return f"container {self.kept.get('name')} ({self.id[:12]})"

    def state(self, fresh: bool = False) -> dict[str, Any] | None:
        """What the engine says of it; None if the engine does not say. One that is gone is not running."""
        if fresh or time.monotonic() - self._asked > ASK_AGAIN:
            try:
                self._state = self.engine.inspect(self.id)
            except engine.EngineError as error:
                gone = {"running": False, "status": "gone", "error": "the container was removed"}
                self._state = gone if error.status == 404 else None
            self._asked = time.monotonic()
        return self._state

    def running(self) -> bool | None:
        """Whether any process of it is left; None if that cannot be told."""
        now = self.state(fresh=True)
        return None if now is None else bool(now["running"])

    def signal(self, number: signal.Signals) -> str:
        """Send a signal to its first process, tini; who sent it, in words. Raises OSError.

        If the engine does not do it, launch, which holds the run's lock, gets it directly.
        """
        try:
            if self.engine.kill(self.id, number.name) or not self.run.alive():
                return number.name
            why = "the engine has no such container"
        except engine.EngineError as error:
            why = str(error)
        pid = procfs.holding(str(self.run.lock), procfs.processes())
        if pid is None:
            if self.run.alive():
                raise PermissionError(0, f"{self.words()} cannot be signalled: {why}")
            return number.name
        os.kill(pid, number)
        return f"{number.name} (to pid {pid} itself: {why})"

    def end_words(self) -> str:
        """How it ended, for people; empty while it has not, or if the engine does not say."""
        now = self.state()
        return "" if now is None or now["running"] else engine.end_words(now)

    def last_lines(self) -> list[str]:
        """What it printed last, for one that ended before it had a log of its own."""
        try:
            return [line for line in self.engine.logs(self.id) if line.strip()]
        except engine.EngineError:
            return []


def of(run: status.RunDir) -> Container | None:
    """The container that a run was started in; None for a run without one."""
    try:
        kept = status.read_json(run.path / FILE)
    except (ValueError, OSError):
        return None
    return Container(run, kept) if isinstance(kept, dict) and kept.get("id") else None


def up(run: status.RunDir, start: dict[str, Any]) -> tuple[Container | None, str, list[str]]:
    """Run the start's command (`docker compose up -d …`) to its end.

    Returns the container that it made, if any, which is then in container.json; why it failed, or an empty
    text; and what the command said last.
    """
    project, service = start["container"]["project"], start["container"]["service"]
    one = engine.Engine(engine.address(start["environment"]), timeout=5.0)
    before = _newest(one, project, service)
    problem, said = _command(run, start)
    found = _newest(one, project, service)
    if found is None or (before is not None and before["Id"] == found["Id"]):
        return None, problem or f"{start['argv'][0]} left no container of {project}", said
    kept = {
        "id": found["Id"],
        "name": str((found.get("Names") or ["?"])[0]).lstrip("/"),
        "image": found.get("Image"),
        "image_id": found.get("ImageID"),
        "project": project,
        "service": service,
        "engine": one.address,
        "time": time.time(),
    }
    status.write_json(run.path / FILE, kept)
    return Container(run, kept), problem, said


def _command(run: status.RunDir, start: dict[str, Any]) -> tuple[str, list[str]]:
    """(why the command failed, or an empty text; its last lines)."""
    errors = run.path / "launch.err"
    with open(errors, "ab") as stream:
        try:
            process = subprocess.Popen(
                start["argv"],
                env=start["environment"],
                cwd=start["working_directory"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stream,
                start_new_session=True,
            )
        except OSError as error:
            return f"{start['argv'][0]} cannot be started: {error.strerror}", []
        try:
            code = process.wait(start.get("timeout_seconds", START_TIMEOUT))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            seconds = start.get("timeout_seconds", START_TIMEOUT)
            return f"the engine did not start the container within {seconds:g} s", _last(errors)
    said = _last(errors)
    if code == 0:
        return "", said
    telling = [line for line in said if TELLING.search(line)] or said  # (a hint how to get help may follow)
    last = telling[-1] if telling else f"{' '.join(start['argv'][:2])} ended with exit code {code}"
    return f"the container was not started: {last}", said


def _last(path: Path) -> list[str]:
    """The last lines of a file, as people read them."""
    try:
        text = path.read_bytes()[-16384:].decode("utf-8", "replace")
    except OSError:
        return []
    lines = (ANSI.sub("", line).strip() for line in re.split(r"[\r\n]+", text))
    return [line for line in lines if line][-10:]


def _newest(one: engine.Engine, project: str, service: str) -> dict[str, Any] | None:
    """The newest container of the service, by the engine's listing; None for none, or without an answer."""
    try:
        rows = one.containers(project, service)
    except engine.EngineError:
        return None
    return rows[0] if rows else None
