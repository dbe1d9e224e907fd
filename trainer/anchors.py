"""Which positions of a micro-batch's documents become anchors: who may, how many each gets, which ones.

Documents lie behind one another in flat arrays here, whatever rows they are in: a micro-batch is drawn with a
few operations on arrays, not document by document.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

HASH_BITS = 31
_GOLDEN, _FIRST, _SECOND = (
    np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def valid_anchors(mask: np.ndarray, block_size: int, ends: np.ndarray | None = None) -> np.ndarray:
    """Positions that may be an anchor: supervised themselves, and one of their block's labels too.

    mask [T] of one document, or of several behind one another; `ends` [T] is then where each position's
    document ends, since labels do not go beyond.
    """
    supervised = np.zeros(len(mask) + 1, dtype=np.int32)
    np.cumsum(mask != 0, out=supervised[1:])
    end = np.minimum(np.arange(block_size, block_size + len(mask)), len(mask) if ends is None else ends)
    return np.flatnonzero((mask != 0) & (supervised[end] > supervised[1:]))


def share(budget: int, counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """Split `budget` in proportion to `counts` (largest remainders first), never more than the count."""
    counts = np.asarray(counts, dtype=np.int64)
    total = int(counts.sum())
    if total <= budget:
        return counts
    given, remainders = np.divmod(budget * counts, total)
    by_remainder = np.argsort(-remainders, kind="stable")
    given[by_remainder[: budget - int(given.sum())]] += 1
    return given


def draw(
    mask: np.ndarray,
    lengths: np.ndarray,
    documents: np.ndarray,
    block_size: int,
    budget: int,
    seed: Sequence[int],
) -> tuple[np.ndarray, np.ndarray]:
    """At most `budget` anchors in documents behind one another.

    mask [T], lengths [D] with sum T, documents [D]: their numbers. Returns the anchors as positions in
    [0, T), sorted, and for each the index of its document in [0, D). Which ones a document gets depends on
    `seed`, its number and its share alone.
    """
    ends = np.cumsum(lengths)
    valid = valid_anchors(mask, block_size, np.repeat(ends, lengths))
    owner = np.searchsorted(ends, valid, side="right")
    counts = np.bincount(owner, minlength=len(lengths))
    quotas = share(budget, counts)
    if len(valid) > budget:
        keys = _hashes(seed, documents[owner], valid - (ends - lengths)[owner])
        ranked = _ranked(owner, keys, valid, len(lengths), len(mask))
        rank = np.arange(len(valid)) - np.repeat(np.cumsum(counts) - counts, counts)
        valid = np.sort(ranked[rank < np.repeat(quotas, counts)])
        owner = np.repeat(np.arange(len(lengths)), quotas)
    return valid, owner


def _ranked(owner: np.ndarray, keys: np.ndarray, valid: np.ndarray, documents: int, total: int) -> np.ndarray:
    """`valid` in order of owner, then key, then position."""
    positions = total.bit_length()
    if HASH_BITS + positions + documents.bit_length() > 64:
        return valid[np.lexsort((valid, keys, owner))]
    # All three in one number each: sorting numbers is several times quicker than sorting by three keys.
    upper = (owner.astype(np.uint64) << np.uint64(HASH_BITS)) | keys
    joined = np.sort((upper << np.uint64(positions)) | valid.astype(np.uint64))
    return (joined & np.uint64((1 << positions) - 1)).astype(np.int64)


def _hashes(seed: Sequence[int], documents: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """`HASH_BITS` random bits for each (document, position): splitmix64 over all parts of the seed."""
    state = np.zeros(1, dtype=np.uint64)
    for part in seed:
        state = _mix(state ^ np.uint64(part & (2**64 - 1)))
    return _mix(_mix(state ^ documents.astype(np.uint64)) ^ positions.astype(np.uint64)) >> np.uint64(
        64 - HASH_BITS
    )


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))
