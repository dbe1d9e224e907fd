"""The tasks in a container that somebody has on a Proxmox host: nothing of it is replaced."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml
from deployed import until
from fabbed import COUNTING, FAB
from far import Far
from testbed.gpubox import ALIAS
from testbed.pct.box import PveBox
from testbed.pct.container import Container

from trainer import status

pytestmark = [pytest.mark.pve, pytest.mark.slow]

HERE = ("--host", ALIAS)
# Maps its weights as safetensors does, and says where they lie and how many bytes they have.
WEIGHED = """\
weights: {model}
command:
- python3
- -c
- |
  import mmap, os, time
  path = os.path.join(os.environ["DRAFTHOUSE_WEIGHTS"], "model.safetensors")
  with open(path, "rb") as file:
      held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
  print("weights", os.path.realpath(path), len(held), flush=True)
  while True:
      time.sleep(0.05)
grace_seconds: 5
settle_seconds: 0
"""
COUNTED = COUNTING.replace("- python\n", "- python3\n")


class Adopted(Far):
    """A project whose host is a container of the box."""

    def __init__(self, box: PveBox, container: Container, root: Path, **settings: Any) -> None:
        self.container = container
        inside = {"container": int(container.vmid), "state": "/var/lib/drafthouse", "python": "python3"}
        super().__init__(box, root, runtime="pct", shm="/dev/shm/drafthouse", **{**inside, **settings})
        self.state = container.files / "var/lib/drafthouse"

    def file(self, text: str, stem: str = "demo") -> None:
        (self.root / "runs" / f"{stem}.yaml").write_text(text)

    def log(self, number: int = -1) -> str:
        return "".join(path.read_text() for path in sorted(self.runs[number].log.glob("*.log")))

    def exit(self, number: int) -> status.Exit:
        found = self.runs[number].exit()
        assert found
        return found


@pytest.fixture(scope="module")
def plain(pve_box: PveBox) -> Container:
    """Unprivileged, as Proxmox makes them; its init is none that could start anything."""
    return pve_box.container(200)


@pytest.fixture
def train(pve_box: PveBox, plain: Container, tmp_path: Path) -> Iterator[Adopted]:
    made = Adopted(pve_box, plain, tmp_path / "project")
    made.file(COUNTED)
    yield made
    made.run("stop", *HERE, "--no-checkpoint")
    plain.exec("rm", "-rf", "/var/lib/drafthouse", "/dev/shm/drafthouse")


def test_the_life_of_a_name_in_a_container(train: Adopted, plain: Container) -> None:
    before = {path: path.read_bytes() for path in (plain.conf, plain.files / "etc/passwd")}
    planned = train.ok("plan", *HERE)
    assert "runtime   process: in container 200, of which nothing is replaced" in planned
    asked = train.ok("plan", *HERE, DRAFTHOUSE_BOOT="yes")
    assert "container 200 is not started when its host starts" in asked
    assert "run pct set 200 --onboot 1" in asked
    assert train.ok("deploy", *HERE, "--no-follow") == planned
    assert train.ok("deploy", *HERE, "--no-follow").startswith("unchanged: 0001-demo runs release ")
    assert "under tini" in train.log()
    train.file(COUNTED.replace("hello", "two"))
    assert "environment.GREETING: hello → two" in train.ok("status", *HERE)
    assert "environment.GREETING: hello → two" in train.ok("restart", *HERE, "--no-follow")
    assert "environment.GREETING: two → hello" in train.ok("rollback", *HERE, "--no-follow")
    train.ok("stop", *HERE)
    train.ok("start", *HERE, "--no-follow")
    assert [run.alive() for run in train.runs[:3]] == [False, False, False]
    until(lambda: "greeting hello\n" in train.log())
    [row] = json.loads(train.ok("status", *HERE, "--json"))
    assert (row["run_id"], row["verdict"]) == ("0004-demo", "training")
    assert row["drift"] != []
    train.ok("pull", *HERE, "--what", "log", "--run-id", "0002-demo", "--out", "home")
    assert (train.root / "home" / "0002-demo.log").read_text() == train.log(1)
    assert {path: path.read_bytes() for path in before} == before  # not a byte of what was there


def test_what_a_process_does_and_holds_back_is_seen_from_outside(train: Adopted) -> None:
    lines = 'print("line", number, flush=True)'
    train.file(COUNTED.replace("- python3\n", "- python3\n- -I\n").replace(lines, 'print("line", number)'))
    train.ok("deploy", *HERE, "--no-follow")
    peeked = train.ok("peek", *HERE, "--json")
    assert "line 0\\nline 1\\n" in peeked
    assert "line 0" not in train.log()
    shown = train.run("stacks", *HERE)
    assert shown.returncode == 0, shown.stderr
    assert "container" not in shown.stderr
    assert "has no py-spy; ours (" in shown.stderr
    assert "stacks by py-spy" in shown.stdout
    assert train.ok("stacks", *HERE)
    refused = train.run("deploy", *HERE, "--run", "nope")
    assert (refused.returncode, refused.stdout) == (2, "")


def test_a_stop_wins_over_a_deploy_that_is_at_work(train: Adopted) -> None:
    train.file(COUNTED.replace("settle_seconds: 0", "settle_seconds: 600"))
    deploying = subprocess.Popen(
        [*FAB, "deploy", *HERE, "--no-follow"],
        cwd=train.root,
        env=train.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: train.runs and "line 3\n" in train.log())
    train.ok("stop", *HERE)
    _, errors = deploying.communicate(timeout=120)
    assert deploying.returncode == 1
    assert "deploy of demo was cut short: the new run was stopped by root@" in errors
    assert not train.runs[0].alive()


def test_a_client_that_is_killed_and_a_link_that_breaks_change_nothing(train: Adopted) -> None:
    words = [*FAB, "deploy", *HERE]
    following = subprocess.Popen(
        words, cwd=train.root, env=train.environment(), stdout=subprocess.PIPE, start_new_session=True
    )
    assert following.stdout
    until(lambda: b"line 3\n" in following.stdout.readline())
    os.killpg(following.pid, signal.SIGKILL)
    following.wait()
    following.stdout.close()
    before = train.log().count("line")
    until(lambda: train.log().count("line") > before + 3)
    assert train.ok("deploy", *HERE, "--no-follow").startswith("unchanged: 0001-demo ")


def test_weights_go_through_the_stdin_of_pct_exec_and_never_by_pct_push(
    train: Adopted, plain: Container, tmp_path: Path
) -> None:
    model = tmp_path / "m"
    model.mkdir()
    (model / "config.json").write_text("{}")
    size = 40 << 20
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + os.urandom(size))
    train.file(WEIGHED.format(model=model))
    small = plain.conf.read_text()
    plain.conf.write_text(re.sub(r"^memory: .*$", "memory: 16", small, flags=re.M))
    refused = train.run("deploy", *HERE, "--no-follow")
    plain.conf.write_text(small)
    assert refused.returncode != 0
    assert "container 200 may have 17 MB of memory, but weights and run need 42 MB" in refused.stderr
    assert "run pct set 200 --memory 2089" in refused.stderr
    assert "sent in" in train.ok("weights.push", str(model), *HERE, "--streams", "2")
    assert "there already" in train.ok("weights.push", str(model), *HERE)
    shown = train.ok("deploy", *HERE, "--no-follow")
    said = re.search(
        r"weights (/dev/shm/drafthouse/m@\w+)/model.safetensors (\d+)", until(train.log) and train.log()
    )
    assert said
    assert int(said[2]) == (model / "model.safetensors").stat().st_size
    assert said[1] in shown
    assert (plain.root / said[1].lstrip("/") / "model.safetensors").read_bytes() == (
        model / "model.safetensors"
    ).read_bytes()
    assert "every byte is what was sent" in train.ok("weights.verify", *HERE)
    refused = train.run("weights.evict", "m", *HERE)
    assert refused.returncode != 0
    assert f"{said[1]} is used by process " in refused.stderr
    train.ok("stop", *HERE)
    train.ok("weights.evict", "m", *HERE)
    assert not (plain.root / said[1].lstrip("/")).exists()


def test_a_containers_limit_and_restart_are_known_though_it_does_not_show_them_itself(
    pve_box: PveBox, tmp_path: Path
) -> None:
    small = pve_box.container(203, memory=96)
    train = Adopted(pve_box, small, tmp_path / "project")
    model = tmp_path / "m"
    model.mkdir()
    (model / "config.json").write_text("{}")
    with (model / "model.safetensors").open("wb") as file:
        header = b'{"w":{"dtype":"U8","shape":[100000000],"data_offsets":[0,100000000]}}'
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 100_000_000)
    try:
        refused = train.run("weights.push", str(model), *HERE)
        assert refused.returncode == 1
        assert "container 203 (gpu-box) has " in refused.stderr
        assert "; or give it more: pct set 203 --memory MEGABYTES on the Proxmox host" in refused.stderr
        assert not list(small.root.glob("dev/shm/drafthouse/.m*"))  # not a byte was sent
        train.file(COUNTED)
        train.ok("deploy", *HERE, "--no-follow")
        small.stop()
        small.start()
        [row] = json.loads(train.ok("status", *HERE, "--json"))
        assert "without a record of its end: the container restarted since" in row["reason"]
    finally:
        small.remove()


def test_the_real_trainer_saves_before_it_is_stopped_and_goes_on_from_there(
    pve_box: PveBox, tmp_path: Path
) -> None:
    """Privileged, with the Python of its owner."""
    mine = pve_box.container(201, unprivileged=False, tests_python=True)
    train = Adopted(pve_box, mine, tmp_path / "project", python=sys.executable)
    target = tiny.target_directory(tmp_path / "target")
    data = tiny.data_directory(tmp_path / "data", target)
    shutil.copytree(data, mine.files / "srv/data")
    flags = {
        "token-budget": 256, "max-seq-len": 64, "max-anchors": 24, "block-size": 4, "num-draft-layers": 2,
        "num-taps": 2, "lr": 0.01, "log-interval": 0, "threads": 1, "epochs": 100000, "max-steps": 100000,
        "save-interval": 25,
    }  # fmt: skip
    recipe: dict[str, Any] = {"weights": str(target), "data": "/srv/data", "trainer": flags}
    if sys.pycache_prefix:  # each start would compile PyTorch and the rest anew
        recipe["environment"] = {"PYTHONPYCACHEPREFIX": sys.pycache_prefix}
    train.file(yaml.safe_dump({**recipe, "settle_seconds": 0}))
    try:
        train.ok("deploy", *HERE, "--no-follow")
        first = train.runs[0]
        until(lambda: first.heartbeats() and first.heartbeats()[0].last_checkpoint)
        # It crashes: launch, in the container, starts the next attempt, which goes on from the checkpoint.
        mine.exec("kill", "-KILL", str(first.heartbeats()[0].pid))
        resumed = until(lambda: re.search(r"^resumed from \S+ at step (\d+)$", train.log(), re.MULTILINE))
        until(lambda: (beat := first.heartbeats()[0]).attempt == 2 and beat.phase == "training")
        until(lambda: f"\nstep {int(resumed[1]) + 1}/" in train.log()[resumed.end() :])
        [row] = json.loads(train.ok("status", *HERE, "--json"))
        assert (row["run_id"], row["verdict"]) == ("0001-demo", "training"), row
        assert ", attempt 2 (the one before ended by SIGKILL after " in row["reason"]
        shown = train.ok("tail", *HERE, "--no-follow", "--lines", "100000")
        assert "attempt 1 ended by SIGKILL after " in shown
        assert " · attempt 2 · " in shown
        assert resumed[0] in shown
        assert int(resumed[1]) % 25 == 0
        changed = train.run("restart", *HERE, "--set", "max-steps=1", "--no-follow")
        assert changed.returncode == 0, changed.stdout + changed.stderr
        assert "saved after" in changed.stderr
        assert train.exit(0).reason == "stopped"
        assert (train.exit(0).last_checkpoint or {})["step"] > 2
        tailed = train.run("tail", *HERE)
        assert tailed.stdout == train.log(1)
        assert "resum" in tailed.stdout
        train.ok("pull", *HERE, "--out", "home")
        assert list((train.root / "home").glob("*/drafter.safetensors")) or list(
            (train.root / "home").rglob("*.safetensors")
        )
    finally:
        train.run("stop", *HERE, "--no-checkpoint")
        mine.remove()


def test_after_a_reboot_the_containers_own_systemd_stages_the_weights_and_starts_the_next_run(
    pve_box: PveBox, tmp_path: Path
) -> None:
    own = pve_box.container(202, systemd=True)
    train = Adopted(pve_box, own, tmp_path / "project")
    model = tmp_path / "m"
    model.mkdir()
    (model / "config.json").write_text("{}")
    header = b'{"w":{"dtype":"U8","shape":[4096],"data_offsets":[0,4096]}}'
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4096))
    train.file(WEIGHED.format(model=model))
    try:
        done = train.run("deploy", *HERE, "--no-follow", DRAFTHOUSE_BOOT="yes")
        assert done.returncode == 0, done.stderr
        assert (own.files / "etc/systemd/system/drafthouse-demo.service").exists()
        until(lambda: "weights /dev/shm" in train.log())
        pve_box.pct("reboot", "202")
        until(lambda: len(train.runs) == 2 and "weights /dev/shm" in train.log(1))
        assert train.exit(0).reason == "stopped"
        [row] = json.loads(train.ok("status", *HERE, "--json"))
        assert row["run_id"] == "0002-demo"
    finally:
        train.run("stop", *HERE, "--no-checkpoint")
        own.remove()


SCRIPT = """\
#!/bin/bash
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,max_split_size_mb:512
export WANDB_API_KEY=very-secret
rm -rf /tmp/torchinductor_root
cd /srv
python3 /root/train.py --epochs 6 --name "it's $((1 + 1))"
"""
TRAINING = """\
import sys, time
print("args", *sys.argv[1:])
while True:
    sum(range(100_000))
    print("loss 1.0")
    time.sleep(0.02)
