"""Which copies of weights and data lie on a host, who uses them, and their removal.

A copy is used while any process of the machine, in a container or not, has a file of it open or mapped, or
has it mounted, as a running container has: by device and inode, since in a container it has another path.
Runs ON the host, asked by `deploy.weights_tasks`. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deploy import manifest, procfs, room, weights_store
from deploy.errors import DeployError
from deploy.manifest import Progress, silent
from trainer import status

File = tuple[int, int]  # device, inode
_INCOMING = re.compile(r"\.(?!pruned-)(.+)\.incoming\.([^.]+)")  # see weights_store.incoming_of
_ASIDE = re.compile(
    r"\.(?:pruned|damaged)-(.+)(?:@|\.incoming\.)([^@.]+)-\d+"
)  # `evict`, weights_store.publish


def listing(state: str | None, shm: str | None) -> list[dict[str, Any]]:
    """Every copy, those in shared memory first, newest first.

    An item: path, name, digest, where (memory | disk), kind (weights | data), bytes (of all files, a blob
    once), memory (bytes of it that are taken in memory now), modified (Unix seconds) and age, linked (whether
    ``<name>`` points to it), whole, manifest (whether it has one: the toy, which the trainer makes there, has
    none), partial (what an interrupted push left, and the next one goes on with),
    source, runs (ids that were started with it), processes (pids).
    """
    state, shm = state or room.state_root(), shm or room.shm_root()
    places = [(Path(shm), "memory", "weights")]
    places += [(Path(state, kind), "disk", kind) for kind in ("weights", "data")]
    copies = [
        (path, where, kind)
        for place, where, kind in places
        for path in _entries(place)
        if parts(path) and path.is_dir() and not path.is_symlink()
    ]
    files = {path: all_of(path) for path, _, _ in copies}
    using = users([one for found in files.values() for one in found])
    runs = [(run.path.name, _text(run.path)) for run in status.list_runs(Path(state) / "runs")]
    found = [
        {
            **_item(path, where, kind),
            "runs": [run for run, text in runs if json.dumps(str(path))[1:-1] in text],
            "processes": sorted({pid for one in files[path] for pid in using.get(one, ())}),
        }
        for path, where, kind in copies
    ]
    return sorted(found, key=lambda one: (one["where"] != "memory", -one["modified"]))


def parts(path: Path) -> tuple[str, str, bool] | None:
    """(name, digest, whether it is there in part only) of a copy, by its name; None for anything else."""
    partial = _INCOMING.fullmatch(path.name)
    if partial:
        return partial[1], partial[2], True
    aside = _ASIDE.fullmatch(path.name)
    if aside:  # a removal that was killed
        return aside[1], aside[2], True
    name, at, digest = path.name.rpartition("@")
    return (name, digest, False) if at and name and not name.startswith(".") else None


def _item(path: Path, where: str, kind: str) -> dict[str, Any]:
    seen = files_of(path)
    name, digest, partial = parts(path) or (path.name, "", False)
    whole = None if partial else manifest.whole(path)
    link, modified = path.with_name(name), os.stat(path).st_mtime
    return {
        "path": str(path),
        "name": name,
        "digest": str((whole or {}).get("digest") or digest),
        "where": where,
        "kind": kind,
        "bytes": sum(one.st_size for one in seen.values()),
        "memory": sum(one.st_blocks * 512 for one in seen.values()) if where == "memory" else 0,
        "modified": modified,
        "age": time.time() - modified,
        "linked": link.is_symlink() and os.path.realpath(link) == os.path.realpath(path),
        "whole": whole is not None,
        "manifest": os.path.lexists(path / manifest.FILE),
        "partial": partial,
        "source": (whole or {}).get("source"),
    }


def _entries(place: Path) -> list[Path]:
    try:
        return sorted(place.iterdir())
    except OSError:
        return []


def _text(run: Path) -> str:
    found = ""
    for name in ("run.json", "boot.json"):
        try:
            found += (run / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
    return found


# -- who uses it -------------------------------------------------------------------------------------------


def files_of(path: Path) -> dict[File, os.stat_result]:
    """Every file below `path` once, however many names it has there."""
    found = {}
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                one = os.lstat(os.path.join(folder, name))
            except OSError:
                continue
            found[one.st_dev, one.st_ino] = one
    return found


def all_of(path: Path) -> set[File]:
    """Every file below `path`, and the directory itself, which is what a container mounts."""
    found = set(files_of(path))
    try:
        one = os.stat(path)
    except OSError:
        return found
    return {*found, (one.st_dev, one.st_ino)}


def users(files: Iterable[File]) -> dict[File, set[int]]:
    """The processes that have these files open, mapped or mounted, as far as we may look.

    Of those that have the same mounts the first stands for all.
    """
    wanted = set(files)
    devices = {device for device, _ in wanted}
    found: dict[File, set[int]] = {}
    seen: set[str] = set()
    for pid in sorted(procfs.processes()) if wanted else ():
        for one in (_mapped(pid) | _open(pid) | _mounted(pid, devices, seen)) & wanted:
            found.setdefault(one, set()).add(pid)
    return found


def _mounted(pid: int, devices: set[int], seen: set[str]) -> set[File]:
    """What of these devices is mounted where a process is; nothing for mounts that were looked at before."""
    found: set[File] = set()
    try:
        space = os.readlink(f"/proc/{pid}/ns/mnt")
    except OSError:
        return found
    if space in seen:
        return found
    seen.add(space)
    for line in procfs.read(pid, "mountinfo").splitlines():
        words = line.split(b" ")
        major, _, minor = words[2].partition(b":") if len(words) > 4 else (b"", b"", b"")
        if not minor or os.makedev(int(major), int(minor)) not in devices:
            continue
        place = re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), words[4])
        try:
            one = os.stat(b"/proc/%d/root%s" % (pid, place))
        except OSError:
            continue
        found.add((one.st_dev, one.st_ino))
    return found


def _mapped(pid: int) -> set[File]:
    found = set()
    for line in procfs.read(pid, "maps").splitlines():
        words = line.split(None, 5)
        if len(words) > 4 and words[4] != b"0":
            major, _, minor = words[3].partition(b":")
            found.add((os.makedev(int(major, 16), int(minor, 16)), int(words[4])))
    return found


def _open(pid: int) -> set[File]:
    found: set[File] = set()
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return found
    for name in names:
        try:
            one = os.stat(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        found.add((one.st_dev, one.st_ino))
    return found


# -- checking and removing ---------------------------------------------------------------------------------


def verify(paths: list[str], progress: Progress = silent) -> dict[str, list[str]]:
    """Read copies again: what is wrong with each, as sentences."""
    found = {}
    for path in paths:
        try:
            found[path] = manifest.verify(Path(path), progress)
        except DeployError as error:
            found[path] = [str(error)]
    return found


def evict(place: str, path: str, progress: Progress = silent) -> int:
    """Remove a copy in `place` that no process uses. Returns the bytes that it had.

    Raises DeployError, and leaves all as it is, while a process has a file of it open or mapped, or a
    container has it mounted.
    """
    target = Path(path)
    known = parts(target)
    if target.parent != Path(place) or known is None or target.is_symlink():
        raise DeployError(f"{path} is no copy in {place}; fab weights.list shows what is there")
    name = known[0]
    with weights_store.locked(target.parent, name, weights_store.SHM_KEY, progress):
        if not target.is_dir():
            raise DeployError(f"{path} is not there any more")
        held = users(all_of(target))
        pids = sorted({pid for some in held.values() for pid in some})
        if pids:
            who = ", ".join(_describe(pid) for pid in pids[:3])
            more = f" and {len(pids) - 3} more" if len(pids) > 3 else ""
            raise DeployError(
                f"{path} is used by {who}{more}; stop what runs there first (fab status, fab stop)"
            )
        size = int(_item(target, "memory", "weights")["bytes"])
        link = target.with_name(name)
        if link.is_symlink() and os.path.realpath(link) == os.path.realpath(target):
            link.unlink()
        trash = target.with_name(f".pruned-{target.name.lstrip('.')}-{os.getpid()}")
        os.rename(target, trash)
        shutil.rmtree(trash)
    return size


def _describe(pid: int) -> str:
    words = procfs.read(pid, "cmdline").replace(b"\0", b" ").decode("utf-8", "replace").strip()
    shown = "".join(char if char.isprintable() else " " for char in words)[:60].rstrip()
    return f"process {pid} ({shown})" if shown else f"process {pid}"
