"""Plans: what is printed is what will be done. Whole plans, as people read them."""

# ruff: noqa: E501

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from samples import LOCALHOST, facts, recipe, run, survey

from deploy import CHECKOUT, plan, release
from deploy.errors import DeployError
from deploy.plan import Plan
from deploy.runtimes import compose
from deploy.settings import HostSettings
from deploy.survey import Survey
from deploy.weights import Weights

DEMO = "weights: toy\ntrainer: {max-steps: 600, lr: 6e-4}\n"
OLD = "0" * 12


def planned(
    found: Survey,
    tmp_path: Path,
    *changes: str,
    task: str = "deploy",
    text: str = DEMO,
    before: Any = None,
    host: HostSettings = LOCALHOST,
    **named: Any,
) -> Plan:
    wanted = recipe(text, tmp_path, *changes)
    new = plan.make_release(found, host, wanted.settings)
    return plan.make(task, found, host, wanted, new, before, run_file="runs/demo.yaml", **named)


BOX = HostSettings(name="gpu-box", address="gpu-box")
ENGINE: dict[str, Any] = {
    "engine": {"client": "/usr/bin/docker", "answers": True, "permitted": True, "version": "29.1.0",
               "compose": "2.40.3", "error": None},
}  # fmt: skip


def contained(tmp_path: Path, found: dict[str, Any] | None = None, text: str = DEMO) -> Survey:
    """A survey of a host with an engine."""
    found = found or facts(**ENGINE)
    image = compose.image(CHECKOUT, BOX, recipe(text, tmp_path).settings, found)
    return survey(found, image=image)


def release_of(found: Survey, tmp_path: Path, text: str = DEMO, *changes: str) -> Any:
    return plan.make_release(found, LOCALHOST, recipe(text, tmp_path, *changes).settings)


def test_the_first_deploy_reads_like_this(tmp_path: Path) -> None:
    made = planned(survey(), tmp_path)
    assert (
        str(made)
        == f"""\
deploy demo on localhost
  runtime   process: on this machine, unless fabric.yaml says runtime: compose
  run file  runs/demo.yaml (--run)
  release   {made.release}, new
  weights   toy, which the trainer makes itself on its first run and caches
  data      toy, which the trainer makes from its target
  command   /opt/venv/bin/python -u -m trainer --target-model toy --resume auto --max-steps 600 --lr 0.0006 --output-dir /var/lib/drafthouse/names/demo/checkpoints --cache-dir /var/lib/drafthouse/names/demo/cache
  init      tini (/usr/bin/tini -s)
  at boot   {made.boot}
  start     the next run of demo: begins at step 0 (no checkpoint yet)"""
    )
    assert (made.action, made.acts) == ("start", True)


def test_a_restart_with_a_change_shows_the_difference_and_how_the_old_run_ends(tmp_path: Path) -> None:
    old = release_of(survey(), tmp_path)
    found = survey(
        facts(runs=[run(release_id=old.id)], names={"demo": {"current": old.id, "releases": [old.id]}})
    )
    made = planned(found, tmp_path, "lr=3e-4", task="restart", before=(old.files, old.digests))
    doing = made.stop.doing if made.stop else ""
    assert doing.startswith("training: ")
    assert (
        str(made)
        == f"""\
restart demo on localhost
  runtime   process: on this machine, unless fabric.yaml says runtime: compose
  run file  runs/demo.yaml (--run)
  release   {old.id} → {made.release}, new
            trainer.lr: 0.0006 → 0.0003
  set       trainer.lr=3e-4, for this run
  weights   toy, which the trainer makes itself on its first run and caches
  data      toy, which the trainer makes from its target
  command   /opt/venv/bin/python -u -m trainer --target-model toy --resume auto --max-steps 600 --lr 0.0003 --output-dir /var/lib/drafthouse/names/demo/checkpoints --cache-dir /var/lib/drafthouse/names/demo/cache
  init      tini (/usr/bin/tini -s)
  stop      0007-demo ({doing}): a checkpoint first, waited for up to 300 s; then SIGTERM, SIGKILL 60 s later
  timeouts  the smallest is 60 s (grace_seconds); no signal is sent while a checkpoint is awaited
  at boot   {made.boot}
  start     the next run of demo: resumes from the checkpoint that 0007-demo leaves"""
    )
    assert made.action == "switch"


