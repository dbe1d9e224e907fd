"""Completions that another trainer tokenised: Arrow is mapped where it lies, parquet converted once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny

from trainer.completions import Completions, write_completions
from trainer.data import Portions, Reader
from trainer.data_meta import known_meta
from trainer.errors import InputError
from trainer.foreign import open_completions

ROWS = tiny.documents(30)


def table(mask: str = "loss_mask", kind: Any = None, **more: Any) -> pa.Table:
    marks = [m.tolist() for _, m in ROWS]
    if mask == "labels":
        marks = [np.where(m, ids, -100).tolist() for ids, m in ROWS]
    if kind == pa.bool_():
        marks = [[bool(value) for value in row] for row in marks]
    columns = {"input_ids": [ids.tolist() for ids, _ in ROWS], **more}
    made = pa.table(columns)
    return made.append_column(mask, pa.array(marks, type=pa.list_(kind) if kind else None))


def arrow_stream(path: Path, made: pa.Table) -> None:
    """As `datasets` saves it."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, made.schema) as writer:
        writer.write_table(made, max_chunksize=7)


class Said(list[str]):
    def __call__(self, text: str) -> None:
        self.append(text)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "theirs").mkdir()
    return tmp_path


def opened(place: Path) -> tuple[Completions, str]:
    said = Said()
    return open_completions(place / "theirs", place / "cache", said), "\n".join(said)


def same(found: Completions) -> bool:
    return len(found) == len(ROWS) and all(
        np.array_equal(found.document(i)[0], ids) and np.array_equal(found.document(i)[1] != 0, mask != 0)
        for i, (ids, mask) in enumerate(ROWS)
    )


def test_arrow_is_read_through_once_and_mapped_where_it_lies(place: Path) -> None:
    made = table(kind=pa.int64(), length=[len(ids) for ids, _ in ROWS])
    arrow_stream(place / "theirs" / "data-00000-of-00002.arrow", made.slice(0, 12))
    arrow_stream(place / "theirs" / "data-00001-of-00002.arrow", made.slice(12))
    (place / "theirs" / "dataset_info.json").write_text("{}")
    found, said = opened(place)
    assert same(found)
    assert "read through once, then mapped where it lies" in said
    assert "does not say with which tokenizer" in said
    assert found.meta["tokens"] == sum(len(ids) for ids, _ in ROWS)
    assert found.meta["supervised_tokens"] == sum(int(mask.sum()) for _, mask in ROWS)
    again, said = opened(place)
    assert same(again)
    assert "read through" not in said
    assert again.digest == found.digest
    assert [path.suffix for path in (place / "cache").iterdir() if path.name[0] != "."] == [".json"]
    batch = Reader(found, Portions(256, 8, 64, 4, 20, 2.0, 96)).batch(0)  # its own types of numbers
    assert batch.blocks.kept


@pytest.mark.parametrize("mask", ["loss_mask", "labels", "completion_mask"])
@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_what_cannot_be_mapped_is_converted_once(place: Path, mask: str, ending: str) -> None:
    made = table(mask, None if mask == "labels" else pa.bool_() if ending == "arrow" else pa.int8())
    if ending == "parquet":
        pq.write_table(made.slice(0, 20), place / "theirs" / "a.parquet")
        pq.write_table(made.slice(20), place / "theirs" / "b.parquet")
    else:
        arrow_stream(place / "theirs" / "a.arrow", made)
    found, said = opened(place)
    assert same(found)
    assert "converted once" in said
    again, said = opened(place)
    assert same(again)
    assert "converted" not in said
    shard = next((place / "cache").glob("data-*/00000.arrow"))
    shard.write_bytes(shard.read_bytes()[:100])  # a damaged copy is made anew
    found, said = opened(place)
    assert same(found)
    assert "converted once" in said


def test_a_file_that_was_changed_is_read_anew(place: Path) -> None:
    pq.write_table(table(), place / "theirs" / "a.parquet")
    first, _ = opened(place)
    pq.write_table(table().slice(0, 5), place / "theirs" / "a.parquet")
    os.utime(place / "theirs" / "a.parquet", ns=(1, 1))
    second, _ = opened(place)
    assert (len(first), len(second)) == (30, 5)
    assert first.digest != second.digest


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (pa.table({"text": ["x"]}), "a.parquet has the columns text, and needs input_ids and loss_mask"),
        (pa.table({"input_ids": [[1, 2]], "loss_mask": [[1]]}), "have different lengths"),
        (pa.table({"input_ids": [[1, None]], "loss_mask": [[1, 1]]}), "no whole number"),
        (pa.table({"input_ids": [[1, float("nan")]], "loss_mask": [[1, 1]]}), "no whole number"),
        (pa.table({"input_ids": [[1, -5]], "loss_mask": [[1, 1]]}), "a token id is negative"),
        (pa.table({"input_ids": [[]], "loss_mask": [[]]}), "no whole number|not one document"),
        (
            pa.table({"input_ids": [[1, 2]], "loss_mask": [None]}),
            "the column loss_mask of a.parquet holds null",
        ),
        (pa.table({"input_ids": [1], "loss_mask": [[1]]}), "the column input_ids of a.parquet holds int64"),
        (pa.table({"input_ids": [[1, 1 << 31]], "loss_mask": [[1, 1]]}), "has more than 31 bits"),
        (table().slice(0, 0), "there is not one document in it"),
        (None, "a.parquet is damaged"),
    ],
)
def test_what_is_no_data_is_refused_in_one_sentence(place: Path, made: pa.Table | None, says: str) -> None:
    if made is None:
        (place / "theirs" / "a.parquet").write_bytes(b"PAR1 and nothing")
    else:
        pq.write_table(made, place / "theirs" / "a.parquet")
    with pytest.raises(InputError, match=says) as caught:
        opened(place)
    assert "\n" not in str(caught.value)
    assert f"--data-dir {place / 'theirs'}: " in str(caught.value)
    assert [path for path in (place / "cache").iterdir() if path.suffix != ".lock"] == []


def test_arrow_without_a_document_or_cut_off_is_refused(place: Path) -> None:
    made = table(kind=pa.int64())
    arrow_stream(place / "theirs" / "a.arrow", made.slice(0, 0))
    with pytest.raises(InputError, match="there is not one document in it"):
        opened(place)
    arrow_stream(place / "theirs" / "a.arrow", made)
    whole = (place / "theirs" / "a.arrow").read_bytes()
    (place / "theirs" / "a.arrow").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"a\.arrow is damaged"):
        opened(place)


def test_ours_without_its_description_is_not_taken_for_anothers(place: Path) -> None:
    write_completions(place / "ours", ROWS, {"tokenizer": "x", "target": "y"})
    (place / "ours" / "data.json").unlink()
    with pytest.raises(InputError, match=r"it has no data\.json"):
        open_completions(place / "ours", place / "cache", Said())
    with pytest.raises(InputError, match="holds no tokenised completions"):
        open_completions(place, place / "cache", Said())


def test_ids_beyond_the_vocabulary_are_refused_where_the_tokenizer_is_not_known(place: Path) -> None:
    pq.write_table(table(), place / "theirs" / "a.parquet")
    found, _ = opened(place)
    found.check_target("anything", 97)
    for _ in range(2):  # as it was converted, and as it was kept
        with pytest.raises(InputError, match="beyond the target's vocabulary of 50") as caught:
            found.check_target("anything", 50)
        assert f"--data-dir {place / 'theirs'}: " in str(caught.value)
        assert found.digest
        found, _ = opened(place)
    assert known_meta(place / "theirs")["documents"] is None
