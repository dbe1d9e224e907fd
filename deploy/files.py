"""Acts on files that both sides need: locks with words in them; links, files and directories by rename.

Runs on both sides. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def take(lock: int) -> bool:
    """Take the lock of an open file if it is free. Its descriptor holds it until it is closed."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def words(lock: int) -> dict[str, Any]:
    """What the holder of a lock wrote into its file; empty if that is no JSON object."""
    try:
        value = json.loads(os.pread(lock, 65536, 0))
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {}


def say(lock: int, value: Mapping[str, Any]) -> None:
    """Write who holds a lock into its file. A full disk does not take the words; the lock needs none."""
    with contextlib.suppress(OSError):
        os.ftruncate(lock, 0)
        os.pwrite(lock, json.dumps(value).encode(), 0)


def holder(path: Path) -> dict[str, Any] | None:
    """The words of whoever holds the lock in the file `path`; None if nobody does. Takes nothing.

    Raises OSError for a file that is there and cannot be read.
    """
    try:
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except OSError:
        return words(lock)
    finally:
        os.close(lock)


def replace_link(path: Path, target: str) -> None:
    """Make `path` a link to `target`, at once. Raises OSError, and leaves nothing, if it cannot."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    os.symlink(target, temporary)
    try:
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise


# -- whole files and directories ---------------------------------------------------------------------------


def write_file(path: str, data: bytes, mode: int = 0o644, parents: bool = False) -> None:
    """Put `data` at `path` whole: a temporary file beside it, then a rename. Raises OSError."""
    target = Path(path)
    temporary = None
    try:
        if parents:
            target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name[:100]}.", dir=target.parent)
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise


def write_tree(path: str, files: Mapping[str, bytes], mode: int = 0o644) -> bool:
    """Make the directory `path` appear at once, with all of `files` (relative name -> content) in it.

    False, and nothing touched, if there is a `path` already. Raises OSError, and ValueError for a name that
    leads out of it.
    """
    check_names(path, files)
    target = Path(path)
    if os.path.lexists(target):
        return False
    temporary = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name[:100]}.", dir=target.parent))
        for name, data in files.items():
            file = temporary / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            file.chmod(mode)
        temporary.chmod(0o755)
        os.rename(temporary, target)
    except BaseException as error:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
        # Somebody else was faster: a rename never replaces a filled directory.
        if isinstance(error, OSError) and os.path.lexists(target):
            return False
        raise
    return True


def check_names(path: str, names: Iterable[str]) -> None:
    """Raise ValueError for a name that is not below `path`."""
    for name in names:
        if not name or name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"{name!r} leads out of {path}")


def read_file(path: str) -> bytes | None:
    """The content of a file; None if there is no such file. Raises OSError for one that cannot be read."""
    try:
        return Path(path).read_bytes()
    except (FileNotFoundError, NotADirectoryError, ProcessLookupError):  # the last one: below /proc
        return None


# -- the same for a client that is somewhere else ----------------------------------------------------------


def request(do: str, path: str, data: Mapping[str, bytes], **options: Any) -> bytes:
    """What `answer` reads: one line of JSON, then the bytes of `data`, one after the other."""
    sizes = [[name, len(one)] for name, one in data.items()]
    head = json.dumps({"do": do, "path": path, "data": sizes, **options})
    return b"".join((head.encode(), b"\n", *data.values()))


def answer() -> None:
    """Carry out one request from stdin; on stdout a line of JSON, and for a read the file's bytes."""
    head = json.loads(sys.stdin.buffer.readline())
    data = {name: sys.stdin.buffer.read(size) for name, size in head["data"]}
    if any(len(data[name]) != size for name, size in head["data"]):
        return  # the connection broke off in the middle: nobody listens any more
    content = None
    try:
        if head["do"] == "write":
            write_file(head["path"], data[""], head["mode"], head["parents"])
            said: dict[str, Any] = {"ok": True}
        elif head["do"] == "write_tree":
            said = {"ok": write_tree(head["path"], data, head["mode"])}
        else:
            content = read_file(head["path"])
            said = {"ok": content is not None}
    except OSError as error:
        said = {"error": error.strerror or str(error)}
    sys.stdout.buffer.write(json.dumps(said).encode() + b"\n" + (content or b""))
    sys.stdout.buffer.flush()
