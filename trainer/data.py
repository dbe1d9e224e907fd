"""Micro-batches of tokenised completions: in which order and portions they are trained on.

Everything drawn here is a function of (seed, epoch) or (seed, epoch, document) alone: no timing, no number of
processes and no resumption changes which anchors a document gets or in which batch it comes. What is kept in
memory of a document is a few numbers in arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.anchors import draw, share, valid_anchors
from trainer.blocks import Blocks
from trainer.completions import Completions, Document, write_completions
from trainer.config import Settings
from trainer.data_meta import check_length
from trainer.errors import InputError
from trainer.packing import pack, rounded

__all__ = [  # what the data is made of can be had from here, too
    "Batch",
    "Completions",
    "Document",
    "Portions",
    "Reader",
    "bucket_length",
    "share",
    "valid_anchors",
    "write_completions",
]

CONTEXT_BUCKET = 64  # the context is cut at a multiple of this, so that few shapes occur
SLOT_BUCKET = 8  # the number of blocks is padded to a multiple of this, for the same reason
SHORTEST = 2  # tokens: an anchor and a label


def bucket_length(length: np.ndarray) -> np.ndarray:
    """Round lengths up so that few different ones occur and at most an eighth is padding."""
    step = 2 ** (np.log2(np.maximum(length, 128)).astype(np.int64) - 3)  # 16 at least
    return -(-length // step) * step


@dataclass(frozen=True)
class Batch:
    """One micro-batch: D documents in b rows padded to S, and N blocks of B slots that hang on them.

    Without packing a row is a document.
    """

    documents: list[int]  # [D] numbers of the documents, row by row
    places: list[tuple[int, int]]  # [D] row of each, and where it begins there
    lengths: list[int]  # [D] tokens of each
    input_ids: Tensor  # [b, S] int64, zero behind the last document of a row
    positions: Tensor | None  # [b, S] int64: begins at 0 with each document; None without packing
    blocks: Blocks
    block_ids: Tensor  # [N, B] int64: the anchor's token, then mask tokens
    labels: Tensor  # [N, B] int64: the document's token at anchor + slot; 0 where there is none
    weights: Tensor  # [N, B] float32: decay where the slot counts, else 0 (slot 0, unsupervised, padding)
    rows: Tensor  # [M] int64: the slots with a weight, as indices into N·B

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def spans(self) -> list[tuple[int, int, int, int]]:
        """(document, its row, where it begins there, tokens) of each."""
        known = zip(self.documents, self.places, self.lengths, strict=True)
        return [(document, *place, length) for document, place, length in known]

    def to(self, device: torch.device | str) -> Batch:
        """On a GPU the copies are only begun: what follows there waits for them."""
        return replace(
            self,
            blocks=self.blocks.to(device),
            **{name: value.to(device, non_blocking=True) for name, value in self._tensors().items()},
        )

    def pinned(self) -> Batch:
        """In memory from which a GPU copies by itself."""
        return replace(self, **{name: value.pin_memory() for name, value in self._tensors().items()})

    def _tensors(self) -> dict[str, Any]:
        names = ("input_ids", "positions", "block_ids", "labels", "weights", "rows")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True)
class Portions:
    """How a data set is cut into micro-batches."""

    token_budget: int  # at most so many positions, padding included
    max_batch_size: int  # at most so many rows
    max_seq_len: int  # documents are cut here; with packing the length of a row
    block_size: int
    max_anchors: int  # blocks of a micro-batch, shared by its documents
    gamma: float  # decay: slot k weighs exp(-(k - 1) / gamma)
    mask_token_id: int
    sliding_window: int | None = None  # of the drafter's attention
    seed: int = 0
    packing: bool = False

    @classmethod
    def of(cls, settings: Settings, mask_token_id: int) -> Portions:
        return cls(
            token_budget=settings.token_budget,
            max_batch_size=settings.max_batch_size,
            max_seq_len=settings.max_seq_len,
            block_size=settings.block_size,
            max_anchors=settings.max_anchors,
            gamma=settings.decay,
            mask_token_id=mask_token_id,
            sliding_window=settings.sliding_window,
            seed=settings.seed,
            packing=settings.packing,
        )


@dataclass(frozen=True)
class Order:
    """The documents of an epoch, micro-batch after micro-batch."""

    documents: np.ndarray  # [D]
    rows: np.ndarray  # [D] row of each in its micro-batch
    bounds: np.ndarray  # [micro-batches + 1]: where in these each begins

    def __len__(self) -> int:
        return len(self.bounds) - 1


def _runs(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Indices starts[0], starts[0] + 1, … (counts[0] of them), starts[1], …"""
    ends = np.cumsum(counts)
    return np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1])


