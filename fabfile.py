"""The tasks of `fab`. They read arguments, call deploy/ and show the result; what they do is decided there.

`fab --list` shows the menu, `fab --help deploy` the flags of one task.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fabric import Connection, task
from invoke import Context, Exit

from deploy.errors import USAGE, DeployError

ROOT = Path(__file__).resolve().parent
INTERRUPTED = 130

try:  # Fabric reads this file right after us, and would answer a mistake in it with a traceback
    from deploy import yamlfile

    if (ROOT / "fabric.yaml").exists():
        yamlfile.read(ROOT / "fabric.yaml", "fabric.yaml")
except DeployError as error:
    raise Exit(str(error), code=error.code) from None

HELP = {
    "host": "a host of fabric.yaml or of the SSH configuration (default: localhost)",
    "name": "the experiment (default: the run file's name)",
    "run": "a file in runs/, or a path (default: run: of the host, else demo)",
    "run-id": "one run, like 0007-demo (default: the newest of the name)",
    "set": "KEY=VALUE for this run, like lr=3e-4; may be given several times",
    "dry-run": "print the plan and end",
    "json": "answer in JSON, for scripts",
    "no-follow": "do not follow the log",
    "lines": "how many lines of the past to show",
    "lock-wait": "seconds to wait for another deploy of the name",
    "no-checkpoint": "do not ask for a checkpoint first: what was learnt since the last one may be lost",
    "no-install": "do not install tini, even if it is missing and we are root",
    "same": "start the deployed release again, whatever the files say now",
    "debug": "log every command that is run",
    "out": "a directory to write the files to, instead of printing them",
}


def menu(**flags: Any) -> Callable[[Callable[..., int | None]], Any]:
    """A task of the menu: no short flags (`-h` would be `--host`), one sentence for an error, exit codes."""

    def wrap(body: Callable[..., int | None]) -> Any:
        @functools.wraps(body)
        def run(context: Context, *args: Any, **kwargs: Any) -> None:
            kwargs["host"] = one_host(context, kwargs.get("host"))
            if kwargs.get("debug"):
                import logging

                logging.basicConfig(level=logging.DEBUG, format="%(name)s: %(message)s", stream=sys.stderr)
                logging.getLogger("paramiko").setLevel(logging.WARNING)
            try:
                code = body(context, *args, **kwargs)
            except DeployError as error:
                raise Exit(here(str(error)), code=error.code) from None
            except KeyboardInterrupt:
                text = here("interrupted; fab status shows what is in progress")
                raise Exit(text, code=INTERRUPTED) from None
            except BrokenPipeError:  # | head: what only shows something has done enough
                sys.stderr.close()
                code = 1 if "dry_run" in body.__annotations__ else 0
            if code:
                raise Exit(code=code)

        names = {key.replace("_", "-") for key in body.__annotations__}
        return task(auto_shortflags=False, help={key: HELP[key] for key in HELP if key in names}, **flags)(
            run
        )

    return wrap


def one_host(context: Context, host: str | None) -> str | None:
    """The host of `--host` after the task, or of `-H` before it. (deploy.executor refuses both at once.)"""
    return context.original_host if isinstance(context, Connection) else host


def whole(flag: str, text: str) -> int:
    """A count given on the command line. (Invoke's own numbers answer a mistake with a traceback.)"""
    if not text.isdecimal():
        raise DeployError(f"{flag} {text} must be a whole number, like {flag} 60", code=USAGE)
    return int(text)


def waits(lock_wait: str) -> Any:
    """--lock-wait as one deadline, for planning and for the lock."""
    from deploy import lock

    return lock.Patience(whole("--lock-wait", lock_wait))


def here(text: str) -> str:
    """`text` with its hints as they can be typed: who comes by `make` has no `fab` on the PATH."""
    if shutil.which("fab"):
        return text
    return re.sub(r"\bfab (?=[a-z])", f"{os.path.relpath(sys.argv[0])} ", text)


def say(text: str) -> None:
    """Progress: beside the result, never in it."""
    print(here(text), file=sys.stderr, flush=True)


def show(value: Any) -> int:
    """The answer for a script."""
    import json

    print(json.dumps(value, indent=1, ensure_ascii=False, default=str), flush=True)
    return 0


def follow(goal: Any, name: str, *, state: str, lines: int | None = None, run_path: str | None = None) -> int:
    """Follow the log of a name from run to run, or of one run, to the end. Ctrl-C never ends the run."""
    from deploy import logs

    try:
        if run_path is not None:
            code = logs.follow(goal.host, run_path, lines=lines, out=sys.stdout.buffer)
        else:
            code = logs.follow_name(goal.host, state, name, lines=lines, out=sys.stdout.buffer)
    except KeyboardInterrupt:
        text = f"\nthe run goes on; fab tail --name {name} follows it again, fab stop --name {name} ends it"
        raise Exit(here(text), code=INTERRUPTED) from None
    return code or 0


def watch(goal: Any, record: str) -> Any:
    """Show the steps of a switch as they end. It runs on the host by itself, whether we watch or not."""
    from deploy import show, switch

    def report(step: Any) -> None:
        line = show.step(step)
        if line:
            say(line)

    try:
        return switch.watch(goal.host, record, report)
    except KeyboardInterrupt:
        text = here("\nthe switch goes on by itself; fab status shows how it ends")
        raise Exit(text, code=INTERRUPTED) from None


# -- changing what runs ------------------------------------------------------------------------------------


@menu(iterable=["set"])
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
    debug: bool = False,
) -> int | None:
    """Make the host run what the files say, then follow the log."""
    from deploy import actions

    patience = waits(lock_wait)
    goal = actions.target(host, ROOT)
    wanted = actions.recipe(goal, run, name, set)
    made, work = actions.plan_deploy(
        "deploy", goal, wanted, install=not no_install, lock_wait=patience, progress=say
    )
    return carry_out(
        goal, made, work, context, dry_run=dry_run, json=json, no_follow=no_follow, lock_wait=patience
    )


