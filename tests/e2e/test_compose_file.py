"""What the rendered files mean to a real Docker Compose (no engine takes part: `config` only reads)."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from testbed.docker import Compose, Docker
from testbed.place import CHECKOUT, TestbedError

from deploy import render
from deploy.runtimes.compose import Service, compose_file

pytestmark = pytest.mark.engine

ALPHABET = "ab \\\"'$#{}()`;\n\r\tτ=:-!x7\x07\x0b%~&|<>*?[]n/🙂"


def hostile_values(count: int) -> dict[str, str]:
    """Variables with values that a shell, YAML, or a dotenv reader would each like to change."""
    chance = random.Random(20261129)
    values = {f"V{i}": "".join(chance.choices(ALPHABET, k=chance.randint(0, 16))) for i in range(count)}
    known = [
        "",
        " ",
        "a b",
        "; rm x",
        "$(id)",
        "${HOME}",
        "$HOME",
        "`id`",
        "'",
        '"',
        "\\",
        "#",
        " # x",
        "a\nb",
        "$$",
    ]
    return values | {f"K{i}": value for i, value in enumerate(known)}


# run.env is for people and their tools; Compose is the strictest of its readers.
WITH_ENV_FILE = """\
name: x
services:
  trainer:
    image: x
    env_file: run.env
"""


def environment_read_by(docker: Docker, directory: Path) -> dict[str, str]:
    compose = Compose(docker, directory / "compose.yaml", directory=directory)
    document = json.loads(compose.run("config", "--format", "json").stdout)
    # `config` prints a file that could be read again: there every $ is doubled.
    return {
        key: value.replace("$$", "$") for key, value in document["services"]["trainer"]["environment"].items()
    }


def test_an_env_file_is_byte_exact(engine: Docker, tmp_path: Path) -> None:
    values = hostile_values(1000)
    lines = [f"{key}={render.envfile(value)}\n" for key, value in values.items()]
    (tmp_path / "run.env").write_bytes("".join(lines).encode())
    (tmp_path / "compose.yaml").write_text(WITH_ENV_FILE)
    assert environment_read_by(engine, tmp_path) == values


def test_values_in_the_compose_file_are_byte_exact(engine: Docker, tmp_path: Path) -> None:
    values = hostile_values(300)
    described = Service(name="x", title="x", image="x", command=["true"], environment=values)
    (tmp_path / "compose.yaml").write_text(compose_file(described))
    assert environment_read_by(engine, tmp_path) == values


def test_values_arrive_in_a_container_as_they_were(base_images: Docker, tmp_path: Path) -> None:
    values = hostile_values(200)
    command = ["python3", "-c", "import json, os; print(json.dumps(dict(os.environ)))", "$HOME ${X} 'a b'\n#"]
    described = Service(
        name="env",
        title="x",
        image="python:3.11-slim-bookworm",
        command=command,
        environment=values,
    )
    (tmp_path / "compose.yaml").write_text(compose_file(described))
    compose = Compose(base_images, tmp_path / "compose.yaml", directory=tmp_path)
    try:
        got = json.loads(compose.run("run", "--rm", "-T", "trainer").stdout)
    finally:
        compose.run("down", "--volumes")
    assert {key: got.get(key) for key in values} == values


def test_the_gpu_file_adds_a_reservation_and_the_gpu_variant(engine: Docker) -> None:
    compose = Compose(engine, CHECKOUT / "compose.yaml", CHECKOUT / "compose.gpu.yaml")
    trainer = json.loads(compose.run("config", "--format", "json").stdout)["services"]["trainer"]
    (device,) = trainer["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert device["count"] == -1, "all"
    assert trainer["build"]["args"]["VARIANT"] == "gpu"
    assert trainer["image"] == "drafthouse:local-gpu", "not the CPU image under its name"
    assert trainer["read_only"] is True, "all else is the demo's"


def test_a_missing_host_directory_stops_the_start_and_is_not_created(
    base_images: Docker, tmp_path: Path
) -> None:
    from deploy.runtimes.compose import Mount

    missing = tmp_path / "weights"
    described = Service(
        name="mount",
        title="x",
        image="python:3.11-slim-bookworm",
        command=["true"],
        mounts=[Mount(str(missing), "/weights")],
    )
    (tmp_path / "compose.yaml").write_text(compose_file(described))
    compose = Compose(base_images, tmp_path / "compose.yaml", directory=tmp_path)
    try:
        with pytest.raises(TestbedError, match="does not exist"):
            compose.run("up", "--detach")
    finally:
        compose.run("down")
    assert not missing.exists()
