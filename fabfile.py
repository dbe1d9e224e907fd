"""The tasks of `fab`. They read arguments, call deploy/ and show the result; what they do is decided there.

`fab --list` shows the menu, `fab --help deploy` the flags of one task.
"""

# ruff: noqa: E402
from __future__ import annotations

from deploy import interrupt

interrupt.ends_at_once()  # before anything else is imported

import functools
import sys
from pathlib import Path
from typing import Any

from fabric import main
from invoke import Collection, Context, Exit
from invoke.tasks import Task

from deploy import conduct, menu, output, parsing
from deploy.errors import USAGE, DeployError
from deploy.menu import EVERY_NAME, EVERYWHERE, one_process, one_run, say, show, waits, whole

ROOT = Path(__file__).resolve().parent
task = functools.partial(menu.task, ROOT)
weights, data, image = Collection("weights"), Collection("data"), Collection("image")
part = functools.partial(menu.part, ROOT)

if interrupt.ITSELF:
    output.guard()

try:  # Fabric reads this file right after us, and would answer a mistake in it with a traceback
    from deploy import fabricfile

    fabricfile.check(ROOT / "fabric.yaml")
except DeployError as error:
    raise Exit(str(error), code=error.code) from None


if interrupt.ITSELF:
    parsing.speak(main.program, menu.here)

# -- changing what runs ------------------------------------------------------------------------------------


@task(iterable=["set"])
def deploy(
    context: Context,
    host: str | None = None,
    run: str | None = None,
    name: str | None = None,
    set: Any = None,
    dry_run: bool = False,
    json: bool = False,
    no_follow: bool = False,
    lock_wait: str = "0",
    no_install: bool = False,
    build: str | None = None,
    rollback_on_failure: bool = False,
    evict_first: bool = False,
    accept_new_host_key: bool = False,
    debug: bool = False,
) -> int | None:
    """Make the host run what the files say, then follow the log."""
    from deploy import target

    patience = waits(lock_wait)
    goal = target.one(host, ROOT, accept_new_host_key)
    looks_only = dry_run or context.config.run.dry
    shown = {"looks_only": looks_only, "json": json, "no_follow": no_follow, "lock_wait": patience}
    ways: dict[str, Any] = {"install": not no_install, "build": build, "evict_first": evict_first}
    return conduct.change("deploy", goal, run, name, set, rollback=rollback_on_failure, **ways, **shown)


@task(iterable=["set"])
def restart(
    context: Context,
    host: str | None = None,
    run: str | None = None,
    name: str | None = None,
    set: Any = None,
    same: bool = False,
    dry_run: bool = False,
    json: bool = False,
    no_follow: bool = False,
    lock_wait: str = "0",
    no_install: bool = False,
    build: str | None = None,
    rollback_on_failure: bool = False,
    evict_first: bool = False,
    accept_new_host_key: bool = False,
    debug: bool = False,
) -> int | None:
    """Save, stop, and start anew with what the files say now."""
    from deploy import target

    patience = waits(lock_wait)
    if same and set:
        raise DeployError(
            "--same starts the deployed release as it is, so --set cannot change it; give one of them",
            code=USAGE,
        )
    goal = target.one(host, ROOT, accept_new_host_key)
    looks_only = dry_run or context.config.run.dry
    shown = {"looks_only": looks_only, "json": json, "no_follow": no_follow, "lock_wait": patience}
    if same:
        return conduct.again("restart", goal, run, name, install=not no_install, **shown)
    ways: dict[str, Any] = {"install": not no_install, "build": build, "evict_first": evict_first}
    return conduct.change("restart", goal, run, name, set, rollback=rollback_on_failure, **ways, **shown)


