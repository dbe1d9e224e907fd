"""What the tasks of the fabfile do, one function each: read, plan, carry out. Nothing here prints."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy import (
    again,
    budget,
    execute,
    lock,
    onhost,
    overview,
    plan,
    preflight,
    release,
    secrets,
    settings,
    strays,
    survey,
    turn,
    typedpath,
)
from deploy import prune as pruning
from deploy import pull as fetching
from deploy.errors import USAGE, DeployError, either, nearest
from deploy.execute import Work
from deploy.lock import Patience
from deploy.plan import Plan
from deploy.prune import Prune
from deploy.settings import Project, Recipe
from deploy.target import Target
from deploy.turn import Watch
from trainer import status

Progress = Callable[[str], None]


def silent(text: str) -> None:
    """A progress report that nobody reads."""


def recipe(goal: Target, run: str | None, name: str | None, changes: Sequence[str] = ()) -> Recipe:
    """The run's file of a task. Without --run, a name that is also a run's file means that file."""
    if run is None and name is not None and name in goal.project.runs:
        found = settings.load_run(goal.project, name, host=goal.settings, name=name, changes=changes)
        return dataclasses.replace(found, why="as --name")
    return settings.load_run(goal.project, run, host=goal.settings, name=name, changes=changes)


def name_of(goal: Target, run: str | None, name: str | None, run_id: str | None = None) -> str:
    """The name that a task is about: ``demo`` of the run ``0007-demo``, else of --name or of the run's file.

    With a run or --name no file is read, so a broken one is in nobody's way.
    """
    if run_id is not None:
        try:
            return status.split_run_id(run_id)[1]
        except ValueError as error:
            raise DeployError(f"--run-id {error}", code=USAGE) from None
    if name is not None:
        if not status.valid_name(name):
            raise DeployError(f"--name {name!r} cannot be a name; fab runs lists those there are", code=USAGE)
        return name
    return recipe(goal, run, None).settings.name


# -- deploy, restart, stop ---------------------------------------------------------------------------------


def plan_deploy(
    task: str,
    goal: Target,
    wanted: Recipe,
    *,
    install: bool = True,
    build: str | None = None,
    rollback: bool = False,
    evict_first: bool = False,
    lock_wait: Patience = lock.NONE,
    progress: Progress = silent,
    watch: Watch | None = None,
    order: turn.Order | None = None,
) -> tuple[Plan, Work]:
    """The plan of `deploy` or `restart`, and what carrying it out needs.

    A switch of the name that is at work is watched first, with `watch` (see `turn.take`), and a stop since
    the task came, by `order`, raises DeployError. With `rollback` the release before is started again if the
    new run dies before its first step. With `evict_first` old weights go before the new ones come, if both do
    not fit in; the run that uses them is stopped before.
    """
    run = wanted.settings
    at = turn.take(goal, run.name, lock_wait, progress, watch, order=order)
    facts = at.facts
    found = survey.take(goal.project, goal.host, goal.settings, run, facts, progress, copies=evict_first)
    new = plan.make_release(found, goal.settings, run)
    release.look_at(goal.host, found.layout, facts, new.id)
    old = plan.release_before(found)
    before = release.deployed(goal.host, found.layout, old) if old and old != new.id else None
    made = plan.make(
        task,
        found,
        goal.settings,
        wanted,
        new,
        before,
        install=install,
        run_file=shown(goal.project, wanted.path),
        build=_where(build),
        fresh=at.fresh,
    )
    if rollback and made.evict:
        raise DeployError(
            f"--rollback-on-failure needs the old weights ({budget.described(made.evict)}), but "
            "--evict-first removes them; give one of the two",
            code=USAGE,
        )
    back = again.way_back(facts, run.name, new.id) if rollback and made.starts else None
    if rollback and made.starts:
        if back is None:
            none = "no release of this name but the new one was ever started here, so none can be restored"
            made = dataclasses.replace(made, warnings=(*made.warnings, f"--rollback-on-failure: {none}"))
        else:
            made = dataclasses.replace(made, rollback=back[0])
    weights = found.weights.path if found.weights else None
    variables = release.environment(run, found.layout, weights, found.data)
    directory = survey.working_directory(goal.project, goal.settings, run)
    work = Work(
        execute.run_of(made, new, run, variables, directory),
        found.interpreter.path,
        new,
        run.secrets,
        found.secret_values,
        goal.project.root,
        run.first_heartbeat_timeout_seconds,
        run.command is None,
        run.settle_seconds,
        image=found.image,
        rollback=back[1] if back else None,
        checkpoint_timeout_seconds=run.checkpoint_timeout_seconds,
    )
    return made, work


def _where(build: str | None) -> Any:
    if build not in (None, "host", "local"):
        raise DeployError(f"--build {build} must be host or local", code=USAGE)
    return build


def plan_again(
    task: str,
    goal: Target,
    name: str,
    *,
    release_id: str | None = None,
    install: bool = True,
    lock_wait: Patience = lock.NONE,
    progress: Progress = silent,
    watch: Watch | None = None,
    order: turn.Order | None = None,
) -> tuple[Plan, Work]:
    """The plan of `start`, `rollback` and `restart --same`: a release on the host, as it was deployed.

    Without `release_id` the current one is meant, for a rollback the one before. A switch of the name that is
    at work is watched first. Raises DeployError, before anything is touched, if what it needs is gone (its
    files, image, weights or secrets), or if the name was stopped since the task came, by `order`.
    """
    at = turn.take(goal, name, lock_wait, progress, watch, order=order)
    facts = at.facts
    if task == "rollback" and at.watched is not None and at.fresh:
        wanted = again.after_switch(at.watched, goal.settings.name, name, facts, release_id)
    else:
        default = goal.settings.run or goal.project.default_run
        wanted = again.which(task, goal.settings.name, name, facts, release_id, default)
    layout = survey.layout_of(goal.settings, facts, name)
    found = release.deployed(goal.host, layout, wanted)
    if found is None:
        alive = any(run["name"] == name and run["alive"] for run in facts["runs"])
        raise DeployError(
            f"release {wanted} of {name} is damaged or gone; fab {'restart' if alive else 'deploy'} makes "
            "one of your files as they are now"
        )
    release.look_at(goal.host, layout, facts, wanted)
    run = again.template(facts, name, wanted, goal.settings.name)
    python = goal.settings.python or facts["python_path"]
    seen = survey.Survey(facts, layout, survey.Interpreter(python), {}, {})
    current = facts["names"][name]["current"]
    before = release.deployed(goal.host, layout, current) if current not in (None, wanted) else None
    made = plan.make_same(
        seen,
        goal.settings,
        run.command,
        task=task,
        release_id=wanted,
        differences=again.differences(before, found, wanted) if before else (),
        install=install,
        fresh=at.fresh,
    )
    sources: Mapping[str, settings.SecretSource] = {}
    kept = restage = None
    if made.acts:
        asked = {"strays": strays.question(facts, name)}
        others = onhost.ask(goal.host, "deploy.lookup:look", asked, timeout=survey.LOOK_TIMEOUT)["strays"]
        apart = strays.checks(others, name, goal.settings.name)
        preflight.refuse(apart)
        made = dataclasses.replace(made, warnings=(*made.warnings, *preflight.warnings(apart)))
        again.refuse_lost_image(facts, goal.settings.name, run)
        restage = again.restage(facts, goal.settings.name, run)
        if restage:
            note = f"weights are copied from {restage['source']} into shared memory again: {restage['path']}"
            made = dataclasses.replace(made, warnings=(*made.warnings, note))
        kept = again.secrets_file(facts, run)
        if run.secrets and kept is None:
            sources = _secret_sources(goal, run, wanted, live=seen.live is not None)
    waits = release.patience(found[0])
    return made, Work(
        run,
        python,
        secrets=sources,
        root=goal.project.root,
        secrets_from=kept,
        restage=restage,
        staged=again.source_of_weights(facts, run),
        heartbeats=run.command[1:4] == ["-u", "-m", "trainer"],
        first_heartbeat_timeout_seconds=waits.get(
            "first_heartbeat_timeout_seconds", execute.FIRST_HEARTBEAT_TIMEOUT
        ),
        settle_seconds=waits.get("settle_seconds", execute.SETTLE_SECONDS),
        checkpoint_timeout_seconds=run.checkpoint_timeout_seconds,
    )


def _secret_sources(
    goal: Target, run: status.Run, release_id: str, *, live: bool
) -> Mapping[str, settings.SecretSource]:
    """Where the secrets of an older run are read again: as the run's file says today."""
    given: Mapping[str, settings.SecretSource] = {}
    with contextlib.suppress(DeployError):  # its file may be gone, or be somebody else's
        found = settings.load_run(goal.project, run.run_file, host=goal.settings, name=run.name)
        given = {key: source for key, source in found.settings.secrets.items() if key in run.secrets}
    missing = sorted(set(run.secrets) - set(given))
    if missing:
        raise DeployError(
            f"the secrets of release {release_id} of {run.name} ({', '.join(missing)}) are on "
            f"{goal.settings.name} no more; fab {'restart' if live else 'deploy'} reads them again"
        )
    problems = secrets.problems(given, goal.project.root)
    if problems:
        raise DeployError("\n".join(problems))
    return given


