"""Directories of weights and of data as they lie on a host: checked, hashed, received, staged.

``<shm>/<name>@<digest12>`` holds a copy that never changes, ``<shm>/<name>`` points to it. What came from
another machine lies on disk too, as ``<state>/weights/<name>@<digest12>`` or ``<state>/data/...``, so that a
reboot loses nothing. A directory appears under its name by a rename, once all of it has the right digest.

Runs ON the host, asked by `deploy.weights` and by the boot unit. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from deploy import files, machine, typedpath
from deploy.errors import DeployError
from deploy.sizes import size

MANIFEST = ".drafthouse.json"
CHUNK = 1 << 20  # bytes
PAUSE = 0.1  # seconds between two looks at a lock that somebody else has
TELL = 10.0  # seconds between two reports of how far a long step is
_LARGEST_HEADER = 100 << 20  # what safetensors itself accepts

Progress = Callable[[str], None]


def silent(text: str) -> None:
    """A report that nobody reads."""


# -- checks ------------------------------------------------------------------------------------------------


def check_model_dir(path: Path) -> list[str]:
    """What is wrong with a model directory, a sentence each; empty if it can be loaded.

    Reads headers only: every safetensors file must be exactly as long as its header says, and every file that
    the index names must be there. A copy that broke off, a Git LFS pointer and a half download all show here.
    """
    try:
        kind = typedpath.look(path, f"weights {path}")
    except DeployError as error:
        return [str(error)]
    if not kind:
        return [f"weights {path} do not exist; correct weights: in the run's file"]
    if kind != typedpath.DIRECTORY:
        return [f"weights {path} are no directory; give the directory that holds config.json"]
    found = []
    config = _json(path / "config.json")
    if isinstance(config, str):
        found.append(f"weights {path}: {config}; copy the model again")
    tensors = sorted(path.glob("*.safetensors"))
    if not tensors:
        other = next(iter(sorted(path.glob("*.bin"))), None)
        what = f" ({other.name} is there: convert it)" if other else ""
        found.append(f"weights {path} hold no *.safetensors file{what}; copy the model again")
    if (path / "model.safetensors.index.json").exists():
        index = _json(path / "model.safetensors.index.json")
        named = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(named, dict):
            found.append(
                f"weights {path}: model.safetensors.index.json has no weight_map; copy the model again"
            )
        else:
            missing = sorted({str(name) for name in named.values()} - {file.name for file in tensors})
            if missing:
                more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                found.append(
                    f"weights {path} lack {missing[0]}{more}, which the index names; copy the model again"
                )
    for file in tensors:
        problem = safetensors_problem(file)
        if problem:
            found.append(f"weights {path}: {file.name} {problem}; copy it again")
    for relative, file in walk(path):
        if file not in (path / "config.json", *tensors) and not file.exists():
            found.append(
                f"weights {path}: the link {relative} leads nowhere; remove it, or copy the model again"
            )
    return found


def safetensors_problem(path: Path) -> str | None:
    """Why a safetensors file cannot be whole; None if its header agrees with its size.

    The format: 8 bytes, little-endian, give the length of a JSON header, whose `data_offsets` count from the
    end of the header (github.com/huggingface/safetensors, README).
    """
    try:
        actual = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(8)
            if start == b"version ":
                return "is a Git LFS pointer, not the file itself"
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > _LARGEST_HEADER or 8 + length > actual:
                return f"is damaged: {size(actual)} cannot hold its header"
            header = json.loads(file.read(length))
        ends = [item["data_offsets"][1] for key, item in header.items() if key != "__metadata__"]
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return "is damaged: its header is no valid JSON"
    expected = 8 + length + max(ends, default=0)
    if actual != expected:
        return f"is {actual:,} bytes long, but its header says {expected:,}"
    return None


def _json(path: Path) -> dict[str, Any] | str:
    """The object in a file, or what is wrong with it."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    except ValueError:
        return f"{path.name} is no valid JSON"
    return value if isinstance(value, dict) else f"{path.name} holds no JSON object"


# -- looking -----------------------------------------------------------------------------------------------