@task()
def start(
    context: Context,
    host: str | None = None,
    run: str | None = None,
    name: str | None = None,
    dry_run: bool = False,
    json: bool = False,
    no_follow: bool = False,
    lock_wait: str = "0",
    no_install: bool = False,
    accept_new_host_key: bool = False,
    debug: bool = False,
) -> int | None:
    """Start the deployed release again, if no run of it is in progress."""
    from deploy import target

    looks_only = dry_run or context.config.run.dry
    shown = {"looks_only": looks_only, "json": json, "no_follow": no_follow, "lock_wait": waits(lock_wait)}
    goal = target.one(host, ROOT, accept_new_host_key)
    return conduct.again("start", goal, run, name, install=not no_install, **shown)


@task()
def rollback(
    context: Context,
    host: str | None = None,
    run: str | None = None,
    name: str | None = None,
    release: str | None = None,
    dry_run: bool = False,
    json: bool = False,
    no_follow: bool = False,
    lock_wait: str = "0",
    no_install: bool = False,
    accept_new_host_key: bool = False,
    debug: bool = False,
) -> int | None:
    """Stop, and start the release before this one, with its image."""
    from deploy import target

    looks_only = dry_run or context.config.run.dry
    shown = {"looks_only": looks_only, "json": json, "no_follow": no_follow, "lock_wait": waits(lock_wait)}
    goal = target.one(host, ROOT, accept_new_host_key)
    return conduct.again("rollback", goal, run, name, release, install=not no_install, **shown)


@task()
def stop(
    context: Context,
    host: str | None = None,
    run: str | None = None,
    name: str | None = None,
    dry_run: bool = False,
    json: bool = False,
    no_checkpoint: bool = False,
    lock_wait: str = "600",
    accept_new_host_key: bool = False,
    debug: bool = False,
) -> int | None:
    """Ask for a checkpoint, wait for it, then stop the run."""
    from deploy import actions, execute, lock, target, turn

    patience = waits(lock_wait)
    goal = target.one(host, ROOT, accept_new_host_key)
    named = actions.name_of(goal, run, name)
    looks_only = dry_run or context.config.run.dry

    def planned() -> Any:
        made = actions.plan_stop(
            goal,
            named,
            checkpoint=not no_checkpoint,
            lock_wait=lock.NONE if looks_only else patience,
            progress=say,
            # A run that lives can be stopped; how it gets on from there is not waited for.
            watch=None if looks_only else functools.partial(conduct.attach, goal, until="start"),
        )
        return made, None

    made, record = turn.carry(
        planned,
        lambda made: None if json else print(made, flush=True),
        lambda made, _: None if looks_only else execute.stop(made, goal.host, say, patience),
        say,
    )
    if record is None:
        return show({"plan": made.to_json()}) if json else None
    outcome = conduct.watch_switch(goal, record)
    if json:
        show({"plan": made.to_json(), "outcome": vars(outcome)})
    return conduct.failed(outcome, made) if outcome.word != "done" else None


@task(iterable=["set"])
def plan(
    context: Context,
    host: str | None = None,
    run: str | None = None,
    name: str | None = None,
    set: Any = None,
    json: bool = False,
    lock_wait: str = "0",
    no_install: bool = False,
    build: str | None = None,
    evict_first: bool = False,
    accept_new_host_key: bool = False,
    debug: bool = False,
) -> int | None:
    """Show what deploy would do, and change nothing."""
    from deploy import target

    patience = waits(lock_wait)
    goal = target.one(host, ROOT, accept_new_host_key)
    shown = {"looks_only": True, "json": json, "no_follow": True, "lock_wait": patience}
    ways: dict[str, Any] = {"install": not no_install, "build": build, "evict_first": evict_first}
    return conduct.change("deploy", goal, run, name, set, **ways, **shown)


@task(iterable=["set"])
def diff(
    context: Context,
    host: str | None = None,
    run: str | None = None,
    name: str | None = None,
    set: Any = None,
    accept_new_host_key: bool = False,
    debug: bool = False,
) -> int | None:
    """Show what is deployed against what would be rendered now."""
    from deploy import actions, target

    goal = target.one(host, ROOT, accept_new_host_key)
    print(actions.diff(goal, actions.recipe(goal, run, name, set), say), flush=True)
    return None


