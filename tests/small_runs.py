"""Runs as small as they can be, one after the other: python tests/small_runs.py STATE COUNT SEED

Each is a process of its own that holds its run's lock and writes its log by launch's own code, then ends in
one of the ways in which runs end. The next one's directory is there before that, as a switch makes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trainer import status
from trainer.logfile import Log, note


def new_run(root: Path, **fields: object) -> status.RunDir:
    """As a deploy makes it, but for waiting for the disk."""
    run = status.allocate_run(root / "runs", "demo")
    made = status.Run(run_id=run.path.name, name="demo", command=["true"], **fields)
    status.write_json(run.path / "run.json", dataclasses.asdict(made))
    return run


@contextlib.contextmanager
def alive(run: status.RunDir) -> Iterator[None]:
    """Hold the run's lock; at the end it has finished."""
    lock = os.open(run.lock, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status.write_json(run.path / "launch.json", dataclasses.asdict(status.Launch(os.getpid(), 1)))
        yield
        status.write_json(run.path / "exit.json", dataclasses.asdict(status.Exit("finished", 0)))
    finally:
        os.close(lock)


def live(run: status.RunDir, chance: random.Random) -> None:
    name = run.path.name
    with alive(run):
        log = Log(run.log, chance.choice((200, 1000, 64 << 20)), 10_000)
        log.write(note(f"drafthouse run {name} · attempt 1"))
        data = b"".join(
            b"%s line %d %s\n" % (name.encode(), n, b"." * chance.randrange(60)) for n in range(20)
        )
        data = data[: chance.randrange(len(data) + 1)]
        while data:
            cut = chance.randrange(1, 400)
            log.write(data[:cut])
            data = data[cut:]
            if chance.random() < 0.5:  # its reader catches up, now and then
                time.sleep(chance.random() / 100)
        if chance.random() < 0.3:
            os.kill(os.getpid(), signal.SIGKILL)  # as launch may be: nothing is recorded
        if chance.random() < 0.8:
            log.write_line(note(f"run {name} finished"))
        log.close()
    if chance.random() < 0.5:
        time.sleep(chance.random() / 500)


def main() -> None:
    root, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    following = new_run(root)
    for number in range(count):
        run = following
        if number + 1 < count:
            following = new_run(root)
        pid = os.fork()
        if pid == 0:
            try:
                live(run, random.Random(1000 * seed + number))
            finally:
                os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
