"""Checkpoints: whole or not at all, the newest valid one wins, and only one trainer writes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch

from trainer import checkpoint
from trainer.__main__ import main
from trainer.checkpoint import SaveError, State, newest, output_directory, save
from trainer.errors import InputError


def state(step: int, run_id: str = "0001-x", **changes: object) -> State:
    chosen = {"micro_batch": step, "epoch": 0, "total": 100, "settings": {}, **changes}
    return State(step=step, run_id=run_id, **chosen)  # type: ignore[arg-type]


def store(output: Path, step: int, run_id: str = "0001-x", keep: int = 10, **changes: object) -> Path:
    tensors = {"a": torch.full((100,), float(step))}
    return save(output, state(step, run_id, **changes), tensors, tensors, {"block_size": 4}, keep)


def step_of(output: Path, said: list[str] | None = None) -> int | None:
    found = newest(output, (said if said is not None else []).append)
    return found.state.step if found else None


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = store(tmp_path, 120, results={"before": [1]})
    assert path == tmp_path / "0001-x" / "step-00000120"
    assert sorted(p.name for p in path.iterdir()) == [
        "config.json",
        "drafter.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    found = newest(tmp_path, print)
    assert found is not None
    assert found.state == state(120, results={"before": [1]}, sequence=1, digests=found.state.digests)
    assert sorted(found.state.digests) == ["config.json", "drafter.safetensors", "optimizer.safetensors"]
    assert torch.equal(checkpoint.load(found)[0]["a"], torch.full((100,), 120.0))
    assert checkpoint.read_config(found) == {"block_size": 4}
    assert os.readlink(tmp_path / "latest") == "0001-x/step-00000120"
    (tmp_path / "any").touch()
    assert {file.stat().st_mode for file in path.iterdir()} == {(tmp_path / "any").stat().st_mode}


def test_the_newest_is_the_one_saved_last_not_the_one_with_most_steps(tmp_path: Path) -> None:
    store(tmp_path, 600, "local", finished=True)
    store(tmp_path, 20, "local")
    assert step_of(tmp_path) == 20
    store(tmp_path, 10, "0002-x")
    assert step_of(tmp_path) == 10
    assert (tmp_path / "latest").resolve() == tmp_path / "0002-x" / "step-00000010"


def test_only_the_newest_of_a_run_are_kept(tmp_path: Path) -> None:
    store(tmp_path, 5, "0001-x")
    for step in (10, 20, 30, 40):
        store(tmp_path, step, "0002-x", keep=2)
    assert sorted(p.name for p in (tmp_path / "0002-x").iterdir()) == ["step-00000030", "step-00000040"]
    assert (tmp_path / "0001-x" / "step-00000005").exists()


def test_those_of_every_mth_step_are_kept_beside_the_newest(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        tensors = {"a": torch.zeros(3)}
        save(tmp_path, state(step), tensors, tensors, {}, keep=1, keep_every=20)
    names = sorted(p.name for p in (tmp_path / "0001-x").iterdir())
    assert names == ["step-00000020", "step-00000040", "step-00000050"]


def test_a_checkpoint_from_before_there_were_digests_is_still_whole(tmp_path: Path) -> None:
    file = store(tmp_path, 10) / "state.json"
    value = json.loads(file.read_text())
    del value["digests"]
    file.write_text(json.dumps(value))
    assert step_of(tmp_path) == 10


def test_saving_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    store(tmp_path, 20)
    store(tmp_path, 20, epoch=3)
    found = newest(tmp_path, print)
    assert found is not None
    assert found.state.epoch == 3
    assert [p.name for p in (tmp_path / "0001-x").iterdir()] == ["step-00000020"]


def test_a_checkpoint_that_made_room_for_one_that_never_came_is_put_back(tmp_path: Path) -> None:
    """A kill between the two renames of a save at a step that had a checkpoint."""
    place = store(tmp_path, 20, keep=1)
    place.rename(place.with_name(".partial-old-step-00000020"))
    place.with_name(".partial-step-00000020").mkdir()
    with output_directory(tmp_path):
        assert step_of(tmp_path) == 20
        assert [p.name for p in place.parent.iterdir()] == ["step-00000020"]
    (place.parent / ".partial-old-step-00000020").mkdir()  # killed after both: the old one is superfluous
    with output_directory(tmp_path):
        assert step_of(tmp_path) == 20
        assert [p.name for p in place.parent.iterdir()] == ["step-00000020"]


def test_a_save_that_fails_between_its_renames_leaves_the_checkpoint_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(tmp_path, 20, epoch=2)
    rename = Path.rename

    def full(self: Path, goal: Path) -> Path:
        if self.name == ".partial-step-00000020":
            raise OSError(28, "No space left on device")
        return rename(self, goal)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", full)
        with pytest.raises(SaveError, match="No space left"):
            store(tmp_path, 20, epoch=3)
    found = newest(tmp_path, print)
    assert found is not None
    assert found.state.epoch == 2


@pytest.mark.slow
def test_a_save_imports_nothing_that_was_not_there_before_the_first_step(tmp_path: Path) -> None:
    """Packages that are replaced or removed under a run cost it no checkpoint."""
    script = (
        "import sys, torch; from pathlib import Path; from trainer import checkpoint\n"
        "checkpoint.get_ready(); before = set(sys.modules)\n"
        "state = checkpoint.State(step=7, micro_batch=7, epoch=0, total=9, run_id='0001-x', settings={})\n"
        "checkpoint.save(Path(sys.argv[1]), state, {'a': torch.zeros(2)}, {'b': torch.ones(2)}, {}, 2)\n"
        "print(sorted(set(sys.modules) - before))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert (ended.stdout, ended.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    ("file", "how"),
    [
        ("drafter.safetensors", "cut"),
        ("optimizer.safetensors", "cut"),
        ("drafter.safetensors", "gone"),
        ("state.json", "cut"),
        ("state.json", "gone"),
        ("drafter.safetensors", "empty"),
        ("config.json", "gone"),
        ("config.json", "cut"),
        ("state.json", "empty"),
        ("drafter.safetensors", "flipped"),
        ("optimizer.safetensors", "flipped"),
        ("config.json", "flipped"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_loudly(tmp_path: Path, file: str, how: str) -> None:
    store(tmp_path, 10)
    broken = store(tmp_path, 20) / file
    content = broken.read_bytes()
    broken.write_bytes(content[: len(content) // 2] if how == "cut" else b"")
    if how == "flipped":  # one bit of the last number: the size, the header and the JSON are as they were
        place = len(content) - (4 if file == "config.json" else 1)
        broken.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    if how == "gone":
        broken.unlink()
    said: list[str] = []
    assert step_of(tmp_path, said) == 10
    assert len(said) == 1
    assert "step-00000020" in said[0]
    assert "damaged" in said[0]


STATE = '{"step": 20, "micro_batch": 1, "epoch": 0, "total": 9, "run_id": "x", "settings": {}}'


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("state.json", "[]"),
        ("state.json", '{"step": 20}'),
        ("state.json", STATE.replace("20", '"abc"')),
        ("state.json", STATE.replace("}}", '}, "rng": "zz"}')),
        ("config.json", "[]"),
    ],
)
def test_a_checkpoint_with_foreign_values_is_passed_over_loudly(tmp_path: Path, file: str, text: str) -> None:
    store(tmp_path, 10)
    (store(tmp_path, 20) / file).write_text(text)
    said: list[str] = []
    assert step_of(tmp_path, said) == 10
    assert "damaged" in said[0]
    assert file in said[0]


def test_nothing_valid_is_nothing(tmp_path: Path) -> None:
    assert step_of(tmp_path) is None
    (store(tmp_path, 20) / "drafter.safetensors").write_bytes(b"x")
    assert step_of(tmp_path) is None


DIES = """
import os, signal, sys, torch
from pathlib import Path
from trainer import checkpoint
moment, output = sys.argv[1], Path(sys.argv[2])
def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
def after(what):
    def wrapped(*a, **k):
        what(*a, **k); die()
    return wrapped
