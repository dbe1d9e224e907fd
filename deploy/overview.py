"""What `status`, `runs` and `tail` say about the runs of a host: evidence in, rows out. Prints nothing."""

from __future__ import annotations

import dataclasses
import importlib
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy import again, details, health_words, mask
from deploy.errors import USAGE, DeployError, either, nearest
from deploy.health import Verdict, number, table, verdict
from deploy.runtimes import compose
from deploy.target import Target

SAMPLE = 0.3  # seconds between two readings of CPU use
PATIENCE = 2.0  # seconds after which the hosts that have answered are shown, without those that have not
COMPARES = "deploy.drift_check"  # takes as long to import as a question to a near host, so meanwhile it is
MOVING = ("training", "checkpointing", "slow")  # verdicts of a run that gets nearer to its end


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
    memory_min: int | None = None
    memory_peak: int | None = None
    eta: float | None = None  # seconds to the last step
    reference: Mapping[str, Any] | None = None  # {run_id tokens_per_second share}, the name's
    gpus: tuple[Mapping[str, Any], ...] = ()  # those that the run uses; see gpus_of
    gpus_unknown: str = ""  # why nothing is known of them
    evidence: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # see deploy.details
    links: Mapping[str, str] = dataclasses.field(default_factory=dict)  # only what this run printed itself
    changes: Mapping[str, str] = dataclasses.field(default_factory=dict)  # --set of a run in progress, masked
    drift: tuple[str, ...] | None = None  # None: not known, because nothing is rendered for it
    applied_by: str | None = None  # the command that makes an end of the drift


def rows(goal: Target, facts: Mapping[str, Any], name: str | None, run_id: str | None = None) -> list[Row]:
    """The newest run of every name (or of one), or one run by its id.

    A run in progress is always among them, and a newer one that nobody will begin hides none.
    """
    from deploy import drift_check  # see COMPARES

    wanted = [
        run
        for run in facts["runs"]
        if (name is None or run["name"] == name) and (run_id is None or run["run_id"] == run_id)
    ]
    newest: dict[str, str] = {}
    for run in wanted:
        if run["name"] not in newest or not _given_up(facts, run):
            newest[run["name"]] = run["run_id"]
    shown = [run for run in wanted if run["alive"] or run["run_id"] == newest[run["name"]]]
    drifts = drift_check.of_runs(goal, facts, [run for run in shown if run["alive"]])
    return [row(goal, facts, run, drifts.get(run["run_id"])) for run in shown]


def _given_up(facts: Mapping[str, Any], run: Mapping[str, Any]) -> bool:
    """Whether this is only a directory that was made for a run, and the deploy that made it is gone."""
    told = run["alive"] or run["launch"] or run["switch"] or run["exit"]
    at_work = (facts[lock].get(run["name"]) is not None for lock in ("locks", "switch"))
    return not told and not any(at_work)


def row(
    goal: Target, facts: Mapping[str, Any], run: Mapping[str, Any], drift: tuple[str, ...] | None = None
) -> Row:
    host_name = None if goal.settings.name == "localhost" else goal.settings.name
    # Whether a switch is under way is told by its lock, which its record cannot know.
    switching = facts["switch"].get(run["name"])
    seen = {**run, "switch_lives": bool(switching), "switching": switching, "given_up": _given_up(facts, run)}
    word: Verdict = verdict(seen, facts["time"], host=host_name, sample=facts["sample_seconds"])
    # Heartbeats lie in the run's own directory, so a link in one cannot be an earlier run's. Anyone may have
    # written them: a value of another type counts as none.
    beats = [beat for beat in run["heartbeats"].values() if isinstance(beat, dict)]
    first = run["heartbeats"].get("0")
    main = first if isinstance(first, dict) else beats[0] if beats else {}
    last = number(main, "last_step_time")
    memory = {
        key: sum(value for beat in beats if (value := number(table(beat, "memory"), key)))
        for key in ("min", "now", "peak")
    }
    if memory["peak"]:
        memory["peak"] = max(memory["peak"], memory["now"])  # (an older trainer may have said less)
    shown = {key: _whole(value) if value and run["alive"] else None for key, value in memory.items()}
    gpus, unknown = details.gpus_of(run, facts) if run["alive"] else ((), "")
    speed = number(table(main, "tokens_per_second"), "now")
    return Row(
        host=goal.settings.name,
        run_id=run["run_id"],
        name=run["name"],
        verdict=word.word,
        reason=word.reason + _no_current(goal, facts, run, host_name),
        next_command=_with_file(goal, run, word.next_command),
        step=_whole(number(main, "step")),
        total=_whole(number(main, "total")),
        loss=number(main, "loss"),
        tokens_per_second=speed,
        step_age=max(0.0, facts["time"] - last) if last and run["alive"] else None,
        memory=shown["now"],
        memory_min=shown["min"],
        memory_peak=shown["peak"],
        eta=details.eta(main, table(dict(run), "pace")) if word.word in MOVING and run["alive"] else None,
        reference=details.against_reference(facts, run, speed if run["alive"] else None),
        gpus=gpus,
        gpus_unknown=unknown,
        evidence=details.evidence(run, facts),
        links={
            key: compose.outside(link, run["path"])
            for key, link in table(main, "links").items()
            if isinstance(link, str)
        },
        changes=_changes(run),
        drift=drift,
        applied_by=_with_file(goal, run, health_words.command("restart", run["name"], host_name))
        if drift
        else None,
    )


