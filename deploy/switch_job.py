"""The switch: from the old run of a name to the new one, as one job that nobody needs to watch.

Runs ON the host, detached: a session of its own, no terminal, no pipe to whoever started it. Each step is
recorded in a JSON file beside the run as it happens; `deploy.switch` starts the job and reads that file.
Standard library only, Python >= 3.9.

    python3 <directory of this tool> SPEC.json [--attached]

The specification (see `deploy.switch.start`) says which run to stop and what to start. One JSON object comes
on stdout, {"accepted": bool, "message": str}, once the job has the lock and nothing more can refuse it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from deploy import files, procfs
from deploy.switch_steps import Failed, Switch, wait
from trainer import status

LOCK_PATIENCE = 1.0  # seconds: a probe that looks at the lock holds it for a moment


class Refused(Exception):
    """The job cannot begin; nothing was changed."""


class Record:
    """The file that tells what the job did, rewritten whole at every change."""

    def __init__(self, path: str, spec: dict[str, Any]) -> None:
        self.path = path
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
        self.write()

    def write(self) -> None:
        status.write_json(self.path, self.value)

    def begin(self, name: str) -> None:
        step = {"name": name, "outcome": "running", "started": time.time(), "ended": None, "detail": ""}
        self.value["steps"].append(step)
        self.write()

    def end_step(self, outcome: str, detail: str) -> None:
        self.value["steps"][-1].update(outcome=outcome, detail=detail, ended=time.time())
        self.write()

    def end(self, outcome: str, failure: Failed | None = None) -> None:
        self.value.update(outcome=outcome, ended=time.time())
        if failure:
            self.value.update(reason=str(failure), last_lines=failure.last_lines, exit=failure.exit)
        self.write()


# -- before anything is touched ----------------------------------------------------------------------------


def claim(spec: dict[str, Any]) -> int:
    """Take the name's switch lock and check what can be checked. The lock's descriptor; raises Refused."""
    name = Path(spec["state_root"]) / "names" / spec["name"]
    os.makedirs(name, exist_ok=True)
    lock = os.open(name / "switch.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    if not wait(lambda: files.take(lock), LOCK_PATIENCE):
        other = files.words(lock)
        who = f"{other['what']} (by {other['by']})" if "what" in other and "by" in other else "switch"
        raise Refused(f"another {who} of {spec['name']} is under way")
    words = {
        "what": "switch" if spec["start"] else "stop",
        "run_path": spec["run_path"] or spec["old_run_path"],
        "by": spec["by"],
        "since": time.time(),
        "pid": os.getpid(),
    }
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps(words).encode(), 0)
    old = spec["old_run_path"]
    for run in status.list_runs(Path(spec["state_root"]) / "runs", spec["name"]):
        if run.alive() and not (old and os.path.samefile(run.path, old)):
            raise Refused(f"run {run.path.name} is in progress, which this switch was not planned for")
    if spec["start"]:
        check_start(spec, name)
    return lock


def check_start(spec: dict[str, Any], name: Path) -> None:
    """What the start needs must be there before the old run is touched."""
    start = spec["start"]
    if not Path(spec["run_path"], "run.json").is_file():
        raise Refused(f"{spec['run_path']} has no run.json")
    if not shutil.which(start["argv"][0], path=start["environment"].get("PATH")):
        raise Refused(f"there is no program {start['argv'][0]}")
    if not (name / "releases" / spec["release_id"]).is_dir():
        raise Refused(f"release {spec['release_id']} of {spec['name']} is not on this host")


# -- the job -----------------------------------------------------------------------------------------------


def perform(switch: Switch, record: Record) -> str:
    """Go through the steps; the outcome is recorded in any case."""
    try:
        for name, step in switch.steps():
            record.begin(name)
            outcome, detail = step()
            record.end_step(outcome, detail)
    except Exception as error:
        if not isinstance(error, Failed):
            traceback.print_exc()
            error = Failed(f"{type(error).__name__}: {error}")
        record.end_step("failed", str(error))
        record.end("failed", error)
    else:
        record.end("done")
    return record.value["outcome"]


def detach(errors: str) -> int:
    """Go on as a process that nothing of the caller reaches. Returns, in that process, where to answer.

    The caller's process writes that answer to stdout and ends. Two forks: the first for a session of our own,
    the second so that this session can never get a terminal.
    """
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        with os.fdopen(reader, "rb") as answer:
            sys.stdout.buffer.write(answer.read())
        sys.stdout.flush()
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    error = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for source, target in ((null, 0), (null, 1), (error, 2)):
        os.dup2(source, target)
    os.closerange(3, writer)
    os.closerange(writer + 1, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 1 << 16 else 1 << 16)
    os.chdir("/")
    os.umask(0o022)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # the run must not inherit what our caller ignored
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    return writer


def main() -> None:
    path = sys.argv[1]
    attached = "--attached" in sys.argv[2:]
    with open(path, encoding="utf-8") as file:
        spec = json.load(file)
    answer = os.dup(1) if attached else detach(str(Path(spec["record"]).with_suffix(".err")))
    try:
        try:
            lock = claim(spec)
            record = Record(spec["record"], spec)
            reply = {"accepted": True, "message": ""}
        except (Refused, OSError) as error:
            reply = {"accepted": False, "message": str(error)}
        os.write(answer, json.dumps(reply).encode())
    finally:
        os.close(answer)
    if not reply["accepted"]:
        sys.exit(1)
    # The lock is held until the new run lives. From then on its own lock says that it is there, and a run
    # that loads for minutes can be stopped meanwhile.
    switch = Switch(spec, started=lambda: os.close(lock))
    sys.exit(0 if perform(switch, record) == "done" else 1)
