"""A state root in a temporary directory, with real runs under the real launch, for tests of deploy/."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deploy import procfs
from deploy.host import Local
from deploy.runtimes import process
from trainer import status

CHECKOUT = Path(__file__).resolve().parent.parent
HOST = Local()

# A trainer that does what the run directory's contract asks for, and nothing else: heartbeats with a step
# every 20 ms, answers to requests, TERM leads to save-and-exit. It notes both in the file SAVES, if that is
# set, and a checkpoint takes until the file GATE is there, if that is set. It answers ANSWER (default: done).
TRAINER = """
import os, signal, sys, time
from trainer.status import Heartbeat, RunDir
run = RunDir(os.environ["DRAFTHOUSE_RUN_DIR"])
attempt = int(os.environ["DRAFTHOUSE_ATTEMPT"])
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
beat = Heartbeat(pid=os.getpid(), attempt=attempt, phase="training", phase_since=time.time(), total=100000)
mark, gate = os.environ.get("SAVES"), os.environ.get("GATE")
while not stop:
    beat.step += 1
    beat.sequence += 1
    beat.time = beat.last_step_time = time.time()
    request = run.request()
    if request and request.action != "stop" and (beat.answered or {}).get("id") != request.id:
        while gate and not os.path.exists(gate):
            time.sleep(0.01)
        if mark:
            open(mark, "a").write("checkpoint %d\\n" % beat.step)
        beat.last_checkpoint = {"path": "x", "step": beat.step, "time": time.time()}
        answer = os.environ.get("ANSWER", "done")
        beat.answered = {"id": request.id, "action": request.action, "outcome": answer, "time": time.time()}
    run.write_heartbeat(beat)
    print("step", beat.step, flush=True)
    time.sleep(0.02)
if mark:
    open(mark, "a").write("term %d\\n" % beat.step)
print("saved and out", flush=True)
"""


class Place:
    """A state root."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def run_dir(self, command: list[str] | str = TRAINER, name: str = "demo", **fields: Any) -> status.RunDir:
        """The next run of `name`, not started. A command that is a text is a Python program."""
        if isinstance(command, str):
            command = [sys.executable, "-u", "-c", command]
        run = status.allocate_run(self.root / "runs", name)
        fields = {"grace_seconds": 20.0, "restart_attempts": 0, **fields}
        run.write_run(status.Run(run_id=run.path.name, name=name, command=command, **fields))
        return run

    def release(self, release_id: str = "aaaaaaaaaaaa", name: str = "demo") -> str:
        """A release as a deploy leaves it: its own copy of the trainer package."""
        app = self.root / "names" / name / "releases" / release_id / "app" / "trainer"
        if not app.exists():
            shutil.copytree(CHECKOUT / "trainer", app, ignore=shutil.ignore_patterns("__pycache__"))
        return release_id

    def seal(self, release_id: str = "aaaaaaaaaaaa", name: str = "demo") -> str:
        """Make what was put there for a release a whole one, as a deploy leaves it; its real id."""
        path = self.root / "names" / name / "releases" / release_id
        files = {
            str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in sorted(path.rglob("*"))
            if file.is_file()
        }
        whole = "".join(f"{file}\0{digest}\n" for file, digest in sorted(files.items()))
        sealed = path.with_name(hashlib.sha256(whole.encode()).hexdigest()[:12])
        if sealed.exists():
            shutil.rmtree(path)
        else:
            (path / "release.json").write_text(json.dumps({"files": files}))
            path.rename(sealed)
        return sealed.name

    def whole_release(self, label: str = "first") -> str:
        """The id of a release that is what its manifest says; another label gives another one."""
        app = self.root / "names" / "demo" / "releases" / self.release(label) / "app"
        (app / "label").write_text(label)
        return self.seal(label)

    def start_spec(self, run: status.RunDir, release_id: str = "aaaaaaaaaaaa") -> dict[str, Any]:
        made = run.run()
        assert made
        path = self.root / "names" / made.name / "releases" / self.release(release_id, made.name)
        facts = {
            "tini": shutil.which("tini"),
            "home": str(self.root),
            "user": "tester",
            "state": {"root": str(self.root)},
            "shm": {"root": str(self.root / "shm")},
        }
        return process.start_spec(made, facts, str(path), run_path=str(run.path), python=sys.executable)

    def start(self, run: status.RunDir, release_id: str = "aaaaaaaaaaaa") -> subprocess.Popen[bytes]:
        """Start launch as the switch does, and wait until the run lives."""
        spec = self.start_spec(run, release_id)
        with open(run.path / "launch.err", "ab") as errors:
            child = procfs.begin(spec, errors)
        until(lambda: run.alive() or run.exit() or child.poll() is not None)
        return child

    def spec(
        self,
        new: status.RunDir | None,
        old: status.RunDir | None = None,
        release_id: str = "aaaaaaaaaaaa",
        **more: Any,
    ) -> dict[str, Any]:
        """What deploy hands to the switch."""
        return {
            "state_root": str(self.root),
            "name": "demo",
            "run_path": str(new.path) if new else None,
            "release_id": release_id,
            "old_run_path": str(old.path) if old else None,
            "grace_seconds": 20.0,
            "checkpoint_timeout_seconds": 60.0,
            "first_heartbeat_timeout_seconds": 60.0,
            "by": "ada@desk",
            "start": self.start_spec(new, release_id) if new else None,
            **more,
        }

    def end_all(self) -> None:
        """Kill what still runs here: first the switches, which would start the next run, then the runs.

        A process counts if it holds a lock of this place, or carries a run's directory in its environment.
        """
        for lock in self.root.glob("names/*/switch.lock"):
            for pid in procfs.processes():
                if procfs.has_open(pid, str(lock)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        for run in status.list_runs(self.root / "runs"):
            deadline = time.monotonic() + 30
            while run.alive() and time.monotonic() < deadline:
                for pid in procfs.processes():
                    if procfs.has_open(pid, str(run.lock)) or marked(pid, run):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)


def marked(pid: int, run: status.RunDir) -> bool:
    mark = f"{status.RUN_DIR_VARIABLE}={run.path}".encode()
    return mark in procfs.read(pid, "environ").split(b"\0")


def processes_of(run: status.RunDir) -> list[int]:
    """Every living process that carries the run's directory in its environment."""
    return [pid for pid, item in procfs.processes().items() if item["state"] != "Z" and marked(pid, run)]


def until(condition: Callable[[], Any], seconds: float = 90) -> Any:
    """Wait for a condition; its value."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def steps(run: status.RunDir) -> int:
    """The newest step that the run's heartbeat tells of."""
    beat = run.heartbeats().get(0)
    return beat.step if beat else 0


def give_way(run: status.RunDir) -> None:
    """Have a run that trains for ever leave the CPUs to other tests: nobody here looks at its speed."""
    pid = run.heartbeats()[0].pid
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.setpriority(os.PRIO_PROCESS, int(thread), 10)


def place(tmp_path: Path) -> Iterator[Place]:
    """For a fixture: ``yield from place(tmp_path)``."""
    made = Place(tmp_path / "state")
    try:
        yield made
    finally:
        made.end_all()
