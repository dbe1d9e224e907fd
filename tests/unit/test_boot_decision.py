"""deploy/boot.py: which run goes on after a reboot, and with what."""

from __future__ import annotations

import fcntl
import json
import os
import time

import pytest

from deploy import boot, engine, procfs
from trainer import status


class Runs:
    """Runs of the name demo, as their files would show them."""

    def __init__(self, root):
        self.root = root

    def add(self, exit=None, launched=True, switch=None) -> status.RunDir:
        run = status.allocate_run(self.root, "demo")
        if launched:
            run.write_launch(status.Launch(pid=1, attempt=1))
        if exit:
            run.write_exit(exit)
        if switch:
            status.write_json(run.path / "switch.json", switch)
        return run

    def decide(self) -> tuple[str | None, str]:
        found = boot.decide(status.list_runs(self.root, "demo"))
        return found.run and found.run.path.name, found.reason


@pytest.fixture
def runs(tmp_path):
    return Runs(tmp_path / "runs")


def ended(reason: str, code: int = 0, **more) -> status.Exit:
    return status.Exit(reason, code, **more)


def switch(outcome: str, **steps: str) -> dict:
    found = [{"name": name.replace("_", "-"), "outcome": word} for name, word in steps.items()]
    return {"outcome": outcome, "reason": "the engine said no", "steps": found, "started": 1.0}


def test_without_a_run_nothing_is_started(runs):
    assert runs.decide() == (None, "there is no run that was ever started")


def test_a_run_that_went_with_the_machine_goes_on(runs):
    runs.add(ended("finished"))
    runs.add()
    assert runs.decide()[0] == "0002-demo"


@pytest.mark.parametrize(
    ("exit", "words"),
    [
        (ended("finished"), "run 0001-demo has finished"),
        (ended("stopped", 0, asked_by="ada@desk"), "was stopped by ada@desk"),
        (ended("stopped", 0, asked_by="request"), "was stopped by request"),
        (ended("failed", 3, message="failed: ended with exit code 3 (attempt 4)"), "failed: ended with exit"),
        (ended("failed", 2), "failed with exit code 2"),
    ],
)
def test_a_run_that_is_over_stays_so_and_the_reason_is_told(runs, exit, words):
    runs.add()  # an earlier one that was lost is of no interest
    runs.add(exit)
    found, reason = runs.decide()
    assert found is None
    assert words.replace("0001", "0002") in reason


@pytest.mark.parametrize("who", ["SIGTERM", "SIGINT", None, "shutdown@gpu-box"])
def test_a_run_that_the_machine_stopped_goes_on(runs, who):
    runs.add(ended("stopped", 0, asked_by=who))
    assert runs.decide()[0] == "0001-demo"


