"""A run in a container of a Proxmox host: python bench/proxmox.py [--rounds 7] [--gib 1] [--only push]

The testbed's Proxmox host (a strict stand-in for `pct` over real LXC, behind a real sshd) has a container
that somebody made. Measured there, each against what people do without us, in the same run:

- downtime of a restart, from the last line of the old run to the first of the new one: `fab restart`, against
  `ssh host "pct exec ID -- …"` that kills, waits until the process is gone, and starts again under nohup;
- how long after print() a line arrives: `fab tail`, against `ssh host "pct exec ID -- tail -F run.log"`;
- a push of weights through `pct exec`, against the same push to the host itself by plain SSH;
- the same restart in a container that Drafthouse makes, and what making and starting one takes.

The machines are one, so the monotonic clock is the same everywhere and no link's delay has to be taken off.
The real `pct` takes about half a second to begin, the stand-in a tenth. Needs root, and what `make testbed`
installs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
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
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from testbed.gpubox import ALIAS  # noqa: E402
from testbed.pct import template  # noqa: E402
from testbed.pct.box import PveBox  # noqa: E402
from testbed.pct.container import Container  # noqa: E402

from bench._results import percentile, record  # noqa: E402
from bench.line_latency import Arrivals  # noqa: E402
from bench.weights import CIPHER, FILES, make, seconds  # noqa: E402
from deploy import manifest, sender  # noqa: E402
from deploy.host import connect  # noqa: E402
from deploy.settings import HostSettings  # noqa: E402

NAME = "bench"
FAB = Path(sys.executable).with_name("fab")

# Prints the monotonic clock every 5 ms until it is stopped.
PRINTER = """\
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("begin", time.monotonic_ns(), flush=True)
number = 0
while True:
    print("stamp", number, time.monotonic_ns(), flush=True)
    number += 1
    time.sleep(0.005)
