"""What keeps `fab deploy` from another machine, or warns there: each one sentence with what to do, over a real sshd."""

# ruff: noqa: E501  (whole sentences, as people read them)

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deployed import until
from fabbed import COUNTING, begin
from far import Far
from testbed.gpubox import ALIAS, GpuBox

from deploy import lock
from deploy.ssh import Ssh

pytestmark = [pytest.mark.root, pytest.mark.sshd, pytest.mark.slow]
HERE = ("--host", "gpu-box")


@pytest.fixture
def far(gpubox: GpuBox, tmp_path: Path) -> Iterator[Callable[..., Far]]:
    """Makes a project; what runs in the end is stopped."""
    made: list[Far] = []

    def make(**settings: Any) -> Far:
        one = Far(gpubox, tmp_path / f"project-{len(made)}", **settings)  # with the same state
        one.file(COUNTING)
        made.append(one)
        return one

    yield make
    gpubox.alias(ALIAS)  # as others expect it
    for one in made:
        if one.runs and one.runs[-1].alive():
            one.run("stop", *HERE, "--no-checkpoint")


# Python with another idea of the time: what stands for a host's clock, since there is but one here.
AHEAD = """#!/usr/bin/python3
import os, sys, time
if "-c" not in sys.argv:
    os.execv("/usr/bin/python3", ["/usr/bin/python3", *sys.argv[1:]])
real = time.time
time.time = lambda: real() + 7200
at = sys.argv.index("-c")
code, sys.argv = sys.argv[at + 1], ["-c", *sys.argv[at + 2:]]
exec(code, {"__name__": "__main__"})
"""


@pytest.fixture(scope="module")
def odd_box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuBox]:
    """Its clock is two hours ahead, and its engine lets in root and the group docker only, as dockerd does."""
    directory = tmp_path_factory.mktemp("odd")
    directory.chmod(0o755)
    python = directory / "python3"
    python.write_text(AHEAD)
    python.chmod(0o755)
    engine = Path("/run") / f"drafthouse-odd-{os.getpid()}.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(engine))
        engine.chmod(0o660)
        listening.listen()
        box = GpuBox(
            {"DOCKER_HOST": f"unix://{engine}", "PATH": f"{directory}:/usr/sbin:/usr/bin:/sbin:/bin"}
        )
        try:
            box.start()
            yield box
        finally:
            box.stop()
            engine.unlink()


def test_a_clock_that_is_apart_is_told_and_keeps_nobody_from_deploying(
    odd_box: GpuBox, tmp_path: Path
) -> None:
    remote = Far(odd_box, tmp_path / "project")
    remote.file(COUNTING)
    planned = remote.ok("plan", *HERE)
    assert (
        "  note      the clock of gpu-box is 2 h 00 min ahead of this machine's: times will not agree; set both by NTP: "
        "timedatectl set-ntp true\n"
    ) in planned


def refused(remote: Far, *words: str) -> str:
    """What was said; nothing was changed."""
    done = remote.run("deploy", *HERE, "--no-follow", *words)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert remote.runs == []
    return done.stderr


def test_a_state_directory_of_another_user_is_named_with_its_owner(far: Callable[..., Far]) -> None:
    ada = far(user="ada")
    ada.state.mkdir()
    assert (
        f"the state directory {ada.state} cannot be written (it belongs to uid 0, you are ada, uid 20001); deploy as its owner, "
        "or choose another with state: in fabric.yaml"
    ) in refused(ada)
    os.chown(ada.state, 20001, 20001)
    root = far()
    assert (
        f"the state directory {root.state} belongs to uid 20001, and you are root: that user could not manage what you deploy there; "
        "deploy as its owner, or choose another"
    ) in refused(root)
    assert os.listdir(root.state) == []


def test_a_release_that_is_half_there_is_named_and_the_next_deploy_writes_it_anew(
    far: Callable[..., Far],
) -> None:
    remote = far()
    remote.ok("deploy", *HERE, "--no-follow")
    remote.ok("stop", *HERE)
    releases = remote.state / "names" / "demo" / "releases"
    (old,) = releases.iterdir()
    whole = {path.name: path.read_bytes() for path in old.iterdir() if path.is_file()}
    (old / "run.env").unlink()
    (old / "release.json").write_bytes(whole["release.json"][: len(whole["release.json"]) // 2])
    said = f"  release   {old.name}, damaged on the host (release.json and other files): moved aside, and written anew\n"
    assert said in remote.ok("plan", *HERE)
    same = remote.run("start", *HERE, "--no-follow")
    assert same.returncode == 1
    assert re.search(r"demo .*(changed|damaged).*; fab deploy ", same.stderr), same.stderr
    assert said in remote.ok("deploy", *HERE, "--no-follow")
    assert {name: (old / name).read_bytes() for name in whole} == whole
    (aside,) = [path for path in releases.iterdir() if path.name.startswith(".damaged-")]
    assert len((aside / "release.json").read_bytes()) == len(whole["release.json"]) // 2
    assert remote.runs[-1].alive()


def test_who_holds_the_lock_there_is_named_and_waited_for_when_asked(
    far: Callable[..., Far], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = far()
    for key, value in remote.box.environment.items():
        monkeypatch.setenv(key, value)
    host = Ssh(ALIAS)
    told = remote.root / "told"
    try:
        with lock.hold(host, str(remote.state), "demo", what="weights push"):
            said = refused(remote)
            held = rf"demo on gpu-box is locked by {re.escape(lock.who())} \(weights push, since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d\)"
            assert re.search(rf"{held}; wait for it with --lock-wait SECONDS, or try again", said), said
            with open(told, "w") as errors:
                words = ["deploy", *HERE, "--no-follow", "--lock-wait", "100"]
                waits = begin(words, remote.root, remote.environment(), stderr=errors)
            until(lambda: waits.poll() is not None or "waiting" in told.read_text())
        code = waits.wait(100)
    finally:
        host.close()
    assert code == 0, told.read_text()
    assert re.search(rf"^{held}; waiting up to 100 s$", told.read_text(), re.M), told.read_text()
    assert remote.runs[-1].alive()


def test_an_engine_that_does_not_let_the_user_in_is_told_with_what_lets_them(
    odd_box: GpuBox, tmp_path: Path
) -> None:
    remote = Far(odd_box, tmp_path / "project", user="ada", runtime="compose", state="/home/ada/state")
    remote.file("command: [sleep, '1']\nimage: {use: my/image:1}\n")
    said = refused(remote)
    assert "ada may not use the Docker engine of gpu-box (" in said
    assert (
        "Permission denied); run sudo usermod -aG docker ada there, which gives ada root's rights, and log in anew"
        in said
    )
