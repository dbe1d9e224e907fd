"""The Makefile: a menu, a .venv made with a fitting Python, and the arguments that reach `fab`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A directory with the Makefile and what it reads, and nothing installed."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(CHECKOUT / name, tmp_path)
    return tmp_path


@pytest.fixture
def installed(house: Path) -> Path:
    """The same, with a .venv whose fab prints its arguments, one a line."""
    bin = house / ".venv" / "bin"
    bin.mkdir(parents=True)
    program(bin / "pip", "")
    program(bin / "fab", 'printf "[%s]" "$@"; echo; exit "${CODE:-0}"')
    for extras in ("deploy", "deploy,trainer", "deploy,trainer,dev"):
        (house / ".venv" / f".{extras}").touch()
    return house


def program(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def make(house: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    dropped = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "HOST", "NAME", "RUN", "PYTHON")
    base = {key: value for key, value in os.environ.items() if key not in dropped}
    return subprocess.run(
        ["make", *words], cwd=house, env=base | environment, capture_output=True, text=True, check=False
    )


def test_make_alone_shows_the_menu(house: Path) -> None:
    done = make(house)
    assert done.returncode == 0
    for task in (
        "demo",
        "status",
        "tail",
        "restart",
        "stop",
        "test",
        "test-fast",
        "lint",
        "bench",
        "tensorboard",
    ):
        assert f"  {task} " in done.stdout
    assert not (house / ".venv").exists(), "looking installs nothing"


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (["demo"], "[deploy][--host][localhost][--run][demo]"),
        (
            ["demo", "RUN=mine.yaml", "NAME=exp-1"],
            "[deploy][--host][localhost][--run][mine.yaml][--name][exp-1]",
        ),
        (["status"], "[status]"),
        (["status", "HOST=gpu-box"], "[status][--host][gpu-box]"),
        (["tail", "HOST=gpu-box", "NAME=exp-1"], "[tail][--host][gpu-box][--name][exp-1]"),
        (["restart", "RUN=runs/a b.yaml"], "[restart][--run][runs/a b.yaml]"),
        (["stop", "NAME=exp-1"], "[stop][--name][exp-1]"),
        (["start", "NAME=exp-1"], "[start][--name][exp-1]"),
        (["rollback", "HOST=gpu-box"], "[rollback][--host][gpu-box]"),
        (["diff", "RUN=demo"], "[diff][--run][demo]"),
        (["pull", "HOST=gpu-box"], "[pull][--host][gpu-box]"),
        (["bootstrap", "HOST=gpu-box", "NAME=x"], "[bootstrap][--host][gpu-box]"),
        (["prune", "HOST=gpu-box"], "[prune][--host][gpu-box]"),
        (["deploy", "HOST=gpu-box", "RUN=demo"], "[deploy][--host][gpu-box][--run][demo]"),
    ],
)
def test_host_name_and_run_reach_fab(installed: Path, words: list[str], arguments: str) -> None:
    done = make(installed, *words)
    assert (done.stdout.strip(), done.returncode) == (arguments, 0), done.stderr


@pytest.mark.parametrize(
    "value",
    [
        "x'; touch hit; '",
        'x"; touch hit; "',
        "$(shell touch hit)",
        "$(touch hit)",
        "`touch hit`",
        "$$(touch hit)",
    ],
)
@pytest.mark.parametrize("way", ["argument", "environment"])
def test_a_value_is_an_argument_and_never_code(installed: Path, value: str, way: str) -> None:
    values = dict.fromkeys(("HOST", "NAME", "RUN"), value)
    for task in ("demo", "restart"):
        if way == "argument":
            done = make(installed, task, *(f"{name}={text}" for name, text in values.items()))
        else:
            done = make(installed, task, **values)
        task = "deploy" if task == "demo" else task
        wanted = {f"[--host][{value}]", f"[--name][{value}]", f"[--run][{value}]"}
        assert done.stdout.startswith(f"[{task}]"), done.stderr
        assert len(done.stdout.strip()) == len(f"[{task}]") + sum(map(len, wanted))
        assert all(words in done.stdout for words in wanted)
    assert not (installed / "hit").exists()


def test_a_hostile_python_is_a_program_that_is_missing(house: Path) -> None:
    done = make(house, "demo", "PYTHON=x'; touch hit; '")
    assert "and x'; touch hit; ' is missing:" in done.stderr.splitlines()[0]
    assert not (house / "hit").exists()


def test_tensorboard_looks_where_the_runs_of_this_machine_are(installed: Path) -> None:
    program(installed / ".venv" / "bin" / "tensorboard", 'printf "[%s]" "$@"; echo')
    done = make(installed, "tensorboard", DRAFTHOUSE_STATE="/a b'$(x)")
    assert done.stdout.startswith("[--logdir][/a b'$(x)/runs]"), done.stderr
    default = "/var/lib" if os.getuid() == 0 else f"{os.environ['HOME']}/.local/state"
    done = make(installed, "tensorboard", DRAFTHOUSE_STATE="")
    assert done.stdout.startswith(f"[--logdir][{default}/drafthouse/runs]"), done.stderr


def test_the_exit_of_fab_is_a_failure_of_make(installed: Path) -> None:
    assert make(installed, "status", CODE="3").returncode != 0


def test_a_second_call_installs_nothing(installed: Path) -> None:
    assert "Installing" not in make(installed, "demo").stdout


def test_changed_requirements_install_again(installed: Path) -> None:
    program(installed / ".venv" / "bin" / "python", 'echo "$@" >>calls')
    later = (installed / ".venv" / ".deploy").stat().st_mtime + 5
    os.utime(installed / "constraints.txt", (later, later))
    done = make(installed, "status")
    assert "Installing into .venv: deploy" in done.stdout
    assert "-c constraints.txt -e .[deploy]" in (installed / "calls").read_text()


def test_a_failed_install_says_why_and_is_tried_again(installed: Path) -> None:
    program(installed / ".venv" / "bin" / "python", 'echo "ERROR: No matching distribution"; exit 1')
    (installed / ".venv" / ".deploy").unlink()
    for _ in range(2):
        done = make(installed, "status")
        assert done.returncode != 0
        assert "ERROR: No matching distribution" in done.stdout
        assert "pip could not install" in done.stderr
        assert "[status]" not in done.stdout


def test_a_python_that_is_too_old_is_named_in_one_sentence(house: Path) -> None:
    body = 'case "$2" in *platform*) echo 3.9.2;; *) exit 1;; esac'
    old = program(house / "old-python", body)
    done = make(house, "demo", f"PYTHON={old}")
    assert done.returncode != 0
    sentence = done.stderr.splitlines()[0]
    assert sentence.startswith(f"Python 3.11 or later is needed, and {old} is 3.9.2:")
    assert "PYTHON=" in sentence
    assert not (house / ".venv").exists()


def test_a_python_that_is_missing_is_named_in_one_sentence(house: Path) -> None:
    done = make(house, "demo", "PYTHON=/nowhere/python3")
    assert done.returncode != 0
    assert "and /nowhere/python3 is missing:" in done.stderr.splitlines()[0]


def test_a_python_without_venv_is_named_with_the_remedy(house: Path) -> None:
    bare = program(house / "bare-python", 'case "$2" in *venv*) exit 1;; esac')
    done = make(house, "demo", f"PYTHON={bare}")
    assert done.returncode != 0
    assert "lacks the venv module: as root, apt-get install python3-venv" in done.stderr.splitlines()[0]
    assert not (house / ".venv").exists()


def test_the_newest_python_that_works_is_taken(house: Path, tmp_path: Path) -> None:
    """A version manager's stand-ins are on PATH for versions that are not chosen, and fail."""
    bin = tmp_path / "bin"
    bin.mkdir()
    program(bin / "python3.13", "exit 127")
    program(
        bin / "python3.12", 'case "$*" in "-m venv .venv") mkdir -p .venv/bin; echo 3.12 >.venv/made;; esac'
    )
    program(bin / "python3.11", "echo wrong; exit 0")
    done = make(house, ".venv/bin/pip", PATH=f"{bin}:{os.environ['PATH']}")
    assert (house / ".venv" / "made").read_text() == "3.12\n", done.stderr


def test_clean_leaves_the_packages_of_a_run_in_progress_alone(installed: Path) -> None:
    python = installed / ".venv" / "bin" / "python"
    python.symlink_to(sys.executable)
    script = "import time; print(flush=True); time.sleep(1000)"
    with subprocess.Popen([python, "-c", script, "trainer.launch"], stdout=subprocess.PIPE) as run:
        assert run.stdout
        run.stdout.readline()
        refused = make(installed, "clean")
        run.kill()
    assert refused.returncode == 2
    assert f"A run in progress uses .venv (pid {run.pid}): stop it with make stop" in refused.stderr
    assert python.exists()
    assert make(installed, "clean").returncode == 0
    assert not (installed / ".venv").exists()
