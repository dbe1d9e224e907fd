"""deploy/runtimes/process.py: what is started is a pure function of run, facts and release."""

from __future__ import annotations

import os

from deploy.runtimes import process
from trainer.status import Run

RUN = Run(run_id="0007-demo", name="demo", command=["python", "-m", "trainer"], environment={"LR": "1"})
FACTS = {
    "tini": "/usr/bin/tini",
    "home": "/root",
    "user": "root",
    "uid": 0,
    "state": {"root": "/s"},
    "shm": {"root": "/dev/shm/drafthouse"},
}


def spec(**facts):
    return process.start_spec(
        RUN,
        {**FACTS, **facts},
        "/s/names/demo/releases/abc",
        run_path="/s/runs/0007-demo",
        python="/v/bin/python",
    )


def test_launch_runs_under_tini_without_group_signals():
    assert spec()["argv"] == [
        "/usr/bin/tini", "-s", "--",
        "/v/bin/python", "-u", "-m", "trainer.launch", "--run-dir", "/s/runs/0007-demo",
    ]  # fmt: skip


def test_without_tini_launch_is_started_itself_and_the_plan_says_so():
    assert spec(tini=None)["argv"][0] == "/v/bin/python"
    assert process.reaper({**FACTS, "tini": None}) == "trainer.launch itself (no tini on this machine)"
    assert "/usr/bin/tini" in process.reaper(FACTS)


def test_the_environment_is_complete_and_owes_nothing_to_the_terminal(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/evil.so")
    monkeypatch.setenv("PYTHONHOME", "/elsewhere")
    assert spec()["environment"] == {
        "HOME": "/root",
        "USER": "root",
        "LOGNAME": "root",
        "LANG": "C.UTF-8",
        "PATH": "/v/bin:" + process.PATH,
        "PYTHONPATH": "/s/names/demo/releases/abc/app",
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "DRAFTHOUSE_STATE": "/s",
        "DRAFTHOUSE_SHM": "/dev/shm/drafthouse",
    }


def test_what_the_run_asks_for_is_left_to_launch():
    assert "LR" not in spec()["environment"]


def test_the_working_directory_is_the_runs_own():
    assert spec()["working_directory"] == "/s/runs/0007-demo"
    assert os.path.isabs(spec()["working_directory"])
