"""What the processes of a run do: CPU, reading, where they wait. Pure.

The evidence is a run's "processes" as two samples saw them (see `deploy.probe`); older probes and machines
that tell less leave fields out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from deploy.health_words import amount, change, cut, number, plural, rows, table, tables

TICKS = 100.0  # of CPU time a second: what Linux shows to programs, whatever its own clock does
NEAR = 2.0  # ticks; more than so much above the exact count is the work of threads that have ended
SOME = 0.005  # CPUs; less is none
BUSY = 0.05  # CPUs; less is a process that waits and looks now and then
MOST = 0.5  # of the CPU time that they want; who gets less waits for a CPU more than for anything else
READS = 1e6  # bytes a second; less is a log, a heartbeat, a timer
SHOWN = 3  # processes, or waits, are named
MOST_PIDS = 32  # in a command that is proposed
COMPILERS = re.compile(
    r"(\S+-)?(cc1|cc1plus|cicc|nvcc|ptxas|fatbinary|nvlink|ninja|gcc|g\+\+|clang|ld|collect2|rustc)(-[\d.]+)?"
)
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
    cpus: float | None = None  # None: not sampled; 0: as far as can be told, none at all
    wants: float = 0.0  # CPUs that they would use if each of their threads had one; at least `cpus`
    reads: float = 0.0  # bytes a second
    complete: bool = False  # whether the table has the run's own launch or trainer in it

    @property
    def busy(self) -> bool:
        """Whether they have work for a CPU, whatever other processes leave them of it."""
        return self.cpus is not None and self.wants >= BUSY

    @property
    def starved(self) -> bool:
        """Whether they have work for a CPU and get most of it not done, since others have the CPUs."""
        return self.cpus is not None and self.busy and self.cpus < MOST * self.wants

    @property
    def halted(self) -> bool:
        """Whether all of them were stopped by a signal."""
        return bool(self.processes) and all(item.get("state") == "T" for item in self.processes)


def look(run: dict[str, Any], sample: float) -> Work:
    found = tables(run, "processes")
    launch = table(run, "launch")
    # launch.json has the number that launch has in its container, where the first process waits for it.
    waiting = {number(launch, "pid"), 1.0 if table(run, "container") else None} - {None}
    if table(table(run, "run"), "adopted"):  # there is no launch: the process itself stands in its place
        waiting = set()
    own = [item.get("cmdline") for item in found if item.get("nspid", item.get("pid")) in waiting]
    rest = [item for item in found if item.get("cmdline") not in own]  # launch and its guard wait
    living = [item for item in rest if item.get("state") not in ("Z", "X")]
    used = [use for item in living if (use := cpus(item, sample)) is not None]
    # What comes through pipes and sockets counts as read, too: only a file or a disk is a load.
    reads = [
        (change(item, "io", 0 if table(item, "reading") else 1) or 0.0) / length
        for item in living
        if (length := elapsed(item, sample)) > 0
    ]
    trainer = number(launch, "trainer_pid")
    here = {item.get("nspid", item.get("pid")) for item in found}
    return Work(
        processes=living,
        dead=[item for item in rest if item.get("state") in ("Z", "X")],
        cpus=sum(got for got, _ in used) if used else None,
        wants=sum(whole for _, whole in used),
        reads=max(reads, default=0.0),
        complete=bool(here & {number(launch, "pid"), trainer} - {None}),
    )


def elapsed(item: dict[str, Any], sample: float) -> float:
    """Seconds between the two samples of a process; `sample` is the pause that was asked for (0: none).

    On a busy machine it takes longer, which only the probe knows (an older one did not tell).
    """
    return (number(item, "elapsed") or sample) if sample > 0 else 0.0


def cpus(item: dict[str, Any], sample: float) -> tuple[float, float] | None:
    """The CPUs that a process used between the samples, and those that it wanted; None: not known."""
    length, spent = elapsed(item, sample), seconds_of_cpu(item)
    return None if spent is None or length <= 0 else (spent / length, wanted(item, spent) / length)


def seconds_of_cpu(item: dict[str, Any]) -> float | None:
    """What a process computed between the samples; None: not known.

    The kernel tells it exactly of the threads that live, and of all of them in ticks, which meet a little
    work now and then or miss it.
    """
    ticks, exact = change(item, "cpu_ticks"), change(item, "ran")
    if ticks is None or exact is None or exact < 0 or ticks > exact * TICKS / 1e9 + NEAR:
        return None if ticks is None else ticks / TICKS
    return exact / 1e9


def wanted(item: dict[str, Any], spent: float) -> float:
    """Seconds that it would have computed with CPUs of its own, of which it `spent` some."""
    return max(spent, (number(item, "wanted") or 0.0) / 1e9)


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


def using(work: Work, load: dict[str, Any]) -> str:
    """How much they compute: ``using 1.2 CPUs``, or how little they get of what they want."""
    cpus = work.cpus or 0.0
    if work.starved:
        return f"busy, but getting only {starving(work, load)}"
    if work.busy:
        return f"using {count_of(cpus)} CPUs"
    return "using no CPU" if cpus < SOME else f"using hardly any CPU ({100 * cpus:.1f} % of one)"


def starving(work: Work, load: dict[str, Any]) -> str:
    """``5 % of the CPU time they want (0.05 of 1.0 CPUs; load 14 on 2 CPUs)``; empty if they get most of it.

    `load` is the probe's. Where nobody else wants the CPUs, it is a limit that keeps them from one.
    """
    if not work.starved or work.cpus is None:
        return ""
    who = "it wants" if len(work.processes) == 1 else "they want"
    words = f"{100 * work.cpus / work.wants:.0f} % of the CPU time {who} "
    words += f"({count_of(work.cpus)} of {count_of(work.wants)} CPUs"
    counts = [count for key in ("average", "ready") if (count := number(load, key)) is not None]
    cpus = number(load, "cpus")
    if not counts or not cpus:
        return f"{words})"
    words += f"; load {max(counts):.0f} on {plural(int(cpus), 'CPU')}"
    return f"{words})" if max(counts) > cpus else f"{words}: is it limited, or pinned to a busy one?)"


def count_of(cpus: float) -> str:
    return f"{cpus:.{1 if cpus >= 2 * BUSY else 2}f}"


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


def halted(work: Work) -> list[Any]:
    """The pids of the processes that a signal has stopped."""
    return [item.get("pid") for item in work.processes if item.get("state") == "T"]


def go_on(pids: list[Any]) -> str:
    return f"kill -CONT {' '.join(map(str, pids[:MOST_PIDS]))}"


def waits(work: Work) -> str:
    """Where the processes wait, one after the other; empty if nothing of that is known."""
    stopped = halted(work)
    if stopped:
        there = "it" if len(stopped) == 1 else "them"
        return f"halted by a signal ({go_on(stopped)} lets {there} go on)"
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
