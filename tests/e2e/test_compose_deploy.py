"""The whole deploy of a container to another machine: by SSH, to a real engine, as people type it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployed import CHECKOUT, HOST, Place, until
from fabbed import FAB, call

from deploy import bootunit, onhost
from trainer import status

NAME = "remote1"
pytestmark = [pytest.mark.engine, pytest.mark.sshd, pytest.mark.root, pytest.mark.slow]

# Any training command in an image of one's own; it has Python, and that is all.
COUNTING = """\
name: remote1
image: {use: "IMAGE"}
command:
- python3
- -c
- |
  import itertools, os, sys, time
  sys.stderr = open(2, "w", closefd=False)
  print("held back", file=sys.stderr)
  weights = os.environ["DRAFTHOUSE_WEIGHTS"]
  print("weights", open(weights + "/model.safetensors", "rb").read()[-4:], flush=True)
  print("user", os.getuid(), "level", os.environ["LEVEL"], "secret", os.environ.get("TOKEN"), flush=True)
  open(os.environ["DRAFTHOUSE_CHECKPOINTS"] + "/mark", "a").write("x")
  for number in itertools.count():
      print("line", number, flush=True)
      time.sleep(0.05)
environment: {LEVEL: "one ; $(id) ${HOME} 'two'"}
secrets: {TOKEN: {env: MINE}}
grace_seconds: 5
settle_seconds: 0
weights: MODEL
"""


class Remote:
    def __init__(self, box: Any, root: Path, engine: Any) -> None:
        self.box, self.root, self.engine = box, root, engine

    def run(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        own = {
            "PYTHONPATH": str(CHECKOUT),
            "PATH": f"{Path(FAB[0]).parent}:{os.environ['PATH']}",
            "HOME": str(self.root),
            "DRAFTHOUSE_BOOT": "no",
            "MINE": "hunter2",
            **self.box.environment,
        }
        where = ["--host", "gpu-box", "--name", NAME, "--run", "demo"]
        return call([*words, *where], self.root, {**os.environ, **own, **more})

    def ok(self, *words: str, **more: str) -> str:
        done = self.run(*words, **more)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @property
    def runs(self) -> list[status.RunDir]:
        return status.list_runs(self.box.state / "runs", NAME)

    def boot(self) -> str:
        """What the unit does there, after a reboot; what it said."""
        tool = onhost.install(HOST, str(self.box.state), bootunit.MODULES)  # (DRAFTHOUSE_BOOT=no left it out)
        return str(self.box.run(*onhost.command(HOST, tool), str(self.box.state), NAME, timeout=120))

    def log(self, run: status.RunDir) -> str:
        return "".join(path.read_text() for path in sorted(run.log.glob("*.log")))

    def containers(self) -> list[str]:
        out = self.engine.run(
            "ps", "-a", "-q", "--filter", f"label=com.docker.compose.project=drafthouse-{NAME}"
        )
        return str(out).split()


@pytest.fixture
def remote(docker_box: Any, base_images: Any, tmp_path: Path) -> Iterator[Remote]:
    made = Remote(docker_box, docker_box.project(tmp_path / "project"), base_images)
    model = tmp_path / "model"
    model.mkdir()
    header = b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abcd")
    (model / "config.json").write_text("{}")
    recipe = COUNTING.replace("IMAGE", "python:3.11-slim-bookworm").replace("MODEL", str(model))
    (made.root / "runs" / "demo.yaml").write_text(recipe)
    try:
        yield made
    finally:
        for container in made.containers():
            base_images.run("rm", "-f", container)
        Place(docker_box.state).end_all()
        for place in (docker_box.state, docker_box.shm):
            shutil.rmtree(place, ignore_errors=True)
        docker_box.state.mkdir()


def test_a_container_is_deployed_left_alone_changed_brought_back_by_a_boot_and_stopped(
    remote: Remote, tmp_path: Path
) -> None:
    planned = remote.ok("plan")
    assert "compose: Docker Engine" in planned
    assert remote.containers() == []
    # (How much memory is free changes from one moment to the next.)
    done, planned = (
        re.sub(r"^  memory .*\n", "", text, flags=re.MULTILINE)
        for text in (remote.ok("deploy", "--no-follow"), planned)
    )
    assert done.startswith(planned)
    first = remote.runs[0]
    until(lambda: "line 3\n" in remote.log(first))
    assert "user 10001 level one ; $(id) ${HOME} 'two' secret hunter2\n" in remote.log(first)
    assert (remote.box.state / "names" / NAME / "checkpoints" / "mark").read_text() == "x"
    assert first.path.stat().st_gid == 10001
    assert len(remote.containers()) == 1
    (peeked,) = json.loads(remote.ok("peek", "--json"))["processes"]  # read from outside of the container
    assert peeked["pid"] != peeked["nspid"]
    assert [stream["text"] for stream in peeked["streams"] if stream["bytes"]] == ["held back\n"]
    there = remote.box.home / ".local" / "bin"  # where pip puts a program for one user of that host
    there.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(sys.executable).with_name("py-spy"), there)
    (stacks,) = json.loads(remote.ok("stacks", "--json"))["processes"]
    assert [stacks[key] for key in ("pid", "nspid", "by")] == [peeked["pid"], peeked["nspid"], "py-spy"]
    (thread,) = stacks["threads"]
    assert (thread["main"], [frame["function"] for frame in thread["frames"]]) == (True, ["<module>"])
    before = remote.containers()
    boot = json.loads((first.path / "boot.json").read_text())
    assert boot["spec"]["start"]["container"]["project"] == f"drafthouse-{NAME}"
    assert "hunter2" not in json.dumps(boot)

    again = remote.ok("deploy", "--no-follow")
    assert again.startswith(f"unchanged: {first.path.name} runs release "), again
    assert (remote.containers(), len(remote.runs)) == (before, 1)
    rotated = remote.ok("plan", MINE="swordfish")
    assert "\n            secret TOKEN: changed (not shown)\n" in rotated
    assert "swordfish" not in rotated
    lost = remote.run("plan", "--set", "image.use=no/such:1")
    said = (
        "there is no image no/such:1 on gpu-box; docker pull it there, or correct image: in the run's file\n"
    )
    assert (lost.returncode, lost.stdout, lost.stderr) == (1, "", said)

    changed = remote.ok("restart", "--no-follow", "--set", "environment.LEVEL=three")
    assert "→ three" in changed
    second = remote.runs[1]
    until(lambda: "level three" in remote.log(second))
    assert not first.alive()
    assert first.exit().reason == "stopped"
    assert len(remote.containers()) == 1

    # A reboot: the container ends without a word, shared memory is empty, and this machine is not asked.
    remote.engine.run("kill", "-s", "KILL", *remote.containers())
    until(lambda: not second.alive())
    shutil.rmtree(remote.box.shm)
    shutil.rmtree(tmp_path / "model")
    said = remote.boot()
    staged = json.loads((second.path / "boot.json").read_text())["weights"]["path"]
    assert staged.startswith(f"{remote.box.shm}/model@")
    assert f"weights {staged}: copied" in said, said
    third = remote.runs[2]
    until(lambda: "level three" in remote.log(third))
    assert "weights b'abcd'\n" in remote.log(third)
    assert third.alive()
    assert len(remote.containers()) == 1
    assert remote.ok("stop")
    assert not third.alive()


def test_what_the_container_cannot_do_is_found_before_the_run_in_progress_is_touched(remote: Remote) -> None:
    remote.ok("deploy", "--no-follow")
    first = remote.runs[0]
    text = (remote.root / "runs" / "demo.yaml").read_text()
    (remote.root / "runs" / "demo.yaml").write_text(text.replace("- python3\n", "- no-such-program\n"))
    done = remote.run("restart", "--no-follow")
    assert done.returncode == 1
    assert "there is no program no-such-program in the image" in done.stderr
    assert first.alive()
    assert len(remote.runs) == 1


@pytest.mark.usefixtures("image")  # its layers are the packages': then only our code is built here
def test_the_demo_is_built_there_and_trains_in_a_container_while_its_log_is_followed(remote: Remote) -> None:
    recipe = yaml.safe_load((CHECKOUT / "runs" / "demo.yaml").read_text())
    recipe["environment"] = {"DRAFTHOUSE_TOY": "tiny"}
    recipe["trainer"] |= {"target-layer-ids": [0, 1], "log-interval": 0.5, "threads": 1, "max-steps": 3}
    (remote.root / "runs" / "demo.yaml").write_text(yaml.safe_dump({**recipe, "name": NAME}))
    done = remote.run("deploy")
    assert done.returncode == 0, done.stdout + done.stderr
    run = remote.runs[0]
    ended, made = run.exit(), run.run()
    assert ended
    assert (ended.reason, ended.last_step) == ("finished", 3)
    assert remote.log(run) in done.stdout
    assert made
    assert str(made.image).startswith("drafthouse:")
    assert (remote.box.state / "names" / NAME / "checkpoints" / "latest").exists()
    planned = remote.ok("plan")
    assert "image     " in planned
    assert f"{made.image}, there" in planned, planned