def _changes(run: Mapping[str, Any]) -> dict[str, str]:
    """What --set changed in a run in progress: the next deploy goes by the file, unless it is given again."""
    return dict(mask.pairs(table(table(dict(run), "run"), "changes"))) if run["alive"] else {}


def _no_current(goal: Target, facts: Mapping[str, Any], run: Mapping[str, Any], host_name: str | None) -> str:
    """That the link to the current release is lost, unless somebody is at work who may yet make it."""
    name = run["name"]
    lost = again.without_current(name, facts) if run["launch"] else ""
    if not lost or facts["switch"].get(name) or facts["locks"].get(name):
        return ""
    mends = _with_file(goal, run, health_words.command("deploy", name, host_name))
    return f"; {name} {lost} ({mends} puts it right)"


def _with_file(goal: Target, run: Mapping[str, Any], command: str | None) -> str | None:
    """A command as it is given here: with the run's own file, see `again.with_file`.

    And ssh is given the address of a host instead of its name here.
    """
    if command is not None and command.startswith(f"ssh {goal.settings.name} "):
        name, address = goal.settings.name, goal.settings.address or goal.settings.name
        return command.replace(f"ssh {name} ", f"ssh {address} ", 1)
    default = goal.settings.run or goal.project.default_run
    return None if command is None else again.with_file(command, run, default)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


@dataclass(frozen=True)
class Answer:
    """What one host says, or why it says nothing."""

    goal: Target
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    error: str = ""
    round_trip: float | None = None  # seconds; None: not measured, or no link at all


def everywhere(
    goals: Sequence[Target], name: str | None, run_id: str | None, *, link: bool = False
) -> Iterator[list[Answer]]:
    """The rows of several hosts, asked side by side: one that cannot be reached hides and delays no other.

    Yields what there is once all have answered, or after PATIENCE; then each host that comes later. With
    `link` the round trip to each is measured, too.
    """

    def ask(goal: Target) -> Answer:
        try:
            facts = goal.facts(sample=SAMPLE)
            found = tuple(rows(goal, facts, name, run_id))
            there = link and not goal.host.is_local
            return Answer(goal, facts, found, round_trip=details.round_trip(goal.host) if there else None)
        except DeployError as error:
            return Answer(goal, error=str(error))

    threading.Thread(target=importlib.import_module, args=[COMPARES], daemon=True).start()
    if len(goals) == 1:  # in this thread: its Ctrl-C ends the asking at once
        yield [ask(goals[0])]
        return
    answers: queue.Queue[tuple[int, Answer | BaseException]] = queue.Queue()

    def asked(place: int, goal: Target) -> None:
        try:
            answers.put((place, ask(goal)))
        except BaseException as error:  # a mistake of ours must end the command, not make it wait for ever
            answers.put((place, error))

    for place, goal in enumerate(goals):  # daemons: a host that hangs does not keep Ctrl-C waiting
        threading.Thread(target=asked, args=(place, goal), daemon=True).start()
    deadline = time.monotonic() + PATIENCE
    missing, batch = len(goals), dict[int, Answer]()
    while missing:
        patience = max(0.0, deadline - time.monotonic())
        try:
            place, found = answers.get(timeout=patience if batch or patience else None)
        except queue.Empty:
            if batch:
                yield [batch[place] for place in sorted(batch)]
                batch = {}
            continue
        if isinstance(found, BaseException):
            raise found
        missing -= 1
        batch[place] = found
        if not missing:
            yield [batch[place] for place in sorted(batch)]
            batch = {}


