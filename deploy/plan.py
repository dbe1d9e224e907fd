"""The plan: what a task will do, as a value that prints, is tested, and is then carried out.

`make` is pure. What a dry run prints is what `deploy.execute` does: it gets this value and decides nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy import (
    bootunit,
    budget,
    devices,
    mask,
    pct_template,
    plantext,
    preflight,
    release,
    runtimes,
    secrets,
    strays,
)
from deploy import image as images
from deploy.errors import DeployError
from deploy.health import number, table, verdict
from deploy.health_words import trainers
from deploy.release import Layout, Release
from deploy.runtimes import compose, pct, process
from deploy.runtimes.compose import Mount
from deploy.settings import HostSettings, Recipe, RunSettings
from deploy.sizes import age
from deploy.survey import Survey
from deploy.weights import Weights
from trainer import status

INSTALL_TINI = ("apt-get", "install", "-y", "--no-install-recommends", "tini")


@dataclass(frozen=True)
class Stop:
    """The end of the run in progress. Seconds are those that hold for that run, not for the new one."""

    run_id: str
    path: str
    doing: str  # its verdict, for people
    asks: bool  # whether a checkpoint is asked for: there are heartbeats, and a step was taken
    checkpoint_timeout_seconds: float
    grace_seconds: float
    adopted: int | None = None  # the process, if it was started by hand


@dataclass(frozen=True)
class Plan:
    """What will be done. `action`: unchanged | nothing | link | start | switch | stop.

    With link only `current` is put right.
    """

    task: str  # deploy | restart | start | rollback | stop
    action: str
    host: str
    name: str
    layout: Layout
    runtime: str = "process"
    runtime_why: str = ""
    run_file: str = ""
    run_file_why: str = ""
    release: str | None = None
    release_before: str | None = None
    release_is_there: bool = False
    damaged: tuple[str, ...] = ()  # files of it on the host that are not as they were deployed
    differences: tuple[str, ...] = ()
    changes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    command: tuple[str, ...] = ()
    tty: bool = False  # its output is a pseudo-terminal
    weights: Weights | None = None
    memory: str = ""  # what weights and run need of it, and what there is
    evict: tuple[budget.Eviction, ...] = ()  # what goes from shared memory before the weights come
    data: str | None = None
    data_copy: Weights | None = None  # how data get to the host, if they come from this machine
    resume: str = ""
    stop: Stop | None = None
    init: str = ""
    install: tuple[str, ...] = ()
    secrets: Mapping[str, str] = dataclasses.field(default_factory=dict)  # name -> where from
    grace_seconds: float = 0.0
    image: str | None = None  # as compose.yaml names it
    image_action: images.Action | None = None
    image_words: str = ""
    user: str | None = None  # uid:gid of the run's processes, as the host numbers them
    container: str = ""  # of Proxmox: what is made for the release
    making: Mapping[str, Any] | None = None  # what making it takes, see pct_host.ensure
    mounts: tuple[Mount, ...] = ()
    devices: tuple[str, ...] | None = None  # indices of GPUs; None: not said, as a plain process sees all
    boot: str = ""  # what a reboot will do
    link: str | None = None  # where `current` leads to, which it should not; empty: it is not there
    rollback: str | None = None  # the release that is started again if the new run dies before its first step
    warnings: tuple[str, ...] = ()
    seen: tuple[str, ...] = ()  # what it was made for; see `seen`

    @property
    def acts(self) -> bool:
        return self.action not in ("unchanged", "nothing")

    @property
    def starts(self) -> bool:
        """Whether a run is started."""
        return self.action in ("start", "switch")

    def to_json(self) -> dict[str, Any]:
        """For scripts: every field by its name. What looks like a secret is not in it."""
        value = dataclasses.asdict(self)
        del value["seen"]
        value["weights"] = self.weights and {**value["weights"], "describe": self.weights.describe()}
        # (Of secrets only their names are in it, and where they are read.)
        return {**mask.tree(value), "secrets": value["secrets"]}

    def __str__(self) -> str:
        return "\n".join(plantext.text(self))


# -- deciding ----------------------------------------------------------------------------------------------


diff_text = plantext.diff_text


@dataclass(frozen=True)
class Parts:
    """What a runtime adds to a release: who runs it, on which devices, and what starts it after a reboot."""

    runtime: str
    why: str
    python: str
    user: str | None  # uid:gid in the container
    owner: str | None  # the same as the host numbers them
    devices: devices.Devices
    device_files: tuple[str, ...]
    unit: str
    container: pct.Container | None = None


def parts_of(survey: Survey, host: HostSettings, run: RunSettings) -> Parts:
    facts = survey.facts
    runtime, why = runtimes.choose(host, facts, run.name)
    found = devices.choose(run.gpus, facts, run.name, host.name, runtime)
    # Saving and ending is all that a reboot waits for.
    patience = run.checkpoint_timeout_seconds + run.grace_seconds
    user = owner = container = None
    files = devices.files(found, facts)
    if runtime == "compose":
        user = owner = compose.user(run, facts)
    elif runtime == "pct":
        user, owner = pct.user(run), pct.owner(run, host.pct.unprivileged)
        files = pct.device_files(found, facts)
        container = pct.describe(
            host,
            run,
            survey.layout,
            facts,
            weights=survey.weights.path if survey.weights else None,
            weights_bytes=survey.weights.bytes if survey.weights else 0,
            data=survey.data,
            gpus=found.count,
            device_files=files,
        )
    return Parts(
        runtime,
        why,
        compose.python(run) if runtime in runtimes.CONTAINED else survey.interpreter.path,
        user,
        owner,
        found,
        files,
        bootunit.text(survey.layout, run.name, facts, runtime, patience),
        container,
    )


def make_release(survey: Survey, host: HostSettings, run: RunSettings) -> Release:
    """The release that these settings and this checkout give.

    Raises DeployError if a setting has a secret's value in it.
    """
    secrets.refuse_shown(run, survey.secret_values)
    parts = parts_of(survey, host, run)
    return release.build(
        run,
        survey.layout,
        runtime=parts.runtime,
        python=parts.python,
        weights=survey.weights.path if survey.weights else None,
        data=survey.data,
        app=survey.app,
        git=survey.git,
        image=survey.image,
        user=parts.user,
        devices=parts.devices.ids,
        device_files=parts.device_files,
        unit=parts.unit,
        container=parts.container,
    )


def make(
    task: str,
    survey: Survey,
    host: HostSettings,
    recipe: Recipe,
    new: Release,
    before: tuple[Mapping[str, bytes], Mapping[str, str]] | None,
    *,
    install: bool = True,
    run_file: str = "",
    build: images.Build | None = None,
    fresh: bool = False,
) -> Plan:
    """The plan of `deploy` or `restart`. `before` is what `release.deployed` says of the release before.

    `build` says where an image is built (--build), whatever the files say. `fresh`: the run in progress was
    started since the task began, so a restart with the same release has been done. Raises DeployError with
    every preflight check that failed, unless there is nothing to do.
    """
    facts, run = survey.facts, recipe.settings
    parts = parts_of(survey, host, run)
    apart = strays.checks(survey.strays, run.name, host.name)
    found = [*preflight.checks(survey, host, run), *apart]
    live, old = survey.live, release_before(survey)
    # A run that is being stopped is as good as gone: to call it unchanged would leave nothing running.
    stopping = live is not None and bool((live["launch"] or {}).get("stopping"))
    same = live is not None and old == new.id and not survey.secrets_changed
    unchanged = (task == "deploy" or fresh) and same and not stopping
    known = facts["names"].get(run.name, {})
    astray = known.get("current") != new.id and new.id in known.get("releases", [])
    if not unchanged:
        preflight.refuse(found)
    differences = release.differences(before[0], before[1], new) if before and old != new.id else []
    differences += changed_secrets(survey)
    init, commands = _init(facts, install, parts.runtime, run.image.use is not None)
    action, words = _image(survey, host, run, build)
    weights = survey.weights.path if survey.weights else None
    room = budget.of_run(survey, host.name, run, parts.runtime, parts.devices.count)
    return Plan(
        task=task,
        action=("link" if astray else "unchanged") if unchanged else "switch" if live else "start",
        host=host.name,
        name=run.name,
        layout=survey.layout,
        runtime=parts.runtime,
        runtime_why=parts.why,
        run_file=run_file or str(recipe.path),
        run_file_why=recipe.why,
        release=new.id,
        release_before=old,
        release_is_there=new.id in facts["names"].get(run.name, {}).get("releases", []),
        damaged=() if unchanged else tuple(release.changed(facts, run.name, new.id)),
        differences=tuple(differences),
        changes=dict(recipe.changes),
        command=new.command,
        tty=run.tty,
        weights=survey.weights,
        memory=room.words,
        evict=() if unchanged else room.evict,
        data=survey.data,
        data_copy=survey.data_copy,
        resume=_resume(survey, run),
        stop=stop_of(live, facts) if live else None,
        init=init,
        install=commands,
        secrets={name: secrets.describe(source) for name, source in sorted(run.secrets.items())},
        grace_seconds=run.grace_seconds,
        image=survey.image.reference if survey.image else None,
        image_action=action,
        image_words=words,
        user=parts.owner,
        container=parts.container.describe() if parts.container else "",
        making=pct.making(host, facts, survey.image.reference) if parts.container and survey.image else None,
        mounts=tuple(compose.mounts(run, survey.layout, weights, survey.data)) if survey.image else (),
        devices=parts.devices.ids,
        boot=bootunit.describe(facts, run.name, parts.runtime),
        link=str(known.get("current") or "") if unchanged and astray else None,
        warnings=(
            *preflight.warnings(found),
            *(unread_secrets(survey) if unchanged else ()),
            *(_changed(facts, run.name, new.id) if unchanged else _nothing_left(survey, run)),
            *(check.sentence for check in apart if unchanged and not check.warning),
        ),
        seen=seen(facts, run.name),
    )


def changed_secrets(survey: Survey) -> list[str]:
    """A line for each secret that the run in progress has with another value."""
    return [f"secret {name}: changed (not shown)" for name in survey.secrets_changed]


def unread_secrets(survey: Survey) -> list[str]:
    """A line for each secret of the run in progress that may have changed, for all that can be read here."""
    return [f"secret {name}: cannot be read here, so it is not compared" for name in survey.secrets_unread]


def make_same(
    survey: Survey,
    host: HostSettings,
    command: Sequence[str],
    *,
    task: str = "restart",
    release_id: str | None = None,
    differences: Sequence[str] = (),
    install: bool = True,
    fresh: bool = False,
) -> Plan:
    """The plan of `restart --same`, `start` and `rollback`: a release that is on the host (default: the
    current one) as it was deployed, whatever the files say now.

    `start` leaves a run that is in progress alone, and each does so with one of that release that is `fresh`:
    a switch that was under way has started it since the task began.
    """
    facts, name, live = survey.facts, survey.layout.name, survey.live
    current = facts["names"].get(name, {}).get("current")
    wanted = release_id or current
    if wanted is None:
        raise DeployError(f"nothing of {name} is deployed on {host.name}; use fab deploy --name {name}")
    stopping = live is not None and bool((live["launch"] or {}).get("stopping"))
    runtime, why, last = _as_before(facts, host, name, wanted)
    running = release_before(survey)
    done = task == "start" or (fresh and running == wanted)
    if done and live is not None and not stopping:
        return Plan(
            task=task,
            action="unchanged",
            host=host.name,
            name=name,
            layout=survey.layout,
            runtime=runtime,
            runtime_why=why,
            release=running,
            release_before=running,
            release_is_there=True,
            stop=stop_of(live, facts),
            seen=seen(facts, name),
        )
    release.refuse_changed(facts, host.name, name, wanted)
    foreign = not str(last.get("image")).startswith(f"{images.REPOSITORY}:")
    making = pct.making(host, facts, str(last.get("image"))) if runtime == "pct" else None
    init, commands = _init(facts, install, runtime, foreign)
    return Plan(
        task=task,
        action="switch" if live else "start",
        host=host.name,
        name=name,
        layout=survey.layout,
        runtime=runtime,
        runtime_why=why,
        release=wanted,
        release_before=current,
        release_is_there=True,
        differences=tuple(differences),
        command=tuple(command),
        tty=last.get("tty") is True,
        resume={
            "restart": "as its release says (--same)",
            "start": "as its release says",
            "rollback": "as its release says (rollback)",
        }[task],
        stop=stop_of(live, facts) if live else None,
        init=init,
        install=commands,
        image=last.get("image"),
        image_action="there" if last.get("image") else None,
        image_words="there" if last.get("image") else "",
        user=last.get("user"),
        making=making,
        devices=tuple(last["devices"]) if last.get("devices") is not None else None,
        grace_seconds=float(last.get("grace_seconds") or 0),
        boot=bootunit.describe(facts, name, runtime),
        seen=seen(facts, name),
    )


def _as_before(
    facts: Mapping[str, Any], host: HostSettings, name: str, release_id: str
) -> tuple[str, str, Mapping[str, Any]]:
    """(runtime, why, run.json) of the newest run of a release; an old release keeps its runtime."""
    for run in reversed(facts["runs"]):
        told = run["run"] or {}
        if run["name"] == name and (told.get("release") or {}).get("id") == release_id:
            return told.get("runtime", "process"), f"as {run['run_id']} had it", told
    return *runtimes.choose(host, facts, name), {}


def _image(
    survey: Survey, host: HostSettings, run: RunSettings, build: images.Build | None
) -> tuple[images.Action | None, str]:
    """What has to be done for the image, and the plan's words for it."""
    wanted = survey.image
    if wanted and runtimes.choose(host, survey.facts, run.name)[0] == "pct":
        return "there", pct_template.words(wanted)
    if not isinstance(wanted, images.Image):
        return ("there", "as it is on the host") if wanted else (None, "")
    where: images.Build = build or run.image.build or host.build or "host"
    action = images.plan(survey.facts, wanted, where)
    return action, images.words(survey.facts, wanted, action, host.name)


