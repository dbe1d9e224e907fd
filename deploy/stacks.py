"""What the Python stacks of a run say: who is where, and whether all of them wait at one place.

The stacks themselves come from `deploy.stacks_host`. What is here is pure but for `look`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from deploy import health_over, lock, mask, onhost, overview, py_spy
from deploy.errors import DeployError
from deploy.health import cut, plural
from deploy.host import Host

TIMEOUT = 120.0  # seconds for all processes of a run
WAITING = 0.1  # of one CPU: a main thread that uses less waits
HALTED = "tT"  # states of a process that a signal or a debugger has stopped
_STANDARD = re.compile(r"/lib(?:64)?/python\d[\d.]*t?/(?!site-packages/|dist-packages/)|^<frozen ")
_SHORT = re.compile(
    r"^.*/(?:site-packages|dist-packages|lib(?:64)?/python\d[\d.]*t?|releases/[0-9a-f]+/app)/"
)

Process = Mapping[str, Any]
Frame = Mapping[str, Any]


def look(
    goal: Any,
    name: str | None,
    run_id: str | None,
    pid: int | None,
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The answer for one process, else for the run in progress of `name` (or one run): `to_json` says what.

    A host without py-spy gets ours, which `report` is told of, if that is what stacks are lacking for.

    Raises DeployError if there is no such run or process, or if no stack at all can be had, with the remedy.
    """
    host: Host = goal.host
    label = goal.settings.name
    function, told, words = "of_process", {"host": label, "run_id": None}, [pid, label]
    if pid is None:
        run = choose(goal.facts(), label, str(name), run_id)
        function, told["run_id"] = "of_run", run["run_id"]
        words = [run["path"], (run.get("container") or {}).get("pid") or 0, lock.who()]
    ask = functools.partial(onhost.ask, host, f"deploy.stacks_host:{function}", *words, timeout=TIMEOUT)
    told |= ask()
    if told["tool"] is None and any(one["python"] and not one["threads"] for one in told["processes"]):
        tool = py_spy.bring(host, goal.facts()["state"]["root"], report)
        if tool is not None:
            told |= ask(tool)
    check(told, pid)
    return told


def choose(facts: Mapping[str, Any], host: str, name: str, run_id: str | None) -> Mapping[str, Any]:
    """The run whose stacks are meant: by its id, else the one of `name` in progress. Raises DeployError."""
    path = overview.run_path(facts, host, name, run_id)
    runs = [run for run in facts["runs"] if run["path"] == path or (run_id is None and run["name"] == name)]
    living = [run for run in runs if run["alive"]]
    if not living:
        run = next(run for run in runs if run["path"] == path)
        ended = run["exit"] or {}
        if not ended and run["launch"]:
            raise DeployError(lost(run, host))
        how = (
            f"{ended['reason']} with exit code {ended['code']}"
            if {"reason", "code"} <= set(ended)
            else "over"
        )
        raise DeployError(
            f"{run['run_id']} is not in progress on {host} ({how}), so it has no stacks; "
            f"fab tail --run-id {run['run_id']} shows its last lines"
        )
    return living[-1]


def lost(run: Mapping[str, Any], host: str) -> str:
    """The sentence for a run whose launch is gone without a word."""
    left = [one["pid"] for one in run.get("processes") or () if one.get("state") not in ("Z", "X")]
    there = "" if host == "localhost" else f" --host {host}"
    how = health_over.restarted(dict(run)).removesuffix(" since") or "it was killed"
    head = f"{run['run_id']} on {host} has lost its launch ({how})"
    if not left:
        command = f"fab tail{there} --run-id {run['run_id']}"
        return f"{head}, and no process of it is left; {command} shows its last lines"
    each = " and ".join(f"fab stacks{there} --pid {pid}" for pid in left[:4])
    many = f"{plural(len(left), 'process')} of it {'is' if len(left) == 1 else 'are'} left"
    return f"{head}, and {many}: {each} shows what each does"


def check(told: Mapping[str, Any], pid: int | None) -> None:
    """Raise DeployError, with every reason and the remedy, if there is no stack at all."""
    processes = told["processes"]
    if any(one["threads"] for one in processes):
        return
    host = told["host"]
    python = [one for one in processes if one["python"]]
    if not python:
        if pid is not None and processes[0]["kernel"]:
            raise DeployError(
                f"process {pid} on {host} is a thread of the kernel, so it has no Python stacks; "
                f"cat /proc/{pid}/stack shows root where it is"
            )
        if pid is not None:
            who = f"process {pid} on {host} ({_command(processes[0])})"
            raise DeployError(
                f"{who} runs no Python, so it has no Python stacks; gdb -p {pid} shows those of C"
            )
        what = ", ".join(sorted({_command(one, 40) for one in processes})[:3])
        raise DeployError(f"no process of {told['run_id']} on {host} runs Python ({what})")
    reasons = list(dict.fromkeys(lacking(told, one) for one in python))
    more = f"; launch: {told['asked']}" if told["asked"] else ""
    raise DeployError(f"no stack can be read on {host}: {'; '.join(reasons)}{more}")


