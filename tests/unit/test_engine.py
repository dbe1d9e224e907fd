"""deploy/engine.py: where the engine is, and what is kept of its answers."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from samples import facts, recipe

from deploy import survey
from deploy.engine import Engine, EngineError, address, end_words, moment, state, variables
from deploy.host import Local
from deploy.settings import HostSettings, Project


def test_the_variable_says_where_the_engine_is():
    assert address({"DOCKER_HOST": "unix:///x.sock", "HOME": "/none"}) == "unix:///x.sock"
    assert address({"HOME": "/none"}) == "unix:///var/run/docker.sock"


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    """A client's settings with a context named rootless."""
    meta = tmp_path / ".docker" / "contexts" / "meta" / hashlib.sha256(b"rootless").hexdigest() / "meta.json"
    meta.parent.mkdir(parents=True)
    meta.write_text(json.dumps({"Endpoints": {"docker": {"Host": "unix:///run/user/1000/docker.sock"}}}))
    (tmp_path / ".docker" / "config.json").write_text('{"currentContext": "rootless"}')
    return tmp_path


def test_so_does_the_clients_context(settings: Path):
    where = "unix:///run/user/1000/docker.sock"
    assert address({"HOME": str(settings)}) == where
    assert address({"HOME": "/none", "DOCKER_CONFIG": str(settings / ".docker")}) == where
    (settings / ".docker" / "config.json").write_text("{}")
    assert address({"HOME": str(settings)}) == "unix:///var/run/docker.sock"
    assert address({"HOME": str(settings), "DOCKER_CONTEXT": "rootless"}) == where


@pytest.mark.parametrize(
    "text", ["", "{half", "[]", "null", '{"currentContext": 3}', '{"currentContext": "x"}']
)
def test_settings_that_are_not_the_clients_are_passed_over(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text)
    assert address({"DOCKER_CONFIG": str(tmp_path)}) == "unix:///var/run/docker.sock"


def test_only_the_clients_own_variables_are_handed_on():
    given = {"DOCKER_HOST": "unix:///x", "DOCKER_CONFIG": "", "DOCKER_PASSWORD": "hunter2", "PATH": "/bin"}
    assert variables(given) == {"DOCKER_HOST": "unix:///x"}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1970-01-01T00:01:00Z", 60.0),
        ("1970-01-01T00:01:00.250000000Z", 60.25),
        ("1970-01-01T02:01:00+02:00", 60.0),
        ("0001-01-01T00:00:00Z", None),
        ("", None),
        (None, None),
        ("yesterday", None),
        ("2026-13-01T00:00:00Z", None),
    ],
)
def test_the_engines_times_become_seconds(text: object, seconds: float | None):
    assert moment(text) == seconds


def test_of_a_container_that_never_started_no_exit_code_is_told():
    created = state(
        {"Id": "x", "Name": "/c", "State": {"Status": "created", "ExitCode": 0, "Error": "no device"}}
    )
    assert (created["name"], created["running"], created["exit_code"]) == ("c", False, None)
    assert end_words(created) == "no device"
    killed = state({"State": {"Status": "exited", "ExitCode": 137, "OOMKilled": True}})
    assert end_words(killed) == "out of memory (the container's memory limit), exit code 137"


@pytest.mark.parametrize("value", [None, [], {"State": 3}, {"State": {"Status": None}, "Config": []}])
def test_a_foreign_inspection_breaks_nothing(value: object):
    assert end_words(state(value))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[list]:
    """[address, answer, requests]: a socket that gives `answer` to each request."""
    path = tmp_path / "engine.sock"
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()
    kept: list = [f"unix://{path}", b"", []]

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                kept[2].append(connection.recv(65536))
                connection.sendall(kept[1])

    threading.Thread(target=serve, daemon=True).start()
    yield kept
    server.close()


def test_a_refusal_is_told_in_the_engines_own_words(served: list):
    served[1] = b'HTTP/1.0 404 Not Found\r\n\r\n{"message": "No such container: x"}'
    with pytest.raises(EngineError, match="No such container: x") as caught:
        Engine(served[0]).inspect("x")
    assert caught.value.status == 404
    Engine(served[0]).kill("x", "SIGTERM")  # a container that is gone has what a kill would give it


def test_parameters_reach_the_engine_quoted(served: list):
    served[1] = b"HTTP/1.0 200 OK\r\n\r\n[]"
    assert Engine(served[0]).containers("a&b=c d", "trainer") == []
    (request,) = served[2]
    assert b"a&b" not in request
    assert b"a%26b%3Dc%20d" in request.splitlines()[0]


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0\r\n", b"HTTP/1.0 200 OK\r\n\r\n{half"])
def test_what_is_no_engine_is_an_error_in_one_sentence(served: list, answer: bytes):
    served[1] = answer
    with pytest.raises(EngineError, match="is no Docker engine"):
        Engine(served[0]).get("/version")


def test_an_engine_that_is_not_there_is_told_with_its_place(tmp_path: Path):
    with pytest.raises(EngineError, match=f"no engine at {tmp_path}/none.sock: No such file"):
        Engine(f"unix://{tmp_path}/none.sock").ping()
    with pytest.raises(EngineError, match="DOCKER_HOST is ssh://box"):
        Engine("ssh://box").ping()


def test_both_outputs_of_a_container_become_lines(served: list):
    frames = b"".join(
        bytes([stream, 0, 0, 0]) + len(text).to_bytes(4, "big") + text
        for stream, text in ((1, b"one\ntw"), (1, b"o\n"), (2, b"three\n"))
    )
    served[1] = b"HTTP/1.0 200 OK\r\nContent-Type: application/vnd.docker.raw-stream\r\n\r\n" + frames
    assert Engine(served[0]).logs("x") == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("answer", "there"),
    [
        (b'HTTP/1.0 200 OK\r\n\r\n{"Id": "sha256:1"}', True),
        (b'HTTP/1.0 404 Not Found\r\n\r\n{"message": "No such image: no/such:1"}', False),
        (b"HTTP/1.0 500 Internal Server Error\r\n\r\n{}", None),
        (b"", None),
    ],
)
def test_an_image_of_ones_own_is_looked_for_before_anything_is_planned(
    served: list, answer: bytes, there: bool | None, tmp_path: Path
):
    served[1] = answer
    engine = {"answers": True, "version": "29.1.0", "compose": "2.40.3", "address": served[0]}
    wanted = recipe("command: [a]\nimage: {use: 'no/such:1@sha256:0'}", tmp_path).settings
    box = HostSettings(name="box", address="box", runtime="compose")
    found = survey.take(Project(tmp_path, {}), Local(), box, wanted, facts(engine=engine))
    assert found.image_there is there
    assert [request.split()[1] for request in served[2]] == [b"/images/no/such:1@sha256:0/json"]
