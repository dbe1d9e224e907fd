"""The tasks of `fab`. They read arguments, call deploy/ and show the result; what they do is decided there.

`fab --list` shows the menu, `fab --help deploy` the flags of one task.
"""

# ruff: noqa: E402
from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent
EARLY = 600.0  # seconds, in which a run that fails is taken for one that never worked
INTERRUPTED = 130
ITSELF = Path(sys.argv[0]).stem == "fab" and threading.current_thread() is threading.main_thread()


def ends_at_once() -> None:
    """Until a task begins, and after its end, Ctrl-C ends the command without a word. (Invoke would exit with
    1; an exception, while modules are imported, would be a traceback.)"""
    if ITSELF:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))


ends_at_once()  # before anything else is imported

import dataclasses
import functools
import re
import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any

from fabric import Connection, main, task
from invoke import Context, Exit

from deploy import early, output, parsing
from deploy.errors import USAGE, DeployError

if ITSELF:
    output.guard()

try:  # Fabric reads this file right after us, and would answer a mistake in it with a traceback
    from deploy import fabricfile

    fabricfile.check(ROOT / "fabric.yaml")
except DeployError as error:
    raise Exit(str(error), code=error.code) from None


def here(text: str) -> str:
    """`text` with its hints as they can be typed: who comes by `make` has no `fab` on the PATH."""
    if shutil.which("fab"):
        return text
    return re.sub(r"\bfab (?=[a-z])", f"{os.path.relpath(sys.argv[0])} ", text)


if ITSELF:
    parsing.speak(main.program, here)

HELP = {
    "host": "a host of fabric.yaml or of the SSH configuration (default: localhost)",
    "name": "the experiment (default: the run file's name)",
    "run": "a file in runs/, or a path (default: run: of the host, else demo)",
    "run-id": "one run, like 0007-demo (default: the newest of the name)",
    "set": "KEY=VALUE for this run, like lr=3e-4; may be given several times",
    "dry-run": "print the plan and end",
    "json": "answer in JSON, for scripts",
    "no-follow": "do not follow the log",
    "lines": "how many lines of the past to show (default 20); with --grep, how many matches",
    "since": "show what was written since then: 2m, 1h30m, 14:05, 2026-07-01T14:05",
    "grep": "show only lines that match this regular expression, and launch's own",
    "lock-wait": "seconds to wait for another deploy of the name (default 0; stop: 600)",
    "no-checkpoint": "do not ask for a checkpoint first: what was learnt since the last one may be lost",
    "no-install": "do not install tini, even if it is missing and we are root",
    "same": "start the deployed release again, whatever the files say now",
    "debug": "log every command that is run",
    "out": "a directory to write to",
    "accept-new-host-key": "trust a host that SSH does not know yet (a changed key is never trusted)",
    "rollback-on-failure": "if the new run dies before its first step, start the release before it again",
    "build": "where the image is built: host (default) or local, then only what the host lacks travels",
    "release": "a release of the name, instead of the previous one",
    "what": "checkpoint (default), events, log or run",
    "keep": "how many releases and runs of each name stay",
    "yes": "do not ask",
    "pid": "one process of the host, whoever started it (default: every Python process of the run)",
    "flush": "ask the process to write it (Python 3.14 and later)",
    "verbose": "the evidence behind each verdict",
    "watch": "refresh in place until Ctrl-C; without a terminal, print once per interval",
    "before": "a run, like 0007-demo, or a name (its newest run); of another host HOST:RUN",
    "after": "the run to compare with it",
    "of": "a run, like 0007-demo, or a name (its newest run); of another host HOST:RUN",
    "last": "how many of the newest logged records count (default 50)",
    "plot": "write a picture to this PNG file",
    "clear": "take the reference of the name away",
    "interval": "with --watch, seconds between two refreshes (default 2)",
}
EVERYWHERE = {  # of tasks that show all there is, if nothing else is said
    "host": "one host (default: localhost and every host of fabric.yaml)",
    "name": "one name (default: every name)",
    "run-id": "one run, like 0007-demo (default: the newest of each name, and all in progress)",
}
EVERY_NAME = {"name": EVERYWHERE["name"]}


