"""A project of its own with a state of its own, and `fab` called in it as people call it."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deployed import CHECKOUT, Place
from forked import Popen, Python

from trainer import status

FAB = [str(Path(sys.executable).with_name("fab"))]
# Says its greeting once, then counts until it is stopped.
COUNTING = """\
command:
- python
- -c
- |
  import itertools, os, time
  print("greeting", os.environ["GREETING"], flush=True)
  for number in itertools.count():
      print("line", number, flush=True)
      time.sleep(0.05)
environment:
  GREETING: hello
grace_seconds: 5
settle_seconds: 0
"""


def of_checkout(checkout: Path) -> Python:
    """What forks to be the `fab` of a checkout; to be closed."""
    return Python(["fab_ready"], checkout, PYTHONUNBUFFERED="")  # some machines set it


@functools.cache
def server() -> Python:
    started = of_checkout(CHECKOUT)
    atexit.register(started.close)
    return started


def call(
    words: Sequence[str], cwd: Path, env: Mapping[str, str], timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """``fab WORDS`` in `cwd`, as a process of its own."""
    return server().run([*FAB, *words], cwd=cwd, env=env, timeout=timeout)


def begin(words: Sequence[str], cwd: Path, env: Mapping[str, str], **pipes: Any) -> Popen:
    """``fab WORDS`` in `cwd`, which goes on meanwhile: as subprocess.Popen starts it, with its `pipes`."""
    return Popen(server(), [*FAB, *words], cwd, env, **pipes)


@dataclasses.dataclass
class Fab:
    """A project in a directory, and `fab` called in it."""

    root: Path
    place: Place

    def environment(self, **more: str) -> dict[str, str]:
        own = {
            "PYTHONPATH": str(CHECKOUT),
            "PATH": f"{Path(FAB[0]).parent}:{os.environ['PATH']}",  # so that hints say `fab`
            "DRAFTHOUSE_STATE": str(self.place.root),
            "DRAFTHOUSE_SHM": str(self.root / "shm"),
            "HOME": str(self.root),  # no SSH configuration but the one that a test writes
        }
        return {**os.environ, **own, **more}

    def run(self, *words: str, timeout: float = 120, **more: str) -> subprocess.CompletedProcess[str]:
        if any(name.startswith("PYTHON") for name in more):  # a server has read these when it started
            env = self.environment(**more)
            pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            return subprocess.run([*FAB, *words], cwd=self.root, env=env, text=True, timeout=timeout, **pipes)
        return call(words, self.root, self.environment(**more), timeout)

    def begin(self, *words: str, **pipes: Any) -> Popen:
        return begin(words, self.root, self.environment(), **pipes)

    def ok(self, *words: str, **more: str) -> str:
        done = self.run(*words, **more)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def file(self, text: str, stem: str = "demo") -> None:
        (self.root / "runs" / f"{stem}.yaml").write_text(text)

    @property
    def runs(self) -> list[status.RunDir]:
        return status.list_runs(self.place.root / "runs")

    def log(self, run: status.RunDir) -> str:
        return "".join(path.read_text() for path in sorted(run.log.glob("*.log")))

    def snapshot(self) -> dict[str, tuple[int, bytes]]:
        """Every file of state and shared memory, with its mode and bytes."""
        return {
            str(path): (
                path.lstat().st_mode,
                os.readlink(path).encode() if path.is_symlink() else path.read_bytes(),
            )
            for top in (self.place.root, self.root / "shm")
            for path in sorted(top.rglob("*"))
            if path.is_file() or path.is_symlink()
        }  # fmt: skip


def project(tmp_path: Path) -> Iterator[Fab]:
    """For a fixture: ``yield from project(tmp_path)``."""
    root = tmp_path / "project"
    (root / "runs").mkdir(parents=True)
    for name in ("fabfile.py", "fabric.yaml"):
        shutil.copy(CHECKOUT / name, root / name)
    made = Fab(root, Place(tmp_path / "state"))
    made.file(COUNTING)
    try:
        yield made
    finally:
        made.place.end_all()
