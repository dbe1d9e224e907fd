"""Whether a directory of weights is still what it was, and what is said if it is not.

Runs ON the host. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deploy import hashing, manifest

# What a source should be, and what to do if it is not.
NEW = ("they were when they were read", "run the same command again")
OLD = ("the run was started with", "fab deploy takes them as they are now")


def another(what: str, found: str, digest: str, wanted: tuple[str, str]) -> str:
    """The sentence for a source whose digest is `found`; `wanted` is NEW or OLD."""
    return f"{what} are not what {wanted[0]} (digest {found[:12]} instead of {digest[:12]}); {wanted[1]}"


def describes(given: dict[str, Any], source: Path) -> bool:
    """Whether a manifest of ours says what is in `source` now, in today's terms: then it need not be read.

    Nothing may have been written or replaced since it was made. (A time of change could have been set.)
    """
    if (given.get("hash"), given.get("chunk")) != (hashing.names()[0], manifest.CHUNK):
        return False
    made = (source / manifest.FILE).stat().st_ctime_ns
    return all(path.stat().st_ctime_ns <= made for _, path in manifest.walk(source))
