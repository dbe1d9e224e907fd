"""What is read of a target's directory, and which targets are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
from transformers import Gemma2Config, Gemma2ForCausalLM, PhiConfig, PhiForCausalLM, PreTrainedModel

from trainer import modeldir
from trainer.errors import InputError
from trainer.modeldir import stop_tokens, target_digest
from trainer.target import Target


def bent(name: str) -> PreTrainedModel:
    shape = {**tiny.SHAPE, "num_hidden_layers": 1}
    if name == "a bias":
        return PhiForCausalLM(PhiConfig(**{**shape, "num_key_value_heads": 4}))
    return Gemma2ForCausalLM(Gemma2Config(**shape))


@pytest.mark.parametrize("name", ["a bias", "final_logit_softcapping"])
def test_an_output_head_that_the_objective_does_not_know_is_refused(tmp_path: Path, name: str) -> None:
    bent(name).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=rf"output head is more than a product with a matrix \({name}\)"):
        Target.load(tmp_path)


def test_weights_in_their_own_precision_are_mapped_and_not_copied(tmp_path: Path) -> None:
    """(What that means for the memory is measured by bench/loading.py.)"""
    place = tiny.target_directory(tmp_path / "a")
    target = Target.load(place)
    words = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [[int(end, 16) for end in one[0].split("-")] for one in words if one[-1].startswith(str(place))]
    for name, parameter in target.model.named_parameters():
        address = parameter.data_ptr()
        assert any(first <= address < last for first, last in ranges), name


@pytest.mark.parametrize("sample", [None, 4096], ids=["whole", "only the ends of large weights"])
def test_a_target_is_named_by_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: int | None
) -> None:
    if sample:
        monkeypatch.setattr(modeldir, "_HASHED_WHOLE", 0)
        monkeypatch.setattr(modeldir, "_SAMPLE", sample)
    first = tiny.target_directory(tmp_path / "a")
    named = target_digest(first)
    assert target_digest(tiny.target_directory(tmp_path / "b")) == named
    trained = tiny.target_directory(tmp_path / "c", tiny.qwen3(initializer_range=0.3))
    assert target_digest(trained) != named
    config = json.loads((first / "config.json").read_text())
    (first / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert target_digest(first) != named


def test_a_change_in_the_middle_of_small_weights_is_seen_too(tmp_path: Path) -> None:
    target = tiny.target_directory(tmp_path / "a")
    named = target_digest(target)
    content = bytearray((target / "model.safetensors").read_bytes())
    content[len(content) // 2] ^= 1
    (target / "model.safetensors").write_bytes(content)
    assert target_digest(target) != named


def test_of_large_weights_a_change_at_the_end_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modeldir, "_HASHED_WHOLE", 0)
    monkeypatch.setattr(modeldir, "_SAMPLE", 4096)
    weights = tiny.target_directory(tmp_path / "a") / "model.safetensors"
    named = target_digest(tmp_path / "a")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert target_digest(tmp_path / "a") != named


@pytest.mark.parametrize(
    ("generation", "config", "stop"),
    [
        ({"eos_token_id": 7}, {"eos_token_id": 3}, {7}),
        ({"eos_token_id": [7, 8]}, {}, {7, 8}),
        ({"eos_token_id": None}, {"eos_token_id": 0}, {0}),
        (None, {"eos_token_id": [3, 4]}, {3, 4}),
        (None, {"text_config": {"eos_token_id": 5}}, {5}),
        (None, {"eos_token_id": None}, set()),
    ],
)
def test_the_tokens_that_end_a_text(tmp_path: Path, generation: object, config: dict, stop: set[int]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", **config}))
    if generation:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert stop_tokens(tmp_path) == stop
