"""Checkpoints: a directory that appears whole or not at all, and what a resumed run needs to go on bit for
bit.

    <output-dir>/<run>/step-00000120/{drafter.safetensors, optimizer.safetensors, config.json, state.json}
    <output-dir>/latest -> <run>/step-00000120

A checkpoint is written into a hidden directory beside its place, flushed to disk and renamed. Which one is
newest is told by a number in state.json that grows with every save into the output directory, never by a
clock. state.json also holds the digest of every other file, so that a byte which the disk has changed is
noticed before anything is trained on it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from trainer import tensorfile
from trainer.errors import InputError
from trainer.files import flush, sha256
from trainer.modeldir import check_safetensors
from trainer.status import parse, read_json, write_json

SCHEMA = 1
TENSORS = ("drafter.safetensors", "optimizer.safetensors")
_LOCK = ".lock"  # of an output directory
_COMING = ".coming.json"  # what a checkpoint of the trainer in progress will be, before there is one
_OLD = ".partial-old-"  # a checkpoint that made room for another one of its step


@dataclass
class State:
    """state.json: where a run stands."""

    step: int  # optimiser steps done
    micro_batch: int  # micro-batches consumed: the position in the data
    epoch: int
    total: int  # steps that the run was meant to have
    run_id: str
    settings: dict[str, Any]  # those that decide what is learnt
    sequence: int = 0  # grows with every save into the output directory
    finished: bool = False
    rng: str = ""  # torch's CPU generator, hex
    # Of evaluations: {"before": {"of": what was measured, "step": …, "rows": […]}, "after": …}
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    wandb_id: str = ""  # of the run in Weights & Biases that a resumed run continues
    digests: dict[str, str] = field(default_factory=dict)  # SHA-256 of the checkpoint's other files
    # Micro-batches of a step, on all devices together: what is learnt does not depend on how many these are.
    # 0: not told, by an older trainer, which had one device.
    per_step: int = 0
    schema: int = SCHEMA


@dataclass(frozen=True)
class Found:
    path: Path
    state: State


class SaveError(Exception):
    """A checkpoint could not be written; the ones before it are untouched."""


@contextlib.contextmanager
def output_directory(path: Path) -> Iterator[Path]:
    """Make the output directory and hold it: one trainer at a time may write there.

    Raises InputError if it cannot be made or another live trainer holds it. Leftovers of saves that were
    killed are removed, which is safe because nobody else can be writing; a checkpoint that had made room for
    another that never came is put back. Where there was none before and no checkpoint comes, nothing is left.
    """
    new = [place for place in (path, *path.parents) if not os.path.exists(place)]
    lock = _lock(path)
    with lock:
        for old in path.glob(f"*/{_OLD}*"):
            _put_back(old)
        for leftover in path.glob("*/.partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            yield path
        finally:
            with contextlib.suppress(OSError):
                (path / _COMING).unlink()
            if new and not directories(path):
                with contextlib.suppress(OSError):
                    (path / _LOCK).unlink()
                    for place in new:
                        place.rmdir()


def _lock(path: Path) -> TextIO:
    """The lock of an output directory, which is made; it is held until it is closed."""
    while True:
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = open(path / _LOCK, "w")  # noqa: SIM115
        except OSError as error:
            if isinstance(error, FileNotFoundError) and os.path.isdir(path.parent) and not path.exists():
                continue  # another trainer that was refused has removed it
            raise InputError(f"--output-dir {path}: cannot be written ({error.strerror})") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise _taken(path) from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(path / _LOCK)):
                return lock
        lock.close()  # it was removed between our two looks


def check_free(path: Path) -> None:
    """Raises InputError if another live trainer holds the output directory. Makes nothing."""
    try:
        with open(path / _LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _taken(path) from None
    except OSError:
        return  # nobody has been there, or it is told when it is to be written


def _taken(path: Path) -> InputError:
    return InputError(
        f"--output-dir {path}: another trainer is writing there; stop it, or choose another directory"
    )


def announce(output: Path, state: State, config: dict[str, Any]) -> None:
    """Say what this trainer's checkpoints will hold, for who has to know before the first of them.

    A failure is no matter: the announcement serves a check alone.
    """
    with contextlib.suppress(OSError):
        write_json(output / _COMING, {"state": dataclasses.asdict(state), "config": config})


def announced(output: Path) -> tuple[Found, dict[str, Any]] | None:
    """(state, config) of the checkpoint that the trainer in progress would leave; None without one."""
    try:
        value = read_json(output / _COMING)
        config: Any = value.get("config") if isinstance(value, dict) else None
        if not isinstance(value, dict) or not isinstance(config, dict):
            return None
        state: State = parse(State, value.get("state"), output / _COMING)
        with open(output / _LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return Found(output / state.run_id, state), config
    except (OSError, ValueError):
        return None
    return None  # it was killed


def get_ready() -> None:
    """Import now what a save needs, some of which safetensors imports only when it writes.

    Hours later the packages may have been replaced or removed under a run, which must cost it nothing.
    """
    import torch
    from safetensors.torch import save

    save({"": torch.zeros(1)})


def save(
    output: Path,
    state: State,
    drafter: dict[str, Any],
    optimizer: dict[str, Any],
    config: dict[str, Any],
    keep: int,
    keep_every: int | None = None,
) -> Path:
    """Write a checkpoint of `state` and remove this run's oldest ones beyond `keep`, but for those of a step
    that `keep_every` divides. Returns its directory.

    Raises SaveError if that is impossible, whatever the reason (a full disk): then nothing else has changed.
    """
    home = output / state.run_id
    place = home / f"step-{state.step:08d}"
    partial = home / f".partial-{place.name}"
    old = home / f"{_OLD}{place.name}"
    try:
        state.sequence = 1 + max((f.state.sequence for f in _readable(output)), default=0)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, tensors in zip(TENSORS, (drafter, optimizer), strict=True):
            tensorfile.write(partial / name, tensors)
        write_json(partial / "config.json", config)
        state.digests = {file.name: sha256(file) for file in sorted(partial.iterdir())}
        write_json(partial / "state.json", dataclasses.asdict(state))
        for file in partial.iterdir():
            flush(file)
        flush(partial)
        if place.exists():  # of an earlier start with this run id: it makes room only when ours is complete
            shutil.rmtree(old, ignore_errors=True)
            place.rename(old)
        partial.rename(place)
        shutil.rmtree(old, ignore_errors=True)
        flush(home)
        _point(output / "latest", place)
    except Exception as error:
        _put_back(old)
        shutil.rmtree(partial, ignore_errors=True)
        raise SaveError(f"no checkpoint at step {state.step}: {home} cannot be written ({error})") from error
    _retire(home, keep, keep_every)
    return place


def _put_back(old: Path) -> None:
    place = old.with_name(old.name.removeprefix(_OLD))
    with contextlib.suppress(OSError):
        if old.exists() and not place.exists():
            old.rename(place)


def finish(found: Found) -> None:
    """Write the state of a saved checkpoint anew, its tensors being right already. Raises SaveError."""
    try:
        write_json(found.path / "state.json", dataclasses.asdict(found.state), durable=True)
    except Exception as error:
        raise SaveError(f"{found.path}/state.json cannot be written ({error})") from error


def newest(output: Path, report: Callable[[str], None], *, verify: bool = True) -> Found | None:
    """The newest checkpoint that is whole; every newer one that is damaged is reported and passed over.

    Without `verify` the files are judged by their headers and sizes, not read: enough for a first look.
    """
    for path in directories(output):
        if isinstance(read := _read_state(path), str):
            report(f"warning: checkpoint {path} is damaged and passed over: {read}")
    for found in sorted(_readable(output), key=lambda f: f.state.sequence, reverse=True):
        if wrong := _damage(found, verify):
            report(f"warning: checkpoint {found.path} is damaged and passed over: {wrong}")
        else:
            return found
    return None


def examine(path: Path) -> Found | str:
    """The checkpoint that `path` is, or what is wrong with it."""
    state = _read_state(path)
    if isinstance(state, str):
        return state
    return _damage(found := Found(path, state), verify=True) or found


def load(found: Found) -> tuple[dict[str, Any], dict[str, Any]]:
    """(drafter, optimizer) tensors of a checkpoint."""
    from safetensors.torch import load_file

    drafter, optimizer = (load_file(found.path / name) for name in TENSORS)
    return drafter, optimizer


def read_config(found: Found) -> dict[str, Any]:
    """config.json of a checkpoint: the drafter's shape."""
    return json.loads((found.path / "config.json").read_text(encoding="utf-8"))


