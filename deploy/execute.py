"""Carrying a plan out. Thin: the plan has decided; here it happens, in an order that a failure cannot hurt.

Everything is made ready while the old run goes on. Only the last step, the switch, ends it, and the switch
runs on the host by itself, so that losing this process, its terminal or the connection changes nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy import (
    again,
    boot,
    bootunit,
    evicting,
    evidence,
    lock,
    onhost,
    pct_template,
    release,
    secrets,
    switch,
    weights,
)
from deploy import image as images
from deploy.errors import Changed, DeployError
from deploy.host import Host, HostError
from deploy.lock import Patience
from deploy.plan import Plan, seen
from deploy.release import Image, Release
from deploy.runtimes import compose, pct, process
from deploy.settings import RunSettings, SecretSource
from deploy.weights import Weights
from trainer import status

TRIAL_TIMEOUT = 180.0  # seconds; a container starts in one, but a disk may be asleep
PCT_SILENCE = 120.0  # seconds; making a container gives a sign of life every 15
CHECK_TIMEOUT = 120.0  # seconds; it takes below one, but a disk may be asleep
INSTALL_TIMEOUT = 300.0  # seconds, for each call of apt-get
FIRST_HEARTBEAT_TIMEOUT = 600.0  # seconds, for a release that is started again as it was
SETTLE_SECONDS = 3.0  # the same

Report = Callable[[str], None]


@dataclass(frozen=True)
class Work:
    """What a plan needs besides itself: the files, and run.json as it will be but for its id."""

    run: status.Run
    python: str
    release: Release | None = None  # None: it is on the host already, and is not looked at
    secrets: Mapping[str, SecretSource] = dataclasses.field(default_factory=dict)
    secret_values: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)  # read already
    root: Path = Path()
    first_heartbeat_timeout_seconds: float = FIRST_HEARTBEAT_TIMEOUT
    heartbeats: bool = True
    settle_seconds: float = SETTLE_SECONDS  # without heartbeats; 0 where somebody follows the log anyway
    secrets_from: str | None = None  # a file on the host that is copied instead of `secrets`, for --same
    image: Image | None = None  # what the plan's image_action is about
    restage: Mapping[str, str] | None = None  # arguments of weights_store.stage, for a release that is there
    staged: Mapping[str, str] | None = None  # the same, for the boot after this one, if they are there now
    rollback: str | None = None  # the run whose release is started again if the new one dies at once
    checkpoint_timeout_seconds: float = boot.CHECKPOINT_TIMEOUT


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
        # In a container this machine's directories do not exist.
        working_directory=settings.working_directory if plan.image else cwd,
        tty=settings.tty,
        grace_seconds=settings.grace_seconds,
        checkpoint_timeout_seconds=settings.checkpoint_timeout_seconds,
        restart_attempts=settings.restart.attempts,
        restart_minutes=settings.restart.minutes,
        segment_bytes=settings.log.segment_megabytes << 20,
        segments=settings.log.segments,
    )


def start(
    plan: Plan, host: Host, work: Work, report: Report, lock_wait: Patience = lock.NONE
) -> tuple[str, str]:
    """Do what a plan of `deploy` or `restart` says, up to the switch's acceptance.

    Returns the new run's directory and the switch's record, which `switch.watch` follows. Raises DeployError
    (Changed, if the plan holds no more); then the run in progress, if any, was not touched.
    """
    layout = plan.layout
    with (
        lock.hold(host, layout.state, plan.name, plan.task, lock_wait.left, waiting=report) as held,
        contextlib.ExitStack() as telling,
    ):
        if plan.install:
            install(host, plan.install, report)
        facts = evidence.collect(host, layout.state, layout.shm, sample=0)
        _still(plan, facts)
        _refuse_other_user(plan, facts)
        back = _way_back(plan, host, facts, work)
        if plan.image_action in ("build", "ship") and isinstance(work.image, images.Image):
            held.check()
            images.make(host, layout.state, work.image, plan.image_action, report)
        if plan.evict:
            held.check()
            telling.enter_context(evicting.way_back(plan, report))
            plan = evicting.make_room(plan, host, report)
        _bring(plan, host, work, held, report)
        held.check()
        if work.release is None:
            release.refuse_changed(facts, host.name, plan.name, str(plan.release))
        else:
            done = release.write(host, layout, work.release)
            report(f"release {work.release.id} {done}")
        values = _secrets(host, work)
        held.check()
        run_path = secrets_file = container = None
        try:
            container = _container(plan, host, facts, work, report) if plan.runtime == "pct" else None
            run_path, run = _new_run(host, plan, facts, work.run, values)
            secrets_file = run.secrets_file
            begin = start_spec(plan, facts, run, run_path, work.python, container)
            if container:
                pct_trial(plan, host, run, run_path, container)
            elif plan.runtime == "compose":
                try_container(plan, host, facts, run, run_path)
            elif work.heartbeats:
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
                "settle_seconds": work.settle_seconds,
                "by": lock.who(),
                "task": plan.task,
                "start": begin,
            }
            if back:
                spec["rollback"] = back
            staged = plan.weights.boot() if plan.weights else work.restage or work.staged
            places = [layout.checkpoints, layout.cache]
            again = boot.template(run, spec, staged, work.checkpoint_timeout_seconds, places)
            host.write(f"{run_path}/{boot.FILE}", json.dumps(again).encode(), mode=0o600)
            held.check()
            record = switch.start(host, spec)
        except BaseException:
            # Whatever happened, also Ctrl-C: a lost connection hides what was done over there, so look there.
            with contextlib.suppress(DeployError):
                if run_path:
                    words = (layout.state, plan.name, run_path, secrets_file)
                    onhost.ask(host, "deploy.new_run:discard_refused", *words)
                else:
                    before = max((status.split_run_id(one["run_id"])[0] for one in facts["runs"]), default=0)
                    held.check()  # without the lock it might be the run of somebody else
                    onhost.ask(host, "deploy.new_run:discard_begun", layout.state, plan.name, before)
                if container and container["made"]:
                    made = (container["vmid"], container["which"], run_path)
                    onhost.ask(host, "deploy.pct_host:discard", *made)
            raise
        if not back:  # it takes the secrets of the run before
            # Only now: had another switch been under way, the run that it starts would have needed its file.
            _remove(host, secrets.over(facts, plan.name), report)
        _boot_unit(plan, host, work, report)
        return run_path, record


def start_spec(
    plan: Plan,
    facts: Mapping[str, Any],
    run: status.Run,
    run_path: str,
    python: str,
    container: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What the switch starts for `run`, in the plan's runtime (`container`: see `_container`). Pure."""
    place = plan.layout.release(str(plan.release))
    if container is not None:
        return pct.start_spec(run, container["which"], container["vmid"])
    if plan.runtime == "compose":
        return compose.start_spec(run, facts, plan.layout, place, run_path)
    return process.start_spec(run, dict(facts), place, run_path=run_path, python=python)


