"""Several people and one name: who is named, who waits, who plans anew, and what nobody started is seen."""

# ruff: noqa: E501  (whole sentences, as people read them)

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deployed import HOST, until
from fabbed import COUNTING, FAB, Fab, project, server

from deploy import actions, conduct, execute, files, lock, probe, strays, switch, target, turn
from deploy.errors import DeployError
from deploy.health_words import cut
from trainer import status

# Takes its time to end, until the file GATE is there.
SLOW_TO_END = COUNTING.replace(
    "import itertools, os, time",
    "import itertools, os, signal, time\n"
    "  signal.signal(signal.SIGTERM, lambda *_: ([time.sleep(0.02) for _ in iter(lambda: os.path.exists('GATE'), True)], os._exit(0)))",
).replace("grace_seconds: 5", "grace_seconds: 120")
TRAIN = "import time\nprint('up', flush=True)\nwhile True:\n    time.sleep(0.05)\n"
SCRIPT = "command: [python, train.py]\nworking_directory: HERE\ngrace_seconds: 5\nsettle_seconds: 0\nrestart: {attempts: 0}\n"


@pytest.fixture
def fab(tmp_path: Path) -> Iterator[Fab]:
    yield from project(tmp_path)


class Begun:
    """`fab` that goes on meanwhile."""

    def __init__(self, fab: Fab, *words: str) -> None:
        self.files = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]  # noqa: SIM115
        out, err = (file.fileno() for file in self.files)
        self.process = server().start([*FAB, *words], fab.root, fab.environment(), out, err)

    def text(self, which: int) -> str:
        return os.pread(self.files[which].fileno(), 1 << 20, 0).decode()

    def says(self, words: str) -> None:
        until(lambda: words in self.text(1) or self.process.poll() is not None)
        assert words in self.text(1), self.text(0) + self.text(1)

    def end(self) -> tuple[int, str, str]:
        return self.process.wait(120), self.text(0), self.text(1)


def switching(fab: Fab) -> tuple[Begun, Path]:
    """A restart whose switch waits for the old run's end, and the file that lets it go on."""
    gate = fab.root / "gate"
    fab.file(SLOW_TO_END.replace("GATE", str(gate)))
    fab.ok("deploy", "--no-follow")
    until(lambda: "greeting" in fab.log(fab.runs[0]))  # from here on it hears
    first = Begun(fab, "restart", "--no-follow", "--set", "environment.GREETING=two")
    record = fab.place.root / "runs" / "0002-demo" / "switch.json"
    until(lambda: record.exists() and '"stop"' in record.read_text())
    return first, gate


# -- a switch or another client at work --------------------------------------------------------------------


@pytest.mark.slow
def test_a_stop_waits_for_the_switch_that_is_under_way_and_stops_what_it_starts(fab: Fab) -> None:
    first, gate = switching(fab)
    looked = fab.ok("stop", "--dry-run")
    assert "0001-demo" in looked
    assert f"; a switch by {lock.who()}, begun " in (shown := fab.ok("status"))
    assert " s ago, to 0002-demo is under way" in shown
    stop = Begun(fab, "stop")
    stop.says(" of demo is under way on localhost: watching it")
    assert stop.text(1).startswith(f"a switch by {lock.who()}, since ")
    gate.touch()
    code, out, err = stop.end()
    assert (code, out.splitlines()[0]) == (0, "stop demo on localhost"), err
    assert "  stop      0002-demo" in out
    assert [run.alive() for run in fab.runs] == [False, False]
    assert first.end()[0] in (0, 1)  # its run was stopped, perhaps before it had said anything


@pytest.mark.slow
def test_whoever_starts_something_meanwhile_watches_the_switch_and_then_says_where_it_stands(
    fab: Fab,
) -> None:
    first, gate = switching(fab)
    two = ("--no-follow", "--set", "environment.GREETING=two")
    others = [
        Begun(fab, "restart", *two),
        Begun(fab, "start", "--no-follow"),
        Begun(fab, "rollback", "--no-follow"),
    ]
    for one in others:
        one.says(" of demo is under way on localhost: watching it")
    gate.touch()
    restart, start, rollback = (one.end() for one in others)
    for code, out, err in (restart, start):
        assert (code, out.startswith("unchanged: 0002-demo runs release ")) == (0, True), out + err
    assert rollback[0] == 1
    old, new = (run.run().release["id"] for run in fab.runs)  # type: ignore[union-attr]
    assert rollback[2].splitlines()[-1] == (
        f"nothing was rolled back: {lock.who()} has just made {new} the release of demo on localhost; "
        f"fab rollback --name demo goes back to {old}"
    )
    assert first.end()[0] == 0
    assert [run.alive() for run in fab.runs] == [False, True]


