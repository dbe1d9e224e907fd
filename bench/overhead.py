"""What launch and heartbeats cost the trainer: python bench/overhead.py [--rounds 40] [--seconds 2]

A small drafter is trained on a small random target on one thread of the CPU, with a log line for every step:
alone, with heartbeats, and under launch with heartbeats; and alone once more: a control pair, whose ratio is
the noise. All four are started, and then take turns of some seconds, in another order each round,
while the others are halted: so what else the machine does meets all of them. They train the same batches, so
a ratio of times per step is that of tok/s turned round. CPU time counts launch, too.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import tiny  # noqa: E402

from bench._results import record  # noqa: E402
from deploy import procfs  # noqa: E402
from trainer.status import RUN_DIR_VARIABLE, Run, RunDir  # noqa: E402

WARM = 20  # steps that are not measured
STEP = re.compile(rb"step (\d+)/\d+ \xc2\xb7 ")
ALONE, CONTROL, BEATS, LAUNCH = "alone", "alone once more", "with heartbeats", "under launch, with heartbeats"


class Training:
    """One training in progress, which can be halted and let go on."""

    def __init__(self, way: str, place: Path, trainer: list[str]) -> None:
        place.mkdir()
        self.way = way
        command = [sys.executable, "-u", "-m", "trainer", *trainer, "--output-dir", str(place / "out")]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        environment.pop(RUN_DIR_VARIABLE, None)
        if way == BEATS:
            environment[RUN_DIR_VARIABLE] = str(place)
        if way == LAUNCH:
            RunDir(place).write_run(Run("0001-bench", "bench", command, restart_attempts=0))
            command = [sys.executable, "-u", "-m", "trainer.launch", "--run-dir", str(place)]
        self.arrivals: list[float] = []  # of the lines of steps
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, cwd=ROOT
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            if STEP.match(line):
                self.arrivals.append(time.monotonic())

    def pids(self) -> list[int]:
        return procfs.of_run(self.process.pid, 0, procfs.processes())

    def signal(self, number: int) -> None:
        for pid in self.pids():
            os.kill(pid, number)

    def warm(self) -> None:
        """Wait for the first steps, then halt it."""
        while len(self.arrivals) < WARM:
            if self.process.poll() is not None:
                sys.exit(f"the trainer {self.way} ended with {self.process.returncode}")
            time.sleep(0.05)
        self.signal(signal.SIGSTOP)

    def turn(self, seconds: float) -> tuple[float, float]:
        """(ms, CPU ms) per step of a turn."""
        first, before = len(self.arrivals), self.ticks()
        self.signal(signal.SIGCONT)
        time.sleep(seconds)
        self.signal(signal.SIGSTOP)
        time.sleep(0.02)
        seen = self.arrivals[first:]
        if len(seen) < 3:
            sys.exit(f"the trainer {self.way} took {len(seen)} steps in {seconds:g} s; give --seconds more")
        used = (self.ticks() - before) / os.sysconf("SC_CLK_TCK")
        return (seen[-1] - seen[0]) / (len(seen) - 1) * 1000, used / len(seen) * 1000

    def ticks(self) -> int:
        return sum(found["ticks"] for pid in self.pids() if (found := procfs.stat(pid)))

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40, help="turns of each way (default 40)")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a turn (default 2)")
    options = parser.parse_args()
    if options.rounds < 2 or options.seconds < 0.5:
        parser.error("--rounds must be at least 2, and --seconds at least 0.5")
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in (ALONE, CONTROL, BEATS, LAUNCH)}
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        model = tiny.qwen3(hidden_size=128, intermediate_size=256, head_dim=32)
        target = tiny.target_directory(place / "target", model)
        data = tiny.data_directory(place / "data", target, count=200)
        trainer = tiny.flags(target, data, place, epochs=100000, token_budget=1024)
        at = trainer.index("--output-dir")
        del trainer[at : at + 2]
        trainings: list[Training] = []
        try:
            for number, way in enumerate(found):
                trainings.append(Training(way, place / str(number), trainer))
                trainings[-1].warm()
            order = random.Random(0)
            for _ in range(options.rounds):
                order.shuffle(trainings)
                for training in trainings:
                    found[training.way].append(training.turn(options.seconds))
        finally:
            for training in trainings:
                training.end()
    for way, results in found.items():
        wall, cpu = (statistics.median(column) for column in zip(*results, strict=True))
        print(f"{way:30} {wall:7.2f} ms per step, {cpu:7.2f} ms of CPU")
    for way in (CONTROL, BEATS, LAUNCH):
        pairs = list(zip(found[way], found[ALONE], strict=True))
        for column, what in enumerate(("time", "CPU time")):
            ratios = sorted(one[column] / alone[column] for one, alone in pairs)
            quarter = len(ratios) // 4
            print(
                f"{what} {way} / alone, pair by pair: median {statistics.median(ratios):.4f}, "
                f"half of them from {ratios[quarter]:.4f} to {ratios[-1 - quarter]:.4f}"
            )
            record(
                f"{what} of a training step, the trainer {way}{' (the noise)' if way == CONTROL else ''}",
                "the trainer alone, without a run directory, same batches, in turns",
                ours=statistics.median(one[column] for one in found[way]),
                theirs=statistics.median(one[column] for one in found[ALONE]),
                unit="ms",
                n=options.rounds,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
