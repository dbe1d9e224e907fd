"""What a task does once its flags are read: show a plan and carry it out, watch a switch, follow a log.

What is decided, and how it is done, is in the modules that are called here; this is what people see of it.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from invoke import Exit

from deploy import interrupt
from deploy.errors import USAGE, DeployError
from deploy.health_words import command
from deploy.menu import here, say, show, whole

EARLY = 600.0  # seconds, in which a run that fails is taken for one that never worked


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
        tail, stop = (command(task, name, goal.settings.name) for task in ("tail", "stop"))
        text = f"\nthe run goes on; {tail} follows it again, {stop} ends it"
        raise Exit(here(text), code=interrupt.CODE) from None
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
        raise Exit(text, code=interrupt.CODE) from None


def change(
    task: str,
    goal: Any,
    run: str | None,
    name: str | None,
    set: Any,
    *,
    looks_only: bool,
    lock_wait: Any,
    json: bool,
    no_follow: bool,
    **made_from: Any,
) -> int | None:
    """Make the host run what the files say now: what deploy, restart and plan have in common."""
    from deploy import actions, turn

    planned = functools.partial(
        actions.plan_deploy,
        task,
        goal,
        actions.recipe(goal, run, name, set),
        **made_from,
        lock_wait=lock_wait,
        progress=say,
        watch=None if looks_only else functools.partial(attach, goal),
        order=None if looks_only else turn.Order(),
    )
    return carry_out(
        goal, planned, looks_only=looks_only, json=json, no_follow=no_follow, lock_wait=lock_wait
    )


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
    from deploy import actions, turn

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
        order=None if looks_only else turn.Order(),
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
    """Show a plan, do it, follow the log: the end of every task that starts something."""
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
    end, changing = execute.after_switch(made, goal.host, path)
    say(f"{Path(path).name} {became(end, changing)}")
    if end and end["code"] and end["reason"] == "failed" and not json:
        if no_follow:  # who follows sees them in the log
            for line in end.get("last_lines") or ():
                say(f"  │ {line}")
        say(f"exit code {end['code']}" + (f": {end['message']}" if end.get("message") else ""))
        way_back(made)
    if end and (no_follow or json):
        return 1 if end["reason"] == "stopped" else int(end["code"])
    if no_follow or json:
        return None
    began = time.monotonic()
    code = follow(goal, made.name, state=made.layout.state)
    if code and not end and time.monotonic() - began < EARLY:
        end, _ = execute.after_switch(made, goal.host, path)
        if end and end["reason"] == "failed":  # (its log has said how)
            way_back(made)
    return code


def became(end: Any, changing: Any) -> str:
    """What has become of a run whose switch is done: by its exit.json, and the words of the switch lock."""
    from deploy import show

    if end:
        by = f" by {end['asked_by']}" if end.get("asked_by") else ""
        return f"was stopped{by}" if end["reason"] == "stopped" else f"has {end['reason']} already"
    return "is running" if changing is None else f"is running, but {show.under_way(changing)} is under way"


def failed(outcome: Any, made: Any) -> int:
    """Say why a switch failed, with the last lines of what it started, and what can be done.

    Returns the exit code: that of a command which began and died, else 1.
    """
    exit = outcome.exit or {}
    if exit.get("reason") == "stopped":  # no fault of what was deployed
        say(f"{made.task} of {made.name} was cut short: the new run {became(exit, None)}")
        return 1
    for line in outcome.last_lines:
        say(f"  │ {line}")
    say(f"{made.task} of {made.name} failed: {outcome.reason}")
    steps = {step["name"] for step in outcome.steps}
    if "start" in steps and "rollback" not in steps:
        way_back(made)
    died = exit if any(step["name"] == "settled" for step in outcome.steps) else {}
    return int(died.get("code") or 1)


def way_back(made: Any) -> None:
    """After a new release failed: how to have the one before again."""
    if made.release_before and made.release != made.release_before and made.task != "rollback":
        say(f"{command('rollback', made.name, made.host)} goes back to release {made.release_before}")


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
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)  # never in an answer for scripts
    return sys.stdin.readline().strip().lower() in ("y", "yes")


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
            if verbose and not json and answer.round_trip is not None:
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


def until_interrupted(body: Callable[[], Any]) -> None:
    """Run a screen that only Ctrl-C ends, which then is no news."""
    try:
        body()
    except KeyboardInterrupt:
        raise Exit(code=interrupt.CODE) from None


def pushed(
    goal: Any,
    kind: str,
    directory: str,
    *,
    json: bool,
    streams: str | None,
    rsync: bool,
    evict_first: bool = False,
) -> int | None:
    """Send a directory of this machine to where runs find it, and show how far that is."""
    from deploy import meter, sender, weights_tasks

    count = None if streams is None else whole("--streams", streams, sender.MOST)
    shown: dict[str, Any] = {"progress": say, "meter": meter.on_terminal(say)}
    how: dict[str, Any] = {"streams": count, "rsync": rsync, "evict_first": evict_first}
    done = weights_tasks.push(goal, directory, kind, **how, **shown)
    return brought(goal, done, json)


def staged(goal: Any, kind: str, directory: str, *, json: bool, evict_first: bool = False) -> int | None:
    """Copy a directory that lies on the host to where runs find it."""
    from deploy import weights_tasks

    done = weights_tasks.stage(goal, directory, kind, evict_first=evict_first, progress=say)
    return brought(goal, done, json)


def brought(goal: Any, done: Any, json: bool) -> int | None:
    from deploy import weights_tasks

    if json:
        return show(done)
    print(weights_tasks.told(done, goal.settings.name))
    return None