@pytest.mark.slow
def test_nothing_to_stop_is_not_said_while_somebody_makes_a_run_ready(fab: Fab) -> None:
    with lock.hold(HOST, str(fab.place.root), "demo", "deploy"):
        refused = fab.run("stop", "--lock-wait", "0")
        assert (refused.returncode, refused.stdout) == (1, "")
        held = f"demo on localhost is locked by {lock.who()} (deploy, since "
        assert refused.stderr.startswith(held)
        looked = fab.ok("stop", "--dry-run")
        assert looked.startswith(
            f"no run of demo is in progress on localhost yet: a deploy by {lock.who()} has been "
        )
        stop = Begun(fab, "stop")
        stop.says(held)
        plan = Begun(fab, "plan", "--lock-wait", "60")
        plan.says(held)
    assert stop.end()[:2] == (0, "nothing to stop: no run of demo is in progress on localhost\n")
    code, out, _ = plan.end()
    assert (code, out.splitlines()[0], "under way" in out) == (0, "deploy demo on localhost", False)
    assert fab.runs == []


def test_who_was_quicker_makes_a_fresh_plan_which_here_has_nothing_to_do(
    fab: Fab, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("DRAFTHOUSE_STATE", "DRAFTHOUSE_SHM", "HOME", "PATH"):
        monkeypatch.setenv(key, fab.environment()[key])
    goal = target.one(None, fab.root)
    wanted = actions.recipe(goal, None, None)
    shown: list[str] = []
    said: list[str] = []

    def show(made: Any) -> None:
        if not shown:
            fab.ok("deploy", "--no-follow")
        shown.append(made.action)

    made, begun = turn.carry(
        lambda: actions.plan_deploy("deploy", goal, wanted),
        show,
        lambda made, work: execute.start(made, goal.host, work, said.append),
        said.append,
    )
    assert (shown, begun) == (["start", "unchanged"], None)
    assert said == ["demo on localhost has changed since this plan was made: planning again"]
    assert str(made).startswith("unchanged: 0001-demo runs release ")
    assert len(fab.runs) == 1


@pytest.mark.slow
def test_a_stop_is_not_undone_by_a_command_that_was_given_before_it(
    fab: Fab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deploy that has made its plan, and one that watches the stop itself; who comes after it, starts."""
    for key in ("DRAFTHOUSE_STATE", "DRAFTHOUSE_SHM", "HOME", "PATH"):
        monkeypatch.setenv(key, fab.environment()[key])
    gate = fab.root / "gate"
    fab.file(SLOW_TO_END.replace("GATE", str(gate)))
    goal = target.one(None, fab.root)
    wanted = actions.recipe(goal, None, None)
    refused = (
        f"run 0001-demo was stopped by {lock.who()} after this command was given, so nothing was started; "
    )
    stops: list[Begun] = []

    def begin_to_stop() -> None:
        until(lambda: "greeting" in fab.log(fab.runs[-1]))  # from here on it hears
        stops.append(Begun(fab, "stop"))
        until(lambda: goal.facts()["switch"].get("demo"))

    def watch(name: str, words: Any) -> switch.Outcome:
        gate.touch()
        return switch.watch(goal.host, turn.record_of(words, goal, name), lambda step: None)

    fab.ok("deploy", "--no-follow")
    restart, start = turn.Order(), turn.Order()
    actions.plan_deploy("restart", goal, wanted, order=restart)
    actions.plan_again("start", goal, "demo", order=start)
    begin_to_stop()
    with pytest.raises(DeployError, match=refused):
        actions.plan_deploy("restart", goal, wanted, watch=watch, order=restart)
    with pytest.raises(DeployError, match=refused):
        actions.plan_again("start", goal, "demo", watch=watch, order=start)
    assert stops[-1].end()[0] == 0
    assert not any(run.alive() for run in fab.runs)

    fab.ok("start", "--no-follow")
    gate.unlink()
    begin_to_stop()
    after = Begun(fab, "deploy", "--no-follow")
    after.says(" of demo is under way on localhost: watching it")
    gate.touch()
    assert (after.end()[0], stops[-1].end()[0]) == (0, 0)
    assert [run.alive() for run in fab.runs] == [False, False, True]


@pytest.mark.slow
def test_a_deploy_whose_run_is_stopped_before_it_has_settled_says_by_whom_and_blames_no_release(
    fab: Fab,
) -> None:
    fab.ok("deploy", "--no-follow")
    fab.file(COUNTING.replace("settle_seconds: 0", "settle_seconds: 300"))
    deploy = Begun(fab, "deploy", "--no-follow")
    record = fab.place.root / "runs" / "0002-demo" / "switch.json"
    until(lambda: record.exists() and '"settled"' in record.read_text())
    fab.ok("stop")
    code, _, said = deploy.end()
    last = f"deploy of demo was cut short: the new run was stopped by {lock.who()}"
    assert (code, said.splitlines()[-1]) == (1, last)


def test_what_has_become_of_a_run_is_said_with_who_is_at_work_on_it() -> None:
    stop = {"what": "stop", "by": "ada@desk", "since": None}
    assert conduct.became(None, None) == "is running"
    assert conduct.became(None, stop) == "is running, but a stop by ada@desk is under way"
    assert conduct.became({"reason": "stopped", "asked_by": "ada@desk"}, None) == "was stopped by ada@desk"
    assert conduct.became({"reason": "failed", "asked_by": None}, None) == "has failed already"


def test_a_lock_that_comes_free_while_the_probe_reads_still_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that a switch has started just then would be missed, and nothing said of the switch."""
    home = tmp_path / "names" / "demo"
    home.mkdir(parents=True)
    held = os.open(home / "switch.lock", os.O_RDWR | os.O_CREAT)
    assert files.take(held)
    files.say(held, {"by": "ada@desk"})
    monkeypatch.setattr(probe.Probe, "runs", lambda self: os.close(held) or [])
    monkeypatch.setattr(probe.machine, "engine_facts", lambda: {"engine": {}, "images": [], "containers": {}})
    assert probe.Probe(tmp_path, tmp_path, 0).facts()["switch"] == {"demo": {"by": "ada@desk"}}


def test_the_record_of_an_earlier_job_is_not_taken_for_that_of_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switch, "RECORD_PATIENCE", 0.1)
    record = tmp_path / "stop.json"
    value = {
        "outcome": "done",
        "reason": None,
        "last_lines": [],
        "exit": None,
        "steps": [],
        "job": {"pid": 1, "start": 0},
    }
    record.write_text(json.dumps(value))
    assert switch.watch(HOST, str(record), lambda step: None, pid=1).word == "done"
    with pytest.raises(switch.NoRecord):
        switch.watch(HOST, str(record), lambda step: None, pid=2)


# -- the link of a name ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_link_that_somebody_removed_is_in_the_plan_and_put_right_without_a_restart(fab: Fab) -> None:
    fab.ok("deploy", "--no-follow")
    current = fab.place.root / "names" / "demo" / "current"
    was = os.readlink(current)
    current.unlink()
    same = fab.run("restart", "--same", "--no-follow")
    assert (same.returncode, same.stderr) == (
        1,
        "demo on localhost has no current release, as the link names/demo/current is not there; fab deploy --name demo puts it right\n",
    )
    assert fab.ok("diff").endswith(same.stderr)
    assert f"; {same.stderr.partition(' on localhost')[0]} has no current release, as" in fab.ok("status")
    planned = fab.ok("plan")
    assert planned.splitlines()[1:] == [f"link: {current} is not there; it is put right, to lead to {was}"]
    assert not current.is_symlink()
    assert fab.ok("deploy", "--no-follow").splitlines()[1:] == planned.splitlines()[1:]
    assert os.readlink(current) == was
    assert len(fab.ok("plan").splitlines()) == 1
    assert [run.alive() for run in fab.runs] == [True]
    assert "current release" not in fab.ok("status")


# -- what nobody deployed ----------------------------------------------------------------------------------


@pytest.fixture
def by_hand() -> Iterator[Any]:
    """Start a process as somebody does at a shell; it is up when this returns."""
    begun: list[subprocess.Popen[bytes]] = []

    def start(argv: list[str], cwd: Path, **environment: str) -> int:
        process = subprocess.Popen(argv, cwd=cwd, env={**os.environ, **environment}, stdout=subprocess.PIPE)
        begun.append(process)
        assert process.stdout
        assert process.stdout.readline()
        return process.pid

    yield start
    for process in begun:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_training_that_somebody_started_by_hand_keeps_a_second_one_from_starting(
    fab: Fab, by_hand: Any
) -> None:
    (fab.root / "train.py").write_text(TRAIN)
    fab.file(SCRIPT.replace("HERE", str(fab.root)))
    fab.ok("deploy", "--no-follow")
    run = fab.runs[0]
    launch = run.launch()
    assert launch
    os.kill(launch.pid, signal.SIGKILL)
    until(lambda: not run.alive())
    pid = by_hand([sys.executable, str(fab.root / "train.py")], run.path)
    said = f"process {pid} on localhost ({cut(f'{sys.executable} {fab.root}/train.py', strays.SHOWN)}, for "
    rest = (
        ") trains demo already, in the directory of 0001-demo, and belongs to no run in progress; two at once would "
        "spoil its checkpoints: end that process, or wait for its end\n"
    )
    for words in (["deploy"], ["start"]):
        done = fab.run(*words, "--no-follow")
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(said), done.stderr
        assert done.stderr.endswith(rest), done.stderr
    assert len(fab.runs) == 1
    os.kill(pid, signal.SIGKILL)
    fab.ok("start", "--no-follow")
    assert [run.alive() for run in fab.runs] == [False, True]


def test_processes_in_a_names_places_are_told_apart(tmp_path: Path, by_hand: Any) -> None:
    root, link = tmp_path / "state", tmp_path / "link"
    over, alive = root / "runs" / "0001-demo", root / "runs" / "0002-demo"
    saved = root / "names" / "demo" / "checkpoints"
    other = root / "runs" / "0003-demo-b"
    for place in (over, alive, saved, other):
        place.mkdir(parents=True)
    link.symlink_to(root)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "eval.py").write_text(TRAIN)
    train, evaluate = ([sys.executable, "-u", str(tmp_path / f"{name}.py")] for name in ("train", "eval"))
    mark = status.RUN_DIR_VARIABLE
    hands = {
        by_hand(train, tmp_path, **{mark: str(over)}): ("with the environment of 0001-demo", True),
        by_hand(evaluate, saved): ("in the checkpoints of demo", False),
        by_hand([*evaluate, f"--from={saved}/latest"], tmp_path): ("on the checkpoints of demo", False),
        by_hand([*train, f"--evaluate={saved}/latest"], tmp_path): ("on the checkpoints of demo", False),
        by_hand(["sh", "-c", "echo up; exec sleep 100"], tmp_path, **{mark: str(over)}): (
            "with the environment of 0001-demo",
            False,
        ),
    }
    by_hand(["sh", "-c", "echo up; exec sleep 100"], over)  # (neither a shell nor a pager trains)
    by_hand(train, tmp_path, **{mark: str(alive)})  # of a run in progress
    by_hand(train, other)  # of another name
    by_hand(train, tmp_path)  # of nobody
    known = by_hand(train, over)
    with open(alive / "launch.lock", "w") as lives:
        assert files.take(lives.fileno())
        found = strays.look(str(link), "demo", ["python: train.py"], [known])
    assert {one["pid"]: (one["where"], one["same"]) for one in found} == hands
    assert all(one["age"] < 60 for one in found)
    checks = strays.checks(found, "demo", "box")
    assert sorted(check.warning for check in checks) == [False, True, True, True]


@pytest.mark.parametrize(
    ("words", "program"),
    [
        ("/opt/venv/bin/python3.11 -u -X dev /a/train.py --lr 1", "python: train.py"),
        ("python train.py", "python: train.py"),
        ("env A=b python -m trainer --lr 1", "python: -m trainer"),
        ("torchrun --nproc 2 train.py", "torchrun"),
        ("bash run.sh", "bash: run.sh"),
        ("-bash", "bash"),
        ("", ""),
    ],
)
def test_what_a_command_runs_is_known_whoever_wrote_its_path_and_flags(words: str, program: str) -> None:
    assert strays.program(words.split()) == program
