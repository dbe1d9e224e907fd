"""`fab weights.*` and `fab data.*` against a host with a real sshd: pushed, listed, verified, evicted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fabbed import FAB, call

from deploy import CHECKOUT, target, weights_tasks
from deploy.errors import DeployError
from deploy.target import Target

pytestmark = [pytest.mark.root, pytest.mark.sshd, pytest.mark.slow]

# Maps a file as safetensors does, or opens it, and says so.
HOLD = """\
import mmap, sys
file = open(sys.argv[1], "rb")
if sys.argv[2] == "mapped":
    held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    file.close()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def goal(gpubox: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    for key, value in gpubox.environment.items():
        monkeypatch.setenv(key, value)
    found = target.one("gpu-box", gpubox.project(tmp_path / "project", runtime="process"))
    yield found
    found.host.close()
    for place in (gpubox.state, gpubox.shm):
        shutil.rmtree(place, ignore_errors=True)
    gpubox.state.mkdir()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "models" / "a model"
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "U8", "shape": [4096], "data_offsets": [0, 4096]}}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4096))
    return path


def silent(text: str) -> None:
    pass


def push(goal: Target, directory: Path, kind: str = "weights", **more: Any) -> dict[str, Any]:
    return weights_tasks.push(goal, str(directory), kind, streams=1, progress=silent, **more)


def test_weights_are_pushed_listed_verified_and_evicted(goal: Target, gpubox: Any, model: Path) -> None:
    done = push(goal, model)
    size = sum(path.stat().st_size for path in model.iterdir())
    version = f"a model@{done['digest'][:12]}"
    assert (done["path"], done["bytes"], done["sent"]) == (f"{gpubox.shm}/{version}", size, size)
    again = push(goal, model)
    assert (again["path"], again["sent"], again["done"]) == (done["path"], 0, "there already")
    staged, kept = weights_tasks.listing(goal)
    assert (staged["where"], staged["linked"], staged["whole"]) == ("memory", True, True)
    assert staged["memory"] >= size
    assert (kept["path"], kept["memory"]) == (f"{gpubox.state}/weights/{version}", 0)
    assert staged["digest"] == kept["digest"] == done["digest"]
    shown = weights_tasks.table([staged, kept], "gpu-box")
    assert shown.splitlines()[1].startswith(f"memory  {version} ←  ")
    assert weights_tasks.verify(goal, None, silent) == [(done["path"], [])]
    file = Path(done["path"], "model.safetensors")
    file.chmod(0o644)
    with open(file, "r+b") as damaged:
        damaged.seek(-1, os.SEEK_END)
        damaged.write(b"?")
    ((path, problems),) = weights_tasks.verify(goal, done["path"], silent)
    assert (path, len(problems)) == (done["path"], 1)
    assert problems[0].startswith(f"{file} is damaged in bytes 0 to ")
    ((path, freed),) = weights_tasks.evict(goal, version, silent)
    assert path == done["path"]
    assert freed > size
    assert [one["where"] for one in weights_tasks.listing(goal)] == ["disk"]
    assert os.listdir(gpubox.shm) == [".a model.lock"]
    assert push(goal, model)["sent"] == 0  # from the copy on disk
    assert weights_tasks.verify(goal, "a model", silent)[0][1] == []


def test_weights_that_a_process_uses_are_not_evicted(
    goal: Target, gpubox: Any, model: Path, tmp_path: Path
) -> None:
    """One has a file open; one has it mapped, at another path, as a process in a container does."""
    done = push(goal, model)
    inside = tmp_path / "inside"
    inside.mkdir()
    mount = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
    elsewhere = ["unshare", "-m", "sh", "-c", mount, "sh", done["path"], inside]
    hold = [sys.executable, "-c", HOLD]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    holders = [
        subprocess.Popen([*elsewhere, *hold, inside / "model.safetensors", "mapped"], **pipes),
        subprocess.Popen([*hold, f"{done['path']}/config.json", "open"], **pipes),
    ]
    try:
        assert [holder.stdout and holder.stdout.readline() for holder in holders] == [b"held\n"] * 2
        assert weights_tasks.listing(goal)[0]["processes"] == sorted(holder.pid for holder in holders)
        (model / "config.json").write_text('{"a": 1}')
        with pytest.raises(DeployError, match=f"^{done['path']} is used by process .*; stop what runs there"):
            push(goal, model, evict_first=True)
        for holder in holders:
            with pytest.raises(DeployError, match=rf"is used by .*process {holder.pid} \("):
                weights_tasks.evict(goal, done["path"], silent)
            holder.communicate()
        assert Path(done["path"], "model.safetensors").is_file()
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()
    newest = push(goal, model, evict_first=True)
    assert [one["path"] for one in weights_tasks.listing(goal) if one["where"] == "memory"] == [
        newest["path"]
    ]


def test_data_go_to_the_disk(goal: Target, gpubox: Any, tmp_path: Path) -> None:
    data = tmp_path / "mine"
    data.mkdir()
    (data / "a.arrow").write_bytes(b"x" * 999)
    done = push(goal, data, "data")
    assert Path(done["path"], "a.arrow").read_bytes() == b"x" * 999
    assert Path(done["path"]).parent == gpubox.state / "data"
    assert push(goal, data, "data")["sent"] == 0
    there = gpubox.home / "there"
    shutil.copytree(data, there)
    staged = weights_tasks.stage(goal, "/root/there", "data", progress=silent)
    assert (staged["done"], staged["bytes"]) == ("copied", 999)
    again = weights_tasks.stage(goal, "/root/there", "data", progress=silent)
    assert again == {**staged, "done": "there already"}
    with pytest.raises(DeployError, match="data /root/nothing are no directory; name one on this host"):
        weights_tasks.stage(goal, "/root/nothing", "data", progress=silent)


def test_the_tasks_by_fab(goal: Target, gpubox: Any, model: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        **gpubox.environment,
        "PYTHONPATH": str(CHECKOUT),
        "PATH": f"{Path(FAB[0]).parent}:{os.environ['PATH']}",
    }

    def fab(*words: str) -> subprocess.CompletedProcess[str]:
        return call([*words, "--host", "gpu-box"], tmp_path / "project", environment, timeout=120)

    done = fab("weights.push", str(model), "--streams", "2")
    assert done.returncode == 0, done.stderr
    assert f"{gpubox.shm}/a model@" in done.stdout
    assert "pushed, 4.2 kB sent in " in done.stdout
    assert "every byte read back there\n" in done.stdout
    assert "Traceback" not in done.stderr
    wrong = fab("weights.push", str(tmp_path))
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert wrong.stderr.splitlines()[0] == f"weights {tmp_path}: config.json is missing; copy the model again"
    assert fab("weights.push", str(model), "--streams", "99").returncode == 2
    listed = json.loads(fab("weights.list", "--json").stdout)
    assert [one["where"] for one in listed] == ["memory", "disk"]
    assert [one["whole"] for one in listed] == [True, True]
