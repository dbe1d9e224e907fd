"""The tasks against another machine, by SSH: one with nothing but Python (the process runtime there)."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml
from deployed import until
from fabbed import COUNTING
from far import Far
from testbed.gpubox import GpuBox

pytestmark = [pytest.mark.root, pytest.mark.sshd, pytest.mark.slow]


@pytest.fixture
def remote(gpubox: GpuBox, tmp_path: Path) -> Far:
    made = Far(gpubox, tmp_path / "project")
    made.file(COUNTING)
    yield made
    made.run("stop", "--host", "gpu-box", "--no-checkpoint")


def test_the_life_of_a_name_on_another_machine(remote: Far) -> None:
    here = ("--host", "gpu-box")
    planned = remote.ok("plan", *here)
    assert remote.ok("deploy", *here, "--no-follow") == planned
    assert remote.ok("deploy", *here, "--no-follow").startswith("unchanged: 0001-demo runs release ")
    remote.file(COUNTING.replace("hello", "two"))
    assert "environment.GREETING: hello → two" in remote.ok("status", *here)
    assert "environment.GREETING: hello → two" in remote.ok("diff", *here)
    assert "environment.GREETING: hello → two" in remote.ok("restart", *here, "--no-follow")
    assert "environment.GREETING: two → hello" in remote.ok("rollback", *here, "--no-follow")
    remote.ok("stop", *here)
    remote.ok("start", *here, "--no-follow")
    assert [run.alive() for run in remote.runs] == [False, False, False, True]
    until(
        lambda: "greeting hello\n" in "".join(path.read_text() for path in remote.runs[-1].log.glob("*.log"))
    )
    shown = remote.ok("runs", *here).splitlines()
    assert [line.split()[0] for line in shown] == ["RUN", "0004-demo", "0003-demo", "0002-demo", "0001-demo"]
    assert json.loads(remote.ok("status", *here, "--json"))[0]["drift"] != []  # the file says two


def test_what_a_run_left_is_brought_home_and_goes_on_where_it_broke_off(remote: Far) -> None:
    here = ("--host", "gpu-box")
    remote.ok("deploy", *here, "--no-follow")
    remote.ok("stop", *here)
    home = remote.root / "home"
    remote.ok("pull", *here, "--what", "log", "--out", "home")
    log = "".join(path.read_text() for path in sorted(remote.runs[0].log.glob("*.log")))
    assert (home / "0001-demo.log").read_text() == log
    step = remote.state / "names" / "demo" / "checkpoints" / "0001-demo" / "step-00000010"
    step.mkdir(parents=True)
    data = os.urandom(5_000_000)
    (step / "drafter.safetensors").write_bytes(data)
    (step / "state.json").write_text("{}")
    (step.parent.parent / "latest").symlink_to("0001-demo/step-00000010")
    incoming = home / ".0001-demo-step-00000010.incoming"  # of a pull that broke off after 4 MB
    incoming.mkdir()
    (incoming / "drafter.safetensors").write_bytes(data[:4_000_000])
    shown = remote.ok("pull", *here, "--out", "home")
    assert shown == "home/0001-demo-step-00000010: 2 files, 5.0 MB (1.0 MB fetched)\n"
    assert (home / "0001-demo-step-00000010" / "drafter.safetensors").read_bytes() == data


def test_a_partial_file_that_is_not_the_beginning_of_the_real_one_is_fetched_anew(remote: Far) -> None:
    here = ("--host", "gpu-box")
    remote.ok("deploy", *here, "--no-follow")
    step = remote.state / "names" / "demo" / "checkpoints" / "0001-demo" / "step-00000010"
    step.mkdir(parents=True)
    (step / "drafter.safetensors").write_bytes(data := os.urandom(500_000))
    (step.parent.parent / "latest").symlink_to("0001-demo/step-00000010")
    incoming = remote.root / "home" / ".0001-demo-step-00000010.incoming"
    incoming.mkdir(parents=True)
    (incoming / "drafter.safetensors").write_bytes(b"something else")
    remote.ok("pull", *here, "--out", "home")
    assert (remote.root / "home" / "0001-demo-step-00000010" / "drafter.safetensors").read_bytes() == data


def test_hosts_side_by_side_are_told_apart_and_one_that_cannot_be_reached_stops_no_other(
    remote: Far,
) -> None:
    settings = yaml.safe_load((remote.root / "fabric.yaml").read_text())
    hosts = settings["drafthouse"]["hosts"]
    settings["drafthouse"]["hosts"] = {"gpu-box": hosts["gpu-box"], "gone": {"address": "gone.invalid"}}
    (remote.root / "fabric.yaml").write_text(yaml.safe_dump(settings))
    done = remote.run("-H", "gpu-box,gone", "deploy", "--no-follow")
    assert done.returncode != 0
    assert "gpu-box │ deploy demo on gpu-box" in done.stdout
    assert re.search(r"^gpu-box +ok", done.stdout, re.MULTILINE)
    assert re.search(r"^gone +\S", done.stdout, re.MULTILINE)
    assert "failed on gone" in done.stderr
    assert remote.runs[0].alive()
    shown = remote.run("status")  # every host of fabric.yaml
    assert shown.returncode == 1
    assert "gpu-box  0001-demo" in shown.stdout
    assert "no runs on localhost" in shown.stdout
    assert "gone" in shown.stderr


def test_prune_removes_on_the_host_what_nothing_needs(remote: Far) -> None:
    here = ("--host", "gpu-box")
    for greeting in ("one", "two", "three"):
        remote.file(COUNTING.replace("hello", greeting))
        remote.ok("deploy", *here, "--no-follow")
    remote.ok("prune", *here, "--keep", "1", "--yes")
    assert [run.path.name for run in remote.runs] == ["0002-demo", "0003-demo"]
    assert remote.runs[-1].alive()
    assert remote.ok("prune", *here, "--keep", "1", "--yes") == "nothing to prune on gpu-box\n"


def test_bootstrap_looks_with_a_shell_only_and_says_what_it_would_run(remote: Far) -> None:
    shown = json.loads(remote.ok("bootstrap", "--host", "gpu-box", "--dry-run", "--json"))
    assert shown["host"] == "gpu-box"
    assert any(text.startswith("python3 3.") for text in shown["there"])


@pytest.mark.engine
@pytest.mark.program("tini", "rsync")
def test_bootstrap_changes_nothing_where_all_is_there(docker_box: GpuBox, tmp_path: Path) -> None:
    remote = Far(docker_box, tmp_path / "project", runtime="auto")
    found = json.loads(remote.run("bootstrap", "--host", "gpu-box", "--dry-run", "--json").stdout)
    there = " ".join(found["there"])
    assert "Docker Engine" in there
    assert "Compose" in there
    assert (found["steps"], found["blocked"]) == ([], [])
    assert remote.ok("bootstrap", "--host", "gpu-box").splitlines()[-1] == "  nothing to do"
