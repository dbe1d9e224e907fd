"""The plan: what a task will do, as a value that prints, is tested, and is then carried out.

`make` is pure. What a dry run prints is what `deploy.execute` does: it gets this value and decides nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy import preflight, release, secrets
from deploy.errors import DeployError
from deploy.health import verdict
from deploy.release import Layout, Release
from deploy.runtimes import process
from deploy.settings import HostSettings, Recipe, RunSettings
from deploy.survey import Survey
from deploy.weights import Weights

CHECKPOINT_TIMEOUT = 300.0  # seconds, where no run's file says otherwise
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


@dataclass(frozen=True)
class Plan:
    """What will be done. `action`: unchanged | nothing | start | switch | stop."""

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
    differences: tuple[str, ...] = ()
    changes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    command: tuple[str, ...] = ()
    weights: Weights | None = None
    data: str | None = None
    resume: str = ""
    stop: Stop | None = None
    init: str = ""
    install: tuple[str, ...] = ()
    secrets: Mapping[str, str] = dataclasses.field(default_factory=dict)  # name -> where from
    grace_seconds: float = 0.0
    rollback: str | None = None  # the release that is started again if the new run dies before its first step
    warnings: tuple[str, ...] = ()
    seen: tuple[str, ...] = ()  # what it was made for; see `seen`

    @property
    def acts(self) -> bool:
        return self.action not in ("unchanged", "nothing")

    def to_json(self) -> dict[str, Any]:
        """For scripts: every field by its name."""
        value = dataclasses.asdict(self)
        del value["seen"]
        value["weights"] = self.weights and {**value["weights"], "describe": self.weights.describe()}
        return value

    def __str__(self) -> str:
        return "\n".join(_text(self))


# -- printing ----------------------------------------------------------------------------------------------


def _text(plan: Plan) -> list[str]:
    if plan.action == "unchanged" and plan.stop:
        return [
            f"unchanged: {plan.stop.run_id} runs release {plan.release} on {plan.host} ({plan.stop.doing})",
            *(f"note: {warning}" for warning in plan.warnings),
        ]
    if plan.action == "nothing":
        return [f"nothing to stop: no run of {plan.name} is in progress on {plan.host}"]
    rows: list[tuple[str, str]] = []
    if plan.action == "stop":
        rows += _stop_rows(plan)
    else:
        rows += [("runtime", f"{plan.runtime}: {plan.runtime_why}")]
        if plan.run_file:
            rows += [("run file", f"{plan.run_file} ({plan.run_file_why})")]
        rows += [("release", _release(plan))]
        rows += [("", difference) for difference in plan.differences]
        if plan.changes:
            rows += [
                ("set", ", ".join(f"{key}={value}" for key, value in plan.changes.items()) + ", for this run")
            ]
        if plan.weights:
            rows += [("weights", plan.weights.describe())]
        if plan.data:
            rows += [
                ("data", plan.data if plan.data != "toy" else "toy, which the trainer makes from its target")
            ]
        rows += [("secret", f"{name} {source}") for name, source in plan.secrets.items()]
        rows += [("command", " ".join(map(_word, plan.command)))]
        rows += (
            [("install", f"tini, with {' '.join(plan.install)} (--no-install declines)")]
            if plan.install
            else []
        )
        rows += [("init", plan.init)]
        rows += _stop_rows(plan)
        rows += [("start", f"the next run of {plan.name}: {plan.resume}")]
        if plan.rollback:
            rows += [("rollback", f"to release {plan.rollback}, should the new run die before its first step")]
    rows += [("note", warning) for warning in plan.warnings]
    width = max(len(label) for label, _ in rows)
    return [
        f"{plan.task} {plan.name} on {plan.host}",
        *(f"  {label:<{width}}  {text}" for label, text in rows),
    ]


def _release(plan: Plan) -> str:
    state = "on the host already" if plan.release_is_there else "new"
    if plan.release == plan.release_before:
        return f"{plan.release}, unchanged"
    if plan.release_before is None:
        return f"{plan.release}, {state}"
    return f"{plan.release_before} → {plan.release}, {state}"


def _stop_rows(plan: Plan) -> list[tuple[str, str]]:
    """How the old run ends, and the smallest timeout that its checkpoint has to fit in."""
    stop = plan.stop
    if stop is None:
        return []
    signals = f"SIGTERM, SIGKILL {stop.grace_seconds:g} s later"
    if not stop.asks:
        return [
            ("stop", f"{stop.run_id} ({stop.doing}): {signals}"),
            (
                "timeouts",
                f"{stop.grace_seconds:g} s is all it has to save in (grace_seconds of {stop.run_id})",
            ),
        ]
    asked = f"a checkpoint first, waited for up to {stop.checkpoint_timeout_seconds:g} s; then {signals}"
    smallest, key = min(
        (stop.grace_seconds, "grace_seconds"), (stop.checkpoint_timeout_seconds, "checkpoint_timeout_seconds")
    )
    return [
        ("stop", f"{stop.run_id} ({stop.doing}): {asked}"),
        (
            "timeouts",
            f"the smallest is {smallest:g} s ({key}); no signal is sent while a checkpoint is awaited",
        ),
    ]


def _word(word: str) -> str:
    from deploy.render import shell

    if word.isprintable():
        return shell(word)
    return "$'" + repr(word)[1:-1].replace("\\'", "'").replace("'", "\\'") + "'"  # one line, and still bash


# -- deciding ----------------------------------------------------------------------------------------------


def choose_runtime(host: HostSettings, facts: Mapping[str, Any]) -> tuple[str, str]:
    """(runtime, why). Raises DeployError for one that cannot be deployed to yet."""
    engine = facts["engine"]
    if host.runtime in ("compose", "pct"):
        raise DeployError(
            f"{host.name} has runtime: {host.runtime} in fabric.yaml, which this version cannot deploy to; "
            "set runtime: process"
        )
    if host.runtime == "process":
        return "process", f"as {host.name} has it in fabric.yaml"
    if engine["answers"]:
        return "process", (
            f"a Docker engine answers (version {engine['version']}) and `docker compose up` runs the demo "
            "in it, but deploying to it comes later"
        )
    return "process", f"no Docker engine answers ({engine['error'] or 'there is none'})"


def make_release(survey: Survey, host: HostSettings, run: RunSettings) -> Release:
    """The release that these settings and this checkout give."""
    runtime, _ = choose_runtime(host, survey.facts)
    return release.build(
        run,
        survey.layout,
        runtime=runtime,
        python=survey.interpreter.path,
        weights=survey.weights.path if survey.weights else None,
        data=survey.data,
        app=survey.app,
        git=survey.git,
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
) -> Plan:
    """The plan of `deploy` or `restart`. `before` is what `release.deployed` says of the release before.

    Raises DeployError with every preflight check that failed, unless there is nothing to do.
    """
    facts, run = survey.facts, recipe.settings
    runtime, why = choose_runtime(host, facts)
    found = preflight.checks(survey, host, run)
    live, old = survey.live, release_before(survey)
    # A run that is being stopped is as good as gone: to call it unchanged would leave nothing running.
    stopping = live is not None and bool((live["launch"] or {}).get("stopping"))
    unchanged = task == "deploy" and live is not None and old == new.id and not stopping
    if not unchanged:
        preflight.refuse(found)
    differences = release.differences(before[0], before[1], new) if before and old != new.id else []
    init, commands = _init(facts, install)
    return Plan(
        task=task,
        action="unchanged" if unchanged else "switch" if live else "start",
        host=host.name,
        name=run.name,
        layout=survey.layout,
        runtime=runtime,
        runtime_why=why,
        run_file=run_file or str(recipe.path),
        run_file_why=recipe.why,
        release=new.id,
        release_before=old,
        release_is_there=new.id in facts["names"].get(run.name, {}).get("releases", []),
        differences=tuple(differences),
        changes=dict(recipe.changes),
        command=new.command,
        weights=survey.weights,
        data=survey.data,
        resume=_resume(survey, run),
        stop=stop_of(live, facts, run.checkpoint_timeout_seconds) if live else None,
        init=init,
        install=commands,
        secrets={name: secrets.describe(source) for name, source in sorted(run.secrets.items())},
        grace_seconds=run.grace_seconds,
        warnings=(*preflight.warnings(found), *(_changed(facts, run.name, new.id) if unchanged else ())),
        seen=seen(facts, run.name),
    )


def make_same(
    survey: Survey,
    host: HostSettings,
    command: Sequence[str],
    *,
    task: str = "restart",
    release_id: str | None = None,
    differences: Sequence[str] = (),
    install: bool = True,
) -> Plan:
    """The plan of `restart --same`, `start` and `rollback`: a release that is on the host (default: the
    current one) as it was deployed, whatever the files say now.

    `start` leaves a run that is in progress alone.
    """
    facts, name, live = survey.facts, survey.layout.name, survey.live
    current = facts["names"].get(name, {}).get("current")
    wanted = release_id or current
    if wanted is None:
        raise DeployError(f"nothing of {name} is deployed on {host.name}; use fab deploy --name {name}")
    stopping = live is not None and bool((live["launch"] or {}).get("stopping"))
    runtime, why = choose_runtime(host, facts)
    if task == "start" and live is not None and not stopping:
        running = release_before(survey)
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
    init, commands = _init(facts, install)
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
        resume={
            "restart": "as its release says (--same)",
            "start": "as its release says",
            "rollback": "as its release says (rollback)",
        }[task],
        stop=stop_of(live, facts) if live else None,
        init=init,
        install=commands,
        seen=seen(facts, name),
    )


def make_stop(
    facts: Mapping[str, Any],
    host: HostSettings,
    layout: Layout,
    checkpoint_timeout: float = CHECKPOINT_TIMEOUT,
) -> Plan:
    """The plan of `stop`; with a timeout of 0 no checkpoint is asked for."""
    live = next((run for run in reversed(facts["runs"]) if run["name"] == layout.name and run["alive"]), None)
    return Plan(
        task="stop",
        action="stop" if live else "nothing",
        host=host.name,
        name=layout.name,
        layout=layout,
        stop=stop_of(live, facts, checkpoint_timeout) if live else None,
        seen=seen(facts, layout.name),
    )


def stop_of(
    live: Mapping[str, Any], facts: Mapping[str, Any], checkpoint_timeout: float = CHECKPOINT_TIMEOUT
) -> Stop:
    """How the run in progress is ended. Its own run.json says what grace launch gives the trainer."""
    word = verdict(dict(live), facts["time"], sample=facts["sample_seconds"])
    return Stop(
        live["run_id"],
        live["path"],
        f"{word.word}: {word.reason}" if word.reason else word.word,
        # At step 0 there is nothing to save.
        checkpoint_timeout > 0 and any(beat.get("step") for beat in live["heartbeats"].values()),
        checkpoint_timeout,
        float((live["run"] or {}).get("grace_seconds", 60.0)),
    )


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
    return [
        f"release file {file} was changed on the host; the running process may differ; "
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
    if live is not None:
        return f"resumes from the checkpoint that {live['run_id']} leaves"
    if saved is None:
        return "begins at step 0 (no checkpoint yet)"
    whose = saved.get("run_id") or "the last run"
    if saved.get("finished"):
        return f"begins at step 0 ({whose} finished at step {saved.get('step')})"
    return f"resumes at step {saved.get('step')} ({whose} did not finish)"


def _init(facts: Mapping[str, Any], install: bool) -> tuple[str, tuple[str, ...]]:
    """(what adopts orphans, what is installed for it)."""
    if facts["tini"]:
        return process.reaper(dict(facts)), ()
    if install and facts["apt"] and facts["uid"] == 0:
        return "tini, once it is installed; else trainer.launch is the subreaper", INSTALL_TINI
    why = "--no-install" if not install else "no apt-get" if not facts["apt"] else "not root"
    return f"trainer.launch is the subreaper (there is no tini, and it is not installed: {why})", ()