def menu(said: Mapping[str, str] | None = None, **flags: Any) -> Callable[[Callable[..., int | None]], Any]:
    """A task of the menu: no short flags (`-h` would be `--host`), one sentence for an error, exit codes.

    `said` is what HELP says of its flags, where that is not true of it.
    """

    def wrap(body: Callable[..., int | None]) -> Any:
        @functools.wraps(body)
        def run(context: Context, *args: Any, **kwargs: Any) -> None:
            code: int | None
            try:
                if threading.current_thread() is threading.main_thread():
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                kwargs["host"] = one_host(context, kwargs.get("host"))
                if kwargs.get("debug"):
                    import logging

                    logging.basicConfig(
                        level=logging.DEBUG, format="%(name)s: %(message)s", stream=sys.stderr
                    )
                    logging.getLogger("paramiko").setLevel(logging.WARNING)
                early.begin(kwargs["host"], ROOT, bool(kwargs.get("accept_new_host_key")))
                code = body(context, *args, **kwargs)
                sys.stdout.flush()
            except DeployError as error:
                raise Exit(here(str(error)), code=error.code) from None
            except KeyboardInterrupt:
                text = here("interrupted; fab status shows what is in progress")
                raise Exit(text, code=INTERRUPTED) from None
            except BrokenPipeError:  # | head: what only shows something has done enough
                code = 1 if "dry_run" in body.__annotations__ else 0
            except output.Unwritable as error:
                raise Exit(str(output.sentence(error)), code=1) from None
            finally:
                if threading.current_thread() is threading.main_thread():
                    ends_at_once()
            if code:
                raise Exit(code=code)

        names = {key.replace("_", "-") for key in body.__annotations__}
        words = {key: text for key, text in {**HELP, **(said or {})}.items() if key in names}
        return task(auto_shortflags=False, help=words, **flags)(run)

    return wrap


def one_host(context: Context, host: str | None) -> str | None:
    """The host of `--host` after the task, or of `-H` before it. (deploy.executor refuses both at once.)"""
    return context.original_host if isinstance(context, Connection) else host


def whole(flag: str, text: str) -> int:
    """A count given on the command line. (Invoke's own numbers answer a mistake with a traceback.)"""
    if not text.isdecimal():
        raise DeployError(f"{flag} {text} must be a whole number, like {flag} 60", code=USAGE)
    if len(text) > 9:  # beyond what clocks and Python's own reading of numbers take
        raise DeployError(f"{flag} is {text[:9]}…, but must have at most 9 digits", code=USAGE)
    return int(text)


def one_process(pid: str | None, of_a_run: str | None) -> int | None:
    """--pid as a number, which excludes what names a run."""
    if pid is not None and of_a_run:
        raise DeployError("--pid names a process; give no --run, --name or --run-id beside it", code=USAGE)
    return None if pid is None else whole("--pid", pid)


def one_run(name: str | None, run_id: str | None) -> None:
    """--run-id beside --name must be a run of that name."""
    from trainer import status

    if name is None or run_id is None:
        return
    try:
        of = status.split_run_id(run_id)[1]
    except ValueError:
        return  # whoever looks for it says that there is none
    if of != name:
        raise DeployError(f"--run-id {run_id} is a run of {of}, not of {name}; give one of them", code=USAGE)


def waits(lock_wait: str) -> Any:
    """--lock-wait as one deadline, for planning and for the lock."""
    from deploy import lock

    return lock.Patience(whole("--lock-wait", lock_wait))


def say(text: str) -> None:
    """Progress: beside the result, never in it."""
    print(here(text), file=sys.stderr, flush=True)
    if output.broken(sys.stderr):
        raise BrokenPipeError


def show(value: Any) -> int:
    """The answer for a script."""
    import json

    print(json.dumps(value, indent=1, ensure_ascii=False, default=str), flush=True)
    return 0