def make_stop(
    facts: Mapping[str, Any], host: HostSettings, layout: Layout, *, checkpoint: bool = True
) -> Plan:
    """The plan of `stop`; `checkpoint` says whether one is asked for first."""
    live = next((run for run in reversed(facts["runs"]) if run["name"] == layout.name and run["alive"]), None)
    return Plan(
        task="stop",
        action="stop" if live else "nothing",
        host=host.name,
        name=layout.name,
        layout=layout,
        stop=stop_of(live, facts, checkpoint=checkpoint) if live else None,
        warnings=tuple(_at_work(facts, layout.name)),
        seen=seen(facts, layout.name),
    )


def _at_work(facts: Mapping[str, Any], name: str) -> list[str]:
    """Who changes the name just now: what a look sees then is not what a stop will find."""
    holder = facts["switch"].get(name)
    holder = facts["locks"].get(name) if holder is None else holder
    if holder is None:
        return []
    since = holder.get("since")
    ago = f" for {age(max(0.0, facts['time'] - since))}" if isinstance(since, int | float) else ""
    return [
        f"a {holder.get('task') or holder.get('what', 'switch')} by {holder.get('by', 'somebody')} has been "
        f"under way{ago}; fab stop waits for its end, then stops what runs"
    ]


def stop_of(live: Mapping[str, Any], facts: Mapping[str, Any], *, checkpoint: bool = True) -> Stop:
    """How the run in progress is ended. Its own run.json says how long it may take to save, and to end."""
    written, usual = table(dict(live), "run"), status.Run("", "", [])
    grace = number(written, "grace_seconds")
    patience = number(written, "checkpoint_timeout_seconds") if checkpoint else 0.0
    if patience is None:  # deployed before run.json held it
        patience = usual.checkpoint_timeout_seconds
    word = verdict(dict(live), facts["time"], sample=facts["sample_seconds"])
    return Stop(
        live["run_id"],
        live["path"],
        f"{word.word}: {word.reason}" if word.reason else word.word,
        # At step 0 there is nothing to save.
        patience > 0 and any(beat.get("step") for beat in trainers(live)),
        patience,
        usual.grace_seconds if grace is None else grace,
        adopted_pid(live),
    )