def _bring(plan: Plan, host: Host, work: Work, held: lock.Held, report: Report) -> None:
    """Weights and data, from this machine or from the host's disk to where the run finds them."""
    for found in (plan.weights, plan.data_copy):
        if found is not None:
            held.check()
            weights.bring(host, found, report)
    if work.restage:
        held.check()
        one = Weights(work.restage["source"], "copy", work.restage["path"], digest=work.restage["digest"])
        weights.bring(host, dataclasses.replace(one, root=plan.layout.shm), report, old=True)


def try_container(plan: Plan, host: Host, facts: Mapping[str, Any], run: status.Run, run_path: str) -> None:
    """Start a container like the run's, which looks and ends, while the old run goes on.

    Raises DeployError if the engine refuses it, or with what the container says is wrong.
    """
    trial = compose.trial(run, facts, plan.layout, plan.layout.release(str(plan.release)), run_path)
    done = host.run(trial.argv, timeout=TRIAL_TIMEOUT, env=trial.environment, input=trial.input, check=False)
    if done.code:
        lines = done.err.decode(errors="replace").strip().splitlines() or [f"exit code {done.code}"]
        last = lines[-1].strip()
        if last.startswith("error: "):
            raise DeployError(f"a container of {plan.name} on {host.name}: {last.removeprefix('error: ')}")
        if "No such image" in last:
            raise DeployError(
                f"there is no image {run.image} on {host.name}; docker pull it there, or correct image: in "
                "the run's file"
            )
        raise DeployError(f"{host.name} cannot start a container of {plan.name}: {last}")


