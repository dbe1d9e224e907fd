"""start, rollback, diff, drift, pull and prune, as people use them: real runs in the process runtime."""

# ruff: noqa: E501  (whole sentences, as people read them)

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployed import until
from fabbed import COUNTING, FAB, Fab, project

from trainer import status

pytestmark = pytest.mark.slow

# A script of one's own, beside the project: what it prints is what its file said when it was started.
SCRIPT = """\
command: [python, train.py]
working_directory: HERE
grace_seconds: 5
settle_seconds: 0
"""
# Says something first, and then that it cannot.
DIES = """\
command:
- python
- -c
- |
  import sys, time
  print("up", flush=True)
  time.sleep(1)
  print("no kernel image")
  sys.exit(3)
restart: {attempts: 0}
"""
TRAIN = "import time\nprint('as it was', flush=True)\nwhile True:\n    time.sleep(0.05)\n"


@pytest.fixture
def fab(tmp_path: Path) -> Iterator[Fab]:
    yield from project(tmp_path)


def release_of(run: status.RunDir) -> str:
    made = run.run()
    assert made is not None
    return str(made.release["id"])


def deploy(fab: Fab, greeting: str, task: str = "deploy") -> str:
    """Deploy with a greeting of its own; the id of its release."""
    fab.file(COUNTING.replace("GREETING: hello", f"GREETING: {greeting}"))
    fab.ok(task, "--no-follow")
    return release_of(fab.runs[-1])


# -- start and rollback ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_start_starts_what_is_deployed_whatever_the_files_say_and_leaves_a_run_alone(fab: Fab) -> None:
    first = deploy(fab, "one")
    shown = fab.ok("start", "--no-follow")
    assert shown.startswith(f"unchanged: 0001-demo runs release {first} on localhost")
    fab.ok("stop")
    fab.file(COUNTING.replace("hello", "two"))
    assert fab.ok("start", "--dry-run").splitlines()[0] == "start demo on localhost"
    assert len(fab.runs) == 1
    fab.ok("start", "--no-follow")
    assert release_of(fab.runs[1]) == first
    assert '"settled"' not in (fab.runs[1].path / "switch.json").read_text()  # as its settle_seconds: 0 says
    until(lambda: "greeting one\n" in fab.log(fab.runs[1]))


@pytest.mark.slow
def test_rollback_goes_to_the_release_before_through_the_same_switch_and_back_again(fab: Fab) -> None:
    first = deploy(fab, "one")
    refused = fab.run("rollback", "--no-follow")
    assert (refused.returncode, refused.stderr) == (
        1, f"demo on localhost cannot be rolled back: {first} is the only release that ever ran there\n"
    )  # fmt: skip
    second = deploy(fab, "two", "restart")
    shown = fab.ok("rollback", "--no-follow")
    assert f"release   {second} → {first}, on the host already" in shown
    assert "environment.GREETING: two → one" in shown
    assert "stop      0002-demo" in shown
    assert [run.alive() for run in fab.runs] == [False, False, True]
    until(lambda: "greeting one\n" in fab.log(fab.runs[2]))
    home = fab.place.root / "names" / "demo"
    assert (os.readlink(home / "current"), os.readlink(home / "previous")) == (
        f"releases/{first}",
        f"releases/{second}",
    )
    fab.ok("rollback", "--no-follow")
    assert release_of(fab.runs[3]) == second


