"""Runs in every situation that a verdict is asked for: real processes under the real launch, side by side.

`staged` starts them and waits until each is where it should be; one probe then sees them all. What a program
does is in its name; the verdicts are asserted in tests/integration/test_verdicts_live.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployed import CHECKOUT, Place, steps, until
from fakes import nvml

from deploy import gpus, procfs
from trainer import status

LIMIT = 96 << 20  # bytes of memory for the run that has too little
DISK = "2m"  # of the run whose log fills it
UUIDS = [f"GPU-{number}aaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa" for number in range(3)]
INFORMATION = "GPU UUID: \t {uuid}\nBus Location: \t {bus}\nDevice Minor: \t {minor}\n"

# One interpreter that has imported launch forks a launch for each run: a table of them costs seconds less.
FORK = """
import os, sys
import trainer.launch
for path in sys.stdin:
    path, _, group = path.rstrip("\\n").partition("\\t")
    if os.fork() == 0:
        code = 99
        try:
            os.setsid()
            if group:
                open(group + "/cgroup.procs", "w").write(str(os.getpid()))
            empty = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(empty, descriptor)
            code = trainer.launch.main(["--run-dir", path])
        finally:
            os._exit(code)
"""

BEAT = """
import os, sys, time
from trainer.status import Heartbeat, RunDir
run = RunDir(os.environ["DRAFTHOUSE_RUN_DIR"])
def beat(phase, rank=0, step=0, detail="", pid=None):
    now = time.time()
    run.write_heartbeat(Heartbeat(rank=rank, pid=pid or os.getpid(), attempt=1, time=now, phase=phase,
        phase_since=now - 5, detail=detail, step=step, total=600, last_step_time=now if step else None))
"""
STEPS = (
    BEAT
    + """
step = 40
while True:
    step += 1
    beat("training", step=step)
    print("step", step, flush=True)
    time.sleep(0.2)
"""
)
ONE_STEP = BEAT + "beat('training', step=41)\nprint('step 41', flush=True)\n"
HOLD_DEVICE = "import os\nheld = open(os.environ['HELD'])\n"
PRINTS = "import time\nwhile True:\n    print('epoch 1', flush=True)\n    time.sleep(0.2)\n"
READS = """
import sys, time
with open(sys.argv[1], "rb", buffering=0) as file:
    while file.read(1 << 18):
        time.sleep(0.01)
"""
# Busy a fifth of the time, so that many of them leave room on one core. By its own CPU's time, as work is: on
# a machine that gives it little, it has as much left to do, and does not sleep instead.
WORKS = """
import time
print("epoch 1")
while True:
    until = time.thread_time() + 0.02
    while time.thread_time() < until:
        pass
    time.sleep(0.06)
"""
# A little work every 5 ms, and lines that stay in its buffer.
HARDLY = """
import time
print("epoch 1")
while True:
    sum(range(3000))
    time.sleep(0.005)
"""
WAITS = "import time\nprint('epoch 1')\ntime.sleep(1000)\n"
LOCKS = """
import threading
first, second = threading.Lock(), threading.Lock()
both = threading.Barrier(2)
def hold(mine, other):
    with mine:
        both.wait()
        with other:
            pass
threading.Thread(target=hold, args=(second, first)).start()
print("ready", flush=True)
hold(first, second)
"""
MUTE_LOCK = "import threading\nprint('epoch 1')\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()\n"
RECEIVES = (
    ONE_STEP
    + """
import socket
socket.create_connection(("127.0.0.1", int(sys.argv[1]))).recv(1)
"""
)
POLLS = """
import socket, sys
print("ready", flush=True)
socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=1000).recv(1)
"""
RANKS = (
    BEAT
    + """
import signal
ready, go = os.pipe()
os.environ["WORLD_SIZE"] = "2"
for rank in (0, 1):
    child = os.fork()
    if child == 0:
        beat("training", rank=rank, step=41)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        os.read(ready, 1)
    children = [child]
    if rank == 0:
        first = child
print("started", flush=True)
os.waitpid(first, 0)
"""
)
FOREIGN_RANKS = """
import os, subprocess, sys, time
for rank in "01":
    more = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank}
    source = "import time; time.sleep(1000)" if rank == "0" else "raise SystemExit(3)"
    child = subprocess.Popen([sys.executable, "-S", "-c", source], env={**os.environ, **more})
print("started", flush=True)
child.wait()
time.sleep(1000)
"""
# As launchers give numbers that do not say how many there are on this host.
KILLED_RANK = """
import os, signal, subprocess, sys, time
children = []
for rank in "012":
    more = {"WORLD_SIZE": "3", "RANK": rank, "LOCAL_RANK": rank}
    source = "print(0, flush=True); import time; time.sleep(1000)"
    children.append(subprocess.Popen([sys.executable, "-S", "-c", source], env={**os.environ, **more},
                                     stdout=subprocess.PIPE))