def test_a_run_in_progress_is_left_alone_whatever_came_after_it(runs):
    run = runs.add()
    runs.add(ended("finished"))
    lock = os.open(run.lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert runs.decide() == (None, "run 0001-demo is in progress")
    os.close(lock)


def test_a_switch_that_the_reboot_interrupted_is_made_good(runs):
    runs.add(ended("stopped", 0, asked_by="ada@desk"))  # by that switch
    runs.add(launched=False, switch=switch("running", stop="ok", start="running"))
    found, reason = runs.decide()
    assert found == "0002-demo"
    assert "was about to start" in reason


def test_a_run_that_could_not_be_started_is_tried_again(runs):
    runs.add(ended("stopped", 0, asked_by="ada@desk"))
    runs.add(launched=False, switch=switch("failed", stop="ok", start="failed"))
    found, reason = runs.decide()
    assert found == "0002-demo"
    assert "the engine said no" in reason


@pytest.mark.parametrize("outcome", ["failed", "running"])
def test_a_deploy_that_failed_since_the_machine_came_up_is_not_made_once_more(runs, outcome):
    """The deploy itself starts the unit, to have it there, and whoever deployed has read what failed."""
    runs.add(ended("stopped", 0, asked_by="ada@desk"))
    record = switch(outcome, stop="ok", devices="failed")
    run = runs.add(launched=False, switch={**record, "started": time.time()})
    found, reason = runs.decide()
    assert found is None
    assert "run 0001-demo was stopped by ada@desk" in reason
    status.write_json(run.path / "switch.json", {**record, "started": procfs.boot_time() - 60})
    assert runs.decide()[0] == "0002-demo"


def test_what_failed_before_its_engine_came_up_is_tried_again(runs, monkeypatch):
    run = runs.add(launched=False, switch={**switch("failed", stop="ok"), "started": time.time() - 60})
    start = {"argv": ["docker"], "environment": {"DOCKER_HOST": "unix:///x"}, "container": {"project": "p"}}
    wanted = ("state_root", "name", "run_path", "release_id", "first_heartbeat_timeout_seconds")
    spec = {**dict.fromkeys(wanted, "x"), "start": start}
    found = status.Run(run_id=run.path.name, name="demo", command=["a"])
    status.write_json(run.path / boot.FILE, boot.template(found, spec, None))
    monkeypatch.setattr(engine.Engine, "started", lambda self: None)
    assert runs.decide()[0] is None
    monkeypatch.setattr(engine.Engine, "started", lambda self: time.time() - 30)
    assert runs.decide()[0] == "0001-demo"


@pytest.mark.parametrize(
    "record", [None, switch("failed", checkpoint_request="failed"), switch("failed", stop="failed")]
)
def test_a_deploy_that_did_not_come_to_the_stop_left_the_run_before_it(runs, record):
    runs.add()
    runs.add(launched=False, switch=record)
    assert runs.decide()[0] == "0001-demo"


RUN = status.Run(
    run_id="0007-demo",
    name="demo",
    command=["python", "-m", "trainer", "--output-dir", "/state/names/demo/checkpoints"],
    secrets=["KEY"],
    secrets_file="/state/names/demo/secrets-0007-demo",
    who="ada@desk",
    created=5.0,
)
SPEC = {
    "state_root": "/state",
    "name": "demo",
    "run_path": "/state/runs/0007-demo",
    "old_run_path": "/state/runs/0006-demo",
    "release_id": "aaaaaaaaaaaa",
    "by": "ada@desk",
    "rollback": {"release_id": "bbbbbbbbbbbb"},
    "start": {
        "argv": ["tini", "--", "python", "--run-dir", "/state/runs/0007-demo"],
        "environment": {"A": "/state/runs/0007-demo/x", "B": "/state/runs/0007-demo-other", "C": "0007-demo"},
        "working_directory": "/state/runs/0007-demo",
        "user": [10001, 10001],
    },
}


def test_what_names_the_old_run_names_the_new_one_and_nothing_else_changes():
    found = boot.template(RUN, SPEC, {"source": "/models/m", "path": "/shm/m@1", "digest": "1"})
    assert "rollback" not in found["spec"]
    assert json.loads(json.dumps(found)) == found
    new = boot.instance(found, "/state/runs/0008-demo", "boot@box", 9.0)
    assert new["spec"]["start"] == {
        "argv": ["tini", "--", "python", "--run-dir", "/state/runs/0008-demo"],
        "environment": {"A": "/state/runs/0008-demo/x", "B": "/state/runs/0007-demo-other", "C": "0008-demo"},
        "working_directory": "/state/runs/0008-demo",
        "user": [10001, 10001],
    }
    assert new["spec"]["run_path"] == "/state/runs/0008-demo"
    assert new["run"]["secrets_file"] == "/state/names/demo/secrets-0008-demo"
    assert (new["run"]["run_id"], new["run"]["who"], new["run"]["origin"]) == ("0008-demo", "boot@box", "box")
    assert new["run"]["created"] == 9.0
    assert new["run"]["command"] == RUN.command
    assert new["weights"] == found["weights"]


def test_a_template_of_a_template_is_the_same_once_more():
    found = boot.template(RUN, SPEC, None)
    twice = boot.instance(
        boot.instance(found, "/state/runs/0008-demo", "b@x", 1), "/state/runs/0009-demo", "b@x", 2
    )
    assert twice == boot.instance(found, "/state/runs/0009-demo", "b@x", 2)
