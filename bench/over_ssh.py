"""A run on another machine, as its owner meets it: python bench/over_ssh.py [--rounds 10] [--lines 600]

The testbed's gpu-box (a real sshd in a network namespace, the testbed's engine in its login) runs one
container. Measured there, each against the usual way in the same run:

- a deploy that changes nothing: `fab deploy`, against `docker compose up -d` over an SSH context;
- how long after print() a line arrives: `fab tail`, against `ssh host docker compose logs -f`.

The machines are one machine, so the monotonic clock is the same here, there and in the container, and there
is no link between them whose delay would have to be taken off. Needs root, and what `make testbed` installs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from testbed import base_image  # noqa: E402
from testbed.docker import Docker  # noqa: E402
from testbed.engine import running  # noqa: E402
from testbed.gpubox import ALIAS, GpuBox  # noqa: E402

from bench._results import percentile, record  # noqa: E402
from bench.line_latency import Arrivals  # noqa: E402

NAME = "bench-ssh"
FAB = Path(sys.executable).with_name("fab")

# Waits for the file `go` among its checkpoints, so that whoever reads its log is there before the first line.
RUN = """\
name: {name}
image: {{use: "{image}"}}
command:
- python3
- -c
- |
  import os, signal, sys, time
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
  go = os.environ["DRAFTHOUSE_CHECKPOINTS"] + "/go"
  print("ready")
  while not os.path.exists(go): time.sleep(0.005)
  for n in range({lines}):
      print("stamp", n, time.monotonic_ns())
      time.sleep(0.005)
  print("end")
  time.sleep(3600)
grace_seconds: 5
"""


@contextlib.contextmanager
def place() -> Iterator[tuple[Docker, GpuBox, Path]]:
    """(the engine, the box, a project directory)."""
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(running())
        base_image.provide(engine.command)
        box = GpuBox({**engine.environment, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
        box.start()
        stack.callback(box.stop)
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        project = box.project(directory / "project")
        # Docker's own SSH context knows no option for a configuration file: a program of that name does.
        shim = directory / "bin" / "ssh"
        shim.parent.mkdir()
        shim.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {box.ssh_config} "$@"\n')
        shim.chmod(0o755)
        stack.callback(remove, engine)
        yield engine, box, project


def remove(engine: Docker) -> None:
    label = f"label=com.docker.compose.project=drafthouse-{NAME}"
    for container in engine.run("ps", "-a", "-q", "--filter", label).split():
        engine.run("rm", "-f", container)


def fab(box: GpuBox, project: Path, *words: str) -> tuple[list[str], dict[str, str]]:
    own = {"PYTHONPATH": str(ROOT), "HOME": str(project), "DRAFTHOUSE_BOOT": "no", **box.environment}
    argv = [str(FAB), *words, "--host", ALIAS, "--name", NAME]
    return argv, {**os.environ, **own}


def timed(argv: list[str], environment: dict[str, str], directory: Path, expected: str) -> float:
    began = time.monotonic()
    done = subprocess.run(
        argv, env=environment, cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    seconds = time.monotonic() - began
    if done.returncode or expected not in done.stdout + done.stderr:
        raise SystemExit(f"error: {' '.join(argv)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return seconds


def no_op(engine: Docker, box: GpuBox, project: Path, rounds: int) -> None:
    ours, theirs = [], []
    context = {
        **os.environ,
        **engine.environment,
        "DOCKER_HOST": f"ssh://{ALIAS}",
        "PATH": f"{project.parent / 'bin'}:{os.environ['PATH']}",
    }
    current = box.state / "names" / NAME / "current" / "compose.yaml"
    compose = [engine.command[0], "compose", "-f", str(current), "up", "-d", "--no-build"]
    for _ in range(rounds):
        argv, environment = fab(box, project, "deploy", "--no-follow")
        ours.append(timed(argv, environment, project, "unchanged"))
        theirs.append(timed(compose, context, project, "Running"))
    print(f"a deploy that changes nothing: {min(ours):.2f} to {max(ours):.2f} s")
    record(
        "median of a deploy over SSH that changes nothing",
        "docker compose up -d over an SSH context, unchanged",
        ours=percentile(ours, 50),
        theirs=percentile(theirs, 50),
        unit="s",
        n=rounds,
    )


def latency(box: GpuBox, project: Path, lines: int) -> bool:
    argv, environment = fab(box, project, "tail")
    current = box.state / "names" / NAME / "current"
    logs = f"cd {current} && docker compose logs -f --no-log-prefix"
    plain = ["ssh", "-F", str(box.ssh_config), ALIAS, logs]
    arrivals = {"fab tail": Arrivals(), "ssh host docker compose logs -f": Arrivals()}
    with contextlib.ExitStack() as stack:
        readers = []
        for seen, words in zip(arrivals.values(), (argv, plain), strict=True):
            process = subprocess.Popen(
                words, env=environment, cwd=project, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
            readers.append(threading.Thread(target=seen.read, args=(process.stdout,), daemon=True))
            readers[-1].start()
        for seen in arrivals.values():
            seen.started.wait(60)  # it has shown what was there, so it waits for more
        (box.state / "names" / NAME / "checkpoints" / "go").touch()
        deadline = time.monotonic() + lines * 0.005 * 4 + 60
        while time.monotonic() < deadline and any(len(a.delays) < lines for a in arrivals.values()):
            time.sleep(0.05)
    for title, seen in arrivals.items():
        print(f"{title:32} {seen}")
        if len(seen.delays) != lines:
            print(f"error: {title}: {len(seen.delays)} of {lines} lines arrived", file=sys.stderr)
            return False
    ours, theirs = (seen.delays for seen in arrivals.values())
    for percent in (50, 99):
        record(
            f"p{percent} of the time from print() to fab tail over SSH",
            "ssh host docker compose logs -f",
            ours=percentile(ours, percent),
            theirs=percentile(theirs, percent),
            unit="ms",
            n=lines,
        )
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="deploys that change nothing (default 10)")
    parser.add_argument("--lines", type=int, default=600, help="lines that are printed (default 600)")
    options = parser.parse_args()
    if options.rounds < 1 or options.lines < 500:
        parser.error("--rounds must be at least 1, and --lines at least 500")
    with place() as (engine, box, project):
        recipe = RUN.format(name=NAME, image=base_image.PYTHON, lines=options.lines)
        (project / "runs" / f"{NAME}.yaml").write_text(recipe)
        argv, environment = fab(box, project, "deploy", "--no-follow")
        timed(argv, environment, project, "is running")
        try:
            no_op(engine, box, project, options.rounds)
            return 0 if latency(box, project, options.lines) else 1
        finally:
            argv, environment = fab(box, project, "stop")
            timed(argv, environment, project, "")


if __name__ == "__main__":
    sys.exit(main())
