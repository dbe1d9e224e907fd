"""From evidence to a verdict: one word for what a run does, why, and what to do next. Pure.

The evidence is one entry of the probe's "runs" (see `deploy.probe`); every field may be missing or foreign,
and what cannot be known is said, never guessed. Situations that were seen are kept in tests/cases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WORDS = (
    "starting", "loading", "compiling", "training", "checkpointing", "silent", "stalled",
    "finished", "failed", "stopped", "absent",
)  # fmt: skip

QUIET = 60.0  # seconds without a sign of life before silence means anything
QUIET_WORK = 300.0  # the same while loading or compiling, where one piece of work may take minutes
QUIET_STEPS = 10.0  # ... and while training, so many of its own steps, if these are longer
BANNER = 2.0  # seconds after the start within which what is in the log may be launch's own banner
START = 60.0  # seconds that a run may take from run.json to launch
TICKS = 100.0  # of CPU time a second: what Linux shows to programs, whatever its own clock does
KILLED = 137  # 128 + SIGKILL
BUSY = 0.05  # CPUs; less is a process that waits and looks now and then


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
    name = run.get("name")
    exit = table(run, "exit")
    if exit:
        return ended(exit, table(run, "container"), now, name, host)
    if not run.get("alive"):
        return not_alive(run, now, name, host)
    word, reason = in_progress(run, now, sample)
    return Verdict(word, reason, command("tail", name, host))


# -- runs that are over ------------------------------------------------------------------------------------


def ended(
    exit: dict[str, Any], container: dict[str, Any], now: float, name: str | None, host: str | None
) -> Verdict:
    """A run with an exit.json."""
    word = exit.get("reason") if exit.get("reason") in ("finished", "stopped", "failed") else "failed"
    parts = [f"ended {ago(now, number(exit, 'time'))}"]
    step = number(exit, "last_step")
    if step is not None:
        parts.append(f"at step {step:.0f}")
    if word != "finished" or exit.get("code"):
        limit = number(exit, "signal") == 9 and container.get("oom_killed") is True
        parts.append(code_words({**exit, "out_of_memory": True} if limit else exit))
    if word == "stopped" and exit.get("asked_by"):
        parts.append(f"asked by {exit['asked_by']}")
    saved = number(table(exit, "last_checkpoint"), "step")
    if saved is not None:
        parts.append(f"checkpoint of step {saved:.0f}")
    attempts = number(exit, "attempts")
    if attempts and attempts > 1:
        parts.append(f"{attempts:g} attempts")
    last = rows(exit, "last_lines")
    if word == "failed" and last:
        parts.append(f"last line: {cut(str(last[-1]))}")
    if word == "failed":
        return Verdict(word, ", ".join(parts), command("tail", name, host, "--lines 50"))
    return Verdict(str(word), ", ".join(parts), command("deploy", name, host) if word == "stopped" else None)


def container_words(run: dict[str, Any], launch: dict[str, Any]) -> str:
    """How the container of a run ended, if it had one and the engine tells; else an empty text."""
    container = table(run, "container")
    if not container:
        return ""
    if container.get("unknown"):
        return f"its container cannot be asked about, because {cut(str(container['unknown']))}"
    if container.get("gone"):
        return "its container was removed"
    if container.get("running") is not False:
        return ""
    finished, engine = number(container, "finished"), number(container, "engine_started")
    code = number(container, "exit_code")
    words = f"its container ended with exit code {code:g}" if code is not None else "its container ended"
    if container.get("oom_killed"):
        words += ", out of memory (the container's limit)"
    elif engine is not None and (finished is None or finished < engine):
        words += ", and the engine was started again since"
    elif code == KILLED:
        words += ", so somebody killed it"
    return words + (f" ({cut(str(container['error']))})" if container.get("error") else "")


def not_alive(run: dict[str, Any], now: float, name: str | None, host: str | None) -> Verdict:
    """No launch, and no record of an end: it did not begin yet, or nobody was left to write one."""
    switch = table(run, "switch")
    launch = table(run, "launch")
    if launch:
        why = "the machine restarted since" if run.get("rebooted") else "launch was killed (out of memory?)"
        why = container_words(run, launch) or why
        left = rows(run, "processes")
        more = f"; {plural(len(left), 'process')} of it left" if left else ""
        reason = f"gone without a record of its end: {why}{more}{last_line(run)}"
        return Verdict("failed", reason, command("tail", name, host, "--lines 50"))
    if switch.get("outcome") == "failed":
        reason = f"was not started: {cut(str(switch.get('reason')))}"
        return Verdict("failed", reason, command("deploy", name, host))
    if switch.get("outcome") == "running" and run.get("switch_lives") is False:
        steps = [item for item in rows(switch, "steps") if isinstance(item, dict)]
        where = f" during {steps[-1].get('name')}" if steps else ""
        reason = f"was not started: its switch was interrupted{where} (killed, or the machine restarted)"
        return Verdict("failed", reason, command("deploy", name, host))
    if switch.get("outcome") == "running":
        steps = [item for item in rows(switch, "steps") if isinstance(item, dict)]
        step = steps[-1] if steps else {}
        reason = (
            f"the switch is at {step.get('name', 'its first step')} {since(now, number(step, 'started'))}"
        )
        return Verdict("starting", reason, command("tail", name, host))
    created = number(table(run, "run"), "created")
    if created is not None and now - created < START and not run.get("given_up"):
        return Verdict(
            "starting", f"prepared {ago(now, created)}, not started yet", command("tail", name, host)
        )
    return Verdict(
        "failed", f"was prepared {ago(now, created)} and never started", command("deploy", name, host)
    )


# -- runs in progress --------------------------------------------------------------------------------------


def in_progress(run: dict[str, Any], now: float, sample: float) -> tuple[str, str]:
    attempt = number(table(run, "launch"), "attempt")
    beats = [
        beat
        for beat in table(run, "heartbeats").values()
        if isinstance(beat, dict) and (attempt is None or number(beat, "attempt") in (None, attempt))
    ]
    again = f", attempt {attempt:g}" if attempt and attempt > 1 else ""
    asked = table(run, "launch").get("stopping")
    again += f", stopping (asked by {asked})" if asked else ""
    if not beats:
        word, reason = without_heartbeat(run, now, sample)
        return word, reason + again
    # The rank that is furthest behind speaks for the run: the others wait for it.
    beat = min(beats, key=lambda beat: last_progress(beat) or 0.0)
    word = phase_word(beat)
    quiet = now - (last_progress(beat) or now)
    if quiet <= patience(beat):
        return word, progress(beat, now) + again
    rank = f"rank {beat.get('rank', '?')} " if len(beats) > 1 else ""
    what = f"{rank}{beat.get('phase', 'in an unknown phase')}: no progress for {seconds(quiet)}"
    step = number(beat, "step")
    if step:
        what += f" after step {step:.0f}"
    word, evidence = computing(run, sample)
    return word, f"{what}, {evidence}{again}"


def without_heartbeat(run: dict[str, Any], now: float, sample: float) -> tuple[str, str]:
    """A command of somebody's own, or ours before its first heartbeat: the log and the CPUs must tell."""
    log = table(run, "log")
    began = number(table(run, "launch"), "trainer_started") or number(table(run, "run"), "created")
    written = number(log, "last_write")
    newest = max((moment for moment in (written, began) if moment is not None), default=now)
    age = now - newest
    size = number(log, "bytes") or 0
    if began is not None and now - began < QUIET and (written is None or written - began < BANNER):
        return "starting", f"began {ago(now, began)}, {size:,.0f} bytes of output, no heartbeat yet"
    if age <= QUIET_WORK:
        line = last_line(run)
        return (
            "training",
            f"sends no heartbeat; {size:,.0f} bytes of output, the newest {ago(now, written)}{line}",
        )
    word, evidence = computing(run, sample)
    return word, f"sends no heartbeat, no output for {seconds(age)}, {evidence}"