def directories(output: Path) -> list[Path]:
    """Where checkpoints may lie in an output directory."""
    return sorted(path for path in output.glob("*/step-*") if path.is_dir() and not path.parent.is_symlink())


def _readable(output: Path) -> list[Found]:
    states = ((path, _read_state(path)) for path in directories(output))
    return [Found(path, state) for path, state in states if isinstance(state, State)]


def _read_state(path: Path) -> State | str:
    """The state, or what is wrong with it."""
    try:
        value = read_json(path / "state.json")
        if value is None:
            return "it has no state.json"
        state = parse(State, value, path / "state.json")
        bytes.fromhex(state.rng)
        return state
    except OSError as error:
        return f"state.json cannot be read ({error.strerror})"
    except ValueError as error:
        return f"state.json is not what was written there ({error})"


def _damage(found: Found, verify: bool) -> str | None:
    """What is wrong with a checkpoint whose state.json is right; None if nothing is."""
    path = found.path
    for name in TENSORS:
        if wrong := check_safetensors(path / name):
            return f"{name} {wrong}"
    try:
        config = read_json(path / "config.json")
        if not isinstance(config, dict):
            return "config.json is missing or is not what was written there"
        for name, digest in found.state.digests.items() if verify else ():
            if sha256(path / Path(name).name) != digest:
                return f"{name} is not what was written there: its bytes have changed since"
    except (OSError, ValueError) as error:
        return f"it cannot be read ({error})"
    return None


def _retire(home: Path, keep: int, every: int | None) -> None:
    """Remove all but the `keep` newest checkpoints of one run, and those of every `every`-th step."""
    mine = [Found(p, s) for p in home.glob("step-*") if isinstance(s := _read_state(p), State)]
    mine.sort(key=lambda f: f.state.sequence)
    for found in mine[: max(len(mine) - keep, 0)]:
        if not every or found.state.step % every:
            shutil.rmtree(found.path, ignore_errors=True)


def _point(link: Path, goal: Path) -> None:
    """Make `link` lead to `goal`, by rename: it never leads nowhere."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    temporary.symlink_to(os.path.relpath(goal, link.parent))
    os.replace(temporary, link)
