"""Exports: the tensors and keys that serving engines load, read back by a second implementation."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import tiny
import torch

from trainer import checkpoint, export, formats
from trainer.drafter import Drafter, rotation
from trainer.drafter_config import DrafterConfig
from trainer.elementwise import norm_rotate
from trainer.errors import InputError
from trainer.modeldir import target_digest
from trainer.served import Served, neox

CONFIG = DrafterConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, rms_norm_eps=1e-6, rope_theta=1e4, vocab_size=tiny.VOCABULARY, block_size=4, mask_token_id=96,
    target_layer_ids=(0, 2), num_target_layers=4, max_position_embeddings=256,
)  # fmt: skip


def drafter(config: DrafterConfig = CONFIG) -> Drafter:
    torch.manual_seed(1)
    made = Drafter(config)
    with torch.no_grad():
        for parameter in made.parameters():  # away from the initial values: no norm is the same as none
            parameter.mul_(4) if parameter.dim() == 2 else parameter.add_(0.3 * torch.randn(parameter.shape))
    return made


def store(
    output: Path, step: int = 10, run_id: str = "0001-x", target: str = "", config: DrafterConfig = CONFIG
) -> Path:
    state = checkpoint.State(
        step=step, micro_batch=step, epoch=0, total=100, run_id=run_id, settings={"target": target}
    )
    tensors = drafter(config).state_dict()
    return checkpoint.save(output, state, tensors, {"step": torch.zeros(1)}, config.to_json(), 10)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.target_directory(tmp_path_factory.mktemp("model") / "target")


def test_the_list_of_tensors_is_the_drafters_own() -> None:
    for config in (CONFIG, dataclasses.replace(CONFIG, num_hidden_layers=3, head_dim=16, block_size=7)):
        own = {name: tuple(value.shape) for name, value in Drafter(config).state_dict().items()}
        assert formats.tensors(config) == own


def test_a_list_of_tensors_is_compared_from_both_sides() -> None:
    wanted = formats.tensors(CONFIG)
    assert formats.difference(dict(wanted), wanted) is None
    less = {name: shape for name, shape in wanted.items() if name != "layers.1.mlp.up_proj.weight"}
    assert formats.difference(less, wanted) == "layers.1.mlp.up_proj.weight is missing"
    assert formats.difference(wanted, less) == "layers.1.mlp.up_proj.weight is no tensor of this drafter"
    other = {**wanted, "fc.weight": (32, 96)}
    assert formats.difference(other, wanted) == "fc.weight has the shape [32, 96] instead of [32, 64]"


def test_the_native_config_has_the_keys_that_engines_read() -> None:
    value = formats.native(CONFIG, "bfloat16", {"checkpoint": "0001-x, step 10"})
    mark = value.pop("drafthouse")
    assert mark == {"checkpoint": "0001-x, step 10", "target_layer_ids": formats.CONVENTION}
    assert value == {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
        "max_position_embeddings": 256,
        "vocab_size": tiny.VOCABULARY,
        "hidden_act": "silu",
        "attention_bias": False,
        "layer_types": ["full_attention"] * 2,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 2,
        "num_target_layers": 4,
        "block_size": 4,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "is_causal": False,
        "dflash_config": {
            "mask_token_id": 96,
            "target_layer_ids": [0, 2],
            "block_size": 4,
            "causal": False,
            "sample_from_anchor": False,
        },
    }
    assert DrafterConfig.from_json(value) == CONFIG


def test_the_speculators_config_counts_layers_from_1_and_drafts_one_token_less_than_a_block() -> None:
    value = formats.speculators(CONFIG, "float32", {}, "/models/x", ["Qwen3ForCausalLM"])
    assert value["aux_hidden_state_layer_ids"] == [1, 3]
    assert value["drafthouse"] == {"aux_hidden_state_layer_ids": formats.CONVENTION_PLUS_1}
    assert (value["architectures"], value["speculators_model_type"]) == (["DFlashSpeculator"], "dflash")
    assert (value["block_size"], value["mask_token_id"], value["draft_vocab_size"]) == (4, 96, 97)
    assert (value["sliding_window_non_causal"], value["sample_from_anchor"]) == (False, False)
    assert value["speculators_config"] == {
        "algorithm": "dflash",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": "/models/x", "architectures": ["Qwen3ForCausalLM"]},
    }
    assert value["transformer_layer_config"]["rope_parameters"] == {"rope_theta": 1e4, "rope_type": "default"}


def test_what_only_the_target_has_reaches_no_config() -> None:
    """A partial rotation that leaked into the drafter's config served at an acceptance length of 1.05."""
    rope = {
        "rope_theta": 1e7, "rope_type": "yarn", "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
        "mrope_interleaved": True, "factor": 4.0,
    }  # fmt: skip
    of_target = SimpleNamespace(
        **tiny.SHAPE, rope_parameters=rope, partial_rotary_factor=0.25, tie_word_embeddings=True,
        final_logit_softcapping=30.0, layer_types=["linear_attention"] * 4, sliding_window=128,
    )  # fmt: skip
    config = DrafterConfig.for_target(of_target, block_size=4, num_layers=2, num_taps=2, mask_token_id=96)
    native, speculators = (
        formats.native(config, "float32", {}),
        formats.speculators(config, "float32", {}, None, []),
    )
    for value in (native, speculators):
        text = json.dumps(value)
        for word in ("partial", "mrope", "yarn", "factor", "softcapping", "linear_attention"):
            assert word not in text
        layers: Any = value.get("transformer_layer_config", value)
        assert layers["rope_theta"] == layers["rope_parameters"]["rope_theta"] == 1e7
        assert layers["tie_word_embeddings"] is False
        assert layers["sliding_window"] is None


