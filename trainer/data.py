"""Tokenised completions: how they lie on disk, and in which order and portions they are trained on.

A directory holds ``data.json`` and Arrow files with one row per document: ``input_ids`` (list of int32) and
``loss_mask`` (list of uint8; 1 where the target produced the token). They are memory-mapped, so a data set
may be larger than memory.

Everything drawn here is a function of (seed, epoch) or (seed, epoch, document) alone: no timing, no number of
processes and no resumption changes which anchors a document gets or in which batch it comes.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.blocks import Blocks
from trainer.data_meta import SCHEMA, check_meta, read_meta
from trainer.errors import InputError

SHARD_DOCUMENTS = 65536
BATCH_DOCUMENTS = 4096  # rows of one Arrow record batch
CONTEXT_BUCKET = 64  # the context is cut at a multiple of this, so that few shapes occur
SLOT_BUCKET = 8  # the number of blocks is padded to a multiple of this, for the same reason

Document = tuple[Sequence[int], Sequence[int]]


def write_completions(directory: str | Path, documents: Iterable[Document], meta: dict[str, Any]) -> None:
    """Write (input_ids, loss_mask) pairs as a data directory, which appears by rename when it is complete.

    `meta` needs ``tokenizer`` (`target.tokenizer_digest`) and ``target`` (what the target is called); more
    keys are kept as they are. Raises InputError if `directory` exists or nothing is to be written, OSError if
    the disk is full.
    """
    import pyarrow as pa

    directory = Path(directory)
    if directory.exists():
        raise InputError(f"{directory} exists already: choose another directory, or remove it first")
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(f".{directory.name}.{os.getpid()}")
    partial.mkdir()
    schema = pa.schema([("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.uint8()))])
    shards: list[str] = []
    sums: list[str] = []
    counts = dict.fromkeys(("documents", "tokens", "supervised_tokens", "longest", "largest_id"), 0)
    try:
        stream = iter(documents)
        while shard := list(itertools.islice(stream, SHARD_DOCUMENTS)):
            name = f"{len(shards):05d}.arrow"
            with pa.OSFile(str(partial / name), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
                for start in range(0, len(shard), BATCH_DOCUMENTS):
                    rows = shard[start : start + BATCH_DOCUMENTS]
                    writer.write_batch(_record_batch(rows, schema, counts))
            shards.append(name)
            sums.append(_sha256(partial / name))
        if not shards:
            raise InputError(f"nothing to write to {directory}: there is not one document")
        value = {"schema": SCHEMA, **meta, **counts, "shards": shards, "sha256": sums}
        (partial / "data.json").write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        for path in partial.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        partial.rename(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _record_batch(rows: list[Document], schema: Any, counts: dict[str, int]) -> Any:
    import pyarrow as pa

    for ids, mask in rows:
        if len(ids) != len(mask) or not len(ids):
            raise ValueError(
                f"a document needs as many mask values as ids, at least one: {len(ids)}, {len(mask)}"
            )
        counts["documents"] += 1
        counts["tokens"] += len(ids)
        counts["supervised_tokens"] += int(np.count_nonzero(mask))
        counts["longest"] = max(counts["longest"], len(ids))
        counts["largest_id"] = max(counts["largest_id"], int(np.max(ids)))
    columns = [
        pa.array([np.asarray(row[i], dtype=kind) for row in rows], type=schema.field(i).type)
        for i, kind in enumerate((np.int32, np.uint8))
    ]
    return pa.record_batch(columns, schema=schema)


class Completions:
    """A data directory, memory-mapped."""

    def __init__(self, directory: Path, meta: dict[str, Any], columns: list[tuple[Any, Any, Any]]) -> None:
        self.directory = directory
        self.meta = meta
        self._columns = columns  # per record batch: offsets, ids, mask; all views of the mapped files
        sizes = [len(offsets) - 1 for offsets, _, _ in columns]
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        self.lengths = np.concatenate([np.diff(offsets) for offsets, _, _ in columns])

    @classmethod
    def open(cls, directory: str | Path) -> Completions:
        """Raises InputError, naming the file, if this is no data directory or a file of it is damaged."""
        import pyarrow as pa

        directory = Path(directory)
        meta = read_meta(directory)
        columns = []
        for name in meta["shards"]:
            path = directory / name
            try:
                reader = pa.ipc.open_file(pa.memory_map(str(path)))
                for i in range(reader.num_record_batches):
                    columns.append(_views(reader.get_batch(i)))
            except FileNotFoundError:
                raise InputError(
                    f"--data-dir {directory}: {name} is missing, though data.json lists it"
                ) from None
            except (pa.ArrowException, KeyError, ValueError, OSError) as error:
                raise InputError(f"--data-dir {directory}: {name} is damaged ({str(error)[:200]})") from None
        found = cls(directory, meta, columns)
        if len(found) != meta["documents"]:
            raise InputError(
                f"--data-dir {directory}: data.json promises {meta['documents']} documents, "
                f"there are {len(found)}"
            )
        return found

    def __len__(self) -> int:
        return int(self._starts[-1])

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(input_ids, loss_mask) of one document, as views: do not write to them."""
        batch = int(np.searchsorted(self._starts, index, side="right")) - 1
        offsets, ids, mask = self._columns[batch]
        start, end = offsets[index - self._starts[batch]], offsets[index - self._starts[batch] + 1]
        return ids[start:end], mask[start:end]

    @functools.cached_property
    def digest(self) -> str:
        """Names the data by content: 16 hex digits over data.json and the shards, which are read only where
        data.json does not hold their checksums.
        """
        shards = self.meta["shards"]
        sums = self.meta.get("sha256")
        if not isinstance(sums, list) or len(sums) != len(shards):
            sums = [_sha256(self.directory / name) for name in shards]
        text = json.dumps({**self.meta, "sha256": sums}, sort_keys=True).encode()
        return hashlib.sha256(text).hexdigest()[:16]

    def check_target(self, tokenizer: str, vocab_size: int) -> None:
        """Raises InputError if these ids were made with another tokenizer than the target's."""
        check_meta(self.directory, self.meta, tokenizer, vocab_size)


