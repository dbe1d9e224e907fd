"""`fab weights.*` and `fab data.*`: pushed, listed, verified, evicted, and what is said when that cannot be.

Most of it in the network and mount namespace of this machine, but as on another host: what an sshd adds is
tested by test_push.py, and by the last test here.
"""

from __future__ import annotations

import dataclasses
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

from deploy import CHECKOUT, menu, sender, settings, weights_tasks
from deploy.errors import DeployError
from deploy.host import Local, NoPython
from deploy.remote_files import no_python
from deploy.ssh import Ssh
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


class Beside(Local):
    """This machine, taken for another one."""

    is_local = False


@pytest.fixture
def goal(tmp_path: Path) -> Iterator[Target]:
    """A host whose state and shared memory are empty."""
    for place in ("state", "shm"):
        (tmp_path / place).mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=755", "tmpfs", tmp_path / "shm"], check=True)
    (tmp_path / "fabric.yaml").write_text("drafthouse: {}")
    places = {"state": str(tmp_path / "state"), "shm": str(tmp_path / "shm")}
    project = settings.load_project(tmp_path)
    yield Target(project, settings.HostSettings(name="gpu-box", address="x", **places), Beside("gpu-box"))
    subprocess.run(["umount", tmp_path / "shm"], check=True)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "models" / "a model"
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "U8", "shape": [4096], "data_offsets": [0, 4096]}}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4096))
    return path


