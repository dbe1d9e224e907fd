"""The record of a switch: what it did, for those who watch it, and for later.

Runs ON the host as a part of `deploy.switch_job`. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from pathlib import Path
from typing import Any

from deploy import procfs
from deploy.switch_steps import Failed
from trainer import status

FULL = (errno.ENOSPC, errno.EDQUOT)
SPARE = "/dev/shm"  # where the record of a stop goes if the disk is full
ROOM_BYTES = 64 << 10  # kept beside the record, so that its end can be written on a disk that is full by then


class Record:
    """The file that tells what the job did, rewritten whole at every change."""

    def __init__(self, path: str, spec: dict[str, Any]) -> None:
        self.path = path
        self.optional = not spec["start"]  # a full disk must not keep a run from being stopped
        own = procfs.stat(os.getpid()) or {}
        self.value: dict[str, Any] = {
            "schema": status.SCHEMA,
            "name": spec["name"],
            "run_path": spec["run_path"],
            "old_run_path": spec["old_run_path"],
            "by": spec["by"],
            "job": {"pid": os.getpid(), "start": own.get("start")},
            "started": time.time(),
            "ended": None,
            "outcome": "running",
            "reason": None,
            "last_lines": [],
            "exit": None,
            "steps": [],
        }
        try:
            status.write_json(self.path, self.value)
        except OSError as error:
            if not self.optional or error.errno not in FULL:
                raise
            self.path = f"{SPARE}/.drafthouse-{os.getuid()}-{spec['name']}-stop.json"
            self.write()
        self.room = Path(path).with_name(f".{os.path.basename(path)}.room")
        if self.path == path:
            with contextlib.suppress(OSError):
                self.room.write_bytes(os.urandom(ROOM_BYTES))  # (which no file system can store as less)

    def write(self) -> None:
        try:
            status.write_json(self.path, self.value)
        except OSError as error:
            # What was done counts; that a full disk does not take the words is no reason to stop half-way.
            if error.errno not in FULL:
                raise

    def begin(self, name: str) -> None:
        step = {"name": name, "outcome": "running", "started": time.time(), "ended": None, "detail": ""}
        self.value["steps"].append(step)
        self.write()

    def end_step(self, outcome: str, detail: str) -> None:
        self.value["steps"][-1].update(outcome=outcome, detail=detail, ended=time.time())
        self.write()

    def end(self, outcome: str, failure: Failed | None = None, more: str = "") -> None:
        self.value.update(outcome=outcome, ended=time.time())
        if failure:
            reason = f"{failure}; {more}" if more else str(failure)
            self.value.update(reason=reason, last_lines=failure.last_lines, exit=failure.exit)
        try:
            status.write_json(self.path, self.value)
        except OSError as error:
            if error.errno not in FULL:
                raise
            with contextlib.suppress(OSError):
                self.write_into_room()
        with contextlib.suppress(OSError):
            self.room.unlink()

    def write_into_room(self) -> None:
        """Over the bytes of a file that is there, whose room nobody else can take meanwhile."""
        data = json.dumps(self.value, ensure_ascii=False).encode("utf-8", "replace")
        if len(data) > self.room.stat().st_size:
            data = json.dumps({**self.value, "last_lines": [], "exit": None}).encode()
        with open(self.room, "r+b") as file:
            file.write(data)
            file.truncate()
        os.chmod(self.room, 0o644)
        os.replace(self.room, self.path)
