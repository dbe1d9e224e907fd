"""Our side of the switch: start it on the host, watch it, re-attach to it.

The job itself (`deploy.switch_job`) needs neither: once it is accepted, this process, its terminal and the
connection may go away, and the switch goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from deploy import onhost, stream
from deploy.errors import DeployError
from deploy.host import Host, HostError

JOB = "deploy.switch_job"
RECORD_PATIENCE = 15.0  # seconds from a switch's lock to its record: an engine may take its time to answer
START_TIMEOUT = 30.0  # seconds; below one, but for an engine that takes its time to answer


class NoRecord(DeployError):
    """There is no switch to watch, as it has left no record."""


@dataclass(frozen=True)
class Outcome:
    """How a switch ended: `word` is done or failed; the rest says why, for a failed one.

    It is running where it was not watched to its end.
    """

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
    heartbeats (false for a command that sends none; default true), settle_seconds (how long such a command
    has to live; default 0) and start, which is ``{"argv",
    "environment", "working_directory"}``, or None to only stop the old run.

    Raises DeployError, and nothing has changed, if another switch of the name is under way, another run than
    the old one is in progress, or release, run.json or program are missing.
    """
    record = record_path(spec)
    whole = {"run_path": None, "release_id": None, **spec, "record": record}
    # Program and specification come over stdin, so that a full disk keeps no run from being stopped.
    argv, program = onhost.script(host, JOB, "-")
    stdin = program + json.dumps(whole).encode("ascii")
    result = host.run(argv, timeout=START_TIMEOUT, input=stdin, check=False)
    try:
        reply = json.loads(result.out)
    except ValueError:
        errors = result.err or host.read(record.replace(".json", ".err")) or b""
        lines = errors.decode(errors="replace").strip().splitlines() or [f"exit code {result.code}"]
        raise HostError(f"{host.name}: the switch did not start: {lines[-1]}") from None
    if not reply["accepted"]:
        raise DeployError(f"{host.name}: {reply['message']}; look at fab status, then try again")
    accepted: str = reply.get("record", record)
    return accepted


def watch(
    host: Host,
    path: str,
    report: Callable[[dict[str, Any]], None],
    note: stream.Note = stream.to_stderr,
    *,
    pid: int | None = None,
    until: str | None = None,
) -> Outcome:
    """Follow a switch to its end; `report` gets each step when it begins and when it ends.

    With the `pid` of its job, from the words of its lock, a record of that job is waited for; one that is
    there may be older. With `until` it is left once the step of that name has gone well.

    `path` is the record's, or the new run's directory. May be left and called again at any time: it starts
    with the first step each time. A lost connection is made again. Raises NoRecord if there is none.
    """
    record = path if path.endswith(".json") else f"{path}/switch.json"
    job = () if pid is None else (pid, RECORD_PATIENCE)
    seen: list[dict[str, Any]] = []
    for said in stream.values(host, "deploy.switch_watch:watch", record, *job, note=note):
        if "missing" in said:
            raise NoRecord(f"{host.name}: there is no {record}, so no switch to watch")
        if "gone" in said:
            during = f" during {seen[-1]['name']}" if seen else ""
            reason = (
                f"the switch was interrupted{during}: its process is gone (killed, or the machine restarted)"
            )
            return Outcome("failed", reason, steps=seen)
        if "record" not in said:
            continue
        value = said["record"]
        try:
            outcome = Outcome(*(value[key] for key in ("outcome", "reason", "last_lines", "exit", "steps")))
        except KeyError:
            raise DeployError(f"{host.name}: {record} was not written by Drafthouse") from None
        for index, step in enumerate(outcome.steps):
            if index >= len(seen):
                report(step)
                seen.append(step)
            elif step != seen[index]:
                report(step)
                seen[index] = step
        left = any(step["name"] == until and step["outcome"] == "ok" for step in seen)
        if outcome.word != "running" or left:
            return outcome
    raise HostError(f"{host.name}: the switch could not be watched to its end; look at fab status")
