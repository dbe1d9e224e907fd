"""A deploy to another machine, by real SSH and without an engine: sshd allows two sessions at once, no more.

The box is a network and mount namespace of this machine, so its runs' files can be looked at from here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deployed import CHECKOUT, Place, until
from fabbed import FAB, begin, call

from deploy import actions, execute, logs, manifest, ssh, switch, target
from trainer import status

pytestmark = [pytest.mark.root, pytest.mark.sshd, pytest.mark.slow]

COUNTING = """\
command:
- python3
- -c
- |
  import itertools, os, time
  print("weights", os.environ.get("DRAFTHOUSE_WEIGHTS"), "data", os.environ.get("DRAFTHOUSE_DATA"))
  print("secret", os.environ.get("TOKEN"), "level", os.environ["LEVEL"], flush=True)
  for number in itertools.count():
      print("line", number, flush=True)
      time.sleep(0.02)
environment:
  LEVEL: "one ; $(id) 'two'"
grace_seconds: 5
settle_seconds: 0
"""


class Remote:
    """A project of this machine whose host is the box."""

    def __init__(self, box: Any, root: Path) -> None:
        self.box = box
        self.root = root
        self.place = Place(box.state)

    def file(self, text: str, stem: str = "demo") -> None:
        (self.root / "runs" / f"{stem}.yaml").write_text(text)

    def environment(self, **more: str) -> dict[str, str]:
        own = {
            "PYTHONPATH": str(CHECKOUT),
            "PATH": f"{Path(FAB[0]).parent}:{os.environ['PATH']}",
            "HOME": str(self.root),
            "DRAFTHOUSE_BOOT": "no",  # the box has this machine's cron
            **self.box.environment,
        }
        return {**os.environ, **own, **more}

    def run(self, *words: str, host: str = "gpu-box", **more: str) -> subprocess.CompletedProcess[str]:
        return call([*words, "--host", host], self.root, self.environment(**more), timeout=180)

    def ok(self, *words: str, host: str = "gpu-box", **more: str) -> str:
        done = self.run(*words, host=host, **more)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @property
    def runs(self) -> list[status.RunDir]:
        return status.list_runs(self.box.state / "runs")

    def log(self, run: status.RunDir) -> str:
        return "".join(path.read_text() for path in sorted(run.log.glob("*.log")))


@pytest.fixture
def remote(gpubox: Any, tmp_path: Path) -> Iterator[Remote]:
    made = Remote(gpubox, gpubox.project(tmp_path / "project", runtime="process"))
    made.file(COUNTING)
    try:
        yield made
    finally:
        made.place.end_all()
        for place in (gpubox.state, gpubox.shm):
            shutil.rmtree(place, ignore_errors=True)
        gpubox.state.mkdir()


def model(path: Path, payload: bytes = b"\x01" * 4096) -> Path:
    """A model directory that passes the checks."""
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "U8", "shape": [4096], "data_offsets": [0, len(payload)]}})
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode() + payload)
    return path


# -- the life of a run -------------------------------------------------------------------------------------


def test_a_run_is_planned_deployed_left_alone_changed_and_stopped_there(remote: Remote) -> None:
    remote.file(COUNTING + "secrets: {TOKEN: {env: MINE}}\n")
    before = sorted(remote.box.state.iterdir())
    planned = remote.ok("plan", MINE="hunter2")
    assert sorted(remote.box.state.iterdir()) == before
    assert remote.ok("deploy", "--no-follow", MINE="hunter2").startswith(planned)
    first = remote.runs[0]
    until(lambda: "line 3" in remote.log(first))
    assert "secret hunter2 level one ; $(id) 'two'\n" in remote.log(first)
    assert first.alive()
    made = first.run()
    assert made
    assert made.origin == os.uname().nodename
    assert "hunter2" not in (first.path / "run.json").read_text()
    assert os.stat(str(made.secrets_file)).st_mode & 0o777 == 0o400

    again = remote.ok("deploy", "--no-follow", MINE="hunter2")
    assert again.startswith(f"unchanged: 0001-demo runs release {made.release['id']} on gpu-box")
    assert [run.path.name for run in remote.runs] == ["0001-demo"]

    done = remote.ok("restart", "--no-follow", "--set", "environment.LEVEL=three", MINE="hunter2")
    assert "environment.LEVEL: \"one ; $(id) 'two'\" → three" in done
    until(lambda: "level three\n" in remote.log(remote.runs[1]))
    assert not first.alive()
    remote.ok("stop")
    assert not remote.runs[1].alive()


def test_an_unchanged_deploy_asks_the_host_twice(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """60 ms away each question costs a quarter of a second, and 2 s is all that there is."""
    remote.ok("deploy", "--no-follow")
    monkeypatch.setenv("DRAFTHOUSE_SSH_CONFIG", str(remote.box.ssh_config))
    asked: list[str] = []
    run = ssh.Ssh.run

    def counted(self: ssh.Ssh, argv: Any, **more: Any) -> Any:
        asked.append(argv[0])
        return run(self, argv, **more)

    monkeypatch.setattr(ssh.Ssh, "run", counted)
    goal = target.one("gpu-box", remote.root)
    made, _ = actions.plan_deploy("deploy", goal, actions.recipe(goal, None, None))
    goal.host.close()
    assert made.action == "unchanged"
    assert len(asked) == 2


# -- weights and data --------------------------------------------------------------------------------------


def test_weights_and_data_of_this_machine_are_pushed_once(remote: Remote, tmp_path: Path) -> None:
    weights, data = model(tmp_path / "models" / "small"), tmp_path / "data" / "mine"
    data.mkdir(parents=True)
    (data / "a.jsonl").write_text("{}\n")
    remote.file(COUNTING + f"weights: {weights}\ndata: {data}\n")
    shown = remote.ok("deploy", "--no-follow")
    digest = manifest.tree_digest(weights)[:12]
    kept, staged = remote.box.state / "weights" / f"small@{digest}", remote.box.shm / f"small@{digest}"
    assert f"push {weights} " in shown
    assert f" of this machine to {staged}, and keep a copy in {kept}\n" in shown
    for place in (kept, staged, remote.box.shm / "small"):
        assert (place / "model.safetensors").read_bytes() == (weights / "model.safetensors").read_bytes()
    data_there = remote.box.state / "data" / f"mine@{manifest.tree_digest(data)[:12]}"
    assert (data_there / "a.jsonl").read_text() == "{}\n"
    until(lambda: f"weights {staged} data {data_there}\n" in remote.log(remote.runs[0]))
    boot = json.loads((remote.runs[0].path / "boot.json").read_text())
    assert boot["weights"] == {
        "source": str(kept),
        "path": str(staged),
        "digest": manifest.tree_digest(weights),
    }
    assert remote.ok("deploy", "--no-follow").startswith("unchanged: ")


def test_weights_that_lie_on_the_host_are_staged_from_there(remote: Remote) -> None:
    """/root is the box's own: what is in there does not exist here."""
    there = remote.box.home / "models" / "other"
    model(there)
    remote.file(COUNTING + "weights: /root/models/other\n")
    shown = remote.ok("deploy", "--no-follow")
    digest = manifest.tree_digest(there)[:12]
    assert f"copy /root/models/other (4.2 kB) to {remote.box.shm}/other@{digest}\n" in shown
    assert not (remote.box.state / "weights").exists()
    until(lambda: f"weights {remote.box.shm}/other@{digest} " in remote.log(remote.runs[0]))


