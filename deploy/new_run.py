"""The directory of a new run, with its run.json and its secrets, and the places that a run writes to.

Runs ON the host, asked by `deploy.execute` and by the boot unit. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from deploy import files
from deploy.errors import DeployError
from trainer import status

LOCK_PATIENCE = 1.0  # seconds: a probe that looks at the lock holds it for a moment


def make(
    state_root: str,
    run: dict[str, Any],
    secrets: str | None = None,
    directories: list[str] | None = None,
    owner: list[int] | None = None,
) -> dict[str, Any]:
    """Make the next run of ``run["name"]`` and return its run.json, with ``path``, its directory, beside it.

    `run` holds the fields of `status.Run`; run_id, secrets_file and created are filled in here. `secrets` is
    the content of its secrets file, which nobody but its owner may read. `directories` are made if they are
    missing. With `owner`, a user and a group, all of these belong to it, as far as they lie below the name's
    own directory or were made here; see `hand_over` for the run's. Raises DeployError, and leaves nothing, if
    that cannot be.
    """
    state, name = Path(state_root), run["name"]
    home = state / "names" / name
    try:
        for directory in directories or []:
            _directory(Path(directory), home, owner)
        made = status.allocate_run(state / "runs", name)
    except OSError as error:
        raise DeployError(
            f"{error.filename or state / 'runs'} cannot take a new run of {name}: {error.strerror}"
        ) from None
    run_id = made.path.name
    file = str(home / f"secrets-{run_id}") if secrets is not None else None
    known = {field.name for field in dataclasses.fields(status.Run)}
    fields = {key: value for key, value in run.items() if key in known}
    whole = status.Run(**{**fields, "run_id": run_id, "secrets_file": file, "created": time.time()})
    try:
        if file and secrets is not None:
            write_secrets(file, secrets, owner)
        made.write_run(whole)
        if owner:
            hand_over(str(made.path), owner)
    except BaseException as error:
        discard(str(made.path), file)
        if isinstance(error, OSError):
            raise DeployError(
                f"{error.filename or made.path} cannot be written for a new run of {name}: {error.strerror}"
            ) from None
        raise
    return {"path": str(made.path), "run": dataclasses.asdict(whole)}


def hand_over(path: str, owner: list[int]) -> None:
    """Let the user of a run write into its directory.

    If we are root and it is not, it cannot replace what we have put there (the sticky bit): from boot.json
    the run is started again with our rights, and not with those of what runs in a container.
    """
    if os.getuid() == 0 and owner[0] != 0:
        os.chown(path, 0, owner[1])
        os.chmod(path, 0o1775)
    else:
        os.chown(path, *owner)


def discard(path: str, secrets_file: str | None = None) -> None:
    """Remove a run that was never started, with its secrets."""
    shutil.rmtree(path, ignore_errors=True)
    if secrets_file:
        with contextlib.suppress(OSError):
            os.unlink(secrets_file)


def discard_begun(state_root: str, name: str, after: int) -> None:
    """Remove what a `make` that was killed left behind; the caller holds the name's deploy lock.

    That is: runs of `name` with a number beyond `after` that no switch has accepted.
    """
    state = Path(state_root)
    for run in status.list_runs(state / "runs", name):
        if status.split_run_id(run.path.name)[0] > after:
            secrets_file = str(state / "names" / name / f"secrets-{run.path.name}")
            discard_refused(state_root, name, str(run.path), secrets_file)


def discard_refused(state_root: str, name: str, path: str, secrets_file: str | None = None) -> None:
    """The same, unless a switch has accepted the run: only looking there tells.

    A lost connection or a Ctrl-C hides whether the switch was accepted, and it may still be on its way. It
    takes its lock, then looks for run.json, then leaves its record. We look under the same lock: after us it
    finds no run.json and is refused.
    """
    file, lock = Path(state_root) / "names" / name / "switch.lock", None
    try:
        with contextlib.suppress(OSError):
            lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        if lock is not None and not _taken(lock):
            # Somebody switches, and by their lock ours was refused, unless it is ours that holds it.
            holder = os.path.basename(str(files.words(lock).get("run_path")))
            if holder == os.path.basename(path):
                return
        if not any(os.path.exists(f"{path}/{record}") for record in ("switch.json", "launch.json")):
            discard(path, secrets_file)
    finally:
        if lock is not None:
            os.close(lock)


def _taken(lock: int) -> bool:
    """Take a lock that a probe may hold for a moment."""
    deadline = time.monotonic() + LOCK_PATIENCE
    while not files.take(lock):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def write_secrets(path: str, content: str, owner: list[int] | None) -> None:
    """A file of mode 0400, which appears whole."""
    place = Path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
    try:
        with open(descriptor, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), 0o400)
            if owner:
                os.fchown(file.fileno(), *owner)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _directory(path: Path, home: Path, owner: list[int] | None) -> None:
    """Have a directory that the run can write to. What is somebody else's stays as it is.

    By descriptors: below it another user may put a link in a directory's place at any time.
    """
    there = path.is_dir()
    path.mkdir(parents=True, exist_ok=True)
    if not owner or (there and home not in path.parents):
        return
    top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if os.fstat(top).st_uid != owner[0]:
            for _, folders, names, folder in os.fwalk(".", dir_fd=top):
                for entry in (*folders, *names):
                    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                        os.chown(entry, *owner, dir_fd=folder, follow_symlinks=False)
            os.fchown(top, *owner)
    finally:
        os.close(top)
