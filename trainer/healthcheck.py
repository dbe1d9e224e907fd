"""What the image's HEALTHCHECK runs: one word about the newest run of a name, from its status files.

A word for people (`docker ps`) and for `docker compose up --wait`. Nothing restarts because of it.
Standard library only, so that it answers while the trainer has every core.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from trainer.status import list_runs

SILENT_SECONDS = 300.0  # a heartbeat older than this is no sign of life


def judge(state: Path, name: str, now: float) -> tuple[bool, str]:
    """Whether the newest run of `name` under the state root lives and speaks, and one line saying so."""
    runs = list_runs(state / "runs", name)
    if not runs:
        return False, f"{name}: no run yet"
    run = runs[-1]
    if not run.alive():
        return False, f"{run.run_id}: not running"
    beats = run.heartbeats().values()
    if not beats:  # not every command writes heartbeats
        return True, f"{run.run_id}: running"
    oldest = min(beats, key=lambda beat: beat.time)
    age = now - oldest.time
    word = f"{run.run_id}: rank {oldest.rank} {oldest.phase}, step {oldest.step}, heartbeat {age:.0f} s ago"
    return age <= SILENT_SECONDS, word


def main() -> int:
    parser = argparse.ArgumentParser(prog="trainer.healthcheck", description=__doc__.splitlines()[0])
    parser.add_argument("--state", type=Path, required=True, help="the state root")
    parser.add_argument("--name", required=True, help="the experiment")
    arguments = parser.parse_args()
    healthy, word = judge(arguments.state, arguments.name, time.time())
    print(word)
    return 0 if healthy else 1


if __name__ == "__main__":
    sys.exit(main())