def look(source: str, shm: str, read: bool = True, progress: Progress = silent) -> dict[str, Any]:
    """What there is to say of a model directory, and whether it is in shared memory already.

    ``{"problems": [sentence]}``, or source, action (in-place | present | copy | changed), path (in shared
    memory; None if not known), name, digest, bytes and root of a `deploy.weights.Weights`. Hashes only what
    is new or changed; without `read` not even that: then it is called changed, since 50 GB take a minute.
    """
    given = typedpath.expand(source)
    problems = check_model_dir(given) or place_problems(Path(shm))
    if problems:
        return {"problems": problems}
    found: dict[str, Any] = {"source": str(given), "name": given.resolve().name, "root": shm, "digest": ""}
    found["bytes"] = sum(path.stat().st_size for _, path in walk(given))
    if on_tmpfs(given):
        return {**found, "action": "in-place", "path": str(given)}
    manifest = read_manifest(Path(shm) / found["name"])
    if manifest and manifest.get("stamp") == stamp_of(given) and manifest.get("source") == str(given):
        found["digest"] = str(manifest.get("digest"))
    elif not read:
        return {**found, "action": "changed", "path": None}
    else:
        progress(f"reading {size(found['bytes'])} of weights")
        found["digest"] = tree_digest(given, progress)
    path = Path(shm) / f"{found['name']}@{found['digest'][:12]}"
    return {**found, "action": "present" if whole(path) else "copy", "path": str(path)}


def known(place: str, name: str) -> list[dict[str, Any]]:
    """The versions of `name` that lie in `place`: path, and digest, source and stamp of their manifest.

    Only those of which every file has its length.
    """
    found = []
    for path in sorted(Path(place).glob(f"{glob.escape(name)}@*")):
        manifest = whole(path)
        if manifest:
            found.append({"path": str(path), **{key: manifest[key] for key in ("digest", "source", "stamp")}})
    return found


def place_problems(place: Path, key: str = "shm: in fabric.yaml") -> list[str]:
    """Why what lies in `place` is not to be relied on, a sentence; empty if it is. It need not be there yet.

    /dev/shm is for everybody: whoever makes our directory there first could put other weights in.
    """
    try:
        found = place.stat()
    except OSError:
        return []
    remedy = f"remove {place}, or choose another place with {key}"
    if found.st_uid not in (0, os.geteuid()):
        return [f"{place} belongs to user {found.st_uid}, who can change the weights in it; {remedy}"]
    sticky = found.st_mode & stat.S_ISVTX  # then only what is one's own can be replaced
    if found.st_mode & stat.S_IWOTH and (os.geteuid() == 0 or not sticky):
        return [f"every user can write to {place}, and so change the weights in it; {remedy}"]
    return []


def safe(*paths: Path) -> bool:
    """Whether nobody but us and root can change these. Raises OSError for one that is not there."""
    found = [path.stat() for path in paths]
    return all(one.st_uid in (0, os.geteuid()) and not one.st_mode & stat.S_IWOTH for one in found)


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of a copy; None without one, or if another user can have written it."""
    value = _json(path / MANIFEST)
    with contextlib.suppress(OSError):
        if isinstance(value, dict) and safe(path, path / MANIFEST):
            return value
    return None


def whole(path: Path) -> dict[str, Any] | None:
    """The manifest of a copy that has all of its files, each of the right length; None of any other.

    Neither of one that another user made or can change: lengths alone say nothing of what is in it.
    """
    manifest = read_manifest(path)
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


def walk(source: Path) -> Iterator[tuple[str, Path]]:
    """(relative name, path) of what is copied, in a fixed order: all but hidden files; links are followed."""
    for folder, folders, names in os.walk(source, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                path = Path(folder) / name
                yield str(path.relative_to(source)), path


def stamp_of(source: Path) -> dict[str, list[int]]:
    """Size and time of change of every file: what tells whether a source is still what was copied."""
    return {relative: [path.stat().st_size, path.stat().st_mtime_ns] for relative, path in walk(source)}


class Digest:
    """BLAKE2b over names, lengths and contents, in the order of `walk`."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self.update = self._hash.update
        self.hexdigest = self._hash.hexdigest

    def begin(self, relative: str, length: int) -> None:
        self.update(f"{relative}\0{length}\n".encode("utf-8", "surrogateescape"))


