"""deploy/shellwords.py: what only a shell understands is refused; everything else means what it says."""

from __future__ import annotations

import json
import subprocess

import pytest
import yaml

from deploy import shellwords

NEEDS = {
    "prog | cat": "|",
    "a&b": "&",
    "a; b": ";",
    "a < b": "<",
    "a 2>b": ">",
    "a $HOME": "$",
    'a "x $HOME"': "$",
    'a "\\$HOME"': "$",
    "a `b`": "`",
    'a "`b`"': "`",
    "(a)": "(",
    "a *.py": "*",
    "a b?": "?",
    "a ~/x": "~",
    "a # b": "#",
    "a\nb": "a line break",
    "a \\\n b": "a line break",
    "for x in a": "for",
    "if a": "if",
    "while true": "while",
    "cd /x": "cd",
    "export A=1": "export",
    "source x": "source",
    ". x": ".",
    "A=1 prog": "A=1",
    'a "b" | c': "|",
}


@pytest.mark.parametrize("text", NEEDS)
def test_what_takes_a_shell_is_named_with_the_list_that_gives_it_one(text: str) -> None:
    with pytest.raises(ValueError, match="no shell reads it, so ") as refused:
        shellwords.split(text)
    said = str(refused.value)
    assert f"so {NEEDS[text]} would" in said
    remedy = said.partition("; write ")[2].partition(", or quote")[0]
    assert yaml.safe_load(remedy) == ["sh", "-c", text]


@pytest.mark.parametrize(
    "text",
    ["python train.py", "  python -u x.py\n", "a 'b | c' \"d; e *\" f\\|g", "a --x=b#c --home=x~",
     "a '$HOME' '`'", "a \"two\nlines\"", "a \\$HOME", "a [1,2] {b} x=1", "a 'for' if", "fortune",
     "cdrecord x", "a 'b'\"'\"'c'"],
)  # fmt: skip
def test_what_takes_none_is_split_as_a_shell_would(text: str) -> None:
    program = "import sys, json; print(json.dumps(sys.argv[1:]))"
    function = f"{text.split()[0]}() {{ python3 -c '{program}' {text.split()[0]} \"$@\"; }}; {text}"
    done = subprocess.run(["bash", "-c", function], capture_output=True, text=True, check=True)
    assert shellwords.split(text) == json.loads(done.stdout)


def test_quotes_that_do_not_match_are_said() -> None:
    with pytest.raises(ValueError, match="quotes do not match"):
        shellwords.split("a 'b")
