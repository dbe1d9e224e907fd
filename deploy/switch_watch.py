"""Tells how a switch is getting on, as long as somebody listens.

Runs ON the host as a child of the connection, started by `deploy.switch.watch`. It only reads. One JSON
object a line on stdout: {"record": the whole record} at every change, {"missing": true} if there is none,
{"gone": true} once the job has died without an outcome, {} as a sign of life. Standard library only,
Python >= 3.9.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from typing import Any

from deploy import procfs

PAUSE = 0.05  # seconds between two looks
ALIVE = 2.0  # seconds between two signs of life


def watch(path: str, pid: int | None = None, patience: float = 0.0) -> None:
    """With a `pid` only a record of that job counts, and there is `patience` (seconds) for it to appear."""
    told, last = b"", time.monotonic()
    deadline = last + patience
    while True:
        data = read(path)
        value = {} if data is None else parsed(data)
        if data is None or (pid is not None and job_of(value) not in (pid, None)):
            if time.monotonic() >= deadline:
                return say({"missing": True})
        else:
            # Looked at after the record was read, and the record once more after that: a job that has just
            # ended has written its outcome by then.
            gone = value["outcome"] == "running" and not lives(value["job"])
            if gone:
                data = read(path) or data
                value = parsed(data)
            if data != told:
                say({"record": value})
                told, last = data, time.monotonic()
            if value["outcome"] != "running":
                return None
            if gone:
                return say({"gone": True})
        if time.monotonic() - last > ALIVE:
            say({})
            last = time.monotonic()
        ready, _, _ = select.select([0], [], [], PAUSE)
        if ready and not os.read(0, 4096):
            return None  # nobody listens any more


def say(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def parsed(data: bytes) -> dict[str, Any]:
    """The record; what is none is handed on as one that has ended, for the other side to refuse."""
    try:
        value = json.loads(data)
        return {**value, "outcome": value["outcome"], "job": value["job"]}
    except (ValueError, TypeError, KeyError):
        return {"outcome": "unreadable"}


def job_of(record: dict[str, Any]) -> Any:
    """The pid of the job that wrote a record; None if it does not tell."""
    job = record.get("job")
    return job.get("pid") if isinstance(job, dict) else None


def lives(job: dict[str, Any]) -> bool:
    """Whether the process that wrote the record is there: its pid, and since when, as pids are used again."""
    found = procfs.stat(job["pid"])
    return found is not None and found["start"] == job["start"] and found["state"] not in "ZX"
