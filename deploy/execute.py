"""Carrying a plan out. Thin: the plan has decided; here it happens, in an order that a failure cannot hurt.

Everything is made ready while the old run goes on. Only the last step, the switch, ends it, and the switch
runs on the host by itself, so that losing this process, its terminal or the connection changes nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy import evidence, lock, release, secrets, switch, weights
from deploy.errors import DeployError
from deploy.host import Host, HostError
from deploy.lock import Patience
from deploy.plan import Plan, seen
from deploy.release import Release
from deploy.runtimes import process
from deploy.settings import RunSettings, SecretSource
from trainer import status

CHECK_TIMEOUT = 120.0  # seconds; it takes below one, but a disk may be asleep
INSTALL_TIMEOUT = 300.0  # seconds, for each call of apt-get
FIRST_HEARTBEAT_TIMEOUT = 600.0  # seconds, for a release that is started again as it was

Report = Callable[[str], None]


@dataclass(frozen=True)
class Work:
    """What a plan needs besides itself: the files, and run.json as it will be but for its id."""

    run: status.Run
    python: str
    release: Release | None = None  # None: it is on the host already, and is not looked at
    secrets: Mapping[str, SecretSource] = dataclasses.field(default_factory=dict)
    root: Path = Path()
    first_heartbeat_timeout_seconds: float = FIRST_HEARTBEAT_TIMEOUT
    heartbeats: bool = True
    secrets_from: str | None = None  # a file on the host that is copied instead of `secrets`, for --same


def run_of(
    plan: Plan, new: Release, settings: RunSettings, environment: Mapping[str, str], cwd: str | None
) -> status.Run:
    """run.json for a plan, pure. The run's number is not known before its directory is made."""
    return status.Run(
        run_id="",
        name=plan.name,
        command=list(new.command),
        runtime=plan.runtime,
        release={"id": new.id, "digest": new.digest},
        git=dict(new.git),
        image=plan.image,
        user=plan.user,
        devices=None if plan.devices is None else list(plan.devices),
        environment=dict(environment),
        secrets=sorted(settings.secrets),
        run_file=plan.run_file,
        changes=dict(plan.changes),
        working_directory=cwd,
        grace_seconds=settings.grace_seconds,
        restart_attempts=settings.restart.attempts,
        restart_minutes=settings.restart.minutes,
        segment_bytes=settings.log.segment_megabytes << 20,
        segments=settings.log.segments,
    )


def start(
    plan: Plan, host: Host, work: Work, report: Report, lock_wait: Patience = lock.NONE
) -> tuple[str, str]:
    """Do what a plan of `deploy` or `restart` says, up to the switch's acceptance.

    Returns the new run's directory and the switch's record, which `switch.watch` follows. Raises DeployError;
    then the run in progress, if any, was not touched.
    """
    layout = plan.layout
    with lock.hold(host, layout.state, plan.name, plan.task, lock_wait.left, waiting=report) as held:
        if plan.install:
            install(host, plan.install, report)
        facts = evidence.collect(host, layout.state, layout.shm, sample=0)
        _still(plan, facts)
        if plan.weights is not None:
            held.check()
            weights.stage(plan.weights, report)
        held.check()
        if work.release is None:
            release.refuse_changed(facts, host.name, plan.name, str(plan.release))
        else:
            done = release.write(host, layout, work.release)
            report(f"release {work.release.id} {done}")
        host.run(["mkdir", "-p", "--", layout.checkpoints, layout.cache], timeout=20)
        values = _secrets(host, work)
        held.check()
        run_path, run = _new_run(host, layout, work.run, values)
        try:
            begin = process.start_spec(
                run, facts, layout.release(str(plan.release)), run_path=run_path, python=work.python
            )
            if work.heartbeats:
                check_config(host, run, begin["environment"])
            spec = {
                "state_root": layout.state,
                "name": plan.name,
                "run_path": run_path,
                "release_id": plan.release,
                "old_run_path": plan.stop.path if plan.stop else None,
                "grace_seconds": plan.stop.grace_seconds if plan.stop else 0,
                "checkpoint_timeout_seconds": plan.stop.checkpoint_timeout_seconds if plan.stop else 0,
                "first_heartbeat_timeout_seconds": work.first_heartbeat_timeout_seconds,
                "heartbeats": work.heartbeats,
                "by": lock.who(),
                "start": begin,
            }
            record = switch.start(host, spec)
        except HostError:  # perhaps it did start: then the directory is the run's
            raise
        except DeployError:  # refused
            with contextlib.suppress(OSError):
                shutil.rmtree(run_path)
            if run.secrets_file:
                _remove(host, [run.secrets_file], report)
            raise
        # Only now: had another switch been under way, the run that it starts would have needed its file.
        _remove(host, secrets.over(facts, plan.name), report)
        return run_path, record


