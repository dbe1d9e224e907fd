"""A run in a container, on the host's side: its container.json, its signals, its end.

The run's lock says whether it lives, in a container or not. The engine is asked for what only it knows, and a
signal reaches the run also while the engine hangs. Runs ON the host, as a part of the switch. Standard
library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy import contained_pct, engine, procfs
from trainer import status

FILE = "container.json"
START_TIMEOUT = 120.0  # seconds for `docker compose up`, which starts but does not build or pull
NAME_TIMEOUT = 60.0  # seconds until the engine has said which containers there are; a busy one takes long
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


def of(run: status.RunDir) -> Container | contained_pct.PctContainer | None:
    """The container that a run was started in; None for a run without one."""
    try:
        kept = status.read_json(run.path / FILE)
    except (ValueError, OSError):
        return None
    if not isinstance(kept, dict) or not kept.get("id"):
        return None
    if kept.get("kind") == contained_pct.KIND:
        return contained_pct.PctContainer(run, kept)
    return Container(run, kept)


def is_pct(start: Mapping[str, Any]) -> bool:
    """Whether what is to be started is a Proxmox container."""
    return "vmid" in (start.get("container") or {})


def made_here(labels: Any, state_root: str | Path) -> bool:
    """Whether Compose made a container from a file below this state root; our locks know of no other."""
    names = os.path.realpath(os.path.join(state_root, "names"))
    where = str((labels or {}).get(engine.DIRECTORY) or "/")
    return os.path.realpath(where).startswith(names + os.sep)


def foreign(rows: list[dict[str, Any]], project: str, state_root: str | Path) -> str:
    """A running container that `docker compose up` would replace although it is none of this state root's.

    A project is known by its name alone: another user's deploy, or a demo that somebody began by hand, may
    have the same. `rows` are the project's. A sentence with its remedy; empty if there is none.
    """
    for row in rows:
        labels = row.get("Labels") or {}
        if row.get("State") not in engine.OVER and not made_here(labels, state_root):
            name = str((row.get("Names") or ["?"])[0]).lstrip("/")
            return (
                f"container {name} ({str(row.get('Id'))[:12]}) of the project {project} runs on this engine, "
                f"but was started from {labels.get(engine.DIRECTORY) or 'elsewhere'} and would be ended "
                f"without a checkpoint: stop it with docker compose -p {project} stop, or take another --name"
            )
    return ""


def up(
    run: status.RunDir, start: dict[str, Any]
) -> tuple[Container | contained_pct.PctContainer | None, str, list[str]]:
    """Run the start's command (`docker compose up -d …`, `pct start …`) to its end.

    Returns the container that it made, if any, which is then in container.json; why it failed, or an empty
    text; and what the command said last. That the engine does not answer at once is no failure.
    """
    if is_pct(start):
        return contained_pct.up(run, start)
    project, service = start["container"]["project"], start["container"]["service"]
    one = engine.Engine(engine.address(start["environment"]), timeout=5.0)
    seconds = start.get("name_timeout_seconds", NAME_TIMEOUT)
    try:
        rows = _rows(one, project, seconds)
    except engine.EngineError as error:
        return None, f"the container was not started: {error}", []
    before = _newest(rows, service)
    other = foreign(rows, project, run.path.parent.parent)  # one that began since the switch was accepted
    if other:
        return None, f"the container was not started: {other}", []
    problem, said = _command(run, start)
    try:
        found = _newest(_rows(one, project, seconds), service)
    except engine.EngineError as error:
        return None, problem or f"a container was started, but the engine does not say which: {error}", said
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
    with contextlib.suppress(OSError):  # a full disk: without the file, the run's lock tells its process
        status.write_json(run.path / FILE, kept)
    return Container(run, kept), problem, said


def _command(run: status.RunDir, start: dict[str, Any]) -> tuple[str, list[str]]:
    """(why the command failed, or an empty text; its last lines)."""
    errors = run.path / "launch.err"
    with open(errors, "ab") as stream:
        try:
            process = procfs.begin(start, stream)
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


def _rows(one: engine.Engine, project: str, seconds: float) -> list[dict[str, Any]]:
    """The containers of a project, newest first. Raises EngineError without an answer in time."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return one.containers(project)
        except engine.EngineError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(ASK_AGAIN)


def _newest(rows: list[dict[str, Any]], service: str) -> dict[str, Any] | None:
    return next((row for row in rows if (row.get("Labels") or {}).get(engine.SERVICE) == service), None)
