"""Small acts on files that more than one of our scripts needs: locks with words in them, links by rename.

Runs on both sides. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
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