def plan_stop(
    goal: Target,
    name: str,
    *,
    checkpoint: bool = True,
    lock_wait: Patience = lock.NONE,
    progress: Progress = silent,
    watch: Watch | None = None,
) -> Plan:
    """The plan of `stop`. With `watch` it is made for a moment at which nobody else changes the name.

    Raises DeployError for a name that this host has never heard of, and if that moment does not come within
    `lock_wait`.
    """
    facts = turn.take(goal, name, lock_wait, progress, watch, alone=watch is not None).facts
    if name not in facts["names"] and not any(run["name"] == name for run in facts["runs"]):
        offered = nearest(name, facts["names"])
        if offered:
            raise DeployError(f"there is no {name} on {goal.settings.name}{offered}", code=USAGE)
    layout = survey.layout_of(goal.settings, facts, name)
    return plan.make_stop(facts, goal.settings, layout, checkpoint=checkpoint)


def shown(project: Project, path: Path) -> str:
    """A path as people type it: relative to the project where that is possible."""
    return str(path.relative_to(project.root)) if path.is_relative_to(project.root) else str(path)


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
    there = typedpath.look(directory, f"--out {directory}")
    if there and (there != typedpath.DIRECTORY or any(directory.iterdir())):
        raise DeployError(f"--out {directory} is not empty; name a new directory", code=USAGE)
    try:
        for name, data in {**made.files, release.MANIFEST: made.manifest}.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    except OSError as error:
        raise DeployError(
            f"--out {directory} cannot be written ({error.strerror}); name another directory", code=USAGE
        ) from None


