"""The ranks of one run, each a process of its own, without the launcher and without importing torch."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deployed import CHECKOUT
from forked import Popen
from trainings import python

from trainer.status import RANK_VARIABLE, STORE_VARIABLE


@dataclass
class Ranks:
    """Processes in progress, rank by rank."""

    processes: list[Popen]
    outputs: list[Path]

    def wait(self, timeout: float = 240) -> list[int]:
        """Their exit codes. Raises subprocess.TimeoutExpired; then none is left."""
        try:
            return [process.wait(timeout) for process in self.processes]
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def said(self, rank: int = 0) -> str:
        return self.outputs[rank].read_text()

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()


def meeting_place() -> str:
    """HOST:PORT on loopback, of which the next port is free, too."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            with contextlib.suppress(OSError):
                other.bind(("127.0.0.1", port + 1))
                return f"127.0.0.1:{port}"


def start(place: Path, targets: str, drafters: str, flags: Sequence[str]) -> Ranks:
    """Start ``python -m trainer FLAGS`` as every rank; what each prints goes to files in `place`."""
    place.mkdir(parents=True, exist_ok=True)
    several = targets.split(",") if targets == drafters else [*drafters.split(","), *targets.split(",")]
    devices = ["--target-gpus", targets, "--drafter-gpus", drafters]
    store = tempfile.mktemp(dir=place, prefix="store-")
    ranks = Ranks([], [])
    for number in range(len(several)):
        ranks.outputs.append(place / f"rank-{number}.txt")
        environment = {**os.environ, RANK_VARIABLE: str(number), STORE_VARIABLE: store}
        with open(ranks.outputs[-1], "w") as file:
            argv = ["-u", "-m", "trainer", *flags, *devices]
            ranks.processes.append(
                Popen(python(), argv, CHECKOUT, environment, stdout=file, stderr=subprocess.STDOUT)
            )
    return ranks


def run(place: Path, targets: str, drafters: str, flags: Sequence[str]) -> Ranks:
    """The same, to its end, which must be a good one."""
    ranks = start(place, targets, drafters, flags)
    codes = ranks.wait()
    assert codes == [0] * len(codes), "\n".join(ranks.said(n) for n in range(len(codes)))
    return ranks
