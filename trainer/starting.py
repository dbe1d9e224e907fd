"""Starting the trainer: its environment, byte for byte, and its process.

Standard library only and Python >= 3.9; Linux.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
from collections.abc import Mapping
from typing import Any

from trainer.processes import PR_SET_PDEATHSIG, prctl
from trainer.status import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, SECRETS_VARIABLE, Run

USAGE, NOT_EXECUTABLE, NOT_FOUND = 2, 126, 127  # exit codes, as a shell uses them
OOM_SCORE = 500  # added to the trainer's: of the two, launch is to survive and tell


class CannotStart(Exception):
    """The trainer cannot be started, for a reason that another attempt will not change."""

    def __init__(self, code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


def check_run(run: Run) -> None:
    """Refuse a run.json whose values cannot be used. Raises CannotStart."""

    def refuse(field: str, wanted: str) -> None:
        raise CannotStart(USAGE, f"run.json: `{field}` must be {wanted}; deploy again to write it anew")

    def number(value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0

    command = run.command
    if not (isinstance(command, list) and command and all(isinstance(word, str) for word in command)):
        refuse("command", "a list of strings that begins with the program")
    if any("\0" in word for word in command) or not command[0]:
        refuse("command", "without NUL characters, and its program not empty")
    if not isinstance(run.environment, dict):
        refuse("environment", "a mapping of names to strings")
    for name, value in run.environment.items():
        if not name or "=" in name or "\0" in name:
            refuse("environment", f"a mapping of names to strings, and {name!r} is no name")
        if not isinstance(value, str) or "\0" in value:
            refuse(f"environment.{name}", "a string without NUL characters")
    for field in ("grace_seconds", "restart_attempts", "restart_minutes", "segment_bytes", "segments"):
        if not number(getattr(run, field)):
            refuse(field, "a number that is not negative")


def encode(text: str) -> bytes:
    """UTF-8 whatever the locale, since run.json is; bytes that came from the system keep their value."""
    return text.encode("utf-8", "surrogateescape")


def read_secrets(run: Run) -> dict[bytes, bytes]:
    """The variables of the run's secrets file: ``KEY=value`` lines, or entries ended by NUL as in ``env -0``.

    A value is all that follows the first ``=``, without any quoting. Raises CannotStart for a file that
    others may read, and for one that lacks a secret that run.json names; no value is ever part of a message.
    """
    # In a container it is mounted at another place than run.json, which the host wrote, says.
    path = os.environ.get(SECRETS_VARIABLE) or run.secrets_file
    if not run.secrets_file or not path:
        if run.secrets:
            raise CannotStart(USAGE, f"run.json names secrets ({', '.join(run.secrets)}) but no secrets_file")
        return {}
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read()
    except OSError as error:
        raise CannotStart(USAGE, f"the secrets file {path} cannot be read: {error.strerror}") from None
    if mode & 0o077:
        raise CannotStart(USAGE, f"the secrets file {path} is open to others (mode {mode:04o}): chmod 0400")
    secrets: dict[bytes, bytes] = {}
    for entry in content.split(b"\0" if b"\0" in content else b"\n"):
        name, equals, value = entry.partition(b"=")
        if equals and name:
            secrets[name] = value
        elif entry.strip():
            raise CannotStart(USAGE, f"the secrets file {path} has an entry that is not KEY=value")
    missing = [name for name in run.secrets if encode(name) not in secrets]
    if missing:
        raise CannotStart(USAGE, f"the secrets file {path} lacks {', '.join(missing)}; deploy again")
    return secrets


def given_environment(base: Mapping[bytes, bytes], run: Run) -> dict[bytes, bytes]:
    """launch's own environment, then the run's.

    On a terminal, programs paint for what TERM says; that would be the terminal of whoever deployed.
    """
    plain = {b"TERM": b"dumb"} if run.tty else {}
    return {**base, **plain, **{encode(name): encode(value) for name, value in run.environment.items()}}


def build_environment(
    given: Mapping[bytes, bytes], secrets: Mapping[bytes, bytes], run_dir: str, attempt: int
) -> dict[bytes, bytes]:
    """What was given, then the run's secrets, then what launch promises."""
    return {
        **given,
        **secrets,
        b"PYTHONUNBUFFERED": b"1",
        encode(RUN_DIR_VARIABLE): os.fsencode(run_dir),
        encode(ATTEMPT_VARIABLE): str(attempt).encode("ascii"),
    }


def start(run: Run, environment: Mapping[bytes, bytes], output: int) -> subprocess.Popen:
    """Start the run's command: a session of its own, stdin /dev/null, stdout and stderr both `output`.

    Returns once the program runs (exec succeeded). It dies with launch, and the kernel takes it before launch
    when memory is short. Raises CannotStart if the command cannot be run at all.
    """
    launch = os.getpid()

    def prepare() -> None:
        with contextlib.suppress(OSError):  # where it is forbidden the guard still ends it
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launch:  # launch died before the line above
            os._exit(128 + signal.SIGKILL)
        with contextlib.suppress(OSError, ValueError), open("/proc/self/oom_score_adj", "r+") as file:
            score = int(file.read())
            file.seek(0)
            file.write(str(min(score + OOM_SCORE, 1000)))

    directory = run.working_directory
    if directory is not None and not os.path.isdir(directory):
        raise CannotStart(USAGE, f"the working directory {directory} does not exist; check working_directory")
    program = run.command[0]
    try:
        return subprocess.Popen(
            [encode(word) for word in run.command],
            env=dict(environment),
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=prepare,
        )
    except OSError as error:
        raise _why(error, program, os.path.join(directory or ".", program), environment) from None


def _why(error: OSError, program: str, path: str, environment: Mapping[bytes, bytes]) -> CannotStart:
    """Why `program` (at `path`, if it is no name to be looked up) cannot be run."""
    if "/" not in program:
        places = os.get_exec_path(dict(environment))  # type: ignore[arg-type]
        found = any(os.path.exists(os.path.join(os.fsencode(place), encode(program))) for place in places)
    else:
        found = os.path.exists(path)
    # A directory in PATH that this user may not enter makes a missing program look like a forbidden one.
    if not found and isinstance(error, (FileNotFoundError, PermissionError)):
        return CannotStart(NOT_FOUND, f"the command {program} was not found; check `command` and PATH")
    if isinstance(error, FileNotFoundError):
        return CannotStart(
            NOT_FOUND, f"the interpreter that the first line of {program} names does not exist"
        )
    sentence = f"the command {program} cannot be run: {error.strerror}"
    if isinstance(error, PermissionError):
        sentence += " (is it executable, and may this user enter the directories?)"
    return CannotStart(NOT_EXECUTABLE, sentence)
