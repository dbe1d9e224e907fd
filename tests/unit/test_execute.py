"""Carrying out: what is written into run.json, what is installed, and when it is refused."""

# ruff: noqa: E501  (whole sentences, as people read them)

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from samples import LOCALHOST, facts, recipe, run, survey

from deploy import actions, execute, lock, plan, release
from deploy.errors import DeployError
from deploy.host import HostError, Local, Result
from trainer import status

DEMO = """\
weights: toy
trainer: {max-steps: 600}
environment: {LEVEL: "a b"}
secrets: {TOKEN: env}
working_directory: /workspace
grace_seconds: 90
restart: {attempts: 1, minutes: 2}
log: {segment_megabytes: 2, segments: 5}
"""


class Recorder:
    """A host that only remembers what it was asked to run, and answers with the codes that it was given."""

    name = "box"

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)
        self.ran: list[tuple[list[str], dict | None]] = []

    def run(
        self, argv: Any, *, timeout: float, env: Any = None, input: Any = None, check: bool = True
    ) -> Result:
        self.ran.append((list(argv), env))
        code = self.codes.pop(0) if self.codes else 0
        if code and check:
            raise HostError(f"box: {argv[0]} failed (exit code {code})")
        return Result(code, b"", b"")


def test_run_json_holds_what_launch_needs_and_secrets_by_name_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "hunter2")
    found, wanted = survey(), recipe(DEMO, tmp_path, "lr=3e-4")
    new = plan.make_release(found, LOCALHOST, wanted.settings)
    made = plan.make("deploy", found, LOCALHOST, wanted, new, None, run_file="runs/demo.yaml")
    variables = release.environment(wanted.settings, found.layout, "toy", "toy")
    value = vars(execute.run_of(made, new, wanted.settings, variables, wanted.settings.working_directory))
    assert "hunter2" not in repr(value)
    assert value["command"] == list(new.command)
    assert {key: value[key] for key in value if key not in ("command", "created", "schema", "run_id")} == {
        "name": "demo",
        "runtime": "process",
        "release": {"id": new.id, "digest": new.digest},
        "git": {"commit": "c" * 40, "dirty": False},
        "image": None,
        "user": None,
        "devices": None,
        "environment": {"LEVEL": "a b", "PYTHONUNBUFFERED": "1"},
        "secrets": ["TOKEN"],
        "secrets_file": None,  # one for each run, named when its number is known
        "run_file": "runs/demo.yaml",
        "changes": {"trainer.lr": "3e-4"},
        "working_directory": "/workspace",
        "grace_seconds": 90,
        "restart_attempts": 1,
        "restart_minutes": 2,
        "segment_bytes": 2 << 20,
        "segments": 5,
        "who": "",
        "origin": "",
    }


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (
            "print('error: --device cuda:7: no', file=sys.stderr); sys.exit(2)",
            "its settings: --device cuda:7: no",
        ),
        ("sys.exit(3)", "its settings: exit code 3"),
    ],
)
def test_the_trainer_itself_is_asked_before_anything_is_stopped(program: str, said: str) -> None:
    asked = "import sys; assert sys.argv[1:] == ['--lr', '1', '--check-config'];"
    wrong = status.Run("0001-x", "x", [sys.executable, "-c", asked + program, "--lr", "1"])
    with pytest.raises(DeployError, match=said):
        execute.check_config(Local(), wrong, {})
    right = status.Run("0001-x", "x", [sys.executable, "-c", asked + "sys.exit(0)", "--lr", "1"])
    execute.check_config(Local(), right, {})


def test_tini_is_installed_after_saying_so_and_package_lists_are_fetched_only_when_needed() -> None:
    host, said = Recorder(), []
    execute.install(host, plan.INSTALL_TINI, said.append)  # type: ignore[arg-type]
    assert said == ["installing tini: apt-get install -y --no-install-recommends tini"]
    assert host.ran == [(list(plan.INSTALL_TINI), {"DEBIAN_FRONTEND": "noninteractive"})]
    host = Recorder(100)
    execute.install(host, plan.INSTALL_TINI, said.append)  # type: ignore[arg-type]
    assert [argv[1] for argv, _ in host.ran] == ["install", "update", "install"]


def test_without_a_network_tini_is_left_out_and_the_deploy_goes_on() -> None:
    said: list[str] = []
    execute.install(Recorder(100, 100), plan.INSTALL_TINI, said.append)  # type: ignore[arg-type]
    assert said[1] == (
        "tini was not installed (box: apt-get failed (exit code 100)); going on without it, launch is the subreaper"
    )


def test_what_changed_since_the_plan_was_shown_stops_it(tmp_path: Path) -> None:
    made = plan.make_stop(facts(runs=[run()]), LOCALHOST, survey().layout)
    execute._still(made, facts(runs=[run(), run("0008-exp")]))
    with pytest.raises(DeployError) as caught:
        execute._still(made, facts(runs=[run(alive=False)]))
    assert str(caught.value) == (
        "demo on localhost has changed since the plan was made (another deploy, or its run ended); nothing was done, "
        "look at fab status and try again"
    )


def test_waiting_for_another_deploy_has_one_deadline_for_the_plan_and_for_the_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(lock, "time", clock)
    monkeypatch.setattr(actions, "time", clock)
    busy = facts(locks={"demo": {"by": "ada@desk"}})
    said: list[str] = []
    patience = lock.Patience(10)
    actions._free(SimpleNamespace(facts=lambda: busy), "demo", patience, said.append)  # type: ignore[arg-type]
    assert (now, said) == ([110.0], ["another deploy of demo is under way; waiting up to 10 s"])

    def hold(host: Any, state: str, name: str, what: str, wait: float, **_: Any) -> Any:
        raise DeployError(f"waited {wait:g} s more")

    monkeypatch.setattr(lock, "hold", hold)
    made = plan.make_stop(facts(runs=[run()]), LOCALHOST, survey().layout)
    with pytest.raises(DeployError, match=r"^waited 0 s more$"):
        execute.stop(made, Recorder(), said.append, patience)  # type: ignore[arg-type]
