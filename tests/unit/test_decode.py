"""python -m trainer.decode: its answers, its figures, and what it refuses."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import drafting
import pytest
import tiny
import torch
from drafting import PROMPTS, one_thread  # noqa: F401

from trainer import decode, evaluation
from trainer.speculative import Decoded


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.target_directory(tmp_path_factory.mktemp("model") / "target", drafting.target().model)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return drafting.save(drafting.trained(), tmp_path / "step-00000040")


def command(model: Path, checkpoint: Path, prompts: object, *more: str) -> list[str]:
    file = checkpoint.parent / "prompts.json"
    file.write_text(prompts if isinstance(prompts, str) else json.dumps(prompts))
    return ["--target-model", str(model), "--drafter", str(checkpoint), "--prompts", str(file), *more]


def test_the_command_measures_a_checkpoint(
    model: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command(
        model, checkpoint, {"mine": PROMPTS}, "--new-tokens", "8", "--tree-budget", "8", "--max-prompts", "2"
    )
    assert decode.main([*arguments, "--json", str(tmp_path / "found.json"), "--dtype", "bfloat16"]) == 0
    head, greedy, sampled, *rest = capsys.readouterr().out.splitlines()
    assert "τ of trees of 8" in head
    assert "target alone" in head
    assert greedy.startswith("mine, greedy")
    assert sampled.startswith("mine, T=0.7")
    assert [line for line in rest if "cycles, by the tokens they added" in line] == rest[-2:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["new_tokens"], found["dtype"], found["lossless"]) == (8, "bfloat16", True)
    assert [(row["temperature"], row["prompts"]) for row in found["rows"]] == [(0.0, 2), (0.7, 2)]
    assert all(row["tokens_per_second"] > 0 for row in found["rows"])


def test_progress_is_told_every_few_seconds_where_nobody_sits_at_a_terminal(
    model: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = command(model, checkpoint, PROMPTS[:1], "--new-tokens", "6", "--temperature", "0")
    monkeypatch.setattr(decode, "PERIOD", 0.0)
    monkeypatch.setattr(evaluation.time, "monotonic", itertools.count(0, 2).__next__)
    assert decode.main(arguments) == 0
    assert capsys.readouterr().err.count("speculative decoding of prompts, greedy: 0 of 1 prompts") == 1
    monkeypatch.setattr(decode, "PERIOD", 1e9)
    assert decode.main(arguments) == 0
    assert capsys.readouterr().err == ""


def test_a_text_ends_where_the_targets_generation_config_says(
    model: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command(model, checkpoint, PROMPTS[:1], "--new-tokens", "6", "--temperature", "0", "--json")
    assert decode.main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["tokens"] == 6
    ends = model / "generation_config.json"
    before = ends.read_text()
    ends.write_text(json.dumps({"eos_token_id": list(range(tiny.VOCABULARY))}))
    try:
        assert decode.main(arguments) == 0
    finally:
        ends.write_text(before)
    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert (row["tokens"], row["identical"], row["label"]) == (1, 1, "prompts")


def test_a_text_that_is_not_the_targets_own_is_exit_1(
    model: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = evaluation.speculative

    def wrong(*arguments: object) -> Decoded:
        text = whole(*arguments)  # type: ignore[arg-type]
        return Decoded([*text.tokens[:-1], 0], text.prompt, text.cycles)

    monkeypatch.setattr(evaluation, "speculative", wrong)
    arguments = command(model, checkpoint, PROMPTS[:1], "--new-tokens", "6", "--temperature", "0")
    assert decode.main(arguments) == 1
    assert "more than rounding, so the decoding is wrong" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("prompts", "more", "sentence"),
    [
        ("{", (), "is not valid JSON"),
        ([], (), "holds no prompt"),
        ([[1, 97]], (), "token ids from 0 to 96"),
        ([[1]], ("--new-tokens", "1"), "--new-tokens 1 must be"),
        (
            [[1, 2]],
            ("--new-tokens", "255"),
            "255 behind a prompt of 2 tokens is more than the 256",
        ),
        ([[1]], ("--tree-budget", "-1"), "--tree-budget -1 must be"),
        ([[1]], ("--max-prompts", "0"), "--max-prompts 0 must be"),
        ([[1]], ("--temperature", "-1"), "--temperature -1 must be"),
        ([[1]], ("--temperature", "0,hot"), "--temperature hot must be"),
        ([[1]], ("--device", "tpu"), "--device tpu must be auto, cpu, cuda or cuda:N"),
        ([[1]], ("--json", "/nowhere/x"), "--json /nowhere/x: there is no directory /nowhere"),
        ([["text"]], ("--chat",), "must be text that is not empty, or token ids"),
        ([[1]], ("--temprature", "1"), "unrecognized arguments: --temprature"),
    ],
)
def test_bad_input_to_the_command_is_one_sentence_and_exit_2(
    model: Path,
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    prompts: object,
    more: tuple[str, ...],
    sentence: str,
) -> None:
    arguments = command(model, checkpoint, prompts, *more)
    capsys.readouterr()  # the first test that needs the tiny model makes it, with a progress bar
    assert decode.main(arguments) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_a_damaged_checkpoint_or_one_for_another_target_is_named(
    model: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command(model, checkpoint, [[1]])
    weights = checkpoint / "drafter.safetensors"
    whole = weights.read_bytes()
    exported = weights.rename(checkpoint / "model.safetensors")
    assert torch.equal(decode.load_drafter(checkpoint).norm.weight, drafting.trained().norm.weight)
    exported.rename(weights)
    weights.write_bytes(whole[:-10])
    assert decode.main(arguments) == 2
    assert "drafter.safetensors has" in capsys.readouterr().err
    weights.write_bytes(whole)
    settings = json.loads((checkpoint / "config.json").read_text())
    for wrong, sentence in (
        ({"mask_token_id": 97}, "its mask token 97 is not in its vocabulary of 97"),
        ({"target_layer_ids": [0, 3]}, "layer 3 of a target of 4 layers cannot be tapped"),
    ):
        changed = {**settings, "dflash_config": {**settings["dflash_config"], **wrong}}
        (checkpoint / "config.json").write_text(json.dumps(changed))
        assert decode.main(arguments) == 2
        assert sentence in capsys.readouterr().err
    (checkpoint / "config.json").write_text(json.dumps({**settings, "num_target_layers": 9}))
    assert decode.main(arguments) == 2
    assert "for a target of another shape" in capsys.readouterr().err
    assert decode.main([*arguments[:2], "--drafter", str(tmp_path), *arguments[4:]]) == 2
    assert f"--drafter {tmp_path}: holds no checkpoint that is whole" in capsys.readouterr().err
    assert decode.main([*arguments[:2], "--drafter", str(model), *arguments[4:]]) == 2
    assert f"--drafter {model}: its config.json is not a drafter's of ours" in capsys.readouterr().err
    assert decode.main(["--target", str(tmp_path / "no"), *arguments[2:]]) == 2
    told = f"--target-model {tmp_path / 'no'}: there is no such directory; give a model directory\n"
    assert told in capsys.readouterr().err
