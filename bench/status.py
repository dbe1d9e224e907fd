"""How long until the truth is known: python bench/status.py [--rounds 30]

The testbed's gpu-box (a real sshd in a network namespace) runs one trainer. `fab status` is asked for it over
a link without delay and over one of 60 ms round trip, each time as a new process with a new connection, as
people call it. Against: a bare `ssh host true` over the same link, which is the least that any answer from
there can take. Needs root, and what `make testbed` installs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from deployed import Place  # noqa: E402
from testbed.gpubox import ALIAS, SLOW, GpuBox  # noqa: E402

from bench._results import percentile, record  # noqa: E402

FAB = Path(sys.executable).with_name("fab")


def timed(argv: list[str], environment: dict[str, str], directory: Path, expected: str) -> float:
    began = time.monotonic()
    done = subprocess.run(
        argv, env=environment, cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    seconds = time.monotonic() - began
    if done.returncode or expected not in done.stdout:
        raise SystemExit(f"error: {' '.join(argv)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return seconds


def measure(box: GpuBox, project: Path, rounds: int) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HOME": str(project),
        "DRAFTHOUSE_BOOT": "no",
        **box.environment,
    }
    for alias, link in ((ALIAS, "0 ms"), (SLOW, "60 ms")):
        ours, theirs = [], []
        ssh = ["ssh", "-F", str(box.ssh_config), alias, "true"]
        for _ in range(rounds):  # in turns, so that a busy minute of the machine meets both
            ours.append(
                timed([str(FAB), "status", "--host", alias], environment, project, "0001-demo  training")
            )
            theirs.append(timed(ssh, environment, project, ""))
        for percent in (50, 99):
            record(
                f"p{percent} of fab status over a link of {link} round trip",
                "ssh host true over the same link",
                ours=percentile(ours, percent),
                theirs=percentile(theirs, percent),
                unit="s",
                n=rounds,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="questions over each link (default 30)")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    box = GpuBox({"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
    box.start()
    place = Place(box.state)
    try:
        with tempfile.TemporaryDirectory() as directory:
            project = box.project(Path(directory) / "project")
            place.start(place.run_dir())
            measure(box, project, options.rounds)
    finally:
        place.end_all()
        box.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
