"""The host's end of `fab pull`: what there is to fetch, and its bytes.

Runs ON the host, through `deploy.onhost`. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from typing import Any

from deploy.errors import DeployError
from trainer import status

_CHUNK = 1 << 20  # bytes
_STEP = re.compile(r"step-(\d+)")  # as trainer.checkpoint names them
PRIVATE = ("boot.json", "switch-spec.json")  # 0600 there: of use to that host only


def listing(root: str, place: str) -> dict[str, Any]:
    """``{"root", "files": [{name, size, modified, mode}]}`` of a directory, sorted by name.

    `root` is `place` or lies below it: what is in `place` belongs to the user of a run, who may have put
    links there that lead anywhere. Links inside are passed over, and so are hidden files, which nobody has
    finished writing, sockets, and what is private to the host. Raises DeployError if there is no such
    directory, or if it leads out of `place`.
    """
    real = os.path.realpath(root)
    if not _within(real, os.path.realpath(place)):
        raise DeployError(f"{root} leads to {real}, which is not in {place}; nothing was read")
    if not os.path.isdir(real):
        raise DeployError(f"there is no {root}")
    found = []
    for folder, folders, names in os.walk(real):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = os.path.join(folder, name)
            if name.startswith(".") or name in PRIVATE or os.path.islink(path) or not os.path.isfile(path):
                continue
            try:
                info = os.stat(path)
            except OSError:  # removed meanwhile
                continue
            found.append(
                {
                    "name": os.path.relpath(path, real),
                    "size": info.st_size,
                    "modified": info.st_mtime,
                    "mode": info.st_mode & 0o777,
                }
            )
    return {"root": real, "files": found}


def checkpoint(directory: str, run_id: str | None) -> str | None:
    """``0007-demo/step-00000120``: the newest checkpoint of a name, or of one run of it; None without any.

    A command of one's own may keep its checkpoints in another way: then None, too.
    """
    if run_id is None:
        try:
            latest = os.readlink(os.path.join(directory, "latest"))
        except OSError:
            return None
        return latest if is_checkpoint(latest) else None
    try:
        steps = [name for name in os.listdir(os.path.join(directory, run_id)) if _STEP.fullmatch(name)]
    except OSError:
        steps = []
    if not steps:
        raise DeployError(
            f"{run_id} has no checkpoint in {directory}; fab pull without --run-id takes the newest"
        )
    return f"{run_id}/{max(steps, key=lambda name: int(name.rpartition('-')[2]))}"


def is_checkpoint(name: str) -> bool:
    """Whether this is ``0007-demo/step-00000120``, and not a way to somewhere else."""
    run_id, _, step = name.partition("/")
    return is_run_id(run_id) and _STEP.fullmatch(step) is not None


def is_run_id(name: str) -> bool:
    try:
        return bool(status.split_run_id(name))
    except ValueError:
        return False


def _within(real: str, place: str) -> bool:
    return real == place or real.startswith(place.rstrip("/") + "/")


def send(root: str, wanted: list[tuple[str, int, int]]) -> None:
    """Write to stdout, for each (name, offset, size): the bytes from offset to size, then 32 of SHA-256.

    The digest is that of the whole file up to size, so that what was there before the offset is checked too.
    Raises DeployError if a file has become shorter or is gone, or was replaced by a link since the listing.
    """
    out = sys.stdout.buffer
    for name, offset, size in wanted:
        digest, position = hashlib.sha256(), 0
        try:
            with open(os.path.join(root, name), "rb") as file:
                real = os.readlink(f"/proc/self/fd/{file.fileno()}")
                if not _within(real, root):
                    raise DeployError(f"{root}/{name} leads to {real}, out of {root}; nothing of it was read")
                while position < size:
                    chunk = file.read(min(_CHUNK, size - position))
                    if not chunk:
                        raise DeployError(f"{root}/{name} became shorter while it was fetched; pull again")
                    digest.update(chunk)
                    if position + len(chunk) > offset:
                        out.write(chunk[max(0, offset - position) :])
                    position += len(chunk)
        except FileNotFoundError:
            raise DeployError(
                f"{root}/{name} was removed while it was fetched, to make room for newer ones; pull again"
            ) from None
        out.write(digest.digest())
    out.flush()
