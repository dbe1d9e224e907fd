"""How long a large backlog takes, and how much memory: python bench/backlog.py [--megabytes 200] [--rounds 3]

A run that is over has left a log of so many megabytes, in segments as launch writes them. All of it goes into
a pipe, whose reader only counts, each against the usual way in the same run:

- `fab tail` here, against `tail -n +1` of the same files;
- `fab tail` over SSH (the testbed's sshd on loopback), against `ssh host tail -n +1`;
- `fab tail --grep` over SSH, of which one line in a thousand matches, against `ssh host grep`.

`fab` is started as people start it, so that Python's start and the look at the host are in its time. Printed
with it: the largest resident size of `fab` or of one of the processes that it started here.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from small_runs import alive, new_run  # noqa: E402
from testbed.sshd import ALIAS, SshServer  # noqa: E402

from bench._results import percentile, record  # noqa: E402
from trainer.logfile import Log  # noqa: E402

FAB = Path(sys.executable).with_name("fab")
LIMIT = 10.0  # seconds that 200 MB may take
LINE = (
    "step {n} · 4,679 tok/s · loss 2.705 · τ̂ 1.70 · lr 4.4e-03 · data 2 target 2 forward 86 ms · mem 722 MB\n"
)


@contextlib.contextmanager
def place(megabytes: int) -> Iterator[tuple[dict[str, str], list[Path]]]:
    """(the environment of `fab` and `ssh`, the segments)."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        state = directory / "state"
        run = new_run(state)
        block = "".join(LINE.format(n=n) for n in range(1000)).encode()
        with alive(run):
            log = Log(run.log, 64 << 20, 1000)
            for _ in range(megabytes * 1_000_000 // len(block) + 1):
                log.write(block)
            log.close()
        server = SshServer(directory / "sshd", {"DRAFTHOUSE_STATE": str(state)})
        server.start()
        stack.callback(server.stop)
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HOME": str(directory),
            "DRAFTHOUSE_STATE": str(state),
            "DRAFTHOUSE_SSH_CONFIG": str(server.client),
        }
        yield environment, sorted(run.log.glob("*.log"))


def piped(argv: list[str], environment: dict[str, str]) -> tuple[float, int, int]:
    """(seconds, bytes that came, largest resident size in bytes) of a command whose stdout is a pipe."""
    began, count = time.monotonic(), 0
    process = subprocess.Popen(
        argv,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout
    assert process.stderr
    buffer = bytearray(1 << 20)
    while size := os.readv(process.stdout.fileno(), [buffer]):
        count += size
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"error: {shlex.join(argv)} ended with {process.returncode}: {errors.decode()}")
    return time.monotonic() - began, count, usage.ru_maxrss * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=200, help="size of the log (default 200)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured (default 3)")
    options = parser.parse_args()
    if options.megabytes < 1 or options.rounds < 1:
        parser.error("--megabytes and --rounds must be at least 1")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with place(options.megabytes) as (environment, segments):
        total = sum(path.stat().st_size for path in segments)
        whole = [str(FAB), "tail", "--name", "demo", "--no-follow", "--since", "1d"]
        files = [str(path) for path in segments]
        ssh = ["ssh", "-F", environment["DRAFTHOUSE_SSH_CONFIG"], ALIAS]
        plain = ["tail", "-q", "-n", "+1", *files]
        match = "^step 777 "
        grep = shlex.join(["grep", "-h", match, *files])
        worst = 0.0
        for title, ours, against, theirs in (
            ("fab tail here", whole, "tail -n +1", plain),
            (
                "fab tail over SSH",
                [*whole, "--host", ALIAS],
                "ssh host tail -n +1",
                [*ssh, shlex.join(plain)],
            ),
            (
                "fab tail --grep over SSH",
                [*whole, "--host", ALIAS, "--grep", match],
                "ssh host grep",
                [*ssh, grep],
            ),
        ):
            seconds: dict[str, list[float]] = {title: [], against: []}
            memory = 0
            for _ in range(options.rounds):
                for name, argv in ((title, ours), (against, theirs)):
                    took, count, resident = piped(argv, environment)
                    seconds[name].append(took)
                    memory = max(memory, resident) if name == title else memory
                    if "grep" not in title and count != total:
                        print(f"error: {name}: {count:,} of {total:,} bytes came", file=sys.stderr)
                        return 1
            print(f"{title}: {total / 1e6:.0f} MB, {memory / 1e6:.0f} MB resident at most")
            middle = percentile(seconds[title], 50)
            worst = max(worst, middle)
            record(
                f"{total / 1e6:.0f} MB of backlog by {title}",
                against,
                ours=middle,
                theirs=percentile(seconds[against], 50),
                unit="s",
                n=options.rounds,
            )
        if worst > LIMIT * max(options.megabytes / 200, 1):
            print(f"error: {worst:.1f} s is too long: {LIMIT:g} s for 200 MB", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
