"""The end of a switch: the first step, the way back if there is none, and a disk that takes no more."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import deployed
import pytest
from deployed import CHECKOUT, HOST, TRAINER, Place, steps, until

from deploy import procfs, switch, switch_record
from deploy.switch_steps import Failed
from trainer import status

pytestmark = pytest.mark.slow

DIES = "import sys; print('CUDA error: no kernel image'); sys.exit(3)"
NO_STEP = TRAINER.replace("beat.step += 1", "pass").replace("beat.last_step_time =", "later =")
BEATS_THEN_DIES = TRAINER.replace("beat.step += 1", "run.write_heartbeat(beat); time.sleep(0.5); sys.exit(3)")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    yield from deployed.place(tmp_path)


def go(made: dict) -> switch.Outcome:
    return switch.watch(HOST, switch.start(HOST, made), lambda step: None)


def outcomes(outcome: switch.Outcome) -> dict[str, str]:
    return {step["name"]: step["outcome"] for step in outcome.steps}


@pytest.fixture
def old(place: Place) -> status.RunDir:
    """A run of the first release in progress."""
    release = place.whole_release()
    run = place.run_dir(release={"id": release})
    place.start(run, release)
    until(lambda: steps(run))
    (place.root / "names" / "demo" / "current").symlink_to(f"releases/{release}")
    (place.root / "names" / "demo" / "previous").symlink_to("releases/999999999999")
    return run


def before(place: Place, run: status.RunDir) -> dict:
    """What a deploy with --rollback-on-failure adds to the specification."""
    return {
        "release_id": run.run().release["id"],
        "start": place.start_spec(run, run.run().release["id"]),
        "run": json.loads((run.path / "run.json").read_text()),
    }


def back(place: Place, new: status.RunDir, old: status.RunDir, **more) -> switch.Outcome:
    place.release("bbbbbbbbbbbb")
    return go(place.spec(new, old, "bbbbbbbbbbbb", **{"rollback": before(place, old), **more}))


def record(run: status.RunDir) -> dict:
    return json.loads((run.path / "switch.json").read_text())


def test_the_first_step_is_watched_for_if_that_is_wanted(place):
    run = place.run_dir()
    outcome = go(place.spec(run, wait_first_step=True))
    assert outcome.word == "done", outcome
    assert outcome.steps[-1]["name"] == "first-step"
    assert outcome.steps[-1]["detail"].startswith("step ")


def test_a_run_that_beats_and_dies_before_its_first_step_fails_the_switch(place):
    outcome = go(place.spec(place.run_dir(BEATS_THEN_DIES), wait_first_step=True))
    assert outcome.word == "failed"
    assert (outcomes(outcome)["first-heartbeat"], outcomes(outcome)["first-step"]) == ("ok", "failed")
    assert "exit code 3" in outcome.reason


def test_a_run_that_is_only_slow_goes_on_and_is_not_rolled_back(place, old):
    new = place.run_dir(NO_STEP)
    outcome = back(place, new, old, first_step_timeout_seconds=1.0)
    assert outcome.word == "failed"
    assert "no step within 1 s; the run is still in progress" in outcome.reason
    assert "rollback" not in outcomes(outcome)
    assert new.alive()


def test_a_release_that_never_started_is_nothing_to_go_back_to(place, old):
    place.release("bbbbbbbbbbbb")
    never = place.run_dir(release={"id": "bbbbbbbbbbbb"})
    (place.root / "names" / "demo" / "current").unlink()
    (place.root / "names" / "demo" / "current").symlink_to("releases/bbbbbbbbbbbb")
    place.release("cccccccccccc")
    assert go(place.spec(place.run_dir(), old, "cccccccccccc")).word == "done"
    assert not never.launch()
    names = place.root / "names" / "demo"
    assert os.readlink(names / "current") == "releases/cccccccccccc"
    assert os.readlink(names / "previous") == "releases/999999999999"


@pytest.mark.parametrize("command", [DIES, BEATS_THEN_DIES], ids=["at once", "after its first heartbeat"])
def test_a_run_that_dies_before_its_first_step_gives_way_to_the_release_before(place, old, command):
    new = place.run_dir(command)
    kept = {"schema": 1, "run": before(place, old)["run"], "weights": None}
    kept["spec"] = {"run_path": str(old.path), "start": before(place, old)["start"]}
    status.write_json(old.path / "boot.json", kept, mode=0o600)
    outcome = back(place, new, old)
    assert outcome.word == "failed"
    assert outcomes(outcome)["rollback"] == "ok", outcome
    assert "exit code 3" in outcome.reason
    was = old.run()
    release = was.release["id"]
    assert f"release {release} runs again as 0003-demo" in outcome.reason
    restored = status.RunDir(place.root / "runs" / "0003-demo")
    assert restored.alive()
    words = json.loads((place.root / "names" / "demo" / "switch.lock").read_text())
    assert words["record"] == str(restored.path / "switch.json")  # is what others watch meanwhile
    assert record(new)["rollback"] == {
        "release_id": release,
        "run_path": str(restored.path),
        "outcome": "done",
    }
    made, was = restored.run(), old.run()
    assert (made.run_id, made.command, made.release) == ("0003-demo", was.command, was.release)
    assert made.created > was.created
    names = place.root / "names" / "demo"
    assert os.readlink(names / "current") == f"releases/{release}"
    assert os.readlink(names / "previous") == "releases/999999999999"
    assert switch.watch(HOST, str(restored.path), lambda step: None).word == "done"
    until(lambda: steps(restored))
    # It is also what starts again with the machine.
    again = json.loads((restored.path / "boot.json").read_text())
    assert again["run"]["run_id"] == "0003-demo"
    assert again["spec"]["run_path"] == str(restored.path)
    assert str(old.path) not in json.dumps(again)
    assert (restored.path / "boot.json").stat().st_mode & 0o777 == 0o600


def test_a_command_of_ones_own_that_prints_something_and_dies_is_rolled_back_too(place, old):
    new = place.run_dir("import sys, time; print('hello', flush=True); time.sleep(1); sys.exit(3)")
    outcome = back(place, new, old, heartbeats=False)
    assert outcomes(outcome)["first-heartbeat"] == "ok"
    assert outcomes(outcome)["first-step"] == "failed"
    assert outcomes(outcome)["rollback"] == "ok", outcome


def test_a_command_of_ones_own_has_started_once_one_attempt_of_it_has_lived_for_a_while(place):
    """Also one that launch starts again and again."""
    hello = "import sys, time; print('hello', flush=True); time.sleep(0.3); sys.exit(3)"
    own = {"heartbeats": False, "settle_seconds": 2.0}
    outcome = go(place.spec(place.run_dir(hello, restart_attempts=1), **own))
    assert outcome.word == "failed"
    assert (outcomes(outcome)["first-heartbeat"], outcomes(outcome)["settled"]) == ("ok", "failed")
    assert outcome.exit["attempts"] == 2
    assert outcome.exit["code"] == 3
    assert "hello" in outcome.last_lines
    finishes = hello.replace("exit(3)", "exit(0)")
    assert go(place.spec(place.run_dir(finishes), **own)).word == "done"
    outcome = go(place.spec(place.run_dir(hello.replace("0.3", "600")), **{**own, "settle_seconds": 0.2}))
    assert outcome.word == "done"
    assert outcome.steps[-1]["detail"].startswith("alive for 0.2 s")


def test_what_hangs_before_it_begins_is_ended_before_the_release_before_starts_again(place, old, tmp_path):
    place.release("bbbbbbbbbbbb")
    made = place.spec(place.run_dir(), old, "bbbbbbbbbbbb", rollback=before(place, old))
    code = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
    made["start"]["argv"] = [sys.executable, "-c", code]
    outcome = go({**made, "start_timeout_seconds": 2.0})
    assert "did not begin within 2 s and was ended" in outcome.reason
    assert outcomes(outcome)["rollback"] == "ok", outcome
    process = procfs.stat(int((tmp_path / "pid").read_text()))
    assert process is None or process["state"] == "Z"


def test_the_restored_run_gets_its_secrets_again(place, old, tmp_path):
    kept = place.root / "names" / "demo" / f"secrets-{old.path.name}"
    kept.write_text("KEY=value\n")
    kept.chmod(0o400)
    made = old.run()
    made.secrets, made.secrets_file = ["KEY"], str(kept)
    old.write_run(made)
    assert outcomes(back(place, place.run_dir(DIES), old))["rollback"] == "ok"
    restored = status.RunDir(place.root / "runs" / "0003-demo").run()
    assert restored.secrets_file == str(kept.with_name("secrets-0003-demo"))
    assert Path(restored.secrets_file).read_text() == "KEY=value\n"
    assert os.stat(restored.secrets_file).st_mode & 0o777 == 0o400


def test_a_run_that_a_person_stops_meanwhile_is_not_rolled_back(place, old):
    new = place.run_dir(NO_STEP)
    place.release("bbbbbbbbbbbb")
    path = switch.start(HOST, place.spec(new, old, "bbbbbbbbbbbb", rollback=before(place, old)))
    until(lambda: any(step["name"] == "first-step" for step in record(new)["steps"]))
    assert go(place.spec(None, new)).word == "done"
    outcome = switch.watch(HOST, path, lambda step: None)
    assert outcome.word == "failed"
    assert "rollback" not in outcomes(outcome)
    assert not any(run.alive() for run in status.list_runs(place.root / "runs"))


def test_a_rollback_to_a_release_that_is_gone_says_so(place, old):
    gone = {**before(place, old), "release_id": "cccccccccccc"}
    outcome = back(place, place.run_dir(DIES), old, rollback=gone)
    assert outcomes(outcome)["rollback"] == "failed"
    assert "release cccccccccccc was not started again: release cccccccccccc" in outcome.reason


def test_a_release_that_was_edited_on_the_host_is_not_started_again(place, old):
    release = old.run().release["id"]
    edited = place.root / "names" / "demo" / "releases" / release / "app" / "trainer" / "loss.py"
    edited.write_text("loss = 0")
    outcome = back(place, place.run_dir(DIES), old)
    assert outcomes(outcome)["rollback"] == "failed"
    assert f"app/trainer/loss.py of release {release} was changed on the host" in outcome.reason
    assert [run.path.name for run in status.list_runs(place.root / "runs")] == ["0001-demo", "0002-demo"]


def test_a_release_that_dies_too_is_told_with_both_reasons(place, old):
    broken = before(place, old)
    broken["run"]["command"] = [sys.executable, "-c", "raise SystemExit(4)"]
    outcome = back(place, place.run_dir(DIES), old, rollback=broken)
    assert outcomes(outcome)["rollback"] == "failed"
    assert "exit code 3" in outcome.reason
    assert "exit code 4" in outcome.reason
    assert "not restored" in outcome.reason
    assert not any(run.alive() for run in status.list_runs(place.root / "runs"))


def fill(path: Path) -> None:
    """Take all that is left of a file system, to the last page."""
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)) == 4096:
            pass


@pytest.mark.root
def test_a_full_disk_does_not_keep_a_run_from_being_stopped(place, tmp_path):
    """The job itself, since nothing can be written: specification over stdin, record in shared memory."""
    place.root.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", place.root], check=True)
    answer: dict = {}
    try:
        # One that writes nothing: files that are replaced would give a page back now and then.
        run = place.run_dir("import time; print('hello', flush=True); time.sleep(1000)")
        place.start(run)
        until(lambda: (launch := run.launch()) and launch.trainer_pid)
        fill(place.root / "full")
        path = str(place.root / "names" / "demo" / "stop.json")
        made = {**place.spec(None, run), "record": path, "checkpoint_timeout_seconds": 0}
        done = subprocess.run(
            [sys.executable, "-c", "from deploy.switch_job import main; main()", "-", "--attached"],
            input=json.dumps(made).encode(),
            capture_output=True,
            cwd=CHECKOUT,
        )
        answer = json.loads(done.stdout)
        assert answer["accepted"], answer
        assert done.returncode == 0
        assert not run.alive()
        assert answer["record"].startswith("/dev/shm/")
        assert json.loads(Path(answer["record"]).read_text())["outcome"] == "done"
        assert (run.exit().reason, run.exit().asked_by) == ("stopped", "ada@desk")  # not a mere signal
        assert run.exit().message.startswith("stopped by ada@desk after")
    finally:
        place.end_all()
        if answer.get("record", "").startswith("/dev/shm/"):
            Path(answer["record"]).unlink()
        subprocess.run(["umount", "-l", str(place.root)], check=True)


@pytest.mark.root
def test_a_disk_that_is_full_by_the_end_of_a_switch_has_room_for_its_outcome(tmp_path):
    """Else its job would be gone without one, which looks as if somebody had killed it."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", tmp_path], check=True)
    try:
        path = tmp_path / "switch.json"
        whose = {"name": "demo", "run_path": str(tmp_path), "old_run_path": None, "by": "ada@desk"}
        record = switch_record.Record(str(path), {**whose, "start": {"argv": ["true"]}})
        record.begin("settled")
        fill(tmp_path / "full")
        record.end_step("ok", "alive")
        assert json.loads(path.read_text())["steps"][0]["outcome"] == "running"  # no room for that
        record.end("failed", Failed("died", ["é" * 50_000]))  # more than is kept
        told = json.loads(path.read_text())
        assert (told["outcome"], told["reason"], told["last_lines"]) == ("failed", "died", [])
        assert (told["steps"][0]["outcome"], path.stat().st_mode & 0o777) == ("ok", 0o644)
        assert sorted(file.name for file in tmp_path.iterdir()) == ["full", "switch.json"]
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