import safetensors.torch
if moment == "after the first file": safetensors.torch.save_file = after(safetensors.torch.save_file)
if moment == "before the rename": Path.rename = die
if moment == "after the rename": Path.rename = after(Path.rename)
if moment == "before latest": checkpoint._point = die
tensors = {"a": torch.ones(100)}
state = checkpoint.State(step=20, micro_batch=20, epoch=0, total=100, run_id="0001-x", settings={})
with checkpoint.output_directory(output):
    checkpoint.save(output, state, tensors, tensors, {"block_size": 4}, 10)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "survives"),
    [
        ("after the first file", 10),
        ("before the rename", 10),
        ("after the rename", 20),
        ("before latest", 20),
    ],
)
def test_kill_in_the_middle_of_a_save_leaves_a_valid_checkpoint(
    tmp_path: Path, moment: str, survives: int
) -> None:
    store(tmp_path, 10)
    ended = subprocess.run([sys.executable, "-c", DIES, moment, str(tmp_path)], timeout=120)
    assert ended.returncode == -signal.SIGKILL
    with output_directory(tmp_path):
        said: list[str] = []
        assert step_of(tmp_path, said) == survives
        assert said == []
        assert not list(tmp_path.glob("*/.partial*"))
        assert (tmp_path / "latest" / "state.json").exists()
        store(tmp_path, 30)
        assert step_of(tmp_path) == 30


