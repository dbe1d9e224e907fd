"""What a run has left of its figures: throughput, phase times, memory, loss, and the settings behind them.

Runs ON the host, asked by `fab compare`, `fab reference` and, for its curves, `fab watch`. It only reads, and
in constant memory: a run of a year has a metrics.jsonl of a few hundred MB. Anyone may have written what is
read, so a value of another type counts as none. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import json
import os
import statistics
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploy.errors import USAGE, DeployError, nearest
from deploy.probe import number
from deploy.room import state_root
from trainer import status

SCHEMA = 1
LINE = 1 << 16  # bytes; a longer line of metrics.jsonl is none of ours
RECENT = 1 << 18  # bytes at the end of metrics.jsonl in which the newest records are looked for
POINTS = 400  # of a curve, at most
WORDS = 1 << 18  # bytes of a release's run.yaml, at most
CURVES = ("loss", "tokens_per_second")
PHASES = 32  # names of phases, at most: they come from a file


def of(state: str | None, which: str, last: int, host: str) -> dict[str, Any]:
    """The figures of the run `which` (an id, or a name: its newest run) from its `last` records.

    ``{schema run_id name path alive records used first_step last_step total seconds tokens_per_second
    step_seconds tokens_per_step phase_seconds {name: s} memory {min now peak} loss metrics {} curves [{step
    time loss tokens_per_second}] run {} exit {} release_settings learnt {} reference problems []}``: medians
    over the records used, seconds and bytes; None or empty where the run has left nothing.
    Raises DeployError, which names `host`, if there is no such run.
    """
    root = Path(state or state_root())
    run = find(root, which, host)
    found = read(run, last)
    name = found["name"]
    made = found["run"]
    release = made.get("release")
    home = root / "names" / name
    deployed = release.get("id") if isinstance(release, dict) else None
    found["release_settings"] = text(home / "releases" / str(deployed) / "run.yaml") if deployed else None
    found["learnt"] = learnt(home / "checkpoints" / run.path.name)
    found["reference"] = obj(home / "reference.json", found["problems"]) or None
    return found


def find(root: Path, which: str, host: str) -> status.RunDir:
    """The run of that id, else what a person means by a name: its run in progress, else its newest."""
    runs = status.list_runs(root / "runs")
    for run in runs:
        if run.path.name == which:
            return run
    named = [run for run in runs if status.split_run_id(run.path.name)[1] == which]
    for wanted in (status.RunDir.alive, lambda run: run.metrics.exists(), lambda run: True):
        for run in reversed(named):
            if wanted(run):
                return run
    known = {run.path.name for run in runs} | {status.split_run_id(run.path.name)[1] for run in runs}
    there = "" if host == "localhost" else f" --host {host}"
    offered = nearest(which, known) or f"; fab runs{there} lists what there is"
    raise DeployError(f"there is no run {which} on {host}{offered}", code=USAGE)


def read(run: status.RunDir, last: int) -> dict[str, Any]:
    """The same of a run directory alone."""
    problems: list[str] = []
    window: deque[dict[str, Any]] = deque(maxlen=max(last, 1))
    curve = Curve(POINTS)
    count, first, loss, peak = 0, None, None, 0.0
    metrics: dict[str, float] = {}
    for record in records(run.metrics, problems):
        if record.get("kind") == "evaluation":
            metrics.update(numbers(record))
            continue
        count += 1
        first = first or record
        window.append(record)
        curve.add(record)
        loss = number(record, "loss") or loss
        peak = max(peak, number(table(record, "memory"), "peak") or 0.0)
        metrics.update(
            {key: value for key, value in numbers(record).items() if key in ("tau_hat", "accuracy")}
        )
    beats = [beat for beat in heartbeats(run, problems) if isinstance(beat, dict)]
    newest: dict[str, Any] = window[-1] if window else {}
    began, ended = number(first, "time"), number(newest, "time")
    speed = median(number(record, "tokens_per_second") for record in window)
    step = step_seconds(list(window))
    made = obj(run.path / "run.json", problems)
    return {
        "schema": SCHEMA,
        "run_id": run.path.name,
        "name": status.split_run_id(run.path.name)[1],
        "path": str(run.path),
        "alive": run.alive(),
        "records": count,
        "used": len(window),
        "first_step": number(first, "step"),
        "last_step": number(newest, "step"),
        "total": next((total for beat in beats if (total := number(beat, "total"))), None),
        "seconds": ended - began if began and ended else None,
        "tokens_per_second": speed,
        "step_seconds": step,
        "tokens_per_step": speed * step if speed and step else None,
        "phase_seconds": phases(list(window)),
        "memory": memory(newest, beats, peak),
        "loss": loss,
        "metrics": metrics,
        "curves": curve.points(),
        "run": {
            key: made.get(key)
            for key in ("command", "runtime", "release", "git", "image", "devices", "changes", "created")
        },
        "exit": obj(run.path / "exit.json", problems),
        "problems": problems,
    }


def recent(run_path: str, points: int) -> list[dict[str, Any]]:
    """The newest `points` of a run's curves, as they were logged: ``[{step loss tokens_per_second}]``."""
    path = status.RunDir(run_path).metrics
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - RECENT))
            lines = file.read(RECENT).splitlines(keepends=True)[(1 if size > RECENT else 0) :]
    except OSError:
        return []
    found: deque[dict[str, Any]] = deque(maxlen=max(points, 1))
    for line in lines:
        record = parsed(line)
        if record is not None and record.get("kind") != "evaluation":
            found.append({key: number(record, key) for key in ("step", *CURVES)})
    return list(found)


