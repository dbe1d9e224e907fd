"""`fab watch`: a live screen of runs with curves, memory, the last lines of the log and the verdict.

What it shows comes from `deploy.newest`. Drawn with rich, which is imported by nothing else: it is not cheap.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TextIO

from deploy import show
from deploy.errors import USAGE, DeployError
from deploy.health import cut, number, table
from deploy.newest import Heard, Newest
from deploy.overview import Row
from deploy.refresh import ended_by_signals
from deploy.sizes import age, size
from deploy.target import Target

POINTS = 240  # of a curve: more than a terminal is wide
LINES = 40  # of a log, at most
INTERVAL = 1.0  # seconds between two looks at a host
FULL, ASCII = "▁▂▃▄▅▆▇█", "_.-=+*%#"
BLOCK, ROOM = "█", "░"


def check(out: TextIO) -> None:
    """Raise DeployError where no live screen can be drawn."""
    if not out.isatty() or not sys.stdin.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        raise DeployError(
            "fab watch draws a live screen, which needs a terminal; fab status --watch prints without one",
            code=USAGE,
        )
    try:
        import rich  # noqa: F401
    except ImportError:
        raise DeployError(
            "fab watch needs rich, which is not installed here: pip install -c constraints.txt -e '.[deploy]'"
        ) from None


def watch(
    goals: Sequence[Target], name: str | None, run_id: str | None, out: TextIO, words: Callable[[str], str]
) -> NoReturn:
    """Show the screen until Ctrl-C (KeyboardInterrupt); what was on the terminal is there again then."""
    from rich.console import Console
    from rich.live import Live

    newest = Newest(goals, name, run_id, INTERVAL, points=POINTS, lines=LINES)
    console = Console(file=out, highlight=False)
    with (
        ended_by_signals(),
        Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live,
    ):
        while True:
            plain = not console.encoding.lower().startswith("utf")
            live.update(screen(newest.heard(), console.width, console.height, plain, words), refresh=True)
            newest.news.wait(1.0)
            newest.news.clear()


def screen(
    found: Sequence[Heard], width: int, height: int, plain: bool, words: Callable[[str], str] = str
) -> Any:
    """All of the screen as a value of rich. The more runs there are, the fewer lines of log each has."""
    from rich.console import Group
    from rich.text import Text

    rows = [(heard, row) for heard in found for row in heard.rows]
    shown = sorted(rows, key=lambda one: not _alive(*one))
    head = [Text(line, style="yellow") for heard in found for line in _note(heard)]
    room = height - len(head) - 1
    whole = max(1, min(len(shown), room // 9))
    parts: list[Any] = list(head)
    for place, (heard, row) in enumerate(shown):
        if place < whole:
            parts.append(panel(heard, row, width, room // whole, plain))
        else:
            parts.append(Text(words(show.status([row])).split("\n")[0], no_wrap=True, overflow="ellipsis"))
    if not shown and any(heard.at for heard in found):
        parts.append(Text(words("no runs; fab deploy starts one")))
    parts.append(Text("Ctrl-C ends this; the runs go on", style="dim"))
    return Group(*parts)


def _alive(heard: Heard, row: Row) -> bool:
    return any(run["alive"] for run in heard.facts["runs"] if run["run_id"] == row.run_id)


def _note(heard: Heard) -> list[str]:
    if heard.note:
        old = f" (what stands here is {age(time.monotonic() - heard.at)} old)" if heard.at else ""
        return [cut(heard.note, 300) + old]
    return [] if heard.at else [f"{heard.goal.settings.name}: no answer yet"]


def panel(heard: Heard, row: Row, width: int, height: int, plain: bool) -> Any:
    """One run: verdict and figures, two curves, memory, and as much of its log as there is room for."""
    from rich import box
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    inner = max(20, width - 4)
    style = {"32": "green", "36": "cyan", "33": "yellow", "31": "red"}.get(
        show.COLOURS.get(row.verdict, ""), ""
    )
    lines = [Text.assemble((row.verdict, f"bold {style}"), "  ", "  ".join(show.figures(row)))]
    points = heard.curves.get(row.run_id) or []
    for label, key, form in (("loss", "loss", "{:.3f}"), ("tok/s", "tokens_per_second", "{:,.0f}")):
        values = [value for point in points if (value := number(point, key)) is not None]
        if values:
            last = form.format(values[-1])
            drawn = sparkline(values, inner - 7 - len(last) - 2, plain)
            lines.append(Text.assemble((f"{label:<7}", "dim"), (drawn, "cyan"), f"  {last}"))
    lines += [Text(line) for line in memory(heard, row, inner, plain)]
    lines += [Text(f"{key}: {cut(value, inner)}", style="dim") for key, value in row.links.items()]
    left = max(0, height - 2 - len(lines))
    log = [cut(str(line), inner) for line in heard.logs.get(row.run_id) or []]
    lines += [Text(line, style="dim") for line in log[len(log) - min(left, len(log)) :]]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    title = Text(f"{row.host}  {row.run_id}")
    return Panel(Group(*lines), title=title, title_align="left", box=box.ASCII if plain else box.ROUNDED)


def memory(heard: Heard, row: Row, width: int, plain: bool) -> list[str]:
    """A bar for each GPU of the run, with how busy it is; the host's memory where there are none."""
    bars = [
        (f"GPU {gpu['index']}", gpu["memory_used"], gpu["memory_total"], gpu["utilization"])
        for gpu in row.gpus
        if gpu["memory_used"] is not None and gpu["memory_total"]
    ]
    if not bars:
        told = table(dict(heard.facts), "memory")
        total, free = number(told, "total"), number(told, "available")
        if total and free is not None:
            bars = [("memory", total - free, total, None)]
    lines = []
    for label, used, total, busy in bars:
        words = f"{size(used)} of {size(total)}" + (f", {busy:.0f} % busy" if busy is not None else "")
        lines.append(f"{label:<7}{bar(used / total, max(10, width - 9 - len(words)), plain)}  {words}")
    return lines


def bar(part: float, width: int, plain: bool) -> str:
    full = round(max(0.0, min(1.0, part)) * width)
    return (("#" if plain else BLOCK) * full) + (("." if plain else ROOM) * (width - full))


def sparkline(values: Sequence[float], width: int, plain: bool = False) -> str:
    """The newest `width` of `values`, one sign each, from the least of them to the greatest."""
    signs = ASCII if plain else FULL
    shown = list(values)[-max(1, width) :]
    least, most = min(shown), max(shown)
    if most <= least:
        return signs[len(signs) // 2] * len(shown)
    return "".join(signs[int((value - least) / (most - least) * (len(signs) - 1) + 0.5)] for value in shown)
