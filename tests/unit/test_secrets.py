"""Secrets: read here, written for launch alone, and never said aloud."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy import secrets
from deploy.errors import DeployError
from deploy.settings import SecretSource
from trainer import starting
from trainer.status import Run


def source(**kind: object) -> dict[str, SecretSource]:
    return {"KEY": SecretSource(**kind)}  # type: ignore[arg-type]


def test_values_come_from_the_environment_a_file_or_a_command(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from file\n")
    assert secrets.read(source(env="MINE"), tmp_path, {"MINE": "from env"}) == {"KEY": "from env"}
    assert secrets.read(source(file="token"), tmp_path) == {"KEY": "from file"}
    assert secrets.read(source(command=["printf", "a b\n\n"]), tmp_path) == {"KEY": "a b\n"}
    assert secrets.read(source(command="printf 'x y'"), tmp_path) == {"KEY": "x y"}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ({"env": "MINE"}, "secret KEY needs the environment variable MINE; set it and deploy again"),
        (
            {"file": "none"},
            "secret KEY needs the file none, which cannot be read (No such file or directory); correct "
            "secrets: in the run's file",
        ),
        ({"command": ["false"]}, "secret KEY: false gave nothing (exit code 1)"),
        ({"command": ["no-such"]}, "secret KEY: no-such cannot be started (No such file or directory)"),
        ({"command": ["printf", "\\377"]}, "secret KEY is no UTF-8 text"),
    ],
)
def test_a_missing_source_is_one_sentence(kind: dict, said: str, tmp_path: Path) -> None:
    with pytest.raises(DeployError) as caught:
        secrets.read(source(**kind), tmp_path, {})
    assert str(caught.value) == said


def test_an_environment_that_is_no_text_is_told_before_anything_is_changed(tmp_path: Path) -> None:
    stray = b"\xff".decode("utf-8", "surrogateescape")
    assert secrets.problems(source(env="MINE"), tmp_path, {"MINE": stray}) == ["secret KEY is no UTF-8 text"]
    with pytest.raises(DeployError, match="secret KEY is no UTF-8 text"):
        secrets.read(source(env="MINE"), tmp_path, {"MINE": stray})


def test_what_is_missing_is_seen_before_anything_is_changed_and_without_running_commands(
    tmp_path: Path,
) -> None:
    sources = {
        "A": SecretSource(env="MINE"),
        "B": SecretSource(file="none"),
        "C": SecretSource(command=["touch", str(tmp_path / "ran")]),
    }
    assert secrets.problems(sources, tmp_path, {}) == [
        "secret A needs the environment variable MINE; set it and deploy again",
        f"secret B needs the file {tmp_path}/none; write it and deploy again",
    ]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("value", ["x", "", "a=b", "  ", "two\nlines", "'\"$(id)", "ü€", "\r\n"])
def test_launch_reads_back_what_was_written(value: str, tmp_path: Path) -> None:
    path = tmp_path / "secrets"
    path.write_bytes(secrets.content({"KEY": value, "OTHER": "1"}))
    path.chmod(0o400)
    run = Run("0001-x", "x", ["a"], secrets=["KEY", "OTHER"], secrets_file=str(path))
    assert starting.read_secrets(run) == {b"KEY": value.encode(), b"OTHER": b"1"}


def test_no_value_and_no_argument_of_a_command_is_ever_described() -> None:
    said = [
        secrets.describe(SecretSource(command=["pass", "hunter2"])),
        secrets.describe(SecretSource(env="MINE")),
    ]
    assert said == ["from a command", "from MINE of this machine's environment"]
