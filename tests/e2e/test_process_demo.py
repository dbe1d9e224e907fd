"""`make demo`, from the first line to the last: the demo's own file on a machine without an engine.

With the toy that is made in seconds, in a state of its own.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest
import yaml
from deployed import CHECKOUT, Place, give_way

from trainer import status

pytestmark = pytest.mark.slow


class Command:
    """A command in a process group of its own, as in a terminal: its output, line by line."""

    def __init__(self, argv: list[str], **options: Any) -> None:
        self.lines: Queue[str] = Queue()
        self.seen: list[str] = []
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            **options,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.seen.append(line.rstrip("\n"))
            self.lines.put(self.seen[-1])

    def until(self, words: str, seconds: float = 240) -> str:
        """The next line with `words`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                line = self.lines.get(timeout=0.5)
            except Empty:
                if not self._reader.is_alive():
                    break
                continue
            if words in line:
                return line
        raise AssertionError(f"no line with {words!r}; seen:\n" + "\n".join(self.seen[-40:]))

    def interrupt(self) -> int:
        """Ctrl-C: SIGINT to every process of the group. Returns the exit code."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.end()

    def end(self, seconds: float = 240) -> int:
        code = self.process.wait(seconds)
        self._reader.join(10)
        return code


@dataclasses.dataclass
class Project:
    """What a newcomer has after `git clone`, with a short demo, and an installed .venv."""

    root: Path
    place: Place

    def environment(self) -> dict[str, str]:
        own = {
            "PYTHONPATH": str(CHECKOUT),
            "DRAFTHOUSE_STATE": str(self.place.root),
            "DRAFTHOUSE_SHM": str(self.root / "shm"),
            "HOME": str(self.root),
        }
        dropped = (
            "PYTHONUNBUFFERED",
            "MAKEFLAGS",
            "MAKELEVEL",
            "MFLAGS",
            "DRAFTHOUSE_CACHE",
            "HOST",
            "NAME",
            "RUN",
        )
        return {key: value for key, value in os.environ.items() if key not in dropped} | own

    def start(self, *argv: str) -> Command:
        return Command(list(argv), cwd=self.root, env=self.environment())

    def demo(self, **trainer: Any) -> None:
        """runs/demo.yaml: the demo's own file, with the tiny toy and changed flags."""
        recipe = yaml.safe_load((CHECKOUT / "runs" / "demo.yaml").read_text())
        recipe.setdefault("environment", {})["DRAFTHOUSE_TOY"] = "tiny"
        flags = {key.replace("-", "_"): value for key, value in recipe["trainer"].items()}
        recipe["trainer"] = flags | {"target_layer_ids": [0, 1], "log_interval": 0.5, "threads": 1, **trainer}
        (self.root / "runs" / "demo.yaml").write_text(yaml.safe_dump(recipe))

    def run(self, run_id: str) -> status.RunDir:
        return status.RunDir(self.place.root / "runs" / run_id)

    def text(self, *argv: str) -> str:
        command = self.start(*argv)
        assert command.end() == 0, "\n".join(command.seen)
        return "\n".join(command.seen)


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    root = tmp_path / "drafthouse"
    (root / "runs").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "fabfile.py", "fabric.yaml"):
        shutil.copy(CHECKOUT / name, root)
    bin = root / ".venv" / "bin"
    bin.mkdir(parents=True)
    for program in ("pip", "fab", "python"):
        (bin / program).write_text(f'#!/bin/sh\nexec {Path(sys.executable).with_name(program)} "$@"\n')
        (bin / program).chmod(0o755)
    for extras in ("deploy", "deploy,trainer"):
        (root / ".venv" / f".{extras}").touch()
    made = Project(root, Place(tmp_path / "state"))
    try:
        yield made
    finally:
        made.place.end_all()


def test_the_demo_outlives_ctrl_c_and_goes_on_where_it_was(project: Project) -> None:
    project.demo(max_steps=200000, epochs=200000, eval_prompts=0)

    first = project.start(
        str(project.root / ".venv/bin/fab"), "deploy", "--host", "localhost", "--run", "demo"
    )
    banner = first.until("drafthouse run 0001-demo")
    assert "stdout unbuffered (PYTHONUNBUFFERED=1, -u; from /proc/" in banner
    first.until("step 1/200000 ·")
    assert first.interrupt() == 130
    assert "the run goes on" in "\n".join(first.seen)
    assert project.run("0001-demo").alive()
    give_way(project.run("0001-demo"))

    deadline = time.monotonic() + 60
    while "training" not in (said := project.text("make", "status")):  # heartbeats come once a second
        assert time.monotonic() < deadline, said

    again = project.start("make", "demo")
    again.until("unchanged: 0001-demo")
    again.until("step ")
    again.interrupt()

    tail = project.start("make", "tail")
    tail.until("step ")
    tail.interrupt()

    restarted = project.start("make", "restart")
    restarted.until("drafthouse run 0002-demo")
    resumed = restarted.until("/200000 ·")
    restarted.interrupt()
    end = project.run("0001-demo").exit()
    assert end is not None
    assert end.reason == "stopped"
    assert end.last_checkpoint is not None
    step = int(resumed.split("step ")[1].split("/")[0].replace(",", ""))
    assert step == end.last_checkpoint["step"] + 1

    assert not project.run("0001-demo").alive()
    project.text("make", "stop")
    assert not project.run("0002-demo").alive()
    stopped = project.run("0002-demo").exit()
    assert stopped is not None
    assert stopped.reason == "stopped"
    assert "stopped" in project.text("make", "status")


def test_the_demo_ends_by_itself_with_the_figures_that_keep_it_honest(project: Project) -> None:
    project.demo(max_steps=30, eval_prompts=2, eval_tokens=16)
    demo = project.start("make", "demo")
    assert demo.end() == 0, "\n".join(demo.seen[-40:])
    text = "\n".join(demo.seen)
    for figure in ("1.00 → ", "prompt lookup's τ", "distinct 3-grams", "text = target's own", "T=0.7"):
        assert figure in text, figure
    end = project.run("0001-demo").exit()
    assert end is not None
    assert (end.reason, end.code) == ("finished", 0)
    assert "finished" in project.text("make", "status")