def follow(
    goal: Any, name: str, *, state: str, lines: int | None = None, run_path: str | None = None, **more: Any
) -> int:
    """Follow the log of a name from run to run, or of one run, to the end. Ctrl-C never ends the run."""
    from deploy import logs

    shown: dict[str, Any] = {"lines": lines, **more, "out": sys.stdout.buffer}
    try:
        if run_path is not None:
            code = logs.follow(goal.host, run_path, **shown)
        else:
            code = logs.follow_name(goal.host, state, name, **shown)
    except KeyboardInterrupt:
        where = goal.settings.name
        on = f"--name {name}" if where == "localhost" else f"--host {where} --name {name}"
        text = f"\nthe run goes on; fab tail {on} follows it again, fab stop {on} ends it"
        raise Exit(here(text), code=INTERRUPTED) from None
    return code or 0


def watch_switch(goal: Any, record: str, **more: Any) -> Any:
    """Show the steps of a switch as they end. It runs on the host by itself, whether we watch or not."""
    from deploy import show, switch

    def report(step: Any) -> None:
        line = show.step(step)
        if line:
            say(line)

    try:
        return switch.watch(goal.host, record, report, **more)
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
    build: str | None = None,
    rollback_on_failure: bool = False,
    accept_new_host_key: bool = False,
    debug: bool = False,
) -> int | None:
    """Make the host run what the files say, then follow the log."""
    from deploy import actions, target

    patience = waits(lock_wait)
    goal = target.one(host, ROOT, accept_new_host_key)
    looks_only = dry_run or context.config.run.dry
    planned = functools.partial(
        actions.plan_deploy,
        "deploy",
        goal,
        actions.recipe(goal, run, name, set),
        install=not no_install,
        build=build,
        rollback=rollback_on_failure,
        lock_wait=patience,
        progress=say,
        watch=None if looks_only else functools.partial(attach, goal),
    )
    return carry_out(goal, planned, looks_only=looks_only, json=json, no_follow=no_follow, lock_wait=patience)


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
    build: str | None = None,
    rollback_on_failure: bool = False,
    accept_new_host_key: bool = False,
    debug: bool = False,
) -> int | None:
    """Save, stop, and start anew with what the files say now."""
    from deploy import actions, target

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
        return again("restart", goal, run, name, install=not no_install, **shown)
    planned = functools.partial(
        actions.plan_deploy,
        "restart",
        goal,
        actions.recipe(goal, run, name, set),
        install=not no_install,
        build=build,
        rollback=rollback_on_failure,
        lock_wait=patience,
        progress=say,
        watch=None if looks_only else functools.partial(attach, goal),
    )
    return carry_out(goal, planned, **shown)


@menu()
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
    return again("start", goal, run, name, install=not no_install, **shown)


@menu()
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
    return again("rollback", goal, run, name, release, install=not no_install, **shown)


@menu()
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
            watch=None if looks_only else functools.partial(attach, goal, until="start"),
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
    outcome = watch_switch(goal, record)
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
    lock_wait: str = "0",
    no_install: bool = False,
    build: str | None = None,
    accept_new_host_key: bool = False,
    debug: bool = False,
) -> int | None:
    """Show what deploy would do, and change nothing."""
    from deploy import actions, target

    patience = waits(lock_wait)
    goal = target.one(host, ROOT, accept_new_host_key)
    planned = functools.partial(
        actions.plan_deploy,
        "deploy",
        goal,
        actions.recipe(goal, run, name, set),
        install=not no_install,
        build=build,
        lock_wait=patience,
        progress=say,
    )
    return carry_out(goal, planned, looks_only=True, json=json, no_follow=True, lock_wait=patience)


@menu(iterable=["set"])
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


