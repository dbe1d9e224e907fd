"""Our side of the switch: start it on the host, watch it, re-attach to it.

The job itself (`deploy.switch_job`) needs neither: once it is accepted, this process, its terminal and the
connection may go away, and the switch goes on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from deploy import onhost, procfs
from deploy.errors import DeployError
from deploy.host import Host, HostError

JOB = ("trainer.status", "deploy.files", "deploy.procfs", "deploy.switch_steps", "deploy.switch_job")
POLL = 0.1  # seconds between two looks at the record
START_TIMEOUT = 15.0  # seconds; it takes well below one


@dataclass(frozen=True)
class Outcome:
    """How a switch ended: `word` is done or failed; the rest says why, for a failed one."""

    word: str
    reason: str | None = None
    last_lines: list[str] = field(default_factory=list)
    exit: dict[str, Any] | None = None  # exit.json of the new run, if it has ended
    steps: list[dict[str, Any]] = field(default_factory=list)


def record_path(spec: dict[str, Any]) -> str:
    """Where the switch of `spec` writes what it does: beside the new run, or, for a stop, beside the name."""
    if spec["start"]:
        return f"{spec['run_path']}/switch.json"
    return f"{spec['state_root']}/names/{spec['name']}/stop.json"


def start(host: Host, spec: dict[str, Any]) -> str:
    """Start the switch, detached, and return the path of its record once it was accepted.

    `spec` holds state_root, name, run_path (of the new run; its run.json is there already), release_id,
    old_run_path or None, grace_seconds, checkpoint_timeout_seconds, first_heartbeat_timeout_seconds, by,
    heartbeats (false for a command that sends none; default true) and start, which is ``{"argv",
    "environment", "working_directory"}``, or None to only stop the old run.

    Raises DeployError, and nothing has changed, if another switch of the name is under way, another run than
    the old one is in progress, or release, run.json or program are missing.
    """
    record = record_path(spec)
    tool = onhost.install(host, spec["state_root"], JOB)
    path = record.replace(".json", "-spec.json")
    whole = {"run_path": None, "release_id": None, **spec, "record": record}
    host.write(path, json.dumps(whole).encode("ascii"), mode=0o600, parents=True)
    result = host.run(onhost.command(host, tool, path), timeout=START_TIMEOUT)
    try:
        reply = json.loads(result.out)
    except ValueError:
        errors = (host.read(record.replace(".json", ".err")) or b"").decode(errors="replace").strip()
        last = errors.splitlines()[-1] if errors else "no output"
        raise HostError(f"{host.name}: the switch did not start: {last}") from None
    if not reply["accepted"]:
        raise DeployError(f"{host.name}: {reply['message']}; look at fab status, then try again")
    return record


def watch(host: Host, path: str, report: Callable[[dict[str, Any]], None]) -> Outcome:
    """Follow a switch to its end; `report` gets each step when it begins and when it ends.

    `path` is the record's, or the new run's directory. May be left and called again at any time: it starts
    with the first step each time. Raises DeployError if there is no record.
    """
    record = path if path.endswith(".json") else f"{path}/switch.json"
    seen: list[dict[str, Any]] = []
    while True:
        value = _read(host, record)
        # Looked at after the record was read, and the record once more after that: a job that has just
        # ended has written its outcome by then.
        gone = value["outcome"] == "running" and not _job_lives(host, value["job"])
        if gone:
            value = _read(host, record)
        for index, step in enumerate(value["steps"]):
            if index >= len(seen):
                report(step)
                seen.append(step)
            elif step != seen[index]:
                report(step)
                seen[index] = step
        if value["outcome"] != "running":
            return Outcome(
                value["outcome"], value["reason"], value["last_lines"], value["exit"], value["steps"]
            )
        if gone:
            during = f" during {value['steps'][-1]['name']}" if value["steps"] else ""
            reason = (
                f"the switch was interrupted{during}: its process is gone (killed, or the machine restarted)"
            )
            return Outcome("failed", reason, steps=value["steps"])
        time.sleep(POLL)


def _read(host: Host, record: str) -> dict[str, Any]:
    data = host.read(record)
    if data is None:
        raise DeployError(f"{host.name}: there is no {record}, so no switch to watch")
    try:
        value = json.loads(data)
        return {key: value[key] for key in ("steps", "outcome", "reason", "last_lines", "exit", "job")}
    except (ValueError, TypeError, KeyError):
        raise DeployError(f"{host.name}: {record} was not written by Drafthouse") from None


def _job_lives(host: Host, job: dict[str, Any]) -> bool:
    """Whether the process that wrote the record is there: its pid, and since when, as pids are used again."""
    found = procfs.parse(job["pid"], (host.read(f"/proc/{job['pid']}/stat") or b"").decode(errors="replace"))
    return found is not None and found["start"] == job["start"] and found["state"] not in "ZX"
