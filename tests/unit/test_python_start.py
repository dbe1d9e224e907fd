"""deploy/python_start.py says what a real Python makes of its switches and of PYTHONUNBUFFERED."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from deploy import python_start

QUESTION = "import sys; print(sys.stdout.write_through)"
VALUES = [
    None, "", "0", "00", "+0", "-0", " 0", "\n0", "1", "-1", "0 ", "0\n", "0x", "0_0", "٠", "\u00a00", "yes",
    "99999999999999999999",
]  # fmt: skip
SWITCHES = [
    ["-u"], ["-Bu"], ["-uI"], ["-Iu"], ["-I"], ["-E"], ["-EB"], ["-BuE"], ["-Wu"], ["-Xu"], ["-W", "ignore"],
    ["-X", "dev", "-u"], ["-Wi", "-u"], ["-qO"], ["--check-hash-based-pycs", "always", "-u"],
]  # fmt: skip


def asked(words: list[str], variable: str | None) -> bool:
    """Whether a Python that is started so writes at once, in its own words."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment |= {} if variable is None else {"PYTHONUNBUFFERED": variable}
    argv = [sys.executable, "-S", *words]
    return subprocess.run(argv, env=environment, capture_output=True, text=True).stdout == "True\n"


@pytest.mark.parametrize("value", VALUES)
def test_a_value_is_off_if_python_takes_it_for_off(value):
    words = ["-c", QUESTION, "-u"]  # (that one is the program's)
    assert bool(python_start.at_once(["python", *words], value)) is asked(words, value)


@pytest.mark.parametrize("variable", [None, "1"])
@pytest.mark.parametrize("switches", SWITCHES, ids=" ".join)
def test_switches_are_read_as_python_reads_them(switches, variable):
    words = [*switches, "-c", QUESTION]
    assert bool(python_start.at_once(["python", *words], variable)) is asked(words, variable)


def test_what_made_it_so_is_named():
    assert python_start.at_once(["python", "-Bu", "x.py"], "1") == "-u"
    assert python_start.at_once(["python", "x.py", "-u"], "yes") == "PYTHONUNBUFFERED=yes"
    assert python_start.ignores_variables(["python", "-B", "-EI", "x.py"]) == "-I"
    assert python_start.ignores_variables(["python", "-BE", "-"]) == "-E"
    assert python_start.ignores_variables(["python", "--", "-E"]) == ""
    assert list(python_start.switches([])) == []
