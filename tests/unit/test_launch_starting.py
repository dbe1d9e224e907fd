"""What the trainer is given: run.json checked, secrets, environment."""

from __future__ import annotations

import ast
import dataclasses
import sys
from pathlib import Path

import pytest

import trainer
from trainer import starting
from trainer.starting import CannotStart, build_environment, check_run, given_environment, read_secrets
from trainer.status import Run

RUN = Run(run_id="0001-demo", name="demo", command=["x"])
MODULES = [
    "asked",
    "banner",
    "ending",
    "forward",
    "guard",
    "keeper",
    "launch",
    "logfile",
    "oom",
    "processes",
    "starting",
]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("command", []),
        ("command", "python x.py"),
        ("command", ["x", 3]),
        ("command", [""]),
        ("command", ["x", "a\0b"]),
        ("environment", ["A=1"]),
        ("environment", {"A": 1}),
        ("environment", {"A=B": "1"}),
        ("environment", {"": "1"}),
        ("environment", {"A": "x\0y"}),
        ("grace_seconds", "60"),
        ("grace_seconds", -1),
        ("restart_attempts", True),
        ("segment_bytes", None),
    ],
)
def test_a_run_json_that_cannot_be_used_is_refused_by_the_name_of_the_field(field, value):
    with pytest.raises(CannotStart, match=field) as refused:
        check_run(dataclasses.replace(RUN, **{field: value}))
    assert refused.value.code == 2


def secrets(tmp_path, content: bytes, mode=0o400, names=()):
    path = tmp_path / "secrets"
    path.write_bytes(content)
    path.chmod(mode)
    return dataclasses.replace(RUN, secrets_file=str(path), secrets=list(names))


def test_a_secret_is_all_that_follows_the_first_equals_sign(tmp_path):
    content = b'A=x y\nB="$(id)"=; \'\nC=\nD=\xff\xfe \n'
    found = read_secrets(secrets(tmp_path, content, names=["A", "D"]))
    assert found == {b"A": b"x y", b"B": b'"$(id)"=; \'', b"C": b"", b"D": b"\xff\xfe "}


def test_entries_that_end_with_nul_may_hold_newlines(tmp_path):
    found = read_secrets(secrets(tmp_path, b"KEY=-----BEGIN-----\nabc\n-----END-----\n\0B=2\0"))
    assert found == {b"KEY": b"-----BEGIN-----\nabc\n-----END-----\n", b"B": b"2"}


@pytest.mark.parametrize("mode", [0o440, 0o404, 0o444, 0o644, 0o622])
def test_a_secrets_file_that_is_open_to_others_is_refused_without_telling_a_secret(tmp_path, mode):
    with pytest.raises(CannotStart, match="chmod 0400") as refused:
        read_secrets(secrets(tmp_path, b"A=hunter2\n", mode))
    assert "hunter2" not in str(refused.value)


def test_a_secret_that_is_named_but_not_there_is_told_by_name(tmp_path):
    with pytest.raises(CannotStart, match="lacks B"):
        read_secrets(secrets(tmp_path, b"A=1\n", names=["A", "B"]))
    with pytest.raises(CannotStart, match="no secrets_file"):
        read_secrets(dataclasses.replace(RUN, secrets=["A"]))
    with pytest.raises(CannotStart, match="No such file"):
        read_secrets(dataclasses.replace(RUN, secrets_file=str(tmp_path / "none")))


def test_an_entry_without_equals_sign_is_refused_without_telling_it(tmp_path):
    with pytest.raises(CannotStart, match="not KEY=value") as refused:
        read_secrets(secrets(tmp_path, b"A=1\nhunter2\n"))
    assert "hunter2" not in str(refused.value)


def test_later_sources_of_the_environment_win_and_launch_has_the_last_word():
    run = dataclasses.replace(RUN, environment={"A": "run", "B": "run", "PYTHONUNBUFFERED": "0"})
    given = given_environment({b"A": b"own", b"C": b"\xff"}, run)
    assert given[b"PYTHONUNBUFFERED"] == b"0"  # what the banner warns of
    found = build_environment(given, {b"B": b"secret"}, "/runs/0001-demo", 3)
    assert found == {
        b"A": b"run",
        b"B": b"secret",
        b"C": b"\xff",
        b"PYTHONUNBUFFERED": b"1",
        b"DRAFTHOUSE_RUN_DIR": b"/runs/0001-demo",
        b"DRAFTHOUSE_ATTEMPT": b"3",
    }


@pytest.mark.parametrize("module", MODULES)
def test_launch_needs_nothing_but_the_standard_library_of_python_3_9(module):
    path = Path(trainer.__file__).with_name(f"{module}.py")
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    allowed = set(sys.stdlib_module_names) | {"trainer"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        assert {name.split(".")[0] for name in names} <= allowed
        ours = {name.split(".")[1] for name in names if name.startswith("trainer.")}
        assert ours <= {*MODULES, "status"}


def test_a_missing_program_is_not_found_also_where_path_has_a_place_that_is_closed_to_us():
    refused = starting._why(PermissionError(13, "Permission denied"), "nope", "./nope", {b"PATH": b"/none"})
    assert refused.code == 127
    assert "was not found" in str(refused)


def test_in_a_container_the_secrets_are_read_where_they_are_mounted(tmp_path, monkeypatch):
    run = secrets(tmp_path, b"A=1\n", names=["A"])
    mounted = tmp_path / "mounted"
    (tmp_path / "secrets").rename(mounted)
    monkeypatch.setenv("DRAFTHOUSE_SECRETS_FILE", str(mounted))
    assert read_secrets(run) == {b"A": b"1"}
    assert read_secrets(dataclasses.replace(run, secrets=[], secrets_file=None)) == {}, "this run has none"