class Told:
    """Says now and then how far a long step is, so that nobody takes it for dead."""

    def __init__(self, verb: str, total: int, progress: Progress) -> None:
        self.verb, self.total, self.progress = verb, total, progress
        self.done, self.last = 0, time.monotonic()

    def add(self, count: int) -> None:
        self.done += count
        if time.monotonic() - self.last > TELL:
            self.last = time.monotonic()
            self.progress(f"{self.verb} {size(self.done)} of {size(self.total)}")


def tree_digest(source: Path, progress: Progress = silent) -> str:
    told = Told("read", sum(path.stat().st_size for _, path in walk(source)), progress)
    digest = Digest()
    for relative, path in walk(source):
        digest.begin(relative, path.stat().st_size)
        with open(path, "rb") as reading:
            for chunk in iter(lambda: reading.read(CHUNK), b""):
                digest.update(chunk)
                told.add(len(chunk))
    return digest.hexdigest()


def on_tmpfs(path: Path) -> bool:
    return machine.filesystem(path) == "tmpfs"


# -- copying into shared memory ----------------------------------------------------------------------------


def stage(source: str, path: str, digest: str, progress: Progress = silent) -> str:
    """Have the weights of `source`, whose digest is known, in shared memory at `path`, and link their name.

    Returns ``there already`` or ``copied``. Raises DeployError, nothing changed, if there is no room or the
    source is not what the digest says.
    """
    target, given = Path(path), Path(source)
    if os.path.realpath(source) == os.path.realpath(path):  # it lay in shared memory by itself
        if not given.is_dir():
            raise DeployError(f"weights {source} lay in shared memory and are gone; put them there again")
        return "there already"
    name = target.name.rpartition("@")[0]
    with locked(target.parent, name, "shm: in fabric.yaml", progress):
        clear(target.parent, name)
        done = "there already"
        if not whole(target):  # else another name's deploy was faster
            _make_room_and_copy(given, target, digest, progress)
            clear(target.parent, name)
            done = "copied"
        link = target.with_name(name)
        try:
            files.replace_link(link, target.name)
        except OSError as error:
            raise DeployError(f"{link} is in the way ({error.strerror}); move it aside") from None
    return done


@contextlib.contextmanager
def locked(place: Path, name: str, key: str, progress: Progress) -> Iterator[None]:
    """Places are shared: runs of several names, and several clients, may have the same weights."""
    path = place / f".{name}.lock"
    try:
        place.mkdir(mode=0o755, parents=True, exist_ok=True)
        for problem in place_problems(place, key):
            raise DeployError(problem)
        lock = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise DeployError(f"{path} cannot be made ({error.strerror}); correct {key}") from None
    try:
        told = 0.0
        while not files.take(lock):
            if time.monotonic() - told > TELL:
                told = time.monotonic()
                progress(f"another deploy copies {name} into {place}; waiting for it")
            time.sleep(PAUSE)
        yield
    finally:
        os.close(lock)


def clear(place: Path, name: str) -> None:
    """Remove damaged copies and what a killed deploy left. Only with the lock: then nobody else copies."""
    pattern = glob.escape(name)
    for left in (*place.glob(f".{pattern}.incoming.*"), *place.glob(f".damaged-{pattern}@*")):
        shutil.rmtree(left, ignore_errors=True)


def _make_room_and_copy(source: Path, target: Path, digest: str, progress: Progress) -> None:
    try:
        total = sum(path.stat().st_size for _, path in walk(source))
        free = shutil.disk_usage(target.parent).free
    except OSError as error:
        raise DeployError(f"weights {source} cannot be read: {error.strerror}") from None
    if not source.is_dir():
        raise DeployError(f"weights {source} do not exist; fab deploy looks for them again")
    if free < total:
        raise DeployError(
            f"{target.parent} has {size(free)} free, but the weights need {size(total)}; "
            "remove weights that no run uses, or choose another place with shm: in fabric.yaml"
        )
    _copy(source, target, digest, total, progress)


