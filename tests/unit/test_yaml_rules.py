"""A run's file means the same to the trainer and to whoever deploys it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from deploy import yamlfile
from deploy.errors import DeployError
from trainer import config, yamlrules
from trainer.errors import InputError

SCALARS = [
    *(
        "6e-4",
        "6E4",
        "1.5e+3",
        "3.",
        ".5",
        "1e5",
        "-2",
        "+7",
        "010",
        "0x1f",
        "0o17",
        "0b1",
        "1_000",
        "1_",
        "12:30",
    ),
    *("no", "yes", "on", "off", "y", "N", "true", "True", "TRUE", "tRUE", "false", "~", "null", "Null", ""),
    *(
        ".inf",
        "-.INF",
        ".nan",
        "inf",
        "nan",
        "2026-11-29",
        "1.2.3",
        "e5",
        "-",
        "+",
        "'6e-4'",
        '"010"',
        "text",
    ),
    *("[1, 010, no]", "{a: 6e-4}", "=", "!!str 5", "!!int '010'", "<<"),
]


@pytest.mark.parametrize("text", SCALARS)
def test_both_read_the_same_value(text: str) -> None:
    try:
        expected = yamlfile.parse(f"key: {text}", "x").value
    except DeployError:
        with pytest.raises((yaml.YAMLError, ValueError, TypeError)):
            yamlrules.load(f"key: {text}")
        return
    assert repr(yamlrules.load(f"key: {text}")) == repr(expected)


BOMB = "a0: &a0 [x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join(5 * [f'*a{n - 1}'])}]\n" for n in range(1, 9)
)
UNFIT = [
    *("a: !!timestamp x", "a: !!bool x", "a: !!float ''", "a: !!int x", "a: " + 5000 * "1"),
    *("a: " + 700 * "[", "a: " + 60 * "[" + 60 * "]", BOMB, 'a: "\\ud800"'),
]


@pytest.mark.parametrize("text", UNFIT, ids=lambda text: text[:20])
def test_what_yaml_cannot_build_is_one_sentence_and_as_a_change_just_text(text: str) -> None:
    with pytest.raises(
        DeployError, match=r"^x(:\d+)? (is not valid YAML|holds|makes)[^\n]*; [^\n]*$"
    ) as caught:
        yamlfile.parse(text, "x")
    assert len(str(caught.value)) < 200
    value = text.partition(": ")[2]
    assert yamlfile.parse_value(value) == value or text is BOMB


@pytest.mark.parametrize(
    "text",
    ["a: 1\na: 2", "t: {x: 1, x: 2}", "t:\n- {x: 1, x: 2}", "a: [", "a: &a [*a]", "? [1]\n: 2", *UNFIT],
    ids=lambda text: text[:20],
)
def test_both_refuse_the_same_files(tmp_path: Path, text: str) -> None:
    with pytest.raises(DeployError):
        yamlfile.parse(text, "x")
    (tmp_path / "run.yaml").write_text(f"trainer:\n  lr: 1\n{text}\n")
    with pytest.raises(InputError, match=r"run\.yaml"):
        config.read_file(str(tmp_path / "run.yaml"))


def test_a_file_of_the_trainer_reads_as_people_mean_it(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("trainer:\n  lr: 6e-4\n  epochs: 010\n  wandb-run-name: no\n")
    assert config.read_file(str(tmp_path / "run.yaml")) == {"lr": 6e-4, "epochs": 10, "wandb_run_name": "no"}
