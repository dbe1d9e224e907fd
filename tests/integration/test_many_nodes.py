"""Two machines on loopback with the real trainer: the same bits as one, and what is kept when one is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import many
import pytest
import tiny
import torch
from deployed import CHECKOUT
from launching import wait_for
from safetensors.torch import load_file

from trainer import checkpoint
from trainer.status import RunDir

pytestmark = pytest.mark.slow

SOON = """
import sys
from trainer import link
from trainer.__main__ import main
link.SILENT_SECONDS, link.BEAT_SECONDS = 4, 0.5
sys.argv[0] = "trainer"
sys.exit(main(sys.argv[1:]))
"""
TIMEOUT = 200


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    home = tmp_path_factory.mktemp("model")
    target = tiny.target_directory(home / "target")
    return target, tiny.data_directory(home / "data", target, 60)


class Run:
    """Both launchers, and what they leave."""

    def __init__(self, model: tuple[Path, Path], room: Path) -> None:
        self.model, self.room = model, room
        self.started: list[subprocess.Popen[bytes]] = []

    def flags(self, name: str, **changes: object) -> list[str]:
        (self.room / name).mkdir(parents=True, exist_ok=True)
        chosen = {"grad_accum": 2, "epochs": 3000, "max_steps": 6, "sample_blocks": 4, **changes}
        return tiny.flags(*self.model, self.room / "out" / name, run_dir=self.room / name, **chosen)

    def start(self, **changes: object) -> None:
        address = many.meeting_place()
        for node in range(2):
            of = {"grad_accum": 1, "nodes": 2, "node": node, "rendezvous": address}
            flags = self.flags(f"node-{node}", **of, **changes)
            flags += ["--target-gpus", "cpu:0", "--drafter-gpus", "cpu:0"]
            with open(self.room / f"{node}.txt", "wb") as file:
                command = [sys.executable, "-c", SOON, *flags]
                self.started.append(
                    subprocess.Popen(command, cwd=CHECKOUT, stdout=file, stderr=subprocess.STDOUT)
                )

    def said(self, node: int) -> str:
        return (self.room / f"{node}.txt").read_text()

    def steps(self, count: int) -> None:
        wait_for(lambda: f"step {count}/" in self.said(0), lambda: self.said(0) + self.said(1))

    def codes(self) -> list[int]:
        return [process.wait(TIMEOUT) for process in self.started]

    def losses(self, name: str) -> list[float]:
        lines = (self.room / name / "metrics.jsonl").read_text().splitlines()
        return [row["loss"] for row in map(json.loads, lines) if row["kind"] == "training"]

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        latest = self.room / "out" / name / "latest"
        return {f"{file}:{key}": value for file in checkpoint.TENSORS
                for key, value in load_file(latest / file).items()}  # fmt: skip


@pytest.fixture
def run(model: tuple[Path, Path], tmp_path: Path) -> Iterator[Run]:
    made = Run(model, tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.wait()


def test_two_machines_learn_what_one_process_learns_and_stop_together(run: Run) -> None:
    many.run(run.room / "a", "cpu:0", "cpu:0", run.flags("one"))
    run.start()
    assert run.codes() == [0, 0], run.said(0) + run.said(1)
    assert run.losses("one") == run.losses("node-0")
    assert len(run.losses("one")) == 6
    one, two = run.weights("one"), run.weights("node-0")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert not (run.room / "out" / "node-1").exists(), "node 0 has the checkpoints"
    for node in range(2):
        assert list(RunDir(run.room / f"node-{node}").heartbeats()) == [node]


def test_a_stop_on_the_second_machine_ends_both_at_one_step(run: Run) -> None:
    run.start(max_steps=4000)
    run.steps(2)
    run.started[1].send_signal(signal.SIGTERM)
    assert run.codes() == [0, 0]
    steps = [RunDir(run.room / f"node-{node}").heartbeats()[node].step for node in range(2)]
    assert steps[0] == steps[1]
    assert (run.room / "out" / "node-0" / "latest").resolve().name == f"step-{steps[0]:08}"


def test_what_was_learnt_is_saved_when_a_machine_falls_silent(run: Run) -> None:
    """Nothing of it ends: its connections stay open, as those of a host without power do."""
    run.start(max_steps=400000)
    run.steps(3)
    other = RunDir(run.room / "node-1").heartbeats()[1].pid
    for pid in (run.started[1].pid, other):
        os.kill(pid, signal.SIGSTOP)
    assert run.started[0].wait(TIMEOUT) == 1
    assert "saving what has been learnt, since another process of this run is gone" in run.said(0)
    assert run.said(0).splitlines()[-1].startswith("error: node 1 (")
    state = json.loads((run.room / "out" / "node-0" / "latest" / "state.json").read_text())
    assert state["step"] >= 3
    for pid in (other, run.started[1].pid):
        os.kill(pid, signal.SIGCONT)
    assert run.codes() == [1, 1]
    assert run.said(1).splitlines()[-1] == run.said(0).splitlines()[-1]
