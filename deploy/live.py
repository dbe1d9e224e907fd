"""What a live screen shows of a host, again and again, as one JSON object a line on stdout.

Runs ON the host as a child of the connection, started by `deploy.newest`; it ends with its stdin. An empty
object every second is its sign of life: a probe of a machine in trouble takes longer than a connection may be
silent. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import json
import os
import re
import select
import sys
import threading
from pathlib import Path
from typing import Any

from deploy import figures
from deploy.probe import Probe
from deploy.room import state_root
from deploy.segments import BLOCK, Segments

ALIVE = 1.0  # seconds between two signs of life
LINE = 500  # characters of a line of the log, at most
RUNS = 16  # of which curves and logs are sent, at most: those in progress first


def stream(
    state: str | None, shm: str | None, interval: float, sample: float, points: int = 0, lines: int = 0
) -> None:
    """Write ``{"facts", "curves": {run_id: [..]}, "logs": {run_id: [..]}}`` every `interval` seconds.

    `points` of each curve (see `deploy.figures.recent`) and `lines` of each log; 0 sends none.
    """
    out = Out()
    threading.Thread(target=out.pulse, daemon=True).start()
    shm = shm or os.environ.get("DRAFTHOUSE_SHM") or "/dev/shm/drafthouse"
    while True:
        facts = Probe(Path(state or state_root()), Path(shm), sample).facts()
        chosen = interesting(facts["runs"]) if points or lines else []
        out.say(
            {
                "facts": facts,
                "curves": {run["run_id"]: figures.recent(run["path"], points) for run in chosen if points},
                "logs": {run["run_id"]: last_lines(run["path"], lines) for run in chosen if lines},
            }
        )
        out.ended.wait(interval)


def interesting(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs in progress and the newest of each name."""
    newest = {run["name"]: run for run in runs}
    found = [run for run in runs if run["alive"]]
    return (found + [run for run in newest.values() if not run["alive"]])[:RUNS]


def last_lines(run_path: str, count: int) -> list[str]:
    """The last lines of a run's log, none longer than LINE; of a progress bar its newest state."""
    log = Segments(Path(run_path) / "log")
    try:
        offset = max(log.last_lines(count), log.end() - BLOCK)
        text = log.read(offset)[1].decode("utf-8", "replace")
    except OSError:
        return []
    finally:
        log.close()
    states = (re.split(r"\r+", line.rstrip("\r"))[-1] for line in text.split("\n"))
    return [line[:LINE] for line in states if line.strip()][-count:]


class Out:
    """stdout, which two threads write, and stdin, whose end is ours."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ended = threading.Event()

    def say(self, value: dict[str, Any]) -> None:
        with self.lock:
            try:
                sys.stdout.write(json.dumps(value) + "\n")
                sys.stdout.flush()
            except OSError:
                os._exit(0)

    def pulse(self) -> None:
        """Say that we live until nobody listens any more; then end, whatever the probe waits for."""
        while True:
            if select.select([0], [], [], ALIVE)[0] and not os.read(0, 4096):
                os._exit(0)
            self.say({})