@pytest.mark.slow
def test_rollback_refuses_early_when_what_it_needs_is_gone(fab: Fab) -> None:
    first = deploy(fab, "one")
    second = deploy(fab, "two", "restart")
    releases = fab.place.root / "names" / "demo" / "releases"
    (releases / first).rename(fab.root / "aside")
    refused = fab.run("rollback", "--no-follow")
    assert refused.stderr == (
        f"demo on localhost cannot be rolled back: the files of release {first} are gone (pruned); "
        "fab deploy writes the release of another commit anew\n"
    )
    assert (refused.returncode, refused.stdout) == (1, "")
    (fab.root / "aside").rename(releases / first)
    (releases / first / "run.yaml").chmod(0o644)
    (releases / first / "run.yaml").write_text("name: demo\n")
    refused = fab.run("rollback", "--no-follow")
    assert refused.returncode == 1
    assert f"of release {first} of demo was changed on localhost" in refused.stderr
    planned = fab.ok("plan", "--set", "environment.GREETING=one")  # its own --set is no part of a release
    assert f"{second} → {first}, damaged on the host (run.yaml): moved aside, and written anew\n" in planned
    shutil.rmtree(fab.runs[0].path)
    refused = fab.run("rollback", "--no-follow")
    assert f"no run of release {first} of demo is known on localhost any more" in refused.stderr
    assert [release_of(run) for run in fab.runs if run.alive()] == [second]


@pytest.mark.slow
def test_a_new_run_that_dies_names_the_way_back_and_rollback_takes_it(fab: Fab) -> None:
    first = deploy(fab, "one")
    fab.file(DIES)
    followed = fab.run("deploy")
    assert (followed.returncode, fab.runs[-1].alive()) == (3, False)
    assert "\nup\nno kernel image\n" in followed.stdout
    fab.ok("rollback", "--no-follow")
    done = fab.run("deploy", "--no-follow")
    assert (done.returncode, fab.runs[-1].alive()) == (3, False)
    assert "  │ no kernel image\n" in done.stderr
    assert "deploy of demo failed: run 0004-demo failed with exit code 3" in done.stderr
    for each in (followed, done):
        assert each.stderr.splitlines()[-1] == f"fab rollback --name demo goes back to release {first}"
    fab.ok("rollback", "--no-follow")
    assert release_of(fab.runs[-1]) == first
    assert fab.runs[-1].alive()


@pytest.mark.slow
def test_what_is_restored_if_the_new_run_dies_is_in_the_plan(fab: Fab) -> None:
    """That it is restored is shown in test_switch: a command of one's own tells no steps."""
    wanted = ("deploy", "--dry-run", "--rollback-on-failure")
    assert "rollback" not in fab.ok(*wanted).replace("--rollback", "")
    first = deploy(fab, "one")
    fab.file(COUNTING.replace("hello", "two"))
    assert f"rollback  to release {first}, should the new run die before its first step" in fab.ok(*wanted)


# -- diff and drift ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_diff_shows_what_is_deployed_against_what_would_be_rendered(fab: Fab) -> None:
    assert fab.ok("diff").startswith("nothing of demo is deployed on localhost; fab deploy would write ")
    first = deploy(fab, "one")
    assert fab.ok("diff") == f"no difference: release {first} is what would be rendered\n"
    shown = fab.ok("diff", "--set", "environment.GREETING=two")
    assert shown.startswith(f"release {first} → ")
    assert "environment.GREETING: one → two" in shown
    assert '-GREETING="one"' in shown or "-  GREETING: one" in shown
    assert len(fab.runs) == 1


def drift(fab: Fab) -> list[str]:
    return list(json.loads(fab.ok("status", "--json", "--host", "localhost"))[0]["drift"])


@pytest.mark.slow
def test_a_corrected_script_whose_process_was_not_restarted_is_drift_until_it_is(fab: Fab) -> None:
    """The file was changed, the process was not."""
    script = fab.root / "train.py"
    script.write_text(TRAIN)
    fab.file(SCRIPT.replace("HERE", str(fab.root)))
    fab.ok("deploy", "--no-follow")
    assert drift(fab) == []
    later = fab.runs[0].path.stat().st_mtime + 60
    script.write_text(TRAIN.replace("as it was", "corrected"))
    os.utime(script, (later, later))
    (found,) = drift(fab)
    assert found.startswith("train.py: changed at ")
    assert found.endswith(", after the process had started")
    assert "; fab restart --name demo applies it" in fab.ok("status")


