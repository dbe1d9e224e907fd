"""What the processes of a run do: CPU, reading, where they wait, which have died, what they hold back. Pure.

The evidence is a run's "processes" as two samples saw them (see `deploy.probe`); older probes and machines
that tell less leave fields out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from deploy.health_words import amount, change, cut, number, plural, rows, table, tables

TICKS = 100.0  # of CPU time a second: what Linux shows to programs, whatever its own clock does
BUSY = 0.05  # CPUs; less is a process that waits and looks now and then
READS = 1e6  # bytes a second; less is a log, a heartbeat, a timer
SHOWN = 3  # processes, or waits, are named
COMPILERS = re.compile(
    r"(\S+-)?(cc1|cc1plus|cicc|nvcc|ptxas|fatbinary|nvlink|ninja|gcc|g\+\+|clang|ld|collect2|rustc)(-[\d.]+)?"
)
PYTHON = re.compile(r"(python|pypy)\d*(\.\d+)*t?")
OFF = re.compile(r"\s*[+-]?0+|")  # values of PYTHONUNBUFFERED that CPython takes for no
WAITS = {
    "lock": "in a lock", "file lock": "for a file's lock", "socket": "on a socket", "pipe": "on a pipe",
    "file": "on a file", "disk": "for a disk", "network disk": "for a network disk (its server is away?)",
    "child": "for a child process", "sleep": "asleep", "signal": "for a signal", "events": "for events",
    "device": "in the driver", "terminal": "on a terminal", "exit": "in its own end", "halt": "halted",
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """What a run's own processes do; launch and its guard are left out."""

    processes: list[dict[str, Any]] = field(default_factory=list)  # those that live
    dead: list[dict[str, Any]] = field(default_factory=list)  # those that ended and that nobody waited for
    cpus: float | None = None  # None: not sampled
    reads: float = 0.0  # bytes a second
    complete: bool = False  # whether the table has the run's own launch or trainer in it

    @property
    def busy(self) -> bool:
        return self.cpus is not None and self.cpus >= BUSY

    @property
    def halted(self) -> bool:
        """Whether all of them were stopped by a signal."""
        return bool(self.processes) and all(item.get("state") == "T" for item in self.processes)


def look(run: dict[str, Any], sample: float) -> Work:
    found = tables(run, "processes")
    launch = table(run, "launch")
    # launch.json has the number that launch has in its container, where the first process waits for it.
    waiting = {number(launch, "pid"), 1.0 if table(run, "container") else None} - {None}
    own = [item.get("cmdline") for item in found if item.get("nspid", item.get("pid")) in waiting]
    rest = [item for item in found if item.get("cmdline") not in own]  # launch and its guard wait
    living = [item for item in rest if item.get("state") not in ("Z", "X")]
    ticks = [grown for item in living if (grown := change(item, "cpu_ticks")) is not None]
    known = bool(ticks) and sample > 0
    # What comes through pipes and sockets counts as read, too: only a file or a disk is a load.
    reads = [change(item, "io", 0 if table(item, "reading") else 1) or 0.0 for item in living]
    trainer = number(launch, "trainer_pid")
    here = {item.get("nspid", item.get("pid")) for item in found}
    return Work(
        processes=living,
        dead=[item for item in rest if item.get("state") in ("Z", "X")],
        cpus=sum(ticks) / TICKS / sample if known else None,
        reads=max(reads, default=0.0) / sample if sample > 0 else 0.0,
        complete=bool(here & {number(launch, "pid"), trainer} - {None}),
    )


# -- words -------------------------------------------------------------------------------------------------


def reading(work: Work) -> str:
    """``pid 123 reads 120.3 MB/s, model.safetensors: 3.2 GB of 10.1 GB``, or how much at least."""
    if work.reads < READS:
        return ""
    words = f"reads {amount(work.reads)}/s"
    for item in work.processes:
        told = table(item, "reading")
        position, whole = number(told, "position"), number(told, "bytes")
        if position is not None and whole:
            name = cut(str(told.get("path")).rpartition("/")[2], 60)
            return f"{words}, {name}: {amount(position)} of {amount(whole)}"
    return words


