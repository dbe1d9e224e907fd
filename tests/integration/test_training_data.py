"""Training on data of every origin: the whole way, as a process."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import tiny
import trainings


def test_another_trainers_parquet_is_trained_on_packed(tmp_path: Path) -> None:
    target = tiny.target_directory(tmp_path / "target")
    (tmp_path / "theirs").mkdir()
    rows = tiny.documents(24)
    columns = {"input_ids": [ids.tolist() for ids, _ in rows], "loss_mask": [m.tolist() for _, m in rows]}
    pq.write_table(pa.table(columns), tmp_path / "theirs" / "part-0.parquet")
    given = tiny.flags(
        target,
        tmp_path / "theirs",
        tmp_path / "out",
        max_steps=3,
        packing=True,
        max_seq_len=128,
        cache_dir=tmp_path / "cache",
    )
    result = trainings.trainer(given)
    assert result.returncode == 0, result.stderr
    assert "another trainer's, 1 files" in result.stdout  # before it was read
    assert "cannot be mapped into memory as it is; it is converted once" in result.stdout
    assert "does not say with which tokenizer" in result.stdout
    assert "data 24 documents" in result.stdout
    assert "finished at step 3" in result.stdout
