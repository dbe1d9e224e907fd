"""deploy/switch.py with real processes: from one run to the next, whatever becomes of the client."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import deployed
import pytest
from deployed import CHECKOUT, HOST, TRAINER, Place, processes_of, steps, until

from deploy import switch, switch_steps
from deploy.errors import DeployError
from trainer import status

pytestmark = pytest.mark.slow

DIES = "import sys; print('no such directory: /data'); sys.exit(2)"
DEAF = TRAINER.replace("lambda *_: stop.append(1)", "signal.SIG_IGN")
CHILDREN = (
    "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
)
OWN = "import time\nprint('hello', flush=True)\ntime.sleep(1000)"
OBEDIENT = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n" + OWN


@pytest.fixture
def place(tmp_path):
    yield from deployed.place(tmp_path)


def go(place: Place, new, old=None, **more) -> switch.Outcome:
    """Start a switch and watch it to its end."""
    return switch.watch(HOST, switch.start(HOST, place.spec(new, old, **more)), lambda step: None)


def outcomes(outcome: switch.Outcome) -> dict[str, str]:
    return {step["name"]: step["outcome"] for step in outcome.steps}


def details(outcome: switch.Outcome) -> dict[str, str]:
    return {step["name"]: step["detail"] for step in outcome.steps}


def running(place: Place, command=TRAINER, **fields) -> status.RunDir:
    """A run in progress that has taken steps (or printed, if it sends no heartbeats)."""
    run = place.run_dir(command, **fields)
    place.start(run)
    until(
        lambda: (
            steps(run)
            or (run.log.is_dir() and b"hello" in b"".join(p.read_bytes() for p in run.log.iterdir()))
        )
    )
    return run


def test_the_first_run_of_a_name_starts_and_each_step_is_told(place):
    run = place.run_dir()
    told = []
    outcome = switch.watch(HOST, switch.start(HOST, place.spec(run)), told.append)
    assert outcome.word == "done", outcome
    assert outcomes(outcome) == {
        "checkpoint-request": "skipped",
        "stop": "skipped",
        "release": "ok",
        "start": "ok",
        "first-line": "ok",
        "first-heartbeat": "ok",
    }
    assert "drafthouse run 0001-demo" in details(outcome)["first-line"]
    assert all(step["ended"] >= step["started"] for step in outcome.steps)
    assert {step["name"] for step in told} == set(outcomes(outcome))
    assert run.alive()
    names = place.root / "names" / "demo"
    assert os.readlink(names / "current") == "releases/aaaaaaaaaaaa"
    assert not (names / "previous").is_symlink()


def test_the_old_run_saves_before_any_signal_and_ends_before_the_new_one_starts(place, tmp_path):
    saves = tmp_path / "saves"
    old = running(place, environment={"SAVES": str(saves)})
    place.release("bbbbbbbbbbbb")
    (place.root / "names" / "demo" / "current").symlink_to("releases/aaaaaaaaaaaa")
    new = place.run_dir()
    outcome = go(place, new, old, release_id="bbbbbbbbbbbb")
    assert outcome.word == "done", outcome
    assert [line.split()[0] for line in saves.read_text().splitlines()] == ["checkpoint", "term"]
    by_name = {step["name"]: step for step in outcome.steps}
    assert by_name["checkpoint-request"]["outcome"] == "ok"
    assert by_name["checkpoint-request"]["ended"] <= by_name["stop"]["started"]
    assert by_name["stop"]["ended"] <= by_name["start"]["started"]
    assert (old.exit().reason, old.exit().asked_by) == ("stopped", "ada@desk")  # a person, not a signal
    assert not old.alive()
    assert new.alive()
    names = place.root / "names" / "demo"
    assert os.readlink(names / "current") == "releases/bbbbbbbbbbbb"
    assert os.readlink(names / "previous") == "releases/aaaaaaaaaaaa"


def test_a_run_that_does_not_answer_the_request_is_stopped_after_the_timeout(place):
    mute = TRAINER.replace("request = run.request()", "request = None")
    old = running(place, mute)
    outcome = go(place, None, old, checkpoint_timeout_seconds=0.5)
    assert outcome.word == "done"
    assert outcomes(outcome) == {"checkpoint-request": "failed", "stop": "ok"}
    assert "no answer within 0.5 s" in details(outcome)["checkpoint-request"]
    assert old.exit().reason == "stopped"


def test_a_run_that_could_not_save_is_left_running_and_the_new_one_is_not_started(place):
    old = running(place, environment={"ANSWER": "no checkpoint at step 7: No space left on device"})
    new = place.run_dir()
    outcome = go(place, new, old)
    assert outcome.word == "failed"
    assert outcomes(outcome) == {"checkpoint-request": "failed"}
    assert "run 0001-demo goes on, because it could not save: no checkpoint at step 7" in outcome.reason
    assert old.alive()
    assert old.request().action == "checkpoint"  # no signal was announced, and none was sent
    assert not new.alive()
    outcome = go(place, None, old, checkpoint_timeout_seconds=0)  # fab stop --no-checkpoint
    assert outcomes(outcome) == {"checkpoint-request": "skipped", "stop": "ok"}
    assert not old.alive()


def test_a_command_without_heartbeats_gets_a_signal_and_no_request(place):
    old = running(place, OBEDIENT)
    new = place.run_dir(OBEDIENT)
    outcome = go(place, new, old, heartbeats=False)
    assert outcome.word == "done"
    assert outcomes(outcome)["checkpoint-request"] == "skipped"
    assert old.request().action == "stop"  # which only says who sends the signal
    assert old.exit().code == 0
    assert "first output" in details(outcome)["first-heartbeat"]


def test_a_run_that_a_full_disk_keeps_from_being_asked_to_save_goes_on(place, monkeypatch):
    old = running(place)

    def ask(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(status.RunDir, "ask", ask)
    said = "run 0001-demo goes on, because it could not be asked to save: No space left on device; "
    with pytest.raises(switch_steps.Failed, match=f"^{said}"):
        switch_steps.Switch(place.spec(None, old), lambda: None).request_checkpoint()
    assert old.alive()


def test_a_run_without_a_step_is_not_asked_for_a_checkpoint(place):
    old = running(place, TRAINER.replace("beat.step += 1", "beat.step = 0; print('hello')"))
    outcome = go(place, None, old)
    assert outcomes(outcome) == {"checkpoint-request": "skipped", "stop": "ok"}


def test_a_trainer_that_ignores_term_is_killed_after_the_grace_by_launch(place):
    old = running(place, CHILDREN + DEAF, grace_seconds=0.5)
    outcome = go(place, None, old, grace_seconds=0.5)
    assert outcome.word == "done"
    assert old.exit().signal == signal.SIGKILL
    assert processes_of(old) == []


def test_a_launch_that_hangs_is_killed_and_nothing_of_its_run_is_left(place, monkeypatch):
    old = running(place, CHILDREN + DEAF)
    launch = old.launch()
    os.kill(launch.pid, signal.SIGSTOP)
    spec = place.spec(None, old, grace_seconds=-9.5)  # the margin for launch's own work shrinks to 0.5 s
    outcome = switch.watch(HOST, switch.start(HOST, spec), lambda step: None)
    assert outcome.word == "done", outcome
    assert "SIGKILL" in details(outcome)["stop"]
    assert not old.alive()
    assert processes_of(old) == []
    assert (old.exit().reason, old.exit().code, old.exit().asked_by) == ("stopped", 137, "ada@desk")


def test_a_stop_is_recorded_beside_the_name(place):
    old = running(place)
    record = switch.start(HOST, place.spec(None, old))
    assert record == f"{place.root}/names/demo/stop.json"
    assert switch.watch(HOST, record, lambda step: None).word == "done"
    assert old.exit().reason == "stopped"


def test_stopping_a_run_that_has_ended_does_nothing(place):
    old = place.run_dir("print('hello')")
    place.start(old)
    until(lambda: old.exit() and not old.alive())
    outcome = go(place, None, old)
    assert outcome.word == "done"
    assert set(outcomes(outcome).values()) == {"skipped"}


def test_a_new_run_that_dies_at_once_fails_the_switch_with_its_last_words(place):
    run = place.run_dir(DIES)
    outcome = go(place, run)
    assert outcome.word == "failed"
    assert "exit code 2" in outcome.reason
    assert any("no such directory: /data" in line for line in outcome.last_lines)
    assert outcome.exit["code"] == 2
    assert outcomes(outcome)["first-heartbeat"] == "failed"
    assert os.readlink(place.root / "names" / "demo" / "current") == "releases/aaaaaaaaaaaa"


def test_a_launch_that_cannot_begin_fails_the_switch_with_its_complaint(place):
    run = place.run_dir()
    spec = place.spec(run)
    app = place.root / "names" / "demo" / "releases" / "aaaaaaaaaaaa" / "app"
    (app / "trainer" / "launch.py").write_text("import trainer.gone\n")
    outcome = switch.watch(HOST, switch.start(HOST, spec), lambda step: None)
    assert outcome.word == "failed"
    assert outcomes(outcome)["start"] == "failed"
    assert "ended before it began" in outcome.reason
    assert any("trainer" in line for line in outcome.last_lines)


def test_a_run_that_stays_mute_fails_the_switch_but_goes_on(place):
    run = place.run_dir(OWN)
    outcome = go(place, run, first_heartbeat_timeout_seconds=1.0)
    assert outcome.word == "failed"
    assert "no heartbeat within 1 s; the run is still in progress" in outcome.reason
    assert run.alive()


def test_a_run_that_finishes_before_its_first_heartbeat_is_no_failure(place):
    assert go(place, place.run_dir("print('all done')")).word == "done"


def test_nothing_is_touched_when_the_start_could_not_succeed(place):
    old = running(place)
    new = place.run_dir()
    good = place.spec(new, old)
    broken = {
        "release": {**good, "release_id": "cccccccccccc"},
        "no program": {**good, "start": {**good["start"], "argv": ["/no/such/python"]}},
        "run.json": {**good, "run_path": f"{place.root}/runs/9999-demo"},
    }
    for word, spec in broken.items():
        with pytest.raises(DeployError, match=word):
            switch.start(HOST, spec)
    assert old.alive()
    assert not (old.path / "request.json").exists()
    assert not (place.root / "names" / "demo" / "current").is_symlink()


def test_a_switch_that_was_planned_without_a_run_in_progress_refuses_to_start_a_second_one(place):
    other = running(place)
    new = place.run_dir()
    with pytest.raises(DeployError, match=f"run {other.path.name} is in progress"):
        switch.start(HOST, place.spec(new))
    assert other.alive()


def test_two_switches_of_one_name_exclude_each_other_and_the_second_learns_whose_is_the_first(place):
    old = running(place, environment={"GATE": str(place.root / "gate")})
    record = switch.start(HOST, place.spec(None, old))
    with pytest.raises(DeployError, match=r"another stop \(by ada@desk\) of demo is under way"):
        switch.start(HOST, place.spec(place.run_dir(), old))
    (place.root / "gate").write_text("")
    assert switch.watch(HOST, record, lambda step: None).word == "done"


def test_a_switch_that_is_sent_twice_is_accepted_twice_and_made_once(place, tmp_path):
    """The connection was lost after the host had accepted it, and before that was known."""
    gate = tmp_path / "gate"
    old = running(place, environment={"GATE": str(gate)})
    new = place.run_dir()
    record = switch.start(HOST, place.spec(new, old))
    assert switch.start(HOST, place.spec(new, old)) == record  # under way
    gate.write_text("")
    assert switch.watch(HOST, record, lambda step: None).word == "done"
    before = HOST.read(record)
    assert switch.start(HOST, place.spec(new, old)) == record  # done
    assert (HOST.read(record), new.alive()) == (before, True)


def test_a_run_that_is_still_loading_can_be_stopped(place):
    run = place.run_dir("import time\ntime.sleep(1000)")
    record = switch.start(HOST, place.spec(run))
    until(lambda: any(s["name"] == "first-heartbeat" for s in json.loads(HOST.read(record))["steps"]))
    assert go(place, None, run).word == "done"
    outcome = switch.watch(HOST, record, lambda step: None)
    assert outcome.word == "failed"
    assert "stopped" in outcome.reason


# Commands run in the client's own session here, as they would in that of an SSH login.
CLIENT = """
import json, subprocess, sys, time
from deploy import switch, switch_steps
from deploy.host import Local, Result
class Login(Local):
    def _run(self, argv, timeout, env, input):
        done = subprocess.run(argv, input=input, capture_output=True)
        return Result(done.returncode, done.stdout, done.stderr)