@task(
    {
        "script": "a script on the host that starts the training, like /root/run.sh",
        "pid": "a process on the host that trains already; it is not touched",
        "out": "the run's file to write (default: runs/NAME.yaml)",
        "name": "the experiment (default: what the command calls itself)",
        "container": "the id of a container of a Proxmox host, like 200 (as --host pve/200)",
        "line": "which program of the script, by the line that it begins in",
        "dry-run": "print the file, and write and register nothing",
    }
)
def adopt(
    context: Context,
    host: str | None = None,
    container: str | None = None,
    script: str | None = None,
    pid: str | None = None,
    name: str | None = None,
    out: str | None = None,
    line: str | None = None,
    as_trainer: bool = False,
    force: bool = False,
    dry_run: bool = False,
    json: bool = False,
    accept_new_host_key: bool = False,
    debug: bool = False,
) -> int | None:
    """Make a run's file of a script, or of a process that runs."""
    from deploy import adopt_task, target

    number = None if pid is None else whole("--pid", pid)
    at = None if line is None else whole("--line", line)
    there = None if container is None else whole("--container", container)
    goal = target.one(adopt_task.inside(host, there), ROOT, accept_new_host_key)
    looks_only = dry_run or context.config.run.dry
    wanted: dict[str, Any] = {
        "script": script,
        "pid": number,
        "name": name,
        "out": out,
        "line": at,
        "trainer": as_trainer,
    }
    made = adopt_task.carry_out(goal, **wanted, force=force, looks_only=looks_only)
    if json:
        return show(made.to_json())
    print(menu.here(adopt_task.text(made, goal, looks_only)), flush=True)
    return None


# -- looking -----------------------------------------------------------------------------------------------


@task()
def tail(
    context: Context,
    host: str | None = None,
    run: str | None = None,
    name: str | None = None,
    run_id: str | None = None,
    lines: str | None = None,
    since: str | None = None,
    grep: str | None = None,
    no_follow: bool = False,
    accept_new_host_key: bool = False,
    debug: bool = False,
) -> int | None:
    """Follow a run's log; Ctrl-C ends the following, not the run."""
    import datetime
    import time

    from deploy import actions, log_filter, overview, target
    from deploy import since as moments

    one_run(name, run_id)
    past = None if lines is None else whole("--lines", lines)
    moment = None if since is None else moments.moment("--since", since, datetime.datetime.now())
    if past is None and moment is None:
        past = 20
    if grep is not None:
        log_filter.compiled(grep)
    goal = target.one(host, ROOT, accept_new_host_key)
    facts = goal.facts()
    if moment is not None and not goal.host.is_local:  # by the clock there, and rather too early
        moment += facts["time"] - time.time()
    name = actions.name_of(goal, run, name, run_id)
    path = overview.run_path(facts, goal.settings.name, name, run_id)
    shown: dict[str, Any] = {"lines": past, "since": moment, "grep": grep, "follow": not no_follow}
    code = conduct.follow(
        goal, name, state=facts["state"]["root"], run_path=path if run_id else None, **shown
    )
    return None if no_follow else code


@task(EVERYWHERE)
def status(
    context: Context,
    host: str | None = None,
    name: str | None = None,
    run_id: str | None = None,
    verbose: bool = False,
    watch: bool = False,
    interval: str | None = None,
    json: bool = False,
    accept_new_host_key: bool = False,
    debug: bool = False,
) -> int | None:
    """What every run does now, by the evidence, on every host of fabric.yaml."""
    from deploy import target

    one_run(name, run_id)
    goals = target.several(host, ROOT, accept_new_host_key)
    seconds = 2 if interval is None else whole("--interval", interval)
    if not seconds:
        raise DeployError("--interval 0 leaves no pause; give at least 1", code=USAGE)
    if interval is not None and not watch:
        raise DeployError("--interval is for --watch; add it, or leave --interval out", code=USAGE)
    if watch and json:
        raise DeployError(
            "--watch and --json exclude each other: call status --json as often as you like", code=USAGE
        )
    if watch:
        from deploy import refresh
        from deploy import show as text

        shown = (seconds, verbose, text.colour(), sys.stdout, menu.here)
        conduct.until_interrupted(lambda: refresh.status(goals, name, run_id, *shown))
    return conduct.status_once(goals, name, run_id, verbose, json)