def compiling(work: Work) -> str:
    """The compiler that is most at work, if there is one: ``pid 123 (ptxas) compiles``."""
    found = []
    for item in work.processes:
        words = [str(word) for word in rows(item, "cmdline")]
        inductor = any("compile_worker" in word for word in words)
        if (inductor and (change(item, "cpu_ticks") or 0) > 0) or (
            COMPILERS.fullmatch(program(item)) and work.busy
        ):
            name = "torch.compile" if inductor else cut(program(item), 30)
            found.append((change(item, "cpu_ticks") or 0.0, f"pid {item.get('pid')} ({name}) compiles"))
    return max(found)[1] if found else ""


def program(item: dict[str, Any]) -> str:
    """The name of what a process runs."""
    words = rows(item, "cmdline")
    return str(item.get("program") or (str(words[0]).rpartition("/")[2] if words else ""))


def held_back(work: Work) -> str:
    """Why what the processes print does not appear, if Python holds it back; else an empty text."""
    for item in work.processes:
        why = buffered(item)
        if why:
            where = "a pipe" if str(item.get("stdout")).startswith("pipe:") else "a file"
            return f"its output is held back in its buffer (pid {item.get('pid')} prints into {where}, {why})"
    return ""


def buffered(item: dict[str, Any]) -> str:
    """Why a process holds its output back; an empty text if it does not, or if that cannot be known."""
    words = [str(word) for word in rows(item, "cmdline")]
    stdout = str(item.get("stdout") or "")
    into = stdout.startswith("pipe:") or (stdout.startswith("/") and not stdout.startswith("/dev/"))
    if not words or not into or not PYTHON.fullmatch(program(item)):
        return ""
    flags = set(switches(words[1:]))
    value = item.get("unbuffered")
    if "u" in flags:
        return ""
    if value is None:
        return "without PYTHONUNBUFFERED or -u"
    if OFF.fullmatch(str(value)):
        return f"PYTHONUNBUFFERED is off ({cut(str(value), 10) or 'empty'})"
    ignored = flags & {"I", "E"}
    return f"-{min(ignored)} makes Python ignore PYTHONUNBUFFERED" if ignored else ""


def switches(words: list[str]) -> Iterator[str]:
    """The one-letter switches of a Python command line, up to the program."""
    skip = False
    for word in words:
        if skip:
            skip = False
            continue
        if not word.startswith("-") or word in ("-", "--"):
            return
        if word.startswith("--"):
            skip = word == "--check-hash-based-pycs"
            continue
        for place, letter in enumerate(word[1:], 2):
            if letter in "cm":
                return
            if letter in "WX":
                skip = place == len(word)
                break
            yield letter


def prints_elsewhere(work: Work) -> tuple[float, str] | None:
    """(when, words) of the newest output into a file that is not the run's log."""
    found = []
    for item in work.processes:
        told = table(item, "stdout_file")
        when, size = number(told, "modified"), number(told, "bytes")
        if when is not None and size:
            found.append((when, f"prints into {cut(str(item.get('stdout')), 80)}, {size:,.0f} bytes"))
    return max(found, default=None)


def waits(work: Work) -> str:
    """Where the processes wait, one after the other; empty if nothing of that is known."""
    if any(item.get("state") == "T" for item in work.processes):
        return "halted by a signal (kill -CONT lets it go on)"
    told: dict[str, list[Any]] = {}
    for item in work.processes:
        words = wait(item)
        if words:
            told.setdefault(words, []).append(item.get("pid"))
    if not told:
        functions = sorted({str(item["wchan"]) for item in work.processes if item.get("wchan")})
        return f"waiting in {cut(', '.join(functions[:SHOWN]))}" if functions else ""
    if len(told) == 1:
        (words,) = told
        return f"waiting {words}" if len(work.processes) == 1 else f"all waiting {words}"
    # What says most comes first: who waits for a child, or sleeps, only waits for the others.
    order = sorted(told, key=lambda words: (words.startswith(("for a child", "asleep", "for ev")), words))
    pids = {words: ", ".join(map(str, found[:SHOWN])) for words, found in told.items()}
    return "; ".join(f"pid {pids[words]} waits {words}" for words in order[:SHOWN])


