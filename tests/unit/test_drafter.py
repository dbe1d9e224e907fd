"""The drafter: names, initialisation, and that training and decoding compute the same."""

from __future__ import annotations

import dataclasses

import pytest
import tiny
import torch
from torch import Tensor

from trainer.attention import dense_attention
from trainer.blocks import Blocks
from trainer.drafter import Drafter
from trainer.drafter_config import DrafterConfig, check_layer_ids, default_layer_ids
from trainer.errors import InputError
from trainer.target import Target

MASK = 96


def config(model: torch.nn.Module, **changes: object) -> DrafterConfig:
    chosen = {"block_size": 4, "num_layers": 2, "num_taps": 2, "mask_token_id": MASK, **changes}
    return DrafterConfig.for_target(model.config, **chosen)  # type: ignore[arg-type]


@pytest.fixture
def drafter() -> Drafter:
    torch.manual_seed(1)
    made = Drafter(config(tiny.qwen3()))
    with torch.no_grad():
        for parameter in made.parameters():  # away from the initial values, so that nothing is nearly zero
            parameter.mul_(4) if parameter.dim() == 2 else parameter.add_(0.3 * torch.randn(parameter.shape))
    return made


def inputs(drafter: Drafter, blocks: Blocks, length: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    width = drafter.config.hidden_size
    taps = torch.randn(2, length, 2 * width, generator=generator)
    return torch.randn(len(blocks), 4, width, generator=generator), taps


def test_parameters_have_the_names_that_serving_engines_load() -> None:
    made = Drafter(config(tiny.qwen3(), num_layers=2))
    layer = {
        "input_layernorm.weight": (32,),
        "post_attention_layernorm.weight": (32,),
        "self_attn.q_proj.weight": (32, 32),
        "self_attn.k_proj.weight": (16, 32),
        "self_attn.v_proj.weight": (16, 32),
        "self_attn.o_proj.weight": (32, 32),
        "self_attn.q_norm.weight": (8,),
        "self_attn.k_norm.weight": (8,),
        "mlp.gate_proj.weight": (64, 32),
        "mlp.up_proj.weight": (64, 32),
        "mlp.down_proj.weight": (32, 64),
    }
    expected = {"fc.weight": (32, 64), "hidden_norm.weight": (32,), "norm.weight": (32,)}
    expected |= {f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    assert {name: tuple(value.shape) for name, value in made.state_dict().items()} == expected


@pytest.mark.parametrize("window", [None, 6])
def test_training_and_the_cached_decode_loop_give_the_same_block(
    drafter: Drafter, window: int | None
) -> None:
    drafter.config = dataclasses.replace(drafter.config, sliding_window=window)
    blocks = Blocks.build([0, 0, 1, 1], [0, 7, 5, 19], 4, slots=5, window=window)
    embeddings, taps = inputs(drafter, blocks)
    trained = drafter(embeddings, blocks, drafter.fuse(taps))
    for i, (document, anchor) in enumerate([(0, 0), (0, 7), (1, 5), (1, 19)]):
        cache = drafter.new_cache()
        for start in range(0, anchor, 3):  # the context arrives in pieces, as verification accepts it
            drafter.append_context(cache, taps[document, start : min(start + 3, anchor)])
            drafter.draft(torch.randn(4, 32), cache.length, cache)  # an earlier block leaves nothing behind
        drafted = drafter.draft(embeddings[i], anchor, cache)
        torch.testing.assert_close(drafted, trained[i], atol=1e-5, rtol=1e-5)


def test_dense_and_two_part_execution_train_alike(drafter: Drafter) -> None:
    drafter.double()
    blocks = Blocks.build([0, 0, 1], [3, 4, 11], 4, slots=4)
    embeddings, taps = (t.double() for t in inputs(drafter, blocks))
    gradients = []
    for attend in ({}, {"attend": dense_attention}):
        out = drafter(embeddings, blocks, drafter.fuse(taps), **attend)
        gradients.append(torch.autograd.grad(out.pow(3).sum(), list(drafter.parameters())))
    for two_part, dense in zip(*gradients, strict=True):
        torch.testing.assert_close(two_part, dense, atol=1e-9, rtol=1e-9)


def test_slots_that_do_not_count_may_be_left_out(drafter: Drafter) -> None:
    blocks = Blocks.build([0, 0, 1], [3, 4, 11], 4, slots=4)
    embeddings, taps = inputs(drafter, blocks)
    rows = torch.tensor([1, 2, 5, 7, 10])
    results = []
    for out in (
        drafter(embeddings, blocks, drafter.fuse(taps)).flatten(0, 1)[rows],
        drafter(embeddings, blocks, drafter.fuse(taps), rows=rows),
    ):
        results.append((out, *torch.autograd.grad(out.pow(3).sum(), list(drafter.parameters()))))
    for all_slots, some in zip(*results, strict=True):
        torch.testing.assert_close(some, all_slots, atol=2e-4, rtol=2e-5)


def test_no_feature_at_or_after_the_anchor_reaches_the_block(drafter: Drafter) -> None:
    blocks = Blocks.build([0, 0, 1], [6, 8, 10], 4)
    embeddings, taps = inputs(drafter, blocks)
    before = drafter(embeddings, blocks, drafter.fuse(taps))
    changed, other = taps.clone(), embeddings.clone()
    changed[0, 6:] += 10
    changed[1] -= 5
    other[1:] += 1
    after = drafter(other, blocks, drafter.fuse(changed))
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])


