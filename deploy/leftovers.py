"""The host's end of `fab prune`: what lies in the state and in shared memory, and its removal.

Runs ON the host, through `deploy.onhost`. What is removed is decided elsewhere (`deploy.prune`); here it is
looked at once more, since minutes may have passed. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

from deploy import procfs
from trainer import status

MANIFEST = ".drafthouse.json"  # in every copy of weights or data that we made
TRASH = ".pruned-"
STORES = ("weights", "data")  # below the state: copies on disk


def survey(state: str, shm: str) -> dict[str, Any]:
    """All that could be removed, and what says whether it may be. Sizes in bytes, times in Unix seconds.

    names {name: {current, previous, releases [item], checkpoints [item], latest}}, runs [item with run_id,
    name, alive, release, image, reason, uses], copies [item], tools [item], boot (a name of tools), leftovers
    [item]; an item is {path, id, bytes, modified}, and `uses` are the copies that run.json or boot.json name.
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
        "runs": [_run(run, copies) for run in status.list_runs(root / "runs")],
        "copies": [_item(path) for path in copies],
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
    places = [memory, root / "tools", *(root / name for name in STORES)]
    for name in _entries(root / "names"):
        places.append(name / "releases")
    found = []
    for place in places:
        try:
            entries = sorted(place.iterdir())
        except OSError:
            continue
        found += [
            path for path in entries if path.name.startswith(".") and path.is_dir() and not path.is_symlink()
        ]
    return found


# -- removing ----------------------------------------------------------------------------------------------


def remove(state: str, shm: str, paths: list[str]) -> dict[str, Any]:
    """Remove what `survey` listed. Returns {"removed": [path], "kept": [[path, why]]}.

    A thing disappears at once, by a rename; its bytes are given back after that.
    """
    root, memory = Path(state), Path(shm)
    removed: list[str] = []
    kept: list[list[str]] = []
    for text in paths:
        path = Path(text)
        why = _in_use(path, root, memory)
        if why is None:
            try:
                _remove(path)
                removed.append(text)
                continue
            except FileNotFoundError:
                continue
            except OSError as error:
                why = f"cannot be removed ({error.strerror})"
        kept.append([text, why])
    return {"removed": removed, "kept": kept}


def _remove(path: Path) -> None:
    if path.name.startswith(TRASH):
        trash = path
    else:
        trash = path.with_name(f"{TRASH}{path.name}-{os.getpid()}")
        os.rename(path, trash)
    for folder, folders, _ in os.walk(trash):  # releases are read-only
        for name in folders:
            inner = os.path.join(folder, name)
            if not os.path.islink(inner):
                os.chmod(inner, 0o700)
    shutil.rmtree(trash)


def _in_use(path: Path, root: Path, memory: Path) -> str | None:
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
        return None
    if len(way) == 4 and way[0] == "names" and way[2] == "checkpoints":
        if _first(root / "names" / way[1] / "checkpoints" / "latest") == path.name:
            return "has the newest checkpoint"
        return "is in progress" if status.RunDir(root / "runs" / path.name).alive() else None
    if len(way) == 2 and way[0] == "tools":
        if path.name == _link(root / "tools" / "boot"):
            return "is what starts runs after a reboot"
        return "is used by a process" if _on_a_command_line(str(path)) else None
    copy = (below[0] == memory and len(way) == 1) or (len(way) == 2 and way[0] in STORES)
    if copy and (path.name.startswith(".") or (path / MANIFEST).is_file()):
        return "is mapped by a process" if _mapped(str(path)) else None
    return "is no place of Drafthouse's"


def _on_a_command_line(path: str) -> bool:
    wanted = path.encode()
    return any(wanted in procfs.read(pid, "cmdline").split(b"\0") for pid in procfs.processes())


def _mapped(path: str) -> bool:
    wanted = path.encode() + b"/"
    return any(wanted in procfs.read(pid, "maps") for pid in procfs.processes())


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
