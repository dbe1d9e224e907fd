"""What the tasks of the fabfile do, one function each: read, plan, carry out. Nothing here prints."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy import evidence, execute, host, lock, plan, release, settings, survey
from deploy.errors import USAGE, DeployError, nearest
from deploy.execute import Work
from deploy.health import Verdict, number, table, verdict
from deploy.host import Host
from deploy.lock import Patience
from deploy.plan import Plan
from deploy.settings import HostSettings, Project, Recipe
from trainer import status

QUIET = 0.0  # a probe that only looks needs no second sample

Progress = Callable[[str], None]


def silent(text: str) -> None:
    """A progress report that nobody reads."""


@dataclass(frozen=True)
class Target:
    """A host, how it is reached, and what its name is set to run."""

    project: Project
    settings: HostSettings
    host: Host

    def facts(self, sample: float = QUIET) -> dict[str, Any]:
        return evidence.collect(self.host, self.settings.state, self.settings.shm, sample=sample)


def target(host_name: str | None, root: Path) -> Target:
    """The host of a task. Raises DeployError for one that is unknown or cannot be reached."""
    project = settings.load_project(root)
    found = settings.find_host(project, host_name)
    return Target(project, found, host.Local(found.name) if found.is_local else host.connect(found))


def recipe(goal: Target, run: str | None, name: str | None, changes: Sequence[str] = ()) -> Recipe:
    """The run's file of a task. Without --run, a name that is also a run's file means that file."""
    if run is None and name is not None and name in goal.project.runs:
        found = settings.load_run(goal.project, name, host=goal.settings, name=name, changes=changes)
        return dataclasses.replace(found, why="as --name")
    return settings.load_run(goal.project, run, host=goal.settings, name=name, changes=changes)


def name_of(goal: Target, run: str | None, name: str | None) -> str:
    """The name that a task is about. With --name no file is read, so a broken one is in nobody's way."""
    if name is not None:
        if not status.valid_name(name):
            raise DeployError(f"--name {name!r} cannot be a name; fab runs lists those there are", code=USAGE)
        return name
    return recipe(goal, run, None).settings.name


def name_of_run(run_id: str) -> str:
    """``demo`` of ``0007-demo``."""
    try:
        return status.split_run_id(run_id)[1]
    except ValueError as error:
        raise DeployError(f"--run-id {error}", code=USAGE) from None


# -- deploy, restart, stop ---------------------------------------------------------------------------------


def plan_deploy(
    task: str,
    goal: Target,
    wanted: Recipe,
    *,
    install: bool = True,
    lock_wait: Patience = lock.NONE,
    progress: Progress = silent,
) -> tuple[Plan, Work]:
    """The plan of `deploy` or `restart`, and what carrying it out needs."""
    run = wanted.settings
    facts = _free(goal, run.name, lock_wait, progress)
    found = survey.take(goal.project, goal.host, goal.settings, run, facts, progress)
    new = plan.make_release(found, goal.settings, run)
    old = plan.release_before(found)
    before = release.deployed(goal.host, found.layout, old) if old else None
    made = plan.make(
        task,
        found,
        goal.settings,
        wanted,
        new,
        before,
        install=install,
        run_file=shown(goal.project, wanted.path),
    )
    weights = found.weights.path if found.weights else None
    variables = release.environment(run, found.layout, weights, found.data)
    directory = survey.working_directory(goal.project, goal.settings, run)
    work = Work(
        execute.run_of(made, new, run, variables, directory),
        found.interpreter.path,
        new,
        run.secrets,
        goal.project.root,
        run.first_heartbeat_timeout_seconds,
        run.command is None,
    )
    return made, work


