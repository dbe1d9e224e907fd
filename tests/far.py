"""A project of its own whose host is the testbed's gpu-box, and `fab` called in it as people call it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from deployed import CHECKOUT
from fabbed import FAB, call
from testbed.gpubox import ALIAS, GpuBox

from trainer import status


class Far:
    """A project in a directory whose host is the box, and `fab` called in it.

    `settings` are the host's; `user` logs in there.
    """

    def __init__(self, box: GpuBox, root: Path, user: str = "root", **settings: Any) -> None:
        self.box = box
        box.alias(ALIAS, User=user)
        self.state = box.directory / "state" / root.parent.name
        self.root = box.project(root, **{"runtime": "process", "state": str(self.state), **settings})
        for file in (self.root / "runs").iterdir():
            file.unlink()

    def file(self, text: str, stem: str = "demo") -> None:
        (self.root / "runs" / f"{stem}.yaml").write_text(
            text.replace("- python\n", f"- {FAB[0][:-3]}python\n")
        )

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            **self.box.environment,
            "PYTHONPATH": str(CHECKOUT),
            "PATH": f"{Path(FAB[0]).parent}:{os.environ['PATH']}",
            "DRAFTHOUSE_STATE": str(self.root / "local-state"),
            "DRAFTHOUSE_SHM": str(self.root / "local-shm"),
        }

    def run(self, *words: str, timeout: float = 180, **more: str) -> subprocess.CompletedProcess[str]:
        return call(words, self.root, {**self.environment(), **more}, timeout)

    def ok(self, *words: str, **more: str) -> str:
        done = self.run(*words, **more)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @property
    def runs(self) -> list[status.RunDir]:
        return status.list_runs(self.state / "runs")
