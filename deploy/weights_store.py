"""Directories of weights and of data as they lie on a host: looked at, staged, kept, published.

``<shm>/<name>@<digest12>`` holds a copy that never changes, ``<shm>/<name>`` points to it. What came from
another machine lies on disk too, as ``<state>/weights/<name>@<digest12>`` or ``<state>/data/...``, so that a
reboot loses nothing. A directory is filled as ``.<name>.incoming.<digest12>`` and appears under its name by a
rename, once every byte of it has been read back. `deploy.receiver` fills them from another machine.

Runs ON the host, asked by `deploy.weights` and by the boot unit. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploy import files, hashing, manifest, room, typedpath
from deploy.errors import DeployError
from deploy.manifest import Chunk, Progress, Told, silent, whole
from deploy.sizes import size
from deploy.weights_check import check_model_dir
from deploy.weights_wanted import NEW, OLD, another, describes

PAUSE = 0.1  # seconds between two looks at a lock that somebody else has
TELL = 10.0  # seconds between two words about waiting for it
SHM_KEY, STATE_KEY = "shm: in fabric.yaml", "state: in fabric.yaml"


# -- looking -----------------------------------------------------------------------------------------------


def look(source: str, shm: str, read: bool = True, progress: Progress = silent) -> dict[str, Any]:
    """What there is to say of a model directory, and whether it is in shared memory already.

    ``{"problems": [sentence]}``, or source, action (in-place | present | copy | changed), path (in shared
    memory; None if not known), name, digest, bytes, held and root of a `deploy.weights.Weights`. Hashes only
    what is new or changed; without `read` not even that: then it is called changed: 50 GB take a minute.
    """
    given = typedpath.expand(source)
    problems = check_model_dir(given) or place_problems(Path(shm))
    if problems:
        return {"problems": problems}
    found: dict[str, Any] = {"source": str(given), "name": manifest.name_of(given), "root": shm, "digest": ""}
    try:
        outline = manifest.outline(given, "")
    except DeployError as error:
        return {"problems": [str(error)]}
    stamp = outline["stamp"]
    found["bytes"], found["held"] = taken(outline), held(shm, found["name"])
    if on_tmpfs(given):
        return {**found, "action": "in-place", "path": str(given)}
    copy = manifest.of_copy(Path(shm) / found["name"])
    if copy and copy.get("stamp") == stamp and copy.get("source") == str(given):
        found["digest"] = str(copy.get("digest"))
    elif not read:
        return {**found, "action": "changed", "path": None}
    else:
        progress(f"reading {size(found['bytes'])} of weights")
        found["digest"] = manifest.tree_digest(given, progress)
    path = Path(shm) / f"{found['name']}@{found['digest'][:12]}"
    return {**found, "action": "present" if whole(path) else "copy", "path": str(path)}


def known(place: str, name: str) -> list[dict[str, Any]]:
    """The versions of `name` that lie in `place`: path, and digest, source and stamp of their manifest.

    Only those of which every file has its length.
    """
    found = []
    for path in sorted(Path(place).glob(f"{glob.escape(name)}@*")):
        copy = whole(path)
        if copy:
            found.append({"path": str(path), **{key: copy[key] for key in ("digest", "source", "stamp")}})
    return found


def taken(outline: dict[str, Any]) -> int:
    """Bytes that a copy of what an outline or manifest tells of takes: what several links lead to once."""
    same = outline["same"]
    return sum(length for relative, (length, _) in outline["stamp"].items() if relative not in same)


def held(place: str, name: str) -> int:
    """Bytes that interrupted copies of `name` hold in `place`: the next takes them over, or frees them."""
    left = Path(place).glob(f".{glob.escape(name)}.incoming.*")
    return sum(_reserved(path) for one in left for path in one.rglob("*") if path.is_file())


def place_problems(place: Path, key: str = SHM_KEY) -> list[str]:
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


def on_tmpfs(path: Path) -> bool:
    return room.filesystem(path) == "tmpfs"


# -- making room and publishing ----------------------------------------------------------------------------


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


def base(target: Path) -> str:
    """``small`` of ``.../small@0123456789ab``."""
    return target.name.rpartition("@")[0]


def incoming_of(target: Path) -> Path:
    name, _, version = target.name.rpartition("@")
    return target.with_name(f".{name}.incoming.{version}")


def clear(place: Path, name: str, but: Path | None = None) -> None:
    """Remove damaged copies and what a killed copy left, `but` what is gone on with.

    Only with the lock: then nobody else copies.
    """
    pattern = glob.escape(name)
    for left in (*place.glob(f".{pattern}.incoming.*"), *place.glob(f".damaged-{pattern}@*")):
        if left != but:
            shutil.rmtree(left, ignore_errors=True)


def room_problem(place: Path, need: int, what: str, key: str) -> str | None:
    """Why `need` bytes more do not fit into `place`: which is short, and by how much. None if they do.

    A tmpfs takes whatever its limit allows, also where there is no memory for it: then something is killed.
    """
    free = shutil.disk_usage(place).free
    ways = f"remove what no run uses (fab weights.list, fab prune), or choose another place with {key}"
    if free < need:
        short = size(need - free)
        return f"{place} has {size(free)} free, but {what} need {size(need)}: {short} too little; {ways}"
    if not on_tmpfs(place):
        return None
    memory = room.memory()
    for holder, left in (("this host", memory["available"]), ("the container here", memory["room"])):
        if left is not None and left < need:
            return (
                f"{holder} has {size(left)} of memory free, but {what} need {size(need)} of it in {place}: "
                f"{size(need - left)} too little; {ways}"
            )
    return None


def prepare(incoming: Path, wanted: dict[str, Any], what: str, key: str, progress: Progress) -> None:
    """Make all files of a manifest in full length, their space reserved, before a byte of them is there.

    What an earlier try left there stays as it is. Raises DeployError, and leaves nothing new, without room.
    """
    new = not incoming.exists()
    try:
        incoming.mkdir(mode=0o700, exist_ok=True)
        lengths = {name: wanted["stamp"][name][0] for name in wanted["stamp"] if name not in wanted["same"]}
        there = sum(_reserved(incoming / name) for name in lengths)
        problem = room_problem(incoming.parent, max(0, sum(lengths.values()) - there), what, key)
        if problem:
            raise DeployError(problem)
        told = Told("reserved", sum(lengths.values()), progress)

        def reserve(one: tuple[str, int]) -> None:
            _reserve(incoming / _inside(one[0]), one[1])
            told.add(one[1])

        for _ in manifest.parallel(reserve, list(lengths.items())):
            pass
    except BaseException as error:
        if new:
            shutil.rmtree(incoming, ignore_errors=True)
        if isinstance(error, OSError):
            raise DeployError(f"{what} could not be written to {incoming}: {error.strerror}") from None
        raise


def _inside(relative: str) -> str:
    if os.path.isabs(relative) or ".." in Path(relative).parts:
        raise DeployError(f"{relative} leads out of its directory; correct the name of that file")
    return relative


def _reserved(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def _reserve(path: Path, length: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(descriptor, length)
        if length:
            try:
                os.posix_fallocate(descriptor, 0, length)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that cannot
                    raise
    finally:
        os.close(descriptor)


def publish(incoming: Path, target: Path, wanted: dict[str, Any], durable: bool) -> None:
    """Let a filled directory appear as `target`. Raises OSError; then it is where it was."""
    for relative, first in wanted["same"].items():
        link = incoming / _inside(relative)
        link.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            link.unlink()
        os.link(incoming / first, link)
    (incoming / manifest.FILE).unlink(missing_ok=True)
    (incoming / manifest.FILE).write_text(json.dumps(wanted) + "\n", encoding="utf-8")
    for relative in (*wanted["stamp"], manifest.FILE):
        descriptor = os.open(incoming / relative, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fchmod(descriptor, 0o444)
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    for folder, _, _ in os.walk(incoming):
        os.chmod(folder, 0o755)
    if target.exists():  # there, but not whole: a file is missing or short
        os.rename(target, target.with_name(f".damaged-{target.name}-{os.getpid()}"))
    os.rename(incoming, target)


def link_name(target: Path) -> None:
    """Point ``<name>`` to this version. Raises DeployError if something else has that name."""
    link = target.with_name(base(target))
    try:
        files.replace_link(link, target.name)
    except OSError as error:
        raise DeployError(f"{link} is in the way ({error.strerror}); move it aside") from None


# -- copying on the host -----------------------------------------------------------------------------------


def restage(source: str, path: str, digest: str, progress: Progress = silent) -> str:
    """`stage` again what a run was started with, perhaps long ago."""
    return stage(source, path, digest, progress, OLD)


def stage(
    source: str, path: str, digest: str, progress: Progress = silent, wanted: tuple[str, str] = NEW
) -> str:
    """Have the weights of `source`, whose digest is known, in shared memory at `path`, and link their name.

    Returns ``there already`` or ``copied``. Raises DeployError, nothing changed, if there is no room or the
    source is not what the digest says, which is `wanted`: NEW or OLD.
    """
    target, given = Path(path), Path(source)
    if os.path.realpath(source) == os.path.realpath(path):  # it lay in shared memory by itself
        if not given.is_dir():
            raise DeployError(f"weights {source} lay in shared memory and are gone; put them there again")
        return "there already"
    what = f"weights {source}"
    return copied(given, target, digest, what, SHM_KEY, progress, link=True, wanted=wanted)


def keep(path: str, kept: str, digest: str, progress: Progress = silent) -> str:
    """Have a copy on disk, at `kept`, of what lies in shared memory, for the time after a reboot."""
    return copied(Path(path), Path(kept), digest, f"weights {path}", STATE_KEY, progress, durable=True)


def stage_data(source: str, place: str, progress: Progress = silent) -> dict[str, Any]:
    """Copy a directory of data of this host into `place`: path, digest, bytes, and done (see `stage`)."""
    given = typedpath.expand(source)
    if typedpath.look(given, f"data {given}") != typedpath.DIRECTORY:
        raise DeployError(f"data {given} are no directory; name one on this host")
    for problem in place_problems(Path(place), STATE_KEY):  # before all of it is read
        raise DeployError(problem)
    outline, name = manifest.outline(given, ""), manifest.name_of(given)
    stamp, total = outline["stamp"], taken(outline)
    for one in known(place, name):
        if (one["source"], one["stamp"]) == (str(given), stamp):
            return {"path": one["path"], "digest": one["digest"], "bytes": total, "done": "there already"}
    progress(f"reading {size(total)} of data")
    digest = manifest.tree_digest(given, progress)
    target = Path(place) / f"{name}@{digest[:12]}"
    done = copied(given, target, digest, f"data {given}", STATE_KEY, progress, durable=True)
    return {"path": str(target), "digest": digest, "bytes": total, "done": done}


def copied(
    source: Path,
    target: Path,
    digest: str,
    what: str,
    key: str,
    progress: Progress,
    *,
    link: bool = False,
    durable: bool = False,
    wanted: tuple[str, str] = NEW,
) -> str:
    """``there already`` or ``copied``. The directory appears only when the digest is right."""
    name = base(target)
    with locked(target.parent, name, key, progress):
        clear(target.parent, name)
        done = "there already"
        if not whole(target):  # else another name's deploy was faster
            if not source.is_dir():
                raise DeployError(f"{what} do not exist; fab deploy looks for them again")
            _copy(source, target, digest, what, key, progress, durable, wanted)
            clear(target.parent, name)
            done = "copied"
        if link:
            link_name(target)
    return done


def _copy(
    source: Path,
    target: Path,
    digest: str,
    what: str,
    key: str,
    progress: Progress,
    durable: bool,
    wanted: tuple[str, str],
) -> None:
    """Copy on several threads. Each chunk is hashed as it lies in its new place, once for both sides."""
    given = whole(source)
    ours = given is not None and given["digest"] == digest and "chunks" in given
    if given is None or not ours:
        if given is not None and describes(given, source):
            raise DeployError(another(what, given["digest"], digest, wanted))
        given = manifest.outline(source, hashing.names()[0])
    incoming = incoming_of(target)
    prepare(incoming, given, what, key, progress)
    try:
        pieces = manifest.chunks(given)
        told = Told("copied", sum(one.length for one in pieces), progress)
        reader = manifest.Reader(source, given["hash"])

        def copy(one: Chunk) -> tuple[Chunk, bytes]:
            found = reader.copy(one, incoming)
            if one.hash not in ("", found.hex()):
                where = f"{source / one.relative} is damaged near byte {one.offset:,}"
                raise DeployError(f"{where}; push it again")
            told.add(one.length)
            return one, found

        made = manifest.fill(given, manifest.parallel(copy, pieces))
        if not ours and manifest.stamp_of(source) != given["stamp"]:
            raise DeployError(f"{what} changed while they were copied; deploy again when they are whole")
        if made["digest"] != digest:
            raise DeployError(another(what, made["digest"], digest, wanted))
        publish(incoming, target, made, durable)
    except BaseException as error:
        shutil.rmtree(incoming, ignore_errors=True)
        if isinstance(error, OSError):
            raise DeployError(f"{what} could not be copied to {target}: {error.strerror}") from None
        raise
