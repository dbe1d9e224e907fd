"""Values reach each kind of rendered file as what they are."""

from __future__ import annotations

import json
import os
import subprocess

import jinja2
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from deploy import render
from deploy.errors import DeployError

HOSTILE = [
    "",
    "plain",
    "two words",
    "  blanks around  ",
    "semicolon; rm -rf x",
    "$(id -u) `id -u` ${HOME} $HOME $$ $",
    """it's "quoted" ' " \\' \\" """,
    "back\\slash \\n \\\\ ends\\",
    "# no comment # at all",
    "first\nsecond\n\nfourth\n",
    "return\r\nand\ttab\x0b\x0c",
    "τ̂ = 2.0 · 漢字 🙂 \u00a0\u0085\u2028",
    "a=b: c, [d] {e} & *f !g |h >i %j @k",
    "\x07\x1b[31m\x7f",
    "-",
    "--",
    "no",
    "1e3",
    "~",
    "é'",
]
text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


@pytest.mark.parametrize("value", HOSTILE)
def test_shell_words_arrive_whole_in_a_real_shell(value: str) -> None:
    line = f"printf %s {render.shell(value)}"
    done = subprocess.run(
        ["sh", "-c", line], capture_output=True, check=True, env={"PATH": os.environ["PATH"]}
    )
    assert done.stdout == value.encode()


@pytest.mark.parametrize("value", [*HOSTILE, 3, 0.5, True, None, [1, "a b"], {"k": "${v}"}])
def test_yaml_values_are_read_back_as_what_they_were(value: object) -> None:
    assert yaml.safe_load(f"key: {render.yaml(value)}\n") == {"key": value}
    assert yaml.safe_load(f"- {render.yaml(value)}\n") == [value]


@given(text)
def test_any_text_survives_yaml(value: str) -> None:
    assert yaml.safe_load(f"- {render.yaml(value)}\n") == [value]


@given(text)
def test_a_rendered_yaml_value_never_leaves_its_line(value: str) -> None:
    assert len(render.yaml(value).split("\n")) == 1


def test_words_that_are_safe_in_yaml_stay_readable() -> None:
    assert [render.yaml(word) for word in ("trainer.launch", "--state", "-u", "--", "/var/lib")] == [
        "trainer.launch",
        "--state",
        "-u",
        "--",
        "/var/lib",
    ]
    assert [render.yaml(word) for word in ("no", "1", "a: b", "x:", "-")] == [
        '"no"',
        '"1"',
        '"a: b"',
        '"x:"',
        '"-"',
    ]


def test_a_dollar_is_doubled_for_compose() -> None:
    assert render.compose("${HOME}") == '"$${HOME}"'


@pytest.mark.parametrize("value", HOSTILE)
def test_an_env_value_stays_on_its_line(value: str) -> None:
    line = render.envfile(value)
    assert "\n" not in line
    assert "\r" not in line


@pytest.mark.parametrize("quote", [render.shell, render.envfile])
def test_a_nul_byte_is_refused_in_one_sentence(quote) -> None:
    with pytest.raises(DeployError, match=r"NUL byte, which no .* can hold; remove it"):
        quote("a\0b")


def test_a_template_that_names_a_value_it_was_not_given_fails(tmp_path, monkeypatch) -> None:
    (tmp_path / "x.j2").write_text("{{ given | shell }} {{ missing }}\n")
    monkeypatch.setattr(render._environment, "loader", jinja2.FileSystemLoader(tmp_path))
    with pytest.raises(jinja2.UndefinedError, match="missing"):
        render.render("x.j2", given="a b")
    assert render.render("x.j2", given="a b", missing=json.dumps(1)) == "'a b' 1\n"