record = switch.start(Login(), json.load(open(sys.argv[1])))
print(record, flush=True)
switch.watch(Login(), record, lambda step: None)
"""


def test_a_client_that_is_killed_changes_nothing_and_the_next_one_sees_it_all(place, tmp_path):
    """CASES 2 and 3: the whole session of the client goes away, with its terminal."""
    old = running(place, environment={"GATE": str(tmp_path / "gate")})
    new = place.run_dir()
    (tmp_path / "spec.json").write_text(json.dumps(place.spec(new, old)))
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, str(tmp_path / "spec.json")],
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert client.stdout
    record = client.stdout.readline().decode().strip()
    os.killpg(client.pid, signal.SIGHUP)
    os.killpg(client.pid, signal.SIGKILL)
    client.wait()
    assert json.loads(HOST.read(record))["outcome"] == "running"
    (tmp_path / "gate").write_text("")
    seen = []
    outcome = switch.watch(HOST, str(new.path), seen.append)
    assert outcome.word == "done", outcome
    assert seen[0]["name"] == "checkpoint-request"
    assert new.alive()
    assert not old.alive()
    # Nothing of the new run has the client's session, a terminal, or a way to be hung up by either.
    for pid in [new.launch().pid, *processes_of(new)]:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        assert int(stat[3]) != client.pid
        assert int(stat[4]) == 0  # tty_nr: no controlling terminal


def test_the_start_returns_while_the_old_run_still_saves(place):
    old = running(place, environment={"GATE": str(place.root / "gate")})
    record = switch.start(HOST, place.spec(None, old))
    until(lambda: json.loads(HOST.read(record))["steps"])
    value = json.loads(HOST.read(record))
    assert (value["outcome"], value["steps"][0]["outcome"]) == ("running", "running")
    assert old.alive()


def test_a_switch_whose_process_is_gone_is_reported_as_interrupted(place):
    old = running(place, environment={"GATE": str(place.root / "gate")})
    record = switch.start(HOST, place.spec(None, old))
    job = json.loads(HOST.read(record))["job"]["pid"]
    until(lambda: json.loads(HOST.read(record))["steps"])
    os.kill(job, signal.SIGKILL)
    outcome = switch.watch(HOST, record, lambda step: None)
    assert outcome.word == "failed"
    assert "interrupted during checkpoint-request" in outcome.reason
    assert old.alive()


def test_watching_what_never_was_is_an_error_in_one_sentence(place):
    with pytest.raises(DeployError, match="no switch to watch"):
        switch.watch(HOST, str(place.root / "runs" / "0001-demo"), lambda step: None)


def test_a_pid_that_belongs_to_another_process_by_now_gets_no_signal(place, tmp_path):
    """launch.json is old, or foreign: what holds the run's lock is what is signalled, nothing else."""
    old = running(place)
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    try:
        launch = old.launch()
        real, launch.pid = launch.pid, bystander.pid
        os.kill(real, signal.SIGSTOP)  # so that launch does not write its file again
        old.write_launch(launch)
        record = switch.start(HOST, place.spec(None, old))
        until(lambda: any(s["name"] == "stop" for s in json.loads(HOST.read(record))["steps"]))
        time.sleep(0.3)
        assert bystander.poll() is None
        launch.pid = real
        old.write_launch(launch)
        os.kill(real, signal.SIGCONT)
        assert switch.watch(HOST, record, lambda step: None).word == "done"
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_launch_is_told_by_its_lock_if_its_number_means_nothing_here(place):
    """That of a run in a container that could not be noted, or whose disk took no more."""
    old = running(place)
    launch = old.launch()
    real, launch.pid = launch.pid, 2_000_000_000
    os.kill(real, signal.SIGSTOP)  # so that launch does not write its file again
    old.write_launch(launch)
    record = switch.start(HOST, place.spec(None, old))
    until(lambda: any(s["name"] == "stop" for s in json.loads(HOST.read(record))["steps"]))
    until(lambda: int(pending(real), 16) & 1 << signal.SIGTERM - 1)
    os.kill(real, signal.SIGCONT)
    assert switch.watch(HOST, record, lambda step: None).word == "done"