@pytest.mark.parametrize(("text", "change"), [("tty: true", ()), ("tty: false", ("tty=true",))])
def test_the_plan_says_that_the_output_is_a_terminal_and_so_does_the_release(
    tmp_path: Path, text: str, change: tuple[str, ...]
) -> None:
    made = planned(survey(), tmp_path, *change, text=f"command: [./sim]\n{text}")
    said = "output    to a terminal (tty: true), so that C programs write line by line"
    assert made.tty
    assert said in str(made)
    assert (
        "tty: true\n"
        in release_of(survey(), tmp_path, "command: [./sim]\ntty: true").files["run.yaml"].decode()
    )
    assert "tty" not in str(planned(survey(), tmp_path))
    again = facts(
        runs=[run(run={"tty": True}, release_id="a" * 12)],
        names={"demo": {"current": "a" * 12, "releases": ["a" * 12]}},
    )
    assert said in str(plan.make_same(survey(again), LOCALHOST, ["./sim"]))


def test_a_deploy_of_what_runs_already_is_unchanged_and_needs_no_preflight(tmp_path: Path) -> None:
    old = release_of(survey(), tmp_path)
    busy = facts(runs=[run(release_id=old.id)], names={"demo": {"current": old.id, "releases": [old.id]}},
                 state={"free_bytes": 0})  # fmt: skip
    made = planned(survey(busy), tmp_path)
    assert (made.action, made.acts) == ("unchanged", False)
    assert str(made).startswith(f"unchanged: 0007-demo runs release {old.id} on localhost (training: ")
    assert "\n" not in str(made)


def test_a_run_that_is_being_stopped_is_not_unchanged(tmp_path: Path) -> None:
    """Else the deploy would promise a run, and a moment later there would be none."""
    old = release_of(survey(), tmp_path)
    live = run(release_id=old.id)
    live["launch"]["stopping"] = "ada@desk"
    ending = facts(runs=[live], names={"demo": {"current": old.id, "releases": [old.id]}})
    assert planned(survey(ending), tmp_path).action == "switch"


def test_a_stop_without_a_checkpoint_says_what_is_left_to_save_in() -> None:
    layout = release.Layout("/var/lib/drafthouse", "/dev/shm/drafthouse", "demo")
    made = plan.make_stop(facts(runs=[run()]), LOCALHOST, layout, checkpoint=False)
    assert not made.stop.asks
    assert "a checkpoint first" not in str(made)
    assert "s is all it has to save in" in str(made)


def test_an_unchanged_deploy_names_a_file_of_the_release_that_was_changed_on_the_host(tmp_path: Path) -> None:
    old = release_of(survey(), tmp_path)
    names = {
        "demo": {
            "current": old.id,
            "releases": [old.id],
            "changed": {old.id: ["app/trainer/loss.py", "extra"], OLD: ["x"]},
            "added": {old.id: ["extra"]},
        }
    }
    made = planned(survey(facts(runs=[run(release_id=old.id)], names=names)), tmp_path)
    assert str(made).splitlines()[1:] == [
        "note: release file app/trainer/loss.py was changed on the host; the running process may differ; "
        "fab restart writes it anew",
        "note: release file extra was added on the host; the running process may use it; fab restart leaves it out",
    ]
    # A restart writes it anew, and has nothing to warn of.
    assert (
        planned(survey(facts(runs=[run(release_id=old.id)], names=names)), tmp_path, task="restart").warnings
        == ()
    )


def test_a_restart_of_what_runs_already_starts_anew(tmp_path: Path) -> None:
    old = release_of(survey(), tmp_path)
    found = survey(
        facts(runs=[run(release_id=old.id)], names={"demo": {"current": old.id, "releases": [old.id]}})
    )
    made = planned(found, tmp_path, task="restart", before=(old.files, old.digests))
    assert made.action == "switch"
    assert f"  release   {old.id}, unchanged\n  weights" in str(made)