@pytest.mark.slow
def test_drift_names_the_files_edited_on_the_host_and_each_setting_that_would_be_rendered_now(
    fab: Fab,
) -> None:
    deploy(fab, "one")
    fab.file(COUNTING.replace("hello", "two") + "restart: {attempts: 7}\n")
    assert drift(fab) == ["environment.GREETING: one → two", "restart.attempts: 3 → 7"]
    edited = fab.place.root / "names" / "demo" / "releases" / release_of(fab.runs[0]) / "run.env"
    edited.chmod(0o644)
    edited.write_text('GREETING="two"\n')
    assert drift(fab)[-1] == "run.env: changed on the host"


@pytest.mark.slow
def test_drift_names_a_variable_that_the_process_has_not(fab: Fab) -> None:
    """run.json says what was deployed; the process shows in /proc what it really has."""
    deploy(fab, "one")
    written = fab.runs[0].path / "run.json"
    value = json.loads(written.read_text())
    value["environment"]["GREETING"] = "another"
    value["environment"]["API_KEY"] = "hunter2"
    status.write_json(written, value)
    assert "process: GREETING is one, but another was deployed" in drift(fab)
    for words in (["status"], ["status", "--json"], ["runs", "--json"]):
        shown = fab.ok(*words, "--host", "localhost")
        assert "API_KEY" in shown
        assert "hunter2" not in shown


# -- watching what is under way ----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_deploy_whose_client_was_killed_is_watched_by_the_next_one(fab: Fab) -> None:
    """The switch goes on by itself; it stops a run that takes its time."""
    slow = COUNTING.replace(
        "import itertools, os, time",
        "import itertools, os, signal, time\n  signal.signal(signal.SIGTERM, lambda *_: (time.sleep(4), os._exit(0)))",
    )
    fab.file(slow)
    fab.ok("deploy", "--no-follow")
    fab.file(slow.replace("hello", "two"))
    client = fab.begin("deploy", start_new_session=True)
    stopping = fab.place.root / "runs" / "0002-demo" / "switch.json"
    until(
        lambda: (
            stopping.exists()
            and any(step["name"] == "stop" for step in json.loads(stopping.read_text())["steps"])
        )
    )
    os.killpg(client.pid, signal.SIGKILL)
    client.wait()
    done = fab.run("deploy", "--no-follow")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0].startswith("a switch by ")
    assert done.stderr.splitlines()[0].endswith(" of demo is under way on localhost: watching it")
    assert done.stdout.startswith("unchanged: 0002-demo runs release ")
    assert len(fab.runs) == 2


# -- pull and prune ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_log_a_run_and_a_checkpoint_are_brought_home_whole(fab: Fab) -> None:
    deploy(fab, "one")
    run = fab.runs[0]
    until(lambda: "line 5\n" in fab.log(run))
    fab.ok("stop")
    out = fab.ok("pull", "--what", "log", "--out", "home")
    assert out.startswith("home/0001-demo.log: ")
    assert (fab.root / "home" / "0001-demo.log").read_text() == fab.log(run)
    fab.ok("pull", "--what", "run", "--out", "home")
    assert json.loads((fab.root / "home" / "0001-demo" / "exit.json").read_text())["reason"] == "stopped"
    checkpoints = fab.place.root / "names" / "demo" / "checkpoints"
    step = checkpoints / "0001-demo" / "step-00000010"
    step.mkdir(parents=True)
    (step / "drafter.safetensors").write_bytes(os.urandom(3_000_000))
    (checkpoints / "latest").symlink_to("0001-demo/step-00000010")
    assert fab.ok("pull", "--out", "home").startswith(
        "home/0001-demo-step-00000010: 1 file, 3.0 MB (3.0 MB fetched)"
    )
    copy = fab.root / "home" / "0001-demo-step-00000010" / "drafter.safetensors"
    assert copy.read_bytes() == (step / "drafter.safetensors").read_bytes()
    assert fab.ok("pull", "--out", "home") == "home/0001-demo-step-00000010 is there already\n"
    assert sorted(path.name for path in (fab.root / "home").iterdir()) == [
        "0001-demo",
        "0001-demo-step-00000010",
        "0001-demo.log",
    ]
    done = fab.run("pull", "--what", "all")
    assert (done.returncode, done.stderr) == (2, "--what all is not one of checkpoint, events, log or run\n")
    assert fab.run("pull", "--name", "dem").returncode == 2


