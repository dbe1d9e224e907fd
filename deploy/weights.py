"""Model weights: checked where they lie, then copied into shared memory, whole, versioned, behind a symlink.

``<shm>/<name>@<digest12>`` holds a copy that never changes, ``<shm>/<name>`` points to it. A run is given the
versioned path, so that new weights never appear under a process that has the old ones mapped. `toy` is not
handled here: the trainer makes it, since `docker compose up` has no deploy.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy import files
from deploy.errors import DeployError
from deploy.sizes import size

MANIFEST = ".drafthouse.json"
_CHUNK = 1 << 24  # bytes
_LARGEST_HEADER = 100 << 20  # what safetensors itself accepts


@dataclass(frozen=True)
class Weights:
    """What a deploy will do about the weights, and where the run finds them."""

    source: str  # as in the run's file
    action: str  # toy | in-place | present | copy | changed (only told to those who do not want to wait)
    path: str | None  # what the run is given; None: the digest is not known yet
    name: str = ""
    digest: str = ""
    bytes: int = 0
    root: str = ""  # of shared memory

    def describe(self) -> str:
        if self.action == "toy":
            return "toy, which the trainer makes itself on its first run and caches"
        if self.action == "in-place":
            return f"{self.path} ({size(self.bytes)}), in shared memory already, used where it lies"
        if self.action == "present":
            return f"{self.path} ({size(self.bytes)}), unchanged"
        return f"copy {self.source} ({size(self.bytes)}) to {self.path}"


# -- checks ------------------------------------------------------------------------------------------------


def check_model_dir(path: Path) -> list[str]:
    """What is wrong with a model directory, a sentence each; empty if it can be loaded.

    Reads headers only: every safetensors file must be exactly as long as its header says, and every file that
    the index names must be there. A copy that broke off, a Git LFS pointer and a half download all show here.
    """
    if not path.exists():
        return [f"weights {path} do not exist; correct weights: in the run's file"]
    if not path.is_dir():
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
    for relative, file in _files(path):
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


# -- planning ----------------------------------------------------------------------------------------------


def plan(
    source: Path, shm: Path, progress: Callable[[str], None] = lambda text: None, *, read: bool = True
) -> Weights:
    """What has to happen so that `source` is in shared memory. Reads; hashes only what is new or changed.

    Without `read` what would have to be hashed is called changed, since 50 GB take a minute. `source` must
    have passed `check_model_dir`.
    """
    total = sum(path.stat().st_size for _, path in _files(source))
    name = source.resolve().name
    if _on_tmpfs(source):
        return Weights(str(source), "in-place", str(source), name, "", total, str(shm))
    stamp = _stamp(source)
    staged = shm / name
    manifest = _json(staged / MANIFEST)
    if (
        isinstance(manifest, dict)
        and manifest.get("stamp") == stamp
        and manifest.get("source") == str(source)
    ):
        digest = str(manifest.get("digest"))
    elif not read:
        return Weights(str(source), "changed", None, name, "", total, str(shm))
    else:
        progress(f"reading {size(total)} of weights")
        digest = _tree_digest(list(_files(source)))
    path = shm / f"{name}@{digest[:12]}"
    present = _whole(path, stamp)
    return Weights(str(source), "present" if present else "copy", str(path), name, digest, total, str(shm))


def _stamp(source: Path) -> dict[str, list[int]]:
    """Size and time of change of every file: what tells whether the source is still what was copied."""
    return {relative: [path.stat().st_size, path.stat().st_mtime_ns] for relative, path in _files(source)}


def _whole(path: Path, stamp: Mapping[str, Sequence[int]]) -> bool:
    """Whether a copy in shared memory has all of its files, each as long as the source's."""
    return isinstance(_json(path / MANIFEST), dict) and all(
        (path / relative).is_file() and (path / relative).stat().st_size == length
        for relative, (length, _) in stamp.items()
    )


