"""The log keeper: starts a trainer, keeps and forwards its log, restarts it after a crash, records its end.

``python -u -m trainer.launch --run-dir DIR`` runs what DIR/run.json says. ``--state DIR --name NAME
[-- COMMAND ...]`` makes the next run of NAME under DIR/runs first, for places where nobody deploys (the
top-level compose.yaml). The exit code is the trainer's, 128 + signal if one ended it.

The files of a run directory are described in `trainer.status`, docs/log.md tells users what to expect, and
the work itself is in `trainer.keeper`. Standard library only and Python >= 3.9; Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import getpass
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from trainer.ending import write_exit
from trainer.keeper import Keeper
from trainer.processes import Signals
from trainer.starting import USAGE, CannotStart, check_run
from trainer.status import Exit, Run, RunDir, allocate_run, list_runs, valid_name

LOCK_SECONDS = 1.0  # readers test the lock by holding it shared for a moment


class Refused(Exception):
    """Launch cannot take this run on; nothing was changed."""


def default_command(state: Path, name: str) -> list[str]:
    """Our own trainer, with the places that a deploy would give it."""
    home = state / "names" / name
    places = ["--output-dir", str(home / "checkpoints"), "--cache-dir", str(home / "cache")]
    return [sys.executable, "-u", "-m", "trainer", "--resume", "auto", *places]


def make_run(state: Path, name: str, command: Sequence[str]) -> RunDir:
    """Allocate the next run of `name` under `state`/runs and write its run.json. Raises Refused."""
    if not valid_name(name):
        raise Refused(
            f"--name {name!r} cannot name an experiment: use lower-case letters, digits, '.', '_' and '-'"
        )
    for other in list_runs(state / "runs", name):
        if other.alive():
            raise Refused(
                f"{other.path.name} is in progress under {state}: stop it first, or use another --name"
            )
    try:
        directory = allocate_run(state / "runs", name)
        user = getpass.getuser() if os.environ.get("USER") else str(os.getuid())
        directory.write_run(
            Run(
                run_id=directory.path.name,
                name=name,
                command=list(command) or default_command(state, name),
                runtime="compose" if os.path.exists("/.dockerenv") else "process",
                who=user,
                origin=socket.gethostname(),
            )
        )
    except OSError as error:
        raise Refused(f"--state {state} cannot be written: {error.strerror} ({error.filename})") from None
    return directory


def take_lock(directory: RunDir) -> int:
    """Hold the run's lock from here to the end of this process; its descriptor. Raises Refused."""
    try:
        lock = os.open(directory.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise Refused(f"the run directory {directory.path} cannot be written: {error.strerror}") from None
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > until:
                os.close(lock)
                raise Refused(f"{directory.path} is in progress: another launch holds its lock") from None
            time.sleep(0.02)


def read_run(directory: RunDir) -> Run:
    """The run to start. Raises Refused if it was started before, CannotStart if run.json is of no use."""
    for name in ("exit.json", "launch.json"):
        if (directory.path / name).exists():
            what = "has ended" if name == "exit.json" else "was started before and lost its launch"
            raise Refused(
                f"the run in {directory.path} {what} ({name} is there): a run starts once, make a new one"
            )
    try:
        run = directory.run()
    except (ValueError, OSError) as error:
        raise CannotStart(USAGE, str(error)) from None
    if run is None:
        raise Refused(f"{directory.path}/run.json does not exist")
    check_run(run)
    return run


def keep(directory: RunDir, signals: Signals) -> int:
    """Run the run in `directory`; the exit code. Raises Refused."""
    if not directory.path.is_dir():
        raise Refused(f"--run-dir {directory.path} is not a directory")
    if not (directory.path / "run.json").exists():
        raise Refused(f"--run-dir {directory.path} has no run.json, so it is no run that was deployed")
    lock = take_lock(directory)
    try:
        run = read_run(directory)
    except CannotStart as error:
        record = Exit(reason="failed", code=error.code, attempts=0, message=str(error))
        write_exit(directory, record, directory.path / ".reserve")
        print(f"trainer.launch: {error}", file=sys.stderr)
        return error.code
    try:
        keeper = Keeper(directory, run, signals, lock)
    except OSError as error:
        raise Refused(f"the run directory {directory.path} cannot be written: {error.strerror}") from None
    return keeper.keep()


def hold_standard_descriptors() -> None:
    """Open /dev/null for each of 0, 1 and 2 that is closed, so that no file of ours takes its number."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                os.open(os.devnull, os.O_RDWR)


def main(argv: Sequence[str] | None = None) -> int:
    hold_standard_descriptors()
    signals = Signals()
    words = list(sys.argv[1:] if argv is None else argv)
    command: list[str] = []
    if "--" in words:
        cut = words.index("--")
        words, command = words[:cut], words[cut + 1 :]
    parser = argparse.ArgumentParser(
        prog="trainer.launch",
        description="Run a trainer: keep and forward its log, restart it after a crash, record its end.",
        epilog="Without COMMAND, --state starts the trainer of this package.",
        usage="python -u -m trainer.launch (--run-dir DIR | --state DIR --name NAME [-- COMMAND ...])",
    )
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="run what DIR/run.json says")
    parser.add_argument("--state", type=Path, metavar="DIR", help="make a new run under DIR/runs")
    parser.add_argument("--name", help="the experiment that the new run belongs to")
    options = parser.parse_args(words)
    if (options.run_dir is None) == (options.state is None):
        parser.error("give either --run-dir, or --state and --name")
    if options.run_dir is not None and (options.name is not None or command):
        parser.error("--run-dir takes its name and command from run.json; leave out --name and COMMAND")
    if options.state is not None and options.name is None:
        parser.error("--state needs --name")
    try:
        if options.run_dir is not None:
            directory = RunDir(options.run_dir)
        else:
            directory = make_run(options.state.absolute(), options.name, command)
        return keep(directory, signals)
    except Refused as error:
        print(f"trainer.launch: {error}", file=sys.stderr)
        return USAGE


if __name__ == "__main__":
    sys.exit(main())
