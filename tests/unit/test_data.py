"""Tokenised completions: what is written is read, and what is drawn depends on nothing but seed and epoch."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from trainer import anchors, data
from trainer import completions as disk
from trainer.anchors import draw, share, valid_anchors
from trainer.completions import Completions, write_completions
from trainer.data import Portions, Reader, bucket_length, check_usable
from trainer.errors import InputError
from trainer.foreign import open_completions

META = {"tokenizer": "abc", "target": "tiny"}
PORTIONS = Portions(
    token_budget=256,
    max_batch_size=8,
    max_seq_len=64,
    block_size=4,
    max_anchors=20,
    gamma=2.0,
    mask_token_id=96,
)


@pytest.fixture
def completions(tmp_path: Path) -> Completions:
    write_completions(tmp_path / "data", tiny.documents(40), META)
    return Completions.open(tmp_path / "data")


def test_documents_are_read_as_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "SHARD_BYTES", 1500)
    monkeypatch.setattr(disk, "BATCH_DOCUMENTS", 3)
    documents = tiny.documents(20)
    write_completions(tmp_path / "data", iter(documents), {**META, "more": 1})
    found = Completions.open(tmp_path / "data")
    assert len(found) == 20
    for i, (ids, mask) in enumerate(documents):
        assert found.document(i)[0].tolist() == ids.tolist()
        assert found.document(i)[1].tolist() == mask.tolist()
    assert found.meta["shards"] == [f"{i:05d}.arrow" for i in range(len(found.meta["shards"]))]
    assert len(found.meta["shards"]) > 2
    assert found.meta["tokens"] == sum(len(ids) for ids, _ in documents)
    assert found.meta["supervised_tokens"] == sum(int(mask.sum()) for _, mask in documents)
    assert found.meta["more"] == 1
    assert found.lengths.tolist() == [len(ids) for ids, _ in documents]


def test_the_digest_is_of_the_content_whether_or_not_checksums_were_kept(tmp_path: Path) -> None:
    documents = tiny.documents(20)
    others = [(ids[::-1].copy(), mask) for ids, mask in documents]  # the same counts
    for name, rows in (("a", documents), ("b", others), ("c", documents)):
        write_completions(tmp_path / name, rows, META)
    meta = tmp_path / "c" / "data.json"
    without = {key: value for key, value in json.loads(meta.read_text()).items() if key != "sha256"}
    meta.write_text(json.dumps(without))
    digests = [Completions.open(tmp_path / name).digest for name in "abc"]
    assert digests[0] == digests[2] != digests[1]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def broken():  # type: ignore[no-untyped-def]
        yield [1, 2, 3], [0, 1, 1]
        yield [1, 2], [0]

    with pytest.raises(ValueError, match="as many mask values"):
        write_completions(tmp_path / "data", broken(), META)
    with pytest.raises(InputError, match="not one document"):
        write_completions(tmp_path / "data", [], META)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_directory_is_not_written_over(tmp_path: Path) -> None:
    write_completions(tmp_path / "data", tiny.documents(2), META)
    with pytest.raises(InputError, match="exists already"):
        write_completions(tmp_path / "data", tiny.documents(3), META)
    assert len(Completions.open(tmp_path / "data")) == 2


def spoil(directory: Path, how: str) -> None:
    shard, meta = directory / "00000.arrow", directory / "data.json"
    value = json.loads(meta.read_text())
    if how == "no data.json":
        meta.unlink()
    elif how == "broken data.json":
        meta.write_text("{")
    elif how == "another schema":
        meta.write_text(json.dumps({**value, "schema": 99}))
    elif how == "a key missing":
        meta.write_text(json.dumps({k: v for k, v in value.items() if k != "shards"}))
    elif how == "a shard missing":
        shard.unlink()
    elif how == "a shard cut off":
        shard.write_bytes(shard.read_bytes()[:-200])
    elif how == "a shard of something else":
        shard.write_bytes(b"hello")
    elif how == "fewer documents":
        meta.write_text(json.dumps({**value, "documents": 7}))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("no data.json", "no data.json"),
        ("broken data.json", "data.json cannot be read"),
        ("another schema", "schema"),
        ("a key missing", "'shards'"),
        ("a shard missing", "00000.arrow is missing"),
        ("a shard cut off", "00000.arrow is damaged"),
        ("a shard of something else", "00000.arrow is damaged"),
        ("fewer documents", "promises 7 documents"),
    ],
)
def test_damaged_data_is_refused_by_name(tmp_path: Path, how: str, says: str) -> None:
    write_completions(tmp_path / "data", tiny.documents(3), META)
    spoil(tmp_path / "data", how)
    with pytest.raises(InputError, match=says) as caught:
        Completions.open(tmp_path / "data")
    assert str(tmp_path / "data") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_data_of_another_tokenizer_or_vocabulary_is_refused(completions: Completions) -> None:
    completions.check_target("abc", 97)
    with pytest.raises(InputError, match="another tokenizer"):
        completions.check_target("other", 97)
    with pytest.raises(InputError, match="vocabulary of 50"):
        completions.check_target("abc", 50)


@pytest.mark.parametrize(
    ("mask", "found"),
    [
        ("0000", []),
        ("1111", [0, 1, 2]),  # the last token predicts nothing
        ("0111", [1, 2]),
        ("0001", []),
        ("1000", []),
        ("1001", [0]),  # slot 3 of its block is supervised
        ("10001", []),  # out of reach for blocks of 4
        ("11000111", [0, 5, 6]),  # 1 reaches positions 2 to 4 only
        ("1", []),
    ],
)
def test_an_anchor_is_supervised_and_so_is_something_that_it_predicts(mask: str, found: list[int]) -> None:
    assert valid_anchors(np.array([int(c) for c in mask]), 4).tolist() == found


@given(st.integers(0, 200), st.lists(st.integers(0, 60), min_size=1, max_size=12))
def test_the_budget_is_shared_in_proportion_and_used_up(budget: int, counts: list[int]) -> None:
    given_out = share(budget, counts)
    assert sum(given_out) == min(budget, sum(counts))
    assert all(0 <= got <= count for got, count in zip(given_out, counts, strict=True))
    if sum(counts) > budget:
        for got, count in zip(given_out, counts, strict=True):
            assert abs(got - budget * count / sum(counts)) < 1


def test_bucketed_lengths_waste_little() -> None:
    lengths = np.arange(1, 5000)
    padded = bucket_length(lengths)
    assert (padded >= lengths).all()
    assert ((padded - lengths) / padded)[128:].max() < 0.125
    assert len(np.unique(padded)) < 60


def test_anchors_are_drawn_evenly_and_by_seed_epoch_and_document_alone() -> None:
    lengths, documents = np.array([40, 60, 50]), np.array([7, 3, 9])
    mask = np.ones(150, dtype=bool)
    counts = np.zeros(150)
    for number in range(400):
        drawn, owner = draw(mask, lengths, documents, 4, 30, [0, number])
        assert len(drawn) == 30
        assert (np.diff(drawn) > 0).all()
        assert (owner == np.searchsorted(np.cumsum(lengths), drawn, side="right")).all()
        counts[drawn] += 1
    assert counts[[39, 99, 149]].sum() == 0  # the last token of each has no label
    possible = np.delete(counts, [39, 99, 149])
    assert possible.mean() == pytest.approx(400 * 30 / 147)
    assert possible.std() < 1.5 * np.sqrt(possible.mean())
    # The same document, with the same share, in other company and at another place.
    first = draw(mask[:80], np.array([40, 40]), np.array([7, 3]), 4, 20, [0, 5])[0]
    other = draw(mask[:80], np.array([40, 40]), np.array([4, 7]), 4, 20, [0, 5])[0]
    assert first[first < 40].tolist() == (other[other >= 40] - 40).tolist()
    again = draw(mask[:80], np.array([40, 40]), np.array([7, 3]), 4, 20, [1, 5])[0]
    assert first.tolist() != again.tolist()


def test_sorting_in_one_number_is_sorting_by_three_keys() -> None:
    rng = np.random.default_rng(0)
    owner = np.sort(rng.integers(0, 50, 2000))
    keys, at = rng.integers(0, 40, 2000).astype(np.uint64), np.arange(2000)  # with ties
    quick = anchors._ranked(owner, keys, at, 50, 2000)
    assert quick.tolist() == anchors._ranked(owner, keys, at, 2**20, 2**40).tolist()
    assert quick.tolist() == at[np.lexsort((at, keys, owner))].tolist()


def test_documents_too_short_for_a_label_are_passed_over(tmp_path: Path) -> None:
    documents = [([5], [1]), *tiny.documents(6), ([6], [1])]
    write_completions(tmp_path / "data", documents, META)
    for packing in (False, True):
        reader = Reader(Completions.open(tmp_path / "data"), replace(PORTIONS, packing=packing))
        found = [i for n in range(reader.batches_per_epoch) for i in reader.batch(n).documents]
        assert sorted(found) == list(range(1, 7))
    write_completions(tmp_path / "short", [([5], [1])], META)
    with pytest.raises(InputError, match="none of its 1 documents has 2 tokens"):
        Reader(Completions.open(tmp_path / "short"), PORTIONS)


def test_data_that_was_measured_and_is_not_the_targets_is_warned_of(tmp_path: Path) -> None:
    said: list[str] = []
    for name, more in (
        ("fine", {"agreement": {"share": 0.98}}),
        ("sampled", {"agreement": {"share": 0.5}, "regenerated": {"temperature": 1.0}}),
        ("anothers", {"agreement": {"share": 0.5}}),
    ):
        write_completions(tmp_path / name, tiny.documents(2), {**META, **more})
        open_completions(tmp_path / name, tmp_path / "cache", said.append)
    assert len(said) == 1
    assert f"warning: data {tmp_path / 'anothers'}: only 50% of its labels" in said[0]


def same(a: data.Batch, b: data.Batch) -> bool:
    fields = ("input_ids", "block_ids", "labels", "weights", "rows")
    return a.documents == b.documents and all(
        np.array_equal(getattr(a, f).numpy(), getattr(b, f).numpy()) for f in fields
    )


def test_a_micro_batch_depends_on_seed_and_number_alone(completions: Completions) -> None:
    reader, again = Reader(completions, PORTIONS), Reader(completions, PORTIONS)
    count = 2 * reader.batches_per_epoch
    forward = [reader.batch(i) for i in range(count)]
    backward = [again.batch(i) for i in reversed(range(count))][::-1]
    assert all(same(a, b) for a, b in zip(forward, backward, strict=True))
    other = Reader(completions, Portions(**{**vars(PORTIONS), "seed": 1}))
    assert [other.batch(i).documents for i in range(count)] != [b.documents for b in forward]


def test_each_epoch_has_every_document_once_in_a_new_order_with_new_anchors(completions: Completions) -> None:
    reader = Reader(completions, PORTIONS)
    per_epoch = reader.batches_per_epoch
    epochs = [[reader.batch(e * per_epoch + i) for i in range(per_epoch)] for e in range(2)]
    for batches in epochs:
        assert Counter(i for b in batches for i in b.documents) == Counter(range(40))
    assert [b.documents for b in epochs[0]] != [b.documents for b in epochs[1]]

    # One document at a time, so that its share of the anchors is the same in both epochs.
    alone = Reader(completions, Portions(**{**vars(PORTIONS), "max_batch_size": 1, "max_anchors": 8}))
    drawn: list[dict[int, list[int]]] = [{}, {}]
    for number in range(80):
        batch = alone.batch(number)
        drawn[number // 40][batch.documents[0]] = batch.blocks.anchors.tolist()
    assert all(drawn[0][document] != drawn[1][document] for document in range(40))


def test_micro_batches_keep_to_their_limits(completions: Completions) -> None:
    reader = Reader(completions, PORTIONS)
    for number in range(reader.batches_per_epoch):
        batch = reader.batch(number)
        assert batch.input_ids.numel() <= PORTIONS.token_budget
        assert len(batch.documents) <= PORTIONS.max_batch_size
        assert batch.blocks.kept <= PORTIONS.max_anchors


def test_blocks_are_sorted_and_valid_and_their_labels_are_the_documents_tokens(
    completions: Completions,
) -> None:
    reader = Reader(completions, PORTIONS)
    for number in range(reader.batches_per_epoch):
        b = reader.batch(number)
        pairs = list(zip(b.blocks.rows.tolist(), b.blocks.anchors.tolist(), strict=True))
        kept, padding = pairs[: b.blocks.kept], pairs[b.blocks.kept :]
        assert kept == sorted(set(kept))
        assert set(padding) <= {(0, 0)}
        for n, (row, anchor) in enumerate(kept):
            ids, mask = completions.document(b.documents[row])
            assert mask[anchor]
            assert b.block_ids[n].tolist() == [ids[anchor], 96, 96, 96]
            for slot in range(4):
                inside = anchor + slot < len(ids)
                counts = slot > 0 and inside and mask[anchor + slot]
                expected = np.float32(np.exp(-(slot - 1) / 2.0)) if counts else 0.0
                assert b.weights[n, slot] == pytest.approx(expected)
                if counts:
                    assert b.labels[n, slot] == ids[anchor + slot]
        assert not b.weights[b.blocks.kept :].any()
        assert b.rows.tolist() == np.flatnonzero(b.weights.numpy().reshape(-1)).tolist()


def test_documents_longer_than_allowed_are_cut(completions: Completions) -> None:
    reader = Reader(completions, Portions(**{**vars(PORTIONS), "max_seq_len": 24}))
    for number in range(reader.batches_per_epoch):
        batch = reader.batch(number)
        assert batch.input_ids.shape[1] <= 24
        assert int(batch.blocks.anchors.max()) < 23


def test_a_document_without_any_supervised_token_gives_no_block(tmp_path: Path) -> None:
    write_completions(tmp_path / "data", [([1, 2, 3], [0, 0, 0]), ([1, 2, 3, 4], [0, 1, 1, 1])], META)
    reader = Reader(Completions.open(tmp_path / "data"), replace(PORTIONS, max_batch_size=1))
    [batch] = [b for b in map(reader.batch, range(2)) if b.documents == [0]]
    assert batch.blocks.kept == 0
    assert len(batch.rows) == 0


def test_data_of_which_nothing_can_be_learnt_is_refused(tmp_path: Path) -> None:
    rows = [([1] * 70, [0] * 70), ([1] * 70, [0] * 64 + [1] * 6)]  # supervised beyond --max-seq-len alone
    write_completions(tmp_path / "data", rows, META)
    found = Completions.open(tmp_path / "data")
    with pytest.raises(InputError, match="in none of its 2 documents is a supervised token followed by"):
        Reader(found, PORTIONS)
    counted = Completions(found.directory, {**found.meta, "supervised_tokens": 0}, found._columns)
    with pytest.raises(InputError, match="in none of its 2 documents"):  # from its count alone
        check_usable(counted, PORTIONS.block_size, 66)
    assert Reader(found, replace(PORTIONS, max_seq_len=66)).batch(0).blocks.kept == 1
    with pytest.raises(
        InputError, match="--block-size 71 is more than the 70 tokens of the longest document"
    ):
        Reader(found, replace(PORTIONS, block_size=71))


def test_an_id_that_was_damaged_is_refused_where_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "BATCH_DOCUMENTS", 2)
    monkeypatch.setattr(disk, "SHARD_BYTES", 1)  # two documents in each file
    rows = [(np.full(20, 30 + i, dtype=np.int32), np.ones(20)) for i in range(6)]
    write_completions(tmp_path / "data", rows, META)
    shard = tmp_path / "data" / "00001.arrow"
    whole = shard.read_bytes()
    place = whole.index(rows[3][0].tobytes())
    for wrong in (123456, -1):
        value = np.int32(wrong).tobytes()
        shard.write_bytes(whole[:place] + value + whole[place + 4 :])
        found = Completions.open(tmp_path / "data")
        reader = Reader(found, PORTIONS)
        says = rf"document 3 \(in 00001\.arrow\) holds the token {wrong}, and none beyond 35 was written"
        with pytest.raises(InputError, match=says):
            [reader.batch(number) for number in range(reader.batches_per_epoch)]
        with pytest.raises(InputError, match=says):
            reader.padded([0, 3])


def test_an_agreement_of_damaged_data_is_not_measured(tmp_path: Path) -> None:
    from trainer import agreement
    from trainer.target import Target

    write_completions(tmp_path / "data", tiny.documents(3), META)
    found = Completions.open(tmp_path / "data")
    found.meta["largest_id"] = 1
    with pytest.raises(InputError, match="it is damaged; copy it again"):
        agreement.measure(Target(tiny.qwen3()), found, 1000)


def test_the_kept_features_do_not_depend_on_what_is_asked_for_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from trainer.features import Features
    from trainer.target import Target

    write_completions(tmp_path / "data", tiny.documents(40), META)
    reader = Reader(Completions.open(tmp_path / "data"), PORTIONS)
    target = Target(tiny.qwen3(), (0, 2))
    numbers = range(2 * reader.batches_per_epoch)  # a resumed run begins in a later epoch
    computed: list[list[list[int]]] = []
    compute = target.features

    def noted(ids: torch.Tensor, *more: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        computed[-1].append(ids.tolist())
        return compute(ids, *more)

    monkeypatch.setattr(target, "features", noted)
    results = []
    for order in (list(numbers), list(reversed(numbers))):
        computed.append([])
        features = Features(target, reader, keep=True, keep_last=True)
        results.append({i: features(reader.batch(i)) for i in order})
    # The same groups side by side, since rounding depends on the shape of a batch.
    assert sorted(computed[0]) == sorted(computed[1])
    ahead, behind = ([found[i] for i in numbers] for found in results)
    plain = Features(target, reader, keep=False)
    for i, a, b in zip(numbers, ahead, behind, strict=True):
        batch = reader.batch(i)
        for x, y, anew in zip(a, b, plain(batch), strict=True):
            assert torch.equal(x, y)
            for row, length in enumerate(batch.lengths):
                torch.testing.assert_close(x[row, :length], anew[row, :length])
    without = Features(target, reader, keep=True)
    taps, last = without(reader.batch(0))
    assert torch.equal(taps, ahead[0][0])
    assert last is None
    first = reader.batch(0)
    assert torch.equal(without.last(first), plain(first)[1])
