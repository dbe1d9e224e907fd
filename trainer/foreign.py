"""Completions that another trainer tokenised: a directory of Arrow or parquet files without our data.json.

What is needed is one row per document with ``input_ids`` and what is supervised of them, under one of the
names in `MASKS`. Arrow (as `datasets` saves it, too) is memory-mapped where it lies and read through once,
for its checksums and its largest id; parquet is compressed and cannot be mapped, so it is converted once.
Either result is kept in the cache, named by the files' names, sizes and times.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trainer.completions import Completions, Writer, mapped, record_batches
from trainer.data_meta import SCHEMA, agreement_warning, foreign_files
from trainer.errors import InputError
from trainer.files import sha256

# Columns that say what is supervised; in `labels` what is not is -100.
MASKS = ("loss_mask", "completion_mask", "assistant_masks", "assistant_mask", "labels")
IGNORED_LABEL = -100


def open_completions(directory: str | Path, cache: Path, say: Callable[[str], None]) -> Completions:
    """A data directory of ours or of another trainer. Raises InputError if it is neither, or damaged."""
    directory = Path(directory)
    files = foreign_files(directory)
    if not files:
        ours = Completions.open(directory)
        if warning := agreement_warning(directory, ours.meta):
            say(warning)
        return ours
    key = _key(directory, files)
    kept = cache / f"data-{key}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".data-{key}.lock"):
            found = _kept(directory, kept) or _adopt(directory, files, kept, say)
    except OSError as error:
        raise InputError(
            f"--data-dir {directory}: it was made by another trainer, and what is read from it cannot be "
            f"kept in {cache} ({error.strerror or error}); free some space or choose another --cache-dir"
        ) from None
    say(
        f"data {directory}: made by another trainer; it does not say with which tokenizer, so only that its "
        "ids fit into the vocabulary can be checked"
    )
    return found


def _key(directory: Path, files: list[str]) -> str:
    digest = hashlib.sha256(str(directory.resolve()).encode())
    for name in files:
        about = (directory / name).stat()
        digest.update(f"\0{name}\0{about.st_size}\0{about.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process reads the files through, the others wait for it."""
    with open(path, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _kept(directory: Path, kept: Path) -> Completions | None:
    """What an earlier run kept, if it is whole."""
    with contextlib.suppress(InputError):
        if kept.is_dir():
            return Completions.open(kept, directory)
    index = kept.with_suffix(".json")
    try:
        meta = json.loads(index.read_text(encoding="utf-8"))
        columns = mapped(directory, directory, meta["shards"])
    except (OSError, ValueError, KeyError):
        return None
    return Completions(directory, meta, columns)


def _adopt(directory: Path, files: list[str], kept: Path, say: Callable[[str], None]) -> Completions:
    mask = _mask_column(directory, files)
    if files[0].endswith(".arrow") and all(_mappable(directory / name) for name in files):
        say(f"data {directory}: made by another trainer; it is read through once, then mapped where it lies")
        columns = mapped(directory, directory, files)
        try:
            meta = {**_described(directory), **_counted(columns), "shards": files}
        except ValueError as error:
            raise InputError(f"--data-dir {directory}: {error}") from None
        if not meta["documents"]:
            raise InputError(f"--data-dir {directory}: there is not one document in it")
        meta["sha256"] = [sha256(directory / name) for name in files]
        temporary = kept.with_suffix(f".{os.getpid()}.new")
        temporary.write_text(json.dumps(meta) + "\n", encoding="utf-8")
        temporary.replace(kept.with_suffix(".json"))
        return Completions(directory, meta, columns)
    say(
        f"data {directory}: made by another trainer and cannot be mapped into memory as it is; it is "
        f"converted once, into {kept}"
    )
    if kept.exists():  # and is damaged, else it had been taken
        for path in kept.iterdir():
            path.unlink()
        kept.rmdir()
    with Writer(kept, _described(directory)) as writer:
        for name in files:
            for row in _documents(directory, name, mask):
                writer.add(*row)
        if not writer.documents:
            raise InputError(f"--data-dir {directory}: there is not one document in it")
        writer.finish()
    return Completions.open(kept, directory)


def _described(directory: Path) -> dict[str, Any]:
    return {"schema": SCHEMA, "tokenizer": None, "target": None, "source": directory.name}


def _schema(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.suffix == ".parquet":
        return pq.read_schema(path)
    source = pa.memory_map(str(path))
    magic = source.read(6)
    source.seek(0)
    return (pa.ipc.open_file(source) if magic == b"ARROW1" else pa.ipc.open_stream(source)).schema


def _mask_column(directory: Path, files: list[str]) -> str:
    """The column that says what is supervised. Raises InputError if a file has none, or no input_ids."""
    import pyarrow as pa
    import pyarrow.types as types

    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    found = None
    for name in files:
        try:
            schema = _schema(directory / name)
        except (pa.ArrowException, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"--data-dir {directory}: {name} is damaged ({reason})") from None
        names = schema.names
        if b"drafthouse" in (schema.metadata or {}):
            raise InputError(
                f"--data-dir {directory}: it has no data.json, which {name} was written with; copy it whole"
            )
        mask = next((column for column in MASKS if column in names), None)
        if "input_ids" not in names or mask is None:
            raise InputError(
                f"--data-dir {directory}: {name} has the columns {', '.join(names)}, and needs input_ids and "
                f"loss_mask (or {', '.join(MASKS[1:])}); make the data with python -m trainer.prepare"
            )
        for column in ("input_ids", mask):
            kind = schema.field(column).type
            if not any(is_one(kind) for is_one in lists):
                raise InputError(
                    f"--data-dir {directory}: the column {column} of {name} holds {kind}, and needs a list "
                    "of whole numbers in each row; make the data with python -m trainer.prepare"
                )
        found = found or mask
        if mask != found:
            raise InputError(f"--data-dir {directory}: {name} has {mask}, where the other files have {found}")
    assert found is not None
    return found


def _mappable(path: Path) -> bool:
    """Whether ids and mask can be looked at as they lie in the file: lists of whole numbers."""
    import pyarrow.types as types

    schema = _schema(path)
    for name in ("input_ids", "loss_mask"):
        kind = schema.field(name).type if name in schema.names else None
        if kind is None or not (types.is_list(kind) or types.is_large_list(kind)):
            return False
        if not types.is_integer(kind.value_type):
            return False
    return schema.field("input_ids").type.id == schema.field("loss_mask").type.id


def _counted(columns: list[tuple[Any, Any, Any]]) -> dict[str, int]:
    lengths = [np.diff(offsets) for offsets, _, _ in columns]
    return {
        "documents": sum(map(len, lengths)),
        "tokens": sum(int(found.sum()) for found in lengths),
        "supervised_tokens": sum(int(np.count_nonzero(mask)) for _, _, mask in columns),
        "longest": max((int(found.max()) for found in lengths if len(found)), default=0),
        "largest_id": max((_largest(ids) for _, ids, _ in columns if len(ids)), default=0),
    }


def _largest(ids: np.ndarray) -> int:
    if int(ids.min()) < 0:
        raise ValueError("a token id is negative")
    if int(ids.max()) >= 1 << 31:
        raise ValueError("a token id has more than 31 bits")
    return int(ids.max())


def _documents(directory: Path, name: str, mask: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The rows of one file, empty ones left out. Raises InputError if it is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if name.endswith(".parquet"):
            with pq.ParquetFile(directory / name) as file:
                for batch in file.iter_batches(1024, columns=["input_ids", mask]):
                    yield from _rows(batch, mask)
        else:
            for batch in record_batches(directory / name):
                yield from _rows(batch, mask)
    except (pa.ArrowException, ValueError, OSError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"--data-dir {directory}: {name} is damaged ({reason})") from None


def _rows(batch: Any, mask: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    ids, marks = batch.column("input_ids"), batch.column(mask)
    lengths = ids.value_lengths().fill_null(0).to_numpy()
    if not np.array_equal(lengths, marks.value_lengths().fill_null(0).to_numpy()):
        raise ValueError(f"input_ids and {mask} have different lengths")
    tokens = ids.flatten().to_numpy(zero_copy_only=False)
    supervised = marks.flatten().to_numpy(zero_copy_only=False)
    if tokens.dtype.kind not in "iu" or supervised.dtype.kind not in "iub":
        raise ValueError("a value is missing or no whole number")
    if mask == "labels":
        supervised = supervised != IGNORED_LABEL
    if len(tokens):
        _largest(tokens)
    ends = np.cumsum(lengths)
    for start, end in zip(ends - lengths, ends, strict=True):
        if end > start:
            yield tokens[start:end], supervised[start:end]
