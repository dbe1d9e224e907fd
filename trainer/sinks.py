"""Where the records of a run go, beside its log: metrics.jsonl, TensorBoard events, Weights & Biases."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainer.errors import InputError
from trainer.monitor import say
from trainer.status import RunDir


class Sink(Protocol):
    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Take in the numbers of one record."""

    def close(self) -> None: ...


class MetricsFile:
    """metrics.jsonl: one line per record, each step once.

    A run that crashed goes on from its last checkpoint, before the last step that it had logged: lines of
    steps that will be done again are removed.
    """

    def __init__(self, path: Path, resumed_at: int) -> None:
        kept = [line for line in _complete_lines(path) if json.loads(line).get("step", 0) <= resumed_at]
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, path)
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  closed in close()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        record = {"step": step, "time": round(time.time(), 3), **values}
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def close(self) -> None:
        self._file.close()


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


class Wandb:
    """Weights & Biases; offline where no key is known, so that it never asks."""

    def __init__(
        self, project: str, name: str, run_id: str, directory: Path, settings: dict[str, Any]
    ) -> None:
        try:
            import wandb
        except ImportError:
            raise InputError("--wandb-project needs the package wandb, which is not installed here") from None
        mode = wandb_mode(os.environ, Path(os.path.expanduser("~")))
        os.environ["WANDB_MODE"] = mode
        self._run = wandb.init(
            project=project,
            name=name,
            id=run_id,
            resume="allow",
            dir=str(directory),
            config=settings,
            settings=wandb.Settings(silent=True, console="off"),
        )
        # wandb warns when an offline run is asked for its address.
        self.link: str | None = self._run.url if mode == "online" else None

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(_flat(values), step=step)

    def close(self) -> None:
        self._run.finish()


@dataclass(frozen=True)
class Project:
    """Where in Weights & Biases a run is logged."""

    name: str
    run_name: str


class Records:
    """All the sinks of a run. One that cannot be written is said and passed over: training is worth more."""

    def __init__(self) -> None:
        self._sinks: list[Sink] = []
        self.links: dict[str, str] = {}

    def open(
        self,
        run_dir: RunDir | None,
        run_id: str,
        resumed_at: int,
        project: Project | None,
        fallback: Path,
        settings: dict[str, Any],
    ) -> None:
        """Open what this run writes to; W&B's own files go to `fallback` if there is no run directory.

        Raises InputError if W&B is asked for and not installed.
        """
        if run_dir:
            self._sinks.append(MetricsFile(run_dir.metrics, resumed_at))
            self._sinks.append(TensorBoard(run_dir.events, resumed_at))
            self.links["tensorboard"] = str(run_dir.events)
        if project:
            home = run_dir.path if run_dir else fallback
            wandb = Wandb(project.name, project.run_name, run_id, home, settings)
            self._sinks.append(wandb)
            if wandb.link:
                self.links["wandb"] = wandb.link
            say(
                f"wandb {wandb.link}"
                if wandb.link
                else f"wandb is offline: its records are under {home}/wandb"
            )

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        for sink in self._sinks:
            try:
                sink.write(step, values)
            except OSError as error:
                say(f"warning: {type(sink).__name__} could not be written ({error.strerror})")

    def close(self) -> None:
        for sink in self._sinks:
            with contextlib.suppress(OSError):
                sink.close()


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