# A target has made ready what no drafter has learnt from yet.
SERVED = {"0": {"role": "drafter", "step": 0}, "1": {"role": "target", "step": 480}}


@pytest.mark.parametrize(
    ("text", "found", "checkpoint", "said"),
    [
        ("", facts(), {"step": 120}, "the newest checkpoint is of step 120"),
        ("", facts(runs=[run()]), None, "0007-demo is at step 120"),
        ("", facts(), {"step": 119}, None),
        ("", facts(runs=[run(heartbeats=SERVED)]), None, None),
        ("", facts(), {"step": 120, "finished": True}, None),
        (", resume: never", facts(), {"step": 120}, None),
    ],
)
def test_a_run_that_would_finish_at_once_is_warned_of(
    text: str, found: dict, checkpoint: Any, said: str | None, tmp_path: Path
) -> None:
    text = f"weights: toy\ntrainer: {{max-steps: 120{text}}}"
    warnings = [
        w for w in planned(survey(found, checkpoint=checkpoint), tmp_path, text=text).warnings if "max-s" in w
    ]
    assert warnings == (
        []
        if said is None
        else [
            f"max-steps is 120 and {said}, so the new run will finish at once; give more steps, or resume: never to "
            "begin at step 0"
        ]
    )


def test_what_failed_before_is_listed_and_nothing_is_planned(tmp_path: Path) -> None:
    with pytest.raises(DeployError, match="has 0 B free, but a run needs at least"):
        planned(survey(facts(state={"free_bytes": 0})), tmp_path)


@pytest.mark.parametrize(
    ("text", "found", "checkpoint", "said"),
    [
        (DEMO, facts(), None, "begins at step 0 (no checkpoint yet)"),
        (
            DEMO,
            facts(),
            {"step": 600, "finished": True, "run_id": "0007-demo"},
            "begins at step 0 (0007-demo finished at step 600)",
        ),
        (
            DEMO,
            facts(),
            {"step": 120, "finished": False, "run_id": "0007-demo"},
            "resumes at step 120 (0007-demo did not finish)",
        ),
        (
            DEMO,
            facts(runs=[run()]),
            {"step": 100, "run_id": "0007-demo"},
            "resumes from the checkpoint that 0007-demo leaves",
        ),
        (
            DEMO,
            facts(runs=[run(heartbeats={"0": {"step": 0}})]),
            {"step": 100, "run_id": "0006-demo"},
            "resumes at step 100 (0006-demo did not finish; 0007-demo has taken no step of its own yet)",
        ),
        (
            DEMO,
            facts(runs=[run(heartbeats=SERVED)]),
            {"step": 100, "run_id": "0006-demo"},
            "resumes at step 100 (0006-demo did not finish; 0007-demo has taken no step of its own yet)",
        ),
        (
            DEMO,
            facts(runs=[run(alive=False)]),
            {"step": 100, "run_id": "0007-demo"},
            "resumes at step 100 (0007-demo did not finish)",
        ),
        (
            "weights: toy\ntrainer: {resume: never}",
            facts(),
            {"step": 120},
            "begins at step 0 (resume: never)",
        ),
        ("command: [a]", facts(), {"step": 120}, "where it begins is its own affair (command:)"),
    ],
)
def test_the_plan_says_where_the_run_will_begin(
    text: str, found: dict, checkpoint: Any, said: str, tmp_path: Path
) -> None:
    made = planned(survey(found, checkpoint=checkpoint), tmp_path, text=text)
    assert made.resume == said


