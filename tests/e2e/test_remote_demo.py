"""The demo on another machine: the real trainer there, with the toy that is made in seconds, its log here."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployed import CHECKOUT, Place, give_way, steps, until
from fabbed import call

from trainer import status

pytestmark = [pytest.mark.root, pytest.mark.sshd, pytest.mark.slow]


class Demo:
    def __init__(self, box: Any, root: Path) -> None:
        self.box, self.root = box, root

    def recipe(self, **trainer: Any) -> None:
        """runs/demo.yaml: the demo's own file, with the tiny toy and changed flags."""
        recipe = yaml.safe_load((CHECKOUT / "runs" / "demo.yaml").read_text())
        recipe.setdefault("environment", {})["DRAFTHOUSE_TOY"] = "tiny"
        flags = {key.replace("-", "_"): value for key, value in recipe["trainer"].items()}
        recipe["trainer"] = flags | {"target_layer_ids": [0, 1], "log_interval": 0.5, "threads": 1, **trainer}
        (self.root / "runs" / "demo.yaml").write_text(yaml.safe_dump(recipe))

    def fab(self, *words: str) -> subprocess.CompletedProcess[str]:
        own = {"PYTHONPATH": str(CHECKOUT), "HOME": str(self.root), "DRAFTHOUSE_BOOT": "no"}
        env = {**os.environ, **own, **self.box.environment}
        return call([*words, "--host", "gpu-box"], self.root, env, timeout=500)

    @property
    def runs(self) -> list[status.RunDir]:
        return status.list_runs(self.box.state / "runs")


@pytest.fixture
def demo(gpubox: Any, tmp_path: Path) -> Iterator[Demo]:
    made = Demo(gpubox, gpubox.project(tmp_path / "project", runtime="process"))
    try:
        yield made
    finally:
        Place(gpubox.state).end_all()
        for place in (gpubox.state, gpubox.shm):
            shutil.rmtree(place, ignore_errors=True)
        gpubox.state.mkdir()


def test_a_deploy_follows_the_training_there_to_its_end_and_a_restart_resumes_it(demo: Demo) -> None:
    demo.recipe(max_steps=100000, epochs=100000)
    done = demo.fab("deploy", "--no-follow")
    assert done.returncode == 0, done.stdout + done.stderr
    until(lambda: steps(demo.runs[0]) > 2, 240)
    give_way(demo.runs[0])

    changed = demo.fab("restart", "--set", "max-steps=1", "--no-follow")
    assert changed.returncode == 0, changed.stdout + changed.stderr
    assert "trainer.max-steps: 100000 → 1" in changed.stdout
    assert "saved after" in changed.stderr  # asked for before any signal
    first = demo.runs[0].exit()
    assert first
    assert (first.reason, (first.last_checkpoint or {}).get("step", 0) > 2) == ("stopped", True)

    tailed = demo.fab("tail")
    log = "".join(path.read_text() for path in sorted(demo.runs[1].log.glob("*.log")))
    ended = demo.runs[1].exit()
    assert ended
    assert tailed.stdout == log
    assert tailed.returncode == ended.code
    assert "stdout unbuffered" in log
    assert "resum" in log