for child in children:
    child.stdout.readline()
children[1].kill()
os.waitid(os.P_PID, children[1].pid, os.WEXITED | os.WNOWAIT)
print("started", flush=True)
time.sleep(1000)
"""
C_WORKS = """
#include <stdio.h>
#include <time.h>
#include <unistd.h>
int main(void) {
    for (puts("epoch 1");; usleep(60000))
        for (clock_t until = clock() + CLOCKS_PER_SEC / 50; clock() < until;) {}
}
"""
LOADER = (
    ONE_STEP
    + """
reading, writing = os.pipe()
if os.fork() == 0:
    os.kill(os.getpid(), 9)
os.read(reading, 1)
"""
)
GROWS = "kept = []\nwhile True: kept.append(bytearray(b'x' * (1 << 20)))\n"
FAILS = "def step():\n    raise ValueError('loss is nan')\nprint('epoch 1')\nstep()\n"
STOPS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("ready", flush=True)
time.sleep(1000)
"""
FILLS = "import time\nfor n in range(60):\n    print('x' * 65536, flush=True)\ntime.sleep(1000)\n"
MAPS = (
    BEAT
    + """
import mmap
kept = mmap.mmap(os.open(sys.argv[1] + "/model.safetensors", os.O_RDONLY), 0, prot=mmap.PROT_READ)
beat("training", step=41)
print("step 41", flush=True)
time.sleep(1000)
"""
)
SPEEDS = (
    BEAT
    + """
with open(run.path / "metrics.jsonl", "w") as file:
    for step in range(1, 61):
        file.write('{"step": %d, "tokens_per_second": %f}\\n' % (step, 4900 + 10 * (step % 20)))
beat("training", step=60)
print("step 60", flush=True)
time.sleep(1000)
"""
)
HOLDS_STEP = ONE_STEP + HOLD_DEVICE + "time.sleep(1000)\n"


@dataclass
class Situation:
    """A run to be started, and when it is where it should be."""

    command: Sequence[str] | str  # a text is a Python program that is started unbuffered
    ready: Callable[[status.RunDir], Any]
    fields: dict[str, Any] = field(default_factory=dict)
    root: bool = False  # whether it can be staged by root only


def python(source: str, *arguments: str, flags: Sequence[str] = ("-S", "-u")) -> list[str]:
    return [sys.executable, *flags, "-c", source, *arguments]


def argv(one: Situation) -> list[str]:
    return python(one.command, flags=("-u",)) if isinstance(one.command, str) else list(one.command)


def log(run: status.RunDir) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(run.log.glob("*.log"))) if run.log.is_dir() else b""


def said(text: str) -> Callable[[status.RunDir], bool]:
    return lambda run: text.encode() in log(run)


def over(run: status.RunDir) -> bool:
    return run.exit() is not None and not run.alive()


def trainer(run: status.RunDir) -> int:
    """The trainer's pid; 0 while there is none."""
    launch = run.launch()
    return (launch.trainer_pid or 0) if launch else 0


def waits_in(run: status.RunDir, *states: str) -> bool:
    process = procfs.stat(trainer(run)) if trainer(run) else None
    return process is not None and process["state"] in states