def stage(weights: Weights, progress: Callable[[str], None] = lambda text: None) -> None:
    """Carry the plan out. Raises DeployError, nothing changed, if there is no room or the copy differs."""
    if weights.action not in ("copy", "present"):
        return
    target = Path(str(weights.path))
    with _lock(target.parent, weights.name, progress):
        _clear(target.parent, weights.name)
        if weights.action == "copy" and not _whole(
            target, _stamp(Path(weights.source))
        ):  # else another name's deploy was faster
            _make_room_and_copy(weights, target, progress)
            _clear(target.parent, weights.name)
        link = target.with_name(weights.name)
        try:
            files.replace_link(link, target.name)
        except OSError as error:
            raise DeployError(f"{link} is in the way ({error.strerror}); move it aside") from None


@contextlib.contextmanager
def _lock(shm: Path, name: str, progress: Callable[[str], None]) -> Iterator[None]:
    """Shared memory is shared: runs of several names, and several clients, may have the same weights."""
    path = shm / f".{name}.lock"
    try:
        shm.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise DeployError(f"{path} cannot be made ({error.strerror}); correct shm: in fabric.yaml") from None
    try:
        if not files.take(lock):
            progress(f"another deploy copies weights {name} into {shm}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _clear(shm: Path, name: str) -> None:
    """Remove damaged copies and what a killed deploy left. Only with the lock: then nobody else copies."""
    for left in (*shm.glob(f".{glob.escape(name)}.incoming.*"), *shm.glob(f".damaged-{glob.escape(name)}@*")):
        shutil.rmtree(left, ignore_errors=True)


def _make_room_and_copy(weights: Weights, target: Path, progress: Callable[[str], None]) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < weights.bytes:
        raise DeployError(
            f"{target.parent} has {size(free)} free, but the weights need {size(weights.bytes)}; "
            "remove weights that no run uses, or choose another place with shm: in fabric.yaml"
        )
    _copy(Path(weights.source), target, weights, progress)


def _copy(source: Path, target: Path, weights: Weights, progress: Callable[[str], None]) -> None:
    """Copy and hash in one pass; the directory appears under its name only when the digest is right."""
    incoming = Path(tempfile.mkdtemp(prefix=f".{weights.name}.incoming.", dir=target.parent))
    try:
        hashed, done, stamp = hashlib.blake2b(digest_size=16), 0, {}
        for relative, path in _files(source):
            info = path.stat()
            stamp[relative] = [info.st_size, info.st_mtime_ns]
            hashed.update(f"{relative}\0{info.st_size}\n".encode())
            copy = incoming / relative
            copy.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "rb") as reading, open(copy, "wb") as writing:
                for chunk in iter(lambda: reading.read(_CHUNK), b""):
                    hashed.update(chunk)
                    writing.write(chunk)
                    done += len(chunk)
            copy.chmod(0o444)
            progress(f"copied {size(done)} of {size(weights.bytes)}")
        if hashed.hexdigest() != weights.digest:
            raise DeployError(
                f"weights {source} changed while they were copied; deploy again when they are whole"
            )
        manifest = {"source": str(source), "digest": weights.digest, "hash": "blake2b-128", "stamp": stamp}
        (incoming / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        incoming.chmod(0o755)
        if target.exists():  # there, but not whole: plan() found a file missing or short
            os.rename(target, target.with_name(f".damaged-{target.name}-{os.getpid()}"))
        os.rename(incoming, target)
    except BaseException as error:
        shutil.rmtree(incoming, ignore_errors=True)
        if isinstance(error, OSError):
            raise DeployError(f"weights {source} could not be copied to {target}: {error.strerror}") from None
        raise


def _files(source: Path) -> Iterator[tuple[str, Path]]:
    """(relative name, path) of what is copied, in a fixed order: all but hidden files; links are followed."""
    for folder, folders, names in os.walk(source, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                path = Path(folder) / name
                yield str(path.relative_to(source)), path


def _tree_digest(parts: list[tuple[str, Path]]) -> str:
    hashed = hashlib.blake2b(digest_size=16)
    for relative, path in parts:
        hashed.update(f"{relative}\0{path.stat().st_size}\n".encode())
        with open(path, "rb") as reading:
            for chunk in iter(lambda: reading.read(_CHUNK), b""):
                hashed.update(chunk)
    return hashed.hexdigest()


def _on_tmpfs(path: Path) -> bool:
    from deploy.machine import filesystem

    return filesystem(path) == "tmpfs"