def adopted_pid(run: Mapping[str, Any]) -> int | None:
    """The process that was adopted as this run; None for one of our own."""
    pid = number(table(table(dict(run), "run"), "adopted"), "pid")
    return None if pid is None else int(pid)


def release_before(survey: Survey) -> str | None:
    """The release of the run in progress, else the current one."""
    live = survey.live
    if live is not None and live["run"]:
        return (live["run"].get("release") or {}).get("id")
    return survey.facts["names"].get(survey.layout.name, {}).get("current")


def seen(facts: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """What must still hold when the plan is carried out: release, newest run, run in progress."""
    runs = [run for run in facts["runs"] if run["name"] == name]
    return (
        str(facts["names"].get(name, {}).get("current")),
        runs[-1]["run_id"] if runs else "",
        *(run["run_id"] for run in runs if run["alive"]),
    )


def _changed(facts: Mapping[str, Any], name: str, release_id: str) -> list[str]:
    new = release.added(facts, name, release_id)
    return [
        f"release file {file} was added on the host; the running process may use it; "
        "fab restart leaves it out"
        if file in new
        else f"release file {file} was changed on the host; the running process may differ; "
        "fab restart writes it anew"
        for file in release.changed(facts, name, release_id)
    ]


def _resume(survey: Survey, run: RunSettings) -> str:
    """Where the new run will begin: what the trainer's `--resume auto` makes of the newest checkpoint."""
    live, saved = survey.live, survey.checkpoint
    if run.command is not None:
        return "where it begins is its own affair (command:)"
    if (run.trainer or {}).get("resume") == "never":
        return "begins at step 0 (resume: never)"
    untrained = ""
    if live is not None and adopted_pid(live) is None:
        beats = [beat for beat in live["heartbeats"].values() if isinstance(beat, Mapping)]
        if any(beat.get("step") for beat in trainers(live)) or not beats:
            return f"resumes from the checkpoint that {live['run_id']} leaves"
        untrained = f"; {live['run_id']} has taken no step of its own yet"
    if saved is None:
        return f"begins at step 0 (no checkpoint yet{untrained})"
    whose = saved.get("run_id") or "the last run"
    if saved.get("finished"):
        return f"begins at step 0 ({whose} finished at step {saved.get('step')})"
    return f"resumes at step {saved.get('step')} ({whose} did not finish{untrained})"


def _nothing_left(survey: Survey, run: RunSettings) -> list[str]:
    """A warning if the new run would finish at once: it resumes where max-steps has been reached."""
    flags, live, saved = run.trainer or {}, survey.live, survey.checkpoint or {}
    most = flags.get("max-steps")
    if most is None or flags.get("resume") == "never":
        return []
    if live is not None:  # its checkpoint is yet to be written
        steps = [beat.get("step") for beat in trainers(live)]
    else:
        steps = [] if saved.get("finished") else [saved.get("step")]
    step = max((step for step in steps if isinstance(step, int)), default=0)
    if step < most:
        return []
    where = f"{live['run_id']} is at step {step}" if live else f"the newest checkpoint is of step {step}"
    return [
        f"max-steps is {most} and {where}, so the new run will finish at once; give more steps, or "
        "resume: never to begin at step 0"
    ]


def _init(
    facts: Mapping[str, Any], install: bool, runtime: str, foreign: bool
) -> tuple[str, tuple[str, ...]]:
    """(what adopts orphans, what is installed for it). An image of one's own, a foreign one, brings none."""
    if runtime == "compose":
        return ("the engine's own init, as PID 1" if foreign else "tini, as PID 1 in the image"), ()
    if runtime == "pct":
        return ("tini of the template, if it has one, as PID 1" if foreign else "tini, as PID 1"), ()
    if facts["tini"]:
        return process.reaper(dict(facts)), ()
    if install and facts["apt"] and facts["uid"] == 0:
        return "tini, once it is installed; else trainer.launch is the subreaper", INSTALL_TINI
    why = "--no-install" if not install else "no apt-get" if not facts["apt"] else "not root"
    return f"trainer.launch is the subreaper (there is no tini, and it is not installed: {why})", ()
