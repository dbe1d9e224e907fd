"""Where commands run, and files are read and written, on a host.

A `Host` takes a list of arguments, a timeout and an environment; no shell is involved, so no value needs
quoting. What goes through here will work on a host reached by SSH too. Some still opens files of this
machine by itself, and has to come here before SSH does: a new run's directory (execute), weights and data
(survey, weights), following a log (logs, segments).
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from deploy.errors import DeployError

log = logging.getLogger(__name__)

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")

# How Python is started for our own scripts on a host: nobody's PYTHON* variables or site directories change
# what they do, arguments and environment are UTF-8 whatever the locale says, and no cache files are left.
SCRIPT_FLAGS = ("-I", "-B", "-X", "utf8")


class HostError(DeployError):
    """A command or file on a host failed; the message names host, what, and why."""


@dataclass(frozen=True)
class Result:
    """What a command left behind. `code` is as a shell reports it: 128 + signal after a signal."""

    code: int
    out: bytes
    err: bytes

    @property
    def text(self) -> str:
        """The output as text, without the final newline."""
        return self.out.decode(errors="replace").rstrip("\n")


class Host(Protocol):
    """A machine that can be acted on. Every method raises HostError, in one sentence, when it fails."""

    name: str
    python: str  # a Python >= 3.9 there, which runs the probe, the switch and the lock's holder

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        env: Mapping[str, str] | None = None,
        input: bytes | None = None,
        check: bool = True,
    ) -> Result:
        """Run `argv` to its end, at most `timeout` seconds, with `env` added to the login's environment.

        A command that takes longer is killed with its whole process group. With `check`, an exit code other
        than 0 raises; without, only a timeout or an argument that no system can pass does.
        """
        ...

    def write(self, path: str, data: bytes, *, mode: int = 0o644, parents: bool = False) -> None:
        """Put `data` at `path` whole: a temporary file beside it, then a rename."""
        ...

    def write_tree(self, path: str, files: Mapping[str, bytes], *, mode: int = 0o644) -> bool:
        """Make the directory `path` appear at once, with all of `files` (relative name -> content) in it.

        False, and nothing touched, if there is a `path` already. Parents are made.
        """
        ...

    def read(self, path: str) -> bytes | None:
        """The content of a file; None if there is no such file."""
        ...

    def open_stream(
        self, argv: Sequence[str], env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start `argv` with pipes for stdin, stdout and stderr, out of reach of the terminal's signals."""
        ...