def plan_same(
    goal: Target, name: str, *, install: bool = True, lock_wait: Patience = lock.NONE
) -> tuple[Plan, Work]:
    """The plan of `restart --same`: the newest run of the deployed release, once more."""
    facts = _free(goal, name, lock_wait, silent)
    current = facts["names"].get(name, {}).get("current")
    runs = [run for run in facts["runs"] if run["name"] == name and run["run"]]
    last = next(
        (run for run in reversed(runs) if (run["run"].get("release") or {}).get("id") == current), None
    )
    if current is None or last is None:
        raise DeployError(
            f"nothing of {name} is deployed on {goal.settings.name}{nearest(name, facts['names'])}; "
            "--same starts a deployed release again, fab deploy makes one"
        )
    known = {field.name for field in dataclasses.fields(status.Run)}
    run = status.Run(**{key: value for key, value in last["run"].items() if key in known})
    layout = survey.layout_of(goal.settings, facts, name)
    if release.deployed(goal.host, layout, current) is None:
        raise DeployError(f"release {current} of {name} is damaged or gone; fab deploy writes it anew")
    python = goal.settings.python or facts["python_path"]
    seen = survey.Survey(facts, layout, survey.Interpreter(python), {}, {})
    made = plan.make_same(seen, goal.settings, run.command, install=install)
    if run.secrets and run.secrets_file not in facts["names"][name]["secrets"]:
        raise DeployError(
            f"the secrets of release {current} of {name} ({', '.join(run.secrets)}) are on "
            f"{goal.settings.name} no more; fab {'restart' if seen.live else 'deploy'} reads them again"
        )
    return made, Work(
        run, python, secrets_from=run.secrets_file, heartbeats=run.command[1:4] == ["-u", "-m", "trainer"]
    )


def plan_stop(
    goal: Target,
    name: str,
    *,
    checkpoint: bool = True,
    lock_wait: Patience = lock.NONE,
    progress: Progress = silent,
) -> Plan:
    """The plan of `stop`. Raises DeployError for a name that this host has never heard of."""
    facts = _free(goal, name, lock_wait, progress)
    if name not in facts["names"] and not any(run["name"] == name for run in facts["runs"]):
        offered = nearest(name, facts["names"])
        if offered:
            raise DeployError(f"there is no {name} on {goal.settings.name}{offered}", code=USAGE)
    layout = survey.layout_of(goal.settings, facts, name)
    return plan.make_stop(facts, goal.settings, layout, plan.CHECKPOINT_TIMEOUT if checkpoint else 0)


def _free(goal: Target, name: str, lock_wait: Patience, progress: Progress) -> dict[str, Any]:
    """Facts of a moment at which nobody else deploys this name, or of now once patience is at an end."""
    told = False
    while True:
        facts = goal.facts()
        if not (facts["switch"].get(name) or facts["locks"].get(name)) or not lock_wait.left:
            return facts
        if not told:
            progress(f"another deploy of {name} is under way; waiting up to {lock_wait.seconds:g} s")
            told = True
        time.sleep(0.5)


def shown(project: Project, path: Path) -> str:
    """A path as people type it: relative to the project where that is possible."""
    return str(path.relative_to(project.root)) if path.is_relative_to(project.root) else str(path)


# -- looking -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One run as `status` shows it. None where there is nothing to say (yet)."""

    host: str
    run_id: str
    name: str
    verdict: str
    reason: str
    next_command: str | None = None
    step: int | None = None
    total: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    step_age: float | None = None  # seconds since the last step
    memory: int | None = None  # bytes, now
    links: Mapping[str, str] = dataclasses.field(default_factory=dict)  # only what this run printed itself
    drift: tuple[str, ...] | None = None  # None: not known, because nothing is rendered for it


def rows(goal: Target, facts: Mapping[str, Any], name: str | None, run_id: str | None = None) -> list[Row]:
    """The newest run of every name (or of one), or one run by its id.

    A run in progress is always among them: a newer one that never began must not hide it.
    """
    wanted = [
        run
        for run in facts["runs"]
        if (name is None or run["name"] == name) and (run_id is None or run["run_id"] == run_id)
    ]
    newest = {run["name"]: run["run_id"] for run in wanted}
    return [row(goal, facts, run) for run in wanted if run["alive"] or run["run_id"] == newest[run["name"]]]