def lacking(told: Mapping[str, Any], one: Process) -> str:
    """Why a process has no stacks here, and how it will have some."""
    if one["state"] in HALTED and told["asked"]:
        return f"halted by a signal (kill -CONT {one['pid']} lets it go on)"
    if told["tool"] is None:
        why = "py-spy is not there"
        if told["run_id"] and not one["beats"]:
            why += ", and only trainers that send heartbeats can be asked through launch"
        return f"{why}; pipx install py-spy on {told['host']}, or put it beside the run's Python"
    if "ermission" in one["why"]:
        return (
            "py-spy may not read that process; log in as root or as the user who runs it, "
            "with kernel.yama.ptrace_scope=0"
        )
    return str(one["why"]) or "no stack was found"


# -- grouping ----------------------------------------------------------------------------------------------


def groups(processes: Sequence[Process]) -> list[dict[str, Any]]:
    """Threads with the same stack, once: ``{"main", "name", "processes": [..], "threads": count, "frames"}``.

    Main threads first; then by the first process that has it.
    """
    found: dict[Any, dict[str, Any]] = {}
    for one in processes:
        for thread in one["threads"]:
            name = "" if thread["main"] else _numbered(thread["name"])
            key = (thread["main"], name, *(_place(frame) for frame in thread["frames"]))
            group = found.setdefault(
                key,
                {
                    "main": thread["main"],
                    "name": thread["name"],
                    "processes": [],
                    "threads": 0,
                    "frames": thread["frames"],
                },
            )
            group["threads"] += 1
            if not group["processes"] or group["processes"][-1] is not one:
                group["processes"].append(one)
    return sorted(found.values(), key=lambda group: not group["main"])


def _numbered(name: str) -> str:
    """What the threads of a pool have in common: ``loader-N``."""
    return re.sub(r"\d+", "N", name)


def order(processes: Iterable[Process]) -> list[Process]:
    """Ranks first, in their order; then the other processes by number."""
    return sorted(processes, key=lambda one: (one["rank"] is None, one["rank"] or 0, one["pid"]))


def summary(told: Mapping[str, Any]) -> str:
    """``all ranks wait in all_reduce (file:line)``, or who does and who does not; empty without any stack.

    Ranks speak for a run; without any, all of its Python processes.
    """
    processes = told["processes"]
    ranked = [one for one in processes if one["rank"] is not None]
    meant = order(ranked or [one for one in processes if one["python"]])
    speaking = [one for one in meant if _innermost(one)]
    if not speaking:
        return ""
    mute = [f"no stack of {_names([one])}" for one in meant if not _innermost(one)]
    total = len(meant) + len(told["gone"]) + len(told["absent"])
    gone = [
        f"{_some_ranks(which)} not running{where}"
        for which, where in ((told["gone"], ""), (told["absent"], f" on {told['host']}"))
        if which
    ]
    return "; ".join([_majority(speaking, total, bool(ranked)), *mute[:4], *gone])


def _some_ranks(which: Sequence[int]) -> str:
    """``rank 2 is``, ``ranks 2, 5-7 are``."""
    return f"rank {which[0]} is" if len(which) == 1 else f"ranks {_spans(which)} are"


def _majority(speaking: Sequence[Process], total: int, ranked: bool) -> str:
    """Where most are, of `total` ranks or processes; then where the others are."""
    places: dict[Any, list[Process]] = {}
    for one in speaking:
        places.setdefault(_place(_innermost(one)), []).append(one)
    most = max(places.values(), key=len)
    word = "rank" if ranked else "process"
    if len(most) == total and total > 1:
        return f"all {plural(2, word).partition(' ')[2]} {_doing(most, False)}"
    if len(speaking) == 1:
        return f"{_names(speaking)} {_doing(speaking, True)}"
    if len(most) == 1:
        return f"no two of {plural(total, word)} are at the same place"
    others = [item for group in places.values() if group is not most for item in group]
    rest = "; ".join(f"{_names([one])} {_doing([one], True)}" for one in others[:4])
    more = f"; and {len(others) - 4} elsewhere" if len(others) > 4 else ""
    here = f"{len(most)} of {plural(total, word)} {_doing(most, False)}"
    return f"{here}; {rest}{more}" if rest else here


