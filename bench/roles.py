"""What several processes of one run cost and do: python bench/roles.py [--steps 500] [--slow-checkpoint 60]

A small target and drafter (Qwen3, width 128, 4 layers; documents of 100 to 400 tokens) on the CPU, one thread
a process, started as users start them. For each split of target and drafter processes: tok/s against one
process that does both on one thread, who waits how long, and how much the memory of rank 0 moves after its
first tenth. Then what ends a run: how long after a KILL of one rank the last process is gone, and whether a
stop during a checkpoint that takes a minute loses anything.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "tests")]

from _results import record  # noqa: E402

SPLITS = {
    "1:1": ("cpu:0", "cpu:1"),
    "2:1": ("cpu:0,cpu:1", "cpu:2"),
    "1:2": ("cpu:0", "cpu:1,cpu:2"),
    "2 × both": ("cpu:0,cpu:1", "cpu:0,cpu:1"),
}
TAPS, WIDTH = 3, 128
# Imported by every Python of a run: what waits for the disk waits long.
SLOW = """
import os, time
fsync = os.fsync
def slow(descriptor):
    time.sleep(float(os.environ["SLOW_SECONDS"]))
    fsync(descriptor)
os.fsync = slow
"""


def make(place: Path) -> None:
    """Target and data."""
    import numpy as np
    import tiny

    from trainer.completions import write_completions
    from trainer.modeldir import tokenizer_digest

    sizes = {"hidden_size": WIDTH, "intermediate_size": 384, "head_dim": 32, "max_position_embeddings": 512}
    target = tiny.target_directory(place / "target", tiny.qwen3(**sizes))
    random = np.random.default_rng(0)
    documents = []
    for length in random.integers(100, 400, 400):
        mask = np.ones(length, dtype=np.uint8)
        mask[:20] = 0
        documents.append((random.integers(0, 90, length).astype(np.int32), mask))
    write_completions(place / "data", documents, {"tokenizer": tokenizer_digest(target), "target": "tiny"})


def command(place: Path, split: tuple[str, str], steps: int, drafters: int) -> list[str]:
    flags = {
        "target-model": place / "target",
        "data-dir": place / "data",
        "output-dir": place / "out",
        "run-dir": place / "run",
        "target-gpus": split[0],
        "drafter-gpus": split[1],
        "num-taps": TAPS,
        "num-draft-layers": 2,
        "block-size": 8,
        "token-budget": 2048,
        "max-seq-len": 512,
        "max-anchors": 128,
        "grad-accum": 2 // drafters,
        "epochs": 1000,
        "max-steps": steps,
        "threads": 1,
        "log-interval": 1,
        "save-interval": 10**6,
        "resume": "never",
    }
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    return [sys.executable, "-u", "-m", "trainer", *words]


def start(place: Path, split: tuple[str, str], steps: int, **environment: str) -> subprocess.Popen[bytes]:
    for name in ("run", "out"):
        shutil.rmtree(place / name, ignore_errors=True)
    (place / "run").mkdir()
    drafters = len(split[1].split(","))
    with open(place / "log", "wb") as log:
        return subprocess.Popen(
            command(place, split, steps, drafters),
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        )


def rows(place: Path) -> list[dict]:
    path = place / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [row for row in map(json.loads, lines) if row["kind"] == "training"]


def rate(place: Path, split: tuple[str, str], steps: int) -> tuple[float, list[dict]]:
    process = start(place, split, steps)
    if process.wait():
        sys.exit((place / "log").read_text()[-2000:])
    found = rows(place)
    return statistics.median(row["tokens_per_second"] for row in found[len(found) // 10 :]), found


def wait_for(true: object, process: subprocess.Popen[bytes]) -> None:
    while not true():  # type: ignore[operator]
        if process.poll() is not None:
            sys.exit("it ended by itself")
        time.sleep(0.01)


def heartbeat(place: Path, rank: int) -> dict:
    path = place / "run" / "status" / f"{rank}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def ends(place: Path, rank: int) -> float:
    """Seconds from the KILL of a rank to the end of all."""
    process = start(place, SPLITS["1:2"], 10**6)
    wait_for(lambda: heartbeat(place, 0).get("step", 0) > 20, process)
    os.kill(heartbeat(place, rank)["pid"], signal.SIGKILL)
    began = time.monotonic()
    process.wait()
    return time.monotonic() - began


def slow_stop(place: Path, seconds: float) -> None:
    """A stop whose checkpoint takes long."""
    hook = place / "hook"
    hook.mkdir(exist_ok=True)
    (hook / "sitecustomize.py").write_text(SLOW)
    each = str(seconds / 5)  # four files and their directory
    process = start(place, SPLITS["1:2"], 10**6, PYTHONPATH=str(hook), SLOW_SECONDS=each)
    wait_for(lambda: heartbeat(place, 0).get("step", 0) > 20, process)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code = process.wait()
    took = time.monotonic() - began
    saved = json.loads((place / "out" / "latest" / "state.json").read_text())["step"]
    print(
        f"a stop whose checkpoint is slow: exit code {code} after {took:.0f} s, "
        f"saved step {saved}, last line of step {rows(place)[-1]['step']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--slow-checkpoint", type=float, default=60.0, metavar="SECONDS")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        make(place)
        alone, _ = rate(place, ("cpu:0", "cpu:0"), options.steps)
        for name, split in SPLITS.items():
            found, lines = rate(place, split, options.steps)
            record(f"tok/s of {name}, target to drafter processes on the CPU (inverse)",
                   "one process, one thread", ours=1 / found, theirs=1 / alone, unit="s a token",
                   n=len(lines))  # fmt: skip
            memory = [row["memory"]["now"] for row in lines[len(lines) // 10 :]]
            moved = (max(memory) - min(memory)) / statistics.mean(memory)
            print(
                f"  {found:,.0f} tok/s; memory of rank 0 over {options.steps} steps: (max - min) {moved:.1%}"
            )
            if waits := [row["waiting"] for row in lines if "waiting" in row]:
                for who in ("targets", "drafters"):
                    print(f"  {who} wait {statistics.median(wait[who] for wait in waits):.0%} of the time")
        size = 4 * TAPS * WIDTH
        print(
            f"features: {size:,} bytes a position in float32 ({TAPS} layers × {WIDTH}), of the context alone"
        )
        for rank, what in ((0, "rank 0"), (1, "another drafter"), (2, "the target")):
            print(f"from the KILL of {what} to the end of all: {ends(place, rank):.1f} s")
        if options.slow_checkpoint:
            slow_stop(place, options.slow_checkpoint)


if __name__ == "__main__":
    main()
