"""What a trainer process says of itself: its heartbeat, its log line, and what it is asked to do.

The heartbeat is written by a thread with its own clock, so that it goes on while the main thread computes: a
reader sees "alive, last step 40 s ago" instead of silence. It is written once a second, and when the phase
changes. Nothing here needs torch: the first heartbeat is there before torch is imported.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import math
import os
import resource
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trainer import waiting
from trainer.roles import Rank
from trainer.status import (
    ATTEMPT_VARIABLE,
    PROGRESS_VARIABLE,
    RANK_VARIABLE,
    STALLED,
    Heartbeat,
    Request,
    RunDir,
)

PERIOD = 1.0  # s
PAUSED = 5.0  # a beat that comes later: this process was halted, and its steps with it
LOCAL = "local"  # what a run is called that nobody has given a run id
PARTS = ("data", "target", "forward", "objective", "backward", "optimizer")  # of a step, in this order


def say(text: str) -> None:
    """One line on stdout, at once."""
    print(text, flush=True)


def finite(value: Any) -> Any:
    """`value` with None for every number that JSON cannot hold (NaN, infinity), also inside what it holds."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class StopSignal:
    """TERM and SIGINT, from the first step on, ask for save-and-exit at the next step boundary.

    Before that there is nothing to save: the signals keep their default action and end the process at once
    (143 or 130), also in the middle of a long call into C.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        """`quiet`: another process of the run says it."""
        self.came = False
        self._quiet = quiet

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: Any) -> None:
        if not self.came and not self._quiet:
            say(f"{signal.Signals(number).name} received: saving at the next step boundary")
        self.came = True


class Clock(Protocol):
    """Marks moments of the device that computes, which may be behind the host that tells it what to do."""

    def mark(self) -> Any: ...

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks. May wait for the second."""


class HostClock:
    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start


