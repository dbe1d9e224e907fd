"""A deploy with --evict-first whose weights do not fit in beside the old ones: these go before those come.

The run that has them open is stopped before, by a switch that does nothing else. From then on until the new
run starts nothing runs, so whatever goes wrong meanwhile says how to get back.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy import lock, onhost, switch
from deploy.errors import DeployError
from deploy.health_words import command
from deploy.host import Host
from deploy.sizes import size

if TYPE_CHECKING:
    from deploy.plan import Plan

SILENCE = 120.0  # seconds without a word of an eviction

Report = Callable[[str], None]


def make_room(plan: Plan, host: Host, report: Report) -> Plan:
    """Evict what the plan says, and before that stop the run that has it open. With the deploy lock.

    Returns the plan without what has been done. Raises DeployError.
    """
    if plan.stop is not None and any(one.held for one in plan.evict):
        _stop(plan, host, report)
        plan = dataclasses.replace(plan, stop=None)
    for one in plan.evict:
        place = str(Path(one.path).parent)
        freed = onhost.ask(
            host, "deploy.weights_uses:evict", place, one.path, timeout=SILENCE, progress=report
        )
        report(f"{one.path} evicted: {size(freed)} of memory freed")
    return dataclasses.replace(plan, evict=())


@contextlib.contextmanager
def way_back(plan: Plan, report: Report) -> Iterator[None]:
    """Let whatever fails in here also say how to go on, and how to have the old run again."""
    try:
        yield
    except DeployError as error:
        raise DeployError(f"{error}\n{_way_back(plan)}", code=error.code) from None
    except KeyboardInterrupt:
        report(_way_back(plan))
        raise


def stop_spec(plan: Plan) -> dict[str, Any]:
    """What a switch gets that only stops the run in progress."""
    assert plan.stop is not None
    return {
        "state_root": plan.layout.state,
        "name": plan.name,
        "old_run_path": plan.stop.path,
        "grace_seconds": plan.stop.grace_seconds,
        "checkpoint_timeout_seconds": plan.stop.checkpoint_timeout_seconds,
        "by": lock.who(),
        "start": None,
    }


def _stop(plan: Plan, host: Host, report: Report) -> None:
    assert plan.stop is not None
    report(f"stopping {plan.stop.run_id}, so that its weights can go")
    outcome = switch.watch(host, switch.start(host, stop_spec(plan)), lambda step: None)
    if outcome.word != "done":
        raise DeployError(f"{plan.stop.run_id} could not be stopped: {outcome.reason}")


def _way_back(plan: Plan) -> str:
    """For people, after it failed: the run that was stopped may be in progress still, or not."""
    go_on = command(plan.task, plan.name, plan.host, "--evict-first")
    if plan.stop is None:
        return f"{go_on} goes on"
    evict = f"fab weights.evict {plan.weights.name} --host {plan.host}" if plan.weights else ""
    start = command("start", plan.name, plan.host)
    return (
        f"{plan.stop.run_id} may have been stopped by now: {go_on} goes on; {start} starts its release "
        f"again, with its weights from where they came (if they do not fit in, {evict} first)"
    )