@task(EVERYWHERE)
def watch(
    context: Context,
    host: str | None = None,
    name: str | None = None,
    run_id: str | None = None,
    accept_new_host_key: bool = False,
    debug: bool = False,
) -> int | None:
    """A live screen of what runs: curves, memory, verdict, last lines."""
    from deploy import target, watching

    one_run(name, run_id)
    watching.check(sys.stdout)
    goals = target.several(host, ROOT, accept_new_host_key)
    conduct.until_interrupted(lambda: watching.watch(goals, name, run_id, sys.stdout, menu.here))
    return None


@task()
def compare(
    context: Context,
    before: str,
    after: str,
    host: str | None = None,
    last: str = "50",
    plot: str | None = None,
    json: bool = False,
    accept_new_host_key: bool = False,
    debug: bool = False,
) -> int | None:
    """Two runs side by side; the phase of a step that regressed comes first."""
    from deploy import compare as sides
    from deploy import plot as picture
    from deploy import reference as chosen

    count = whole("--last", last)
    if plot is not None:
        picture.check(Path(plot))
    wanted = [chosen.find(word, host, ROOT, accept_new_host_key) for word in (before, after)]
    found = chosen.figures(wanted, count)
    hosts = [goal.settings.name for goal, _ in wanted]
    labels = [one["run_id"] for one in found]
    if hosts[0] != hosts[1]:
        labels = [f"{where}:{label}" for where, label in zip(hosts, labels, strict=True)]
    made = sides.compare(found[0], found[1], (labels[0], labels[1]))
    if plot is not None:
        picture.write(made, Path(plot))
        say(f"the picture is in {plot}")
    if json:
        return show(made.to_json())
    print(menu.here(sides.text(made)))
    return None


@task({"name": "the name that gets the reference (default: the run's own)"})
def reference(
    context: Context,
    of: str,
    host: str | None = None,
    name: str | None = None,
    last: str = "50",
    clear: bool = False,
    json: bool = False,
    accept_new_host_key: bool = False,
    debug: bool = False,
) -> int | None:
    """Choose the run that status holds the speed of a name against."""
    from deploy import reference as chosen
    from deploy import target

    count = whole("--last", last)
    goal, run = chosen.find(of, host, ROOT, accept_new_host_key)
    if clear:
        chosen.write(goal, chosen.name_of(run), None)
        say(f"{chosen.name_of(run)} on {goal.settings.name} has no reference")
        return None
    (found,) = chosen.figures([(goal, run)], count)
    value = chosen.made(found, goal.settings.name)
    where = target.one(host, ROOT, accept_new_host_key) if host is not None else goal
    chosen.write(where, name or found["name"], value)
    if json:
        return show(value)
    print(
        f"{value['run_id']} with {value['tokens_per_second']:,.0f} tok/s is the reference of "
        f"{name or found['name']} on {where.settings.name}"
    )
    return None


@task(EVERY_NAME)
def runs(
    context: Context,
    host: str | None = None,
    name: str | None = None,
    json: bool = False,
    accept_new_host_key: bool = False,
    debug: bool = False,
) -> int | None:
    """The runs of a host, newest first."""
    from deploy import mask, overview, target
    from deploy import show as text

    goal = target.one(host, ROOT, accept_new_host_key)
    facts = goal.facts()
    overview.check_name(goal, [facts], name)
    found = [run for run in facts["runs"] if name is None or run["name"] == name]
    if json:
        return show(mask.tree(found))
    print(menu.here(text.runs(found, facts["time"]) if found else overview.nothing(goal, facts, name)))
    return None