@pytest.mark.parametrize(
    ("found", "install", "said", "commands"),
    [
        (facts(), True, "tini (/usr/bin/tini -s)", ()),
        (
            facts(tini=None),
            True,
            "tini, once it is installed; else trainer.launch is the subreaper",
            plan.INSTALL_TINI,
        ),
        (
            facts(tini=None),
            False,
            "trainer.launch is the subreaper (there is no tini, and it is not installed: --no-install)",
            (),
        ),
        (
            facts(tini=None, uid=1000),
            True,
            "trainer.launch is the subreaper (there is no tini, and it is not installed: not root)",
            (),
        ),
        (
            facts(tini=None, apt=None),
            True,
            "trainer.launch is the subreaper (there is no tini, and it is not installed: no apt-get)",
            (),
        ),
    ],
)
def test_the_plan_says_what_reaps_and_what_is_installed_for_it(
    found: dict, install: bool, said: str, commands: tuple, tmp_path: Path
) -> None:
    made = planned(survey(found), tmp_path, install=install)
    assert (made.init, made.install) == (said, commands)
    line = "install   tini, with apt-get install -y --no-install-recommends tini (--no-install declines)"
    assert (line in str(made)) == bool(commands)


@pytest.mark.parametrize(
    ("grace", "patience", "said"),
    [
        (
            60.0,
            300.0,
            "the smallest is 60 s (grace_seconds); no signal is sent while a checkpoint is awaited",
        ),
        (
            600.0,
            30.0,
            "the smallest is 30 s (checkpoint_timeout_seconds); no signal is sent while a checkpoint is awaited",
        ),
    ],
)
def test_the_plan_shows_the_smallest_timeout_of_the_chain(
    grace: float, patience: float, said: str, tmp_path: Path
) -> None:
    text = f"{DEMO}checkpoint_timeout_seconds: 9\ngrace_seconds: 7"
    own = run(run={"grace_seconds": grace, "checkpoint_timeout_seconds": patience})
    made = planned(survey(facts(runs=[own])), tmp_path, text=text)
    assert f"  timeouts  {said}\n" in str(made)


def test_a_stop_waits_as_long_as_the_run_in_progress_was_promised_whatever_the_task(tmp_path: Path) -> None:
    old = {"current": OLD, "releases": [OLD]}
    own = run(release_id=OLD, run={"checkpoint_timeout_seconds": 900})
    found = survey(facts(runs=[own], names={"demo": old}))
    stops = [
        planned(found, tmp_path).stop,
        plan.make_same(found, LOCALHOST, ["a"]).stop,
        plan.make_same(found, LOCALHOST, ["a"], task="start").stop,
        plan.make_stop(found.facts, LOCALHOST, found.layout).stop,
    ]
    assert [stop and stop.checkpoint_timeout_seconds for stop in stops] == [900.0] * 4
    foreign = facts(runs=[run(run={"checkpoint_timeout_seconds": "soon", "grace_seconds": None})])
    stop = plan.make_stop(foreign, LOCALHOST, found.layout).stop
    assert stop is not None
    assert (stop.checkpoint_timeout_seconds, stop.grace_seconds) == (300.0, 60.0)


def test_a_run_without_heartbeats_is_not_asked_for_a_checkpoint(tmp_path: Path) -> None:
    silent = {**run(), "heartbeats": {}}
    made = planned(survey(facts(runs=[silent])), tmp_path, text="command: [a]")
    assert made.stop is not None
    assert f"({made.stop.doing}): SIGTERM, SIGKILL 60 s later\n" in str(made)
    assert "60 s is all it has to save in (grace_seconds of 0007-demo)" in str(made)


def test_the_plan_of_a_container_reads_like_this(tmp_path: Path) -> None:
    found = contained(tmp_path)
    made = planned(found, tmp_path, host=BOX)
    assert found.image is not None
    home = "/var/lib/drafthouse/names/demo"
    assert (
        str(made)
        == f"""\
deploy demo on gpu-box
  runtime   compose: Docker Engine 29.1.0 with Compose 2.40.3 answers
  run file  runs/demo.yaml (--run)
  release   {made.release}, new
  image     {found.image.reference}, build on gpu-box (with its packages: minutes)
  weights   toy, which the trainer makes itself on its first run and caches
  data      toy, which the trainer makes from its target
  command   python -u -m trainer --target-model toy --resume auto --max-steps 600 --lr 0.0006 --output-dir {home}/checkpoints --cache-dir {home}/cache
  init      tini, as PID 1 in the image
  trial     a container of this release looks and ends, before anything else is stopped
  gpus      none
  user      10001:10001 in the container
  mounts    of {home}: run, checkpoints, cache
  grace     60 s from SIGTERM to SIGKILL by launch (grace_seconds), 70 s by the engine, 15 s when the host goes down (dockerd's default): the smallest is 15 s (dockerd's, when the host goes down)
  at boot   {made.boot}
  start     the next run of demo: begins at step 0 (no checkpoint yet)"""
    )
    assert (made.image, made.image_action, made.install) == (found.image.reference, "build", ())


