"""The Python stacks of a run's processes, or of one process. Runs ON the host: standard library only, 3.9.

py-spy reads them from a process's memory without stopping it (``--nonblocking``), also inside a container.
What it cannot have is asked of launch, which signals those ranks that have a handler (`trainer.asked`);
nothing else is ever sent to a process.

The answer: ``{"tool", "processes", "gone", "absent", "asked"}``: py-spy's path or None; the processes; the
ranks that are not running any more; those that are not here, but perhaps on another host; and what launch
did, None if it was not asked. A process is ``{"pid", "nspid", "rank", "beats", "command", "state", "python",
"kernel", "cpu", "by", "why", "threads"}``: ``beats`` whether it sends heartbeats (else its rank is from its
environment), ``command`` is a list, ``kernel`` whether it is a thread of the kernel, ``cpu`` the share of one
CPU that its main thread used meanwhile, ``by`` says where its stacks come from, ``why`` why py-spy has none,
and ``threads`` are as in `deploy.stacks_parse`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from deploy import adopt_process, machine, procfs, segments, stacks_parse, stacks_ranks
from deploy.errors import DeployError
from trainer import status

SAMPLE = 0.25  # seconds at least between the two readings of CPU time
DUMP_TIMEOUT = 15.0  # seconds for one process
TRIES = 3  # a process that is not stopped may change its stack while it is read
PARALLEL = 4
RANK_SECONDS = 1.5  # how long launch may take for each rank, and before the first
MOST_LOG = 8 << 20  # bytes of the log that are looked through for stacks
_PYTHON = re.compile(r"(python|pypy)\d*(\.\d+)*t?")


def of_run(run_path: str, first: int, by: str, tool: str | None = None) -> dict[str, Any]:
    """The stacks of a run in progress. `first`: the pid here of its container's first process, or 0.

    `tool` is a py-spy that was put here, for a host that has none of its own.

    Raises DeployError if the run is over or its processes cannot be seen.
    """
    run = status.RunDir(run_path)
    if not run.alive():
        raise DeployError(f"{run.path.name} is not in progress any more, so it has no stacks")
    launch, written = run.launch(), run.run()
    table = procfs.processes()
    if written and written.adopted:  # there is no launch: its process is one of those that are meant
        own = sorted(adopt_process.tree(int(written.adopted["pid"])))
        top = own[0] if own else 0
    else:
        top = procfs.holding(str(run.lock), table) or first
        own = [pid for pid in procfs.of_run(top, 0, table) if pid != top and not procfs.is_launch(pid)]
    if not own:
        who = "has no process of its own at the moment" if top else "belongs to another user of the host"
        raise DeployError(f"{run.path.name} {who}, so no stack can be read; fab status says more")
    attempt = launch.attempt if launch else 0
    ranks = {beat.pid: rank for rank, beat in run.heartbeats().items() if beat.attempt == attempt}
    made = written.command[0] if written and written.runtime == "process" else ""
    tool = find_tool([os.path.dirname(made)] if os.path.isabs(str(made)) else []) or tool
    found = look([pid for pid in own if pid in table and table[pid]["state"] not in "ZX"], tool, ranks)
    asked = None
    lacking = [one for one in found if one["python"] and not one["threads"] and one["rank"] is not None]
    if lacking:
        asked = ask_launch(run, by, lacking, len(ranks))
    there = {one["nspid"] for one in found}
    gone = sorted(rank for number, rank in ranks.items() if number not in there)
    absent: list[int] = []
    if not ranks:
        gone, absent = number_by_environment(found, {pid: item["ppid"] for pid, item in table.items()})
    return {"tool": tool, "processes": found, "gone": gone, "absent": absent, "asked": asked}


def number_by_environment(
    found: list[dict[str, Any]], parents: dict[int, int]
) -> tuple[list[int], list[int]]:
    """Give the ranks of a command without heartbeats their numbers; which have ended, which are not here."""
    told = {one["pid"]: procfs.ranks(one["pid"]) for one in found if one["python"]}
    ranks = stacks_ranks.find(told, parents)
    for one in found:
        one["rank"] = ranks.get(one["pid"])
    return stacks_ranks.lacking(told, ranks)


def of_process(pid: int, host: str, tool: str | None = None) -> dict[str, Any]:
    """The stacks of any process of this host, ours or not, in a container or not, by its number here.

    Raises DeployError, calling the host `host`, if there is none of that number.
    """
    process = procfs.stat(pid)
    if process is None or process["state"] in "ZX":
        raise DeployError(f"there is no process {pid} on {host}")
    tool = find_tool([]) or tool
    return {"tool": tool, "processes": look([pid], tool, {}), "gone": [], "absent": [], "asked": None}


def find_tool(more: list[str]) -> str | None:
    """py-spy on the PATH, beside the run's Python or ours, or where pip puts it for one user."""
    beside = [*more, os.path.dirname(sys.executable), os.path.expanduser("~/.local/bin")]
    return machine.program("py-spy") or shutil.which("py-spy", path=":".join(beside))


# -- looking -----------------------------------------------------------------------------------------------


