"""What reading data costs: python bench/reading.py [--documents 1000000] [--rounds 40]

A synthetic data set (lengths as of chats: log-normal, 190 tokens on average) is opened, and micro-batches of
49,152 positions with 1,024 anchors of 32 slots are made ready, packed and not. Taken in turns with the way
that comes to mind first: a list with one entry per document, and a micro-batch put together document by
document (one random generator, one permutation and one padded row each). That way packs nothing, so packed
batches are compared by the time for each token.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench._results import record  # noqa: E402
from trainer.anchors import share, valid_anchors  # noqa: E402
from trainer.blocks import Blocks  # noqa: E402
from trainer.completions import Completions, Writer, mapped  # noqa: E402
from trainer.data import Portions, Reader  # noqa: E402

NAIVE_OPEN = "a list of documents"
NAIVE_BATCH = "document by document"


def make(place: Path, documents: int) -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.0, 0.7, documents).astype(int), 8, 4096)
    text = rng.integers(0, 150_000, 10_000_000).astype(np.int32)
    mask = np.ones(4096, dtype=np.uint8)
    mask[:4] = 0
    with Writer(place, {"tokenizer": "bench", "target": "bench"}) as writer:
        for i, length in enumerate(lengths.tolist()):
            start = i * 7919 % (len(text) - 4096)
            writer.add(text[start : start + length], mask[:length])
        writer.finish()


def naive_open(place: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    shards = json.loads((place / "data.json").read_text())["shards"]
    return [
        (ids[start:end], mask[start:end])
        for offsets, ids, mask in mapped(place, place, shards)
        for start, end in itertools.pairwise(offsets)
    ]


def naive_batch(completions: Completions, members: list[int], p: Portions, epoch: int) -> Any:
    """Ids, labels and weights of a micro-batch, a document at a time."""
    masks = [completions.document(i)[1] for i in members]
    tokens = np.zeros((len(members), max(map(len, masks)) + p.block_size), dtype=np.int64)
    supervised = np.zeros(tokens.shape, dtype=bool)
    for row, (member, mask) in enumerate(zip(members, masks, strict=True)):
        tokens[row, : len(mask)] = completions.document(member)[0]
        supervised[row, : len(mask)] = mask != 0
    candidates = [valid_anchors(mask, p.block_size) for mask in masks]
    quotas = share(p.max_anchors, [len(c) for c in candidates]).tolist()
    rows: list[int] = []
    anchors: list[int] = []
    for row, (member, valid, quota) in enumerate(zip(members, candidates, quotas, strict=True)):
        rng = np.random.default_rng([p.seed, epoch, member])
        rows += [row] * quota
        anchors += np.sort(rng.permutation(valid)[:quota]).tolist()
    blocks = Blocks.build(rows, anchors, p.block_size)
    at = blocks.rows.numpy()[:, None], blocks.positions.numpy()
    decay = np.exp(-(np.arange(p.block_size) - 1) / p.gamma) * (np.arange(p.block_size) > 0)
    return tokens, tokens[at], np.where(supervised[at], decay, 0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="reading-"))
    try:
        make(home / "data", given.documents)
        measure(home / "data", given.documents, given.rounds)
    finally:
        shutil.rmtree(home)
    return 0


def measure(place: Path, documents: int, rounds: int) -> None:
    ours, theirs = [], []
    for _ in range(3):
        began = time.perf_counter()
        completions = Completions.open(place)
        ours.append(time.perf_counter() - began)
        began = time.perf_counter()
        listed = naive_open(place)
        theirs.append(time.perf_counter() - began)
        assert len(listed) == len(completions) == documents
        del listed
    count = f"{documents:,} documents"
    record(f"opening {count}", NAIVE_OPEN, ours=min(ours), theirs=min(theirs), unit="s", n=3)

    plain = Portions(49_152, 64, 8192, 32, 1024, 10.0, 5)
    readers = {
        name: Reader(completions, Portions(**{**vars(plain), "packing": name == "packed"}))
        for name in ("plain", "packed")
    }
    spent: dict[str, list[float]] = {"plain": [], "packed": [], "naive": []}
    tokens: dict[str, int] = dict.fromkeys(spent, 0)
    for number in range(rounds):
        for name, reader in readers.items():
            began = time.process_time()
            batch = reader.batch(number)
            spent[name].append(time.process_time() - began)
            tokens[name] += batch.tokens
            if name == "plain":
                began = time.process_time()
                naive_batch(completions, batch.documents, plain, 0)
                spent["naive"].append(time.process_time() - began)
                tokens["naive"] += batch.tokens
    median = {name: statistics.median(values) * 1e3 for name, values in spent.items()}
    record(
        "CPU time of a micro-batch of 64 documents, 1,024 anchors, 32 slots",
        NAIVE_BATCH,
        ours=median["plain"],
        theirs=median["naive"],
        unit="ms",
        n=rounds,
    )
    each = {name: median[name] * rounds / tokens[name] * 1e3 for name in spent}
    record(
        "CPU time of a packed micro-batch (49,152 tokens), for each token",
        f"{NAIVE_BATCH}, not packed",
        ours=each["packed"],
        theirs=each["naive"],
        unit="µs",
        n=rounds,
    )
    print(f"a packed micro-batch: {median['packed']:.2f} ms, {tokens['packed'] / rounds:,.0f} tokens")


if __name__ == "__main__":
    sys.exit(main())