@pytest.mark.parametrize(
    ("flag", "run", "host", "action"),
    [
        (None, "", None, "build"),
        (None, "", "local", "ship"),
        (None, "image: {build: host}", "local", "build"),
        ("local", "image: {build: host}", "host", "ship"),
        ("host", "image: {build: local}", "local", "build"),
    ],
)
def test_the_flag_wins_over_the_runs_file_over_the_hosts_entry(
    flag: Any, run: str, host: Any, action: str, tmp_path: Path
) -> None:
    settings = BOX.model_copy(update={"build": host})
    assert (
        planned(contained(tmp_path), tmp_path, host=settings, text=DEMO + run, build=flag).image_action
        == action
    )


def test_after_what_a_plan_does_the_same_plan_is_unchanged(tmp_path: Path) -> None:
    """Plan, execute, plan: the second one sees what the first one has made, and nothing else."""
    first = contained(tmp_path)
    new = plan.make_release(first, BOX, recipe(DEMO, tmp_path).settings)
    made = planned(first, tmp_path, host=BOX)
    assert made.image is not None
    told = {
        "runtime": made.runtime,
        "image": made.image,
        "user": made.user,
        "devices": list(made.devices or ()),
    }
    live = run(release_id=new.id, run={**told, "command": list(made.command)})
    after = facts(
        **ENGINE,
        runs=[live],
        names={"demo": {"current": new.id, "releases": [new.id]}},
        images=[{"tags": [made.image]}],
    )
    again = planned(contained(tmp_path, after), tmp_path, host=BOX, before=(new.files, new.digests))
    assert (again.action, again.release, again.image_action) == ("unchanged", new.id, "there")


def test_an_old_release_is_started_again_with_what_it_had(tmp_path: Path) -> None:
    old = run(
        alive=False,
        release_id=OLD,
        run={"runtime": "compose", "image": "drafthouse:0123", "user": "10001:10001", "devices": ["1"]},
    )
    found = survey(facts(**ENGINE, runs=[old], names={"demo": {"current": OLD, "releases": [OLD]}}))
    pinned = BOX.model_copy(update={"runtime": "process"})
    made = plan.make_same(found, pinned, ["a"])
    assert (made.runtime, made.image, made.user, made.devices) == (
        "compose",
        "drafthouse:0123",
        "10001:10001",
        ("1",),
    )
    assert (made.install, made.init) == ((), "tini, as PID 1 in the image")


# -- fab diff ----------------------------------------------------------------------------------------------


def test_a_difference_is_shown_file_by_file_and_line_by_line(tmp_path: Path) -> None:
    old, new = release_of(survey(), tmp_path), release_of(survey(), tmp_path, DEMO, "lr=3e-4")
    text = plan.diff_text(old.files, new)
    assert text.startswith("--- deployed/command.json\n+++ rendered/command.json\n")
    assert '-  "0.0006",' not in text
    assert "-  lr: 0.0006\n+  lr: 0.0003\n" in text
    assert plan.diff_text(old.files, old) == ""
    assert plan.diff_text({}, new).startswith("--- /dev/null\n+++ rendered/command.json\n")


