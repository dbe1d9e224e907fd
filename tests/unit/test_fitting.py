"""Whether GPUs hold a run, by estimate: what --check-config says of targets that are too large for one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny

from trainer import device, fitting
from trainer.__main__ import main
from trainer.config import Settings
from trainer.estimate import Estimate

SHAPE = SimpleNamespace(vocab_size=100_000, hidden_size=5000, num_hidden_layers=50)


def said(memory: float | None, weights: float = 52e9, drafter: float = 30e9, **flags: Any) -> list[str]:
    """Of a target whose embedding and output head take 2 GB of its `weights`, in bfloat16."""
    settings = Settings(target_model="m", data_dir="d", dtype="bfloat16", **flags)
    target = {"weights": int(weights), "a layer's activations": int(5e9), "features": int(3e9)}
    own = {"drafter": int(drafter - 2e9), "embedding and output head": int(2e9)}
    found = Estimate(1, 1, {}, target, own, 1, 1)
    return fitting.lines(settings, found, SHAPE, memory)


def test_a_target_that_is_too_large_for_a_gpu_is_told_how_to_be_spread() -> None:
    [line] = said(48, target_gpus=("0", "1", "2", "3"), drafter_gpus=("4",))
    assert line == (
        "the target takes 52.0 GB + 8.0 GB for a micro-batch; it needs 2 GPUs of 48 GB: --target-gpus 0+1,2+3"
    )
    [line] = said(24, drafter=20e9, target_gpus=("0", "1"), drafter_gpus=("2",))
    assert line.endswith("it needs 4 GPUs of 24 GB: --target-gpus 0+1+3+4"), "2 is the drafter's"
    [line] = said(24, drafter=20e9, target_gpus=("0+1", "2+3"), drafter_gpus=("7",))
    assert line.endswith("--target-gpus 0+1+2+3")


@pytest.mark.parametrize(
    ("memory", "targets"), [(80, ("0", "1")), (48, ("0+1", "2+3")), (48, ("0+1+2", "3+4"))]
)
def test_gpus_that_hold_it_are_said_to(memory: float, targets: tuple[str, ...]) -> None:
    assert said(memory, target_gpus=targets, drafter_gpus=("5",)) == [
        f"GPUs of {memory} GB hold that, by this estimate"
    ]


def test_a_drafter_is_not_spread_and_both_roles_may_be_too_much() -> None:
    [line] = said(48, weights=20e9, drafter=60e9, target_gpus=("0",), drafter_gpus=("1",))
    assert line.startswith("a drafter takes 60.0 GB, more than a GPU of 48 GB holds: lower --max-anchors")
    [line] = said(64)
    assert line == (
        "target and drafter take 88.0 GB together, more than a GPU of 64 GB holds; "
        "give each a GPU of its own: --target-gpus 0 --drafter-gpus 1"
    )
    assert said(64, target_gpus=("0", "1"), drafter_gpus=("0", "1")) == [line]
    assert said(96) == ["GPUs of 96 GB hold that, by this estimate"]
    assert said(48)[0].endswith("--target-gpus 0+1 --drafter-gpus 2")


def test_a_target_that_no_number_of_gpus_holds() -> None:
    [line] = said(8, drafter=4e9, target_gpus=("0",), drafter_gpus=("1",))
    assert "no number of GPUs of 8 GB holds it" in line


def test_nothing_is_said_of_the_cpu_or_of_unknown_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(8, target_gpus=("cpu:0",), drafter_gpus=("cpu:1",)) == []
    assert said(8, device="cpu") == []
    monkeypatch.setenv("PATH", "/nowhere")
    assert said(None, target_gpus=("0",), drafter_gpus=("1",)) == []


@pytest.mark.parametrize(
    ("script", "found"),
    [("echo 97887; echo 81559", 81559 * 2**20), ("echo [N/A]", None), ("exit 9", None), ("true", None)],
)
def test_the_memory_of_gpus_is_what_nvidia_smi_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, found: float | None
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n[ $1 = --query-gpu=memory.total ] || exit 1\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert device.gpu_memory() == found


def test_check_config_takes_the_memory_of_gpus_that_are_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tiny.target_directory(tmp_path / "target")
    data = tiny.data_directory(tmp_path / "data", target)
    flags = tiny.flags(target, data, tmp_path / "out", target_gpus="0", drafter_gpus="1")
    assert main([*flags, "--check-config", "--gpu-memory", "80"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "GPUs of 80 GB hold that, by this estimate"
    assert main([*flags, "--check-config", "--gpu-memory", "0.001"]) == 0
    assert "of 0.001 GB" in capsys.readouterr().out.splitlines()[-1]
    for wrong, sentence in (
        (["--gpu-memory", "80"], "--gpu-memory means nothing without --check-config"),
        (["--check-config", "--gpu-memory", "much"], "--gpu-memory 'much' must be a number above 0"),
    ):
        assert main([*flags, *wrong]) == 2
        assert sentence in capsys.readouterr().err
