"""The menu itself: what it says, what it costs, and Fabric's traps."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from invoke import Collection

from deploy import menu

ROOT = Path(__file__).resolve().parents[2]
TASKS = [
    "adopt", "bootstrap", "compare", "deploy", "diff", "peek", "plan", "prune", "pull", "reference", "render",
    "restart", "rollback", "runs", "stacks", "start", "status", "stop", "tail", "watch",
    "data.push", "data.stage", "image.build",
    "weights.evict", "weights.list", "weights.push", "weights.stage", "weights.verify",
]  # fmt: skip


@pytest.fixture(scope="module")
def collection() -> Collection:
    sys.path.insert(0, str(ROOT))
    import fabfile

    return Collection.from_module(fabfile)


def test_the_menu_has_a_line_for_every_task(collection: Collection) -> None:
    assert sorted(collection.task_names) == sorted(TASKS)
    for name in TASKS:
        text = inspect.getdoc(collection[name].body) or ""
        assert re.fullmatch(r"[A-Z][^\n]{10,70}\.", text), name


def test_every_flag_is_explained_and_none_is_short(collection: Collection) -> None:
    said = {}  # Invoke tells it once
    for name in TASKS:
        for argument in collection[name].get_arguments():
            assert argument.help, f"{name} --{argument.name}"
            assert all(len(word) > 1 for word in argument.names), f"{name} {argument.names}"
            said[name, argument.name] = argument.help
    for name in ("status", "watch"):
        assert said[name, "host"].endswith("(default: localhost and every host of fabric.yaml)")
        assert said[name, "name"].endswith("(default: every name)")
    assert "pct" in said["image.build", "for_"]  # a word that no parameter of Python can have
    assert said["stop", "name"].endswith("(default: the run file's name)")


def test_a_hint_can_be_typed_as_it_stands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    program = tmp_path / ".venv" / "bin" / "fab"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(program), "status"])
    monkeypatch.setenv("PATH", "/nowhere")
    hint = "next: fab tail --name prefab; the fab deploys"
    assert menu.here(hint) == "next: .venv/bin/fab tail --name prefab; the .venv/bin/fab deploys"
    monkeypatch.setenv("PATH", str(program.parent))
    assert menu.here(hint) == hint


def test_no_task_has_a_parameter_named_hosts_which_would_shadow_fabrics_own(collection: Collection) -> None:
    for name in TASKS:
        flags = {argument.name for argument in collection[name].get_arguments()}
        assert "host" in flags
        assert "hosts" not in flags


def test_reading_the_menu_loads_nothing_heavy() -> None:
    heavy = {"pydantic", "jinja2", "rich", "torch", "docker", "deploy.settings", "deploy.plan"}
    program = f"import fabfile, sys; print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