class Curve:
    """Keeps a curve of any length as at most `most` points: neighbours are averaged once there are more."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._stride = 1  # records in a point
        self._points: list[Point] = []

    def add(self, record: dict[str, Any]) -> None:
        if not self._points or self._points[-1].records >= self._stride:
            if len(self._points) >= self._most:
                self._halve()
            self._points.append(Point())
        self._points[-1].add(record)

    def _halve(self) -> None:
        halved: list[Point] = []
        for place, point in enumerate(self._points):
            if place % 2:
                halved[-1].join(point)
            else:
                halved.append(point)
        self._points = halved
        self._stride *= 2

    def points(self) -> list[dict[str, Any]]:
        return [point.value() for point in self._points]


class Point:
    """Some records that follow each other: their means, at the step and the time of the last one."""

    def __init__(self) -> None:
        self.records = 0
        self.last: dict[str, Any] = {}
        self.sums = {key: [0.0, 0] for key in CURVES}  # key: [sum, how many]

    def add(self, record: dict[str, Any]) -> None:
        self.records += 1
        self.last = {key: number(record, key) for key in ("step", "time")}
        for key, kept in self.sums.items():
            value = number(record, key)
            if value is not None:
                kept[0] += value
                kept[1] += 1

    def join(self, later: Point) -> None:
        self.records += later.records
        self.last = later.last
        for key, kept in self.sums.items():
            kept[0] += later.sums[key][0]
            kept[1] += later.sums[key][1]

    def value(self) -> dict[str, Any]:
        means = {key: total / count if count else None for key, (total, count) in self.sums.items()}
        return {**self.last, **means}


# -- out of the records ------------------------------------------------------------------------------------


def records(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """The records of a metrics.jsonl, in order; what is none is passed over and counted."""
    strange = 0
    try:
        with open(path, "rb") as file:
            whole = True  # whether a line begins here, and not the rest of one that was too long
            while line := file.readline(LINE):
                record = parsed(line) if whole else None
                if record is not None:
                    yield record
                elif whole and line.endswith(b"\n"):
                    strange += 1
                whole = line.endswith(b"\n")
    except FileNotFoundError:
        pass
    except OSError as error:
        problems.append(f"{path}: {error.strerror}")
    if strange:
        problems.append(f"{path}: {strange} lines that are no records were passed over")


def parsed(line: bytes) -> dict[str, Any] | None:
    """A record; None for what is no JSON object, or not finished yet."""
    try:
        value = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def step_seconds(window: list[dict[str, Any]]) -> float | None:
    """The median time of a step from record to record, with all that came between: saving, evaluating."""
    found = []
    earlier: tuple[float, float] | None = None
    for record in window:
        moment, step = number(record, "time"), number(record, "step")
        if moment is None or step is None:
            continue
        if earlier and step > earlier[1] and moment > earlier[0]:
            found.append((moment - earlier[0]) / (step - earlier[1]))
        earlier = (moment, step)
    return median(iter(found))


def phases(window: list[dict[str, Any]]) -> dict[str, float]:
    """The median seconds that each phase takes of a step, in the order in which they were written."""
    values: dict[str, list[float]] = {}
    for record in window:
        for key, value in numbers(table(record, "phase_seconds")).items():
            if key in values or len(values) < PHASES:
                values.setdefault(key, []).append(value)
    return {key: statistics.median(found) for key, found in values.items()}


def memory(newest: dict[str, Any], beats: list[dict[str, Any]], peak: float) -> dict[str, int | None]:
    """Bytes: the most that any rank needs, since the largest one decides what fits."""
    found: dict[str, int | None] = {}
    for key in ("min", "now", "peak"):
        each = [number(table(one, "memory"), key) for one in (newest, *beats)]
        values = [value for value in (*each, peak if key == "peak" else None) if value]
        found[key] = int(max(values)) if values else None
    return found


def median(values: Iterator[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def numbers(value: dict[str, Any]) -> dict[str, float]:
    """The numbers of an object, without those that say when and where it was written."""
    found = {str(key)[:80]: number(value, key) for key in value if key not in ("step", "time", "epoch")}
    return {key: one for key, one in found.items() if one is not None}


# -- out of the other files --------------------------------------------------------------------------------


def table(value: dict[str, Any] | None, key: str) -> dict[str, Any]:
    found = (value or {}).get(key)
    return found if isinstance(found, dict) else {}


def obj(path: Path, problems: list[str]) -> dict[str, Any]:
    """The JSON object of a file; empty, with a note, if there is something else in it."""
    try:
        value = status.read_json(path)
    except (OSError, ValueError) as error:
        problems.append(str(error) if str(path) in str(error) else f"{path}: {error}")
        return {}
    return value if isinstance(value, dict) else {}


def heartbeats(run: status.RunDir, problems: list[str]) -> Iterator[Any]:
    try:
        names = sorted(os.listdir(run.path / "status"))
    except OSError:
        return
    for name in names:
        if name.endswith(".json") and name[:-5].isdigit():
            yield obj(run.path / "status" / name, problems)


def text(path: Path) -> str | None:
    try:
        with open(path, "rb") as file:
            return file.read(WORDS).decode("utf-8", "replace")
    except OSError:
        return None


def learnt(checkpoints: Path) -> dict[str, Any]:
    """The settings that the newest checkpoint of a run keeps: those that decide what is learnt."""
    try:
        steps = sorted(name for name in os.listdir(checkpoints) if name.startswith("step-"))
    except OSError:
        return {}
    for name in reversed(steps):
        found = table(obj(checkpoints / name / "state.json", []), "settings")
        if found:
            return found
    return {}
