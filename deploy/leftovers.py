"""The host's end of `fab prune`: what lies in the state and in shared memory, and its removal.

Runs ON the host, through `deploy.onhost`. What is removed is decided elsewhere (`deploy.prune`); here it is
looked at once more, since minutes may have passed. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy import files, pct_host, procfs, weights_uses
from trainer import status

MANIFEST = ".drafthouse.json"  # in every copy of weights or data that we made
TRASH = ".pruned-"
STORES = ("weights", "data")  # below the state: copies on disk
KEPT_ASIDE = 30 * 86400.0  # seconds; a damaged release was moved aside so that nothing is lost
SHIPPED = ("images", "blobs")  # below the state: the layers of the last ship, which the next one builds on
SHIPPING = ("incoming", "seeds")  # beside them: what a ship is at work with
SHIP_PATIENCE = 86400.0  # seconds in which an interrupted ship may be gone on with
LOCK_PATIENCE = 0.3  # seconds: a probe that looks at the lock holds it for a moment
# Where copies are made, which may be all programs' shared memory: only what `weights_store` and we leave.
_OURS = re.compile(r"\.(?:.+\.incoming\.[^.]+|damaged-.+@.+|pruned-.+-\d+)")
_ASIDE = re.compile(r"\.damaged-.+-(\d+)")  # by `release.write`, with the time in seconds


def survey(state: str, shm: str) -> dict[str, Any]:
    """All that could be removed, and what says whether it may be. Sizes in bytes, times in Unix seconds.

    names {name: {current, previous, releases [item], checkpoints [item], latest, busy}}, runs [item with
    run_id, name, alive, release, image, reason, uses], containers [{id, name, release, running}] (Proxmox's),
    copies [item], shipped (item with reference, or null), tools [item], boot (a name of tools), leftovers
    [item]; an item is {path, id, bytes, modified}, `uses` are the copies that run.json or boot.json name,
    `busy` says who deploys the name just now, and `reference` is the image whose layers have been shipped, or
    null.
    """
    root, memory = Path(state), Path(shm)
    copies = [
        path
        for store in (memory, *(root / name for name in STORES))
        for path in _entries(store)
        if "@" in path.name and path.is_dir() and not path.is_symlink() and (path / MANIFEST).is_file()
    ]
    tools = root / "tools"
    return {
        "time": time.time(),
        "names": {path.name: _name(path) for path in _entries(root / "names") if path.is_dir()},
        "containers": pct_host.listing(state),
        "runs": [_run(run, copies) for run in status.list_runs(root / "runs")],
        "copies": [_item(path) for path in copies],
        "shipped": _shipped(root),
        "tools": [_item(path) for path in _entries(tools) if path.is_dir() and not path.is_symlink()],
        "boot": _link(tools / "boot"),
        "leftovers": [_item(path) for path in _leftovers(root, memory)],
    }


def _name(path: Path) -> dict[str, Any]:
    return {
        "current": _link(path / "current"),
        "previous": _link(path / "previous"),
        "releases": [_item(entry) for entry in _entries(path / "releases") if entry.is_dir()],
        "checkpoints": [
            _item(entry)
            for entry in _entries(path / "checkpoints")
            if entry.is_dir() and not entry.is_symlink() and _is_run_id(entry.name)
        ],
        "latest": _first(path / "checkpoints" / "latest"),
        "busy": _holder(path, "deploy") or _holder(path, "switch"),
    }


def _run(run: status.RunDir, copies: list[Path]) -> dict[str, Any]:
    written = _object(run.path / "run.json")
    text = _text(run.path / "run.json") + _text(run.path / "boot.json")
    release = written.get("release")
    return {
        **_item(run.path),
        "run_id": run.path.name,
        "name": status.split_run_id(run.path.name)[1],
        "alive": run.alive(),
        "release": release.get("id") if isinstance(release, dict) else None,
        "image": written.get("image"),
        "reason": _object(run.path / "exit.json").get("reason"),
        "uses": [str(path) for path in copies if str(path) in text],
    }


def _leftovers(root: Path, memory: Path) -> list[Path]:
    """What an interrupted write, push or prune left: hidden directories where things appear by rename."""
    copies = [memory, *(root / name for name in STORES)]
    own = [root / "tools", root / "images", *(name / "releases" for name in _entries(root / "names"))]
    found = [path for name in SHIPPING if _abandoned(path := root / "images" / name)]
    for place in (*copies, *own):
        try:
            entries = sorted(place.iterdir())
        except OSError:
            continue
        found += [
            path
            for path in entries
            if _is_leftover(path.name, place in own) and path.is_dir() and not path.is_symlink()
        ]
    return found


def _shipped(root: Path) -> dict[str, Any] | None:
    blobs = root.joinpath(*SHIPPED)
    if not _entries(blobs):
        return None
    return {**_item(blobs), "reference": _object(blobs.parent / "shipped.json").get("reference")}


def _abandoned(path: Path) -> bool:
    """Whether a directory of files has some, and none of today."""
    item = _item(path)
    return bool(item["bytes"]) and time.time() - item["modified"] > SHIP_PATIENCE


def _is_leftover(name: str, own: bool) -> bool:
    """Whether a directory of this name is one; `own` says that only we write where it lies."""
    aside = _ASIDE.fullmatch(name)
    if own and aside:
        return time.time() - int(aside[1]) > KEPT_ASIDE
    return name.startswith(".") if own else _OURS.fullmatch(name) is not None


# -- removing ----------------------------------------------------------------------------------------------


def remove(state: str, shm: str, paths: list[str], name: str | None = None, by: str = "") -> dict[str, Any]:
    """Remove what `survey` listed. Returns {"removed": [path], "kept": [[path, why]]}.

    Of what belongs to one `name` the caller holds the deploy lock; without it nobody deploys any name while
    things disappear, which they do by a rename. Their bytes are given back after that.
    """
    root, memory = Path(state), Path(shm)
    trash: dict[str, Path] = {}
    kept: list[list[str]] = []
    with _quiet(root, name, by) as busy:
        counting = _counting(root)
        for text in paths:
            path = Path(text)
            why = f"stays: {busy}" if busy else _in_use(path, root, memory, counting)
            if why is None:
                try:
                    trash[text] = _aside(path)
                except FileNotFoundError:
                    pass
                except OSError as error:
                    why = f"cannot be removed ({error.strerror})"
            if why is not None:
                kept.append([text, why])
    removed = []
    for text, path in trash.items():
        try:
            _remove(path)
            removed.append(text)
        except OSError as error:
            kept.append([text, f"cannot be removed ({error.strerror})"])
    return {"removed": removed, "kept": kept}


def at_work(state: str) -> dict[str, Any]:
    """What keeps images: {"busy": who deploys just now, or null, "images": those that runs count on}."""
    root = Path(state)
    homes = _entries(root / "names")
    busy = [_holder(home, lock) for home in homes for lock in ("deploy", "switch")]
    return {
        "busy": next((words for words in busy if words), None),
        "images": [one.image for one in _counting(root) if one.image],
    }


@contextlib.contextmanager
def _quiet(root: Path, name: str | None, by: str) -> Iterator[str | None]:
    """Let no deploy begin meanwhile. What it yields says who is at work already; then nothing may go."""
    busy = None
    with contextlib.ExitStack() as held:
        for home in _entries(root / "names") if name is None else [root / "names" / name]:
            if name is None and busy is None and home.is_dir():
                busy = _hold(home, held, by)
            busy = busy or _holder(home, "switch")
        yield busy


def _hold(home: Path, held: contextlib.ExitStack, by: str) -> str | None:
    lock = os.open(home / "deploy.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    held.callback(os.close, lock)
    end = time.monotonic() + LOCK_PATIENCE
    while not files.take(lock):
        if time.monotonic() > end:
            return _sentence(home, "deploy", files.words(lock))
        time.sleep(0.02)
    held.callback(os.ftruncate, lock, 0)
    files.say(lock, {"by": by, "what": "prune", "since": time.time()})
    return None


def _holder(home: Path, kind: str) -> str | None:
    """Who holds the deploy or the switch lock of a name, in a sentence; None if it is free."""
    with contextlib.suppress(OSError):
        words = files.holder(home / f"{kind}.lock")
        return None if words is None else _sentence(home, kind, words)
    return None


def _sentence(home: Path, kind: str, words: dict[str, Any]) -> str:
    by = f" by {words['by']}" if words.get("by") else ""
    return f"a {words.get('what') or kind} of {home.name}{by} is under way"


@dataclass(frozen=True)
class _Counting:
    """A run in progress, or the newest of its name, which a switch may be about to start."""

    run_id: str
    name: str
    release: str | None
    image: str | None
    text: str  # of run.json and boot.json


def _counting(root: Path) -> list[_Counting]:
    runs = status.list_runs(root / "runs")
    newest = {status.split_run_id(run.path.name)[1]: run.path for run in runs}
    found = []
    for run in runs:
        name = status.split_run_id(run.path.name)[1]
        if newest[name] == run.path or run.alive():
            known = _run(run, [])
            text = _text(run.path / "run.json") + _text(run.path / "boot.json")
            found.append(_Counting(run.path.name, name, known["release"], known["image"], text))
    return found


def _aside(path: Path) -> Path:
    if path.name.startswith(TRASH):
        return path
    trash = path.with_name(f"{TRASH}{path.name}-{os.getpid()}")
    os.rename(path, trash)
    return trash


def _remove(trash: Path) -> None:
    for folder, folders, _ in os.walk(trash):  # releases are read-only
        for name in folders:
            inner = os.path.join(folder, name)
            if not os.path.islink(inner):
                os.chmod(inner, 0o700)
    shutil.rmtree(trash)


def _in_use(path: Path, root: Path, memory: Path, counting: Sequence[_Counting]) -> str | None:
    """Why a path may not be removed; None if it may. Only what can be ours is ever touched."""
    below = [place for place in (root, memory) if place in path.parents]
    if not below or ".." in path.parts or path.is_symlink():
        return "is no place of Drafthouse's"
    way = path.relative_to(below[0]).parts
    if len(way) == 2 and way[0] == "runs":
        return "is in progress" if status.RunDir(path).alive() else None
    if len(way) == 4 and way[0] == "names" and way[2] == "releases":
        home = root / "names" / way[1]
        if path.name in (_link(home / "current"), _link(home / "previous")):
            return "is current or previous"
        if path.name.startswith("."):
            return None if _is_leftover(path.name, True) else "was moved aside less than 30 days ago"
        using = [one.run_id for one in counting if (one.name, one.release) == (way[1], path.name)]
        return f"is what {using[-1]} starts from" if using else None
    if len(way) == 4 and way[0] == "names" and way[2] == "checkpoints":
        if _first(root / "names" / way[1] / "checkpoints" / "latest") == path.name:
            return "has the newest checkpoint"
        return "is in progress" if status.RunDir(root / "runs" / path.name).alive() else None
    if len(way) == 2 and way[0] == "tools":
        if path.name == _link(root / "tools" / "boot"):
            return "is what starts runs after a reboot"
        return "is used by a process" if _on_a_command_line(str(path)) else None
    if len(way) == 2 and way[0] == "images":
        if path.name.startswith("."):
            return None
        if way == SHIPPED or (path.name in SHIPPING and _abandoned(path)):
            return (
                "is being loaded by the engine"
                if files.holder(root / "images" / "load.lock") is not None
                else None
            )
    copy = (below[0] == memory and len(way) == 1) or (len(way) == 2 and way[0] in STORES)
    if copy and (_is_leftover(path.name, False) or (path / MANIFEST).is_file()):
        if _is_filled(path):
            return "is being filled by a push or a deploy"
        if weights_uses.users(weights_uses.all_of(path)):
            return "is used by a process"
        using = [one.run_id for one in counting if str(path) in one.text]
        return f"is what {using[-1]} starts from" if using else None
    return "is no place of Drafthouse's"


def _on_a_command_line(path: str) -> bool:
    wanted = path.encode()
    return any(wanted in procfs.read(pid, "cmdline").split(b"\0") for pid in procfs.processes())


def _is_filled(path: Path) -> bool:
    """Whether what is there in part belongs to a copy that somebody makes just now."""
    known = weights_uses.parts(path)
    if known is None or not known[2]:
        return False
    return files.holder(path.with_name(f".{known[0]}.lock")) is not None


# -- reading -----------------------------------------------------------------------------------------------


def _entries(path: Path) -> list[Path]:
    try:
        return sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    except OSError:
        return []


def _item(path: Path) -> dict[str, Any]:
    """Where it is, its name, the size of all its files, and when the newest of them was written."""
    total, newest = 0, 0.0
    for folder, _, names in os.walk(path):
        for name in (".", *names):
            try:
                info = os.lstat(os.path.join(folder, name))
            except OSError:
                continue
            total += info.st_size if name != "." else 0
            newest = max(newest, info.st_mtime)
    return {"path": str(path), "id": path.name, "bytes": total, "modified": newest}


def _object(path: Path) -> dict[str, Any]:
    try:
        value = status.read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _link(path: Path) -> str | None:
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return None


def _first(path: Path) -> str | None:
    """``0007-demo`` of a link to ``0007-demo/step-00000120``."""
    try:
        parts = Path(os.readlink(path)).parts
    except OSError:
        return None
    return parts[-2] if len(parts) > 1 else None


def _is_run_id(name: str) -> bool:
    try:
        status.split_run_id(name)
    except ValueError:
        return False
    return True
