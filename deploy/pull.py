"""`fab pull`: a checkpoint, a log, TensorBoard events or a whole run, brought home from a host.

What is fetched is collected beside its place and appears by rename, whole and checked by SHA-256.
A fetch that broke off goes on where it was, at the byte; one of a run that has grown fetches what is new.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy import onhost, pull_source, typedpath
from deploy.errors import USAGE, DeployError, either
from deploy.host import Host, HostError
from deploy.release import Layout
from deploy.sizes import size

WHAT = ("checkpoint", "events", "log", "run")
_CHUNK = 1 << 20  # bytes
_BATCH = 256  # files for one call
_TIMEOUT = 60.0  # seconds for a listing

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Item:
    """What is fetched from where, and where it goes."""

    what: str
    root: str  # on the host
    inside: str  # a directory there that it has to lie in, whatever links it is made of
    place: Path  # here: a directory, or, for a log, a file
    grows: bool  # whether a later pull may find more of it


def choose(layout: Layout, run_id: str | None, what: str, out: Path, checkpoint: str | None = None) -> Item:
    """The item that is meant. `run_id` is needed for all but a checkpoint of the name's newest.

    `checkpoint` is what `names/<name>/checkpoints/latest` points to; None for a command of one's own, which
    keeps that directory as it likes.
    """
    if what not in WHAT:
        raise DeployError(f"--what {what} is not one of {either(WHAT)}", code=USAGE)
    if what == "checkpoint":
        place = layout.checkpoints
        if checkpoint is None:
            return Item(what, place, place, out / f"{layout.name}-checkpoints", True)
        if not pull_source.is_checkpoint(checkpoint):
            raise DeployError(f"the host offers {checkpoint!r}, which is no checkpoint of ours")
        return Item(what, f"{place}/{checkpoint}", place, out / checkpoint.replace("/", "-"), False)
    if run_id is None or not pull_source.is_run_id(run_id):
        raise DeployError(f"the host offers {run_id!r}, which is no run of ours")
    run_path = f"{layout.runs}/{run_id}"
    if what == "run":
        return Item(what, run_path, run_path, out / run_id, True)
    if what == "events":
        return Item(what, f"{run_path}/events", run_path, out / f"{run_id}-events", True)
    return Item(what, f"{run_path}/log", run_path, out / f"{run_id}.log", True)


def fetch(host: Host, item: Item, progress: Progress = lambda text: None) -> str:
    """Bring an item home; returns what was done, for people. Raises DeployError; what is there stays."""
    if typedpath.look(item.place, str(item.place)) and not item.grows:
        return f"{item.place} is there already"
    found = onhost.ask(host, "deploy.pull_source:listing", item.root, item.inside, timeout=_TIMEOUT)
    files = found["files"]
    if not files:
        raise DeployError(f"{host.name}: {item.root} is empty, so there is nothing to pull")
    for file in files:
        if os.path.isabs(file["name"]) or ".." in Path(file["name"]).parts:
            raise DeployError(
                f"{host.name} offers a file named {file['name']!r}, which leads out of {item.place}"
            )
    incoming = item.place.with_name(f".{item.place.name}.incoming")
    try:
        incoming.mkdir(parents=True, exist_ok=True)
        _begin_with(item.place, incoming, files)
        fetched = _fill(host, found["root"], files, incoming, progress)
        _appear(item, incoming, files)
    except OSError as error:
        raise DeployError(
            f"{error.filename or incoming} cannot be written ({error.strerror}); "
            "choose another place with --out"
        ) from None
    total = sum(file["size"] for file in files)
    return (
        f"{item.place}: {len(files)} file{'s' * (len(files) != 1)}, {size(total)} ({size(fetched)} fetched)"
    )


def missing(files: Sequence[Mapping[str, Any]], incoming: Path) -> list[tuple[str, int, int]]:
    """(name, offset, size) of what has still to be fetched. A file with its size and time is complete."""
    wanted = []
    for file in files:
        path = incoming / file["name"]
        there = path.stat() if path.is_file() else None
        if there and there.st_size == file["size"] and abs(there.st_mtime - file["modified"]) < 0.001:
            continue
        offset = min(there.st_size, file["size"]) if there else 0
        wanted.append((file["name"], offset, file["size"]))
    return wanted


def _begin_with(place: Path, incoming: Path, files: Sequence[Mapping[str, Any]]) -> None:
    """Let what an earlier pull brought count for this one. Copies, so that the earlier one stays as it is."""
    if not place.is_dir():
        return
    for file in files:
        old, new = place / file["name"], incoming / file["name"]
        if old.is_file() and not new.exists():
            new.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(old, new)


def _fill(
    host: Host, root: str, files: Sequence[Mapping[str, Any]], incoming: Path, progress: Progress
) -> int:
    """Fetch what is missing; returns the number of bytes. A file with wrong bytes is fetched anew, once."""
    by_name = {file["name"]: file for file in files}
    fetched = 0
    for attempt in (1, 2):
        wanted = missing(files, incoming)
        total = sum(end - offset for _, offset, end in wanted)
        if wanted and total:
            progress(f"fetching {size(total)} from {host.name}")
        bad: list[str] = []
        for start in range(0, len(wanted), _BATCH):
            batch = wanted[start : start + _BATCH]
            fetched += _receive(host, root, batch, by_name, incoming, bad)
        if not bad:
            return fetched
        if attempt == 2:
            break
    raise DeployError(f"{host.name}: {root}/{bad[0]} arrived damaged twice; it may be changing, try again")


def _receive(
    host: Host,
    root: str,
    batch: Sequence[tuple[str, int, int]],
    by_name: Mapping[str, Mapping[str, Any]],
    incoming: Path,
    bad: list[str],
) -> int:
    process = onhost.open(host, "deploy.pull_source:send", root, list(batch), bulk=True)
    assert process.stdout
    count = 0
    try:
        for name, offset, end in batch:
            path = incoming / name
            path.parent.mkdir(parents=True, exist_ok=True)
            digest = hashlib.sha256()
            with open(path, "r+b" if path.exists() else "w+b") as file:
                left = offset
                while left > 0 and (chunk := file.read(min(_CHUNK, left))):
                    digest.update(chunk)
                    left -= len(chunk)
                file.truncate(offset)
                file.seek(offset)
                for chunk in _exactly(process.stdout, end - offset):
                    file.write(chunk)
                    digest.update(chunk)
                    count += len(chunk)
            told = b"".join(_exactly(process.stdout, digest.digest_size))
            if told != digest.digest():
                path.unlink()
                bad.append(name)
                continue
            path.chmod(int(by_name[name]["mode"]) & 0o777 | 0o600)
            os.utime(path, (by_name[name]["modified"],) * 2)
        return count
    except EOFError:
        words = onhost.last_words(process)
        raise HostError(f"{host.name}: {words}; the same pull again goes on where it was") from None
    finally:
        onhost.close(process)


def _exactly(stream: Any, count: int) -> Any:
    """The next `count` bytes of a stream, in pieces. Raises EOFError if it ends before."""
    while count > 0:
        chunk = stream.read(min(_CHUNK, count))
        if not chunk:
            raise EOFError
        count -= len(chunk)
        yield chunk


def _appear(item: Item, incoming: Path, files: Sequence[Mapping[str, Any]]) -> None:
    """Put what has arrived in its place by rename; the segments of a log become one file."""
    known = {file["name"] for file in files}
    for folder, _, names in os.walk(incoming):
        for name in names:  # of an interrupted pull, but gone from the host since
            path = Path(folder) / name
            if str(path.relative_to(incoming)) not in known:
                path.unlink()
    if item.what == "log":
        joined = item.place.with_name(f".{item.place.name}.joined")
        segments = sorted(
            (file["name"] for file in files if file["name"].endswith(".log")),
            key=lambda name: int(name.partition(".")[0]),
        )
        with open(joined, "wb") as out:
            for segment in segments:
                with open(incoming / segment, "rb") as part:
                    shutil.copyfileobj(part, out, _CHUNK)
        os.replace(joined, item.place)
        shutil.rmtree(incoming)
        return
    old = item.place.with_name(f".{item.place.name}.old")
    if item.place.exists():
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(old)
        os.rename(item.place, old)
    os.rename(incoming, item.place)
    shutil.rmtree(old, ignore_errors=True)