def fill(model: Path, version: int) -> None:
    header = json.dumps({"w": {"dtype": "U8", "shape": [600_000], "data_offsets": [0, 600_000]}}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes([version]) * 600_000
    (model / "model.safetensors").write_bytes(data)


def silent(text: str) -> None:
    pass


def push(goal: Target, directory: Path, kind: str = "weights", **more: Any) -> dict[str, Any]:
    return weights_tasks.push(goal, str(directory), kind, streams=1, progress=silent, **more)


def test_weights_are_pushed_listed_verified_and_evicted(
    goal: Target, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = push(goal, model)
    size = sum(path.stat().st_size for path in model.iterdir())
    version = f"a model@{done['digest'][:12]}"
    assert (done["path"], done["bytes"], done["sent"]) == (f"{goal.settings.shm}/{version}", size, size)
    again = push(goal, model)
    assert (again["path"], again["sent"], again["done"]) == (done["path"], 0, "there already")
    with monkeypatch.context() as patch:  # another push was faster, after we had looked
        known = weights_tasks._known
        patch.setattr(weights_tasks, "_known", lambda *words: ([], [], known(*words)[2]))
        late = push(goal, model)
    assert (late["sent"], late["done"]) == (0, "there already")
    assert weights_tasks.told(late, "box") == f"{done['path']} on box ({size / 1000:.1f} kB): there already"
    staged, kept = weights_tasks.listing(goal)
    assert (staged["where"], staged["linked"], staged["whole"]) == ("memory", True, True)
    assert staged["memory"] >= size
    assert (kept["path"], kept["memory"]) == (f"{goal.settings.state}/weights/{version}", 0)
    assert staged["digest"] == kept["digest"] == done["digest"]
    shown = weights_tasks.table([staged, kept], "gpu-box")
    assert shown.splitlines()[1].startswith(f"memory  {version} ←  ")
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
    assert os.listdir(str(goal.settings.shm)) == [".a model.lock"]
    assert push(goal, model)["sent"] == 0  # from the copy on disk
    assert weights_tasks.verify(goal, "a model", silent)[0][1] == []


def test_weights_that_a_process_uses_are_not_evicted(goal: Target, model: Path, tmp_path: Path) -> None:
    """One has a file open; one has it mapped, at another path, as a process in a container does."""
    fill(model, 1)
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
        fill(model, 2)  # both do not fit in together
        with pytest.raises(DeployError) as caught:
            push(goal, model)
        assert str(caught.value).startswith(f"{goal.settings.shm} has ")
        assert " free, but the weights need 600 kB: " in str(caught.value)
        used = f"; {done['path']} is used by 2 processes: stop what runs there first (fab status, fab stop); "
        assert used in str(caught.value)
        spare = tmp_path / "shm" / "a model@ffffffffffff"  # may go, but is not enough
        spare.mkdir()
        (spare / "x").write_bytes(bytes(9000))
        with pytest.raises(DeployError) as caught:
            push(goal, model, evict_first=True)
        assert f"{used}nothing was evicted, since all that may go is not enough; " in str(caught.value)
        assert (spare / "x").is_file()
        assert Path(done["path"], "model.safetensors").is_file()
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()
    with pytest.raises(DeployError, match=r"too little; --evict-first removes a model@.* before; fab weig"):
        push(goal, model)
    newest = push(goal, model, evict_first=True)
    there = [one["path"] for one in weights_tasks.listing(goal) if one["where"] == "memory"]
    assert there == [newest["path"], str(spare)]  # no more than needed


def test_data_go_to_the_disk(goal: Target, tmp_path: Path) -> None:
    data = tmp_path / "mine"
    data.mkdir()
    (data / "a.arrow").write_bytes(b"x" * 999)
    done = push(goal, data, "data")
    assert Path(done["path"], "a.arrow").read_bytes() == b"x" * 999
    assert Path(done["path"]).parent == Path(str(goal.settings.state), "data")
    assert push(goal, data, "data")["sent"] == 0
    there = tmp_path / "there"
    shutil.copytree(data, there)
    staged = weights_tasks.stage(goal, str(there), "data", progress=silent)
    assert (staged["done"], staged["bytes"]) == ("copied", 999)
    again = weights_tasks.stage(goal, str(there), "data", progress=silent)
    assert again == {**staged, "done": "there already"}
    with pytest.raises(DeployError, match="data /no/thing are no directory; name one on this host"):
        weights_tasks.stage(goal, "/no/thing", "data", progress=silent)


def test_what_cannot_be_done_is_one_sentence(goal: Target, model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DeployError, match=rf"^weights {tmp_path}: config\.json is missing; copy the model ag"
    ):
        push(goal, tmp_path)
    with pytest.raises(DeployError, match=r"^weights /no/model do not exist; name another$"):
        push(goal, Path("/no/model"))
    with pytest.raises(DeployError, match=r"^--streams 99 must be from 1 to 16$"):
        weights_tasks.push(goal, str(model), "weights", streams=99, progress=silent)
    for word in ("x", "0", "60", "9" * 50):
        with pytest.raises(
            DeployError, match=rf"^--streams {word[:40]} must be a whole number from 1 to 16$"
        ):
            menu.whole("--streams", word, sender.MOST)
    with pytest.raises(DeployError, match=r"^\.\./etc is not among the copies on gpu-box, which fab weigh"):
        weights_tasks.evict(goal, "../etc", silent)
    with pytest.raises(DeployError, match=r"^/etc/x is no copy in /etc; fab weights\.list shows what is th"):
        weights_tasks._evict(goal, {"path": "/etc/x"}, silent)
    assert os.listdir(str(goal.settings.shm)) == []
    said: list[str] = []
    os.chmod(str(goal.settings.shm), 0o777)
    with pytest.raises(DeployError, match=f"^gpu-box: every user can write to {goal.settings.shm}, and so"):
        weights_tasks.push(goal, str(model), "weights", progress=said.append)
    assert said == []  # nothing was read


def test_a_newline_in_a_name_breaks_no_line(goal: Target, model: Path) -> None:
    said: list[str] = []
    odd = model.rename(model.with_name("a\nmodel"))
    for more in ({"rsync": True}, {}):
        done = weights_tasks.push(goal, str(odd), "weights", progress=said.append, **more)
        said.append(weights_tasks.told(done, "gpu-box"))
    assert len(said) > 4
    assert [line for line in said if not line.isprintable()] == []


def test_a_host_without_python_gets_weights_by_rsync(goal: Target, model: Path) -> None:
    said: list[str] = []
    host = Ssh("gpu-box", python="python9")
    words = str(no_python(host))

    class Bare(Beside):
        def run(self, argv: Any, **options: Any) -> Any:
            if argv[0] == self.python:
                raise NoPython(words)
            return super().run(argv, **options)

    bare = dataclasses.replace(goal, host=Bare("gpu-box", "python9"))
    done = weights_tasks.push(bare, str(model), "weights", progress=said.append)
    assert said[0] == f"{words}; it goes by rsync this time, and no copy is kept on the disk there"
    assert done["done"] == "pushed by rsync"
    assert weights_tasks.listing(goal)[0]["whole"]
    assert push(goal, model)["sent"] == 0
    again = weights_tasks.push(goal, str(model), "weights", rsync=True, progress=silent)
    assert again == {**done, "sent": 0, "seconds": again["seconds"], "streams": 0, "done": "there already"}
    assert weights_tasks.told(again, "box") == f"{done['path']} on box (4.2 kB): there already"


def test_the_tasks_by_fab_over_ssh(gpubox: Any, model: Path, tmp_path: Path) -> None:
    project = gpubox.project(tmp_path / "project", runtime="process")
    environment = {
        **os.environ,
        **gpubox.environment,
        "PYTHONPATH": str(CHECKOUT),
        "PATH": f"{Path(FAB[0]).parent}:{os.environ['PATH']}",
    }

    def fab(*words: str) -> subprocess.CompletedProcess[str]:
        return call([*words, "--host", "gpu-box"], project, environment, timeout=120)

    try:
        done = fab("weights.push", str(model), "--streams", "2")
        assert done.returncode == 0, done.stderr
        assert f"{gpubox.shm}/a model@" in done.stdout
        assert "pushed, 4.2 kB sent in " in done.stdout
        assert "every byte read back there\n" in done.stdout
        assert "Traceback" not in done.stderr
        listed = json.loads(fab("weights.list", "--json").stdout)
        assert [(one["where"], one["whole"]) for one in listed] == [("memory", True), ("disk", True)]
    finally:
        for place in (gpubox.state, gpubox.shm):
            shutil.rmtree(place, ignore_errors=True)
        gpubox.state.mkdir()