def _copy(source: Path, target: Path, digest: str, total: int, progress: Progress) -> None:
    """Copy and hash in one pass; the directory appears under its name only when the digest is right."""

    def blocks(path: Path) -> Iterator[bytes]:
        with open(path, "rb") as reading:
            yield from iter(lambda: reading.read(CHUNK), b"")

    parts = [(relative, path.stat().st_size, blocks(path)) for relative, path in walk(source)]
    stamp = stamp_of(source)
    try:
        fill(target, f"weights {source}", str(source), digest, stamp, parts, Told("copied", total, progress))
    except OSError as error:
        raise DeployError(f"weights {source} could not be copied to {target}: {error.strerror}") from None


def fill(
    target: Path,
    what: str,
    source: str,
    digest: str,
    stamp: dict[str, list[int]],
    parts: Sequence[tuple[str, int, Iterator[bytes]]],
    told: Told,
    durable: bool = False,
) -> None:
    """Write `parts` (relative name, length, content) into a new directory, and let it appear as `target`."""
    name = target.name.rpartition("@")[0]
    incoming = Path(tempfile.mkdtemp(prefix=f".{name}.incoming.", dir=target.parent))
    try:
        hashed = Digest()
        for relative, length, blocks in parts:
            hashed.begin(relative, length)
            copy = incoming / relative
            if os.path.isabs(relative) or ".." in Path(relative).parts:
                raise DeployError(f"{relative} leads out of {target}; correct the name of that file")
            copy.parent.mkdir(parents=True, exist_ok=True)
            with open(copy, "wb") as writing:
                for block in blocks:
                    hashed.update(block)
                    writing.write(block)
                    told.add(len(block))
                writing.flush()
                os.fchmod(writing.fileno(), 0o444)
                if durable:
                    os.fsync(writing.fileno())
        if hashed.hexdigest() != digest:
            raise DeployError(f"{what} changed while they were copied; deploy again when they are whole")
        manifest = {"source": source, "digest": digest, "hash": "blake2b-128", "stamp": stamp}
        with open(incoming / MANIFEST, "w", encoding="utf-8") as file:
            file.write(json.dumps(manifest, indent=1) + "\n")
            file.flush()
            os.fchmod(file.fileno(), 0o444)
            if durable:
                os.fsync(file.fileno())
        for folder, _, _ in os.walk(incoming):
            os.chmod(folder, 0o755)
        if target.exists():  # there, but not whole: a file is missing or short
            os.rename(target, target.with_name(f".damaged-{target.name}-{os.getpid()}"))
        os.rename(incoming, target)
    except BaseException:
        shutil.rmtree(incoming, ignore_errors=True)
        raise


# -- receiving from another machine ------------------------------------------------------------------------


def receive(
    target: str,
    source: str,
    digest: str,
    stamp: dict[str, list[int]],
    progress: Progress = silent,
) -> str:
    """Take a directory from stdin: the contents of the files in `stamp`, one after the other, without more.

    `source` says where it came from, as ``machine:path``. Returns ``there already`` or ``received``. Raises
    DeployError, and leaves nothing, if it does not arrive whole or there is no room.
    """
    path = Path(target)
    name, what = path.name.rpartition("@")[0], f"{path.parent.name} {source}"
    total = sum(length for length, _ in stamp.values())
    told = Told("sent", total, progress)

    def blocks(length: int) -> Iterator[bytes]:
        while length:
            block = os.read(0, min(CHUNK, length))
            if not block:
                raise DeployError(
                    f"{what} did not arrive whole ({size(told.done)} of {size(total)}); "
                    "the next deploy sends it again"
                )
            length -= len(block)
            yield block

    with locked(path.parent, name, "state: in fabric.yaml", progress):
        clear(path.parent, name)
        if whole(path):
            return "there already"
        free = shutil.disk_usage(path.parent).free
        if free < total:
            raise DeployError(
                f"{path.parent} has {size(free)} free, but {what} need {size(total)}; "
                "free some, or choose another place with state: in fabric.yaml"
            )
        parts = [(relative, length, blocks(length)) for relative, (length, _) in stamp.items()]
        try:
            fill(path, what, source, digest, stamp, parts, told, durable=True)
        except OSError as error:
            raise DeployError(f"{what} could not be written to {path}: {error.strerror}") from None
        clear(path.parent, name)
    return "received"