FULL = """
import sys, torch
from pathlib import Path
from trainer import checkpoint
output = Path(sys.argv[1])
def store(step, size):
    tensors = {"a": torch.ones(size)}
    state = checkpoint.State(step=step, micro_batch=step, epoch=0, total=100, run_id="0001-x", settings={})
    return checkpoint.save(output, state, tensors, tensors, {"block_size": 4}, 10)
store(10, 1000)
try:
    store(20, 1_000_000)
except checkpoint.SaveError as error:
    print("SaveError", error)
print(checkpoint.newest(output, print).state.step, *sorted(p.name for p in (output / "0001-x").iterdir()))
print(checkpoint.newest(output, print).state.step if store(30, 1000) else None)
"""


@pytest.mark.slow
@pytest.mark.root
def test_a_full_disk_keeps_the_checkpoint_before_and_says_so(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=1m none "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "-m", "sh", "-c", script, "sh", str(tmp_path), sys.executable, FULL]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    failed, kept, then = ended.stdout.splitlines()
    assert failed.startswith("SaveError no checkpoint at step 20")
    assert "No space left" in failed
    assert kept == "10 step-00000010"
    assert then == "30"


def test_one_trainer_at_a_time_writes_into_a_directory(tmp_path: Path) -> None:
    with (
        output_directory(tmp_path / "out"),
        pytest.raises(InputError, match="another trainer is writing there"),
        output_directory(tmp_path / "out"),
    ):
        pass
    with output_directory(tmp_path / "out"):
        pass


def test_several_processes_are_refused_there_before_any_of_them_is_started(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = tiny.target_directory(tmp_path / "target")
    flags = tiny.flags(target, tiny.data_directory(tmp_path / "data", target), tmp_path / "out")
    with output_directory(tmp_path / "out"):
        assert main([*flags, "--target-gpus", "cpu:0", "--drafter-gpus", "cpu:1"]) == 2
    said = capfd.readouterr()
    assert f"error: --output-dir {tmp_path}/out: another trainer is writing there" in said.err
    assert "rank" not in said.out + said.err


def test_a_start_that_is_refused_leaves_no_directory_behind(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "notes").write_text("mine")
    for place in ("new/deep/out", "old/out"):
        with contextlib.suppress(InputError), output_directory(tmp_path / place):
            assert (tmp_path / place / ".lock").exists()
            raise InputError("no")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["notes", "old"]
    with output_directory(tmp_path / "new" / "out") as output:
        store(output, 10)
    assert (tmp_path / "new" / "out" / ".lock").exists()


def test_a_lock_that_was_removed_while_it_was_taken_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = checkpoint.fcntl.flock

    def late(lock: object, how: int) -> None:
        monkeypatch.setattr(checkpoint.fcntl, "flock", flock)
        (tmp_path / "out" / ".lock").unlink()  # by a trainer that was refused
        (tmp_path / "out").rmdir()
        flock(lock, how)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint.fcntl, "flock", late)
    with output_directory(tmp_path / "out") as output:
        assert (output / ".lock").exists()
        with pytest.raises(InputError, match="another trainer"), output_directory(output):
            pass


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="--output-dir"), output_directory(tmp_path / "file" / "out"):
        pass


def test_a_state_that_cannot_be_finished_says_so(tmp_path: Path) -> None:
    store(tmp_path, 10)
    found = newest(tmp_path, print)
    assert found is not None
    found.state.finished = True
    checkpoint.finish(found)
    again = newest(tmp_path, print)
    assert again is not None
    assert again.state.finished
    with pytest.raises(SaveError):
        checkpoint.finish(checkpoint.Found(tmp_path / "nowhere", found.state))
