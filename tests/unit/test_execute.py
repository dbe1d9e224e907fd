"""Carrying out: what is written into run.json, what is installed, and when it is refused."""

# ruff: noqa: E501  (whole sentences, as people read them)

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from samples import LOCALHOST, facts, recipe, run, survey

from deploy import execute, image, lock, onhost, plan, release, turn
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
        "tty": False,
        "adopted": None,
        "grace_seconds": 90,
        "checkpoint_timeout_seconds": 300,
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
    monkeypatch.setattr(turn, "time", clock)
    busy = facts(locks={"demo": {"by": "ada@desk", "what": "deploy", "since": 0.0}})
    said: list[str] = []
    patience = lock.Patience(10)
    goal = SimpleNamespace(facts=lambda: busy, host=SimpleNamespace(name="box"))
    clock.strftime, clock.localtime = lambda *_: "1970-01-01 00:00:00", lambda since: since
    turn.take(goal, "demo", patience, said.append)  # type: ignore[arg-type]
    assert (now, said) == (
        [110.0],
        ["demo on box is locked by ada@desk (deploy, since 1970-01-01 00:00:00); waiting up to 10 s"],
    )

    def hold(host: Any, state: str, name: str, what: str, wait: float, **_: Any) -> Any:
        raise DeployError(f"waited {wait:g} s more")

    monkeypatch.setattr(lock, "hold", hold)
    made = plan.make_stop(facts(runs=[run()]), LOCALHOST, survey().layout)
    with pytest.raises(DeployError, match=r"^waited 0 s more$"):
        execute.stop(made, Recorder(), said.append, patience)  # type: ignore[arg-type]


# -- what a failure must not hurt --------------------------------------------------------------------------


class Kept:
    """A deploy lock that nobody takes away."""

    def check(self) -> None:
        pass


def start(
    monkeypatch: pytest.MonkeyPatch, found: dict, user: str | None = None, held: Any = None, **work: Any
) -> list[str]:
    """Carry a deploy to a machine of these facts out as far as the new run; what was asked there."""
    asked: list[str] = []

    @contextlib.contextmanager
    def hold(*words: Any, **more: Any) -> Iterator[Any]:
        yield held or Kept()

    def ask(host: Any, function: str, *words: Any, **more: Any) -> None:
        asked.append(function)
        raise HostError(f"box: {function} was asked")

    monkeypatch.setattr(lock, "hold", hold)
    monkeypatch.setattr(execute.evidence, "collect", lambda *words, **more: found)
    monkeypatch.setattr(onhost, "ask", ask)
    monkeypatch.setattr(release, "refuse_changed", lambda *words: None)
    layout = survey().layout
    made = plan.Plan("deploy", "start", "box", "demo", layout, user=user, seen=plan.seen(found, "demo"))
    said: list[str] = []
    needed = execute.Work(status.Run("", "demo", ["true"]), "python3", **work)
    try:
        execute.start(made, Recorder(), needed, said.append)  # type: ignore[arg-type]
    except HostError:
        return asked
    raise AssertionError("the new run was not asked for")


@pytest.mark.parametrize(
    ("old", "new", "uid", "refused"),
    [
        ("10001:10001", "1000:1000", 0, True),
        ("0:0", "10001:10001", 0, True),
        ("10001:10001", "10001:10001", 0, False),
        ("10001:10001", None, 0, False),  # nothing changes hands
        (None, "10001:10001", 0, False),  # a process of root's writes anywhere
        ("1000:1000", "0:0", 1000, False),  # an engine without root: nothing can be given away
    ],
)
def test_places_do_not_change_hands_under_a_run_in_progress(
    monkeypatch: pytest.MonkeyPatch, old: str | None, new: str | None, uid: int, refused: bool
) -> None:
    found = facts(uid=uid, gid=uid, runs=[run(run={"user": old})])
    if not refused:
        assert start(monkeypatch, found, new)[0] == "deploy.new_run:make"
        return
    with pytest.raises(DeployError) as caught:
        start(monkeypatch, found, new)
    assert str(caught.value) == (
        f"run 0007-demo on box is in progress as user {old}, and as {new} the new one could not share its checkpoints "
        "with it: fab stop --name demo first, then deploy"
    )
    assert start(monkeypatch, facts(runs=[run(alive=False, run={"user": old})]), new)


def test_only_root_gives_a_runs_files_away() -> None:
    assert execute._owner("10001:10002", facts()) == [10001, 10002]
    assert execute._owner("0:0", facts()) == [0, 0]  # takes back what was given away
    assert execute._owner("0:0", facts(uid=1000, gid=1000)) is None  # an engine without root


