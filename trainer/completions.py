"""Tokenised completions on disk: written whole or not at all, read memory-mapped.

A directory holds ``data.json`` and Arrow files with one row per document: ``input_ids`` (list of int32) and
``loss_mask`` (list of uint8; 1 where the target produced the token). They are memory-mapped, so a data set
may be larger than memory, and what is kept of a document in memory is its length alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from trainer.data_meta import SCHEMA, check_meta, read_meta
from trainer.errors import InputError
from trainer.files import flush, sha256

SHARD_BYTES = 256 << 20  # a file is ended when it has so many
BATCH_DOCUMENTS = 4096  # rows of one Arrow record batch, at most,
BATCH_TOKENS = 1 << 20  # … and its tokens, so that the writer's memory does not depend on the documents
OURS = {"drafthouse": "completions"}  # in the files, which tell nothing without their data.json
MEASURED = ("agreement",)  # keys of data.json that tell something of the data and are no part of it

Document = tuple[Sequence[int] | np.ndarray, Sequence[int] | np.ndarray]


class Writer:
    """Writes a data directory, which appears by rename when `finish` is called; used with `with`.

    `meta` needs ``tokenizer`` (`modeldir.tokenizer_digest`) and ``target`` (what the target is called); more
    keys are kept as they are. Until `finish` all lies in ``.<name>.partial`` beside it. What a killed writer
    left there is removed by the next one. Raises InputError if the directory exists, or if somebody else
    writes it at this moment; OSError if the disk is full.
    """

    def __init__(self, directory: str | Path, meta: dict[str, Any]) -> None:
        self.directory = Path(directory)
        self.meta = dict(meta)
        self.documents = self.tokens = self.supervised_tokens = self.longest = self.largest_id = 0
        self._shards: list[str] = []
        self._sums: list[str] = []
        self._rows: list[tuple[np.ndarray, np.ndarray]] = []
        self._waiting = 0  # tokens in `_rows`
        self._file: Any = None  # the shard that is being written
        self._writer: Any = None
        if self.directory.exists():
            raise InputError(
                f"--data-dir {directory} exists already: choose another directory, or remove it first"
            )
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        self._partial = self.directory.with_name(f".{self.directory.name}.partial")
        self._lock = _claim(self._partial, self.directory)

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Without `finish` nothing is left."""
        if self._file is not None:
            with contextlib.suppress(Exception):
                self._writer.close()
                self._file.close()
        if self._partial.exists():
            shutil.rmtree(self._partial, ignore_errors=True)
        os.close(self._lock)

    def add(self, ids: Sequence[int] | np.ndarray, mask: Sequence[int] | np.ndarray) -> None:
        """One document. Raises ValueError if it is empty or `mask` has another length."""
        if len(ids) != len(mask) or not len(ids):
            raise ValueError(
                f"a document needs as many mask values as ids, at least one: {len(ids)}, {len(mask)}"
            )
        row = np.asarray(ids, dtype=np.int32), (np.asarray(mask) != 0).astype(np.uint8)
        self.documents += 1
        self.tokens += len(ids)
        self.supervised_tokens += int(np.count_nonzero(row[1]))
        self.longest = max(self.longest, len(ids))
        self.largest_id = max(self.largest_id, int(row[0].max()))
        self._rows.append(row)
        self._waiting += len(ids)
        if len(self._rows) >= BATCH_DOCUMENTS or self._waiting >= BATCH_TOKENS:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        if not self._rows:
            return
        offsets = np.concatenate([[0], np.cumsum([len(ids) for ids, _ in self._rows])]).astype(np.int32)
        columns = [
            pa.ListArray.from_arrays(
                pa.array(offsets), pa.array(np.concatenate([row[i] for row in self._rows]))
            )
            for i in range(2)
        ]
        names = ["input_ids", "loss_mask"]
        batch = pa.record_batch(
            columns,
            schema=pa.schema(
                [(name, column.type) for name, column in zip(names, columns, strict=True)], metadata=OURS
            ),
        )
        if self._writer is None:
            self._shards.append(f"{len(self._shards):05d}.arrow")
            self._file = pa.OSFile(str(self._partial / self._shards[-1]), "wb")
            self._writer = pa.ipc.new_file(self._file, batch.schema)
        self._writer.write_batch(batch)
        self._rows, self._waiting = [], 0
        if self._file.tell() >= SHARD_BYTES:
            self._end_shard()

    def _end_shard(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._file.close()
            self._writer = self._file = None
            self._sums.append(sha256(self._partial / self._shards[-1]))

    def finish(self) -> None:
        """Let the directory appear. Raises InputError if there is not one document."""
        self._flush()
        self._end_shard()
        if not self._shards:
            raise InputError(f"nothing to write to {self.directory}: there is not one document")
        counts = ("documents", "tokens", "supervised_tokens", "longest", "largest_id")
        value = {
            "schema": SCHEMA,
            **self.meta,
            **{name: getattr(self, name) for name in counts},
            "shards": self._shards,
            "sha256": self._sums,
        }
        (self._partial / "data.json").write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        for path in [*self._partial.iterdir(), self._partial]:
            flush(path)
        try:
            self._partial.rename(self.directory)
        except OSError:
            if self.directory.exists():
                raise InputError(
                    f"--data-dir {self.directory}: somebody else made it meanwhile, and it is left as it is"
                ) from None
            raise
        flush(self.directory.parent)


def write_completions(directory: str | Path, documents: Iterable[Document], meta: dict[str, Any]) -> None:
    """Write (input_ids, loss_mask) pairs as a data directory: see `Writer`."""
    with Writer(directory, meta) as writer:
        for ids, mask in documents:
            writer.add(ids, mask)
        writer.finish()


def _claim(partial: Path, directory: Path) -> int:
    """An empty directory `partial` that nobody else writes to; returns the descriptor that holds it."""
    while True:
        partial.mkdir(exist_ok=True)
        lock = os.open(partial, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise InputError(
                f"--data-dir {directory}: another process is writing it at this moment"
            ) from None
        try:
            same = os.path.samestat(os.fstat(lock), os.stat(partial))
        except FileNotFoundError:
            same = False
        if same:
            for leftover in partial.iterdir():
                leftover.unlink()
            return lock
        os.close(lock)  # its writer ended and renamed or removed it between our two looks


class Completions:
    """A data directory, memory-mapped."""

    def __init__(
        self,
        directory: Path,
        meta: dict[str, Any],
        columns: list[tuple[Any, Any, Any]],
        home: Path | None = None,
    ) -> None:
        self.directory = directory  # what --data-dir names
        self.home = home or directory  # where the files lie: another place if they were converted
        self.meta = meta
        self._columns = columns  # per record batch: offsets, ids, mask; all views of the mapped files
        sizes = [len(offsets) - 1 for offsets, _, _ in columns]
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self.lengths = np.concatenate([np.diff(offsets) for offsets, _, _ in columns])

    @classmethod
    def open(cls, directory: str | Path, named: Path | None = None) -> Completions:
        """Raises InputError, naming the file, if this is no data directory or a file of it is damaged.

        `named` is the user's directory that this one was converted from: what later errors name.
        """
        directory = Path(directory)
        meta = read_meta(directory)
        columns = mapped(directory, directory, meta["shards"])
        found = cls(named or directory, meta, columns, home=directory)
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
        return self.documents(np.array([index]))[0]

    def documents(self, indices: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """`document` of each."""
        batches = self._starts.searchsorted(indices, side="right") - 1
        found = []
        for batch, at in zip(batches.tolist(), (indices - self._starts[batches]).tolist(), strict=True):
            offsets, ids, mask = self._columns[batch]
            start, end = offsets[at], offsets[at + 1]
            found.append((ids[start:end], mask[start:end]))
        return found

    def check_ids(self, ids: np.ndarray, documents: Sequence[int] | np.ndarray) -> None:
        """Raises InputError, naming document and file, if `ids`, which are of `documents`, hold one that is
        not among those that were written: then the file was damaged since.
        """
        largest = self.meta["largest_id"]
        if not ids.size or (ids.min() >= 0 and ids.max() <= largest):
            return
        for document in map(int, documents):
            tokens = self.document(document)[0]
            if len(wrong := tokens[(tokens < 0) | (tokens > largest)]):
                again = (
                    "copy it again, or prepare the data again"
                    if self.home == self.directory
                    else f"remove {self.home}, and it is converted again"
                )
                raise InputError(
                    f"--data-dir {self.directory}: document {document} (in {self._shard_of(document)}) holds "
                    f"the token {wrong[0]}, and none beyond {largest} was written: it is damaged; {again}"
                )

    def _shard_of(self, document: int) -> str:
        """The file that a document is in, counted anew: it is asked for once, in an error."""
        for name in self.meta["shards"]:
            document -= sum(batch.num_rows for batch in record_batches(self.home / name))
            if document < 0:
                return str(name)
        raise IndexError(document)

    @functools.cached_property
    def digest(self) -> str:
        """Names the data by content: 16 hex digits over data.json, without what was measured of it, and the
        shards, which are read only where data.json does not hold their checksums.
        """
        shards = self.meta["shards"]
        sums = self.meta.get("sha256")
        if not isinstance(sums, list) or len(sums) != len(shards):
            sums = [sha256(self.home / name) for name in shards]
        kept = {key: value for key, value in self.meta.items() if key not in MEASURED}
        text = json.dumps({**kept, "sha256": sums}, sort_keys=True).encode()
        return hashlib.sha256(text).hexdigest()[:16]

    def check_target(self, tokenizer: str, vocab_size: int) -> None:
        """Raises InputError if these ids were made with another tokenizer than the target's."""
        check_meta(self.directory, self.meta, tokenizer, vocab_size)


def mapped(named: Path, home: Path, shards: Sequence[str]) -> list[tuple[Any, Any, Any]]:
    """For each record batch of the Arrow files `shards` in `home`: offsets, ids, mask, as views of them.

    Files and streams of Arrow are both read. Raises InputError, naming the directory `named` and the file.
    """
    import pyarrow as pa

    columns = []
    for name in shards:
        try:
            for batch in record_batches(home / name):
                columns.append(_views(batch))
        except FileNotFoundError:
            raise InputError(f"--data-dir {named}: {name} is missing, though data.json lists it") from None
        except (pa.ArrowException, KeyError, ValueError, OSError) as error:
            raise InputError(f"--data-dir {named}: {name} is damaged ({str(error)[:200]})") from None
    return columns


def record_batches(path: Path) -> Iterable[Any]:
    """The record batches of an Arrow file or stream, memory-mapped."""
    import pyarrow as pa

    source = pa.memory_map(str(path))
    magic = source.read(6)
    source.seek(0)
    if magic == b"ARROW1":
        reader = pa.ipc.open_file(source)
        return (reader.get_batch(i) for i in range(reader.num_record_batches))
    return iter(pa.ipc.open_stream(source))


def _views(batch: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids, mask = batch.column("input_ids"), batch.column("loss_mask")
    offsets = ids.offsets.to_numpy()
    if not np.array_equal(offsets, mask.offsets.to_numpy()):
        raise ValueError("input_ids and loss_mask have different lengths")
    return offsets, ids.values.to_numpy(), mask.values.to_numpy()