def as_json(found: Iterable[Answer], name: str | None = None) -> list[dict[str, Any]]:
    """A row for each run, and one of host and error alone for a host that did not answer.

    Asked for a `name` that has no run on any of them, each has a row with the verdict "absent".
    """
    rows: list[dict[str, Any]] = []
    found = list(found)
    nowhere = name is not None and not any(answer.rows for answer in found)
    for answer in found:
        rows += [{**dataclasses.asdict(row), "round_trip": answer.round_trip} for row in answer.rows]
        label = answer.goal.settings.name
        if answer.error:
            rows.append({"host": label, "error": answer.error})
        elif name is not None and nowhere:
            row = dataclasses.asdict(absent(answer.goal, answer.facts, name))
            rows.append({**row, "run_id": None, "round_trip": answer.round_trip})
    return rows


def check_known(found: Sequence[Answer], name: str | None, run_id: str | None) -> None:
    """Raise DeployError for a run or a name that no host knows, unless one of them gave no answer."""
    answered = [answer for answer in found if not answer.error]
    if not answered or len(answered) < len(found):
        return
    if run_id is not None and not any(answer.rows for answer in answered):
        known = {run["run_id"] for answer in answered for run in answer.facts["runs"]}
        hosts = either(answer.goal.settings.name for answer in answered)
        offered = nearest(run_id, known) or "; fab runs lists those there are"
        raise DeployError(f"there is no run {run_id} on {hosts}{offered}", code=USAGE)
    check_name(answered[0].goal, [answer.facts for answer in answered], name)


def run_path(facts: Mapping[str, Any], host_name: str, name: str, run_id: str | None) -> str:
    """The directory of a run to be followed: by its id, else the newest of `name`."""
    if run_id is not None:
        known = {run["run_id"]: run["path"] for run in facts["runs"]}
        if run_id not in known:
            offered = nearest(run_id, known) or "; fab runs lists those there are"
            raise DeployError(f"there is no run {run_id} on {host_name}{offered}", code=USAGE)
        return known[run_id]
    paths = [run["path"] for run in facts["runs"] if run["name"] == name]
    if not paths:
        names = {run["name"] for run in facts["runs"]}
        others = f"; there are runs of {', '.join(sorted(names))}: choose one with --name" if names else ""
        offered = nearest(name, names) or others or "; fab deploy starts one"
        raise DeployError(f"there is no run of {name} on {host_name}{offered}", code=USAGE)
    return paths[-1]


def check_name(goal: Target, facts: Iterable[Mapping[str, Any]], name: str | None) -> None:
    """Raise DeployError for a name that is neither on one of the hosts asked nor that of a run's file."""
    known = {run["name"] for one in facts for run in one["runs"]} | {
        key for one in facts for key in one["names"]
    }
    if name is None or name in known or name in goal.project.runs:
        return
    offered = nearest(name, known | set(goal.project.runs))
    raise DeployError(
        f"there is no {name} on {goal.settings.name}{offered or '; fab status shows what there is'}",
        code=USAGE,
    )


def absent(goal: Target, facts: Mapping[str, Any], name: str) -> Row:
    """The row of a name that has no run on a host."""
    host = None if goal.settings.name == "localhost" else goal.settings.name
    told = verdict(None, facts["time"], host=host)
    near = nearest(name, {run["name"] for run in facts["runs"]})
    default = goal.settings.run or goal.project.default_run
    run = f" --run {name}" if name in goal.project.runs and name != default else f" --name {name}"
    return Row(goal.settings.name, "", name, told.word, f"{told.reason}{near}", f"{told.next_command}{run}")


def nothing(goal: Target, facts: Mapping[str, Any], name: str | None) -> str:
    """What is said of a host, or a name, without runs."""
    if name is None:
        return f"no runs on {goal.settings.name}; fab deploy starts one"
    told = absent(goal, facts, name)
    return f"{told.host}  {name}  {told.verdict}  {told.reason}\n    next: {told.next_command}"
