"""How long a restart keeps the devices idle: python bench/restart_downtime.py [--rounds 10]

From the last line of the old run to the banner of the new one, in the process runtime: the switch, which `fab
restart` hands over to, stops a run, which writes a checkpoint and ends, and starts the next. Against the
usual way: kill, wait until the process is gone (`while kill -0 $pid; do sleep 1; done`), nohup again; there
the first line of the new process counts, since nobody writes a banner. All run the same program, which prints
a line every 5 ms with the monotonic clock in it, and take turns, so that what else the machine does hits all
alike.

A second figure leaves the banner out: to the first line of the new trainer itself, in both ways.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from deployed import HOST, Place, until  # noqa: E402

from bench._results import percentile, record  # noqa: E402
from deploy import switch  # noqa: E402
from trainer import status  # noqa: E402
from trainer.processes import PR_SET_CHILD_SUBREAPER, prctl  # noqa: E402

# Steps, lines, heartbeats (for launch only), and a checkpoint on TERM: written, synced, renamed.
TRAINER = """
import os, signal, sys, time
print("begin", time.monotonic_ns(), flush=True)
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
run = None
if os.environ.get("DRAFTHOUSE_RUN_DIR"):
    from trainer.status import Heartbeat, RunDir
    run = RunDir(os.environ["DRAFTHOUSE_RUN_DIR"])
    beat = Heartbeat(pid=os.getpid(), phase="training", total=1000)
place, size = sys.argv[1], int(sys.argv[2])
def save():
    with open(place + ".new", "wb") as file:
        for _ in range(size):
            file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
    os.replace(place + ".new", place)
last = 0.0
while not stop:
    print("stamp", time.monotonic_ns(), flush=True)
    if run and time.monotonic() - last > 0.2:
        last = time.monotonic()
        beat.step += 1
        beat.sequence += 1
        beat.time = beat.last_step_time = time.time()
        request = run.request()
        if request and request.action == "checkpoint" and (beat.answered or {}).get("id") != request.id:
            save()
            beat.answered = {"id": request.id, "action": request.action, "outcome": "done"}
        run.write_heartbeat(beat)
    time.sleep(0.005)
save()
"""

# What is found in many a start script.
AGAIN = """
kill "$1"
while kill -0 "$1" 2>/dev/null; do sleep "$2"; done
shift 2
log=$1
shift
nohup "$@" >"$log" 2>&1 &
echo $!
"""


def stamps(log: bytes, word: bytes) -> list[int]:
    found = []
    for line in log.splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == word:
            found.append(int(words[1]))
    return found


def log_of(run: status.RunDir) -> bytes:
    parts = sorted(run.log.glob("*.log")) if run.log.is_dir() else []
    return b"".join(part.read_bytes() for part in parts)


def when_banner(run: status.RunDir) -> int:
    """The moment at which the first line is in the new run's log, looked at every ms."""
    while b"\n" not in log_of(run):
        time.sleep(0.001)
    return time.monotonic_ns()


class Ours:
    """A run under launch, restarted by the switch."""

    def __init__(self, place: Place, command: list[str]) -> None:
        self.place, self.command = place, command
        self.to_banner: list[float] = []
        self.to_line: list[float] = []
        self.run = place.run_dir(command)
        switch.watch(HOST, switch.start(HOST, place.spec(self.run)), lambda step: None)

    def restart(self) -> None:
        old, new = self.run, self.place.run_dir(self.command)
        started = switch.start(HOST, self.place.spec(new, old))
        banner = when_banner(new)
        assert switch.watch(HOST, started, lambda step: None).word == "done"
        last = stamps(log_of(old), b"stamp")[-1]
        self.to_banner.append((banner - last) / 1e9)
        self.to_line.append((until(lambda: stamps(log_of(new), b"begin"))[0] - last) / 1e9)
        self.run = new


class Usual:
    """A process under nohup, which is looked at every `look` seconds until it is gone."""

    def __init__(self, place: Path, command: list[str], look: str) -> None:
        self.place, self.command, self.look = place, command, look
        self.seconds: list[float] = []
        self.log = place / f"nohup-{look}-0.out"
        start = ["sh", "-c", 'log=$1; shift; nohup "$@" >"$log" 2>&1 & echo $!', "sh", str(self.log)]
        self.pid = self._started([*start, *command])

    @staticmethod
    def _started(argv: list[str]) -> int:
        """Its pid. It is waited for here, or it would be there, as a zombie, for as long as init likes."""
        pid = int(subprocess.run(argv, capture_output=True, check=True).stdout)
        threading.Thread(target=os.waitpid, args=(pid, 0), daemon=True).start()
        return pid

    def restart(self) -> None:
        until(lambda: stamps(self.log.read_bytes(), b"stamp"))
        new = self.place / f"nohup-{self.look}-{len(self.seconds) + 1}.out"
        argv = ["sh", "-c", AGAIN, "sh", str(self.pid), self.look, str(new), *self.command]
        self.pid = self._started(argv)
        begin = until(lambda: new.exists() and stamps(new.read_bytes(), b"begin"))[0]
        self.seconds.append((begin - stamps(self.log.read_bytes(), b"stamp")[-1]) / 1e9)
        self.log = new

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="restarts of each kind (default 10)")
    parser.add_argument("--checkpoint-mb", type=int, default=64, help="size of the checkpoint (default 64)")
    options = parser.parse_args()
    if options.rounds < 3 or options.checkpoint_mb < 0:
        parser.error("--rounds must be at least 3, and --checkpoint-mb not negative")
    chance = random.Random(0)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    with tempfile.TemporaryDirectory() as name:
        place = Place(Path(name) / "state")

        def command(way: str) -> list[str]:
            tail = [f"{name}/checkpoint-{way}", str(options.checkpoint_mb)]
            return [sys.executable, "-u", "-c", TRAINER, *tail]

        ways: list[Ours | Usual] = []
        try:
            ours = Ours(place, command("ours"))
            slow = Usual(Path(name), command("slow"), "1")
            eager = Usual(Path(name), command("eager"), "0.1")
            ways += [ours, slow, eager]
            for _ in range(options.rounds):
                for way in ways:
                    time.sleep(0.2 + chance.random())  # at no fixed moment of a step or a heartbeat
                    way.restart()
        finally:
            for way in ways:
                if isinstance(way, Usual):
                    way.end()
            place.end_all()
    table = {
        "switch, to the banner": ours.to_banner,
        "switch, to the trainer's first line": ours.to_line,
        "kill, wait (every 1 s), nohup": slow.seconds,
        "kill, wait (every 0.1 s), nohup": eager.seconds,
    }
    if not shutil.which("tini"):
        print("(without tini)")
    for title, values in table.items():
        low, middle, high = (percentile(values, percent) for percent in (0, 50, 100))
        print(f"{title:38} median {middle:6.3f} s   from {low:6.3f} to {high:6.3f} s   n {len(values)}")
    for claim, values, against, other in (
        ("the new run's banner", ours.to_banner, "1 s", slow.seconds),
        ("the new run's banner", ours.to_banner, "0.1 s", eager.seconds),
        ("the new trainer's first line", ours.to_line, "1 s", slow.seconds),
        ("the new trainer's first line", ours.to_line, "0.1 s", eager.seconds),
    ):
        record(
            f"downtime of a restart: from the old run's last line to {claim}",
            f"kill, wait (looking every {against}), nohup again",
            ours=percentile(values, 50),
            theirs=percentile(other, 50),
            unit="s",
            n=options.rounds,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
