"""The largest micro-batch is at least as large as every real one."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny

from trainer.completions import Completions
from trainer.data import Portions, Reader
from trainer.worst import described, worst_batches


def reader(home: Path, **changes: object) -> Reader:
    target = tiny.target_directory(home / "target")
    data = tiny.data_directory(home / "data", target, count=40)
    chosen = {
        "token_budget": 256, "max_batch_size": 64, "max_seq_len": 64, "block_size": 4, "max_anchors": 24,
        "gamma": 4.0, "mask_token_id": 96, **changes,
    }  # fmt: skip
    return Reader(Completions.open(data), Portions(**chosen))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [{}, {"packing": True}, {"max_anchors": 500}, {"max_batch_size": 3}, {"token_budget": 64}],
)
def test_no_micro_batch_is_larger_than_the_largest(tmp_path: Path, changes: dict[str, object]) -> None:
    read = reader(tmp_path, **changes)
    worst = worst_batches(read)
    for number in range(2 * read.batches_per_epoch):
        real = read.batch(number)
        assert any(
            real.input_ids.numel() <= one.input_ids.numel()
            and len(real.blocks) <= len(one.blocks)
            and real.blocks.context_length <= one.blocks.context_length
            and len(real.rows) <= len(one.rows)
            for one in worst
        )
        assert (real.positions is None) == (worst[0].positions is None)
    for one in worst:
        assert one.documents == one.spans == []
        assert int(one.blocks.anchors.max()) < one.input_ids.shape[1]


def test_it_is_described_by_what_a_flag_can_make_smaller(tmp_path: Path) -> None:
    assert described(worst_batches(reader(tmp_path))[0]) == "4 × 64 positions with 24 blocks of 4"