@menu(iterable=["set"])
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
    debug: bool = False,
) -> int | None:
    """Save, stop, and start anew with what the files say now."""
    from deploy import actions

    patience = waits(lock_wait)
    goal = actions.target(host, ROOT)
    if same and set:
        raise DeployError(
            "--same starts the deployed release as it is, so --set cannot change it; give one of them"
        )
    if same:
        name = actions.name_of(goal, run, name)
        made, work = actions.plan_same(goal, name, install=not no_install, lock_wait=patience)
    else:
        wanted = actions.recipe(goal, run, name, set)
        made, work = actions.plan_deploy(
            "restart", goal, wanted, install=not no_install, lock_wait=patience, progress=say
        )
    return carry_out(
        goal, made, work, context, dry_run=dry_run, json=json, no_follow=no_follow, lock_wait=patience
    )


@menu()
def stop(
    context: Context,
    host: str | None = None,
    run: str | None = None,
    name: str | None = None,
    dry_run: bool = False,
    json: bool = False,
    no_checkpoint: bool = False,
    lock_wait: str = "0",
    debug: bool = False,
) -> int | None:
    """Ask for a checkpoint, wait for it, then stop the run."""
    from deploy import actions, execute

    patience = waits(lock_wait)
    goal = actions.target(host, ROOT)
    made = actions.plan_stop(
        goal,
        actions.name_of(goal, run, name),
        checkpoint=not no_checkpoint,
        lock_wait=patience,
        progress=say,
    )
    if not json:
        print(made, flush=True)
    if not made.acts or dry_run or context.config.run.dry:
        return show({"plan": made.to_json()}) if json else None
    outcome = watch(goal, execute.stop(made, goal.host, say, patience))
    if json:
        show({"plan": made.to_json(), "outcome": vars(outcome)})
    return failed(outcome, made) if outcome.word != "done" else None


@menu(iterable=["set"])
def plan(
    context: Context,
    host: str | None = None,
    run: str | None = None,
    name: str | None = None,
    set: Any = None,
    json: bool = False,
    no_install: bool = False,
    debug: bool = False,
) -> int | None:
    """Show what deploy would do, and change nothing."""
    from deploy import actions

    goal = actions.target(host, ROOT)
    wanted = actions.recipe(goal, run, name, set)
    made, work = actions.plan_deploy("deploy", goal, wanted, install=not no_install, progress=say)
    return carry_out(goal, made, work, context, dry_run=True, json=json, no_follow=True, lock_wait=waits("0"))


