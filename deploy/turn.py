"""Whose turn it is with a name: one client at a time changes it. The others watch, wait, and plan anew.

A client holds the deploy lock while it makes things ready, then the switch has its own, on the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from deploy import boot, lock, survey
from deploy.errors import Changed, DeployError
from deploy.lock import Patience
from deploy.plan import Plan
from deploy.switch import NoRecord, Outcome
from deploy.target import Target

PAUSE = 0.5  # seconds between two looks
LOOKS = 3  # at a switch that leaves no record, each as long as `switch.watch` waits for one
PLANS = 4  # made of one task before others are said to be too quick

Progress = Callable[[str], None]
Watch = Callable[[str, Mapping[str, Any]], Outcome]  # called with the name and the words of the switch's lock
Done = TypeVar("Done")
Work = TypeVar("Work")


@dataclass(frozen=True)
class Turn:
    """Facts of a moment, and the words of the switch that we watched to its end just before, if any."""

    facts: dict[str, Any]
    watched: Mapping[str, Any] | None = None

    @property
    def fresh(self) -> bool:
        """Whether a run was started since we began to look, by that switch."""
        return self.watched is not None and self.watched.get("what") != "stop"


@dataclass
class Order:
    """When a task came, among all that change a name: a stop that somebody asks for later than that wins.

    One for a task, however often it plans.
    """

    came: float | None = field(default=None, init=False)  # by the host's clock: our first look's begin
    _behind: bool = field(default=True, init=False)  # a stop that was at work by then still is

    def look(self, facts: Mapping[str, Any], name: str) -> None:
        """Take note of a moment. A stop that was there before us is only waited for."""
        if self._behind:
            self.came = facts["time"] - facts["probe_seconds"]
            held = (facts[which].get(name) or {} for which in ("switch", "locks"))
            self._behind = any(words.get("what") == "stop" for words in held)

    def refuse_stopped(self, facts: Mapping[str, Any], name: str) -> None:
        """Raise DeployError if somebody has stopped the name since: to start it now would undo that."""
        newest = next((run for run in reversed(facts["runs"]) if run["name"] == name and run["launch"]), None)
        exit = (newest or {}).get("exit")
        if newest is None or newest["alive"] or not exit or self.came is None or self._behind:
            return
        by = exit.get("asked_by")
        if exit["reason"] == "stopped" and exit["time"] > self.came and boot.a_person(by):
            raise DeployError(
                f"run {newest['run_id']} was stopped by {by} after this command was given, so nothing was "
                "started; give it again if it is to start all the same"
            )


def take(
    goal: Target,
    name: str,
    patience: Patience = lock.NONE,
    progress: Progress = lambda text: None,
    watch: Watch | None = None,
    *,
    alone: bool = False,
    order: Order | None = None,
) -> Turn:
    """Look at a moment at which nobody else changes `name`, or now once `patience` is at an end.

    A switch under way is watched to its end, if there is a `watch`: it bounds itself. One that failed raises
    DeployError. With `alone` its failure is only told, and DeployError is raised if the name is still not
    ours when patience is at an end: what is there then says nothing of what there will be. With an `order`
    DeployError is raised if the name was stopped since then.
    """
    told, looks, watched = False, 0, None
    over: tuple[Any, ...] = ()
    while True:
        facts = goal.facts()
        if order is not None:
            order.look(facts, name)
        switching, locked = facts["switch"].get(name), facts["locks"].get(name)
        if switching == {} and watch is not None:  # its holder says nothing yet, or cannot (a full disk)
            if not told:
                progress(f"{lock.sentence(goal.host, name, switching)}; waiting for its end")
                told = True
            time.sleep(PAUSE)
            continue
        if switching and watch is not None:
            which = (switching.get("pid"), switching.get("since"))
            if which == over:  # its last word is written; it lets go of its lock in a moment
                time.sleep(PAUSE / 5)
                continue
            try:
                outcome = watch(name, switching)
            except NoRecord:  # refused before it had one, or about to be
                looks += 1
                if looks >= LOOKS:
                    raise
                continue
            over, watched = which, switching
            if outcome.word == "failed":
                sentence = f"that {switching.get('what', 'switch')} of {name} failed: {outcome.reason}"
                if not alone:
                    raise DeployError(sentence)
                progress(sentence)
            continue
        holder = locked if switching is None else switching
        if holder is None:
            if order is not None:
                order.refuse_stopped(facts, name)
            return Turn(facts, watched)
        if not patience.left:
            if alone:
                raise DeployError(lock.refusal(goal.host, name, holder))
            return Turn(facts, watched)
        if not told:
            progress(f"{lock.sentence(goal.host, name, holder)}; waiting up to {patience.seconds:g} s")
            told = True
        time.sleep(PAUSE)


def carry(
    plan: Callable[[], tuple[Plan, Work]],
    show: Callable[[Plan], None],
    act: Callable[[Plan, Work], Done],
    progress: Progress,
) -> tuple[Plan, Done | None]:
    """Plan, show the plan, and act; once more, from fresh facts, if others were quicker.

    A plan is shown again only if it reads differently. Returns the last one, and what `act` gave: None if
    there was nothing to do. Raises Changed if a rollback would by now go to another release than was shown,
    or if there is no end of changes.
    """
    made, work = plan()
    shown = ""
    for count in range(1, PLANS + 1):
        if str(made) != shown:
            show(made)
            shown = str(made)
        if not made.acts:
            return made, None
        try:
            return made, act(made, work)
        except Changed:
            if count == PLANS:
                raise
            progress(f"{made.name} on {made.host} has changed since this plan was made: planning again")
            fresh, work = plan()
            if fresh.task == "rollback" and fresh.acts and fresh.release != made.release:
                raise
            made = fresh
    raise AssertionError("unreachable")


def record_of(words: Mapping[str, Any], goal: Target, name: str) -> str:
    """Where the switch whose lock holds `words` writes down what it does."""
    if words.get("record"):
        return str(words["record"])
    # The words of a job that an older client has started.
    if words.get("what") == "stop" or not words.get("run_path"):
        return f"{survey.layout_of(goal.settings, goal.facts(), name).home}/stop.json"
    return f"{words['run_path']}/switch.json"