def check_usable(completions: Completions, block_size: int, max_seq_len: int) -> None:
    """Raises InputError for data of which nothing can be learnt: see `Reader`. Of sound data it reads the
    first document alone, and none where its counts say already that nothing is supervised.
    """
    lengths = completions.lengths
    if int(lengths.max(initial=0)) < SHORTEST:
        raise InputError(
            f"--data-dir {completions.directory}: none of its {len(completions):,} documents has "
            f"{SHORTEST} tokens, so there is nothing to learn from; prepare it again"
        )
    check_length(completions.directory, int(lengths.max()), block_size)
    some = completions.meta.get("supervised_tokens") != 0
    for document in np.flatnonzero(lengths >= SHORTEST).tolist() if some else ():
        mask = completions.document(document)[1][:max_seq_len]
        if len(valid_anchors(mask, block_size)):
            return
    raise InputError(
        f"--data-dir {completions.directory}: in none of its {len(completions):,} documents "
        f"is a supervised token followed by another within a block of {block_size} and the "
        f"first {max_seq_len:,} tokens, so there is nothing to learn of it; prepare it "
        "again with answers that are supervised (loss_mask 1)"
    )


class Reader:
    """The micro-batches of a data set by number: batch i is the same whenever it is asked for.

    Raises InputError if no document has the two supervised tokens that an anchor and a label need, or if none
    is as long as a block.
    """

    def __init__(self, completions: Completions, portions: Portions) -> None:
        self.completions = completions
        self.portions = portions
        self._lengths = np.minimum(completions.lengths.astype(np.int64), portions.max_seq_len)
        self._padded = np.minimum(bucket_length(self._lengths), portions.max_seq_len)
        self._usable = np.flatnonzero(self._lengths >= SHORTEST)
        check_usable(completions, portions.block_size, portions.max_seq_len)
        if portions.packing:
            self._packed_lengths = rounded(self._lengths, portions.max_seq_len)
            lengths = np.sort(self._packed_lengths[self._usable])[::-1]
            bins = pack(lengths, portions.max_seq_len)
            self._by_bin = np.argsort(bins, kind="stable")
            self._bin_sizes = np.bincount(bins)
        self._order: tuple[int, Order] | None = None
        self.batches_per_epoch = len(self.order(0))

    def order(self, epoch: int) -> Order:
        """Which documents come together in `epoch`, and when. Its length is the same for every epoch."""
        if self._order is None or self._order[0] != epoch:
            rng = np.random.default_rng([self.portions.seed, epoch])
            self._order = (epoch, self._packed(rng) if self.portions.packing else self._bucketed(rng))
        return self._order[1]

    def _bucketed(self, rng: np.random.Generator) -> Order:
        """Documents of like length side by side, one in a row."""
        members, sizes = [], []
        for length, bucket in self._buckets():
            members.append(rng.permutation(bucket))
            full, rest = divmod(len(bucket), size := self._documents_of(length))
            sizes.append(np.array([size] * full + [rest] * (rest > 0)))
        counts = np.concatenate(sizes)
        shuffled = rng.permutation(len(counts))
        starts, counts = (np.cumsum(counts) - counts)[shuffled], counts[shuffled]
        bounds = np.concatenate([[0], np.cumsum(counts)])
        documents = np.concatenate(members)[_runs(starts, counts)]
        return Order(documents, np.arange(len(documents)) - np.repeat(bounds[:-1], counts), bounds)

    def _packed(self, rng: np.random.Generator) -> Order:
        """Rows of several documents; documents of one length change places."""
        drawn = rng.permutation(self._usable)
        drawn = drawn[np.argsort(-self._packed_lengths[drawn], kind="stable")]
        shuffled = rng.permutation(len(self._bin_sizes))
        starts = (np.cumsum(self._bin_sizes) - self._bin_sizes)[shuffled]
        counts = self._bin_sizes[shuffled]
        row = np.repeat(np.arange(len(counts)), counts)
        batch, row = np.divmod(row, self._documents_of(self.portions.max_seq_len))
        bounds = np.searchsorted(batch, np.arange(batch[-1] + 2))
        return Order(drawn[self._by_bin[_runs(starts, counts)]], row, bounds)

    def batch(self, number: int) -> Batch:
        """Micro-batch `number`, counted from 0 through all epochs."""
        epoch, index = divmod(number, self.batches_per_epoch)
        order = self.order(epoch)
        part = slice(order.bounds[index], order.bounds[index + 1])
        return self._collate(order.documents[part], order.rows[part], epoch)

    def length(self, document: int) -> int:
        """Tokens of a document as it is trained on: cut at the longest allowed."""
        return int(self._lengths[document])

    def _buckets(self) -> list[tuple[int, np.ndarray]]:
        """Documents by padded length, each bucket in the order of their numbers."""
        padded = self._padded[self._usable]
        by_length = self._usable[np.argsort(padded, kind="stable")]
        found, starts = np.unique(np.sort(padded), return_index=True)
        return list(zip(found.tolist(), np.split(by_length, starts[1:]), strict=True))

    def shapes(self) -> list[tuple[int, int]]:
        """(rows, positions) of the largest micro-batch of each padded length; none is larger."""
        if self.portions.packing:
            length = self.portions.max_seq_len
            return [(min(len(self._bin_sizes), self._documents_of(length)), length)]
        return [(min(len(bucket), self._documents_of(length)), length) for length, bucket in self._buckets()]

    def groups(self) -> list[np.ndarray]:
        """All documents in fixed groups of like length, none larger than a micro-batch: the same for every
        epoch and seed.
        """
        return [
            bucket[i : i + size]
            for length, bucket in self._buckets()
            for size in [self._documents_of(length)]
            for i in range(0, len(bucket), size)
        ]

    def _documents_of(self, length: int) -> int:
        """How many rows of a padded length make a micro-batch."""
        return max(1, min(self.portions.max_batch_size, self.portions.token_budget // length))

    def padded(self, members: Sequence[int] | np.ndarray) -> np.ndarray:
        """Token ids of documents, one in a row: [documents, S], zero behind each document's end."""
        tokens = np.zeros((len(members), int(self._padded[members].max())), dtype=np.int64)
        for row, member in enumerate(members):
            length = self.length(int(member))
            tokens[row, :length] = self.completions.document(int(member))[0][:length]
        self.completions.check_ids(tokens, members)
        return tokens

    def _collate(self, documents: np.ndarray, rows: np.ndarray, epoch: int) -> Batch:
        p = self.portions
        lengths = self._lengths[documents]
        cut = list(zip(self.completions.documents(documents), lengths.tolist(), strict=True))
        ids = np.concatenate([ids[:length] for (ids, _), length in cut]).astype(np.int64, copy=False)
        self.completions.check_ids(ids, documents)
        mask = np.concatenate([mask[:length] for (_, mask), length in cut]) != 0
        ends = np.cumsum(lengths)
        firsts = np.searchsorted(rows, np.arange(rows[-1] + 1))  # each row's first document
        begins = (ends - lengths) - (ends - lengths)[firsts][rows]  # of each document in its row

        longest = np.array(int((begins + lengths).max()))
        width = min(int(bucket_length(longest)), p.max_seq_len)
        tokens = np.zeros((len(firsts), width), dtype=np.int64)
        flat = _runs(rows * width + begins, lengths)  # where each token stands in `tokens`
        tokens.reshape(-1)[flat] = ids
        positions = None
        if p.packing:
            positions = np.zeros_like(tokens)
            positions.reshape(-1)[flat] = np.arange(len(ids)) - np.repeat(ends - lengths, lengths)

        anchors, owner = draw(mask, lengths, documents, p.block_size, p.max_anchors, [p.seed, epoch])
        in_row = anchors - (ends - lengths - begins)[owner]
        slots = min(-(-max(len(anchors), 1) // SLOT_BUCKET) * SLOT_BUCKET, max(p.max_anchors, 1))
        blocks = Blocks.build(
            rows[owner].tolist(),
            in_row.tolist(),
            p.block_size,
            starts=begins[owner].tolist() if p.packing else None,
            slots=slots,
            bucket=CONTEXT_BUCKET,
            window=p.sliding_window,
        )
        blocks = replace(blocks, context_length=min(blocks.context_length, width))
        slot = np.arange(p.block_size)
        stands = anchors[:, None] + slot
        inside = stands < ends[owner][:, None]
        stands = np.minimum(stands, len(ids) - 1)
        decay = np.exp(-(slot - 1) / p.gamma) * (slot > 0)
        labels = np.zeros((len(blocks), p.block_size), dtype=np.int64)
        weights = np.zeros(labels.shape, dtype=np.float32)
        labels[: len(anchors)] = np.where(inside, ids[stands], 0)
        weights[: len(anchors)] = np.where(inside & mask[stands], decay, 0.0)
        block_ids = np.full(labels.shape, p.mask_token_id, dtype=np.int64)
        block_ids[:, 0] = labels[:, 0]
        return Batch(
            documents=documents.tolist(),
            places=list(zip(rows.tolist(), begins.tolist(), strict=True)),
            lengths=lengths.tolist(),
            input_ids=torch.from_numpy(tokens),
            positions=None if positions is None else torch.from_numpy(positions),
            blocks=blocks,
            block_ids=torch.from_numpy(block_ids),
            labels=torch.from_numpy(labels),
            weights=torch.from_numpy(weights),
            rows=torch.from_numpy(np.flatnonzero(weights.reshape(-1))),
        )
