"""The client's table of flags says what the trainer's command line says, so that neither can drift away."""

from __future__ import annotations

import pytest
from deployed import CHECKOUT

from deploy import flags, settings
from trainer import config
from trainer.errors import InputError

TRAINER = {name.replace("_", "-"): field for name, field in config.FIELDS.items()}
TRIED = [
    -1e9,
    -2,
    -1,
    -0.5,
    0,
    1e-9,
    0.04,
    0.5,
    0.999,
    1,
    1.5,
    2,
    3,
    15,
    16,
    17,
    255,
    256,
    257,
    1000,
    1024,
    1025,
    10**6,
]
TRIED += [limit + more for limit in (2**31 - 1, 2**63 - 1, 10**400) for more in (0, 1)]


def test_every_flag_of_the_trainer_is_in_the_table_or_is_set_by_deploy() -> None:
    options = {option for action in config.parser()._actions for option in action.option_strings}
    own = {"-h", "--help", *(f"--no-{name}" for name, flag in flags.FLAGS.items() if flag.kind == "switch")}
    assert {f"--{name}" for name in flags.FLAGS | flags.RESERVED} == options - own


@pytest.mark.parametrize(
    "name", [name for name, flag in flags.FLAGS.items() if flag.kind in ("int", "float")]
)
def test_numbers_have_the_same_range_on_both_sides(name: str) -> None:
    def fits(value: float) -> bool:
        try:
            config._from_yaml(TRAINER[name].metadata["kind"], value, name)
        except InputError:
            return False
        return True

    for value in TRIED:
        assert flags.FLAGS[name].fits(value) == fits(value), f"--{name} {value}"


@pytest.mark.parametrize(
    "name", [name for name, flag in flags.FLAGS.items() if flag.kind not in ("int", "float")]
)
def test_other_values_are_accepted_by_both_sides_or_by_none(name: str) -> None:
    tried = [
        "auto",
        "never",
        "cpu",
        "cuda",
        "cuda:3",
        "cuda:x",
        "float32",
        "bfloat16",
        "float16",
        True,
        [1, 2],
        [0],
        [2**31],
        [-1],
    ]
    for value in tried:
        try:
            config._from_yaml(TRAINER[name].metadata["kind"], value, name)
        except InputError:
            accepted = False
        else:
            accepted = True
        texts = ("target-model", "data-dir", "eval-file", "wandb-project", "wandb-run-name")
        if name in texts and value is True:
            continue  # neither side needs a model called true
        assert flags.FLAGS[name].fits(value) == accepted or flags.FLAGS[name].kind == "switch", (
            f"{name} {value!r}"
        )


def test_the_defaults_that_flags_must_agree_with_are_the_trainers() -> None:
    assert {name: TRAINER[name].default for name in flags.DEFAULTS} == flags.DEFAULTS


@pytest.mark.parametrize(
    "values",
    [
        {"token-budget": 1024},
        {"max-seq-len": 20000},
        {"block-size": 32, "max-seq-len": 32},
        {"target-layer-ids": [1, 2], "num-taps": 2},
        {"kl-weight": 0.5},
        {"kl-temperature": 1.0, "use-soft-labels": False},
        {"kl-weight": 0.5, "kl-temperature": 1.0, "use-soft-labels": True},
        {"dpace-alpha": 0.5},
        {"dpace-alpha": 0.5, "loss-type": "dpace"},
        {"gamma": 7.0, "loss-type": "dpace"},
        {"gamma": 7.0, "loss-type": "decay"},
        {"block-size": 31, "max-seq-len": 32},
        {"eval-file": "prompts.json"},
        {"eval-interval": 50},
        {"eval-interval": 50, "eval-prompts": 4},
        {"target-gpus": [0, 1, 2, 3, 4], "drafter-gpus": [5, 6, 7]},
        {"target-gpus": [0], "drafter-gpus": [0]},
        {"target-gpus": [0]},
        {"drafter-gpus": [1]},
        {"target-gpus": [0, 0], "drafter-gpus": [1]},
        {"target-gpus": [0, 1], "drafter-gpus": [1, 2]},
        {"target-gpus": [0], "drafter-gpus": [1], "device": "cuda"},
        {"target-gpus": [0, 1], "drafter-gpus": [0, 1]},
        {"target-gpus": [1, 0], "drafter-gpus": [0, 1]},
        {"target-gpus": ["0+1", "2+3"], "drafter-gpus": [4]},
        {"target-gpus": ["0+1"], "drafter-gpus": ["2+3"]},
        {"target-gpus": ["0+1"], "drafter-gpus": [1]},
        {"target-gpus": ["cpu:0"], "drafter-gpus": ["cpu:1", "cpu:2"]},
        {"target-gpus": ["cpu:0"], "drafter-gpus": [1]},
        {},
    ],
)
def test_flags_that_exclude_each_other_are_refused_by_both_sides(values: dict) -> None:
    try:
        config.parse(["--target-model", "toy", *flags.argv(values)])
    except InputError:
        refused = True
    else:
        refused = False
    assert (flags.conflict(values) is not None) == refused


def test_the_command_line_that_we_write_is_read_back_as_it_was_meant() -> None:
    values = {
        "lr": 3e-05,
        "max-steps": 7,
        "cache-features": True,
        "init-from-target": False,
        "target-layer-ids": [1, 3],
        "wandb-run-name": "-x y",
        "wandb-project": "",
        "target-model": "toy",
    }
    read = config.parse(flags.argv(values)).settings
    assert (read.lr, read.max_steps, read.cache_features, read.init_from_target) == (3e-05, 7, True, False)
    assert (read.target_layer_ids, read.wandb_run_name, read.wandb_project) == ((1, 3), "-x y", "")


def test_equal_settings_give_equal_command_lines_whatever_their_order() -> None:
    assert (
        flags.argv({"lr": 1.0, "seed": 2})
        == flags.argv({"seed": 2, "lr": 1.0})
        == ["--lr", "1.0", "--seed", "2"]
    )


@pytest.mark.parametrize("recipe", sorted(path.stem for path in (CHECKOUT / "runs").glob("*.yaml")))
def test_every_recipe_is_read_by_both_sides(recipe: str) -> None:
    run = settings.load_run(settings.load_project(CHECKOUT), recipe).settings
    assert run.trainer
    read = config.parse(["--target-model", "toy", *flags.argv(run.trainer)]).settings
    by_file = config.parse(["--config", str(CHECKOUT / "runs" / f"{recipe}.yaml")]).settings
    assert read.learning() == by_file.learning()
