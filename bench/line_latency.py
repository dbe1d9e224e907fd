"""How long after print() a line arrives: python bench/line_latency.py [--lines 600] [--interval-ms 5]

A process prints lines that hold the monotonic clock at the moment of printing. They are timed where they
arrive: on launch's stdout, and in a `tail` of its log directory (deploy.logs, which `fab tail` uses); and, in
the same run, through the two usual ways without it: a plain pipe into `cat`, and stdout redirected to a file
as nohup does it, once as Python buffers there by default and once with PYTHONUNBUFFERED=1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench._results import percentile, record  # noqa: E402
from trainer.status import Run, RunDir  # noqa: E402

PRINTER = """
import os, sys, time
while not os.path.exists(sys.argv[3]): time.sleep(0.005)
for n in range(int(sys.argv[1])):
    print("stamp", n, time.monotonic_ns())
    time.sleep(float(sys.argv[2]) / 1000)
"""

TAIL = """
import sys
from deploy.host import Local
from deploy.logs import follow
sys.stdout.flush()
follow(Local(), sys.argv[1], from_offset=0, out=open(1, "wb", buffering=0))
"""


class Arrivals:
    """The delays, in ms, of the stamped lines of one stream."""

    def __init__(self) -> None:
        self.delays: list[float] = []
        self.started = threading.Event()  # something arrived
        self._rest = b""

    def feed(self, data: bytes) -> None:
        now = time.monotonic_ns()
        self.started.set()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            words = line.split()
            if len(words) == 3 and words[0] == b"stamp":
                self.delays.append((now - int(words[2])) / 1e6)

    def read(self, stream: BinaryIO) -> None:
        """Take what comes until the stream ends."""
        while data := os.read(stream.fileno(), 1 << 16):
            self.feed(data)

    def __str__(self) -> str:
        p50, p99, worst = (percentile(self.delays, p) for p in (50, 99, 100))
        return f"p50 {p50:9.3f} ms   p99 {p99:9.3f} ms   max {worst:9.3f} ms   n {len(self.delays)}"


def environment(unbuffered: bool) -> dict[str, str]:
    found = {**os.environ, "PYTHONPATH": str(ROOT)}
    found.pop("PYTHONUNBUFFERED", None)
    if unbuffered:
        found["PYTHONUNBUFFERED"] = "1"
    return found


def through_launch(place: Path, printer: Callable[[Path], list[str]]) -> tuple[Arrivals, Arrivals]:
    """(arrivals on launch's stdout, arrivals in a tail of its log)."""
    directory = RunDir(place / "run")
    directory.path.mkdir()
    go = place / "go-launch"
    directory.write_run(Run(run_id="0001-bench", name="bench", command=printer(go)))
    command = [sys.executable, "-u", "-m", "trainer.launch", "--run-dir", str(directory.path)]
    on_stdout, in_tail = Arrivals(), Arrivals()
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(False), cwd=ROOT) as launch:
        while not (state := directory.launch()) or not state.trainer_pid:
            time.sleep(0.01)
        tail = subprocess.Popen(
            [sys.executable, "-c", TAIL, str(directory.path)],
            stdout=subprocess.PIPE,
            env=environment(False),
            cwd=ROOT,
        )
        with tail:
            threads = [
                threading.Thread(target=arrivals.read, args=(process.stdout,))
                for arrivals, process in ((on_stdout, launch), (in_tail, tail))
            ]
            for thread in threads:
                thread.start()
            in_tail.started.wait(60)  # it has shown the banner, so it waits for more
            go.touch()
            for thread in threads:
                thread.join()
    return on_stdout, in_tail


def through_cat(place: Path, printer: Callable[[Path], list[str]]) -> Arrivals:
    """Arrivals behind `PYTHONUNBUFFERED=1 program | cat`."""
    arrivals, go = Arrivals(), place / "go-cat"
    with subprocess.Popen(printer(go), stdout=subprocess.PIPE, env=environment(True)) as program:
        cat = subprocess.Popen(["cat"], stdin=program.stdout, stdout=subprocess.PIPE)
        with cat:
            go.touch()
            arrivals.read(cat.stdout)
    return arrivals


def growing(path: Path, process: subprocess.Popen) -> Iterator[bytes]:
    """What comes to a file, looked at every ms, until `process` has ended."""
    with open(path, "rb", buffering=0) as file:
        ended = False
        while True:
            data = file.read(1 << 16)
            if data:
                yield data
            elif ended:
                return
            else:
                ended = process.poll() is not None
                time.sleep(0.001)


def through_nohup(place: Path, printer: Callable[[Path], list[str]], unbuffered: bool) -> Arrivals:
    """Arrivals in a file that stdout was redirected to, as by `nohup program > file &`."""
    arrivals, go, path = Arrivals(), place / f"go-nohup-{unbuffered}", place / f"nohup-{unbuffered}.out"
    with open(path, "wb") as file:
        process = subprocess.Popen(printer(go), stdout=file, env=environment(unbuffered))
    go.touch()
    for data in growing(path, process):
        arrivals.feed(data)
    return arrivals


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=600, help="lines per measurement (default 600)")
    parser.add_argument("--interval-ms", type=float, default=5.0, help="between two lines (default 5)")
    options = parser.parse_args()
    if options.lines < 500 or options.interval_ms < 0:
        parser.error("--lines must be at least 500, and --interval-ms not negative")

    def printer(go: Path) -> list[str]:
        return [sys.executable, "-c", PRINTER, str(options.lines), str(options.interval_ms), str(go)]

    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        on_stdout, in_tail = through_launch(place, printer)
        cat = through_cat(place, printer)
        nohup = through_nohup(place, printer, unbuffered=False)
        nohup_unbuffered = through_nohup(place, printer, unbuffered=True)
    table = {
        "launch, its stdout": on_stdout,
        "launch, tail of log/": in_tail,
        "plain pipe | cat": cat,
        "nohup, Python's default": nohup,
        "nohup, PYTHONUNBUFFERED=1": nohup_unbuffered,
    }
    for title, arrivals in table.items():
        print(f"{title:26} {arrivals}")
        if len(arrivals.delays) != options.lines:
            print(f"error: {title}: {len(arrivals.delays)} of {options.lines} lines arrived", file=sys.stderr)
            return 1
    count = options.lines
    for percent in (50, 99):
        record(
            f"p{percent} of the time from print() to launch's stdout",
            "plain pipe to cat, unbuffered",
            ours=percentile(on_stdout.delays, percent),
            theirs=percentile(cat.delays, percent),
            unit="ms",
            n=count,
        )
        record(
            f"p{percent} of the time from print() to a tail of the log",
            "nohup to a file, Python's default buffering, looked at every ms",
            ours=percentile(in_tail.delays, percent),
            theirs=percentile(nohup.delays, percent),
            unit="ms",
            n=count,
        )
    record(
        "time from the first print() to its line in a tail of the log",
        "nohup to a file, Python's default buffering, looked at every ms",
        ours=in_tail.delays[0],
        theirs=nohup.delays[0],
        unit="ms",
        n=1,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