"""
RUN = f"name: {NAME}\ncommand: [python3, -u, /root/printer.py]\ngrace_seconds: 5\nsettle_seconds: 0\n"
# What is found in many a start script, for use through `pct exec`.
AGAIN = """\
pid=$(cat /root/pid) && kill "$pid"
while kill -0 "$pid" 2>/dev/null; do sleep "$2"; done
nohup python3 -u /root/printer.py >"$1" 2>&1 &
echo $! >/root/pid
"""


@contextlib.contextmanager
def place(memory: int) -> Iterator[tuple[PveBox, Container, Path]]:
    """(the Proxmox host, its container, a project directory)."""
    with contextlib.ExitStack() as stack:
        box = PveBox()
        box.start()
        stack.callback(box.stop)
        container = box.container(200, memory=memory)
        container.write("root/printer.py", PRINTER)
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        inside = {"state": "/var/lib/drafthouse", "shm": "/dev/shm/drafthouse", "python": "python3"}
        project = box.project(directory / "project", runtime="pct", container=200, **inside)
        (project / "runs" / f"{NAME}.yaml").write_text(RUN)
        own = {"PYTHONPATH": str(ROOT), "DRAFTHOUSE_BOOT": "no", "PATH": f"{FAB.parent}:{os.environ['PATH']}"}
        os.environ.update({**box.environment, **own})
        yield box, container, project


def fab(project: Path, *words: str) -> None:
    argv = [str(FAB), *words, "--host", ALIAS]
    done = subprocess.run(argv, cwd=project, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(argv)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def by_ssh(box: PveBox, *words: str) -> list[str]:
    """The usual way in: what ssh is told is one text, which a shell there takes apart."""
    return ["ssh", "-F", str(box.ssh_config), ALIAS, f"pct exec 200 -- {' '.join(words)}"]


def stamps(log: bytes, word: bytes) -> list[int]:
    """The clock at each whole line that begins with `word`."""
    lines = log[: log.rfind(b"\n") + 1].splitlines()
    return [int(words[-1]) for words in (line.split() for line in lines) if words[:1] == [word]]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("error: what was waited for did not come")
        time.sleep(0.005)


# -- restart -----------------------------------------------------------------------------------------------


def restart(box: PveBox, container: Container, project: Path, rounds: int) -> dict[str, list[float]]:
    """Records ours; returns what the usual way took, by how often it looks."""
    container.write("root/again.sh", AGAIN)
    runs = container.files / "var/lib/drafthouse/runs"

    def log(number: int) -> bytes:
        return b"".join(
            part.read_bytes() for part in sorted((runs / f"{number:04}-{NAME}" / "log").glob("*.log"))
        )

    ours: list[float] = []
    theirs: dict[str, list[float]] = {"1": [], "0.1": []}
    fab(project, "deploy", "--run", NAME, "--no-follow")
    for number in range(1, rounds + 1):
        until(lambda number=number: stamps(log(number), b"stamp"))
        fab(project, "restart", "--same", "--name", NAME, "--no-follow")
        begin = stamps(log(number + 1), b"begin")[0]
        ours.append((begin - stamps(log(number), b"stamp")[-1]) / 1e9)
        for look, found in theirs.items():
            found.append(usual(box, container, look))
    for look, found in theirs.items():
        record(
            "downtime of a restart in a container: from the old run's last line to the new one's first",
            f"ssh host pct exec: kill, wait (looking every {look} s), nohup again",
            ours=percentile(ours, 50),
            theirs=percentile(found, 50),
            unit="s",
            n=rounds,
        )
    return theirs


def usual(box: PveBox, container: Container, look: str) -> float:
    """One restart by hand, of a process that is started for it."""
    logs = [container.files / f"root/log-{number}" for number in range(2)]
    container.exec("sh", "-c", "rm -f /root/log-*; nohup sleep 600 >/dev/null 2>&1 & echo $! >/root/pid")
    for number, path in enumerate(logs):
        subprocess.run(by_ssh(box, "sh", "/root/again.sh", f"/root/log-{number}", look), check=True)
        until(lambda path=path: path.exists() and stamps(path.read_bytes(), b"stamp"))
    container.exec("sh", "-c", "kill $(cat /root/pid)")
    old, new = (path.read_bytes() for path in logs)
    return (stamps(new, b"begin")[0] - stamps(old, b"stamp")[-1]) / 1e9


def restart_of_ours(box: PveBox, project: Path, rounds: int, theirs: dict[str, list[float]]) -> None:
    """The same in containers that Drafthouse makes: their logs lie on the host."""
    made = project.parent / "made"
    box.project(made, runtime="pct", python="python3", pct={"rootfs": "2g", "memory": "600m"})
    command = ["python3", "-u", "-c", PRINTER]
    recipe = {"name": NAME, "image": {"use": template.put(box.templates)}, "gpus": 0, "command": command}
    recipe |= {"grace_seconds": 5, "settle_seconds": 0}
    (made / "runs" / f"{NAME}.yaml").write_text(json.dumps(recipe))
    runs = box.state / "runs"

    def log(number: int) -> bytes:
        parts = sorted((runs / f"{number:04}-{NAME}" / "log").glob("*.log"))
        return b"".join(part.read_bytes() for part in parts)

    began = time.monotonic()
    fab(made, "deploy", "--run", NAME, "--no-follow")
    print(f"first deploy, container made, tried out and started: {time.monotonic() - began:.2f} s")
    ours, starts = [], []
    for number in range(1, rounds + 1):
        until(lambda number=number: stamps(log(number), b"stamp"))
        fab(made, "restart", "--same", "--name", NAME, "--no-follow")
        begin = stamps(log(number + 1), b"begin")[0]
        ours.append((begin - stamps(log(number), b"stamp")[-1]) / 1e9)
        steps = json.loads((runs / f"{number + 1:04}-{NAME}" / "switch.json").read_text())["steps"]
        starts += [step["ended"] - step["started"] for step in steps if step["name"] == "start"]
    print(f"pct start, as the switch has it: median {percentile(starts, 50):.2f} s")
    fab(made, "stop", "--name", NAME)
    words = ("--ostype", "unmanaged", "--rootfs", "local-zfs:2", "--unprivileged", "1")
    made_in = [
        seconds(lambda number=number: box.pct("create", str(900 + number), recipe["image"]["use"], *words))
        for number in range(rounds)
    ]
    print(f"pct create from the template (33 MB) alone: median {percentile(made_in, 50):.2f} s")
    for look, found in theirs.items():
        record(
            "downtime of a restart in a container of ours: from the last line to the first of the new run",
            f"ssh host pct exec: kill, wait (looking every {look} s), nohup again",
            ours=percentile(ours, 50),
            theirs=percentile(found, 50),
            unit="s",
            n=rounds,
        )


# -- lines -------------------------------------------------------------------------------------------------


def latency(box: PveBox, container: Container, project: Path, lines: int) -> None:
    container.exec("sh", "-c", "nohup python3 -u /root/printer.py >/root/run.log 2>&1 & echo $! >/root/pid")
    ways = {
        "fab tail": [str(FAB), "tail", "--host", ALIAS, "--name", NAME],
        "ssh host pct exec ID -- tail -F": by_ssh(box, "tail", "-n", "1", "-F", "/root/run.log"),
    }
    arrivals = {title: Late() for title in ways}
    with contextlib.ExitStack() as stack:
        for title, argv in ways.items():
            process = subprocess.Popen(argv, cwd=project, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            threading.Thread(target=arrivals[title].read, args=(process.stdout,), daemon=True).start()
        until(lambda: all(seen.started.is_set() for seen in arrivals.values()))
        time.sleep(1)  # what was there has been shown
        for seen in arrivals.values():
            seen.delays.clear()
        until(lambda: all(len(seen.delays) >= lines for seen in arrivals.values()))
    container.exec("sh", "-c", "kill $(cat /root/pid)")
    for title, seen in arrivals.items():
        del seen.delays[lines:]
        print(f"{title:34} {seen}")
    ours, theirs = (seen.delays for seen in arrivals.values())
    for percent in (50, 99):
        record(
            f"p{percent} of the time from print() in a container to fab tail over SSH",
            "ssh host pct exec ID -- tail -F of an unbuffered log",
            ours=percentile(ours, percent),
            theirs=percentile(theirs, percent),
            unit="ms",
            n=lines,
        )


class Late(Arrivals):
    """Reads from a pipe that may be closed at any time."""

    def read(self, stream: BinaryIO) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().read(stream)


# -- weights -----------------------------------------------------------------------------------------------


def push(box: PveBox, container: Container, gib: float, rounds: int) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        config = Path(name) / "ssh_config"
        config.write_text(f"Ciphers {CIPHER}\nInclude {box.ssh_config}\n")
        os.environ["DRAFTHOUSE_SSH_CONFIG"] = str(config)
        source = Path(name) / "model"
        count = int(gib * (1 << 30)) // FILES * FILES
        make(source, count)
        wanted = manifest.read(source)
        ways = {
            "through pct exec": (200, "/dev/shm/drafthouse/model@"),
            "plain SSH to the host": (None, f"{box.shm}/model@"),
        }
        figures: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(rounds):
            pair = list(ways.items())
            for way, (number, prefix) in pair if turn % 2 else pair[::-1]:
                host = connect(HostSettings(name="box", address=ALIAS, container=number))
                host.run(["true"], timeout=60)
                target = prefix + wanted["digest"][:12]
                figures[way].append(
                    seconds(lambda: sender.send(host, source, wanted, target, durable=False, link=False))  # noqa: B023
                )
                host.run(["rm", "-rf", target], timeout=60)
                host.close()
                print(
                    f"{way:24} {figures[way][-1]:6.2f} s {count / figures[way][-1] / 1e6:7.0f} MB/s, "
                    f"load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
    ours, theirs = figures.values()
    pairs = [other / own for own, other in zip(ours, theirs, strict=True)]
    print(
        f"rate through pct exec against plain SSH, of each pair: {percentile(pairs, 50):.2f} in the middle,",
        *(f"{one:.2f}" for one in pairs),
    )
    record(
        f"push and verify through pct exec, {gib:g} GiB incompressible, tmpfs to tmpfs, {CIPHER}",
        "the same push to the Proxmox host itself, by plain SSH",
        ours=percentile(figures["through pct exec"], 50),
        theirs=percentile(figures["plain SSH to the host"], 50),
        unit="s",
        n=rounds,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="restarts and pushes of each kind (default 7)")
    parser.add_argument("--lines", type=int, default=600, help="lines that are timed (default 600)")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the weights (default 1)")
    parser.add_argument("--only", choices=["push"], help="only the push of weights")
    options = parser.parse_args()
    if options.rounds < 3 or options.lines < 500 or options.gib <= 0:
        parser.error("--rounds must be at least 3, --lines at least 500, and --gib positive")
    with place(memory=int(options.gib * 2048) + 2048) as (box, container, project):
        if options.only is None:
            theirs = restart(box, container, project, options.rounds)
            latency(box, container, project, options.lines)
            fab(project, "stop", "--name", NAME)
            restart_of_ours(box, project, options.rounds, theirs)
        push(box, container, options.gib, options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