def again(
    task: str,
    goal: Any,
    run: str | None,
    name: str | None,
    release: str | None = None,
    *,
    install: bool,
    looks_only: bool,
    lock_wait: Any,
    **shown: Any,
) -> int | None:
    """Start a release that is on the host: what start, rollback and restart --same have in common."""
    from deploy import actions

    planned = functools.partial(
        actions.plan_again,
        task,
        goal,
        actions.name_of(goal, run, name),
        release_id=release,
        install=install,
        lock_wait=lock_wait,
        progress=say,
        watch=None if looks_only else functools.partial(attach, goal),
    )
    return carry_out(goal, planned, looks_only=looks_only, lock_wait=lock_wait, **shown)


def carry_out(
    goal: Any,
    planned: Callable[[], Any],
    *,
    looks_only: bool,
    json: bool,
    no_follow: bool,
    lock_wait: Any,
) -> int | None:
    """Show a plan, do it, follow the log: the end of deploy and restart."""
    from deploy import execute, turn

    def act(made: Any, work: Any) -> Any:
        if looks_only:
            return None
        if not made.starts:
            return execute.mend(made, goal.host, say, lock_wait)
        if not no_follow and not json:
            work = dataclasses.replace(work, settle_seconds=0)  # who follows sees how it goes on
        return execute.start(made, goal.host, work, say, lock_wait)

    made, begun = turn.carry(planned, lambda made: None if json else print(made, flush=True), act, say)
    if looks_only:
        return show({"plan": made.to_json()}) if json else None
    if begun is None:
        if json:
            return show({"plan": made.to_json(), "run_id": made.stop.run_id if made.stop else None})
        return None if no_follow else follow(goal, made.name, state=made.layout.state, lines=20)
    path, record = begun
    outcome = watch_switch(goal, record)
    if json:
        show({"plan": made.to_json(), "run_id": Path(path).name, "outcome": vars(outcome)})
    if outcome.word != "done":
        return failed(outcome, made)
    end = execute.ended(goal.host, path)
    say(f"{Path(path).name} {'has ' + end['reason'] + ' already' if end else 'is running'}")
    if end and end["code"] and not json:
        if no_follow:  # who follows sees them in the log
            for line in end.get("last_lines") or ():
                say(f"  │ {line}")
        say(f"exit code {end['code']}" + (f": {end['message']}" if end.get("message") else ""))
        way_back(made)
    if end and (no_follow or json):
        return int(end["code"])
    if no_follow or json:
        return None
    began = time.monotonic()
    code = follow(goal, made.name, state=made.layout.state)
    if code and not end and time.monotonic() - began < EARLY:
        end = execute.ended(goal.host, path)
        if end and end["reason"] == "failed":  # (its log has said how)
            way_back(made)
    return code


def failed(outcome: Any, made: Any) -> int:
    """Say why a switch failed, with the last lines of what it started, and what can be done.

    Returns the exit code: that of a command which began and died, else 1.
    """
    for line in outcome.last_lines:
        say(f"  │ {line}")
    say(f"{made.task} of {made.name} failed: {outcome.reason}")
    steps = {step["name"] for step in outcome.steps}
    if "start" in steps and "rollback" not in steps:
        way_back(made)
    died = outcome.exit if any(step["name"] == "settled" for step in outcome.steps) else None
    return int(died["code"]) if died else 1


def way_back(made: Any) -> None:
    """After a new release failed: how to have the one before again."""
    if made.release_before and made.release != made.release_before and made.task != "rollback":
        where = "" if made.host == "localhost" else f" --host {made.host}"
        say(f"fab rollback{where} --name {made.name} goes back to release {made.release_before}")


def attach(goal: Any, name: str, words: Any, until: str | None = None) -> Any:
    """Watch a switch that somebody else, or we before our connection was lost, has under way."""
    from deploy import show, turn

    say(f"{show.under_way(words)} of {name} is under way on {goal.settings.name}: watching it")
    record = turn.record_of(words, goal, name)
    outcome = watch_switch(goal, record, pid=words.get("pid"), until=until)
    for line in outcome.last_lines:
        say(f"  │ {line}")
    return outcome


