"""What people see: plans, steps of a switch, status and runs, as plain text. Colour only on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from deploy import evidence_lines as evidence
from deploy import mask
from deploy.health import cut
from deploy.overview import Row
from deploy.sizes import age, size

COLOURS = {
    "training": "32", "checkpointing": "32", "finished": "32",
    "starting": "36", "loading": "36", "compiling": "36",
    "silent": "33", "slow": "33",
    "stalled": "31", "failed": "31", "gpu-lost": "31",
}  # fmt: skip
ENDED = ("finished", "stopped", "failed", "absent")  # verdicts of runs that are over
_MARKS = {"ok": "✓", "skipped": "·", "failed": "✗", "running": "…"}


def step(value: Mapping[str, Any]) -> str | None:
    """One line for a step of the switch that has ended; None for one that has only begun."""
    if value["outcome"] == "running":
        return None
    seconds = (value["ended"] or value["started"]) - value["started"]
    mark = _MARKS.get(value["outcome"], value["outcome"])
    detail = f": {value['detail']}" if value["detail"] else ""
    return f"  {mark} {value['name']} ({seconds:.1f} s){detail}"


def under_way(words: Mapping[str, Any]) -> str:
    """``a switch by ada@desk, since 12:03:04``: who is at work, from the words of a lock."""
    since = words.get("since")
    when = (
        f", since {time.strftime('%H:%M:%S', time.localtime(since))},"
        if isinstance(since, int | float)
        else ""
    )
    return f"a {words.get('what', 'switch')} by {words.get('by', 'somebody')}{when}"


def over(row: Row) -> bool:
    """Whether a run has ended; by its verdict."""
    return row.verdict in ENDED


def status(rows: Sequence[Row], colour: bool = False, verbose: bool = False, brief: bool = False) -> str:
    """One line per run; under it, links and drift if there are any, and with `verbose` the evidence.

    Runs in progress come first; with `brief`, those that have ended are nothing but their line.
    """
    lines = []
    rows = sorted(rows, key=over)
    names = max((len(row.run_id) for row in rows), default=0)
    words = max((len(row.verdict) for row in rows), default=0)
    for row in rows:
        word = f"{row.verdict:<{words}}"
        if colour and row.verdict in COLOURS:
            word = f"\x1b[{COLOURS[row.verdict]}m{word}\x1b[0m"
        lines.append("  ".join([f"{row.host}  {row.run_id:<{names}}  {word}", *figures(row)]))
        if brief and over(row):
            continue
        lines += [f"    {key}: {value}" for key, value in row.links.items()]
        if row.changes:
            changes = ", ".join(f"{key}={cut(value, 80)}" for key, value in row.changes.items())
            lines.append(f"    set: {changes} (a fab deploy or restart without it undoes that)")
        if row.drift:
            lines.append(f"    drift: the run differs from what is rendered now; {row.applied_by} applies it")
            lines += [f"      {difference}" for difference in row.drift]
        if verbose:
            lines += [f"    {line}" for line in evidence.lines(row)]
        if row.next_command:
            lines.append(f"    next: {row.next_command}")
    return "\n".join(lines)


def figures(row: Row) -> Iterable[str]:
    """The evidence, and the figures that it does not name already."""
    step = f"step {row.step}/{row.total}" if row.total else f"step {row.step}"
    if step not in row.reason and (row.total or row.step):
        yield step
        if row.tokens_per_second:
            yield f"{row.tokens_per_second:,.0f} tok/s"
        if row.step_age is not None:
            yield f"last step {age(row.step_age)} ago"
    if row.reason:
        yield row.reason
    if row.eta is not None:
        yield f"ETA {age(row.eta)}"
    share = (row.reference or {}).get("share")
    if row.reference and share is not None and "reference" not in row.reason:
        yield f"{100 * share:.0f} % of {cut(row.reference['run_id'], 80)}"
    if row.gpus:
        yield gpus(row.gpus)
    if row.memory:
        yield f"mem {size(row.memory)}{_extremes(row)}"


def _extremes(row: Row) -> str:
    parts = [("min", row.memory_min), ("peak", row.memory_peak)]
    found = [f"{word} {size(value)}" for word, value in parts if value]
    return f" ({', '.join(found)})" if found else ""


def gpus(found: Sequence[Mapping[str, Any]]) -> str:
    """``GPU 3 97 %, 61 of 80 GB``; of several how far apart they are: ``8 GPUs 91-99 %, 58-61 of 80 GB``."""
    busy = [value for gpu in found if (value := gpu.get("utilization")) is not None]
    used = [value for gpu in found if (value := gpu.get("memory_used")) is not None]
    total = [value for gpu in found if (value := gpu.get("memory_total"))]
    words = f"GPU {found[0].get('index')}" if len(found) == 1 else f"{len(found)} GPUs"
    if busy:
        words += f" {_span(f'{min(busy):.0f}', f'{max(busy):.0f}')} %"
    if used:
        words += f", {_span(size(min(used)), size(max(used)))}"
        words += f" of {size(max(total))}" if total else ""
    return words


def _span(least: str, most: str) -> str:
    return least if least == most else f"{least}–{most}"


def runs(found: Sequence[Mapping[str, Any]], now: float) -> str:
    """A table of runs, newest first."""
    if not found:
        return "no runs"
    table = [("RUN", "STARTED", "STATE", "RELEASE", "CHANGES", "BY")]
    for run in reversed(found):
        written = run["run"] or {}
        created = written.get("created")
        changes = ", ".join(f"{key}={value}" for key, value in mask.pairs(written.get("changes") or {}))
        table.append(
            (
                run["run_id"],
                time.strftime("%Y-%m-%d %H:%M", time.localtime(created)) if created else "?",
                ending(run, now),
                (written.get("release") or {}).get("id") or "-",
                changes or "-",
                written.get("who") or "-",
            )
        )
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    )


def ending(run: Mapping[str, Any], now: float) -> str:
    """``running for 12 min``, ``finished``, ``failed (137)``, or ``never began``."""
    if run["alive"]:
        created = (run["run"] or {}).get("created")
        return f"running for {age(now - created)}" if created else "running"
    if run["exit"]:
        code = run["exit"].get("code")
        return f"{run['exit'].get('reason')} ({code})" if code else str(run["exit"].get("reason"))
    return "ended without a word" if run["launch"] else "never began"


def colour(stream: TextIO = sys.stdout) -> bool:
    """Whether colour helps there (no-color.org)."""
    import os

    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