def test_the_rotary_style_is_neox() -> None:
    """Known vectors: element 0 is paired with element d/2, as engines assume; GPT-J would pair it with 1."""
    one = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    four = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    position = torch.tensor([3])
    first = [math.cos(3), 0, math.sin(3), 0]  # at the base frequency
    last = [0, -math.sin(0.03), 0, math.cos(0.03)]  # 10000^(-2/4) = 1/100 of it
    by = rotation(position, 4, 1e4, torch.float64)
    for vector, expected in ((one, first), (four, last)):
        wanted = torch.tensor(expected, dtype=torch.float64)
        x = vector.view(1, 1, 4)
        scale = torch.full((4,), 0.5, dtype=torch.float64)  # undoes the norm: the vectors have the size 1/2
        for rotated in (norm_rotate(x, scale, by, 0.0), neox(x, position, 1e4)):
            torch.testing.assert_close(rotated.view(4), wanted, atol=1e-12, rtol=0)
        with torch.no_grad():  # as in decoding, and on a GPU
            torch.testing.assert_close(norm_rotate(x, scale, by, 0.0).view(4), wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", formats.FORMATS)
def test_an_export_read_back_drafts_as_the_cached_decode_loop_does(
    tmp_path: Path, target: Path, kind: str
) -> None:
    found = export.find(store(tmp_path / "out", target=target_digest(target)))
    export.export(found, kind, tmp_path / "to", target)
    assert sorted(p.name for p in (tmp_path / "to").iterdir()) == ["config.json", "model.safetensors"]
    own, served = drafter().double().eval(), Served(tmp_path / "to", torch.float64)
    assert (served.taps, served.mask_token_id, served.block_size) == ([0, 2], 96, 4)
    random = torch.Generator().manual_seed(5)
    taps = torch.randn(20, 64, generator=random, dtype=torch.float64)
    for anchor in (1, 20):
        block = torch.randn(4, 32, generator=random, dtype=torch.float64)
        cache = own.new_cache()
        own.append_context(cache, taps[:anchor])
        drafted = own.draft(block, anchor, cache)
        torch.testing.assert_close(served.hidden(block, taps, anchor), drafted, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", formats.FORMATS)
def test_a_sliding_window_is_exported_as_it_was_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    config = dataclasses.replace(CONFIG, sliding_window=4)
    found = export.find(store(tmp_path / "out", config=config))
    # It compares blocks whose context is longer than the window.
    assert export.main([str(found.path), "--format", kind, "--to", str(tmp_path / "to")]) == 0
    assert ("warning: SGLang lets" in capsys.readouterr().out) == (kind == "native")
    value = json.loads((tmp_path / "to" / "config.json").read_text())
    shape = value.get("transformer_layer_config", value)
    assert (shape["sliding_window"], shape["use_sliding_window"]) == (4, True)
    assert shape["layer_types"] == ["sliding_attention"] * 2
    if kind == "speculators":
        assert value["sliding_window_non_causal"] is True
    shape["sliding_window"] = 5
    (tmp_path / "to" / "config.json").write_text(json.dumps(value))
    taps, block = torch.randn(7, 64, dtype=torch.float64), torch.randn(4, 32, dtype=torch.float64)
    wider = Served(tmp_path / "to", torch.float64).hidden(block, taps, 7)
    shape["sliding_window"] = 4
    (tmp_path / "to" / "config.json").write_text(json.dumps(value))
    assert not torch.allclose(Served(tmp_path / "to", torch.float64).hidden(block, taps, 7), wider)


def ids_plus_one(value: dict[str, Any]) -> None:
    value["dflash_config"]["target_layer_ids"] = [1, 3]


def other_base(value: dict[str, Any]) -> None:
    value["rope_parameters"]["rope_theta"] = 5e4


@pytest.mark.parametrize(
    ("spoil", "said"), [(ids_plus_one, "names other layers"), (other_base, "its logits differ by")]
)
def test_an_export_that_reads_back_otherwise_is_refused_and_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[dict[str, Any]], None],
    said: str,
) -> None:
    native = formats.native

    def spoiled(*words: Any) -> dict[str, Any]:
        value = native(*words)
        spoil(value)
        return value

    monkeypatch.setattr(formats, "native", spoiled)
    with pytest.raises(InputError, match=said):
        export.export(export.find(store(tmp_path / "out")), "native", tmp_path / "to")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_a_tensor_that_was_written_under_another_name_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = export.find(store(tmp_path / "out"))
    save_file = safetensors.torch.save_file

    def renamed(tensors: dict[str, Any], path: Path, **more: Any) -> None:
        other = {name.replace("hidden_norm", "context_norm"): value for name, value in tensors.items()}
        save_file(other, path, **more)

    monkeypatch.setattr(safetensors.torch, "save_file", renamed)
    with pytest.raises(InputError, match=r"hidden_norm\.weight is missing"):
        export.export(found, "native", tmp_path / "to")