def agreed(question: str, yes: bool) -> bool:
    """Whether people want it: --yes, or their answer. Raises DeployError where nobody can be asked."""
    if yes:
        return True
    if not sys.stdin.isatty() or threading.current_thread() is not threading.main_thread():
        raise DeployError("nothing was done: there is no terminal to ask on; --yes does it", code=USAGE)
    print(f"{question} [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


# -- looking -----------------------------------------------------------------------------------------------


@menu()
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
    code = follow(goal, name, state=facts["state"]["root"], run_path=path if run_id else None, **shown)
    return None if no_follow else code


@menu(EVERYWHERE)
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

        shown = (seconds, verbose, text.colour(), sys.stdout, here)
        until_interrupted(lambda: refresh.status(goals, name, run_id, *shown))
    return status_once(goals, name, run_id, verbose, json)


def status_once(goals: Any, name: str | None, run_id: str | None, verbose: bool, json: bool) -> int:
    """Show each host as soon as it has answered; in JSON all at once."""
    from deploy import overview
    from deploy import show as text

    found = []
    for batch in overview.everywhere(goals, name, run_id, link=verbose or json):
        found += batch
        rows = [row for answer in batch for row in answer.rows]
        if rows and not json:
            print(here(text.status(rows, text.colour(), verbose)), flush=True)
        for answer in batch:
            if answer.error:
                say(answer.error)
            elif not json and not answer.rows and not (name or run_id):
                print(here(overview.nothing(answer.goal, answer.facts, name)), flush=True)
            if verbose and answer.round_trip is not None:
                print(f"link to {answer.goal.settings.name}: {1000 * answer.round_trip:.0f} ms round trip")
            for problem in answer.facts.get("problems", []):
                say(f"could not be read: {problem}")
    overview.check_known(found, name, run_id)
    if json:
        show(overview.as_json(found, name if run_id is None else None))
    elif name and not any(answer.rows for answer in found):
        for answer in found:
            if not answer.error:
                print(here(overview.nothing(answer.goal, answer.facts, name)))
    return int(any(answer.error for answer in found))


@menu(EVERYWHERE)
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
    until_interrupted(lambda: watching.watch(goals, name, run_id, sys.stdout, here))
    return None


def until_interrupted(body: Callable[[], Any]) -> None:
    """Run a screen that only Ctrl-C ends, which then is no news."""
    try:
        body()
    except KeyboardInterrupt:
        raise Exit(code=INTERRUPTED) from None


@menu()
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
    print(here(sides.text(made)))
    return None


@menu({"name": "the name that gets the reference (default: the run's own)"})
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


@menu(EVERY_NAME)
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
    print(here(text.runs(found, facts["time"]) if found else overview.nothing(goal, facts, name)))
    return None


@menu(iterable=["set"])
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


@menu()
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


@menu()
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
        print(here(peeking.text(found, tty)), flush=True)
        for _, words, _ in told:
            say(words)
        if flush and not told:
            say("nothing is held back, so nothing was asked")
    return int(any(not done for _, _, done in told))


@menu()
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
    told = stack.look(goal, name, run_id, number)
    if json:
        return show(stack.to_json(told))
    print(here(stack.text(told)), flush=True)
    return None


# -- keeping a host ----------------------------------------------------------------------------------------


@menu(EVERY_NAME)
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
    if not agreed("Remove all of this?", yes):
        say("nothing was removed")
        return 1
    freed, stayed = actions.prune_now(goal, made, say, patience)
    for sentence in stayed:
        say(f"kept: {sentence}")
    if json:
        return show({"plan": made.to_json(), "freed_bytes": freed, "kept": stayed})
    print(f"{size(freed)} freed on {goal.settings.name}")
    return None


@menu()
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
    engine = goal.settings.runtime != "process"
    made = boots.decide(goal.settings.name, boots.look(goal.host), engine=engine)
    if json:
        show(made.to_json())
    else:
        print(made, flush=True)
    if dry_run or context.config.run.dry:
        return None
    if made.steps:
        if not agreed(f"Run these {len(made.steps)} commands as root on {made.host}?", yes):
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