def diff(goal: Target, wanted: Recipe, progress: Progress = silent) -> str:
    """What is deployed against what would be rendered now, as text; secrets are masked."""
    facts = goal.facts()
    found = survey.take(goal.project, goal.host, goal.settings, wanted.settings, facts, progress)
    new = plan.make_release(found, goal.settings, wanted.settings)
    old = plan.release_before(found)
    name, where = wanted.settings.name, goal.settings.name
    default = goal.settings.run or goal.project.default_run
    lost = again.puts_right(name, where, facts, default) if again.without_current(name, facts) else ""
    if old is None:
        return lost or f"nothing of {name} is deployed on {where}; fab deploy would write {new.id}"
    before = release.deployed(goal.host, found.layout, old)
    if before is None:
        return f"release {old} is damaged or gone; fab deploy would write {new.id}"
    edited = release.edited(facts, wanted.settings.name, old)
    edited = [*plan.changed_secrets(found), *plan.unread_secrets(found), *edited, *([lost] if lost else [])]
    if old == new.id:
        return "\n".join([f"no difference: release {old} is what would be rendered", *edited])
    lines = [f"release {old} → {new.id}", *release.differences(before[0], before[1], new), *edited, ""]
    return "\n".join([*lines, plan.diff_text(before[0], new)]).rstrip()


# -- bringing home, and keeping a host ---------------------------------------------------------------------


def pull(
    goal: Target, name: str, run_id: str | None, what: str, out: Path, progress: Progress = silent
) -> str:
    """Fetch what is meant; returns the sentence that says what came."""
    if what not in fetching.WHAT:
        raise DeployError(f"--what {what} is not one of {either(fetching.WHAT)}", code=USAGE)
    facts = goal.facts()
    layout = survey.layout_of(goal.settings, facts, name)
    newest = overview.run_path(facts, goal.settings.name, name, run_id)  # or the sentence for an unknown name
    checkpoint = None
    if what == "checkpoint":
        checkpoint = onhost.ask(goal.host, "deploy.pull_source:checkpoint", layout.checkpoints, run_id)
    item = fetching.choose(layout, newest.rpartition("/")[2], what, out, checkpoint)
    return fetching.fetch(goal.host, item, progress)


def plan_prune(
    goal: Target,
    name: str | None,
    keep: int,
    lock_wait: Patience = lock.NONE,
    progress: Progress = silent,
) -> Prune:
    """What can be removed from a host. Raises DeployError for a name that it has never heard of."""
    facts = goal.facts()
    if name is not None and name not in facts["names"]:
        raise DeployError(
            f"there is no {name} on {goal.settings.name}{nearest(name, facts['names'])}", code=USAGE
        )
    told = False
    while True:
        found = pruning.survey(goal.host, facts["state"]["root"], facts["shm"]["root"])
        at_work = pruning.busy(found)
        if not (at_work if name is None else at_work.get(name)) or not lock_wait.left:
            break
        if not told:
            progress(f"{next(iter(at_work.values()))}; waiting up to {lock_wait.seconds:g} s")
            told = True
        time.sleep(0.5)
    engine = facts["engine"]
    known = engine["answers"] and not engine.get("incomplete")
    images = facts["images"] if known else None
    return pruning.decide(goal.settings.name, found, images, keep=keep, name=name)


def prune_now(goal: Target, made: Prune, report: Progress, lock_wait: Patience) -> tuple[int, list[str]]:
    facts = goal.facts()
    return pruning.carry_out(made, goal.host, facts["state"]["root"], facts["shm"]["root"], report, lock_wait)
