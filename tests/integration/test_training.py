"""A real training run: the process, its log, its run directory, its exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tiny
from deployed import CHECKOUT
from forked import Process
from trainings import python, trainer

from trainer import __main__ as program
from trainer.status import RunDir

pytestmark = pytest.mark.xdist_group("trainings")  # one process has imported torch for them


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    home = tmp_path_factory.mktemp("model")
    target = tiny.target_directory(home / "target")
    return target, tiny.data_directory(home / "data", target)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    (tmp_path / "0004-x").mkdir()
    return RunDir(tmp_path / "0004-x")


@pytest.fixture
def start(run_dir: RunDir) -> Iterator[Callable[..., Process]]:
    """Starts trainers with stdout and stderr in <run directory>/out.txt; ends what a test left behind."""
    started: list[Process] = []

    def begin(flags: list[str]) -> Process:
        with open(run_dir.path / "out.txt", "ab") as out:
            env = {**os.environ, "DRAFTHOUSE_RUN_DIR": str(run_dir.path)}
            process = python().start(
                ["-u", "-m", "trainer", *flags], CHECKOUT, env, out.fileno(), out.fileno()
            )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait(60)


def output(run_dir: RunDir) -> str:
    return (run_dir.path / "out.txt").read_text()


def wait_for(condition: Callable[[], object], process: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the trainer ended before"
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


LINE = re.compile(
    r"^step (\d+)/10 · [\d,]+ tok/s · loss \d\.\d{3} · τ̂ \d\.\d\d · (?:tree-τ \d\.\d\d · )?lr \d\.\de-\d\d · "
    r"data \d+ target \d+ forward \d+ objective \d+ backward \d+ optimizer \d+ ms · "
    r"mem [\d,]+ MB \(min [\d,]+, peak [\d,]+\)$",
    re.MULTILINE,
)


@pytest.mark.slow
def test_a_run_leaves_its_log_heartbeat_metrics_events_and_checkpoints(
    model: tuple[Path, Path],
    run_dir: RunDir,
    start: Callable[..., Process],
    tmp_path: Path,
) -> None:
    flags = tiny.flags(
        *model, tmp_path / "out", save_interval=4, keep_checkpoints=2, eval_prompts=2, eval_tokens=8
    )
    assert start(flags).wait(120) == 0, output(run_dir)
    steps = [int(step) for step in LINE.findall(output(run_dir))]
    assert steps == list(range(1, 11)), output(run_dir)

    records = [json.loads(text) for text in run_dir.metrics.read_text().splitlines()]
    assert [r["step"] for r in records if "loss" in r] == steps
    assert [r["step"] for r in records if r["kind"] == "evaluation"] == [0, 10]
    assert all(r["tau/training_prompts"] >= 1 for r in records if r["kind"] == "evaluation")
    trained = [r for r in records if r["kind"] == "training"]
    assert all(len(r["slots"]["accuracy"]) == len(r["slots"]["acceptance"]) == 3 for r in trained)
    assert [r["step"] for r in trained if "tree_tau" in r] == [1]  # one look in so few micro-batches
    assert set(trained[0]) >= {"recall", "agreement", "tau_hat_target"}
    assert output(run_dir).count("of the labels") == 0  # too few were seen to say anything
    heartbeat = run_dir.heartbeats()[0]
    assert (heartbeat.phase, heartbeat.step, heartbeat.total) == ("finishing", 10, 10)
    assert heartbeat.metrics["tau/training_prompts_T0.7"] >= 1
    assert heartbeat.last_checkpoint is not None
    assert heartbeat.last_checkpoint["step"] == 10
    assert list(run_dir.events.iterdir())

    home = tmp_path / "out" / run_dir.path.name
    assert sorted(p.name for p in home.iterdir()) == ["step-00000008", "step-00000010"]
    state = json.loads((tmp_path / "out" / "latest" / "state.json").read_text())
    assert state["finished"] is True
    assert set(state["results"]) == {"before", "after"}

    # The next start finds a finished run and begins anew.
    assert start([*flags, "--max-steps", "1"]).wait(120) == 0
    assert "of a finished run: starting at step 0" in output(run_dir)


@pytest.mark.slow
def test_training_on_one_text_learns_it(tmp_path: Path) -> None:
    from trainer.completions import write_completions
    from trainer.modeldir import tokenizer_digest

    # Weights of ordinary size: with the tiny ones of an untrained model no logit can stand out.
    target = tiny.target_directory(tmp_path / "target", tiny.qwen3(initializer_range=0.3))
    ids = [(7 * i * i + 3 * i) % 90 for i in range(48)]
    meta = {"tokenizer": tokenizer_digest(target), "target": "tiny"}
    write_completions(tmp_path / "data", [(ids, [0] * 4 + [1] * 44)] * 8, meta)
    flags = tiny.flags(
        target, tmp_path / "data", tmp_path / "out", epochs=60, max_steps=60, init_from_target=True
    )
    ended = trainer([*flags, "--cache-features"])
    assert ended.returncode == 0, ended.stderr
    taus = [float(tau) for tau in re.findall(r"τ̂ (\d\.\d\d)", ended.stdout)]
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", ended.stdout)]
    assert losses[-1] < 0.5 * losses[0]
    assert taus[0] < 1.3
    assert taus[-1] > 3


def test_every_extra_of_the_loss_trains_and_is_recorded(
    model: tuple[Path, Path], run_dir: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extras = {"use_soft_labels": True, "kl_weight": 0.5, "cap_lambda": 0.1, "loss_type": "dpace"}
    flags = tiny.flags(*model, tmp_path / "out", grad_accum=2, cache_features=True, **extras)
    assert program.main([*flags, "--run-dir", str(run_dir.path)]) == 0
    records = [json.loads(text) for text in run_dir.metrics.read_text().splitlines()]
    for record in records:
        parts = record["loss_parts"]
        total = 0.5 * parts["ce"] + 0.5 * parts["kl"] + 0.1 * parts["cap"]
        assert record["loss"] == pytest.approx(total, rel=1e-5)
    assert records[0]["loss_parts"]["kl"] > 0
    assert records[0]["agreement"] is not None
    assert "warning" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_training_saves_and_exits_0(
    model: tuple[Path, Path],
    run_dir: RunDir,
    start: Callable[..., Process],
    tmp_path: Path,
    number: signal.Signals,
) -> None:
    process = start(tiny.flags(*model, tmp_path / "out", epochs=100000))
    wait_for(lambda: "step 2/" in output(run_dir), process)
    process.send_signal(number)
    process.send_signal(number)  # an impatient second one changes nothing
    assert process.wait(60) == 0, output(run_dir)
    step = json.loads((tmp_path / "out" / "latest" / "state.json").read_text())["step"]
    assert step >= 2
    assert run_dir.heartbeats()[0].last_checkpoint["step"] == step  # type: ignore[index]
    assert "Traceback" not in output(run_dir)


@pytest.mark.slow
def test_requests_are_carried_out_at_a_step_boundary_and_answered(
    model: tuple[Path, Path], run_dir: RunDir, start: Callable[..., Process], tmp_path: Path
) -> None:
    process = start(tiny.flags(*model, tmp_path / "out", epochs=100000))
    wait_for(lambda: "step 2/" in output(run_dir), process)

    def answered(request_id: str) -> bool:
        return (run_dir.heartbeats()[0].answered or {}).get("id") == request_id

    first = run_dir.ask("checkpoint", by="tester")
    wait_for(lambda: answered(first.id), process)
    assert run_dir.heartbeats()[0].answered["outcome"] == "done"  # type: ignore[index]
    assert (tmp_path / "out" / "latest" / "drafter.safetensors").exists()
    second = run_dir.ask("checkpoint-and-stop", by="tester")
    assert process.wait(60) == 0
    assert answered(second.id)
    assert "checkpoint-and-stop asked for by tester: done" in output(run_dir)


@pytest.mark.slow
def test_usr1_prints_every_threads_stack_and_training_goes_on(
    model: tuple[Path, Path], run_dir: RunDir, start: Callable[..., Process], tmp_path: Path
) -> None:
    process = start(tiny.flags(*model, tmp_path / "out", epochs=100000))
    wait_for(lambda: "step 2/" in output(run_dir), process)
    process.send_signal(signal.SIGUSR1)
    wait_for(lambda: "Current thread" in output(run_dir) and "monitor.py" in output(run_dir), process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_loading_ends_at_once_without_a_trace(
    model: tuple[Path, Path], run_dir: RunDir, tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-u", "-m", "trainer", *tiny.flags(*model, tmp_path / "out")]
    with open(run_dir.path / "out.txt", "ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=CHECKOUT)
    try:
        wait_for(lambda: "vocabulary" in output(run_dir), process)  # said before torch is imported
        process.send_signal(number)
        assert process.wait(60) == -number
    finally:
        process.kill()
    assert "Traceback" not in output(run_dir)
    assert not list((tmp_path / "out").glob("*/step-*"))


@pytest.mark.slow
def test_a_second_trainer_for_the_same_output_is_refused(
    model: tuple[Path, Path], run_dir: RunDir, start: Callable[..., Process], tmp_path: Path
) -> None:
    process = start(tiny.flags(*model, tmp_path / "out", epochs=100000))
    wait_for(lambda: "step 2/" in output(run_dir), process)
    second = trainer(tiny.flags(*model, tmp_path / "out"))
    assert second.returncode == 2
    assert "another trainer is writing there" in second.stderr
    assert process.poll() is None


def test_a_save_that_fails_for_any_reason_is_said_and_tried_again(
    model: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_file = safetensors.torch.save_file

    def gone(*words: object, **more: object) -> None:
        monkeypatch.setattr(safetensors.torch, "save_file", save_file)
        raise ModuleNotFoundError("No module named 'numpy.ctypeslib'")

    monkeypatch.setattr(safetensors.torch, "save_file", gone)
    assert program.main(tiny.flags(*model, tmp_path / "out", save_interval=4)) == 0
    said = capsys.readouterr().out
    assert "warning: no checkpoint at step 4" in said
    assert "No module named 'numpy.ctypeslib'" in said
    assert "step-00000008" in said
    assert "finished at step 10" in said


@pytest.mark.slow
@pytest.mark.root
def test_a_full_disk_is_said_and_training_goes_on_to_a_code_that_tells(
    model: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    script = (
        'mount -t tmpfs -o size=1m none "$1" && head -c 1000k /dev/zero > "$1/ballast" && shift && exec "$@"'
    )
    flags = tiny.flags(*model, tmp_path / "out", save_interval=4)
    command = [
        "unshare",
        "-m",
        "sh",
        "-c",
        script,
        "sh",
        str(tmp_path / "out"),
        sys.executable,
        "-m",
        "trainer",
    ]
    ended = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1, ended.stderr
    assert "warning: no checkpoint at step 4" in ended.stdout
    assert ended.stdout.count("no checkpoint at step 10") == 1  # though it was tried again
    assert "No space left" in ended.stdout
    assert "step 10/10" in ended.stdout
    assert "Traceback" not in ended.stderr