def phase_word(beat: dict[str, Any]) -> str:
    phase = beat.get("phase")
    if phase == "finishing":
        return "training"
    return phase if phase in WORDS else "starting"


def last_progress(beat: dict[str, Any]) -> float | None:
    """When it last did something new: a step or a new phase; before training also the heartbeat itself.

    A heartbeat alone proves nothing in training: a thread can send it while the steps wait for ever.
    """
    moments = [number(beat, "phase_since"), number(beat, "last_step_time")]
    if phase_word(beat) != "training" or beat.get("phase") == "finishing" or not any(moments):
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
    step, total = number(beat, "step"), number(beat, "total")
    parts = []
    if beat.get("phase") == "finishing":
        parts.append("finishing")
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


def computing(run: dict[str, Any], sample: float) -> tuple[str, str]:
    """Tell silent (it computes) from stalled (it does not) by the CPU time between two samples."""
    processes = [item for item in rows(run, "processes") if isinstance(item, dict)]
    # launch.json has the number that launch has in its container, where the first process waits for it.
    waiting = {number(table(run, "launch"), "pid"), 1.0 if table(run, "container") else None}
    own = [item.get("cmdline") for item in processes if item.get("nspid", item.get("pid")) in waiting]
    processes = [item for item in processes if item.get("cmdline") not in own]  # launch and its guard wait
    if table(run, "container").get("paused"):
        return "stalled", "its container is paused (docker unpause lets it go on)"
    pairs = [item.get("cpu_ticks") for item in processes]
    ticks = [
        pair[1] - pair[0]
        for pair in pairs
        if isinstance(pair, list) and len(pair) == 2 and all(isinstance(value, int) for value in pair)
    ]
    if not ticks or sample <= 0:
        return "silent", "whether it computes is unknown, because its CPU time was not sampled"
    cpus = sum(ticks) / TICKS / sample
    if cpus >= BUSY:
        words = f"{plural(len(processes), 'process')} using {cpus:.1f} CPUs"
        if any(item.get("unbuffered") in ("", "0") for item in processes):
            words += ", PYTHONUNBUFFERED is off in one of them, so its output may be held back"
        return "silent", words
    waits = sorted({str(item["wchan"]) for item in processes if item.get("wchan")})
    where = f", waiting in {', '.join(waits[:3])}" if waits else ""
    if any(item.get("state") == "T" for item in processes):
        where = ", halted by a signal (kill -CONT lets it go on)"
    return "stalled", f"{plural(len(processes), 'process')} using no CPU{where}"