def pending(pid: int) -> str:
    return Path(f"/proc/{pid}/status").read_text().partition("ShdPnd:")[2].split()[0]


HOSTILE = {
    "BLANKS": "a  b ",
    "SEMICOLON": "a;b|c&d",
    "SUBSTITUTION": "$(id -u) `id` ${HOME}",
    "QUOTES": "'\"\\'",
    "NEWLINES": "a\nb\r\nc",
    "UNICODE": "τ → ü 🏠",
    "EMPTY": "",
    "COMMENT": "#x",
}


def test_every_value_reaches_the_process_byte_for_byte(place, tmp_path):
    """CASES 21, for the process runtime: through specification, switch, launch, to the command itself."""
    show = tmp_path / "shown"
    code = (
        "import json, os, sys\n"
        "value = [{k: os.environb[k.encode()].hex() for k in sys.argv[2].split(',')},"
        " [os.fsencode(a).hex() for a in sys.argv[3:]]]\n"
        "open(sys.argv[1] + '.new', 'w').write(json.dumps(value))\n"
        "os.rename(sys.argv[1] + '.new', sys.argv[1])\n"
        "print('hello')"
    )
    words = list(HOSTILE.values())
    command = [sys.executable, "-c", code, str(show), ",".join(HOSTILE), *words]
    run = place.run_dir(command, environment=HOSTILE)
    assert go(place, run, heartbeats=False).word == "done"
    until(show.exists)
    variables, arguments = json.loads(show.read_text())
    assert variables == {key: value.encode().hex() for key, value in HOSTILE.items()}
    assert arguments == [word.encode().hex() for word in words]


