"""What a directory of weights or data consists of: every file's size, and a hash of every chunk of it.

A manifest is a JSON object: ``source`` (where it came from, ``machine:path`` or a path), ``digest`` (of all
of it, 32 hex digits), ``hash`` (a name of `deploy.hashing`), ``chunk`` (bytes; a file's last one is shorter),
``stamp`` {relative name: [bytes, time of change in ns]} in the order of `walk`, ``chunks`` {relative name:
the hashes of its chunks, 32 hex digits each, in one string}, and ``same`` {relative name: the one before it
that is the same file}, for links of a download cache to one blob; such a name has no ``chunks``.

Runs on both sides. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from deploy import hashing
from deploy.errors import DeployError
from deploy.pieces import Chunk, Reader
from deploy.sizes import size

FILE = ".drafthouse.json"
CHUNK = 8 << 20  # bytes: what is sent, checked and, if it got lost, sent again in one piece
TELL = 10.0  # seconds between two reports of how far a long step is
THREADS = min(8, os.cpu_count() or 1)
_HEX = 32  # digits of a chunk's hash
_CACHE = re.compile(r".*/models--(?:[^/]*--)?([^/]+)/snapshots/[^/]+")

Progress = Callable[[str], None]


def silent(text: str) -> None:
    """A report that nobody reads."""


# -- the files ---------------------------------------------------------------------------------------------


def name_of(source: Path) -> str:
    """What a copy of `source` is called: its last part; in Hugging Face's cache the model's name.

    Without dots before it: what is hidden in the places of copies is on its way in or out.
    """
    resolved = source.resolve()
    cached = _CACHE.fullmatch(str(resolved))
    return cached[1] if cached else resolved.name.lstrip(".") or resolved.name


def walk(source: Path) -> Iterator[tuple[str, Path]]:
    """(relative name, path) of what is copied, in a fixed order: all but hidden files; links are followed.

    Raises DeployError for a link that leads back to where it lies, and for what cannot be read.
    """
    yield from _walk(source, "", ())


def _walk(folder: Path, relative: str, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, Path]]:
    try:
        found = folder.stat()
        entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
        entries.sort(key=lambda one: one.name)
        folders = {entry.name for entry in entries if entry.is_dir()}
    except OSError as error:
        raise DeployError(f"{error.filename or folder} cannot be read: {error.strerror}") from None
    here = (found.st_dev, found.st_ino)
    if here in above:
        raise DeployError(f"{folder} leads back to a directory that it lies in; remove that link")
    for entry in entries:
        if entry.name not in folders:
            yield relative + entry.name, folder / entry.name
    for name in sorted(folders):
        yield from _walk(folder / name, f"{relative}{name}/", (*above, here))


def stamp_of(source: Path) -> dict[str, list[int]]:
    """Size and time of change of every file: what tells whether a source is still what was copied."""
    return {relative: [found.st_size, found.st_mtime_ns] for relative, found in _files(source)}


def _files(source: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Every file with what `stat` says. Raises DeployError for what cannot be copied."""
    for relative, path in walk(source):
        try:
            found = path.stat()
        except OSError as error:
            raise DeployError(f"{path} cannot be read: {error.strerror}") from None
        if not stat.S_ISREG(found.st_mode):
            raise DeployError(f"{path} is no file, but a device, pipe or socket; move it elsewhere")
        yield relative, found


def total(stamp: dict[str, list[int]]) -> int:
    """Bytes of all files, as they are read."""
    return sum(length for length, _ in stamp.values())


# -- the chunks --------------------------------------------------------------------------------------------


def chunks(manifest: dict[str, Any]) -> list[Chunk]:
    """All chunks of a manifest, in order. What has `same` is not among them: it is linked."""
    found = []
    for relative, (length, _) in manifest["stamp"].items():
        if relative in manifest["same"]:
            continue
        hashes = manifest["chunks"].get(relative, "")
        for number, offset in enumerate(range(0, length, manifest["chunk"])):
            one = hashes[number * _HEX : (number + 1) * _HEX]
            found.append(Chunk(relative, offset, min(manifest["chunk"], length - offset), one))
    return found


def outline(source: Path, hash_name: str, chunk: int = CHUNK) -> dict[str, Any]:
    """A manifest without hashes and digest: reads no content. Raises DeployError."""
    stamp: dict[str, list[int]] = {}
    same: dict[str, str] = {}
    firsts: dict[tuple[int, int], str] = {}
    for relative, found in _files(source):
        stamp[relative] = [found.st_size, found.st_mtime_ns]
        first = firsts.setdefault((found.st_dev, found.st_ino), relative)
        if first != relative:
            same[relative] = first
    made = {"source": str(source), "digest": "", "hash": hash_name, "chunk": chunk}
    return {**made, "stamp": stamp, "chunks": {}, "same": same}


