"""deploy/onhost.py: our scripts reach a host whole, and run there on the standard library of Python 3.9."""

from __future__ import annotations

import ast
import sys

import pytest

from deploy import evidence, lock, onhost, switch
from deploy.host import Local

ON_HOST = sorted({*evidence.PROBE, *switch.JOB, *lock.HOLDER})


@pytest.mark.parametrize("module", ON_HOST)
def test_a_script_for_hosts_uses_the_standard_library_and_its_like_only(module):
    for node in ast.walk(ast.parse(onhost.source(module), feature_version=(3, 9))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            top = name.partition(".")[0]
            ours = any(name == known or name.startswith(known + ".") for known in ON_HOST)
            assert ours or top in sys.stdlib_module_names, f"{module} imports {name}"


@pytest.mark.parametrize("module", ON_HOST)
def test_a_script_for_hosts_is_python_3_9(module):
    """No syntax of later versions, also where the parser alone would not tell: match, parenthesised with."""
    tree = ast.parse(onhost.source(module), feature_version=(3, 9))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Match | ast.TryStar)]
    future = [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "__future__"
    ]
    assert future, "X | None in annotations needs: from __future__ import annotations"


def test_modules_come_after_those_that_they_import():
    for modules in (evidence.PROBE, switch.JOB, lock.HOLDER):
        for position, module in enumerate(modules):
            text = onhost.source(module)
            for later in modules[position:]:
                assert f"import {later.partition('.')[2]}\n" not in text, f"{module} imports {later}"


def test_a_program_over_stdin_needs_no_file_and_no_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/no/such/place")
    argv = onhost.command(Local(), "-", "--state", str(tmp_path), "--sample", "0")
    result = Local().run(argv, timeout=30, input=onhost.program(evidence.PROBE))
    assert result.out.startswith(b'{"schema": 1')


def test_an_installed_tool_is_named_by_its_content_and_installed_once(tmp_path):
    first = onhost.install(Local(), str(tmp_path), switch.JOB)
    assert onhost.install(Local(), str(tmp_path), switch.JOB) == first
    assert len(list((tmp_path / "tools").iterdir())) == 1
    other = onhost.install(Local(), str(tmp_path), ("trainer.status", "deploy.procfs"))
    assert other != first


def test_an_installed_tool_runs_and_leaves_no_cache_files(tmp_path):
    tool = onhost.install(Local(), str(tmp_path), switch.JOB)
    result = Local().run(onhost.command(Local(), tool, "/no/such/spec.json"), timeout=30, check=False)
    assert result.code != 0
    assert b"/no/such/spec.json" in result.err
    assert not list((tmp_path / "tools").rglob("__pycache__"))
