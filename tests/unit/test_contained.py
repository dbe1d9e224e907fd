"""deploy/contained.py with an engine that answers what a test wants: whose a container is, which is new."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy import contained, switch_job
from deploy.engine import DIRECTORY, PROJECT, SERVICE
from trainer import status

NAME = "demo"


class Fake(threading.Thread):
    """An engine whose containers are `before`, and `after` once the file `made` is there."""

    def __init__(self, root: Path) -> None:
        super().__init__(daemon=True)
        self.root = root
        self.made = root / "made"
        self.before: list[dict[str, Any]] = []
        self.after: list[dict[str, Any]] = []
        self.mute_before = self.mute_after = 0  # listings that get no answer
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(root / "sock"))
        self.socket.listen()
        self.address = f"unix://{root}/sock"
        self.start()

    def run(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            with connection:
                path = connection.recv(65536).split()[1]
                if b"/containers/json" not in path:
                    connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n{}")
                elif not self.mute():
                    rows = self.after if self.made.exists() else self.before
                    connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps(rows).encode())

    def mute(self) -> bool:
        which = "mute_after" if self.made.exists() else "mute_before"
        left = getattr(self, which)
        setattr(self, which, max(0, left - 1))
        return left > 0

    def row(self, number: int, directory: Path | str, state: str = "running") -> dict[str, Any]:
        labels = {PROJECT: "drafthouse-demo", SERVICE: "trainer", DIRECTORY: str(directory)}
        one = {"Id": f"{number:064x}", "Names": [f"/c{number}"], "Created": number, "State": state}
        return {**one, "Labels": labels}

    def spec(self, **more: Any) -> dict[str, Any]:
        """The start of a run, whose `docker compose up` only notes that it was called."""
        return {
            "argv": [sys.executable, "-c", f"open({str(self.made)!r}, 'w')"],
            "environment": {"DOCKER_HOST": self.address},
            "working_directory": str(self.root),
            "container": {"project": "drafthouse-demo", "service": "trainer", "image": None},
            "name_timeout_seconds": 30.0,
            **more,
        }


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Fake]:
    made = Fake(tmp_path)
    yield made
    made.socket.close()


@pytest.fixture
def run(tmp_path: Path) -> status.RunDir:
    return status.allocate_run(tmp_path / "state" / "runs", NAME)


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    return tmp_path / "state" / "names" / NAME / "current"


@pytest.mark.parametrize("state", ["running", "paused", "restarting"])
def test_a_container_that_somebody_else_began_is_never_replaced(engine, run, tmp_path, state):
    """Root and a member of docker, or a checkout: one project for the engine, with two state directories."""
    engine.before = [engine.row(1, "/home/ada/drafthouse", state)]
    with pytest.raises(switch_job.Refused) as refused:
        switch_job.check_engine(engine.spec(), str(tmp_path / "state"))
    assert "container c1 (000000000000) of the project drafthouse-demo" in str(refused.value)
    assert "started from /home/ada/drafthouse" in str(refused.value)
    assert "docker compose -p drafthouse-demo stop, or take another --name" in str(refused.value)
    container, problem, _ = contained.up(run, engine.spec())  # one that began only then
    assert (container, "c1" in problem, engine.made.exists()) == (None, True, False)


def test_ones_own_container_and_what_is_over_are_replaced(engine, run, ours, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "state")  # the same directory, called otherwise
    engine.before = [
        engine.row(1, ours),
        engine.row(2, "/elsewhere", "exited"),
        engine.row(3, "/x", "created"),
    ]
    engine.after = [*engine.before, engine.row(4, ours)]
    switch_job.check_engine(engine.spec(), str(link))
    container, problem, _ = contained.up(run, engine.spec())
    assert (problem, container.id) == ("", f"{4:064x}")


def test_an_engine_that_is_slow_to_say_what_it_started_is_asked_again(engine, run, ours):
    engine.after = [engine.row(1, ours)]
    engine.mute_before = engine.mute_after = 2
    container, problem, _ = contained.up(run, engine.spec())
    assert (problem, container.id) == ("", f"{1:064x}")
    assert contained.of(run).id == container.id


def test_an_engine_that_does_not_answer_starts_nothing(engine, run):
    engine.mute_before = 1 << 20
    container, problem, _ = contained.up(run, engine.spec(name_timeout_seconds=0.0))
    assert (container, engine.made.exists()) == (None, False)
    assert "the container was not started: what answers at" in problem


def test_a_container_that_the_engine_never_names_is_told_as_started(engine, run):
    engine.mute_after = 1 << 20
    container, problem, _ = contained.up(run, engine.spec(name_timeout_seconds=0.0))
    assert (container, engine.made.exists()) == (None, True)
    assert "a container was started, but the engine does not say which" in problem


def test_a_note_that_finds_no_room_does_not_fail_the_start(engine, run, ours):
    engine.after = [engine.row(1, ours)]
    (run.path / contained.FILE / "in the way").mkdir(parents=True)
    container, problem, _ = contained.up(run, engine.spec())
    assert (problem, container.id) == ("", f"{1:064x}")
    assert contained.of(run) is None


@pytest.mark.parametrize("address", ["tcp://build:2375", "ssh://box"])
def test_an_engine_that_only_its_client_reaches_is_refused_before_the_stop(engine, address, tmp_path):
    spec = engine.spec(environment={"DOCKER_HOST": address})
    with pytest.raises(switch_job.Refused, match=f"DOCKER_HOST is {address}, which is no unix socket"):
        switch_job.check_engine(spec, str(tmp_path))