@task(iterable=["set"])
def render(
    context: Context,
    host: str | None = None,
    run: str | None = None,
    name: str | None = None,
    set: Any = None,
    out: str | None = None,
    accept_new_host_key: bool = False,
    debug: bool = False,
) -> int | None:
    """Print the files of the release, or write them to --out DIR."""
    from deploy import actions, target

    goal = target.one(host, ROOT, accept_new_host_key)
    release = actions.rendered(goal, actions.recipe(goal, run, name, set), say)
    if out is not None:
        actions.write_out(release, Path(out))
        print(f"release {release.id}: {len(release.files)} files in {out}")
        return None
    for path, data in sorted(release.files.items()):
        if path.startswith("app/"):
            continue
        print(f"── {path}\n{data.decode()}", end="" if data.endswith(b"\n") else "\n")
    code = sum(path.startswith("app/") for path in release.files)
    print(f"── app/: {code} files of the trainer" if code else "── the trainer's code is in the image")
    print(f"── release {release.id}")
    return None


@task()
def pull(
    context: Context,
    host: str | None = None,
    run: str | None = None,
    name: str | None = None,
    run_id: str | None = None,
    what: str = "checkpoint",
    out: str = "pulled",
    accept_new_host_key: bool = False,
    debug: bool = False,
) -> int | None:
    """Bring a checkpoint, events, a log or a whole run here."""
    from deploy import actions, target

    one_run(name, run_id)
    goal = target.one(host, ROOT, accept_new_host_key)
    name = actions.name_of(goal, run, name, run_id)
    print(actions.pull(goal, name, run_id, what, Path(out), say))
    return None


@task()
def peek(
    context: Context,
    host: str | None = None,
    run: str | None = None,
    name: str | None = None,
    run_id: str | None = None,
    pid: str | None = None,
    flush: bool = False,
    json: bool = False,
    accept_new_host_key: bool = False,
    debug: bool = False,
) -> int | None:
    """What a silent Python process has printed, but not yet written."""
    from deploy import actions, target
    from deploy import peek as peeking

    one_run(name, run_id)
    number = one_process(pid, run or name or run_id)
    goal = target.one(host, ROOT, accept_new_host_key)
    if number is None:
        named = actions.name_of(goal, run, name, run_id)
        pids, tty = peeking.pids(goal.facts(), goal.settings.name, named, run_id)
    else:
        pids, tty = [number], False
    found = peeking.look(goal.host, pids, number is None)
    peeking.check(goal.settings.name, found, number, tty)
    told = peeking.flush(goal.host, found) if flush else []
    if json:
        answers = [{"pid": one, "said": words, "done": done} for one, words, done in told]
        show({"processes": [peeking.to_json(one) for one in found], "flush": answers if flush else None})
    else:
        print(menu.here(peeking.text(found, tty)), flush=True)
        for _, words, _ in told:
            say(words)
        if flush and not told:
            say("nothing is held back, so nothing was asked")
    return int(any(not done for _, _, done in told))


@task()
def stacks(
    context: Context,
    host: str | None = None,
    run: str | None = None,
    name: str | None = None,
    run_id: str | None = None,
    pid: str | None = None,
    json: bool = False,
    accept_new_host_key: bool = False,
    debug: bool = False,
) -> int | None:
    """The Python stacks of a run: who is where, and what all wait for."""
    from deploy import actions, target
    from deploy import stacks as stack

    one_run(name, run_id)
    number = one_process(pid, run or name or run_id)
    goal = target.one(host, ROOT, accept_new_host_key)
    if number is None:
        name = actions.name_of(goal, run, name, run_id)
    told = stack.look(goal, name, run_id, number, say)
    if json:
        return show(stack.to_json(told))
    print(menu.here(stack.text(told)), flush=True)
    return None