def test_every_place_where_checkpoints_lie_is_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store(tmp_path / "out", 10)
    newest = store(tmp_path / "out", 20)
    assert export.find(tmp_path / "out").path == newest
    assert export.find(tmp_path / "out" / "latest").state.step == 20
    assert export.find(tmp_path / "out" / "0001-x").path == newest  # a run's own folder
    (tmp_path / "pulled").mkdir()  # as `fab pull` leaves them
    for step in (10, 20):
        (tmp_path / "out" / "0001-x" / f"step-{step:08d}").rename(tmp_path / "pulled" / f"0001-x-step-{step}")
    assert export.find(tmp_path / "pulled").state.step == 20
    broken = tmp_path / "pulled" / "0001-x-step-20"
    content = bytearray((broken / "drafter.safetensors").read_bytes())
    content[-3] ^= 1
    (broken / "drafter.safetensors").write_bytes(content)
    assert export.find(tmp_path / "pulled").state.step == 10
    assert "0001-x-step-20 is damaged and passed over" in capsys.readouterr().err
    for given, said in (
        (broken, "is damaged: drafter.safetensors is not what was written there"),
        (tmp_path / "nowhere", "there is no such directory"),
        (tmp_path / "out", "holds no checkpoint that is whole"),
    ):
        with pytest.raises(InputError, match=said):
            export.find(given)


def test_only_an_earlier_export_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [str(store(tmp_path / "out")), "--to", str(tmp_path / "to")]
    assert export.main(given) == 0
    first = (tmp_path / "to" / "model.safetensors").stat().st_ino
    assert export.main([*given, "--dtype", "bfloat16"]) == 0
    assert (tmp_path / "to" / "model.safetensors").stat().st_ino != first
    assert json.loads((tmp_path / "to" / "config.json").read_text())["dtype"] == "bfloat16"
    (tmp_path / "to" / "notes.txt").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "to")
    (tmp_path / "empty").mkdir()
    capsys.readouterr()
    for place in ("to", "link", "empty", "out"):
        assert export.main([*given[:-1], str(tmp_path / place)]) == 2
        assert capsys.readouterr().err.endswith(
            f"--to {tmp_path / place}: exists and is not an export of ours; give another directory\n"
        )
    assert (tmp_path / "to" / "notes.txt").exists()
    assert not list(tmp_path.glob(".*"))


def test_the_command_lines_of_the_engines_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = str(store(tmp_path / "out"))
    assert export.main([given, "--to", str(tmp_path / "a b")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "differ by" in said[1]
    place = f"{tmp_path}/a b"
    assert said[2:] == [
        f"vLLM: vllm serve TARGET --speculative-config '{{\"method\": \"dflash\", \"model\": \"{place}\", "
        "\"num_speculative_tokens\": 3}'",
        "SGLang: python -m sglang.launch_server --model-path TARGET --speculative-algorithm DFLASH "
        f"--speculative-draft-model-path '{place}' --speculative-num-draft-tokens 4",
    ]  # fmt: skip
    assert export.main([given, "--to", str(tmp_path / "s"), "--format", "speculators"]) == 0
    assert "SGLang" not in capsys.readouterr().out


def test_a_target_that_the_drafter_was_not_trained_for_is_refused(tmp_path: Path, target: Path) -> None:
    other = tiny.target_directory(tmp_path / "other", tiny.qwen3(initializer_range=0.3))
    wide = tiny.target_directory(tmp_path / "wide", tiny.qwen3(hidden_size=64))
    found = export.find(store(tmp_path / "out", target=f"toy {target_digest(target)}"))
    for wrong, said in ((other, "was trained for another target"), (wide, "of another shape")):
        with pytest.raises(InputError, match=said):
            export.export(found, "native", tmp_path / "to", wrong)
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named_and_not_exported(tmp_path: Path, value: float) -> None:
    path = store(tmp_path / "out")
    weights = drafter().state_dict()
    weights["layers.1.mlp.up_proj.weight"][3, 4] = value
    safetensors.torch.save_file(weights, path / "drafter.safetensors")
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "digests": {}}))
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.up_proj\.weight holds values that are not finite"):
        export.export(export.find(path), "native", tmp_path / "to")