def row(goal: Target, facts: Mapping[str, Any], run: Mapping[str, Any]) -> Row:
    host_name = None if goal.settings.name == "localhost" else goal.settings.name
    # Whether a switch is under way is told by its lock, which its record cannot know.
    seen = {**run, "switch_lives": bool(facts["switch"].get(run["name"]))}
    word: Verdict = verdict(seen, facts["time"], host=host_name, sample=facts["sample_seconds"])
    # Heartbeats lie in the run's own directory, so a link in one cannot be an earlier run's. Anyone may have
    # written them: a value of another type counts as none.
    beats = [beat for beat in run["heartbeats"].values() if isinstance(beat, dict)]
    first = run["heartbeats"].get("0")
    main = first if isinstance(first, dict) else beats[0] if beats else {}
    last = number(main, "last_step_time")
    memory = [now for beat in beats if (now := number(table(beat, "memory"), "now"))]
    return Row(
        host=goal.settings.name,
        run_id=run["run_id"],
        name=run["name"],
        verdict=word.word,
        reason=word.reason,
        next_command=word.next_command,
        step=_whole(number(main, "step")),
        total=_whole(number(main, "total")),
        loss=number(main, "loss"),
        tokens_per_second=number(table(main, "tokens_per_second"), "now"),
        step_age=max(0.0, facts["time"] - last) if last and run["alive"] else None,
        memory=_whole(sum(memory)) if memory else None,
        links={key: link for key, link in table(main, "links").items() if isinstance(link, str)},
        drift=drift(goal, facts, run) if run["alive"] else None,
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def drift(goal: Target, facts: Mapping[str, Any], run: Mapping[str, Any]) -> tuple[str, ...] | None:
    """What differs between a run in progress and what its file and this checkout would give now.

    Its own --set changes belong to it and are no drift. None if that cannot be told.
    """
    written = run["run"] or {}
    if not written.get("run_file") or not (written.get("release") or {}).get("id"):
        return None
    if not (goal.project.root / written["run_file"]).is_file():  # deployed from another place
        return None
    changes = [f"{key}={value}" for key, value in (written.get("changes") or {}).items()]
    try:
        wanted = settings.load_run(
            goal.project, written["run_file"], host=goal.settings, name=run["name"], changes=changes
        )
        found = survey.take(
            goal.project, goal.host, goal.settings, wanted.settings, facts, read_weights=False
        )
        if found.weights_problems or found.data_problems:
            return (found.weights_problems + found.data_problems)[:1]
        if found.weights is not None and found.weights.action == "changed":
            return (f"weights: the files in {found.weights.source} have changed",)
        new = plan.make_release(found, goal.settings, wanted.settings)
    except DeployError as error:
        return (str(error),)
    deployed = written["release"]["id"]
    edited = (f"{file}: changed on the host" for file in release.changed(facts, run["name"], deployed))
    if new.id == deployed:
        return tuple(edited)
    before = release.deployed(goal.host, found.layout, deployed)
    if before is None:
        return (f"release {new.id} is rendered",)
    return (*release.differences(before[0], before[1], new), *edited)


def run_path(facts: Mapping[str, Any], host_name: str, name: str, run_id: str | None) -> str:
    """The directory of a run to be followed: by its id, else the newest of `name`."""
    if run_id is not None:
        known = {run["run_id"]: run["path"] for run in facts["runs"]}
        if run_id not in known:
            raise DeployError(f"there is no run {run_id} on {host_name}{nearest(run_id, known)}", code=USAGE)
        return known[run_id]
    paths = [run["path"] for run in facts["runs"] if run["name"] == name]
    if not paths:
        names = {run["name"] for run in facts["runs"]}
        offered = nearest(name, names) or (f"; there are runs of {', '.join(sorted(names))}" if names else "")
        raise DeployError(f"there is no run of {name} on {host_name}{offered}", code=USAGE)
    return paths[-1]


def nothing(goal: Target, facts: Mapping[str, Any], name: str | None) -> str:
    """The sentence for a host, or a name, without runs."""
    if name is None:
        return f"no runs on {goal.settings.name}; fab deploy starts one"
    return f"no run of {name} on {goal.settings.name}{nearest(name, {run['name'] for run in facts['runs']})}"


# -- rendering ---------------------------------------------------------------------------------------------


def rendered(goal: Target, wanted: Recipe, progress: Progress = silent) -> release.Release:
    """The release that a deploy would write now."""
    found = survey.take(goal.project, goal.host, goal.settings, wanted.settings, goal.facts(), progress)
    problems = found.weights_problems + found.data_problems
    if problems:
        raise DeployError("\n".join(problems))
    return plan.make_release(found, goal.settings, wanted.settings)


def write_out(made: release.Release, directory: Path) -> None:
    """Write a release's files below `directory`, which must be new or empty."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise DeployError(f"--out {directory} is not empty; name a new directory", code=USAGE)
    for name, data in {**made.files, release.MANIFEST: made.manifest}.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