def check_config(host: Host, run: status.Run, environment: Mapping[str, str]) -> None:
    """Let the trainer look at its settings, target, data and newest checkpoint, while the old run goes on.

    It reads small files only and does not import torch. Raises DeployError with its sentence.
    """
    env = {**environment, **run.environment}
    result = host.run([*run.command, "--check-config"], timeout=CHECK_TIMEOUT, env=env, check=False)
    if result.code:
        lines = result.err.decode(errors="replace").strip().splitlines() or [f"exit code {result.code}"]
        raise DeployError(f"the trainer refuses its settings: {lines[-1].removeprefix('error: ')}")


def stop(plan: Plan, host: Host, report: Report, lock_wait: Patience = lock.NONE) -> str:
    """Start a switch that only stops, and return its record. Raises DeployError; then nothing was touched."""
    layout = plan.layout
    assert plan.stop is not None
    with lock.hold(host, layout.state, plan.name, plan.task, lock_wait.left, waiting=report):
        _still(plan, evidence.collect(host, layout.state, layout.shm, sample=0))
        spec = {
            "state_root": layout.state,
            "name": plan.name,
            "old_run_path": plan.stop.path,
            "grace_seconds": plan.stop.grace_seconds,
            "checkpoint_timeout_seconds": plan.stop.checkpoint_timeout_seconds,
            "by": lock.who(),
            "start": None,
        }
        return switch.start(host, spec)


def ended(host: Host, run_path: str) -> dict[str, Any] | None:
    """exit.json of a run that is over already, like a command that fails at once."""
    data = host.read(f"{run_path}/exit.json")
    return json.loads(data) if data else None


def install(host: Host, argv: tuple[str, ...], report: Report) -> None:
    """Install tini. This never fails a deploy: without tini, launch is the subreaper."""
    report(f"installing tini: {' '.join(argv)}")
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = host.run(argv, timeout=INSTALL_TIMEOUT, env=quiet, check=False)
        if done.code:  # a fresh machine has no package lists
            host.run([argv[0], "update"], timeout=INSTALL_TIMEOUT, env=quiet)
            host.run(argv, timeout=INSTALL_TIMEOUT, env=quiet)
    except DeployError as error:
        report(f"tini was not installed ({error}); going on without it, launch is the subreaper")


def _still(plan: Plan, facts: Mapping[str, Any]) -> None:
    """Between the plan that was shown and the lock somebody else may have deployed."""
    if seen(facts, plan.name) != plan.seen:
        raise DeployError(
            f"{plan.name} on {plan.host} has changed since the plan was made (another deploy, or its run "
            "ended); nothing was done, look at fab status and try again"
        )


def _secrets(host: Host, work: Work) -> bytes | None:
    """What the run's secrets file will hold; None for a run without secrets."""
    if work.secrets_from is not None:
        found = host.read(work.secrets_from)
        if found is None:
            raise DeployError(f"{host.name}: {work.secrets_from} is gone; fab deploy reads the secrets again")
        return found
    return secrets.content(secrets.read(work.secrets, work.root)) if work.secrets else None


def _remove(host: Host, paths: Sequence[str], report: Report) -> None:
    """Remove files that nobody needs any more. A failure is only told: the next deploy tries again."""
    if paths:
        try:
            host.run(["rm", "-f", "--", *paths], timeout=20)
        except HostError as error:
            report(f"secrets of runs that are over could not be removed: {error}")


def _new_run(
    host: Host, layout: release.Layout, run: status.Run, values: bytes | None
) -> tuple[str, status.Run]:
    """Make the run's directory with its run.json, and its secrets beside the name.

    Returns the directory's path and what run.json holds. Only this machine's disk, for now.
    """
    try:
        directory = status.allocate_run(layout.runs, run.name)
    except OSError as error:
        raise DeployError(f"{host.name}: {layout.runs} cannot take a new run: {error.strerror}") from None
    run_id = directory.path.name
    whole = dataclasses.replace(
        run,
        run_id=run_id,
        secrets_file=None if values is None else layout.secrets(run_id),
        created=time.time(),
        who=lock.who(),
        origin=lock.who().partition("@")[2],
    )
    data = json.dumps(dataclasses.asdict(whole), ensure_ascii=False, indent=1) + "\n"
    if values is not None:
        host.write(layout.secrets(run_id), values, mode=0o400)
    host.write(str(directory.path / "run.json"), data.encode())
    return str(directory.path), whole