def wait(item: dict[str, Any]) -> str:
    """``in a lock (futex)``, ``on a socket to 10.0.0.2:29500 (recvfrom)``: where one process waits."""
    words = place(table(item, "wait"))
    threads = table(item, "threads")
    others = tables(threads, "waits")
    count = number(threads, "count") or 0
    if table(item, "wait").get("kind") == "lock" and count:
        kinds = {one.get("kind") for one in others}
        if kinds == {"lock"} and count == len(others):
            return f"{words}, and so does each of its other {plural(int(count), 'thread')}"
        # The main thread often only waits for the thread that does the work.
        telling = sorted({place(one) for one in others if one.get("kind") in ("socket", "pipe", "file")})
        if telling:
            return f"{words}, another thread of it {telling[0]}"
    return words


def place(told: dict[str, Any]) -> str:
    kind = WAITS.get(str(told.get("kind")))
    if not kind:
        return ""
    on = [cut(str(one), 80) for one in rows(told, "on") if one]
    where = f" {'to' if told.get('kind') == 'socket' else '·'} {', '.join(on)}" if on else ""
    where = where.replace(" to callers at", ", for callers at")
    call = told.get("call")
    return f"{kind}{where}" + (f" ({cut(str(call), 20)})" if call else "")


# -- who has died ------------------------------------------------------------------------------------------


def end_of(item: dict[str, Any]) -> str:
    """How a process ended, by its wait status: ``killed by signal 9``."""
    ended = item.get("ended")
    if not isinstance(ended, int) or isinstance(ended, bool) or ended < 0:
        return "has ended"
    if ended & 0x7F:
        return f"was killed by signal {ended & 0x7F}"
    return f"has ended with exit code {ended >> 8}"


def dead_children(work: Work) -> str:
    """The children that ended and that their parents have not noticed."""
    parents = {item.get("pid") for item in work.processes}
    found = [item for item in work.dead if item.get("ppid") in parents]
    words = [
        f"pid {item.get('pid')}, a child of pid {item.get('ppid')}, {end_of(item)}" for item in found[:SHOWN]
    ]
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"{'; '.join(words)}{more}, which its parent has not noticed" if words else ""


def dead_ranks(work: Work, beats: list[dict[str, Any]], now: float, grace: float) -> str:
    """The ranks whose process is gone while others live; empty while that cannot be told.

    By their heartbeats; of a command that sends none by the numbers that its launcher gave them. A rank that
    said that it finishes may be gone before the others.
    """
    if not work.complete or not work.processes:
        return ""
    living = {item.get("nspid", item.get("pid")): item for item in work.processes}
    if beats:
        told = {number(beat, "pid"): beat for beat in beats if number(beat, "pid")}
        gone = [
            beat
            for pid, beat in told.items()
            if pid not in living
            and beat.get("phase") != "finishing"
            and now - (number(beat, "time") or now) > grace
        ]
        if not gone or len(gone) == len(beats):
            return ""  # (all of them gone: launch is about to say so)
        dead = {item.get("nspid", item.get("pid")): item for item in work.dead}
        words = []
        for beat in gone:
            pid = number(beat, "pid")
            end = end_of(dead[pid]) if pid in dead else "is gone"
            words.append(f"rank {beat.get('rank', '?')} (pid {pid:.0f}) {end}")
        return f"{'; '.join(words[:SHOWN])}, of {len(beats)} ranks"
    ranks = [table(item, "ranks") for item in work.processes]
    size = max((number(one, "LOCAL_WORLD_SIZE") or 0 for one in ranks), default=0)
    here = {number(one, "LOCAL_RANK") for one in ranks} - {None}
    lacking = [rank for rank in range(min(int(size), 64)) if rank not in here]
    if not here or not lacking:
        return ""
    return f"rank {', '.join(map(str, lacking[:SHOWN]))} of {size:.0f} on this host is gone"