def _container(
    plan: Plan, host: Host, facts: Mapping[str, Any], work: Work, report: Report
) -> dict[str, Any]:
    """Have the release's Proxmox container: {vmid, made (whether it is new), which (see `pct_host`)}."""
    which = pct.container_spec(plan.name, str(plan.release), plan.layout, facts, plan.image)
    long: dict[str, Any] = {"timeout": PCT_SILENCE, "progress": lambda text: report(text) if text else None}
    vmid = onhost.ask(host, "deploy.pct_create:existing", which, **long)
    made = vmid is None
    if made:
        making = {
            **(plan.making or {}),
            "template": pct_template.provide(plan, host, facts, work.image, report),
        }
        vmid = onhost.ask(host, "deploy.pct_create:make", which, making, **long)
    return {"vmid": vmid, "made": made, "which": which}


def pct_trial(plan: Plan, host: Host, run: status.Run, run_path: str, container: Mapping[str, Any]) -> None:
    """Start the run's container once, to look from inside, while the old run goes on.

    Raises DeployError if it does not start, or with what it says is wrong.
    """
    asked = pct.trial(run, plan.layout, run_path)
    words = (container["vmid"], container["which"], asked)
    onhost.ask(host, "deploy.pct_host:trial", *words, timeout=TRIAL_TIMEOUT + PCT_SILENCE)


def _refuse_other_user(plan: Plan, facts: Mapping[str, Any]) -> None:
    """The places that a run writes to become the new run's user's before the switch, and stay so if it fails.

    The run in progress could save no more. Raises DeployError.
    """
    for one in facts["runs"]:
        if one["name"] == plan.name and one["alive"] and _locks_out(plan, facts, one["run"] or {}):
            raise DeployError(
                f"run {one['run_id']} on {plan.host} is in progress as user {one['run']['user']}, and as "
                f"{plan.user} the new one could not share its checkpoints with it: fab stop --name "
                f"{plan.name} first, then {plan.task}"
            )


def _locks_out(plan: Plan, facts: Mapping[str, Any], run: Mapping[str, Any]) -> bool:
    """Whether a run could save no more once its places were made ready for the plan's.

    A plain process could: where places change hands at all, it is root's.
    """
    owner, user = _owner(plan.user, facts), run.get("user")
    return owner is not None and user is not None and _numbers(user) != owner


def _way_back(plan: Plan, host: Host, facts: Mapping[str, Any], work: Work) -> dict[str, Any] | None:
    """What the switch starts again if the new run dies before its first step.

    Raises DeployError if anything that it needs is not there.
    """
    if work.rollback is None:
        return None
    data = host.read(f"{work.rollback}/{boot.FILE}")
    try:
        before = json.loads(data or b"")
        spec = before["spec"]
        back = {"release_id": spec["release_id"], "start": spec["start"], "run": before["run"]}
        run: status.Run = status.parse(status.Run, before["run"], Path(work.rollback) / boot.FILE)
    except (ValueError, KeyError, TypeError):
        raise DeployError(
            f"{host.name}: nothing in {work.rollback} says how its run was started, so it could not be "
            "restored; deploy without --rollback-on-failure"
        ) from None
    lost = _lost(plan, host, facts, run, str(spec["release_id"]), spec["start"])
    if lost:
        raise DeployError(
            f"{host.name}: run {run.run_id} could not be restored, since {lost}; deploy without "
            "--rollback-on-failure"
        )
    return back


def _lost(
    plan: Plan,
    host: Host,
    facts: Mapping[str, Any],
    run: status.Run,
    release_id: str,
    start: Mapping[str, Any],
) -> str | None:
    """Why a run could not be started again as it was; None if all that it needs is there."""
    there = facts["names"].get(plan.name) or {}
    if release_id not in (there.get("releases") or []):
        return f"its release {release_id} is gone"
    if run.secrets_file and run.secrets_file not in (there.get("secrets") or []):
        return f"its secrets in {run.secrets_file} are gone"
    if _locks_out(plan, facts, dataclasses.asdict(run)):
        return f"it was user {run.user}'s, and its checkpoints become user {plan.user}'s"
    try:
        staged = again.restage(facts, host.name, run)
    except DeployError as error:
        return str(error)
    if staged:
        return f"its weights {staged['path']} are not in shared memory any more"
    if run.runtime == "pct":
        return onhost.ask(host, "deploy.contained_pct:check", dict(start)) or None
    if run.image and images.there(host, run.image) is None:
        return f"its image {run.image} is not there any more"
    return None


