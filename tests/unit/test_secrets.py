"""Secrets: read here, written for launch alone, and never said aloud."""

from __future__ import annotations

from pathlib import Path

import pytest
from samples import LOCALHOST, facts, recipe, run, survey

from deploy import execute, lookup, plan, secrets
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


# -- a value that is another one now -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "now", "changed"),
    [
        ({"A": "x", "B": "y"}, {"A": "x", "B": "y"}, []),
        ({"A": "x", "B": "y"}, {"A": "x", "B": "z"}, ["B"]),
        ({"A": "x=1", "B": ""}, {"A": "x=2", "B": " "}, ["A", "B"]),
        ({"A": "one\ntwo", "B": "τ"}, {"A": "one\ntwo", "B": "τ"}, []),
        ({"A": "one\ntwo", "B": "τ"}, {"A": "one", "B": "τ"}, ["A"]),
        ({"A": "x"}, {"A": "x", "NEW": "y"}, []),  # that it is new is a difference of the settings
        ({"A": "x", "B": "y"}, {"A": "x"}, []),
    ],
)
def test_the_host_tells_which_values_are_others_and_nothing_more(
    kept: dict, now: dict, changed: list, tmp_path: Path
) -> None:
    (tmp_path / "secrets-1").write_bytes(secrets.content(kept))
    assert lookup.look({"secrets": {"path": str(tmp_path / "secrets-1"), "values": now}}) == {
        "secrets": changed
    }


def test_a_file_that_cannot_be_read_tells_of_no_change(tmp_path: Path) -> None:
    assert lookup.secrets(str(tmp_path / "none"), {"A": "x"}) == []


def test_the_file_of_the_run_in_progress_counts_and_only_one_of_ours() -> None:
    def found(path: str, *, alive: bool = True) -> str | None:
        names = {"demo": {"secrets": ["/s/names/demo/secrets-0007-demo"]}}
        live = run(alive=alive, run={"secrets_file": path})
        return secrets.file_in_use(facts(runs=[live], names=names), "demo")

    assert found("/s/names/demo/secrets-0007-demo") == "/s/names/demo/secrets-0007-demo"
    assert found("/etc/shadow") is None
    assert found("/s/names/demo/secrets-0007-demo", alive=False) is None


def test_what_can_be_read_is_read_and_why_the_rest_cannot_is_told(tmp_path: Path) -> None:
    sources = {
        "A": SecretSource(env="MINE"),
        "B": SecretSource(env="OTHER"),
        "C": SecretSource(command=["false"]),
        "D": SecretSource(command=["printf", "d"]),
    }
    assert secrets.look(sources, tmp_path, {"MINE": "a"}) == (
        {"A": "a", "D": "d"},
        [
            "secret B needs the environment variable OTHER; set it and deploy again",
            "secret C: false gave nothing (exit code 1)",
        ],
    )


# -- a value where all can read it -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("command: [a]\nenvironment: {API: prefix-hunter2secret-x}", "environment.API"),
        ("command: [curl, -u, 'ada:hunter2secret']", "word 3 of command"),
        ("weights: toy\ntrainer: {wandb-project: hunter2secret}", "trainer.wandb-project"),
    ],
)
def test_a_setting_with_a_secret_in_it_is_refused_and_the_value_is_not_said(
    text: str, where: str, tmp_path: Path
) -> None:
    settings = recipe(
        f"{text}\nsecrets: {{TOKEN: {{env: MINE}}}}\ndescription: of hunter2secret", tmp_path
    ).settings
    with pytest.raises(DeployError) as caught:
        plan.make_release(survey(secret_values={"TOKEN": "hunter2secret"}), LOCALHOST, settings)
    assert str(caught.value) == (
        f"{where} has the value of the secret TOKEN in it, which plans and files of the release would "
        "show to all; let the program put it together from TOKEN"
    )
    # What is short is a part of anything; where it is to be read from is no value.
    for harmless in ({"TOKEN": "hunter2"}, {"TOKEN": "MINE-hunter2secret"}, {}):
        plan.make_release(survey(secret_values=harmless), LOCALHOST, settings)


def test_no_value_is_in_the_text_of_what_holds_it() -> None:
    held = survey(secret_values={"TOKEN": "hunter2secret"})
    work = execute.Work(Run("", "demo", []), "python3", secret_values={"TOKEN": "hunter2secret"})
    assert "hunter2secret" not in repr(held) + repr(work)
