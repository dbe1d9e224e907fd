"""fab adopt --pid: a training that somebody began by hand, from the first look until a deploy replaces it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys

import fabbed
import pytest
from deployed import until
from far import Far

from deploy import adopt_process, adopted_stop, procfs, yamlfile
from deploy.errors import DeployError
from trainer import status

# Prints as people's scripts do, into a file and so into a buffer; its child waits as a loader's worker does.
TRAIN = """\
import os, sys, time
if os.fork() == 0:
    time.sleep(1000)
print("step 1 at level", os.environ["LEVEL"])
open("begun", "w").write(str(os.getpid()))
end = time.time() + 1000
while time.time() < end:
    sum(range(10000))
    time.sleep(0.001)
"""
SCRIPT = """\
#!/bin/bash
export LEVEL=hard
export WANDB_API_KEY=s3cretvalue
exec {python} train.py --lr 1 --api-token t0ps3cret
"""


@pytest.fixture
def fab(tmp_path):
    yield from fabbed.project(tmp_path)


@pytest.fixture
def train(tmp_path):
    """The training of somebody who knows nothing of us: its pid, once it has printed."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "train.py").write_text(TRAIN)
    (home / "run.sh").write_text(SCRIPT.format(python=sys.executable))
    env = {key: text for key, text in os.environ.items() if not key.startswith(("PYTHON", "DRAFTHOUSE"))}
    with open(home / "train.log", "wb") as log:
        process = subprocess.Popen(
            ["bash", "run.sh"], cwd=home, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    until(lambda: (home / "begun").exists() and (home / "begun").read_text())
    yield process, home
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
def test_it_is_seen_at_once_and_then_replaced(fab, train):
    process, home = train
    before = procfs.stat(process.pid)["start"]
    text = fab.ok("adopt", "--pid", str(process.pid), "--name", "x")
    assert "was not touched" in text
    assert "s3cret" not in text + (fab.root / "runs" / "x.yaml").read_text()
    assert not any(b"s3cret" in data for _, data in fab.snapshot().values())
    (run,) = fab.runs
    told = json.loads((run.path / "run.json").read_text())["adopted"]
    assert (told["pid"], told["start"], told["stdout"]) == (process.pid, before, str(home / "train.log"))

    (row,) = json.loads(fab.ok("status", "--name", "x", "--json"))
    assert "is held back in its buffer" in row["reason"] or row["verdict"] == "starting", row
    assert "2 processes" in row["reason"] or row["verdict"] == "starting", row
    assert "step 1 at level hard" in fab.ok("peek", "--name", "x")
    assert "train.py" in fab.ok("stacks", "--name", "x")
    with open(home / "train.log", "a") as log:
        log.write("a line of its own\n")
    assert fab.ok("tail", "--name", "x", "--no-follow") == "a line of its own\n"

    with pytest.raises(DeployError, match="is adopted already, as run 0001-x"):
        adopt_process.look(process.pid, "here", str(fab.place.root))
    assert process.poll() is None
    family = adopt_process.tree(process.pid)
    assert len(family) == 2
    (home / "begun").unlink()
    done = fab.run(
        "deploy", "--run", "x", "--no-follow", "--set", "settle_seconds=0", WANDB_API_KEY="another"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"process {process.pid} and its children" in done.stdout
    assert "no checkpoint can be asked for" in done.stdout
    assert process.wait(timeout=10) == -signal.SIGTERM
    assert not adopt_process.living(family)
    old, new = fab.runs
    assert old.exit().reason == "stopped"
    assert new.alive()
    until(lambda: (home / "begun").exists())
    assert "step 1 at level hard" in fab.log(new)


def test_that_the_run_would_be_another_users_is_said(fab, train, monkeypatch):
    process, _ = train
    assert adopt_process.look(process.pid, "here", str(fab.place.root))["notes"] == []
    monkeypatch.setattr(adopt_process.os, "geteuid", lambda: 65534)
    (said,) = adopt_process.look(process.pid, "here", str(fab.place.root))["notes"]
    assert "but a run runs as nobody: what it writes will be nobody's" in said


def test_its_own_end_is_told_and_a_number_that_is_used_again_is_not_it(fab, train):
    process, _ = train
    state = str(fab.place.root)
    found = adopt_process.look(process.pid, "here", state)
    run_id = adopt_process.register(
        state, "x", found["identity"], {"command": found["argv"], "environment": {}}
    )
    run = status.RunDir(fab.place.root / "runs" / run_id)
    assert run.alive()
    told = run.run()
    for key, other in (("start", told.adopted["start"] + 1), ("boot", "another"), ("pid", os.getpid())):
        run.write_run(status.Run(**{**vars(told), "adopted": {**told.adopted, key: other}}))
        assert not run.alive(), key
    run.write_run(told)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not run.alive()
    (row,) = json.loads(fab.ok("status", "--name", "x", "--json"))
    assert row["verdict"] == "stopped"
    assert f"process {process.pid}, which was adopted, has ended: how is not known" in row["reason"]
    assert fab.run("stop", "--name", "x").returncode == 0
    with pytest.raises(DeployError, match="has ended meanwhile"):
        adopt_process.register(state, "x", found["identity"], {"command": [], "environment": {}})


def test_what_is_no_training_is_refused_in_one_sentence(fab, train):
    process, _ = train
    state = str(fab.place.root)
    sleeps = subprocess.Popen(["sleep", "1000"])
    marked = subprocess.Popen(
        [sys.executable, "-c", "input()"],
        stdin=subprocess.PIPE,
        env={**os.environ, "DRAFTHOUSE_RUN_DIR": "/r/0007-z"},
    )
    try:
        gone = subprocess.Popen(["true"])
        gone.wait()
        until(lambda: procfs.run_of(marked.pid) is not None)
        for pid, sentence in (
            (gone.pid, "there is no process"),
            (2, "is a thread of the kernel|there is no process|cannot be read|is no Python"),
            (sleeps.pid, "is no Python, so nothing of it can be adopted"),
            (marked.pid, "belongs to run 0007-z"),
        ):
            with pytest.raises(DeployError, match=sentence) as caught:
                adopt_process.look(pid, "here", state)
            assert "\n" not in str(caught.value)
        done = fab.run("adopt", "--pid", "x")
        assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    finally:
        for one in (sleeps, marked):
            one.kill()
            one.wait()
    assert process.poll() is None


@pytest.mark.slow
def test_a_shell_above_it_means_it_and_its_family_ends_even_if_it_will_not(tmp_path):
    program = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = os.fork()\n"
        "open('begun', 'w').write('x') if child else os.setsid()\n"
        "time.sleep(1000)\n"
    )
    (tmp_path / "t.py").write_text(program)
    shell = subprocess.Popen(
        ["bash", "-c", f"{sys.executable} t.py > out; sleep 1000"], cwd=tmp_path, start_new_session=True
    )
    try:
        until(lambda: (tmp_path / "begun").exists())
        found = adopt_process.look(shell.pid, "here", str(tmp_path))
        assert found["argv"][1] == "t.py"
        assert found["pid"] != shell.pid
        assert any("started it and goes on when it ends" in one for one in found["notes"])
        family = adopt_process.tree(found["pid"])
        assert len(family) == 2
        said, code = adopted_stop.stop(found["identity"], 0.2)
        assert "SIGKILL" in said
        assert code == 137
        assert not adopt_process.living(family)
        assert shell.poll() is None  # who has started it is not ours
        assert adopted_stop.stop(found["identity"], 0.2)[1] == 143  # nothing is there: nothing is done
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


@pytest.mark.root
@pytest.mark.sshd
@pytest.mark.slow
def test_the_same_on_another_machine(gpubox, train, tmp_path):
    """By SSH: the script that has started it; the process itself lives elsewhere for that machine."""
    process, home = train
    remote = Far(gpubox, tmp_path / "project")
    here = ("--host", "gpu-box", "--name", "x")
    before = adopt_process.identity(process.pid)
    text = remote.ok("adopt", *here, "--script", str(home / "run.sh"))
    assert "--api-token → its value is a secret" in text
    by_script = yamlfile.read(remote.root / "runs" / "x.yaml").value
    assert by_script["command"] == [sys.executable, "train.py", "--lr", "1", "--api-token", "***"]
    assert by_script["environment"] == {"LEVEL": "hard"}
    assert by_script["secrets"] == {"WANDB_API_KEY": {"env": "WANDB_API_KEY"}}
    # The box has a mount namespace of its own, as a container has: there its paths are others.
    done = remote.run("adopt", *here, "--pid", str(process.pid), "--force")
    assert done.returncode == 1
    assert "lives in a container" in done.stderr
    assert yamlfile.read(remote.root / "runs" / "x.yaml").value == by_script
    assert not remote.runs
    assert adopt_process.identity(process.pid) == before