def test_weights_that_are_nowhere_are_one_sentence(remote: Remote) -> None:
    remote.file(COUNTING + "weights: /no/such/model\n")
    done = remote.run("deploy", "--no-follow")
    assert done.returncode == 1
    assert done.stderr == "weights /no/such/model do not exist; correct weights: in the run's file\n"


# -- the log -----------------------------------------------------------------------------------------------


class Tail:
    """`logs.follow_name` in a thread, over a connection that may be cut."""

    def __init__(self, remote: Remote, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DRAFTHOUSE_SSH_CONFIG", str(remote.box.ssh_config))
        self.host = ssh.Ssh(host)
        self.notes: list[str] = []
        self.code: list[int | None] = []
        self.file = open(remote.root / "out", "wb")  # noqa: SIM115
        self.path = remote.root / "out"
        self.thread = threading.Thread(target=self._follow, args=(str(remote.box.state),), daemon=True)
        self.thread.start()

    def _follow(self, state: str) -> None:
        self.code.append(logs.follow_name(self.host, state, "demo", out=self.file, note=self.notes.append))
        self.file.close()

    def text(self) -> str:
        return self.path.read_text()

    def end(self) -> int | None:
        self.thread.join(120)
        assert not self.thread.is_alive(), "the tail did not end"
        self.host.close()
        return self.code[0]


def test_a_tail_goes_on_at_the_byte_where_its_connection_was_lost(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.ok("deploy", "--no-follow")
    tail = Tail(remote, "gpu-box", monkeypatch)
    for count in range(1, 4):
        size = len(tail.text())
        until(lambda size=size: len(tail.text()) > size)
        master = tail.host._master
        assert master
        os.kill(master._process.pid, signal.SIGKILL)
        until(lambda count=count: len(tail.notes) == 2 * count)
    until(lambda: "line 120\n" in tail.text())
    remote.ok("stop")
    assert tail.end() == remote.runs[0].exit().code
    assert tail.text() == remote.log(remote.runs[0])
    for lost, back in zip(tail.notes[::2], tail.notes[1::2], strict=True):
        assert lost == "── gpu-box: the connection was lost, reconnecting"
        assert re.fullmatch(r"── gpu-box: connected again after \d+ s", back)
    assert len(tail.notes) == 6


def test_a_tail_notices_a_dead_network_and_goes_on_when_it_is_back(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASES 6: nothing is refused and nothing ends; bytes just do not arrive any more."""
    remote.ok("deploy", "--no-follow")
    tail = Tail(remote, "slow-box", monkeypatch)
    until(lambda: "line 5\n" in tail.text())
    remote.box.link.cut()
    try:
        until(lambda: tail.notes)
        assert re.fullmatch(r"── slow-box: no data for 10 s, reconnecting", tail.notes[0])
    finally:
        remote.box.link.mend()
    newest = len(remote.log(remote.runs[0]))
    until(lambda: len(tail.text()) > newest)
    remote.ok("stop")
    tail.end()
    assert tail.text() == remote.log(remote.runs[0])
    gap = re.fullmatch(r"── slow-box: connected again after (\d+) s", tail.notes[1])
    assert gap
    assert int(gap[1]) >= 10  # so long nothing came before it counted as lost


def test_a_tail_goes_over_to_the_next_run_there(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    remote.ok("deploy", "--no-follow")
    tail = Tail(remote, "gpu-box", monkeypatch)
    until(lambda: "line 5\n" in tail.text())
    remote.ok("restart", "--no-follow", "--set", "environment.LEVEL=two")
    until(lambda: "level two\n" in tail.text())
    remote.ok("stop")
    tail.end()
    assert tail.text() == remote.log(remote.runs[0]) + remote.log(remote.runs[1])
    assert any("0002-demo follows" in note for note in tail.notes)


def test_ctrl_c_in_a_tail_ends_it_and_its_reader_there_and_nothing_else(remote: Remote) -> None:
    """CASES 4 and 5."""
    remote.ok("deploy", "--no-follow")
    before = len(remote.box.pids())
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    tail = begin(["tail", "--host", "gpu-box"], remote.root, remote.environment(), **pipes)
    assert tail.stdout
    until(lambda: "line" in tail.stdout.readline())
    tail.send_signal(signal.SIGINT)
    _, errors = tail.communicate(timeout=60)
    assert (tail.returncode, "Traceback" in errors) == (130, False)
    assert remote.runs[0].alive()
    until(lambda: len(remote.box.pids()) <= before)


# -- a full disk -------------------------------------------------------------------------------------------


def test_a_run_is_stopped_there_although_the_disk_is_full(gpubox: Any, tmp_path: Path) -> None:
    state = Path(tempfile.mkdtemp(prefix="full-", dir=gpubox.directory))
    inside = ["nsenter", f"--mount=/proc/{gpubox.pids()[0]}/ns/mnt"]
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(state)]
    subprocess.run([*inside, *mount], check=True)
    remote = Remote(gpubox, gpubox.project(tmp_path / "project", runtime="process", state=str(state)))
    remote.file(COUNTING)
    try:
        remote.ok("deploy", "--no-follow")
        fill = f"head -c 1G /dev/zero > {state}/fill; df --output=avail {state} | tail -1"
        done = subprocess.run([*inside, "sh", "-c", fill], capture_output=True, text=True, check=False)
        assert done.stdout.strip() == "0"
        remote.ok("stop")
        shown = remote.ok("runs")
        assert "stopped" in shown, shown
    finally:
        remote.run("stop")
        subprocess.run([*inside, "umount", "-l", str(state)], check=True)


# -- clients that are lost ---------------------------------------------------------------------------------


def test_a_deploy_whose_client_is_killed_in_the_push_starts_nothing_and_the_next_one_is_whole(
    remote: Remote, tmp_path: Path
) -> None:
    weights = model(tmp_path / "models" / "large", os.urandom(1 << 20) * 150)
    remote.file(COUNTING + f"weights: {weights}\n")
    place = remote.box.state / "weights"
    words = ["deploy", "--no-follow", "--host", "slow-box"]
    client = begin(words, remote.root, remote.environment(), start_new_session=True)
    until(lambda: list(remote.box.shm.glob(".large.incoming.*/model.safetensors")))
    os.killpg(client.pid, signal.SIGKILL)
    client.wait()
    assert not [*remote.box.shm.glob("large@*"), *place.glob("large@*")]
    assert remote.runs == []
    remote.ok("deploy", "--no-follow")
    for copy in (*remote.box.shm.glob("large@*"), *place.glob("large@*")):
        assert (copy / "model.safetensors").read_bytes() == (weights / "model.safetensors").read_bytes()
    assert not list(remote.box.shm.glob(".large.incoming.*"))


def test_a_switch_goes_on_and_is_watched_again_after_a_lost_link(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that says nothing counts as started once it has lived for a while: time to lose the link."""
    remote.file("command: [sleep, '1000']\n")
    monkeypatch.setenv("DRAFTHOUSE_SSH_CONFIG", str(remote.box.ssh_config))
    monkeypatch.setenv("DRAFTHOUSE_BOOT", "no")
    goal = target.one("gpu-box", remote.root)
    made, work = actions.plan_deploy("deploy", goal, actions.recipe(goal, None, None))
    _, record = execute.start(made, goal.host, work, lambda text: None)
    notes: list[str] = []

    def cut(step: dict[str, Any]) -> None:
        if step["name"] == "first-heartbeat" and not notes:
            os.kill(goal.host._master._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]

    outcome = switch.watch(goal.host, record, cut, notes.append)
    goal.host.close()
    assert outcome.word == "done"
    lost, back = notes
    assert lost == "── gpu-box: the connection was lost, reconnecting"
    assert back.startswith("── gpu-box: connected again after ")
