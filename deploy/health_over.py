"""Runs that are over, or that never began: how, by their record, their container, their machine. Pure."""

from __future__ import annotations

from typing import Any

from deploy.health_words import (
    ago,
    amount,
    command,
    cut,
    last_line,
    number,
    plural,
    rows,
    since,
    table,
    tables,
)

START = 60.0  # seconds that a run may take from run.json to launch
KILL = 9
KILLED = 128 + KILL
SIGNALS = {2: "SIGINT", 6: "SIGABRT", 7: "SIGBUS", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
BY_OTHERS = (1, 2, 3, 9, 15)  # signals that a program does not send to itself

Told = tuple[str, str, str | None]  # word, reason, next command


def ended(run: dict[str, Any], now: float, host: str | None) -> Told:
    """A run with an exit.json."""
    exit, container, name = table(run, "exit"), table(run, "container"), run.get("name")
    reason = exit.get("reason")
    word = str(reason) if reason in ("finished", "stopped", "failed") else "failed"
    parts = [f"ended {ago(now, number(exit, 'time'))}"]
    step = number(exit, "last_step")
    if step is not None:
        parts.append(f"at step {step:.0f}")
    if word != "finished" or exit.get("code"):
        limit = number(exit, "signal") == KILL and container.get("oom_killed") is True
        parts.append(code_words({**exit, "out_of_memory": True} if limit else exit, word == "failed"))
    if word == "stopped" and exit.get("asked_by"):
        parts.append(f"asked by {cut(str(exit['asked_by']), 60)}")
    saved = number(table(exit, "last_checkpoint"), "step")
    if saved is not None:
        parts.append(f"checkpoint of step {saved:.0f}")
    parts += attempts(run, exit, word)
    last = rows(exit, "last_lines")
    if word == "failed" and last:
        parts.append(f"last line: {cut(str(last[-1]))}")
    words = ", ".join(parts)
    if word == "failed":
        return "failed", words, command("tail", name, host, "--lines 50")
    if word == "stopped":
        return word, words, command("start", name, host)
    return word, words, command("pull" if saved is not None else "tail", name, host)


def attempts(run: dict[str, Any], exit: dict[str, Any], word: str) -> list[str]:
    count, allowed = number(exit, "attempts"), number(table(run, "run"), "restart_attempts")
    if not count or count < 2:
        return []
    if word == "failed" and allowed is not None and count > allowed:
        return [f"all {count:g} attempts used up"]
    return [f"{count:g} attempts"]


def code_words(exit: dict[str, Any], failed: bool = False) -> str:
    """``exit code 137 (signal 9), out of memory``; of a run that failed also whose signal it was."""
    words = f"exit code {exit.get('code', 'unknown')}"
    signal = number(exit, "signal")
    if signal:
        words += f" (signal {signal:g})"
    if exit.get("out_of_memory") is True:
        return f"{words}, out of memory"
    if failed and signal in BY_OTHERS and (signal != KILL or exit.get("out_of_memory") is False):
        words += f", {SIGNALS.get(int(signal), 'a signal')} from somebody else (no stop was asked for here)"
    return words


def container_words(run: dict[str, Any]) -> str:
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


def not_alive(run: dict[str, Any], now: float, host: str | None) -> Told:
    """No launch, and no record of an end: it did not begin yet, or nobody was left to write one."""
    switch, name = table(run, "switch"), run.get("name")
    adopted = table(table(run, "run"), "adopted")
    if adopted:
        why = restarted(run) or "how is not known, as nobody waited for it"
        reason = f"process {adopted.get('pid')}, which was adopted, has ended: {why}{last_line(run)}"
        return "stopped", reason, command("deploy", name, host)
    if table(run, "launch"):
        why = container_words(run) or restarted(run) or launch_killed(run)
        left = rows(run, "processes")
        more = f"; {plural(len(left), 'process')} of it left" if left else ""
        reason = f"gone without a record of its end: {why}{more}{last_line(run)}"
        return "failed", reason, command("tail", name, host, "--lines 50")
    if switch.get("outcome") == "failed":
        reason = f"was not started: {cut(str(switch.get('reason')))}"
        return "failed", reason, command("deploy", name, host)
    steps = tables(switch, "steps")
    if switch.get("outcome") == "running" and run.get("switch_lives") is False:
        where = f" during {steps[-1].get('name')}" if steps else ""
        reason = f"was not started: its switch was interrupted{where} (killed, or the machine restarted)"
        return "failed", reason, command("deploy", name, host)
    if switch.get("outcome") == "running":
        step = steps[-1] if steps else {}
        where = str(step.get("name", "its first step"))
        reason = f"the switch is at {where} {since(now, number(step, 'started'))}"
        return "starting", reason, command("tail", name, host)
    created = number(table(run, "run"), "created")
    if created is not None and now - created < START and not run.get("given_up"):
        return "starting", f"prepared {ago(now, created)}, not started yet", command("tail", name, host)
    return "failed", f"was prepared {ago(now, created)} and never started", command("deploy", name, host)


def restarted(run: dict[str, Any]) -> str:
    """That the run ended with its machine, or with the container that the host is; else nothing."""
    if not run.get("rebooted"):
        return ""
    return f"the {'container' if run.get('only_container') else 'machine'} restarted since"


def launch_killed(run: dict[str, Any]) -> str:
    """By whom, as far as the kernel's count of its kills for want of memory tells."""
    kills = number(run, "oom_kills_since")
    if kills is None:
        return "launch was killed (whether for want of memory is unknown, because the kernel's count is)"
    if kills:
        count = plural(int(kills), "kill")
        return f"launch was killed, maybe for want of memory (the kernel counts {count} since it began)"
    return "launch was killed by somebody (the kernel has killed nothing for want of memory since it began)"


def left_behind(run: dict[str, Any]) -> str:
    """The processes of a run that is over and that hold its devices, or live on without any."""
    held: dict[str, list[str]] = {}
    for gpu in tables(run, "gpus"):
        for pid in rows(gpu, "own"):
            memory = number(gpu, "own_memory")
            size = f"{amount(memory)} of " if memory else ""
            held.setdefault(str(pid), []).append(f"{size}GPU {gpu.get('index')}")
    living = {
        item.get("pid"): item for item in tables(run, "processes") if item.get("state") not in ("Z", "X")
    }
    pids = sorted({str(pid) for pid in (*held, *living)}, key=lambda text: (len(text), text))
    if not pids:
        return ""
    what = sorted({words for found in held.values() for words in found})
    holds = f", which hold{'s' if len(pids) == 1 else ''} {', '.join(what)}" if what else ""
    alone = f"pid {pids[0]} of it was" if len(pids) == 1 else f"pids {', '.join(pids[:8])} of it were"
    return f"{alone} left behind{holds}: end what is left (kill {' '.join(pids[:8])}) before the next start"
