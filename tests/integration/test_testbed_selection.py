"""Tests that a machine cannot run are left out, named with the reason, and a failure where nothing may be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow  # each is a pytest of its own


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A small suite on a machine without an engine."""
    (tmp_path / "conftest.py").write_text(
        "from testbed import selection\n"
        "selection.REASONS = {'engine': lambda: 'there is no engine', 'root': lambda: None}\n"
        "pytest_plugins = ['testbed.selection']\n"
    )
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n  engine:\n  root:\n  slow:\n  timeout:\n  program:\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_plain(): pass\n"
        "@pytest.mark.root\n"
        "def test_root(): pass\n"
        "@pytest.mark.engine\n"
        "@pytest.mark.slow\n"
        "def test_container(): assert False, 'must not run'\n"
    )
    return tmp_path


def run(suite: Path, *words: str, strict: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(TESTS),
        "DRAFTHOUSE_NOTHING_LEFT_OUT": "1" if strict else "",
    }
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words],
        cwd=suite,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_what_is_left_out_is_listed_with_its_reason_and_the_rest_passes(suite: Path) -> None:
    done = run(suite)
    assert done.returncode == 0, done.stdout
    assert "1 because there is no engine:\n  test_it.py::test_container" in done.stdout
    assert "2 passed, 1 deselected" in done.stdout


def test_where_nothing_may_be_left_out_it_is_a_failure(suite: Path) -> None:
    done = run(suite, strict=True)
    assert done.returncode == 1
    assert "left out: 1 (a failure: here nothing may be)" in done.stdout


def test_workers_tell_what_they_leave_out(suite: Path) -> None:
    (suite / "test_skips.py").write_text("import pytest\ndef test_sometimes(): pytest.skip('no such file')\n")
    done = run(suite, "-n", "2", strict=True)
    assert done.returncode == 1
    assert "left out: 2 (a failure: here nothing may be)" in done.stdout
    assert "1 because there is no engine:\n  test_it.py::test_container" in done.stdout
    assert "no such file:\n  test_skips.py::test_sometimes" in done.stdout
    assert run(suite, "-n", "2").returncode == 0


def test_what_there_is_only_one_of_is_used_by_one_worker(suite: Path) -> None:
    (suite / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.fixture(scope='session')\n"
        "def engine(worker_id): return worker_id\n"
        "@pytest.mark.parametrize('number', range(6))\n"
        "def test_one(engine, number): open(f'worker-{engine}', 'w')\n"
    )
    done = run(suite, "-n", "2", "--dist", "loadgroup")
    assert done.returncode == 0, done.stdout
    assert len(list(suite.glob("worker-*"))) == 1


def test_what_nobody_asked_for_is_not_left_out(suite: Path) -> None:
    done = run(suite, "-m", "not engine", strict=True)
    assert done.returncode == 0, done.stdout
    assert "left out" not in done.stdout


def test_a_skip_inside_a_test_counts_as_left_out(suite: Path) -> None:
    (suite / "test_skips.py").write_text("import pytest\ndef test_sometimes(): pytest.skip('no such file')\n")
    done = run(suite, "test_skips.py", strict=True)
    assert done.returncode == 1
    assert "no such file:\n  test_skips.py::test_sometimes" in done.stdout


def test_a_program_that_is_missing_leaves_its_tests_out(suite: Path) -> None:
    (suite / "test_programs.py").write_text(
        "import pytest\n"
        "@pytest.mark.program('sh', 'no-such-program')\n"
        "def test_without(): assert False, 'must not run'\n"
        "@pytest.mark.program('sh')\n"
        "def test_with(): pass\n"
    )
    done = run(suite, "test_programs.py", strict=True)
    assert done.returncode == 1
    assert "1 passed, 1 deselected" in done.stdout
    assert (
        "no-such-program is missing (as root: make testbed):\n  test_programs.py::test_without" in done.stdout
    )


def test_asking_only_for_what_the_machine_lacks_is_no_failure(suite: Path) -> None:
    assert run(suite, "-m", "engine").returncode == 0
    assert run(suite, "-m", "engine", strict=True).returncode == 1