# -- keeping a host ----------------------------------------------------------------------------------------


@task(EVERY_NAME)
def prune(
    context: Context,
    host: str | None = None,
    name: str | None = None,
    keep: str = "5",
    yes: bool = False,
    dry_run: bool = False,
    json: bool = False,
    lock_wait: str = "0",
    accept_new_host_key: bool = False,
    debug: bool = False,
) -> int | None:
    """Remove old releases, runs, images and weights that nothing uses."""
    from deploy import actions, target
    from deploy.sizes import size

    patience, count = waits(lock_wait), whole("--keep", keep)
    goal = target.one(host, ROOT, accept_new_host_key)
    made = actions.plan_prune(goal, name, count, patience, say)
    if not json:
        print(made, flush=True)
    if dry_run or context.config.run.dry or not made.items:
        return show({"plan": made.to_json()}) if json else None
    if not conduct.agreed("Remove all of this?", yes):
        say("nothing was removed")
        return 1
    freed, stayed = actions.prune_now(goal, made, say, patience)
    for sentence in stayed:
        say(f"kept: {sentence}")
    if json:
        return show({"plan": made.to_json(), "freed_bytes": freed, "kept": stayed})
    print(f"{size(freed)} freed on {goal.settings.name}")
    return None


@task()
def bootstrap(
    context: Context,
    host: str | None = None,
    yes: bool = False,
    dry_run: bool = False,
    json: bool = False,
    accept_new_host_key: bool = False,
    debug: bool = False,
) -> int | None:
    """Install what a Debian or Ubuntu host lacks, after saying what."""
    from deploy import bootstrap as boots
    from deploy import target

    goal = target.one(host, ROOT, accept_new_host_key)
    auto = goal.settings.runtime == "auto" and goal.settings.container is None
    engine = None if auto else goal.settings.runtime == "compose"
    made = boots.decide(goal.settings.name, boots.look(goal.host), engine=engine)
    if json:
        show(made.to_json())
    else:
        print(made, flush=True)
    if dry_run or context.config.run.dry:
        return None
    if made.steps:
        if not conduct.agreed(f"Run these {len(made.steps)} commands as root on {made.host}?", yes):
            say("nothing was done")
            return 1
        boots.carry_out(made, goal.host, say)
        left = boots.missing(boots.look(goal.host), engine=engine)
        for sentence in left:
            say(f"still missing: {sentence}")
        if not left:
            say(f"{made.host} has all that a deploy needs")
        return int(bool(left))
    return int(bool(made.blocked))


# -- weights and data --------------------------------------------------------------------------------------


@part(weights, "push")
def push_weights(
    context: Context,
    directory: str,
    host: str | None = None,
    streams: str | None = None,
    rsync: bool = False,
    evict_first: bool = False,
    json: bool = False,
    accept_new_host_key: bool = False,
    debug: bool = False,
) -> int | None:
    """Send a model directory into the host's shared memory, verified."""
    from deploy import target

    goal = target.one(host, ROOT, accept_new_host_key)
    how: dict[str, Any] = {"streams": streams, "rsync": rsync, "evict_first": evict_first}
    return conduct.pushed(goal, "weights", directory, json=json, **how)


@part(weights, "stage")
def stage_weights(
    context: Context,
    directory: str,
    host: str | None = None,
    evict_first: bool = False,
    json: bool = False,
    accept_new_host_key: bool = False,
    debug: bool = False,
) -> int | None:
    """Copy a model directory of the host into its shared memory."""
    from deploy import target

    goal = target.one(host, ROOT, accept_new_host_key)
    return conduct.staged(goal, "weights", directory, json=json, evict_first=evict_first)