def test_nothing_of_another_document_in_the_row_reaches_the_block(drafter: Drafter) -> None:
    blocks = Blocks.build([0, 0, 0, 1], [4, 9, 12, 10], 4, starts=[0, 6, 6, 0])
    embeddings, taps = inputs(drafter, blocks)
    before = drafter(embeddings, blocks, drafter.fuse(taps))
    changed, other = taps.clone(), embeddings.clone()
    changed[0, :6] += 10  # the document before,
    changed[0, 9:] -= 5  # what the block may not know of its own,
    changed[1] *= 2  # another row,
    other[[0, 2, 3]] += 1  # other blocks
    after = drafter(other, blocks, drafter.fuse(changed))
    assert torch.equal(after[1], before[1])
    assert not torch.equal(after[2], before[2])
    changed[0, 6] += 1
    assert not torch.equal(drafter(other, blocks, drafter.fuse(changed))[1], before[1])


@pytest.mark.parametrize(
    ("layers", "taps", "ids"),
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (64, 5, [1, 16, 31, 46, 61]),
        (30, 5, [1, 8, 14, 20, 27]),
        (28, 1, [14]),
        (6, 3, [1, 2, 3]),
        (4, 3, [0, 1, 2]),  # [1, layers - 3] is too short
        (4, 2, [0, 2]),
        (4, None, [0, 1, 2]),
        (2, None, [0]),
        (3, 1, [1]),
        (36, None, [1, 9, 17, 25, 33]),
    ],
)
def test_tapped_layers_follow_the_published_rule(layers: int, taps: int | None, ids: list[int]) -> None:
    assert default_layer_ids(layers, taps) == ids


@pytest.mark.parametrize("layers", range(2, 70))
def test_tapped_layers_are_always_different_and_never_the_last(layers: int) -> None:
    for taps in range(1, layers):
        ids = default_layer_ids(layers, taps)
        assert len(ids) == taps
        assert check_layer_ids(ids, layers) == ids


@pytest.mark.parametrize(("layers", "taps"), [(1, None), (4, 4), (4, 0)])
def test_taps_that_a_target_does_not_have_are_refused(layers: int, taps: int | None) -> None:
    with pytest.raises(InputError):
        default_layer_ids(layers, taps)


@pytest.mark.parametrize("ids", [[3], [1, 1], [2, 1], [-1, 2], [0, 9], []])
def test_layer_ids_out_of_range_or_order_are_refused(ids: list[int]) -> None:
    with pytest.raises(InputError, match="--target-layer-ids"):
        check_layer_ids(ids, 4)