def test_every_value_of_the_specification_reaches_launch_byte_for_byte(place, tmp_path):
    """The same for what the switch itself starts: argv and environment of the specification."""
    run = place.run_dir()
    spec = place.spec(run)
    show = tmp_path / "environment"
    wrapper = (
        "import os, sys\n"
        "words = [os.fsencode(word) for word in sys.argv[2:-1]]\n"
        "variables = [b'%s=%s' % item for item in os.environb.items()]\n"
        "open(sys.argv[1], 'wb').write(b'\\0'.join(words) + b'\\1' + b'\\0'.join(variables))\n"
        "launch = ['-u', '-m', 'trainer.launch', '--run-dir', sys.argv[-1]]\n"
        "os.execv(sys.executable, [sys.executable, *launch])"
    )
    spec["start"]["argv"] = [sys.executable, "-c", wrapper, str(show), *HOSTILE.values(), str(run.path)]
    spec["start"]["environment"].update(HOSTILE)
    assert switch.watch(HOST, switch.start(HOST, spec), lambda step: None).word == "done"
    arguments, environment = show.read_bytes().split(b"\1")
    assert arguments.split(b"\0") == [value.encode() for value in HOSTILE.values()]
    for key, value in HOSTILE.items():
        assert f"{key}={value}".encode() in environment.split(b"\0")