@part(data, "push")
def push_data(
    context: Context,
    directory: str,
    host: str | None = None,
    streams: str | None = None,
    rsync: bool = False,
    json: bool = False,
    accept_new_host_key: bool = False,
    debug: bool = False,
) -> int | None:
    """Send a directory of data to the host's disk, verified."""
    from deploy import target

    goal = target.one(host, ROOT, accept_new_host_key)
    return conduct.pushed(goal, "data", directory, json=json, streams=streams, rsync=rsync)


@part(data, "stage")
def stage_data(
    context: Context,
    directory: str,
    host: str | None = None,
    json: bool = False,
    accept_new_host_key: bool = False,
    debug: bool = False,
) -> int | None:
    """Copy a directory of data of the host to where runs find it."""
    from deploy import target

    goal = target.one(host, ROOT, accept_new_host_key)
    return conduct.staged(goal, "data", directory, json=json)


@part(weights, "list")
def list_weights(
    context: Context,
    host: str | None = None,
    json: bool = False,
    accept_new_host_key: bool = False,
    debug: bool = False,
) -> int | None:
    """The copies of weights and data on a host, and who uses them."""
    from deploy import target
    from deploy import weights_tasks as tasks

    goal = target.one(host, ROOT, accept_new_host_key)
    found = tasks.listing(goal)
    if json:
        return show(found)
    print(menu.here(tasks.table(found, goal.settings.name)))
    return None


@part(weights, "verify")
def verify_weights(
    context: Context,
    host: str | None = None,
    copy: str | None = None,
    json: bool = False,
    accept_new_host_key: bool = False,
    debug: bool = False,
) -> int | None:
    """Read the copies in shared memory again, byte by byte."""
    from deploy import target
    from deploy import weights_tasks as tasks

    goal = target.one(host, ROOT, accept_new_host_key)
    found = tasks.verify(goal, copy, say)
    if json:
        show(dict(found))
    elif not found:
        print(f"no weights with a manifest lie in the shared memory of {goal.settings.name}")
    for path, problems in () if json else found:
        print("\n".join(problems) if problems else f"{path}: every byte is what was sent")
    return int(any(problems for _, problems in found))


@part(weights, "evict")
def evict_weights(
    context: Context,
    copy: str,
    host: str | None = None,
    json: bool = False,
    accept_new_host_key: bool = False,
    debug: bool = False,
) -> int | None:
    """Remove weights that no process uses from shared memory."""
    from deploy import target
    from deploy import weights_tasks as tasks
    from deploy.sizes import size

    goal = target.one(host, ROOT, accept_new_host_key)
    done = tasks.evict(goal, copy, say)
    if json:
        return show([{"path": path, "bytes": freed} for path, freed in done])
    for path, freed in done:
        print(f"{path} is gone from {goal.settings.name}: {size(freed)} of memory freed")
    return None


# -- the image ---------------------------------------------------------------------------------------------


@part(image, "build", iterable=["set"])
def build_image(
    context: Context,
    host: str | None = None,
    run: str | None = None,
    name: str | None = None,
    set: Any = None,
    for_: str | None = None,
    form: str | None = None,
    build: str | None = None,
    json: bool = False,
    accept_new_host_key: bool = False,
    debug: bool = False,
) -> int | None:
    """Build a run's image for an engine, or as one file for Proxmox."""
    from deploy import actions, target
    from deploy import image_tasks as tasks

    goal = target.one(host, ROOT, accept_new_host_key)
    wanted = actions.recipe(goal, run, name, set or ()).settings
    if tasks.purpose(goal, for_) == "engine":
        reference = tasks.for_engine(goal, wanted, build, say)
        return show({"image": reference}) if json else print(reference)
    made = tasks.for_pct(goal, wanted, form, say, named=host is not None)
    if json:
        return show(made.to_json())
    print(f"{made.path} ({made.words()})")
    return None


namespace = Collection(
    *[one for one in list(globals().values()) if isinstance(one, Task)], weights, data, image
)