def carry_out(
    goal: Any,
    made: Any,
    work: Any,
    context: Context,
    *,
    dry_run: bool,
    json: bool,
    no_follow: bool,
    lock_wait: Any,
) -> int | None:
    """Show a plan, do it, follow the log: the end of deploy and restart."""
    from deploy import execute

    if not json:
        print(made, flush=True)
    if dry_run or context.config.run.dry:
        return show({"plan": made.to_json()}) if json else None
    if not made.acts:
        if json:
            return show({"plan": made.to_json(), "run_id": made.stop.run_id})
        return None if no_follow else follow(goal, made.name, state=made.layout.state, lines=20)
    path, record = execute.start(made, goal.host, work, say, lock_wait)
    outcome = watch(goal, record)
    if json:
        show({"plan": made.to_json(), "run_id": Path(path).name, "outcome": vars(outcome)})
    if outcome.word != "done":
        return failed(outcome, made)
    end = execute.ended(goal.host, path)
    say(f"{Path(path).name} {'has ' + end['reason'] + ' already' if end else 'is running'}")
    if end and (no_follow or json):
        return int(end["code"])
    return None if no_follow or json else follow(goal, made.name, state=made.layout.state)


def failed(outcome: Any, made: Any) -> int:
    """Say why a switch failed, with the last lines of what it started."""
    for line in outcome.last_lines:
        say(f"  │ {line}")
    say(f"{made.task} of {made.name} failed: {outcome.reason}")
    return 1


# -- looking -----------------------------------------------------------------------------------------------


@menu()
def tail(
    context: Context,
    host: str | None = None,
    run: str | None = None,
    name: str | None = None,
    run_id: str | None = None,
    lines: str = "20",
    no_follow: bool = False,
    debug: bool = False,
) -> int | None:
    """Follow a run's log; Ctrl-C ends the following, not the run."""
    from deploy import actions, logs

    past = whole("--lines", lines)
    goal = actions.target(host, ROOT)
    facts = goal.facts()
    name = actions.name_of(goal, run, name) if run_id is None else actions.name_of_run(run_id)
    path = actions.run_path(facts, goal.settings.name, name, run_id)
    if no_follow:
        logs.follow(goal.host, path, lines=past, out=sys.stdout.buffer, follow=False)
        return None
    return follow(goal, name, state=facts["state"]["root"], lines=past, run_path=path if run_id else None)


@menu()
def status(
    context: Context,
    host: str | None = None,
    name: str | None = None,
    run_id: str | None = None,
    json: bool = False,
    debug: bool = False,
) -> int | None:
    """What every run does now, by the evidence: one line each."""
    import dataclasses

    from deploy import actions
    from deploy import show as text

    goal = actions.target(host, ROOT)
    facts = goal.facts(sample=0.4)
    if run_id is not None:
        actions.run_path(facts, goal.settings.name, "", run_id)
    rows = actions.rows(goal, facts, name, run_id)
    if json:
        return show([dataclasses.asdict(row) for row in rows])
    print(here(text.status(rows, text.colour()) or actions.nothing(goal, facts, name)))
    for problem in facts["problems"]:
        say(f"could not be read: {problem}")
    return None


@menu()
def runs(
    context: Context,
    host: str | None = None,
    name: str | None = None,
    json: bool = False,
    debug: bool = False,
) -> int | None:
    """The runs of a host, newest first."""
    from deploy import actions
    from deploy import show as text

    goal = actions.target(host, ROOT)
    facts = goal.facts()
    found = [run for run in facts["runs"] if name is None or run["name"] == name]
    if json:
        return show(found)
    print(text.runs(found, facts["time"]) if found else actions.nothing(goal, facts, name))
    return None


@menu(iterable=["set"])
def render(
    context: Context,
    host: str | None = None,
    run: str | None = None,
    name: str | None = None,
    set: Any = None,
    out: str | None = None,
    debug: bool = False,
) -> int | None:
    """Print the files of the release, or write them to --out DIR."""
    from deploy import actions

    goal = actions.target(host, ROOT)
    release = actions.rendered(goal, actions.recipe(goal, run, name, set), say)
    if out is not None:
        actions.write_out(release, Path(out))
        print(f"release {release.id}: {len(release.files)} files in {out}")
        return None
    for path, data in sorted(release.files.items()):
        if path.startswith("app/"):
            continue
        print(f"── {path}\n{data.decode()}", end="" if data.endswith(b"\n") else "\n")
    print(f"── app/: {sum(path.startswith('app/') for path in release.files)} files of the trainer")
    print(f"── release {release.id}")
    return None