def situations(root: Path, port: int, out: Path) -> dict[str, Situation]:
    weights = root / "shm" / "toy@0123456789ab"
    buffered = ["env", "-u", "PYTHONUNBUFFERED", sys.executable, "-S", "-c"]
    compiles = "yes 'int f(int);' | nice -n 19 gcc -fsyntax-only -x c -"
    held = {"environment": {"HELD": str(root / "machine/dev/nvidia1")}, "devices": ["1"]}
    idle = {"environment": {"HELD": str(root / "machine/dev/nvidia2")}, "devices": ["2"]}
    into = ["sh", "-c", 'exec "$@" > "$0"']
    return {
        "training": Situation(STEPS, lambda run: steps(run) > 42),
        "foreign": Situation(PRINTS, said("epoch 1")),
        "loading": Situation(python(READS, str(root / "model.bin")), trainer),
        "compiling": Situation(["sh", "-c", compiles], lambda run: named(run, "cc1")),
        "buffered": Situation(
            [*into, str(out / "busy.txt"), *buffered, WORKS], lambda run: named(run, "python")
        ),
        "mute": Situation([*buffered, WORKS], runs_python),
        "mute-idle": Situation([*buffered, WAITS], runs_python),
        "mute-isolated": Situation([sys.executable, "-I", "-S", "-c", WORKS], runs_python),
        "mute-lock": Situation(["env", "-u", "PYTHONUNBUFFERED", sys.executable, "-c", MUTE_LOCK], locked),
        "mute-c": Situation([compiled(root)], trainer),
        "hardly": Situation([*buffered, HARDLY], runs_python),
        "killed-rank": Situation(python(KILLED_RANK), said("started")),
        "idle": Situation([*into, str(out / "idle.txt"), *buffered, WAITS], runs_python),
        "elsewhere": Situation([*into, str(out / "lines.txt"), *python(PRINTS)], lambda run: out_has(out)),
        "lock": Situation(LOCKS, lambda run: said("ready")(run) and waits_in(run, "S")),
        "socket": Situation(python(RECEIVES, str(port), flags=("-u",)), said("step 41")),
        "poll": Situation(python(POLLS, str(port)), said("ready")),
        "halted": Situation(STEPS, lambda run: steps(run) > 42 and halt(trainer(run)) and waits_in(run, "T")),
        "rank": Situation(RANKS, lambda run: said("started")(run) and len(run.heartbeats()) == 2),
        "foreign-rank": Situation(FOREIGN_RANKS, lambda run: said("started")(run) and waits_in(run, "S")),
        "loader": Situation(LOADER, lambda run: said("step 41")(run) and zombie(run)),
        "memory": Situation(GROWS, over, root=True),
        "traceback": Situation(FAILS, over),
        "finished": Situation("print('done')", over),
        "stopped": Situation(STOPS, lambda run: said("ready")(run) and stop(run) and over(run)),
        "killed": Situation(WAITS, lambda run: trainer(run) and said("epoch 1")(run) and end(trainer(run))),
        "keeper": Situation(WAITS, lambda run: said("epoch 1")(run) and end(run.launch().pid)),  # type: ignore[union-attr]
        "lost": Situation(HOLDS_STEP, said("step 41"), {**held}),
        "device": Situation(HOLDS_STEP, said("step 41"), {**idle}),
        "orphan": Situation("print('done')", over, {"devices": ["0"]}),
        "after-orphan": Situation(ONE_STEP + "time.sleep(1000)", said("step 41"), {"devices": ["0"]}),
        "disk": Situation(FILLS, lambda run: trainer(run) and len(log(run)) > 1 << 20, root=True),
        "attempts": Situation(FAILS, over, {"restart_attempts": 1}),
        "weights": Situation(python(MAPS, str(weights), flags=("-u",)), said("step 41")),
        "slow": Situation(SPEEDS, said("step 60")),
    }


def runs_python(run: status.RunDir) -> bool:
    return named(run, "python")


def locked(run: status.RunDir) -> bool:
    return bool(trainer(run)) and procfs.read(trainer(run), "wchan").startswith(b"futex")


def compiled(root: Path) -> str:
    """A program of C that is busy and prints into its buffer."""
    path = root / "works"
    subprocess.run(["gcc", "-x", "c", "-o", path, "-"], input=C_WORKS.encode(), check=True)
    return str(path)


def named(run: status.RunDir, program: str) -> bool:
    """Whether a process of the run runs `program` by now."""
    pids = procfs.of_run(trainer(run), 0, procfs.processes()) if trainer(run) else []
    return any(os.path.basename(procfs.link(pid, "exe") or "").startswith(program) for pid in pids)


def out_has(out: Path) -> bool:
    path = out / "lines.txt"
    return path.exists() and path.stat().st_size > 0


def zombie(run: status.RunDir) -> bool:
    return any(item["ppid"] == trainer(run) and item["state"] == "Z" for item in procfs.processes().values())


def halt(pid: int) -> bool:
    os.kill(pid, signal.SIGSTOP)
    return True


def stop(run: status.RunDir) -> bool:
    launch = run.launch()
    if run.request() is None and launch:
        run.ask("stop", by="ada@desk")
        until(lambda: (found := run.launch()) and found.stopping)
        os.kill(launch.pid, signal.SIGTERM)
    return True