def test_a_difference_shows_that_a_secret_changed_and_not_which_it_is(tmp_path: Path) -> None:
    before, after = (
        f"{DEMO}environment: {{HF_TOKEN: {word}, LEVEL: x}}" for word in ("hunter2", "swordfish")
    )
    old, new = release_of(survey(), tmp_path, before), release_of(survey(), tmp_path, after)
    text = plan.diff_text(old.files, new)
    assert "-HF_TOKEN=***\n+HF_TOKEN=*** (another value)" in text
    assert "-  HF_TOKEN: ***\n+  HF_TOKEN: *** (another value)" in text
    assert not {"hunter2", "swordfish"} & set(re.findall(r"\w+", text))


def test_a_change_that_looks_like_a_secret_is_not_in_the_plan(tmp_path: Path) -> None:
    made = planned(survey(), tmp_path, "environment.API_KEY=hunter2", "environment.LEVEL=x")
    assert "set       environment.API_KEY=***, environment.LEVEL=x, for this run\n" in str(made)
    assert "hunter2" not in str(made) + json.dumps(made.to_json())


def test_a_word_of_the_command_that_looks_like_a_secret_is_not_in_the_plan(tmp_path: Path) -> None:
    made = planned(survey(), tmp_path, text="command: [a, --api-key, hunter2, PASSWORD=hunter2]")
    assert made.command[-1] == "PASSWORD=hunter2", "what is started is not what is shown"
    assert made.to_json()["command"] == ["a", "--api-key", "***", "PASSWORD=***"]
    assert "hunter2" not in str(made)


def test_secrets_are_named_and_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "hunter2-hunter2")
    made = planned(survey(), tmp_path, text=f"{DEMO}secrets: {{KEY: env}}")
    assert "  secret    KEY from KEY of this machine's environment\n" in str(made)
    assert "hunter2" not in str(made) + json.dumps(made.to_json())


def test_a_command_of_several_lines_stays_on_one(tmp_path: Path) -> None:
    made = planned(survey(), tmp_path, text="command: [sh, -c, \"a 'b'\\nc\"]")
    line = next(line for line in str(made).splitlines() if line.startswith("  command"))
    assert line == "  command   sh -c $'a \\'b\\'\\nc'"


def test_a_program_on_the_command_line_is_cut_and_json_has_it_whole(tmp_path: Path) -> None:
    program = "\nimport time\n" + "print('line', flush=True)\n" * 20
    path = "/data/" + "a/" * 60
    url = "https://ada:hunter2" + "x" * 300 + "@host/"
    text = json.dumps({"command": ["python", "-c", program, path, url]})
    made = planned(survey(), tmp_path, text=text)
    line = next(line for line in str(made).splitlines() if line.startswith("  command"))
    assert line == (
        f"  command   python -c 'import time … ({len(program)} characters)' {path} 'https://ada:***@host/'"
    )
    assert made.to_json()["command"][2] == program


def test_what_a_container_sees_of_the_host_is_one_line_and_json_has_each_mount(tmp_path: Path) -> None:
    text = "command: [a]\nimage: {use: my/image:1}\nsecrets: {TOKEN: {env: MINE}}\n"
    found = dataclasses.replace(contained(tmp_path, text=text), weights=None, data="/data/tok")
    made = planned(found, tmp_path, text=text, host=BOX)
    home = found.layout.home
    assert f"  mounts    of {home}: run, checkpoints, cache; read-only: secrets, /data/tok, ./app\n" in str(
        made
    )
    assert made.to_json()["mounts"][0] == {
        "source": f"{home}/run", "target": "/run/drafthouse", "read_only": False,
    }  # fmt: skip


def test_the_plan_is_json_for_scripts(tmp_path: Path) -> None:
    weights = Weights("/m", "copy", "/s/m@1", "m", "1" * 32, 5, "/s")
    value = json.loads(json.dumps(planned(survey(weights=weights), tmp_path).to_json()))
    assert (value["action"], value["name"], value["weights"]["path"]) == ("start", "demo", "/s/m@1")
    assert value["weights"]["describe"] == "copy /m (5 B) to /s/m@1"


def test_a_plan_cannot_be_changed_after_it_was_shown(tmp_path: Path) -> None:
    made = planned(survey(), tmp_path)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.release = "other"  # type: ignore[misc]