# -- words -------------------------------------------------------------------------------------------------


def command(task: str, name: Any, host: str | None, more: str = "") -> str:
    parts = ["fab", task]
    if host and host != "localhost":
        parts.append(f"--host {host}")
    if name:
        parts.append(f"--name {name}")
    return " ".join([*parts, more]).rstrip()


def code_words(exit: dict[str, Any]) -> str:
    words = f"exit code {exit.get('code', 'unknown')}"
    signal = number(exit, "signal")
    if signal:
        words += f" (signal {signal:g})"
    return words + (", out of memory" if exit.get("out_of_memory") is True else "")


def last_line(run: dict[str, Any]) -> str:
    tail = rows(table(run, "log"), "tail")
    return f", last line: {cut(str(tail[-1]))}" if tail else ""


def cut(text: str, length: int = 120) -> str:
    """One line of at most `length` characters, without control characters."""
    line = "".join(char if char.isprintable() else " " for char in text).strip()
    return line if len(line) <= length else line[: length - 1] + "…"


def plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}{'es' if word.endswith('s') else 's'}"


def seconds(span: float) -> str:
    span = max(0.0, span)
    if span < 120:
        return f"{span:.0f} s"
    if span < 7200:
        return f"{span / 60:.0f} min"
    return f"{span / 3600:.0f} h" if span < 172800 else f"{span / 86400:.0f} days"


def ago(now: float, moment: float | None) -> str:
    return "at an unknown time" if moment is None else f"{seconds(now - moment)} ago"


def since(now: float, moment: float | None) -> str:
    return "since an unknown time" if moment is None else f"for {seconds(now - moment)}"


# -- fields that somebody else wrote -----------------------------------------------------------------------


def table(value: dict[str, Any], key: str) -> dict[str, Any]:
    found = value.get(key)
    return found if isinstance(found, dict) else {}


def rows(value: dict[str, Any], key: str) -> list[Any]:
    found = value.get(key)
    return found if isinstance(found, list) else []


def number(value: dict[str, Any], key: str) -> float | None:
    found = value.get(key)
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None