"""


def test_what_was_started_by_hand_is_seen_at_once_and_then_replaced(train: Adopted, plain: Container) -> None:
    plain.write("root/run.sh", SCRIPT, 0o755)
    plain.write("root/train.py", TRAINING)
    plain.exec("sh", "-c", "mkdir -p /srv; nohup bash /root/run.sh >/root/log 2>&1 & echo $! >/root/pid")
    pid = (plain.files / "root/pid").read_text().strip()
    read = train.ok("adopt", *HERE, "--script", "/root/run.sh", "--name", "script")
    assert "not carried over" not in read
    made = yaml.safe_load((train.root / "runs" / "script.yaml").read_text())
    assert made["command"] == ["/usr/bin/python3", "/root/train.py", "--epochs", "6", "--name", "it's 2"]
    assert made["working_directory"] == "/srv"
    assert made["environment"] == {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:512"
    }
    assert made["secrets"] == {"WANDB_API_KEY": {"env": "WANDB_API_KEY"}}

    until(lambda: train.run("adopt", *HERE, "--pid", pid, "--name", "hand").returncode == 0)
    [row] = json.loads(train.ok("status", *HERE, "--name", "hand", "--json"))
    assert row["verdict"] in ("silent", "starting", "training")
    assert "loss 1.0" in train.ok("peek", *HERE, "--name", "hand")
    assert "train.py" in train.ok("stacks", *HERE, "--name", "hand")
    assert (plain.files / "root/log").read_bytes() == b""  # nothing of that has touched it
    planned = train.ok("deploy", *HERE, "--run", "hand", "--no-follow", WANDB_API_KEY="very-secret")
    assert "which was adopted" in planned or "started by hand" in planned
    until(lambda: train.runs[-1].alive() and "args --epochs 6 --name it's 2\n" in train.log())
    assert "train.py" in plain.exec("ps", "-eo", "args").stdout
    assert not Path(f"{plain.root}/proc/{pid}").exists()
    assert "very-secret" not in "".join(
        path.read_text(errors="replace")
        for top in (train.state, train.root)
        for path in top.rglob("*")
        if path.is_file() and "secrets" not in str(path)
    )
    train.ok("stop", *HERE, "--name", "hand")