class Local:
    """This machine."""

    def __init__(self, name: str = "localhost", python: str = sys.executable) -> None:
        self.name = name
        self.python = python

    def __repr__(self) -> str:
        return f"Local({self.name!r})"

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        env: Mapping[str, str] | None = None,
        input: bytes | None = None,
        check: bool = True,
    ) -> Result:
        began = time.monotonic()
        result: Result | None = None
        try:
            result = self._run(argv, timeout, env, input)
        finally:
            seconds = time.monotonic() - began
            outcome = "no result" if result is None else f"exit code {result.code}"
            log.debug("%s: %s -> %s in %.2f s", self.name, describe(argv, env, input), outcome, seconds)
        if check and result.code:
            raise HostError(failure(self.name, argv, result))
        return result

    def _run(
        self, argv: Sequence[str], timeout: float, env: Mapping[str, str] | None, input: bytes | None
    ) -> Result:
        stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
        try:
            process = self._start(argv, env, stdin)
        except FileNotFoundError:
            return Result(127, b"", f"there is no program {argv[0]!r}".encode())
        except PermissionError:
            return Result(126, b"", f"{argv[0]!r} may not be executed".encode())
        with process:
            try:
                out, err = process.communicate(input, timeout)
            except subprocess.TimeoutExpired:
                _kill_group(process)
                raise HostError(
                    f"{self.name}: {argv[0]} did not end within {timeout:g} s and was killed"
                ) from None
            except BaseException:  # Ctrl-C: the command does not outlive us
                _kill_group(process)
                raise
        code = process.returncode
        return Result(code if code >= 0 else 128 - code, out, err)

    def _start(
        self, argv: Sequence[str], env: Mapping[str, str] | None, stdin: int
    ) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                list(argv),
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=None if env is None else {**os.environ, **env},
                start_new_session=True,  # one group to kill, and no Ctrl-C of the terminal
            )
        except ValueError as error:  # a NUL byte, or a variable's name with '=' in it
            raise HostError(f"{self.name}: {argv[0]} cannot be started: {error}") from None
        except OSError as error:
            if isinstance(error, FileNotFoundError | PermissionError):
                raise
            raise HostError(f"{self.name}: {argv[0]} cannot be started: {error.strerror}") from None

    def write(self, path: str, data: bytes, *, mode: int = 0o644, parents: bool = False) -> None:
        target = Path(path)
        log.debug("%s: write %s (%d bytes, mode %o)", self.name, path, len(data), mode)
        temporary = None
        try:
            if parents:
                target.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name[:100]}.", dir=target.parent)
            with open(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException as error:
            if temporary:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
            if isinstance(error, OSError):
                raise HostError(f"{self.name}: cannot write {path}: {error.strerror}") from None
            raise

    def write_tree(self, path: str, files: Mapping[str, bytes], *, mode: int = 0o644) -> bool:
        target = Path(path)
        if target.exists():
            return False
        log.debug("%s: write %s/ (%d files)", self.name, path, len(files))
        temporary = None
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=f".{target.name[:100]}.", dir=target.parent))
            for name, data in files.items():
                file = temporary / name
                if not file.resolve().is_relative_to(temporary.resolve()):
                    raise ValueError(f"{name!r} leads out of {path}")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
                file.chmod(mode)
            temporary.chmod(0o755)
            os.rename(temporary, target)
        except BaseException as error:
            if temporary:
                shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, OSError):
                if target.exists():  # somebody else was faster; a rename never replaces a filled directory
                    return False
                raise HostError(f"{self.name}: cannot write {path}: {error.strerror}") from None
            raise
        return True

    def read(self, path: str) -> bytes | None:
        try:
            return Path(path).read_bytes()
        except (FileNotFoundError, NotADirectoryError, ProcessLookupError):  # the last one: below /proc
            return None
        except OSError as error:
            raise HostError(f"{self.name}: cannot read {path}: {error.strerror}") from None

    def open_stream(
        self, argv: Sequence[str], env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        log.debug("%s: open %s", self.name, describe(argv, env, None))
        try:
            return self._start(argv, env, subprocess.PIPE)
        except (FileNotFoundError, PermissionError) as error:
            raise HostError(f"{self.name}: cannot start {argv[0]}: {error.strerror}") from None


class Address(Protocol):
    """What `connect` needs of a host's settings."""

    @property
    def name(self) -> str: ...


def connect(settings: Address) -> Local:
    """The host that `settings` describe. Raises DeployError for one that cannot be reached yet."""
    if settings.name in LOCAL_NAMES:
        return Local(settings.name)
    raise DeployError(
        f"{settings.name} is another machine, and this version deploys to localhost only: "
        "install Drafthouse there and run fab on it, until deploys over SSH arrive"
    )


def describe(argv: Sequence[str], env: Mapping[str, str] | None, input: bytes | None) -> str:
    """A command for the debug log: long arguments cut, variables by name only, since values may be secret."""
    words = [word if len(word) <= 120 else f"{word[:100]}… ({len(word)} characters)" for word in argv]
    added = f" with {', '.join(env)}" if env else ""
    fed = f" < {len(input)} bytes" if input is not None else ""
    return f"{words}{added}{fed}"


def failure(host: str, argv: Sequence[str], result: Result) -> str:
    """The sentence for a command that failed: host, program, how it ended, and its last words."""
    how = f"exit code {result.code}"
    if result.code > 128:
        with contextlib.suppress(ValueError):
            how = f"killed by {signal.Signals(result.code - 128).name}"
    lines = result.err.decode(errors="replace").strip().splitlines()
    return f"{host}: {argv[0]} failed ({how})" + (f": {lines[-1].strip()}" if lines else "")


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the command and what it started, and let go of its pipes, which a stray child may hold open."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe:
            with contextlib.suppress(OSError):
                pipe.close()
