"""From evidence to a verdict: one word for what a run does, why, and what to do next. Pure.

The evidence is one entry of the probe's "runs" (see `deploy.probe`); every field may be missing or foreign,
and what cannot be known is said, never guessed. Situations that were seen are kept in tests/cases. What its
processes do is read in `deploy.health_work`, who died in `deploy.health_dead`, what was printed in
`deploy.health_output`, runs that are over in `deploy.health_over`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from deploy import health_dead as deaths
from deploy import health_notes as notes
from deploy import health_output as output
from deploy import health_over as over
from deploy import health_work as working
from deploy.health_words import (
    ago,
    command,
    cut,
    last_line,
    number,
    on_host,
    plural,
    rows,
    seconds,
    since,
    table,
    tables,
)
from deploy.health_work import TICKS, Work

__all__ = [
    "TICKS", "WORDS", "Verdict", "ago", "command", "cut", "number", "plural", "rows", "seconds",
    "table", "verdict",
]  # fmt: skip

WORDS = (
    "starting", "loading", "compiling", "training", "checkpointing", "silent", "stalled", "slow", "gpu-lost",
    "finished", "failed", "stopped", "absent",
)  # fmt: skip

DECODING = ("evaluating", "finishing")  # phases of a training in which no steps are done

QUIET = 60.0  # seconds without a sign of life before silence means anything
QUIET_WORK = 300.0  # the same while loading or compiling, where one piece of work may take minutes
QUIET_STEPS = 10.0  # ... and while training, so many of its own steps, if these are longer
SETTLED = 10.0  # seconds after the start from which it is worth saying what its processes do
GRACE = 5.0  # seconds after a rank's last heartbeat within which its end may be everybody's
SLOW = 0.8  # of the reference's speed
STEPS = 20  # at least so many tell a speed


@dataclass(frozen=True)
class Verdict:
    word: str  # one of WORDS
    reason: str  # the evidence, one line
    next_command: str | None = None  # what shows or does more about it


def verdict(
    run: dict[str, Any] | None, now: float, *, host: str | None = None, sample: float = 0.4
) -> Verdict:
    """What `run` does at `now` (the probe's "time"); None: the name has no run.

    `sample` is the probe's "sample_seconds", `host` goes into the next command, unless it is localhost.
    """
    if not run:
        return Verdict("absent", "no run of this name on this host", command("deploy", None, host))
    if table(run, "exit"):
        word, reason, following = over.ended(run, now, host)
    elif not run.get("alive"):
        word, reason, following = over.not_alive(run, now, host)
    else:
        return in_progress(run, now, host, sample)
    more = [over.left_behind(run), notes.lost(run) if word == "failed" else ""]
    return Verdict(word, "; ".join([reason, *(note for note in more if note)]), following)


# -- runs in progress --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Doing:
    """What a run in progress does, and which task tells or does more."""

    word: str
    reason: str
    task: str = "tail"
    there: str = ""  # instead of a task: a command for that host


def in_progress(run: dict[str, Any], now: float, host: str | None, sample: float) -> Verdict:
    name, launch = run.get("name"), table(run, "launch")
    work = working.look(run, sample)
    found = doing(run, now, work)
    attempt, asked = number(launch, "attempt"), launch.get("stopping")
    reason = found.reason
    if attempt and attempt > 1:
        how = ended(launch, attempt - 1)
        reason += f", attempt {attempt:g}" + (f" (the one before ended {how})" if how else "")
    reason += f", stopping (asked by {cut(str(asked), 60)})" if asked else ""
    reason = "; ".join([reason, *notes.beside(run, now, bool(work.dead))])
    if found.there:
        further = on_host(found.there, host)
    elif notes.disk_full(run):
        further = command("prune", None, host)
    elif found.task == "compare":
        both = (table(run, "reference").get("run_id"), run.get("run_id"))
        further = command("compare", None, host, " ".join(cut(str(one), 70) for one in both))
    else:
        further = command(found.task, name, host)
    return Verdict(found.word, reason, further)


def ended(launch: dict[str, Any], attempt: float) -> str:
    """``by SIGKILL after 2 min 3 s``: how an attempt has ended; empty if launch does not tell (any more)."""
    told = table(launch, "ended")
    return cut(str(told.get("how") or "")) if number(told, "attempt") == attempt else ""


def doing(run: dict[str, Any], now: float, work: Work) -> Doing:
    """The word and its evidence."""
    launch = table(run, "launch")
    attempt = number(launch, "attempt")
    beats = [
        beat
        for beat in table(run, "heartbeats").values()
        if isinstance(beat, dict) and (attempt is None or number(beat, "attempt") in (None, attempt))
    ]
    gone = notes.lost(run)
    if gone:
        return Doing(
            "gpu-lost", ", ".join([gone, *([progress(speaker(beats), now)] if beats else [])]), "restart"
        )
    if attempt and launch.get("trainer_pid", 0) is None and not launch.get("stopping"):
        how = ended(launch, attempt)
        words = " ".join(filter(None, [f"attempt {attempt:.0f} has ended", how]))
        return Doing("starting", f"{words}, the next one is about to start{last_line(run)}")
    dead = deaths.dead_ranks(work, beats, now, GRACE)
    if dead:
        # The others may wait for it in a spinning loop, on the CPU or a GPU: it is no progress.
        found = computing(run, replace(work, dead=[]))
        return Doing("stalled", f"{dead}, {found.reason}", "restart")
    if work.halted:
        found = computing(run, work)
        return Doing("stalled", f"{progress(speaker(beats), now)}, {found.reason}", there=found.there)
    return with_heartbeat(run, beats, now, work) if beats else without_heartbeat(run, now, work)


def speaker(beats: list[dict[str, Any]]) -> dict[str, Any]:
    """The heartbeat that tells what a run is at: rank 0 keeps its books."""
    return next((beat for beat in beats if beat.get("rank") == 0), slowest(beats))


def slowest(beats: list[dict[str, Any]]) -> dict[str, Any]:
    """The rank that is furthest behind: the others wait for it."""
    return min(beats, key=lambda beat: last_progress(beat) or 0.0, default={})


def holding_up(beats: list[dict[str, Any]], now: float) -> dict[str, Any]:
    """The rank that the others wait for: who loads, compiles, saves or evaluates in its time, else the
    one furthest behind.
    """
    at_work = [beat for beat in beats if beat.get("phase") != "training" and not quiet(beat, now, beats)]
    return slowest(at_work or beats)


def quiet(beat: dict[str, Any], now: float, beats: list[dict[str, Any]]) -> bool:
    """Whether a rank has shown no progress for too long. A target's steps are as long as a drafter's."""
    allowed = max(patience(one) for one in (beats if phase_word(beat) == "training" else [beat]))
    return now - (last_progress(beat) or now) > allowed


def with_heartbeat(run: dict[str, Any], beats: list[dict[str, Any]], now: float, work: Work) -> Doing:
    # (who is through waits for nothing, and nobody waits for it)
    beats = [beat for beat in beats if beat.get("rank") == 0 or beat.get("phase") != "finishing"] or beats
    beat, first = holding_up(beats, now), speaker(beats)
    word = phase_word(beat)
    several = len(beats) > 1
    rank = f"rank {beat.get('rank', '?')} "
    if several and beat.get("role") in ("target", "drafter"):
        rank += f"({beat['role']}) "
    if not quiet(beat, now, beats):
        told = progress(first, now)
        if beat is not first and beat.get("phase") != first.get("phase"):
            told = f"{rank}{progress(beat, now)}"
        speed = too_slow(run) if word == "training" and beat.get("phase") == "training" else ""
        if speed:
            short = working.starving(work, table(run, "load"))
            why = f", its processes get only {short}" if short else ""
            return Doing("slow", f"{speed}{why}, {told}", "compare")
        return Doing(word, told)
    silent = now - (last_progress(beat) or now)
    what = f"{rank if several else ''}{beat.get('phase', 'in an unknown phase')}: no progress for "
    what += seconds(silent)
    step = number(first if several else beat, "step")
    if step:
        what += f" after step {step:.0f}"
    if word == "loading" and working.reading(work):
        return Doing(word, f"no word of its loading for {seconds(silent)}, but it {working.reading(work)}")
    sizes = [number(table(item, "ranks"), "WORLD_SIZE") or 0 for item in work.processes]
    size = int(max(sizes, default=0))
    if size > len(beats):
        what += f" ({len(beats)} of {size} ranks have sent a heartbeat)"
    found = computing(run, work)
    return Doing(found.word, f"{what}, {found.reason}", found.task, found.there)


def without_heartbeat(run: dict[str, Any], now: float, work: Work) -> Doing:
    """A command of somebody's own, or ours before its first heartbeat: its output and the CPUs must tell."""
    began = number(table(run, "launch"), "trainer_started") or number(table(run, "run"), "created")
    said, own = output.said(run, began), not our_trainer(run)
    age = now - max((moment for moment in (said.newest, began) if moment is not None), default=now)
    none = "no output for" if said.bytes else "no output yet after"
    silence = f"sends no heartbeat, {none} {seconds(age)}"
    if not said.bytes or age > QUIET:
        compiles, reads = working.compiling(work), working.reading(work)
        if compiles:
            return Doing("compiling", f"{silence}, but {compiles}")
        if reads:
            return Doing("loading", f"{silence}, but it {reads}")
        elsewhere = output.prints_elsewhere(run, work)
        if elsewhere and now - elsewhere[0] <= QUIET_WORK:
            words = f"sends no heartbeat; it {elsewhere[1]}, the newest {ago(now, elsewhere[0])}"
            return Doing("training", words)
    found = computing(run, work, bool(said.bytes))
    further = found.task if found.task == "peek" or idle(work) else "tail"
    died = deaths.dead_children(work, badly=True)
    if said.bytes and age <= QUIET_WORK:
        words = f"{said.bytes:,.0f} bytes of output, the newest {ago(now, said.newest)}"
        words = f"sends no heartbeat; {words}" if own else f"no heartbeat yet; {words}"
        task = "tail"
        if age > QUIET:
            words, task = f"{words}, {found.reason}", further
        elif died:
            words, task = f"{words}, {died}", "stacks"
        return Doing("training" if own else "starting", words + last_line(run), task)
    if began is not None and now - began < QUIET and not said.bytes:
        words, task = f"began {ago(now, began)}, no output and no heartbeat yet", "tail"
        if now - began > SETTLED or died:
            words, task = f"{words}, {found.reason}", further
        return Doing("starting", words, task)
    return Doing(found.word, f"{silence}, {found.reason}", found.task, found.there)


def our_trainer(run: dict[str, Any]) -> bool:
    """Whether a run's command is the trainer of this package, which sends heartbeats once it has begun."""
    words = rows(table(run, "run"), "command")
    return any(pair == ["-m", "trainer"] for pair in map(list, pairwise(words)))


def idle(work: Work) -> bool:
    """Whether it is known that they do not compute."""
    return work.cpus is not None and not work.busy


def phase_word(beat: dict[str, Any]) -> str:
    phase = beat.get("phase")
    if phase in DECODING:
        return "training"
    return phase if phase in WORDS else "starting"


def last_progress(beat: dict[str, Any]) -> float | None:
    """When it last did something new: a step or a new phase; before training also the heartbeat itself.

    A heartbeat alone proves nothing in training: a thread can send it while the steps wait for ever.
    """
    moments = [number(beat, "phase_since"), number(beat, "last_step_time")]
    if phase_word(beat) != "training" or beat.get("phase") in DECODING or not any(moments):
        moments.append(number(beat, "time"))
    return max((moment for moment in moments if moment), default=None)


def patience(beat: dict[str, Any]) -> float:
    """How long this phase may take from one sign of progress to the next, in seconds."""
    if phase_word(beat) in ("loading", "compiling", "starting", "checkpointing"):
        return QUIET_WORK
    parts = [value for value in table(beat, "phase_seconds").values() if isinstance(value, int | float)]
    return max(QUIET, QUIET_STEPS * sum(parts))


def progress(beat: dict[str, Any], now: float) -> str:
    """What a healthy run says of itself."""
    if not beat:
        return "sends no heartbeat"
    step, total = number(beat, "step"), number(beat, "total")
    parts = []
    if beat.get("phase") in DECODING:
        parts.append(str(beat["phase"]))
    if step:
        parts.append(f"step {step:.0f}/{total:.0f}" if total else f"step {step:.0f}")
    speed = number(table(beat, "tokens_per_second"), "now")
    if speed is not None:
        parts.append(f"{speed:,.0f} tok/s")
    loss = number(beat, "loss")
    if loss is not None:
        parts.append(f"loss {loss:.3f}")
    if beat.get("detail"):
        parts.append(cut(str(beat["detail"])))
    moment = number(beat, "last_step_time") if step else None
    if moment:
        parts.append(f"last step {ago(now, moment)}")
    else:
        parts.append(since(now, number(beat, "phase_since")))
    return ", ".join(parts)


def too_slow(run: dict[str, Any]) -> str:
    """How slow a run is against its reference; an empty text if it is not, or if that is not known yet."""
    base, recent = table(run, "reference"), table(run, "recent")
    whole, speed = number(base, "tokens_per_second"), number(recent, "tokens_per_second")
    steps = number(recent, "steps") or 0
    wanted = min(STEPS, number(base, "steps") or STEPS)
    if not whole or whole <= 0 or speed is None or steps < wanted or speed >= SLOW * whole:
        return ""
    return (
        f"{speed:,.0f} tok/s over the last {plural(int(steps), 'step')}, {100 * speed / whole:.0f} % of the "
        f"{whole:,.0f} of its reference {cut(str(base.get('run_id')), 70)}"
    )


def computing(run: dict[str, Any], work: Work, heard: bool = True) -> Doing:
    """Tell silent (it computes) from stalled (it does not), and why nothing is heard or where it waits.

    `heard`: whether anything of its output ever arrived.
    """
    container = table(run, "container")
    if container.get("paused"):
        unpause = f"docker unpause {container['name']}" if container.get("name") else ""
        return Doing("stalled", "its container is paused (docker unpause lets it go on)", there=unpause)
    count = plural(len(work.processes), "process")
    if work.halted:  # (what it used before, within the sample, says nothing any more)
        there = working.go_on(working.halted(work))
        return Doing("stalled", f"{count} {working.waits(work)}", there=there)
    if work.cpus is None:
        why = "whether it computes is unknown, because its CPU time was not sampled"
        return Doing("silent", why, "stacks")
    died, held, reads = deaths.dead_children(work), output.held_back(work), working.reading(work)
    peek = bool(held) and not died
    looks = peek or (not heard and not died and output.may_hold(work))
    held = f"{held}; fab peek shows it" if held else "" if heard else output.may_hold_back(work)
    gpus = busy_gpus(run)
    much = f"{count} {working.using(work, table(run, 'load'))}"
    if work.busy:
        parts, word = [much, reads, gpus, died, held], "silent"
    else:
        parts = [much, reads, gpus, working.waits(work), died, held]
        # A little work now and then, and output that cannot be seen: nothing says that it has stopped.
        word = "silent" if not died and (gpus or (peek and work.cpus >= working.SOME)) else "stalled"
    # Of a program that is no Python neither buffer nor stacks can be shown.
    task = "peek" if looks else "stacks" if output.any_python(work) else "tail"
    return Doing(word, ", ".join(part for part in parts if part), task)


def busy_gpus(run: dict[str, Any]) -> str:
    """The use of a run's devices, which is no progress: a rank that waits for another shows 100 %, too."""
    found = []
    for gpu in tables(run, "gpus"):
        samples = [value for value in rows(gpu, "utilization") if type(value) in (int, float)]
        if samples and max(samples) > 0:
            found.append(f"GPU {gpu.get('index')} at {max(samples):.0f} %")
    return f"{', '.join(found)} (which alone proves no progress)" if found else ""
