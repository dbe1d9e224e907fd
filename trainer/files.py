"""Files as bytes: on the disk for certain, and named by content. Standard library only."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def flush(path: Path) -> None:
    """Have what is written to a file, or the names in a directory, on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Hexadecimal. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
