"""What launch and heartbeats cost the trainer: python bench/overhead.py [--rounds 8] [--steps 200]

A small drafter is trained on a small random target on one thread of the CPU, with a log line for every step:
alone, with heartbeats, and under launch with heartbeats. The pairs of a round are run one after the other, in
another order each time; beside them stands a control pair, the trainer alone against the trainer alone, whose
ratio is the noise. All train the same batches, so a ratio of times per step is that of tok/s turned round.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import tiny  # noqa: E402

from bench._results import record  # noqa: E402
from trainer.status import RUN_DIR_VARIABLE, Run, RunDir  # noqa: E402

WARM = 20  # steps that are not measured
STEP = re.compile(rb"step (\d+)/\d+ \xc2\xb7 ([\d,]+) tok/s")
ALONE, CONTROL, BEATS, LAUNCH = "alone", "alone once more", "with heartbeats", "under launch, with heartbeats"


def steps(command: list[str], run_dir: Path | None) -> tuple[float, float]:
    """(ms per step after the first ones, median of the tok/s that the trainer told) of one run."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    environment.pop(RUN_DIR_VARIABLE, None)
    if run_dir is not None:
        environment[RUN_DIR_VARIABLE] = str(run_dir)
    seen: list[tuple[int, float, float]] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, cwd=ROOT
    ) as process:
        assert process.stdout
        lines = b""
        for line in process.stdout:
            found = STEP.match(line)
            if found:
                seen.append((int(found[1]), time.monotonic(), float(found[2].replace(b",", b""))))
            lines += line
    measured = [item for item in seen if item[0] >= WARM]
    if process.returncode or len(measured) < 2:
        sys.exit(f"{command[:5]} ended with {process.returncode}:\n{lines.decode(errors='replace')[-2000:]}")
    (first, began, _), (last, ended, _) = measured[0], measured[-1]
    return (ended - began) / (last - first) * 1000, statistics.median(item[2] for item in measured)


def run(way: str, place: Path, trainer: list[str]) -> tuple[float, float]:
    """One run in one of the four ways, in a directory of its own."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    command = [sys.executable, "-u", "-m", "trainer", *trainer, "--output-dir", str(place / "out")]
    if way in (ALONE, CONTROL):
        return steps(command, None)
    run_dir = RunDir(place / "run")
    run_dir.path.mkdir()
    if way == BEATS:
        return steps(command, run_dir.path)
    run_dir.write_run(Run(run_id="0001-bench", name="bench", command=command, restart_attempts=0))
    launch = [sys.executable, "-u", "-m", "trainer.launch", "--run-dir", str(run_dir.path)]
    return steps(launch, None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8, help="how often each way is measured (default 8)")
    parser.add_argument("--steps", type=int, default=200, help="steps of one run (default 200)")
    options = parser.parse_args()
    if options.rounds < 2 or options.steps < 2 * WARM:
        parser.error(f"--rounds must be at least 2, and --steps at least {2 * WARM}")
    ways = [ALONE, CONTROL, BEATS, LAUNCH]
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        model = tiny.qwen3(hidden_size=128, intermediate_size=256, head_dim=32)
        target = tiny.target_directory(place / "target", model)
        data = tiny.data_directory(place / "data", target, count=200)
        trainer = tiny.flags(target, data, place, epochs=100000, token_budget=1024, max_steps=options.steps)
        at = trainer.index("--output-dir")
        del trainer[at : at + 2]
        order = random.Random(0)
        for number in range(options.rounds):
            order.shuffle(ways)
            for way in ways:
                found[way].append(run(way, place / "one", trainer))
            told = "   ".join(f"{way}: {found[way][-1][0]:.2f}" for way in found)
            print(f"round {number + 1}, ms per step   {told}", flush=True)
    for way, results in found.items():
        spread = [ms for ms, _ in results]
        speed = statistics.median(speed for _, speed in results)
        print(
            f"{way:30} {statistics.median(spread):7.2f} ms per step "
            f"({min(spread):.2f} to {max(spread):.2f}), {speed:,.0f} tok/s"
        )
    for way in (CONTROL, BEATS, LAUNCH):
        ratios = sorted(one[0] / alone[0] for one, alone in zip(found[way], found[ALONE], strict=True))
        told = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"{way} / alone, pair by pair: median {statistics.median(ratios):.4f} ({told})")
        record(
            f"time of a training step, the trainer {way}"
            + (" (the noise of this measurement)" if way == CONTROL else ""),
            "the trainer alone, without a run directory, same batches",
            ours=statistics.median(ms for ms, _ in found[way]),
            theirs=statistics.median(ms for ms, _ in found[ALONE]),
            unit="ms",
            n=options.rounds,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