@pytest.mark.slow
def test_prune_shows_what_goes_asks_and_keeps_what_start_and_rollback_need(fab: Fab) -> None:
    made = [deploy(fab, "one")]
    for greeting in ("two", "three", "four"):
        made.append(deploy(fab, greeting, "restart"))
    before = fab.snapshot()
    shown = fab.ok("prune", "--keep", "1", "--dry-run")
    assert [line.split()[:3] for line in shown.splitlines()[1:]] == [
        ["release", "demo", made[0]], ["release", "demo", made[1]], ["run", "0001-demo", shown.splitlines()[3].split()[2]],
        ["run", "0002-demo", shown.splitlines()[4].split()[2]],
    ]  # fmt: skip
    done = fab.run("prune", "--keep", "1")
    assert (done.returncode, done.stderr) == (
        2,
        "nothing was done: there is no terminal to ask on; --yes does it\n",
    )
    assert set(fab.snapshot()) >= set(before)
    assert fab.ok("prune", "--keep", "1", "--yes").splitlines()[-1].endswith(" freed on localhost")
    assert [run.path.name for run in fab.runs] == ["0003-demo", "0004-demo"]
    assert fab.runs[-1].alive()
    assert sorted(os.listdir(fab.place.root / "names" / "demo" / "releases")) == sorted(made[2:])
    assert fab.ok("prune", "--keep", "1", "--yes") == "nothing to prune on localhost\n"
    fab.ok("rollback", "--no-follow")
    assert release_of(fab.runs[-1]) == made[2]


# -- the menu ----------------------------------------------------------------------------------------------


def test_a_name_that_nobody_knows_is_a_mistake_and_one_without_a_run_is_not(fab: Fab) -> None:
    done = fab.run("status", "--name", "dmeo")
    assert (done.returncode, done.stderr) == (2, "there is no dmeo on localhost; did you mean demo?\n")
    absent = "localhost  demo  absent  no run of this name on this host\n    next: fab deploy --name demo\n"
    assert fab.ok("status", "--name", "demo") == absent
    (row,) = json.loads(fab.ok("status", "--name", "demo", "--json"))
    assert (row["verdict"], row["run_id"], row["next_command"]) == ("absent", None, "fab deploy --name demo")


def test_ctrl_c_while_the_command_is_only_beginning_ends_it_without_a_traceback(fab: Fab) -> None:
    """Signalled from a fabric.yaml that is a pipe: reading it is among the first things that are ours."""
    (fab.root / "fabric.yaml").unlink()
    os.mkfifo(fab.root / "fabric.yaml")
    child = subprocess.Popen([*FAB, "status"], cwd=fab.root, env=fab.environment(), stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True)  # fmt: skip
    with open(fab.root / "fabric.yaml", "w"):  # opens once the other side reads
        child.send_signal(signal.SIGINT)
        out, errors = child.communicate(timeout=60)
    assert (child.returncode, out, errors) == (130, "", "")


def test_bootstrap_says_what_it_would_run_and_runs_nothing_without_a_yes(fab: Fab) -> None:
    shown = json.loads(fab.ok("bootstrap", "--dry-run", "--json"))
    assert shown["host"] == "localhost"
    if shown["steps"]:
        assert fab.run("bootstrap").returncode == 2
