"""deploy/survey.py: where a directory is looked for, and what the trainer's Python says of itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from samples import LOCALHOST

from deploy import lookup
from deploy.settings import HostSettings, Project
from deploy.survey import Directory

BOX = HostSettings(name="gpu-box", address="gpu-box")


def find(project: Path, host: HostSettings, text: str | None) -> Directory | None:
    return Directory.find(Project(project, {}), host, text, "toy")


def test_a_directory_is_looked_for_on_this_machine_first_and_then_on_the_host(tmp_path: Path) -> None:
    (tmp_path / "models" / "a").mkdir(parents=True)
    for text in ("models/a", str(tmp_path / "models" / "a")):
        assert find(tmp_path, BOX, text) == Directory(str(tmp_path / "models" / "a"), here=True)
    for text in ("/no/such/model", "~/no-such-model"):
        assert find(tmp_path, BOX, text) == Directory(text, here=False)


def test_a_relative_path_means_this_machine_also_if_there_is_nothing(tmp_path: Path) -> None:
    assert find(tmp_path, BOX, "models/b") == Directory(str(tmp_path / "models" / "b"), here=True)


def test_on_this_machine_there_is_but_one_place_to_look(tmp_path: Path) -> None:
    assert find(tmp_path, LOCALHOST, "models/b") == Directory(str(tmp_path / "models" / "b"), here=False)


@pytest.mark.parametrize("text", [None, "toy"])
def test_no_directory_is_looked_for_where_none_is_named(text: str | None, tmp_path: Path) -> None:
    assert find(tmp_path, BOX, text) is None


@pytest.mark.parametrize(
    ("python", "found"),
    [
        ("/no/such/python", {"problem": "does not exist"}),
        ("/bin/false", {"problem": "does not run (exit code 1)"}),
        ("/etc/passwd", {"problem": "does not run (Permission denied)"}),
    ],
)
def test_a_python_that_is_none_says_why(python: str, found: dict[str, str]) -> None:
    assert lookup.interpreter(python, ["torch"], None, "/bin", None) == found


def test_a_python_names_what_it_lacks() -> None:
    found = lookup.interpreter(sys.executable, ["json", "no_such_module"], "no-such-program", "/bin", None)
    version = ".".join(map(str, sys.version_info[:3]))
    assert found == {"version": version, "missing": ["no_such_module"], "lost": "no-such-program"}