def test_the_config_survives_json_and_says_what_engines_need() -> None:
    made = config(tiny.qwen3())
    value = made.to_json()
    assert DrafterConfig.from_json(value) == made
    assert value["architectures"] == ["DFlashDraftModel"]
    assert value["block_size"] == value["dflash_config"]["block_size"] == 4
    assert value["layer_types"] == ["full_attention"] * 2


def test_a_sliding_window_is_written_wherever_engines_look_for_it() -> None:
    made = config(tiny.qwen3(), sliding_window=2048)
    value = made.to_json()
    assert DrafterConfig.from_json(value) == made
    assert value["layer_types"] == ["sliding_attention"] * 2
    assert (value["sliding_window"], value["use_sliding_window"], value["max_window_layers"]) == (
        2048,
        True,
        0,
    )
    assert value["dflash_config"]["use_swa"] is True
    assert value["dflash_config"]["swa_window_size"] == 2048
    assert value["is_causal"] is value["dflash_config"]["causal"] is False
    assert value["dflash_config"]["target_layer_ids"] == [0, 2]
    assert value["dflash_config"]["mask_token_id"] == MASK
    assert value["is_causal"] is False
    with pytest.raises(InputError, match="head_dim"):
        DrafterConfig.from_json({key: item for key, item in value.items() if key != "head_dim"})


def test_the_drafter_can_start_from_the_last_layers_of_the_target() -> None:
    model = tiny.qwen3()
    made = Drafter(config(model))
    fresh = made.fc.weight.clone()
    made.init_from_target(model)
    for mine, theirs in zip(made.layers, model.model.layers[-2:], strict=True):
        theirs_now = dict(theirs.named_parameters())
        for name, value in mine.named_parameters():
            assert torch.equal(value, theirs_now[name]), name
    assert torch.equal(made.norm.weight, model.model.norm.weight)
    assert torch.equal(made.fc.weight, fresh)


def test_a_target_without_head_norms_leaves_the_drafters_as_they_are() -> None:
    model = tiny.llama()
    made = Drafter(config(model))
    made.init_from_target(model)
    attention = made.layers[0].self_attn
    assert torch.equal(attention.q_proj.weight, model.model.layers[2].self_attn.q_proj.weight)
    assert torch.equal(attention.q_norm.weight, torch.ones(8))


@pytest.mark.parametrize(
    ("changes", "says"), [({"num_layers": 5}, "--num-draft-layers 5"), ({"wide": True}, "q_proj")]
)
def test_a_target_that_does_not_fit_is_refused_in_one_sentence(changes: dict, says: str) -> None:
    model = tiny.qwen3()
    if changes.pop("wide", False):
        made = Drafter(config(tiny.qwen3(num_attention_heads=8)))
    else:
        made = Drafter(config(model, **changes))
    with pytest.raises(InputError, match=says):
        made.init_from_target(model)


@pytest.mark.parametrize("model", [tiny.qwen3, tiny.llama])
def test_features_are_the_outputs_of_the_tapped_layers(model) -> None:  # type: ignore[no-untyped-def]
    target = Target(model(), (0, 2))
    ids = torch.randint(0, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    taps, last = target.features(ids)
    reference = target.model(ids, output_hidden_states=True)
    assert torch.equal(taps, torch.cat([reference.hidden_states[1], reference.hidden_states[3]], -1))
    torch.testing.assert_close(last @ target.lm_head.T, reference.logits)
    assert not any(p.requires_grad for p in target.model.parameters())


def test_padding_on_the_right_does_not_change_a_documents_features() -> None:
    target = Target(tiny.qwen3(), (1,))
    ids = torch.randint(0, 90, (1, 9), generator=torch.Generator().manual_seed(0))
    padded = torch.cat([ids, torch.zeros(1, 7, dtype=torch.int64)], 1)
    torch.testing.assert_close(target.features(padded)[0][:, :9], target.features(ids)[0])
