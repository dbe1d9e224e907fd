"""What becomes of a run in a container when its engine restarts: containers end, boot starts the next one."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import in_container
import pytest
import yaml
from deployed import HOST, TRAINER, steps, until
from in_container import IMAGE, USER, ContainerPlace
from testbed.docker import Docker
from testbed.second import PLACE, SecondEngine

from deploy import boot, bootunit, onhost, switch
from trainer import status

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NAME = "boottest1"
# Goes on at the step that the checkpoint holds, and saves there when it is asked to, or told to end.
RESUMES = (
    TRAINER.replace(
        "while not stop:",
        'saved = os.environ["CHECKPOINT"]\n'
        "beat.step = int(open(saved).read()) if os.path.exists(saved) else 0\n"
        'print("begins at step", beat.step, flush=True)\n'
        "while not stop:",
        1,
    ).replace(
        "        beat.last_checkpoint",
        '        open(saved, "w").write(str(beat.step))\n        beat.last_checkpoint',
    )
    + 'open(saved, "w").write(str(beat.step))\n'
)


@pytest.fixture(scope="module")
def restarted(base_images: Docker) -> Iterator[SecondEngine]:
    """An engine of our own, to be switched off and on, with the image that runs are made of."""
    own = SecondEngine(PLACE.with_name(PLACE.name.replace("-2", "-3")))
    own.start()
    try:
        client, there = base_images.command[0], Docker(own.url).environment
        with subprocess.Popen(
            [client, "save", IMAGE],
            env={**os.environ, **base_images.environment},
            stdout=subprocess.PIPE,
        ) as save:
            load = [client, "load"]
            subprocess.run(load, env={**os.environ, **there}, stdin=save.stdout, check=True, timeout=300)
        yield own
    finally:
        own.stop()


@pytest.fixture
def place(tmp_path: Path, base_images: Docker, monkeypatch) -> Iterator[ContainerPlace]:
    monkeypatch.setenv("DOCKER_HOST", base_images.environment["DOCKER_HOST"])
    monkeypatch.setenv("DOCKER_CONFIG", base_images.environment["DOCKER_CONFIG"])
    yield from in_container.place(tmp_path, base_images, NAME)


@pytest.fixture
def box(tmp_path: Path, restarted: SecondEngine, monkeypatch) -> Iterator[ContainerPlace]:
    """The same on the engine that is restarted."""
    docker = Docker(restarted.url)
    monkeypatch.setenv("DOCKER_HOST", docker.environment["DOCKER_HOST"])
    monkeypatch.setenv("DOCKER_CONFIG", docker.environment["DOCKER_CONFIG"])
    yield from in_container.place(tmp_path, docker, NAME)


def deploy(place: ContainerPlace, **more) -> status.RunDir:
    checkpoints = place.root / "names" / NAME / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    checkpoints.chmod(0o777)
    service = yaml.safe_load(place.compose_file("first").read_text())["services"]["trainer"]
    mount = {"type": "bind", "source": str(checkpoints), "target": str(checkpoints)}
    place.service["volumes"] = [*service["volumes"], mount]
    run = place.run_dir(RESUMES, environment={"CHECKPOINT": str(checkpoints / "step")}, **more)
    place.compose_file("first")
    spec = place.spec(run, release_id=place.seal("first", NAME))
    made = run.run()
    assert made
    template = boot.template(made, spec, None, 60.0, [str(checkpoints)])
    status.write_json(run.path / boot.FILE, template, mode=0o600)
    outcome = switch.watch(HOST, switch.start(HOST, spec), lambda step: None)
    assert outcome.word == "done", outcome
    return run


def booted(place: ContainerPlace, *words: str) -> subprocess.CompletedProcess[str]:
    """What the unit does, with nothing in its environment."""
    tool = onhost.install(HOST, str(place.root), bootunit.MODULES)
    argv = [*onhost.command(HOST, tool), str(place.root), NAME, *words]
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, env={})


def last(place: ContainerPlace) -> status.RunDir:
    return status.list_runs(place.root / "runs", NAME)[-1]


def log(run: status.RunDir) -> str:
    return b"".join(path.read_bytes() for path in sorted(run.log.glob("*.log"))).decode()


def saved(place: ContainerPlace) -> int:
    return int((place.root / "names" / NAME / "checkpoints" / "step").read_text())


def test_a_container_that_the_engine_killed_is_followed_by_the_next_run_which_resumes(place):
    first = deploy(place)
    until(lambda: steps(first) > 5)
    first.ask("checkpoint", "ada@desk")
    until(lambda: any(beat.last_checkpoint for beat in first.heartbeats().values()))
    container = json.loads((first.path / "container.json").read_text())["id"]
    place.docker.run("kill", "-s", "KILL", container)  # as an engine does 15 s after it was told to stop
    until(lambda: not first.alive())
    assert first.exit() is None
    done = booted(place)
    assert done.returncode == 0, done
    second = last(place)
    assert second.path.name == f"0002-{NAME}"
    assert second.alive()
    assert f"begins at step {saved(place)}\n" in log(second)
    owner = second.path.stat()
    assert (owner.st_uid, owner.st_gid) == (0, USER[1])  # it may write, but not replace what we wrote
    assert json.loads((second.path / "container.json").read_text())["id"] != container
    assert "run 0002-boottest1 is in progress" in booted(place).stdout


def test_a_container_that_was_removed_with_its_engine_is_no_obstacle(place):
    first = deploy(place)
    until(lambda: steps(first) > 2)
    place.docker.run("rm", "-f", json.loads((first.path / "container.json").read_text())["id"])
    until(lambda: not first.alive())
    assert booted(place).returncode == 0
    assert last(place).alive()


def test_a_container_that_the_engine_stopped_saved_and_goes_on(place):
    """`systemctl stop docker` sends TERM to every container: nobody asked for the end of this run."""
    first = deploy(place)
    until(lambda: steps(first) > 5)
    place.docker.run("stop", "-t", "30", json.loads((first.path / "container.json").read_text())["id"])
    until(lambda: first.exit() and not first.alive())
    assert first.exit().asked_by == "SIGTERM"
    done = booted(place)
    assert done.returncode == 0, done
    assert "was stopped by SIGTERM, not by a person" in done.stdout
    assert f"begins at step {saved(place)}\n" in log(last(place))


def test_before_the_engine_goes_down_a_checkpoint_is_asked_for(place):
    first = deploy(place)
    until(lambda: steps(first) > 5)
    done = booted(place, "--shutdown")
    assert done.returncode == 0, done
    assert "checkpoint-request: ok" in done.stdout
    assert first.exit().asked_by.startswith("shutdown@")
    assert booted(place).returncode == 0
    assert last(place).alive()


def test_an_engine_that_does_not_come_up_is_one_sentence_and_nothing_is_left(place):
    first = deploy(place)
    place.docker.run("rm", "-f", json.loads((first.path / "container.json").read_text())["id"])
    until(lambda: not first.alive())
    value = json.loads((first.path / boot.FILE).read_text())
    value["spec"]["start"]["environment"]["DOCKER_HOST"] = "unix:///run/no-engine-here.sock"
    status.write_json(first.path / boot.FILE, value, mode=0o600)
    tool = onhost.install(HOST, str(place.root), bootunit.MODULES)
    # As the program itself, but for the patience.
    program = (
        f"import sys; sys.path.insert(0, {tool!r})\n"
        "from deploy import boot\n"
        "boot.ENGINE_PATIENCE = 1.0\n"
        "boot.main()\n"
    )
    argv = [HOST.python, "-I", "-B", "-c", program, str(place.root), NAME]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, env={})
    assert done.returncode == 1
    assert "the container engine did not come up within 1 s" in done.stderr
    assert done.stderr.count("\n") == 1
    assert last(place).path == first.path


def test_an_engine_that_is_restarted_takes_the_run_with_it_and_boot_brings_the_next_one(box, restarted):
    first = deploy(box)
    until(lambda: steps(first) > 5)
    restarted.switch_off(60)
    assert not first.alive()
    assert first.exit().asked_by == "SIGTERM"
    # The unit is started with the machine, and waits for the engine.
    done: list[subprocess.CompletedProcess[str]] = []
    unit = threading.Thread(target=lambda: done.append(booted(box)))
    unit.start()
    restarted.switch_on()
    unit.join()
    assert done[0].returncode == 0, done
    second = last(box)
    assert second.path.name == f"0002-{NAME}"
    assert f"begins at step {saved(box)}\n" in log(second)