def test_without_the_lock_no_run_directory_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(monkeypatch, facts()) == ["deploy.new_run:make", "deploy.new_run:discard_begun"]

    class LostOnTheWay(Kept):
        checks = 0

        def check(self) -> None:
            self.checks += 1
            if self.checks > 2:  # after the last check before the directory is made
                raise DeployError("the lock was lost")

    assert start(monkeypatch, facts(), held=LostOnTheWay()) == ["deploy.new_run:make"]


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), HostError("box: the connection was lost"), DeployError("no")]
)
def test_whatever_ends_a_deploy_the_host_is_asked_whether_its_new_run_was_taken(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    asked: list[Any] = []

    def ask(host: Any, function: str, *words: Any, **more: Any) -> Any:
        asked.append((function, words))
        run = status.Run("0008-demo", "demo", ["true"], secrets_file="/s/secrets-0008-demo")
        return {"path": "/s/runs/0008-demo", "run": dataclasses.asdict(run)}

    def begin(*words: Any) -> Any:
        raise error

    monkeypatch.setattr(lock, "hold", lambda *words, **more: contextlib.nullcontext(Kept()))
    monkeypatch.setattr(execute.evidence, "collect", lambda *words, **more: facts())
    monkeypatch.setattr(onhost, "ask", ask)
    monkeypatch.setattr(release, "refuse_changed", lambda *words: None)
    monkeypatch.setattr(execute.switch, "start", begin)
    monkeypatch.setattr(Recorder, "write", lambda *words, **more: None, raising=False)
    layout = survey().layout
    made = plan.Plan(
        "deploy",
        "start",
        "box",
        "demo",
        layout,
        runtime="process",
        release="a",
        seen=plan.seen(facts(), "demo"),
    )
    needed = execute.Work(status.Run("", "demo", ["true"]), "python3", heartbeats=False)
    with pytest.raises(type(error)):
        execute.start(made, Recorder(), needed, lambda said: None)  # type: ignore[arg-type]
    assert [function for function, _ in asked] == ["deploy.new_run:make", "deploy.new_run:discard_refused"]
    assert asked[1][1] == (layout.state, "demo", "/s/runs/0008-demo", "/s/secrets-0008-demo")


BEFORE = status.Run(
    "0006-demo",
    "demo",
    ["python", "--target-model", "/dev/shm/drafthouse/small@0123456789ab"],
    image="ours:1",
    user="10001:10001",
    secrets=["TOKEN"],
    secrets_file="/s/secrets-0006-demo",
)


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ("release", "its release aaaaaaaaaaaa is gone"),
        ("secrets", "its secrets in /s/secrets-0006-demo are gone"),
        ("weights", "its weights /dev/shm/drafthouse/small@0123456789ab are not in shared memory any more"),
        ("image", "its image ours:1 is not there any more"),
        ("user", "it was user 10001:10001's, and its checkpoints become user 1000:1000's"),
        ("nothing", ""),
    ],
)
def test_a_way_back_that_could_not_be_gone_is_refused_before_anything_is_touched(
    monkeypatch: pytest.MonkeyPatch, lacks: str, said: str
) -> None:
    weights = "/dev/shm/drafthouse/small@0123456789ab"
    boot = {"weights": {"source": "/models/small", "path": weights, "digest": "0123456789abcdef"}}
    found = facts(
        names={
            "demo": {
                "releases": [] if lacks == "release" else ["a" * 12],
                "secrets": [] if lacks == "secrets" else ["/s/secrets-0006-demo"],
            }
        },
        weights=[] if lacks == "weights" else [{"path": weights}],
        runs=[run("0006-demo", alive=False, boot=boot)],
    )
    kept = {"run": dataclasses.asdict(BEFORE), "spec": {"release_id": "a" * 12, "start": {"argv": ["x"]}}}
    monkeypatch.setattr(Recorder, "read", lambda self, path: json.dumps(kept).encode(), raising=False)
    monkeypatch.setattr(image, "there", lambda host, name: None if lacks == "image" else "sha256:1")
    user = "1000:1000" if lacks == "user" else "10001:10001"
    if not said:
        assert start(monkeypatch, found, user, rollback="/s/0006-demo")[0] == "deploy.new_run:make"
        return
    with pytest.raises(DeployError) as caught:
        start(monkeypatch, found, user, rollback="/s/0006-demo")
    assert str(caught.value) == (
        f"box: run 0006-demo could not be restored, since {said}; deploy without --rollback-on-failure"
    )