# -- stop, --same ------------------------------------------------------------------------------------------


def test_a_stop_reads_like_this() -> None:
    found = facts(runs=[run(), run("0008-exp")])
    made = plan.make_stop(found, LOCALHOST, survey(found).layout)
    assert made.stop is not None
    assert (
        str(made)
        == f"""\
stop demo on localhost
  stop      0007-demo ({made.stop.doing}): a checkpoint first, waited for up to 300 s; then SIGTERM, SIGKILL 60 s later
  timeouts  the smallest is 60 s (grace_seconds); no signal is sent while a checkpoint is awaited"""
    )


def test_nothing_to_stop_is_said() -> None:
    found = facts(runs=[run(alive=False), run("0008-exp")])
    made = plan.make_stop(found, LOCALHOST, survey(found).layout)
    assert (made.acts, str(made)) == (False, "nothing to stop: no run of demo is in progress on localhost")


def test_the_same_release_is_started_again_whatever_the_files_say() -> None:
    found = survey(facts(runs=[run(release_id=OLD)], names={"demo": {"current": OLD, "releases": [OLD]}}))
    made = plan.make_same(found, LOCALHOST, ["a", "b c"])
    assert (made.action, made.release, made.differences) == ("switch", OLD, ())
    assert f"  release   {OLD}, unchanged\n  command   a 'b c'\n" in str(made)


@pytest.mark.parametrize(("alive", "task"), [(True, "restart"), (False, "deploy")])
def test_a_release_that_was_changed_on_the_host_is_not_started_under_its_old_id(
    alive: bool, task: str
) -> None:
    names = {
        "demo": {"current": OLD, "releases": [OLD], "changed": {OLD: ["app/trainer/loss.py", "run.yaml"]}}
    }
    with pytest.raises(DeployError) as caught:
        plan.make_same(survey(facts(runs=[run(alive=alive)], names=names)), LOCALHOST, ["a"])
    assert str(caught.value) == (
        f"app/trainer/loss.py and run.yaml of release {OLD} of demo were changed on localhost; fab {task} writes it anew"
    )
    names["demo"] |= {"changed": {OLD: ["app/x.py"]}, "added": {OLD: ["app/x.py"]}}
    with pytest.raises(DeployError) as caught:
        plan.make_same(survey(facts(runs=[run(alive=alive)], names=names)), LOCALHOST, ["a"])
    assert str(caught.value) == (
        f"app/x.py was added to release {OLD} of demo on localhost; fab {task} writes it anew"
    )


def test_without_a_release_there_is_no_same() -> None:
    with pytest.raises(DeployError) as caught:
        plan.make_same(survey(), LOCALHOST, [])
    assert str(caught.value) == "nothing of demo is deployed on localhost; use fab deploy --name demo"


@pytest.mark.parametrize(
    "later",
    [
        facts(runs=[run(alive=False)], names={"demo": {"current": OLD}}),
        facts(runs=[run(), run("0008-demo")], names={"demo": {"current": OLD}}),
        facts(runs=[run()], names={"demo": {"current": "other"}}),
    ],
)
def test_what_a_plan_was_made_for_is_noticed_when_it_no_longer_holds(later: dict) -> None:
    now = facts(runs=[run()], names={"demo": {"current": OLD}})
    assert plan.seen(now, "demo") == plan.seen(
        facts(runs=[run(), run("0009-exp")], names={"demo": {"current": OLD}}), "demo"
    )
    assert plan.seen(later, "demo") != plan.seen(now, "demo")


def test_a_half_rendered_release_on_the_host_is_named_and_written_anew(tmp_path: Path) -> None:
    old = release_of(survey(), tmp_path)
    names = {
        "demo": {"current": old.id, "releases": [old.id], "changed": {old.id: ["release.json", "run.env"]}}
    }
    made = planned(survey(facts(names=names)), tmp_path)
    assert (
        f"  release   {old.id}, damaged on the host (release.json and run.env): moved aside, and written anew\n"
        in str(made)
    )
