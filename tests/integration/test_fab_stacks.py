"""`fab stacks`, and `tty: true` from the run's file to the log, as their users call them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployed import steps, until
from fabbed import Fab, project

from trainer import status

pytestmark = [pytest.mark.slow, pytest.mark.root]  # (reading another process may be forbidden to other users)
PRINTING = """\
command: [python, -I, -c, "import os, time; print('out', os.isatty(1)); time.sleep(600)"]
grace_seconds: 5
settle_seconds: 0
tty: true
"""


@pytest.fixture
def fab(tmp_path: Path) -> Iterator[Fab]:
    yield from project(tmp_path)


def test_the_stacks_of_a_run_are_shown_and_it_goes_on(fab: Fab) -> None:
    run = fab.place.run_dir()
    fab.place.start(run)
    before = until(lambda: steps(run))
    shown = fab.ok("stacks", "--run-id", run.path.name)
    assert shown.startswith(
        f"{run.path.name} on localhost: 1 process, stacks by py-spy, innermost call first\n"
    )
    assert "rank 0 (pid " in shown
    assert "· main thread" in shown
    answer = json.loads(fab.ok("stacks", "--name", "demo", "--json"))
    assert answer["summary"].startswith("rank 0 (pid ")
    [process] = answer["processes"]
    assert process["threads"][0]["frames"][-1]["function"] == "<module>"
    until(lambda: steps(run) > before)
    alone = json.loads(fab.ok("stacks", "--pid", str(process["pid"]), "--json"))
    assert alone["processes"][0]["threads"][0]["main"]


def test_mistakes_are_one_sentence(fab: Fab) -> None:
    for words, code, said in (
        (["--name", "demo"], 2, "there is no run of demo on localhost"),
        (["--pid", "7", "--name", "demo"], 2, "--pid names a process; give no --run, --name or --run-id"),
        (["--pid", "999999999"], 1, "there is no process 999999999 on localhost"),
    ):
        done = fab.run("stacks", *words)
        assert (done.returncode, done.stdout) == (code, "")
        assert done.stderr.startswith(said)
        assert done.stderr.count("\n") == 1


def test_a_terminal_that_the_runs_file_asks_for_is_planned_given_and_said(fab: Fab) -> None:
    fab.file(PRINTING, "printing")
    assert "output    to a terminal (tty: true)" in fab.ok("plan", "--run", "printing")
    fab.ok("deploy", "--run", "printing", "--no-follow")
    run = status.list_runs(fab.place.root / "runs", "printing")[-1]
    assert run.run().tty is True
    log = fab.ok("tail", "--name", "printing", "--no-follow")
    assert "stdout line by line (tty: true, /dev/pts/" in log
    assert log.endswith("\nout True\n")
    fab.ok("stop", "--name", "printing")
