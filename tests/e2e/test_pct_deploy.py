"""The whole deploy of containers of our own to a Proxmox host: by SSH, over real LXC, as people type it."""

# ruff: noqa: E501  (files and sentences, as they are)

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployed import CHECKOUT, HOST, TRAINER, Place, until
from fabbed import FAB, call

from deploy import bootunit, onhost
from tests.testbed.pct import template
from tests.testbed.pct.box import PveBox
from trainer import status

NAME = "made1"
HEADER = b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
# Says who it is and what it sees, then trains as deployed.TRAINER does.
LOOK = """
import os
print("user", os.getuid(), "pid", os.getpid(), "secret", os.environ.get("TOKEN"), flush=True)
print("weights", open(os.environ["DRAFTHOUSE_WEIGHTS"] + "/model.safetensors", "rb").read()[-4:], flush=True)
shm = next(line for line in open("/proc/mounts") if line.split()[1] == "/dev/shm")
print("shm", shm.split()[2], os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize, flush=True)
print("rights", *(line.split()[1] for line in open("/proc/self/status") if line[:6] in ("CapBnd", "NoNewP")), flush=True)
os.environ["SAVES"] = os.environ["DRAFTHOUSE_CHECKPOINTS"] + "/saves"
"""
pytestmark = [pytest.mark.pve, pytest.mark.sshd, pytest.mark.root, pytest.mark.slow]