def _doing(processes: Sequence[Process], one: bool) -> str:
    """``waits in wait (threading.py:327), from next_batch (data.py:41)``."""
    waits = all(item["cpu"] is not None and item["cpu"] < WAITING for item in processes)
    halted = all(item["state"] in HALTED for item in processes)
    frames = processes[0]["threads"][0]["frames"]
    inner = frames[0]
    outer = next((frame for frame in frames if not _STANDARD.search(frame["file"])), None)
    outside = (
        all(_place(outer) in map(_place, item["threads"][0]["frames"]) for item in processes) if outer else 0
    )
    came = f", from {_where(outer)}" if outer and outer is not inner and outside else ""
    if halted:
        return f"{'is' if one else 'are'} halted by a signal in {_where(inner)}{came}"
    if waits:
        return f"{'waits' if one else 'wait'} in {_where(inner)}{came}"
    return f"{'is' if one else 'are'} in {_where(inner)}{came}, using CPU"


def _innermost(one: Process) -> Frame | None:
    threads = one["threads"]
    frames = threads[0]["frames"] if threads and threads[0]["main"] else None
    return frames[0] if frames else None


def _place(frame: Frame | None) -> tuple[str, str, int] | None:
    """What tells two frames apart. (py-spy names a method with its class where Python does.)"""
    if frame is None:
        return None
    return frame["function"].rpartition(".")[2], frame["file"], frame["line"]


# -- words -------------------------------------------------------------------------------------------------


def to_json(told: Mapping[str, Any]) -> dict[str, Any]:
    """For scripts: host, run_id, summary, tool, asked, and every process with its threads and frames."""
    processes = [
        {**one, "command": mask.words(one["command"]), "why": "" if one["threads"] else lacking(told, one)}
        for one in order(told["processes"])
    ]
    return {**told, "summary": summary(told), "processes": processes}


def text(told: Mapping[str, Any]) -> str:
    """The answer for people, safe for a terminal: whatever a process is called, it is one line."""
    processes = order(told["processes"])
    by = sorted({one["by"] for one in processes if one["by"]})
    what = f"{told['run_id'] or _names(processes)} on {told['host']}"
    lines = [
        f"{what}: {plural(len(processes), 'process')}, stacks by {' and '.join(by)}, innermost call first"
    ]
    said = summary(told)
    if said:
        lines.append(said)
    for group in groups(processes):
        lines += ["", *_group(group)]
    rest = [one for one in processes if not one["threads"]]
    if rest:
        lines.append("")
    for why, which in _by_reason(told, rest).items():
        lines.append(f"no stack of {_names(which)}: {why}")
    return "\n".join(cut(line, 400) if line.strip() == line else "    " + cut(line, 400) for line in lines)


def _group(group: Mapping[str, Any]) -> Iterator[str]:
    processes = group["processes"]
    thread = "main thread" if group["main"] else f"thread {group['name']}" if group["name"] else "thread"
    if group["threads"] > len(processes):
        thread = f"{plural(group['threads'], 'thread')} {_numbered(group['name'])}".rstrip()
    yield f"{_names(processes)} · {thread}{_state(processes) if group['main'] else ''}"
    for frame in group["frames"]:
        yield f"    {_where(frame)}"
    if not group["frames"]:
        yield "    (no Python call)"


def _state(processes: Sequence[Process]) -> str:
    if all(one["state"] in HALTED for one in processes):
        return " · halted by a signal"
    used = [one["cpu"] for one in processes if one["cpu"] is not None]
    if not used:
        return ""
    return " · waits" if max(used) < WAITING else f" · {min(used):.0%} to {max(used):.0%} of a CPU"


def _by_reason(told: Mapping[str, Any], rest: Iterable[Process]) -> dict[str, list[Process]]:
    found: dict[str, list[Process]] = {}
    for one in rest:
        why = lacking(told, one) if one["python"] else "no Python"
        found.setdefault(why, []).append(one)
    return found


def _names(processes: Sequence[Process]) -> str:
    """``ranks 0-3, 7`` and ``pid 4711 (python -u train.py)``; of many processes their numbers only."""
    ranks = [one["rank"] for one in processes if one["rank"] is not None]
    others = [one for one in processes if one["rank"] is None]
    parts = []
    if ranks:
        numbers = _spans(ranks)
        pids = f" (pid {processes[0]['pid']})" if len(ranks) == 1 else ""
        parts.append(f"rank{'s' if len(ranks) > 1 else ''} {numbers}{pids}")
    if others:
        numbers = ", ".join(str(one["pid"]) for one in others[:8]) + (" …" if len(others) > 8 else "")
        commands = {_command(one) for one in others}
        parts.append(f"pid {numbers}" + (f" ({commands.pop()})" if len(commands) == 1 else ""))
    return " and ".join(parts)


def _spans(numbers: Sequence[int]) -> str:
    """``0-3, 7``."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _command(one: Process, length: int = 60) -> str:
    return cut(" ".join(mask.words(one["command"])), length) or "?"


def _where(frame: Frame | None) -> str:
    assert frame is not None
    return f"{frame['function']} ({_SHORT.sub('', frame['file'])}:{frame['line'] or '?'})"