def _views(batch: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids, mask = batch.column("input_ids"), batch.column("loss_mask")
    offsets = ids.offsets.to_numpy()
    if not np.array_equal(offsets, mask.offsets.to_numpy()):
        raise ValueError("input_ids and loss_mask have different lengths")
    return offsets, ids.values.to_numpy(), mask.values.to_numpy(zero_copy_only=False)


# -- what one document contributes -------------------------------------------------------------------------


def valid_anchors(mask: np.ndarray, block_size: int) -> np.ndarray:
    """Positions that may be an anchor: supervised themselves, and one of their block's labels too."""
    supervised = np.concatenate([[0], np.cumsum(mask != 0)])
    positions = np.arange(len(mask))
    end = np.minimum(positions + block_size, len(mask))
    return positions[(mask != 0) & (supervised[end] > supervised[positions + 1])]


def share(budget: int, counts: Sequence[int]) -> list[int]:
    """Split `budget` in proportion to `counts` (largest remainders first), never more than the count."""
    total = sum(counts)
    if total <= budget:
        return list(counts)
    exact = [budget * count / total for count in counts]
    given = [int(x) for x in exact]
    by_remainder = sorted(range(len(counts)), key=lambda i: (given[i] - exact[i], i))
    for i in by_remainder[: budget - sum(given)]:
        given[i] += 1
    return given


def bucket_length(length: np.ndarray) -> np.ndarray:
    """Round lengths up so that few different ones occur and at most an eighth is padding."""
    step = 2 ** (np.log2(np.maximum(length, 128)).astype(np.int64) - 3)  # 16 at least
    return -(-length // step) * step


# -- micro-batches -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """One micro-batch: b documents padded to S, and N blocks of B slots that hang on them."""

    documents: list[int]  # index of each row's document
    input_ids: Tensor  # [b, S] int64, zero behind each document's end
    lengths: list[int]  # tokens of each row without padding
    blocks: Blocks
    block_ids: Tensor  # [N, B] int64: the anchor's token, then mask tokens
    labels: Tensor  # [N, B] int64: the document's token at anchor + slot; 0 where there is none
    weights: Tensor  # [N, B] float32: decay where the slot counts, else 0 (slot 0, unsupervised, padding)
    rows: Tensor  # [M] int64: the slots with a weight, as indices into N·B

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def to(self, device: torch.device | str) -> Batch:
        moved = {
            name: getattr(self, name).to(device)
            for name in ("input_ids", "blocks", "block_ids", "labels", "weights", "rows")
        }
        return replace(self, **moved)


@dataclass(frozen=True)
class Portions:
    """How a data set is cut into micro-batches."""

    token_budget: int  # at most so many positions, padding included
    max_batch_size: int  # at most so many documents
    max_seq_len: int  # documents are cut here
    block_size: int
    max_anchors: int  # blocks of a micro-batch, shared by its documents
    gamma: float  # decay: slot k weighs exp(-(k - 1) / gamma)
    mask_token_id: int
    sliding_window: int | None = None  # of the drafter's attention
    seed: int = 0


class Reader:
    """The micro-batches of a data set by number: batch i is the same whenever it is asked for."""

    def __init__(self, completions: Completions, portions: Portions) -> None:
        self.completions = completions
        self.portions = portions
        lengths = np.minimum(completions.lengths.astype(np.int64), portions.max_seq_len)
        self._padded = np.minimum(bucket_length(lengths), portions.max_seq_len)
        self._order: tuple[int, list[np.ndarray]] | None = None
        self.batches_per_epoch = len(self.order(0))

    def order(self, epoch: int) -> list[np.ndarray]:
        """The documents of each micro-batch of `epoch`. Its length is the same for every epoch."""
        if self._order is None or self._order[0] != epoch:
            rng = np.random.default_rng([self.portions.seed, epoch])
            batches = []
            for length in np.unique(self._padded):
                members = rng.permutation(np.flatnonzero(self._padded == length))
                size = self._documents_of(int(length))
                batches += [members[i : i + size] for i in range(0, len(members), size)]
            self._order = (epoch, [batches[i] for i in rng.permutation(len(batches))])
        return self._order[1]

    def batch(self, number: int) -> Batch:
        """Micro-batch `number`, counted from 0 through all epochs."""
        epoch, index = divmod(number, self.batches_per_epoch)
        members = [int(i) for i in self.order(epoch)[index]]
        return self._collate(members, epoch)

    def length(self, document: int) -> int:
        """Tokens of a document as it is trained on: cut at the longest allowed."""
        return min(int(self.completions.lengths[document]), self.portions.max_seq_len)

    def groups(self) -> list[np.ndarray]:
        """All documents in fixed groups of like length, none larger than a micro-batch: the same for every
        epoch and seed.
        """
        found = []
        for length in np.unique(self._padded):
            members = np.flatnonzero(self._padded == length)
            size = self._documents_of(int(length))
            found += [members[i : i + size] for i in range(0, len(members), size)]
        return found

    def _documents_of(self, length: int) -> int:
        """How many documents of a padded length make a micro-batch."""
        return max(1, min(self.portions.max_batch_size, self.portions.token_budget // length))

    def padded(self, members: Sequence[int] | np.ndarray, extra: int = 0) -> np.ndarray:
        """Token ids [documents, S + extra], zero behind each document's end."""
        width = int(self._padded[members].max())
        tokens = np.zeros((len(members), width + extra), dtype=np.int64)
        for row, member in enumerate(members):
            length = self.length(int(member))
            tokens[row, :length] = self.completions.document(int(member))[0][:length]
        return tokens

    def _collate(self, members: list[int], epoch: int) -> Batch:
        p = self.portions
        masks = [self.completions.document(i)[1][: p.max_seq_len] for i in members]
        # Wider than the batch, so that the labels of a block at the very end stay inside.
        tokens = self.padded(members, extra=p.block_size)
        width = tokens.shape[1] - p.block_size
        supervised = np.zeros(tokens.shape, dtype=bool)
        for row, mask in enumerate(masks):
            supervised[row, : len(mask)] = mask != 0

        candidates = [valid_anchors(mask, p.block_size) for mask in masks]
        quotas = share(p.max_anchors, [len(c) for c in candidates])
        rows: list[int] = []
        anchors: list[int] = []
        for row, (member, valid, quota) in enumerate(zip(members, candidates, quotas, strict=True)):
            rng = np.random.default_rng([p.seed, epoch, member])
            chosen = np.sort(rng.permutation(valid)[:quota])
            rows += [row] * quota
            anchors += chosen.tolist()

        slots = min(-(-max(len(anchors), 1) // SLOT_BUCKET) * SLOT_BUCKET, max(p.max_anchors, 1))
        blocks = Blocks.build(
            rows, anchors, p.block_size, slots=slots, bucket=CONTEXT_BUCKET, window=p.sliding_window
        )
        blocks = replace(blocks, context_length=min(blocks.context_length, width))
        documents, positions = blocks.rows.numpy()[:, None], blocks.positions.numpy()
        labels = tokens[documents, positions]
        slot = np.arange(p.block_size)
        decay = np.exp(-(slot - 1) / p.gamma) * (slot > 0)
        kept = np.arange(len(blocks))[:, None] < blocks.kept
        weights = np.where(supervised[documents, positions] & kept, decay, 0.0).astype(np.float32)
        block_ids = np.full(labels.shape, p.mask_token_id, dtype=np.int64)
        block_ids[:, 0] = labels[:, 0]
        return Batch(
            documents=members,
            input_ids=torch.from_numpy(np.ascontiguousarray(tokens[:, :width])),
            lengths=[len(mask) for mask in masks],
            blocks=blocks,
            block_ids=torch.from_numpy(block_ids),
            labels=torch.from_numpy(labels),
            weights=torch.from_numpy(weights),
            rows=torch.from_numpy(np.flatnonzero(weights.reshape(-1))),
        )
