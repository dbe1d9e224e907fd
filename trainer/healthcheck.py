"""What the image's HEALTHCHECK runs: one word about a run, or the newest of a name, from its status files.

A word for people (`docker ps`) and for `docker compose up --wait`. Nothing restarts because of it.
Standard library only, so that it answers while the trainer has every core.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from trainer.status import RunDir, list_runs

SILENT_SECONDS = 300.0  # a heartbeat older than this is no sign of life


def judge(state: Path, name: str, now: float) -> tuple[bool, str]:
    """Whether the newest run of `name` under the state root lives and speaks, and one line saying so."""
    runs = list_runs(state / "runs", name)
    return judge_run(runs[-1], now) if runs else (False, f"{name}: no run yet")


def judge_run(run: RunDir, now: float) -> tuple[bool, str]:
    """The same for one run."""
    try:
        run_id = run.run_id
    except (ValueError, OSError) as error:
        return False, str(error)
    if not run.alive():
        return False, f"{run_id}: not running"
    beats = [beat for beat in run.heartbeats().values() if beat.rank == 0 or beat.phase != "finishing"]
    if not beats:  # not every command writes heartbeats
        return True, f"{run_id}: running"
    oldest = min(beats, key=lambda beat: beat.time)
    age = now - oldest.time
    step = max((beat.step for beat in beats if beat.trains), default=0)
    word = f"{run_id}: rank {oldest.rank} {oldest.phase}, step {step}, heartbeat {age:.0f} s ago"
    return age <= SILENT_SECONDS, word


def main() -> int:
    parser = argparse.ArgumentParser(prog="trainer.healthcheck", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--run-dir", type=Path, help="the directory of one run, where a container has only that"
    )
    parser.add_argument("--state", type=Path, help="the state root")
    parser.add_argument("--name", help="the experiment")
    arguments = parser.parse_args()
    if (arguments.run_dir is None) == (arguments.state is None or arguments.name is None):
        parser.error("give either --run-dir, or --state and --name")
    if arguments.run_dir is not None:
        healthy, word = judge_run(RunDir(arguments.run_dir), time.time())
    else:
        healthy, word = judge(arguments.state, arguments.name, time.time())
    print(word)
    return 0 if healthy else 1


if __name__ == "__main__":
    sys.exit(main())