@dataclass
class Interval:
    """What is summed from one log line to the next."""

    started: float = field(default_factory=time.perf_counter)
    steps: int = 0
    tokens: int = 0  # of documents, without padding
    clock: Clock = field(default_factory=lambda: HostClock())
    timed: dict[str, list[tuple[Any, Any]]] = field(default_factory=lambda: {name: [] for name in PARTS})

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time one part of a step."""
        start = self.clock.mark()
        try:
            yield
        finally:
            self.timed.setdefault(name, []).append((start, self.clock.mark()))

    @property
    def seconds(self) -> dict[str, float]:
        """What each part took in all."""
        return {name: sum(self.clock.seconds(*pair) for pair in pairs) for name, pairs in self.timed.items()}

    def summary(self, lr: float, memory: dict[str, int], figures: Mapping[str, Any]) -> dict[str, Any]:
        """The record of this interval: means over its steps, and the `figures` of what was learnt in it, of
        which loss, tau_hat and accuracy are always there.
        """
        waited = self.seconds  # first, since it may wait for the device
        seconds = max(time.perf_counter() - self.started, 1e-9)
        return {
            **figures,
            "tokens_per_second": self.tokens / seconds,
            "lr": lr,
            "phase_seconds": {name: value / max(self.steps, 1) for name, value in waited.items()},
            "memory": memory,
        }


def line(step: int, total: int, record: dict[str, Any]) -> str:
    """The log line of a record, for people."""

    def value(name: str, form: str) -> str:
        return "–" if record[name] is None else format(record[name], form)

    parts = " ".join(f"{name} {1000 * seconds:.0f}" for name, seconds in record["phase_seconds"].items())
    return " · ".join(
        [
            f"step {step}/{total}",
            f"{record['tokens_per_second']:,.0f} tok/s",
            f"loss {value('loss', '.3f')}",
            f"τ̂ {value('tau_hat', '.2f')}",
            *(f"tree-τ {tau:.2f}" for tau in list(record.get("tree_tau", {}).values())[-1:]),
            f"lr {record['lr']:.1e}",
            f"{parts} ms",
            *([waiting.described(record["waiting"])] if "waiting" in record else []),
            f"mem {_memory(record['memory'])}",
        ]
    )


def _memory(memory: Mapping[str, int]) -> str:
    """``812 MB (min 640, peak 905)``."""
    now, least, peak = (f"{memory.get(key, 0) / 1e6:,.0f}" for key in ("now", "min", "peak"))
    return f"{now} MB (min {least}, peak {peak})" if "min" in memory else f"{now} MB"


class Monitor:
    """One rank's heartbeat. Without a run directory it keeps the same books and writes nothing.

    Alone it also ends a training that takes no step for `stall_timeout` seconds (0: never); among several
    ranks it tells its progress to the process that started them, which sees when none goes on.
    """

    def __init__(self, run_dir: Path | None, rank: Rank | None = None, stall_timeout: float = 0) -> None:
        self.run_dir = RunDir(run_dir) if run_dir else None
        now = time.time()
        self._heartbeat = Heartbeat(
            rank=rank.number if rank else 0,
            role=rank.role if rank else "colocated",
            pid=os.getpid(),
            attempt=int(os.environ.get(ATTEMPT_VARIABLE) or 1),
            phase_since=now,
        )
        told = os.environ.get(PROGRESS_VARIABLE, "")
        self._progress = int(told) if RANK_VARIABLE in os.environ and told.isdigit() else -1
        if self._progress >= 0:
            with contextlib.suppress(OSError):
                os.set_blocking(self._progress, False)
                os.set_inheritable(self._progress, False)
        self._stall_timeout = 0 if self._progress >= 0 else stall_timeout
        self._progressed = self._beaten = time.monotonic()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._news = threading.Event()  # what should not wait for the next second
        self._rates: deque[float] = deque(maxlen=100)
        self._request_seen: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        self._least = 0  # memory since the first step, bytes
        self.gauge: Callable[[], tuple[int, int]] = memory  # (now, peak) bytes of what runs out first
        if self.run_dir:
            # What an earlier attempt answered is answered; it must not be done again by this one.
            earlier = self.run_dir.heartbeats().get(self._heartbeat.rank)
            self._heartbeat.answered = earlier.answered if earlier else None
        if self.run_dir or self._stall_timeout:
            self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
            self._thread.start()

    @property
    def run_id(self) -> str:
        return self.run_dir.run_id if self.run_dir else LOCAL

    @property
    def heartbeat(self) -> Heartbeat:
        with self._lock:
            return copy.deepcopy(self._heartbeat)

    def _beat(self) -> None:
        while not self._ended.is_set():
            self._news.clear()  # before the write, so that news during it is written too
            self._write()
            self._look_for_stall()
            self._news.wait(PERIOD)

    def _look_for_stall(self) -> None:
        now = time.monotonic()
        if now - self._beaten > PAUSED:
            self._progressed += now - self._beaten
        self._beaten = now
        if not self._stall_timeout or self._heartbeat.phase != "training":
            return
        if now - self._progressed >= self._stall_timeout:
            faulthandler.dump_traceback(all_threads=True)
            text = (
                f"error: no step for {self._stall_timeout:g} s (--stall-timeout) while training: its stacks"
            )
            print(f"{text} are above", file=sys.stderr, flush=True)
            os._exit(STALLED)  # whoever hangs does not end by being asked

    def _tell(self, line: str) -> None:
        """To whoever started the ranks; what does not fit is left out, since the next line says more."""
        self._progressed = time.monotonic()
        if self._progress >= 0:
            with contextlib.suppress(OSError):
                os.write(self._progress, f"{line}\n".encode())

    def _write(self) -> None:
        if not self.run_dir:
            return
        with self._lock:
            self._heartbeat.sequence += 1
            self._heartbeat.time = time.time()
            self._heartbeat.memory = self.memory()
            written = copy.deepcopy(self._heartbeat)
        with contextlib.suppress(OSError):  # a full disk must not end the training; the next beat may fit
            self.run_dir.write_heartbeat(written)

    def memory(self) -> dict[str, int]:
        """Bytes: the least since the first step (before it memory only grows), now, and the most ever."""
        now, peak = self.gauge()
        self._least = min(self._least, now) if self._heartbeat.step else now
        return {"min": self._least, "now": now, "peak": max(now, peak)}

    def close(self) -> None:
        """Write the last heartbeat."""
        if self._thread and not self._ended.is_set():
            self._ended.set()
            self._news.set()
            self._thread.join()
            self._write()

    # -- what is said ---------------------------------------------------------------------------

    def phase(self, name: str, detail: str = "") -> None:
        with self._lock:
            changed = name != self._heartbeat.phase
            if changed:
                self._heartbeat.phase, self._heartbeat.phase_since = name, time.time()
            self._heartbeat.detail = detail
        if changed:
            self._tell(f"phase {name}")
            self._news.set()

    def report(self, text: str) -> None:
        """Progress within a phase: to the heartbeat and, where it is another than before, to the log."""
        with self._lock:
            news = self._heartbeat.detail != text
            self._heartbeat.detail = text
        if news:
            say(text)

    def progress(self, step: int, total: int) -> None:
        with self._lock:
            self._heartbeat.step, self._heartbeat.total = step, total

    def step_done(self, step: int, seconds: float, tokens: int) -> None:
        """One optimiser step more, which took `seconds` for `tokens`."""
        self._rates.append(tokens / max(seconds, 1e-9))
        with self._lock:
            self._heartbeat.step = step
            self._heartbeat.last_step_time = time.time()
        self._tell(f"step {step}")

    def record(self, record: dict[str, Any]) -> None:
        """Take in the record of a log line."""
        record = finite(record)
        with self._lock:
            self._heartbeat.loss = record["loss"]
            self._heartbeat.tokens_per_second = {
                "now": record["tokens_per_second"],
                "median": statistics.median(self._rates) if self._rates else record["tokens_per_second"],
            }
            self._heartbeat.phase_seconds = record["phase_seconds"]
            self._heartbeat.metrics.update({name: record[name] for name in ("tau_hat", "accuracy", "lr")})

    def metrics(self, **values: float) -> None:
        with self._lock:
            self._heartbeat.metrics.update(values)

    def checkpoint(self, path: Path, step: int) -> None:
        with self._lock:
            self._heartbeat.last_checkpoint = {"path": str(path), "step": step, "time": time.time()}

    def link(self, name: str, where: str) -> None:
        with self._lock:
            self._heartbeat.links[name] = where

    # -- what is asked ---------------------------------------------------------------------------

    def asked(self) -> Request | None:
        """A request to save that nobody has answered yet. One stat call if there is nothing new."""
        if not self.run_dir:
            return None
        try:
            found = os.stat(self.run_dir.path / "request.json")
        except OSError:
            return None
        if (found.st_mtime_ns, found.st_ino) == self._request_seen:
            return None
        self._request_seen = (found.st_mtime_ns, found.st_ino)
        try:
            request = self.run_dir.request()
        except (ValueError, TypeError, AttributeError) as error:
            say(f"warning: request.json is passed over: {error}")
            return None
        answered = self._heartbeat.answered or {}
        if request is None or request.id == answered.get("id"):
            return None
        return request if request.action in ("checkpoint", "checkpoint-and-stop") else None

    def answer(self, request: Request, outcome: str) -> None:
        """`outcome`: ``done``, or why not."""
        with self._lock:
            self._heartbeat.answered = {
                "id": request.id,
                "action": request.action,
                "outcome": outcome,
                "time": time.time(),
            }
        self._news.set()  # whoever asked waits for it


def memory() -> tuple[int, int]:
    """(now, peak) resident bytes of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            return now, max(now, peak)  # the kernel notes a new peak later than it happens
    except OSError:
        return peak, peak
