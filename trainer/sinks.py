"""Where the records of a run go, beside its log: metrics.jsonl, TensorBoard events, Weights & Biases."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from trainer.errors import InputError
from trainer.monitor import finite, say
from trainer.status import RunDir


class Sink(Protocol):
    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Take in the numbers of one record."""

    def close(self) -> None: ...


S = TypeVar("S", bound=Sink)


class MetricsFile:
    """metrics.jsonl: one line per record. `kind` says of what: "training" (a step has one at most) or
    "evaluation".

    A run that crashed goes on from its last checkpoint, before the last step that it had logged: lines of
    what will be done again are removed, which includes an evaluation at that very step.
    """

    def __init__(self, path: Path, resumed_at: int) -> None:
        kept = [line for line in _complete_lines(path) if _stays(json.loads(line), resumed_at)]
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, path)
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  closed in close()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        record = {"step": step, "time": round(time.time(), 3), **finite(values)}
        self._file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()


def _stays(record: dict[str, Any], resumed_at: int) -> bool:
    step = record.get("step", 0)
    return step < resumed_at or (step == resumed_at and record.get("kind") != "evaluation")


def _complete_lines(path: Path) -> list[str]:
    """The lines that are JSON: the last one may have been cut off by a kill."""
    found = []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            if line.endswith("\n") and isinstance(json.loads(line), dict):
                found.append(line)
        except ValueError:
            continue
    return found


class TensorBoard:
    """Event files through tensorboard's own writer (torch's wrapper takes seconds to import)."""

    def __init__(self, directory: Path, resumed_at: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(directory))
        if resumed_at:  # tells TensorBoard to forget what an earlier attempt wrote beyond this step
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(step=resumed_at + 1, wall_time=time.time(), session_log=start))

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = [Summary.Value(tag=tag, simple_value=value) for tag, value in _flat(values).items()]
        self._writer.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=numbers)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def check(project: str | None) -> None:
    """Raises InputError if W&B is asked for and not installed; imports nothing."""
    spec = importlib.util.find_spec("wandb") if project else None
    if project and (spec is None or spec.origin is None):  # none: a directory wandb/ of its own records
        raise InputError("--wandb-project needs the package wandb, which is not installed here")


class Wandb:
    """Weights & Biases; offline where no key is known, so that it never asks."""

    def __init__(self, project: Project, directory: Path, settings: dict[str, Any]) -> None:
        """Raises InputError if the package is missing."""
        check(project.name)
        import wandb

        mode = wandb_mode(os.environ, Path(os.path.expanduser("~")))
        os.environ["WANDB_MODE"] = mode
        self._run = wandb.init(
            project=project.name,
            name=project.run_name,
            id=project.id,
            resume="allow",
            dir=str(directory),
            config=settings,
            settings=wandb.Settings(silent=True, console="off"),
        )
        # Its own step must grow with every record, and a resumed run does some of them again.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        # wandb warns when an offline run is asked for its address.
        self.link: str | None = self._run.url if mode == "online" else None

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **_flat(values)})

    def close(self) -> None:
        """End the run; when this returns, its records are on the disk."""
        import wandb

        self._run.finish()
        wandb.teardown()  # its helper process answers a finish before its last write


@dataclass(frozen=True)
class Project:
    """Where in Weights & Biases a run is logged."""

    name: str
    run_name: str
    id: str  # of the run: unlike its name, no other run in the project has it


class Records:
    """All the sinks of a run. One that cannot be opened or written is said and passed over, whatever it
    raises (W&B has errors of its own): training is worth more.
    """

    def __init__(self) -> None:
        self._sinks: list[Sink] = []
        self._failing: set[int] = set()  # of the sinks, those whose last record was lost: said once
        self.links: dict[str, str] = {}

    def open(
        self,
        run_dir: RunDir | None,
        resumed_at: int,
        project: Project | None,
        fallback: Path,
        settings: dict[str, Any],
    ) -> None:
        """Open what this run writes to; W&B's own files go to `fallback` if there is no run directory.

        Raises InputError if W&B is asked for and not installed.
        """
        if run_dir:
            metrics, events = run_dir.metrics, run_dir.events
            self._add("metrics.jsonl", lambda: MetricsFile(metrics, resumed_at))
            if self._add("TensorBoard", lambda: TensorBoard(events, resumed_at)):
                self.links["tensorboard"] = str(events)
        if project:
            home = run_dir.path if run_dir else fallback
            wandb = self._add("Weights & Biases", lambda: Wandb(project, home, settings))
            if wandb and wandb.link:
                self.links["wandb"] = wandb.link
                say(f"wandb run {project.id}: {wandb.link}")
            elif wandb:
                say(f"wandb run {project.id} is offline: its records are under {home}/wandb")

    def _add(self, name: str, make: Callable[[], S]) -> S | None:
        try:
            sink = make()
        except InputError:
            raise
        except Exception as error:
            say(f"warning: {name} cannot be opened, so nothing is written there ({_reason(error)})")
            return None
        self._sinks.append(sink)
        return sink

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        for number, sink in enumerate(self._sinks):
            try:
                sink.write(step, values)
                self._failing.discard(number)
            except Exception as error:
                if number not in self._failing:
                    say(f"warning: {type(sink).__name__} could not be written ({_reason(error)})")
                self._failing.add(number)

    def close(self) -> None:
        for sink in self._sinks:
            with contextlib.suppress(Exception):
                sink.close()


def _reason(error: Exception) -> str:
    """An exception in one line."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:200] or type(error).__name__


def wandb_mode(environment: Mapping[str, str], home: Path) -> str:
    """What was asked for; else online with a key (in the environment or in .netrc), and offline without."""
    if asked := environment.get("WANDB_MODE"):
        return asked
    try:
        netrc = (home / ".netrc").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        netrc = ""
    return "online" if environment.get("WANDB_API_KEY") or "api.wandb.ai" in netrc else "offline"


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers only, nested names joined by a slash."""
    found: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found.update(_flat(value, f"{prefix}{key}/"))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found[prefix + key] = value
    return found
