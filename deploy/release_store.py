"""What a release on a host says, and whether it is what was deployed.

Runs ON the host, asked by `deploy.release` and `deploy.execute`. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from deploy import files, probe

LARGEST = 4 << 20  # bytes of one file that people compare; more than that nobody rendered


def damage(path: str) -> list[str] | None:
    """Files of a release that are not what they should be, or were added; None if it is not there.

    Its id is the digest of its manifest, so the manifest can be relied on; only the one that was written at
    the end of a release says that the release is there.
    """
    if not os.path.isdir(path):
        return [probe.MANIFEST] if os.path.lexists(path) else None
    return probe.changed(Path(path))


def differing(path: str) -> list[list[str]]:
    """[files of a release that are not as they were deployed, those of them that were added]."""
    found = probe.changed(Path(path))
    return [found, probe.added(Path(path), found)]


def make_current(home: str, release_id: str) -> None:
    """Let the link `current` of a name, whose directory is `home`, lead to a release. Raises OSError."""
    files.replace_link(Path(home, "current"), f"releases/{release_id}")


def read_each(paths: list[str]) -> list[dict[str, Any] | None]:
    """`read` for each of several releases."""
    return [read(path) for path in paths]


def read(path: str) -> dict[str, Any] | None:
    """What people compare: ``{"digests": {file: digest}, "files": {file: text}}``, code by its digests only.

    None if there is no release at `path`. Bytes that are no UTF-8 are kept as `surrogateescape` has them.
    """
    try:
        manifest = Path(path, probe.MANIFEST).read_bytes()
    except OSError:
        return None
    try:
        digests = dict(json.loads(manifest)["files"])
    except (ValueError, KeyError, TypeError, RecursionError):
        digests = {}
    files = {}
    for name in os.listdir(path):
        file = os.path.join(path, name)
        if name != probe.MANIFEST and os.path.isfile(file) and os.path.getsize(file) <= LARGEST:
            with open(file, "rb") as content:
                files[name] = content.read().decode("utf-8", "surrogateescape")
    return {"digests": digests, "files": files}
