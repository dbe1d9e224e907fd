"""The switch with containers of a real engine: started, stopped, replaced, dead at once, out of memory."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import in_container
import pytest
from deployed import CHECKOUT, HOST, TRAINER, steps, until
from in_container import IMAGE, INSIDE, USER, ContainerPlace
from testbed.docker import Docker

from deploy import contained, evidence, procfs, switch
from deploy.errors import DeployError
from deploy.health import verdict
from trainer import status

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SLEEPS = "import time\nprint('hello', flush=True)\ntime.sleep(1000)"
EATS = (
    "import time\nprint('loading', flush=True)\nkept = [bytearray(8 << 20) for _ in range(40)]\nprint('fits')"
)


@pytest.fixture
def place(tmp_path: Path, base_images: Docker, monkeypatch) -> Iterator[ContainerPlace]:
    monkeypatch.setenv("DOCKER_HOST", base_images.environment["DOCKER_HOST"])
    monkeypatch.setenv("DOCKER_CONFIG", base_images.environment["DOCKER_CONFIG"])
    yield from in_container.place(tmp_path, base_images, "swtest1")


def go(place: ContainerPlace, spec: dict) -> switch.Outcome:
    """Start a switch and watch it to its end."""
    return switch.watch(HOST, switch.start(HOST, spec), lambda step: None)


def outcomes(outcome: switch.Outcome) -> dict[str, str]:
    return {step["name"]: step["outcome"] for step in outcome.steps}


def details(outcome: switch.Outcome) -> dict[str, str]:
    return {step["name"]: step["detail"] for step in outcome.steps}


def running(place: ContainerPlace, command: str = TRAINER, **fields) -> status.RunDir:
    """A run in a container that has taken steps (or printed, if it sends no heartbeats)."""
    run = place.run_dir(command, **fields)
    place.up(run)
    until(lambda: steps(run) or b"hello" in log(run))
    return run


def log(run: status.RunDir) -> bytes:
    with contextlib.suppress(OSError):
        return b"".join(path.read_bytes() for path in sorted(run.log.glob("*.log")))
    return b""


def facts_of(place: ContainerPlace, run: status.RunDir, sample: float = 0.0) -> tuple[dict, dict]:
    facts = evidence.collect(HOST, str(place.root), str(place.root / "shm"), sample=sample)
    return facts, next(found for found in facts["runs"] if found["run_id"] == run.path.name)


# -- from one run to the next ------------------------------------------------------------------------------


def test_a_run_starts_in_a_container_and_its_engine_knows_its_lines(place):
    run = place.run_dir()
    outcome = go(place, place.spec(run, wait_first_step=True))
    assert outcome.word == "done", outcome
    assert outcomes(outcome) == {
        "checkpoint-request": "skipped",
        "stop": "skipped",
        "release": "ok",
        "start": "ok",
        "first-line": "ok",
        "first-heartbeat": "ok",
        "first-step": "ok",
    }
    kept = json.loads((run.path / "container.json").read_text())
    assert details(outcome)["start"] == f"container {kept['name']} ({kept['id'][:12]})"
    assert kept["image"] == IMAGE
    assert kept["image_id"].startswith("sha256:")
    name = place.root / "names" / place.name
    assert os.readlink(name / "run") == f"../../runs/{run.path.name}"
    compose = [*place.docker.command, "compose", "-f", str(name / "current" / "compose.yaml")]
    until(lambda: b"step 1" in subprocess.run([*compose, "logs"], capture_output=True).stdout)


def test_the_old_container_saves_before_it_gets_term_and_the_new_one_takes_its_place(place):
    old = running(place, environment={"SAVES": f"{INSIDE}/saves"})
    first = contained.of(old)
    new = place.run_dir()
    outcome = go(place, place.spec(new, old))
    assert outcome.word == "done", outcome
    saves = (old.path / "saves").read_text().splitlines()
    assert [line.split()[0] for line in saves] == ["checkpoint", "term"]
    assert details(outcome)["stop"].startswith("SIGTERM; ended after")
    by_name = {step["name"]: step for step in outcome.steps}
    assert by_name["stop"]["ended"] <= by_name["start"]["started"]
    assert (old.exit().reason, old.exit().asked_by, old.exit().code) == ("stopped", "ada@desk", 0)
    assert new.alive()
    assert first.state(fresh=True)["status"] == "gone"
    assert contained.of(new).running()


def test_a_stopped_container_is_kept_so_that_its_last_lines_can_be_read(place):
    old = running(place)
    outcome = go(place, place.spec(None, old))
    assert outcome.word == "done", outcome
    container = contained.of(old)
    assert container.running() is False
    assert "saved and out" in "\n".join(container.last_lines())


def test_a_run_moves_from_a_process_into_a_container_and_back(place):
    old = place.run_dir([sys.executable, "-u", "-c", TRAINER])
    place.start(old)
    until(lambda: steps(old))
    new = place.run_dir()
    outcome = go(place, place.spec(new, old))
    assert outcome.word == "done", outcome
    assert not old.alive()
    assert contained.of(new).running()
    last = place.run_dir([sys.executable, "-u", "-c", TRAINER])
    outcome = go(place, place.process_spec(last, new))
    assert outcome.word == "done", outcome
    assert last.alive()
    assert contained.of(last) is None
    assert contained.of(new).running() is False


def test_a_trainer_that_ignores_term_is_killed_with_its_container(place):
    old = running(place, TRAINER.replace("lambda *_: stop.append(1)", "signal.SIG_IGN"), grace_seconds=0.5)
    outcome = go(place, place.spec(None, old, grace_seconds=0.5))
    assert outcome.word == "done"
    assert (old.exit().reason, old.exit().signal) == ("stopped", signal.SIGKILL)
    assert contained.of(old).running() is False


def test_a_launch_that_hangs_is_killed_by_the_engine(place):
    old = running(place)
    launch = procfs.holding(str(old.lock), procfs.processes())
    assert launch
    os.kill(launch, signal.SIGSTOP)
    # The margin for launch's own work shrinks to half a second.
    outcome = go(place, place.spec(None, old, grace_seconds=-9.5, checkpoint_timeout_seconds=0))
    assert outcome.word == "done", outcome
    assert "still there after 0.5 s, SIGKILL" in details(outcome)["stop"]
    assert (old.exit().reason, old.exit().code, old.exit().asked_by) == ("stopped", 137, "ada@desk")
    assert contained.of(old).running() is False


def test_a_paused_container_is_let_go_on_so_that_it_can_save_and_end(place):
    old = running(place)
    place.docker.run("pause", contained.of(old).id)
    outcome = go(place, place.spec(None, old, checkpoint_timeout_seconds=0.5))
    assert outcome.word == "done", outcome
    assert (old.exit().reason, old.exit().code) == ("stopped", 0)
    assert b"saved and out" in log(old)


def test_a_run_whose_container_the_engine_does_not_know_is_stopped_all_the_same(place):
    old = running(place)
    kept = json.loads((old.path / "container.json").read_text())
    status.write_json(old.path / "container.json", {**kept, "id": "0" * 64})
    outcome = go(place, place.spec(None, old))
    assert outcome.word == "done", outcome
    assert "no such container" in details(outcome)["stop"]
    assert (old.exit().reason, old.exit().asked_by) == ("stopped", "ada@desk")


def test_each_run_gets_its_own_secrets_and_none_keeps_those_of_another(place):
    name = place.root / "names" / place.name
    name.mkdir(parents=True)
    (name / "secrets-0001").write_text("KEY=value\n")
    run = place.run_dir(secrets=["KEY"])
    made = run.run()
    made.secrets_file = str(name / "secrets-0001")
    (name / "secrets-0001").chmod(0o444)
    run.write_run(made)
    # (Launch takes the file from where run.json says, which this container does not mount.)
    outcome = go(place, place.spec(run))
    assert os.readlink(name / "secrets") == "secrets-0001", outcome
    assert "secrets-0001" in str(facts_of(place, run)[0]["names"][place.name]["secrets"])
    next_run = place.run_dir()
    assert go(place, place.spec(next_run)).word == "done"
    assert not (name / "secrets").is_symlink()


# -- what goes wrong ---------------------------------------------------------------------------------------


def test_a_trainer_that_dies_at_once_fails_the_switch_with_its_last_words(place):
    run = place.run_dir("import sys; print('no such directory: /data'); sys.exit(2)")
    outcome = go(place, place.spec(run))
    assert outcome.word == "failed"
    assert "exit code 2" in outcome.reason
    assert any("no such directory: /data" in line for line in outcome.last_lines)
    assert outcome.exit["code"] == 2


def test_a_container_that_ends_before_launch_begins_is_told_with_what_it_printed(place):
    place.service = {"command": ["python3", "-c", "import sys; sys.exit('the image is broken')"]}
    run = place.run_dir()
    outcome = go(place, place.spec(run))
    assert outcome.word == "failed"
    assert outcomes(outcome)["start"] == "failed"
    assert "ended before it began (container: exit code 1)" in outcome.reason
    assert "the image is broken" in outcome.last_lines
    facts, found = facts_of(place, run)
    assert found["container"]["exit_code"] == 1
    assert "was not started" in verdict(found, facts["time"]).reason


def test_a_mount_that_is_missing_fails_the_start_with_the_engines_own_words(place):
    missing = {"type": "bind", "source": "/no/such/weights", "target": "/weights"}
    missing["bind"] = {"create_host_path": False}
    place.service = {"volumes": [missing]}
    outcome = go(place, place.spec(place.run_dir()))
    assert outcome.word == "failed"
    assert outcomes(outcome)["start"] == "failed"
    assert "/no/such/weights" in outcome.reason
    assert not Path("/no/such").exists()


def test_a_device_request_that_the_engine_refuses_fails_the_start_with_its_words(place):
    wanted = {"driver": "nvidia", "device_ids": ["0"], "capabilities": ["gpu"]}
    place.service = {"deploy": {"resources": {"reservations": {"devices": [wanted]}}}}
    run = place.run_dir()
    outcome = go(place, place.spec(run))
    assert outcome.word == "failed"
    assert "could not select device driver" in outcome.reason
    assert not run.alive()


def test_a_trainer_that_takes_more_memory_than_its_container_has_is_told_so(place):
    place.service = {"mem_limit": "96m", "memswap_limit": "96m"}
    run = place.run_dir(EATS)
    outcome = go(place, place.spec(run))
    assert outcome.word == "failed"
    assert "out of memory" in outcome.reason
    assert run.exit().out_of_memory is True
    facts, found = facts_of(place, run)
    judged = verdict(found, facts["time"])
    assert judged.word == "failed"
    assert "out of memory" in judged.reason


def test_a_container_that_is_killed_leaves_evidence_instead_of_a_record(place):
    run = running(place)
    place.docker.run("kill", contained.of(run).id)
    until(lambda: not run.alive())
    facts, found = facts_of(place, run)
    assert found["exit"] is None
    assert (found["container"]["running"], found["container"]["exit_code"]) == (False, 137)
    judged = verdict(found, facts["time"])
    assert judged.word == "failed"
    assert "exit code 137" in judged.reason
    place.docker.run("rm", contained.of(run).id)
    facts, found = facts_of(place, run)
    assert found["container"]["gone"] is True
    assert "container was removed" in verdict(found, facts["time"]).reason


def test_an_image_that_is_gone_is_refused_before_the_old_run_is_touched(place):
    old = running(place)
    spec = place.spec(place.run_dir(), old)
    spec["start"]["container"]["image"] = "drafthouse:none"
    with pytest.raises(DeployError, match="no image drafthouse:none"):
        switch.start(HOST, spec)
    assert old.alive()
    assert not (old.path / "request.json").exists()


class Mute(threading.Thread):
    """An engine that takes connections and never answers."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(path))
        self.socket.listen()
        self.taken: list[socket.socket] = []
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.taken.append(self.socket.accept()[0])


