"""Whether a process holds its output back, judged as CPython itself decides it; and the banner's line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from trainer.banner import Buffering, banner, environment_flag, judge, python_flags, warnings
from trainer.status import Run

QUESTION = "import sys; print(int(sys.stdout.line_buffering or sys.stdout.write_through))"


@pytest.mark.parametrize(
    "value", ["", "0", "1", "x", "-1", "00", " 0", "0 ", "+0", "-0", "0x1", "no", "2", "0_0"]
)
def test_a_value_means_what_python_itself_makes_of_it(value):
    environment = {**os.environ, "PYTHONUNBUFFERED": value}
    answer = subprocess.run(
        [sys.executable, "-S", "-c", QUESTION], env=environment, capture_output=True, text=True
    )
    assert environment_flag(value.encode()) == bool(int(answer.stdout))


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [
        (["-u"], True),
        (["-uB"], True),
        (["-Bu"], True),
        (["-W", "ignore", "-u"], True),
        (["-Wignore", "-u"], True),
        (["-X", "utf8", "-u"], True),
        (["-Xu"], False),
        (["-E"], False),
        (["-I"], False),
        (["-Iu"], True),
        ([], False),
    ],
)
def test_switches_mean_what_python_itself_makes_of_them(words, unbuffered):
    argv = [sys.executable, "-S", *words, "-c", QUESTION, "-u"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    answer = subprocess.run(argv, env=environment, capture_output=True, text=True)
    assert bool(int(answer.stdout)) == unbuffered
    assert judge("python3.11", [os.fsencode(word) for word in argv], {}).unbuffered == unbuffered


@pytest.mark.parametrize(
    "words", [["-E"], ["-I"], ["-c", "pass", "-u"], ["script.py", "-u"], ["-m", "trainer", "-u"]]
)
def test_what_belongs_to_the_program_is_no_switch(words):
    assert "u" not in python_flags([b"python", *map(os.fsencode, words)])


@pytest.mark.parametrize(
    ("program", "argv", "environment", "unbuffered", "why"),
    [
        ("python3.11", [b"python", b"-u"], {b"PYTHONUNBUFFERED": b"1"}, True, "PYTHONUNBUFFERED=1, -u"),
        ("python3", [b"python"], {b"PYTHONUNBUFFERED": b"yes"}, True, "PYTHONUNBUFFERED=yes"),
        ("python3", [b"python"], {b"PYTHONUNBUFFERED": b"0"}, False, "neither"),
        ("python3", [b"python"], {b"PYTHONBUFFERED": b"1"}, False, "neither"),
        ("python3", [b"python", b"-I"], {b"PYTHONUNBUFFERED": b"1"}, False, "-I makes Python ignore"),
        ("python3", [b"python", b"-E", b"-u"], {b"PYTHONUNBUFFERED": b"1"}, True, "-u"),
        ("python3.14t", [b"python"], {b"PYTHONUNBUFFERED": b"1"}, True, "PYTHONUNBUFFERED=1"),
        ("pypy3", [b"pypy3", b"-u"], {}, True, "-u"),
        ("bash", [b"bash", b"-u"], {b"PYTHONUNBUFFERED": b"1"}, None, "unknown: bash is not Python"),
        ("python-config", [b"python-config"], {}, None, "is not Python"),
    ],
)
def test_the_judgement_names_its_reason(program, argv, environment, unbuffered, why):
    buffering = judge(program, argv, environment)
    assert buffering.unbuffered == unbuffered
    assert why in buffering.why


def test_the_typo_and_the_values_that_mean_off_are_named():
    assert warnings({b"PYTHONUNBUFFERED": b"1"}) == []
    assert "PYTHONUNBUFFERED is meant" in warnings({b"PYTHONBUFFERED": b"1"})[0]
    assert "PYTHONUNBUFFERED=0 was given, which means off" in warnings({b"PYTHONUNBUFFERED": b"0"})[0]
    assert "(empty)" in warnings({b"PYTHONUNBUFFERED": b""})[0]


def test_the_banner_is_one_line_and_says_what_runs():
    run = Run(
        run_id="0007-demo",
        name="demo",
        command=["x"],
        release={"id": "0123456789ab"},
        git={"commit": "a" * 40, "dirty": True},
        image="sha256:" + "b" * 64,
    )
    text = banner(
        run,
        2,
        Buffering(True, "PYTHONUNBUFFERED=1, -u"),
        pid=42,
        python="Python 3.11.7",
        init="tini",
        warned=["warning:\nwith a newline"],
        now=0.0,
    )
    assert text.startswith(
        "drafthouse run 0007-demo · attempt 2 · release 0123456789ab · git aaaaaaaaaaaa (dirty)"
        " · image bbbbbbbbbbbb · Python 3.11.7"
        " · stdout unbuffered (PYTHONUNBUFFERED=1, -u; from /proc/42) · under tini · "
    )
    assert "\n" not in text