def end(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return True


def machine(root: Path) -> Path:
    """A directory that stands for the machine's root, with three devices."""
    (root / "dev").mkdir(parents=True)
    for number, uuid in enumerate(UUIDS):
        (root / "dev" / f"nvidia{number}").touch()
        bus = f"0000:0{number}:00.0"
        place = root / "proc" / "driver" / "nvidia" / "gpus" / bus / "information"
        place.parent.mkdir(parents=True)
        place.write_text(INFORMATION.format(uuid=uuid, bus=bus, minor=number))
    return root


@dataclass
class Staged:
    """All situations at once."""

    place: Place
    runs: dict[str, status.RunDir]
    orphan: int  # the pid of the process that an ended run left on its device
    address: str  # what two of the runs wait to hear from


@contextlib.contextmanager
def staged(tmp_path: Path, wanted: Sequence[str] = ()) -> Iterator[Staged]:
    """Start all situations, or those `wanted`, that this user can stage; the environment is the probe's."""
    place = Place(tmp_path / "state")
    root = os.geteuid() == 0
    kept = {key: os.environ.get(key) for key in (gpus.ROOT_VARIABLE, nvml.STATE, "LD_LIBRARY_PATH")}
    library = nvml.build(tmp_path / "library")
    (place.root / "shm" / "toy@0123456789ab").mkdir(parents=True)
    (place.root / "shm" / "toy@0123456789ab" / "model.safetensors").write_bytes(b"x" * 4096)
    with open(place.root / "model.bin", "wb") as file:
        file.truncate(1 << 35)  # (sparse: it takes no room)
    (tmp_path / "out").mkdir()
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    machine(place.root / "machine")
    os.environ[gpus.ROOT_VARIABLE] = str(place.root / "machine")
    os.environ[nvml.STATE] = str(tmp_path / "nvml-state")
    os.environ["LD_LIBRARY_PATH"] = str(library.parent)
    found = {
        name: one
        for name, one in situations(place.root, port, tmp_path / "out").items()
        if (root or not one.root) and (not wanted or name in wanted)
    }
    (place.root / "names" / "slow").mkdir(parents=True)
    reference = {"schema": 1, "run_id": "0001-slow", "tokens_per_second": 10000.0, "step_seconds": 0.1}
    status.write_json(place.root / "names" / "slow" / "reference.json", reference)
    runs: dict[str, status.RunDir] = {}
    group: Path | None = None
    mounted: Path | None = None
    orphan: subprocess.Popen[bytes] | None = None
    forker = subprocess.Popen(
        [sys.executable, "-u", "-c", FORK],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    )
    assert forker.stdin
    try:
        for name, one in found.items():
            command = (
                python(one.command, flags=("-u",)) if isinstance(one.command, str) else list(one.command)
            )
            runs[name] = run = place.run_dir(command, name=name, **{"grace_seconds": 2.0, **one.fields})
            line = str(run.path)
            if name == "memory":
                group = memory_group()
                line += f"\t{group}"
            elif name == "disk":
                made = run.run()
                mounted = run.path
                subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", mounted], check=True)
                assert made
                run.write_run(made)
            forker.stdin.write(line.encode() + b"\n")
            forker.stdin.flush()
        for name, one in found.items():
            until(lambda one=one, name=name: one.ready(runs[name]))
        if "orphan" in found:
            orphan = subprocess.Popen(
                python(HOLD_DEVICE + "print(flush=True)\nimport time\ntime.sleep(1000)"),
                env={
                    **os.environ,
                    "HELD": str(place.root / "machine/dev/nvidia0"),
                    status.RUN_DIR_VARIABLE: str(runs["orphan"].path),
                },
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            assert orphan.stdout
            orphan.stdout.readline()
        if "weights" in found:
            shutil.rmtree(place.root / "shm" / "toy@0123456789ab")
        for name in {"killed", "keeper"} & set(found):
            until(lambda name=name: not runs[name].alive())
        (tmp_path / "nvml-state").write_text(
            nvml.device(UUIDS[0], processes=[(orphan.pid, 20000, 0)] if orphan else [])
            + nvml.device(UUIDS[1], lost=True)
            + nvml.device(UUIDS[2], percent=97)
        )
        yield Staged(place, runs, orphan.pid if orphan else 0, f"127.0.0.1:{port}")
    finally:
        for run in runs.values():  # those that were halted hear nothing but this
            launch = run.launch() if (run.path / "launch.json").exists() else None
            for pid in (launch.trainer_pid, launch.pid) if launch and run.alive() else ():
                if pid:
                    end(pid)
        place.end_all()
        if orphan:
            orphan.kill()
            orphan.wait()
            assert orphan.stdout
            orphan.stdout.close()
        forker.stdin.close()
        forker.wait()
        server.close()
        if group:
            until(lambda: not (group / "cgroup.procs").read_text())
            group.rmdir()
        if mounted:
            subprocess.run(["umount", mounted], check=True)
        for key, value in kept.items():
            os.environ.pop(key, None)
            if value is not None:
                os.environ[key] = value


def memory_group() -> Path | None:
    """A memory cgroup with too little memory, if one can be made here."""
    own = [Path(place) for place in procfs.groups(os.getpid())] + [Path("/sys/fs/cgroup/memory")]
    for parent in own:
        name = next(
            (name for name in ("memory.max", "memory.limit_in_bytes") if (parent / name).exists()), None
        )
        group = parent / f"drafthouse-verdicts-{os.getpid()}"
        if name:
            with contextlib.suppress(OSError):
                group.mkdir()
                (group / name).write_text(str(LIMIT))
                return group
    return None