def _boot_unit(plan: Plan, host: Host, work: Work, report: Report) -> None:
    """Have the next run started after a reboot. A failure is only told: the run is on its way."""
    name = bootunit.unit_name(plan.name)
    if work.release is not None:
        unit = work.release.files.get(name)
    else:
        try:
            unit = host.read(f"{plan.layout.release(str(plan.release))}/{name}")
        except HostError as error:
            report(f"nothing starts {plan.name} after a reboot: {error}")
            return
    if unit is not None:
        report(bootunit.install(host, plan.layout, plan.name, unit.decode()))


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
    """Start a switch that only stops, and return its record.

    Raises DeployError (Changed, if the plan holds no more); then nothing was touched.
    """
    layout = plan.layout
    assert plan.stop is not None
    with lock.hold(host, layout.state, plan.name, plan.task, lock_wait.left, waiting=report):
        _still(plan, evidence.collect(host, layout.state, layout.shm, sample=0))
        return switch.start(host, evicting.stop_spec(plan))


def mend(plan: Plan, host: Host, report: Report, lock_wait: Patience = lock.NONE) -> None:
    """Let `current` lead to the release that runs. Raises DeployError; then nothing was touched."""
    layout = plan.layout
    with lock.hold(host, layout.state, plan.name, plan.task, lock_wait.left, waiting=report):
        _still(plan, evidence.collect(host, layout.state, layout.shm, sample=0))
        onhost.ask(host, "deploy.release_store:make_current", layout.home, plan.release)


def after_switch(
    plan: Plan, host: Host, run_path: str
) -> tuple[dict[str, Any] | None, Mapping[str, Any] | None]:
    """What became of a run since its switch: its exit.json, if it is over, and who changes the name now."""
    found = onhost.ask(host, "deploy.lookup:after_switch", plan.layout.state, plan.name, run_path)
    return found["exit"], found["switch"]


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
    """Between the plan that was shown and the lock somebody else may have deployed. Raises Changed."""
    if seen(facts, plan.name) != plan.seen or facts["switch"].get(plan.name) is not None:
        raise Changed(
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
    if not work.secrets:
        return None
    known = set(work.secret_values) == set(work.secrets)  # a password manager need not be asked twice
    return secrets.content(work.secret_values if known else secrets.read(work.secrets, work.root))


def _remove(host: Host, paths: Sequence[str], report: Report) -> None:
    """Remove files that nobody needs any more. A failure is only told: the next deploy tries again."""
    if paths:
        try:
            host.run(["rm", "-f", "--", *paths], timeout=20)
        except HostError as error:
            report(f"secrets of runs that are over could not be removed: {error}")


def _new_run(
    host: Host, plan: Plan, facts: Mapping[str, Any], run: status.Run, values: bytes | None
) -> tuple[str, status.Run]:
    """Make the run's directory with its run.json, and its secrets beside the name; all the run's user's.

    Returns the directory's path and what run.json holds.
    """
    layout = plan.layout
    who = lock.who()
    made = onhost.ask(
        host,
        "deploy.new_run:make",
        layout.state,
        {**dataclasses.asdict(run), "who": who, "origin": who.partition("@")[2]},
        None if values is None else values.decode("utf-8", "surrogateescape"),
        [layout.checkpoints, layout.cache],
        _owner(run.user, facts),
    )
    return made["path"], status.Run(**made["run"])


def _owner(user: str | None, facts: Mapping[str, Any]) -> list[int] | None:
    """The user and group that a run's files belong to; None if nothing is given away.

    Root gets them, too: in a container it has no rights to write what is another's.
    """
    return None if user is None or facts["uid"] != 0 else _numbers(user)


def _numbers(user: str) -> list[int]:
    return [int(part) for part in user.split(":")]