def read(
    source: Path, hash_name: str = "", progress: Progress = silent, *, chunk: int = CHUNK
) -> dict[str, Any]:
    """The manifest of `source`. Reads all of it, several chunks at a time.

    Raises DeployError if anything cannot be read or changes meanwhile.
    """
    made = outline(source, hash_name or hashing.names()[0], chunk)
    pieces = chunks(made)
    told = Told("read", sum(one.length for one in pieces), progress)
    hasher = Reader(source, made["hash"])

    def hashed(one: Chunk) -> tuple[Chunk, bytes]:
        found = hasher.hash(one)
        told.add(one.length)
        return one, found

    made = fill(made, parallel(hashed, pieces))
    if stamp_of(source) != made["stamp"]:
        raise DeployError(f"{source} changed while it was read; try again when it is whole")
    return made


def fill(made: dict[str, Any], found: Iterable[tuple[Chunk, bytes]]) -> dict[str, Any]:
    """An outline with the hashes of its chunks, in order, and the digest that follows from them."""
    hashes: dict[str, list[str]] = {}
    for one, value in found:
        hashes.setdefault(one.relative, []).append(value.hex())
    made = {**made, "chunks": {relative: "".join(parts) for relative, parts in hashes.items()}}
    return {**made, "digest": digest_of(made)}


def digest_of(manifest: dict[str, Any]) -> str:
    """The digest that follows from names, sizes and hashes of chunks; links or not makes no difference."""
    found = hashlib.blake2b(f"{manifest['hash']} {manifest['chunk']}\n".encode(), digest_size=16)
    for relative, (length, _) in sorted(manifest["stamp"].items()):
        hashes = manifest["chunks"].get(manifest["same"].get(relative, relative), "")
        found.update(f"{relative}\0{length}\0{hashes}\n".encode("utf-8", "surrogateescape"))
    return found.hexdigest()


def tree_digest(source: Path, progress: Progress = silent) -> str:
    return str(read(source, "", progress)["digest"])


def parallel(work: Callable[[Any], Any], pieces: Sequence[Any]) -> Iterator[Any]:
    """`work` of each, in order, on several threads. What one of them raises ends all."""
    if len(pieces) < 2 or THREADS < 2:
        yield from map(work, pieces)
        return
    from concurrent.futures import ThreadPoolExecutor  # here: every question to a host would wait for it

    pool = ThreadPoolExecutor(THREADS)
    try:
        yield from pool.map(work, pieces)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class Told:
    """Says now and then how far a long step is, so that nobody takes it for dead. From any thread."""

    def __init__(self, verb: str, all_of_it: int, progress: Progress) -> None:
        self.verb, self.total, self.progress = verb, all_of_it, progress
        self.done, self.last = 0, time.monotonic()
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.done += count
            due = time.monotonic() - self.last > TELL
            if due:
                self.last = time.monotonic()
                self.progress(f"{self.verb} {size(self.done)} of {size(self.total)}")


# -- of a copy ---------------------------------------------------------------------------------------------


def safe(*paths: Path) -> bool:
    """Whether nobody but us and root can change these. Raises OSError for one that is not there."""
    found = [path.stat() for path in paths]
    return all(one.st_uid in (0, os.geteuid()) and not one.st_mode & stat.S_IWOTH for one in found)


def of_copy(path: Path) -> dict[str, Any] | None:
    """The manifest of a copy; None without one, or if another user can have written it."""
    with contextlib.suppress(OSError, ValueError):
        value = json.loads((path / FILE).read_bytes())
        if isinstance(value, dict) and safe(path, path / FILE):
            return value
    return None


def whole(path: Path) -> dict[str, Any] | None:
    """The manifest of a copy that has all of its files, each of the right length; None of any other.

    Neither of one that another user made or can change: lengths alone say nothing of what is in it.
    """
    manifest = of_copy(path)
    try:
        assert manifest
        for relative, (length, _) in manifest["stamp"].items():
            file = path / relative
            folders = [path / folder for folder in Path(relative).parents]
            if file.stat().st_size != length or not safe(file, *folders):
                return None
        return manifest if str(manifest["digest"]) and str(manifest["source"]) else None
    except (AssertionError, OSError, KeyError, TypeError, ValueError, AttributeError):
        return None


def verify(path: Path, progress: Progress = silent) -> list[str]:
    """Read a copy again: what is wrong with it, a sentence each; empty if every byte is what was sent.

    Raises DeployError for one without a manifest that says.
    """
    manifest = of_copy(path)
    if manifest is None or not {"hash", "chunk", "chunks", "same", "stamp"} <= set(manifest):
        raise DeployError(
            f"{path} has no manifest that says what it must be (the toy has none); push or stage it again"
        )
    problems = [
        f"{path / relative} is not there"
        if not os.path.isfile(path / relative)
        else f"{path / relative} is {os.stat(path / relative).st_size:,} bytes long, but must be {length:,}"
        for relative, (length, _) in manifest["stamp"].items()
        if not os.path.isfile(path / relative) or os.stat(path / relative).st_size != length
    ]
    if problems:
        return problems
    pieces = chunks(manifest)
    told = Told("verified", sum(one.length for one in pieces), progress)
    reader = Reader(path, manifest["hash"])

    def check(one: Chunk) -> str | None:
        right = reader.hash(one).hex() == one.hash
        told.add(one.length)
        end = one.offset + one.length
        return None if right else f"{path / one.relative} is damaged in bytes {one.offset:,} to {end:,}"

    return [problem for problem in parallel(check, pieces) if problem]