@pytest.fixture
def mute(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "mute.sock"
    server = Mute(path)
    yield f"unix://{path}"
    server.socket.close()


def test_an_engine_that_hangs_is_refused_before_the_old_run_is_touched(place, mute):
    old = running(place)
    spec = place.spec(place.run_dir(), old)
    spec["start"]["environment"]["DOCKER_HOST"] = mute
    spec["start"]["engine_seconds"] = 0.5
    with pytest.raises(DeployError, match=r"does not answer within 0\.5 s"):
        switch.start(HOST, spec)
    assert old.alive()
    assert not (old.path / "request.json").exists()


def test_a_run_can_be_stopped_while_its_engine_hangs(place, mute, monkeypatch):
    old = running(place)
    real = contained.of(old)
    kept = json.loads((old.path / "container.json").read_text())
    status.write_json(old.path / "container.json", {**kept, "engine": mute})
    outcome = go(place, place.spec(None, old))
    assert outcome.word == "done", outcome
    assert "does not answer" in details(outcome)["stop"]
    assert (old.exit().reason, old.exit().asked_by) == ("stopped", "ada@desk")
    assert real.running() is False
    # The probe gives up on such an engine and says so, and the run's verdict stands.
    monkeypatch.setenv("DOCKER_HOST", mute)
    facts, found = facts_of(place, old)
    assert "does not answer" in found["container"]["unknown"]
    assert verdict(found, facts["time"]).word == "stopped"


CLIENT = """
import json, sys
from deploy import switch
from deploy.host import Local
record = switch.start(Local(), json.load(open(sys.argv[1])))
print(record, flush=True)
switch.watch(Local(), record, lambda step: None)
"""


def test_a_client_that_is_killed_in_mid_switch_changes_nothing(place, tmp_path):
    old = running(place, environment={"GATE": f"{INSIDE}/gate"})
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
    os.killpg(client.pid, signal.SIGKILL)
    client.wait()
    assert json.loads(HOST.read(record))["outcome"] == "running"
    (old.path / "gate").write_text("")
    outcome = switch.watch(HOST, str(new.path), lambda step: None)
    assert outcome.word == "done", outcome
    assert new.alive()
    assert not old.alive()


def test_what_runs_in_a_container_cannot_change_how_it_is_started_again(place):
    """boot.json is carried out with the rights of whoever deployed, run.json says what runs."""
    code = (
        "import os\n"
        "for name in ('boot.json', 'run.json', 'container.json'):\n"
        "    for act in (os.unlink, lambda p: os.rename(p, p + '.old'), lambda p: open(p, 'a')):\n"
        "        try:\n"
        "            act(f'/run/drafthouse/{name}')\n"
        "            print('changed', name)\n"
        "        except PermissionError:\n"
        "            print('refused', name)\n"
    )
    run = place.run_dir("import time\ntime.sleep(1)\n" + code)
    status.write_json(run.path / "boot.json", {"schema": 1}, mode=0o600)
    assert go(place, place.spec(run, heartbeats=False)).word == "done"
    until(lambda: run.exit() and not run.alive())
    assert run.exit().reason == "finished"
    assert log(run).count(b"refused") == 9
    assert b"changed" not in log(run)


# -- the way back ------------------------------------------------------------------------------------------


def test_a_release_that_dies_before_its_first_step_gives_way_to_the_one_before(place):
    old = running(place)
    name = place.root / "names" / place.name
    place.compose_file("first")
    release = place.seal("first", place.name)
    (name / "current").symlink_to(f"releases/{release}")
    before = {
        "release_id": release,
        "start": place.container_spec(release),
        "run": json.loads((old.path / "run.json").read_text()),
    }
    place.compose_file("bbbbbbbbbbbb")
    new = place.run_dir(TRAINER.replace("beat.step += 1", "run.write_heartbeat(beat); sys.exit('nan')"))
    outcome = go(place, place.spec(new, old, "bbbbbbbbbbbb", rollback=before))
    assert outcome.word == "failed"
    assert outcomes(outcome)["rollback"] == "ok", outcome
    assert f"release {release} runs again as 0003-swtest1" in outcome.reason
    assert any("nan" in line for line in outcome.last_lines)
    restored = status.RunDir(place.root / "runs" / "0003-swtest1")
    assert restored.alive()
    assert contained.of(restored).running()
    assert os.readlink(name / "current") == f"releases/{release}"
    assert not (name / "previous").is_symlink()
    assert switch.watch(HOST, str(restored.path), lambda step: None).word == "done"
    made = restored.run()
    assert (made.run_id, made.command, made.who) == (
        "0003-swtest1",
        old.run().command,
        "rollback of ada@desk",
    )


# -- what the probe sees -----------------------------------------------------------------------------------


def test_the_probe_finds_the_processes_of_a_container_and_what_they_really_run_with(place):
    fields = {"secrets": ["TOKEN"], "secrets_file": f"{INSIDE}/secrets"}
    run = place.run_dir(environment={"LR": "3e-4"}, **fields)
    (run.path / "secrets").write_text("TOKEN=hunter2\n")
    (run.path / "secrets").chmod(0o400)
    os.chown(run.path / "secrets", *USER)
    place.up(run)
    until(lambda: steps(run))
    facts, found = facts_of(place, run, sample=0.1)
    engine = facts["engine"]
    assert (engine["answers"], engine["permitted"]) == (True, True)
    assert engine["storage_free_bytes"] > 0
    assert engine["started"] < facts["time"]
    assert {engine["live_restore"], engine["rootless"]} == {False}
    assert found["container"]["running"] is True
    assert found["container"]["id"] == contained.of(run).id
    numbers = {process["nspid"]: process for process in found["processes"]}
    launch = run.launch()
    assert {1, launch.pid, launch.trainer_pid} <= set(numbers)
    trainer = numbers[launch.trainer_pid]
    assert trainer["pid"] != trainer["nspid"]
    assert len(trainer["cpu_ticks"]) == 2
    assert found["running"]["argv"] == run.run().command
    assert found["running"]["environment"]["LR"] == "3e-4"
    assert found["running"]["environment"]["PYTHONUNBUFFERED"] == "1"
    assert found["running"]["image_id"] == contained.of(run).kept["image_id"]
    assert "hunter2" not in json.dumps(facts)
    assert verdict(found, facts["time"]).word == "training"


def test_the_processes_of_a_container_are_found_while_the_engine_hangs(place, mute, monkeypatch):
    run = running(place)
    kept = json.loads((run.path / "container.json").read_text())
    status.write_json(run.path / "container.json", {**kept, "engine": mute})
    monkeypatch.setenv("DOCKER_HOST", mute)
    facts, found = facts_of(place, run)
    assert facts["engine"]["answers"] is False
    assert found["container"]["gone"] is None
    assert "does not answer" in found["container"]["unknown"]
    launch = run.launch()
    assert {launch.pid, launch.trainer_pid} <= {process["nspid"] for process in found["processes"]}
    assert found["running"]["argv"] == run.run().command


def test_a_paused_container_is_stalled_because_it_is_paused(place):
    run = running(place)
    place.docker.run("pause", contained.of(run).id)
    try:
        facts, found = facts_of(place, run, sample=0.1)
        judged = verdict(found, facts["time"] + 3600)
        assert judged.word == "stalled"
        assert "paused" in judged.reason
    finally:
        place.docker.run("unpause", contained.of(run).id)
