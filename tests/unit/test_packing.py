"""Packing: rows of several documents that neither the target nor the drafter mixes up."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.__main__ import main as check_config
from trainer.completions import Completions, write_completions
from trainer.data import Batch, Portions, Reader
from trainer.drafter import Drafter
from trainer.drafter_config import DrafterConfig
from trainer.errors import InputError
from trainer.features import Features
from trainer.loss import Objective
from trainer.packing import check_packing, pack, rounded
from trainer.target import Target

PORTIONS = Portions(
    token_budget=400,
    max_batch_size=8,
    max_seq_len=200,
    block_size=4,
    max_anchors=60,
    gamma=2.0,
    mask_token_id=96,
    packing=True,
)


@pytest.fixture(scope="module")
def completions(tmp_path_factory: pytest.TempPathFactory) -> Completions:
    place = tmp_path_factory.mktemp("packing") / "data"
    write_completions(place, tiny.documents(40), {"tokenizer": "abc", "target": "tiny"})
    return Completions.open(place)


def epoch(reader: Reader, number: int = 0) -> list[Batch]:
    count = reader.batches_per_epoch
    return [reader.batch(number * count + i) for i in range(count)]


@settings(max_examples=60)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=80))
def test_rows_are_never_too_full_and_hardly_more_than_needed(lengths: list[int]) -> None:
    ordered = np.sort(np.array(lengths))[::-1]
    rows = pack(ordered, 100)
    filled = np.bincount(rows, weights=ordered)
    assert len(rows) == len(lengths)
    assert (filled <= 100).all()
    assert (filled > 0).all()  # no row is skipped
    assert len(filled) <= 11 / 9 * -(-sum(lengths) // 100) + max(1, sum(x > 50 for x in lengths))
    assert Counter(filled <= 50)[True] <= 1  # two half-empty rows would have been one


def test_little_of_a_packed_batch_is_padding(completions: Completions) -> None:
    batches = epoch(Reader(completions, PORTIONS))
    used = sum(b.tokens for b in batches) / sum(b.input_ids.numel() for b in batches)
    plain = epoch(Reader(completions, replace(PORTIONS, packing=False)))
    before = sum(b.tokens for b in plain) / sum(b.input_ids.numel() for b in plain)
    assert used > 0.9 > before


def test_every_document_comes_once_an_epoch_whole_and_in_other_company(completions: Completions) -> None:
    reader = Reader(completions, PORTIONS)
    company = []
    for number in range(2):
        rows = []
        for b in epoch(reader, number):
            assert b.positions is not None
            assert b.input_ids.numel() <= PORTIONS.token_budget
            assert b.blocks.kept <= PORTIONS.max_anchors
            for document, (row, start), length in zip(b.documents, b.places, b.lengths, strict=True):
                there = slice(start, start + length)
                assert b.input_ids[row, there].tolist() == completions.document(document)[0].tolist()
                assert b.positions[row, there].tolist() == list(range(length))
                rows.append((document, (id(b), row)))
        assert sorted(document for document, _ in rows) == list(range(40))
        together: dict[object, set[int]] = {}
        for document, place in rows:
            together.setdefault(place, set()).add(document)
        company.append({frozenset(some) for some in together.values()})
    assert company[0] != company[1]


def test_the_number_of_batches_is_the_same_in_every_epoch(completions: Completions) -> None:
    reader = Reader(completions, PORTIONS)
    assert {len(reader.order(number)) for number in range(5)} == {reader.batches_per_epoch}


def test_labels_and_anchors_stay_in_their_document(completions: Completions) -> None:
    for b in epoch(Reader(completions, PORTIONS)):
        bounds = {
            place: (document, length)
            for place, document, length in zip(b.places, b.documents, b.lengths, strict=True)
        }
        for n in range(b.blocks.kept):
            row, start = int(b.blocks.rows[n]), int(b.blocks.starts[n])
            document, length = bounds[row, start]
            at = int(b.blocks.anchors[n]) - start
            ids, mask = completions.document(document)
            assert mask[at]
            for slot in range(1, 4):
                counts = at + slot < length and mask[at + slot]
                assert (b.weights[n, slot] > 0) == bool(counts)
                assert b.labels[n, slot] == (ids[at + slot] if at + slot < length else 0)


def test_a_document_gets_the_same_anchors_packed_or_not(completions: Completions) -> None:
    plenty = replace(PORTIONS, max_anchors=1000)
    drawn = []
    for portions in (plenty, replace(plenty, packing=False)):
        found = {}
        for b in epoch(Reader(completions, portions)):
            where = dict(zip(b.places, b.documents, strict=True))
            pairs = zip(*(getattr(b.blocks, n).tolist() for n in ("rows", "starts", "anchors")), strict=True)
            for row, start, anchor in list(pairs)[: b.blocks.kept]:
                found.setdefault(where[row, start], []).append(anchor - start)
        drawn.append(found)
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 40


@pytest.mark.parametrize("model", [tiny.llama, tiny.qwen3])
@pytest.mark.parametrize("keep", [False, True])
def test_the_target_does_not_see_the_other_documents_of_a_row(
    completions: Completions, model: object, keep: bool
) -> None:
    target = Target(model(), (0, 2))  # type: ignore[operator]
    reader = Reader(completions, PORTIONS)
    batch = reader.batch(0)
    packed, last = Features(target, reader, keep=keep, keep_last=True)(batch)
    assert last is not None
    assert len(batch.documents) > len(batch.input_ids)
    for document, (row, start), length in zip(batch.documents, batch.places, batch.lengths, strict=True):
        ids = torch.tensor(completions.document(document)[0].astype(np.int64))
        alone, alone_last = target.features(ids[None])
        for found, expected in ((packed, alone), (last, alone_last)):
            torch.testing.assert_close(found[row, start : start + length], expected[0], rtol=1e-5, atol=1e-5)


def test_a_training_step_is_the_same_packed_or_not(completions: Completions) -> None:
    """All documents in one micro-batch, either way: the same loss and the same gradient."""
    target = Target(tiny.qwen3().double(), (0, 2))
    config = DrafterConfig.for_target(
        target.config, block_size=4, num_layers=2, target_layer_ids=(0, 2), mask_token_id=96
    )
    reader = Reader(completions, replace(PORTIONS, token_budget=100_000, max_batch_size=100, max_anchors=300))
    order = reader.order(0)
    assert len(order) == 1
    packed = reader._collate(order.documents, order.rows, 0)
    plain = reader._collate(order.documents, np.arange(len(order.documents)), 0)  # one document in a row
    assert len(packed.input_ids) < len(plain.input_ids) == 40
    results = []
    for batch in (packed, plain):
        torch.manual_seed(0)
        drafter = Drafter(config).double()
        taps = Features(target, reader, keep=False)(batch)[0][:, : batch.blocks.context_length]
        hidden = drafter(target.embed(batch.block_ids), batch.blocks, drafter.fuse(taps))
        rows = hidden.flatten(0, 1)[batch.rows]
        labels, weights = batch.labels.flatten()[batch.rows], batch.weights.flatten()[batch.rows]
        visit = Objective(target.lm_head)(rows, labels, weights.double())
        visit.loss.backward()
        results.append((visit.loss.detach(), [p.grad for p in drafter.parameters()]))
    (loss, gradients), (other_loss, other_gradients) = results
    torch.testing.assert_close(loss, other_loss)
    for mine, other in zip(gradients, other_gradients, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("kinds", [["full_attention", "linear_attention"], ["mamba"]])
def test_a_target_with_a_recurrent_state_is_refused(kinds: list[str]) -> None:
    with pytest.raises(InputError, match=f"--packing: .*{kinds[-1]}"):
        check_packing({"layer_types": kinds})
    check_packing({"layer_types": ["sliding_attention", "full_attention"]})
    check_packing({})


def test_check_config_refuses_it_before_a_weight_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tiny.target_directory(tmp_path / "target")
    data = tiny.data_directory(tmp_path / "data", target)
    config = json.loads((target / "config.json").read_text())
    given = [*tiny.flags(target, data, tmp_path / "out", packing=True), "--check-config"]
    assert check_config(given) == 0
    config["layer_types"] = ["linear_attention"] * 4
    (target / "config.json").write_text(json.dumps(config))
    assert check_config(given) == 2
    assert "--packing: the target has layers of the kind linear_attention" in capsys.readouterr().err


def test_lengths_are_rounded_up_a_little_and_never_beyond_a_row() -> None:
    lengths = np.random.default_rng(0).integers(100, 3000, 1000)
    up = rounded(lengths, 3000)
    assert (up >= lengths).all()
    assert up.max() <= 3000
    assert (up - lengths).mean() < 0.01 * lengths.mean()
    assert len(np.unique(up)) < len(np.unique(lengths)) / 5