def look(pids: list[int], tool: str | None, ranks: Mapping[int, int]) -> list[dict[str, Any]]:
    """Each process with what can be read of it from outside."""
    began, before = time.monotonic(), {pid: main_ticks(pid) for pid in pids}
    with concurrent.futures.ThreadPoolExecutor(PARALLEL) as pool:
        found = list(pool.map(lambda pid: process(pid, tool, ranks), pids))
    time.sleep(max(0.0, SAMPLE - (time.monotonic() - began)))
    for one in found:
        first, last = before[one["pid"]], main_ticks(one["pid"])
        seconds = (time.monotonic() - began) * os.sysconf("SC_CLK_TCK")
        one["cpu"] = None if first is None or last is None else round((last - first) / seconds, 2)
    return found


def process(pid: int, tool: str | None, ranks: Mapping[int, int]) -> dict[str, Any]:
    nspid = procfs.nspid(pid)
    seen = procfs.stat(pid)
    words = procfs.read(pid, "cmdline").rstrip(b"\0").split(b"\0")
    python = is_python(pid, words)
    threads, why = dump(tool, pid) if tool and python else ([], "")
    return {
        "pid": pid,
        "nspid": nspid,
        "rank": ranks.get(nspid),
        "beats": nspid in ranks,
        "command": [word.decode("utf-8", "replace") for word in words],
        "state": seen["state"] if seen else "X",
        "python": python,
        "kernel": procfs.is_kernel(procfs.read(pid, "stat")),
        "cpu": None,
        "by": "py-spy" if threads else None,
        "why": why,
        "threads": threads,
    }


def is_python(pid: int, words: list[bytes]) -> bool:
    """Whether a process runs Python: by its program, or if that is not to be seen, by its own words."""
    try:
        program = os.readlink(f"/proc/{pid}/exe").replace(" (deleted)", "")
    except OSError:
        program = words[0].decode("utf-8", "replace")
    return bool(_PYTHON.fullmatch(os.path.basename(program))) or b"/libpython" in procfs.read(pid, "maps")


def main_ticks(pid: int) -> int | None:
    """The CPU time of a process's main thread, in clock ticks."""
    found = procfs.parse(pid, procfs.read(pid, f"task/{pid}/stat").decode("utf-8", "replace"))
    return found["ticks"] if found else None


def dump(tool: str, pid: int) -> tuple[list[dict[str, Any]], str]:
    """(the threads of a process by py-spy, or none and why not)."""
    argv = [tool, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    why = ""
    for _ in range(TRIES):
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=DUMP_TIMEOUT,
                env={**os.environ, "RUST_BACKTRACE": "0"},
            )
        except subprocess.TimeoutExpired:
            return [], f"py-spy did not end within {DUMP_TIMEOUT:g} s"
        except OSError as error:
            return [], f"{tool} cannot be started: {error.strerror}"
        if done.returncode == 0:
            try:
                return stacks_parse.py_spy(done.stdout.decode("utf-8", "replace")), ""
            except ValueError as error:
                why = f"py-spy said something else than expected ({error})"
                continue
        why = f"py-spy: {reason(done.stderr.decode('utf-8', 'replace'))}"
        if "ermission" in why:
            break
    return [], why


def reason(errors: str) -> str:
    """Why py-spy failed, from what it has printed: its sentence and the last cause."""
    told = errors.partition("Stack backtrace:")[0].strip().splitlines()
    first = told[0].replace("Error: ", "").rstrip(". ") if told else "no word"
    causes = re.findall(r"^\s+(?:\d+: )?(\S.*)$", "\n".join(told[1:]), re.MULTILINE)
    return f"{first} ({causes[-1]})" if causes else first


# -- asking launch -----------------------------------------------------------------------------------------


def ask_launch(run: status.RunDir, by: str, lacking: list[dict[str, Any]], ranks: int) -> str:
    """Have launch ask the ranks, and give those that lack stacks theirs; what was done, or why nothing."""
    try:
        request = run.ask("dump-stacks", by)
    except OSError as error:
        return f"launch could not be asked, because {run.path} may not be written to ({error.strerror})"
    deadline = time.monotonic() + RANK_SECONDS * (ranks + 1)
    while True:
        launch = run.launch()
        answer = launch.answered if launch else None
        if answer and answer.get("id") == request.id:
            break
        if not run.alive():
            return "the run ended meanwhile"
        if time.monotonic() > deadline:
            return "its launch did not answer: it is of a version before this one, or halted"
        time.sleep(0.02)
    part = answer.get("log")
    if isinstance(part, list) and len(part) == 2 and all(isinstance(value, int) for value in part):
        told = stacks_parse.sections(read_log(run, part[0], min(part[1], part[0] + MOST_LOG)))
        for one in lacking:
            one["threads"] = stacks_parse.faulthandler(told.get(one["rank"], ""))
            one["by"] = "faulthandler" if one["threads"] else None
    return str(answer.get("outcome"))


def read_log(run: status.RunDir, begin: int, end: int) -> bytes:
    """The bytes of the log from `begin` to `end`, as far as they are there."""
    log, data, at = segments.Segments(run.log), b"", begin
    with contextlib.closing(log):
        while at < end:
            at, block = log.read(at)
            if not block:
                break
            data, at = data + block, at + len(block)
    return data[: end - begin]
