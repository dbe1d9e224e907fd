"""What is read of a target's directory, and which targets are refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import chats
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma2Config, Gemma2ForCausalLM, PhiConfig, PhiForCausalLM, PreTrainedModel

from trainer import modeldir
from trainer.chat import Chat
from trainer.data_meta import template_warning
from trainer.drafter_config import DrafterConfig
from trainer.errors import InputError
from trainer.modeldir import (
    default_mask_token,
    mask_token_warning,
    stop_tokens,
    target_digest,
    template_digest,
    text_config,
)
from trainer.target import Target


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_5", "qwen3_5_with_vision"])
def test_taps_are_the_hidden_states_that_the_layers_put_out(tmp_path: Path, kind: str) -> None:
    """Hugging Face's hidden_states[i + 1] is the output of layer i; the last hidden state is normed."""
    model = getattr(tiny, kind)()
    target = Target.load(tiny.target_directory(tmp_path / "a", model))
    target.tap((0, 2))
    ids = torch.randint(0, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        states = model(input_ids=ids, output_hidden_states=True).hidden_states
    taps, last = target.features(ids)
    assert target.num_layers == 4
    assert torch.equal(taps, torch.cat([states[1], states[3]], dim=-1))
    assert torch.equal(last, states[-1])
    assert not any("vis" in name for name, _ in target.model.named_parameters()), (
        "the vision part is left out"
    )


def test_precision_and_device_are_what_was_asked_for(tmp_path: Path) -> None:
    target = Target.load(tiny.target_directory(tmp_path / "a"), torch.bfloat16, "cpu")
    target.tap((1,))
    taps, last = target.features(torch.tensor([[1, 2, 3]]))
    assert (taps.dtype, last.dtype, target.lm_head.dtype) == (torch.bfloat16,) * 3


@pytest.mark.parametrize("layer", [-1, 3, 4])
def test_the_last_layer_and_those_that_are_not_there_cannot_be_tapped(layer: int) -> None:
    target = Target(tiny.qwen3())
    with pytest.raises(
        InputError, match=rf"^layer {layer} of a target of 4 layers .* ids from 0 to 2 \(the last"
    ):
        target.tap((0, layer))


def test_the_drafters_config_takes_nothing_of_a_qwen3_5_that_it_is_not_trained_with(tmp_path: Path) -> None:
    """Its partial and multi-axis rotary keys, served with a drafter, cost nearly all that it had learnt."""
    directory = tiny.target_directory(tmp_path / "a", tiny.qwen3_5_with_vision())
    mask = default_mask_token(directory, 97)
    assert mask == 90, "the first id that no token has"
    loaded = Target.load(directory).config
    for source in (loaded, text_config(directory)):
        written = DrafterConfig.for_target(source, num_layers=2, mask_token_id=mask).to_json()
        assert written["rope_parameters"] == {"rope_theta": 1e6, "rope_type": "default"}
        assert (written["hidden_size"], written["head_dim"], written["num_target_layers"]) == (32, 8, 4)
        text = json.dumps(written)
        assert not any(key in text for key in ("partial", "mrope", "linear_", "vision", "text_config"))


def test_a_base_of_rotation_for_each_kind_of_layer_gives_the_full_ones() -> None:
    rope = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    source = SimpleNamespace(**tiny.SHAPE, rope_parameters=rope)
    assert DrafterConfig.for_target(source, mask_token_id=1).rope_theta == 1e6


@pytest.mark.parametrize(
    ("tokens", "mask"),
    [
        (["a", "<|MASK|>", "c"], 1),
        (["a", "b"], 2),
        (["<empty_output>", "<repo_name>", "c", "d"], 0),
        (["<|reserved_special_token_0|>", "<|reserved_special_token_1|>", "c", "d"], 1),
        (["a", "b", "c", "d"], None),
    ],
)
def test_the_mask_token_is_one_that_the_target_never_writes(
    tmp_path: Path, tokens: list[str], mask: int | None
) -> None:
    model = {"vocab": {token: number for number, token in enumerate(tokens)}}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}))
    if mask is None:
        with pytest.raises(InputError, match=r"no unused id .* --mask-token-id"):
            default_mask_token(tmp_path, 4)
    else:
        assert default_mask_token(tmp_path, 4) == mask


def test_a_mask_token_that_texts_hold_is_warned_of_and_one_that_ends_them_is_refused(tmp_path: Path) -> None:
    chats.chat_model(tmp_path)
    tokens = json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"]
    [(start, end)] = [(a["id"], b["id"]) for a, b in [tokens]]
    with pytest.raises(InputError, match=rf"--mask-token-id {end} is <\|im_end\|>, which ends the target's"):
        mask_token_warning(tmp_path, end)
    for ordinary in (5, start):
        assert f"warning: --mask-token-id {ordinary} is the token" in str(
            mask_token_warning(tmp_path, ordinary)
        )
    assert mask_token_warning(tmp_path, end + 1) is None
    model = {"vocab": {"[MASK]": 0, "<|reserved_special_token_0|>": 1, "mask": 2}}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}))
    assert [bool(mask_token_warning(tmp_path, i)) for i in range(3)] == [False, False, True]


@pytest.mark.parametrize("kept", ["a file", "tokenizer_config.json"])
def test_the_chat_template_is_named_as_data_json_names_it(tmp_path: Path, kept: str) -> None:
    chats.chat_model(tmp_path)
    assert (tmp_path / "chat_template.jinja").exists()
    if kept != "a file":
        place = tmp_path / "tokenizer_config.json"
        value = json.loads(place.read_text())
        place.write_text(json.dumps({**value, "chat_template": chats.CHATML}))
        (tmp_path / "chat_template.jinja").unlink()
    named = template_digest(tmp_path)
    assert named == Chat(str(tmp_path)).facts["template"]
    assert template_warning("data", {"template": named}, named) is None
    assert template_warning("data", {}, named) is None  # another trainer's
    said = template_warning("data", {"template": "0" * 16}, named)
    assert said is not None
    assert said.startswith("warning: data data: it was prepared with another chat template")


def test_weights_that_do_not_fit_their_config_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """transformers would leave random numbers there, and warn."""
    directory = tiny.target_directory(tmp_path / "a")
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r": model\.layers\.2\.mlp\.up_proj\.weight is missing; copy"):
        Target.load(directory)
    weights["model.layers.2.mlp.up_proj.weight"] = torch.zeros(3, 5)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    capfd.readouterr()
    with pytest.raises(InputError, match=r"up_proj\.weight has the shape \[3, 5\] and not \[\d+, 32\]; copy"):
        Target.load(directory)
    assert capfd.readouterr() == ("", ""), "transformers' own report is left out"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "t5"}, "its config.json has the model_type 't5', and transformers"),
        (
            {"model_type": "no-such-model"},
            "causal language model of that type; install a transformers that does",
        ),
        ({"num_attention_heads": "four"}, "transformers cannot load it"),
    ],
)
def test_what_transformers_cannot_load_is_one_sentence(tmp_path: Path, change: dict, sentence: str) -> None:
    directory = tiny.target_directory(tmp_path / "a")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(InputError) as caught:
        Target.load(directory)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_gguf_file_is_told_how_it_becomes_a_model_directory(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match=r"is a GGUF file; .* python -m trainer.gguf .*a.gguf DIR"):
        Target.load(tmp_path / "a.gguf")


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