class Made:
    """A project whose only host makes containers."""

    def __init__(self, box: Any, root: Path, model: Path) -> None:
        self.box, self.root, self.model = box, root, model
        self.recipe: dict[str, Any] = {
            "name": NAME,
            "image": {"use": template.put(box.templates)},
            "gpus": 0,
            "command": ["python3", "-u", "-c", LOOK + TRAINER],
            "weights": str(model),
            "environment": {"LEVEL": "one"},
            "secrets": {"TOKEN": {"env": "MINE"}},
            "shm_size": "256m",
            "grace_seconds": 10,
            "settle_seconds": 0,
        }
        self.write()

    def write(self, **changes: Any) -> None:
        (self.root / "runs" / "demo.yaml").write_text(yaml.safe_dump({**self.recipe, **changes}))

    def host(self, **pct: Any) -> None:
        """What fabric.yaml says of its containers."""
        path = self.root / "fabric.yaml"
        top = yaml.safe_load(path.read_text())
        usual = {"rootfs": "2g", "memory": "600m", "storage": "local-zfs"}
        top["drafthouse"]["hosts"]["gpu-box"] |= {"runtime": "pct", "pct": {**usual, **pct}}
        path.write_text(yaml.safe_dump(top))

    def run(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        own = {
            "PYTHONPATH": str(CHECKOUT),
            "PATH": f"{Path(FAB[0]).parent}:{os.environ['PATH']}",
            "HOME": str(self.root),
            "DRAFTHOUSE_BOOT": "no",
            "MINE": "hunter2",
            **self.box.environment,
        }
        where = ["--host", "gpu-box", *([] if words[0] == "prune" else ["--name", NAME])]
        return call([*words, *where], self.root, {**os.environ, **own, **more})

    def ok(self, *words: str, **more: str) -> str:
        done = self.run(*words, **more)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def refused(self, *words: str) -> str:
        """What is said when it cannot be done: the last line."""
        done = self.run(*words)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr.strip().splitlines()[-1]

    @property
    def runs(self) -> list[status.RunDir]:
        return status.list_runs(self.box.state / "runs", NAME)

    @property
    def containers(self) -> list[int]:
        return sorted(int(path.stem) for path in self.box.conf(100).parent.glob("*.conf"))

    def log(self, run: status.RunDir) -> str:
        return "".join(path.read_text() for path in sorted(run.log.glob("*.log")))

    def boot(self) -> str:
        """What the unit does there, after a reboot; what it said."""
        tool = onhost.install(HOST, str(self.box.state), bootunit.MODULES)  # (DRAFTHOUSE_BOOT=no left it out)
        return str(self.box.run(*onhost.command(HOST, tool), str(self.box.state), NAME, timeout=120))

    def running(self, vmid: int) -> bool:
        return "running" in self.box.pct("status", str(vmid))


@pytest.fixture
def made(pve_box: Any, tmp_path: Path) -> Iterator[Made]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(len(HEADER).to_bytes(8, "little") + HEADER + b"abcd")
    (model / "config.json").write_text("{}")
    found = Made(pve_box, pve_box.project(tmp_path / "project"), model)
    found.host()
    try:
        yield found
    finally:
        for vmid in found.containers:
            pve_box.remove(vmid)
        Place(pve_box.state).end_all()
        for place in (pve_box.state, pve_box.shm):
            shutil.rmtree(place, ignore_errors=True)
        pve_box.state.mkdir()


def test_a_container_is_made_replaced_brought_back_and_stopped(made: Made) -> None:
    assert "pct: as gpu-box has it" in made.ok("deploy", "--no-follow")
    (first,) = made.runs
    until(lambda: "step 3\n" in made.log(first))
    log = made.log(first)
    assert "user 10001 pid " in log
    assert "secret hunter2\n" in log
    assert "weights b'abcd'\n" in log
    assert f"shm tmpfs {256 << 20}\n" in log
    assert re.search(r"rights 1 0000000000000000\n|rights 0000000000000000 1\n", log), log
    assert "stdout unbuffered (PYTHONUNBUFFERED=1" in log
    assert "under tini" in log
    assert made.containers == [100]
    conf = made.box.conf(100).read_text()
    assert f"mp0: {first.path},mp=/run/drafthouse\n" in conf
    assert "\nunprivileged: 1\n" in conf
    assert "\nonboot: 0\n" in conf
    assert "hunter2" not in conf
    assert first.path.stat().st_gid == 110001

    made.box.pct("set", "100", "--memory", "601", "--description", "somebody's notes")
    (row,) = json.loads(made.ok("status", "--json"))
    assert (row["run_id"], row["verdict"]) == (first.path.name, "training"), row
    assert row["drift"] == ["container 100: memory is 601, but 600 was deployed"]
    assert [row["evidence"]["container"][key] for key in ("vmid", "running", "gone")] == [100, True, False]
    (stacks,) = json.loads(made.ok("stacks", "--json"))["processes"]
    assert stacks["pid"] != stacks["nspid"]

    made.write(environment={"LEVEL": "two"})
    assert "→ two" in made.ok("deploy", "--no-follow")
    second = made.runs[1]
    until(lambda: "step 3\n" in made.log(second))
    assert first.exit().reason == "stopped"
    assert made.containers == [100, 101]
    assert not made.running(100)
    assert "checkpoint" in (made.box.state / "names" / NAME / "checkpoints" / "saves").read_text()

    # The same release once more: the same container, configured for the next run.
    made.ok("restart", "--no-follow")
    third = made.runs[2]
    until(lambda: "step 3\n" in made.log(third))
    assert made.containers == [100, 101]
    assert f"mp0: {third.path},mp=/run/drafthouse\n" in made.box.conf(101).read_text()

    made.ok("rollback", "--no-follow")
    fourth = made.runs[3]
    until(lambda: "step 3\n" in made.log(fourth))
    assert made.running(100)
    assert not made.running(101)
    assert fourth.run().release == first.run().release
    assert "\nmemory: 600\n" in made.box.conf(100).read_text()  # as it was deployed

    # A reboot: the container ends without a word, shared memory is empty, and this machine is not asked.
    made.box.pct("stop", "100")
    until(lambda: not fourth.alive())
    shutil.rmtree(made.box.shm)
    shutil.rmtree(made.model)
    said = made.boot()
    assert re.search(r"weights /dev/shm/\S+/model@\S+: copied", said), said
    fifth = made.runs[4]
    until(lambda: "step 3\n" in made.log(fifth))
    assert "weights b'abcd'\n" in made.log(fifth)
    assert made.running(100)

    assert made.ok("stop")
    assert not fifth.alive()
    until(lambda: not made.running(100))
    assert made.containers == [100, 101]


def test_what_cannot_be_made_is_said_and_leaves_the_run_in_progress_and_nothing_else(made: Made) -> None:
    made.host(unprivileged=False)
    begun = made.box.state / "names" / NAME / "making.json"  # as a deploy leaves it that was killed
    begun.parent.mkdir(parents=True)
    begun.write_text('{"vmid": 150, "release": "0123456789ab"}')
    made.box.conf(150).write_text("lock: create\n")
    made.ok("deploy", "--no-follow")
    (run,) = made.runs
    until(lambda: "step 3\n" in made.log(run))
    assert "user 10001 pid " in made.log(run)  # not root, though its root would be ours
    assert run.path.stat().st_gid == 10001

    (made.box.templates / "junk.tar").write_bytes(b"nothing")
    for changes, said in (
        ({"image": {"use": "local:vztmpl/junk.tar"}}, "is local:vztmpl/junk.tar a whole template?"),
        ({"command": ["no-such-program"]}, "there is no program no-such-program in the image"),
    ):
        made.write(**changes)
        assert said in made.refused("deploy", "--no-follow")
    made.write()
    made.host(
        unprivileged=False, net0="name=eth0,bridge=vmbr0,nothing=1"
    )  # of which a trial would see nothing
    assert "container 101 could not be made (" in made.refused("deploy", "--no-follow")
    made.host(unprivileged=True)
    assert "fab stop --name made1 first" in made.refused("restart", "--no-follow")
    made.host(unprivileged=False)
    conf = made.box.conf(100)
    conf.write_text(conf.read_text() + "lock: backup\n")
    assert "container 100 is locked (backup)" in made.refused("restart", "--no-follow")
    conf.write_text(conf.read_text().replace("lock: backup\n", ""))

    assert run.alive()
    assert (made.containers, len(made.runs)) == ([100], 1)
    assert not begun.exists()

    made.write(command=["python3", "-c", "raise SystemExit(3)"], restart={"attempts": 0})
    done = made.run("deploy", "--no-follow", "--rollback-on-failure")
    assert done.returncode == 1
    back = made.runs[2]
    assert f"runs again as {back.path.name}" in done.stdout + done.stderr
    until(lambda: "step 3\n" in made.log(back))
    assert made.running(100)


def test_a_container_gets_its_gpus_and_an_address(testbed_directory: Path, tmp_path: Path) -> None:
    box = PveBox(gpus=2)
    box.start()
    try:
        made = Made(box, box.project(tmp_path / "project"), tmp_path)
        made.host(bridge="vmbr0", ip="10.99.0.5/24", cores=1, order=7)
        program = (
            "import os, time; nodes = [n for n in os.listdir('/dev') if n.startswith('nvidia')]\n"
            "print(*sorted(nodes), os.major(os.stat('/dev/nvidia1').st_rdev), os.listdir('/dev/nvidia-caps'))\n"
            "print('net', '10.99.0.5' in open('/proc/net/fib_trie').read(), flush=True); time.sleep(600)"
        )
        made.write(command=["python3", "-u", "-c", program], gpus=[1], weights=None, shm_size="1536m")
        made.ok("deploy", "--no-follow")
        (run,) = made.runs
        until(lambda: "net " in made.log(run))
        assert "\nnet True\n" in made.log(run)
        assert re.search(
            r"\nnvidia-caps nvidia-modeset nvidia-uvm nvidia-uvm-tools nvidia1 nvidiactl 195 "
            r"\['nvidia-cap[12]', 'nvidia-cap[12]'\]\n",
            made.log(run),
        ), made.log(run)
    finally:
        box.stop()
