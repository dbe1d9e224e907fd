"""The toy's weights in shared memory: copied whole or not at all, behind a link that never leads nowhere."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from trainer.errors import InputError

SPARE_BYTES = 1 << 20  # room that staging leaves in shared memory

Report = Callable[[str], None]


def stage(target: Path, digest: str, shm: Path, report: Report) -> Path:
    """Copy a model directory to ``<shm>/toy@<digest>`` unless it is there, and point ``<shm>/toy`` at it.

    Raises InputError, before anything is written, if there is no room.
    """
    place = shm / f"toy@{digest}"
    sizes = {path.name: path.stat().st_size for path in target.iterdir()}
    try:
        shm.mkdir(parents=True, exist_ok=True)
        if not _holds(place, sizes):
            need = sum(sizes.values()) + SPARE_BYTES
            free = os.statvfs(shm).f_bavail * os.statvfs(shm).f_frsize
            if free < need:
                raise _no_room(shm, need, free)
            _copy(target, place)
            report(f"toy: its weights are in {place} ({sum(sizes.values()) / 1e6:.1f} MB)")
        _point(shm / "toy", place)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _no_room(shm, sum(sizes.values()), 0) from None
        raise InputError(
            f"{shm}: the toy's weights cannot be put there ({error.strerror}); set DRAFTHOUSE_SHM to "
            "a directory in memory that can be written"
        ) from None
    return place


def _no_room(shm: Path, need: int, free: int) -> InputError:
    return InputError(
        f"{shm}: no room for the toy's weights: {need / 1e6:.1f} MB are needed, {free / 1e6:.1f} MB free; "
        "free some, or set DRAFTHOUSE_SHM to a directory that has more"
    )


def _holds(place: Path, sizes: dict[str, int]) -> bool:
    try:
        return {path.name: path.stat().st_size for path in place.iterdir()} == sizes
    except OSError:
        return False


def _copy(target: Path, place: Path) -> None:
    """Copy into a hidden directory and rename. Two processes may do so at once: either copy is right."""
    partial = place.with_name(f".{place.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        shutil.copytree(target, partial)
        if place.exists():  # incomplete: nothing of ours leaves such a thing behind
            place.rename(place.with_name(f"{partial.name}.old"))
        with contextlib.suppress(FileExistsError):
            partial.rename(place)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:  # else another process was faster
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(place.with_name(f"{partial.name}.old"), ignore_errors=True)


def _point(link: Path, goal: Path) -> None:
    """Make `link` lead to `goal` in the same directory, by rename: it never leads nowhere."""
    if link.is_symlink() and os.readlink(link) == goal.name:
        return
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    temporary.symlink_to(goal.name)
    os.replace(temporary, link)
