"""Where commands run, and files are read and written, on a host.

A `Host` takes a list of arguments, a timeout and an environment; no shell sees a word of them, so no value
needs quoting. `Local` is this machine, `deploy.ssh.Ssh` one that is reached by SSH: whatever goes through
here works on both.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from deploy.errors import DeployError
from deploy.files import read_file, write_file, write_tree

if TYPE_CHECKING:
    from deploy.inside import Inside
    from deploy.ssh import Ssh

log = logging.getLogger(__name__)

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
CONTAINER = re.compile(r"/([1-9]\d{2,8})$")  # of HOST/200, which is a container of a Proxmox host

# How Python is started for our own scripts on a host: nobody's PYTHON* variables, site directories or .pth
# files change what they do or take their time, arguments and environment are UTF-8 whatever the locale says,
# and no cache files are left.
SCRIPT_FLAGS = ("-I", "-S", "-B", "-X", "utf8")


class HostError(DeployError):
    """A command or file on a host failed; the message names host, what, and why."""


class LostError(HostError):
    """The connection broke off while a command ran."""


class NoPython(HostError):
    """There is no Python on the host that our scripts could run with."""


OLD_PYTHON = "our scripts need 3.9 or later"  # in what a Python that is too old says of itself


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

    @property
    def is_local(self) -> bool:
        """Whether it is this machine."""
        ...

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
        """Start `argv` with pipes for stdin, stdout and stderr, out of reach of the terminal's signals.

        It ends with its stdin at the latest if it is one of ours: nothing kills it when we are killed.
        """
        ...

    def bulk(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """`open_stream` for very much data: over a connection of its own, in nobody else's way."""
        ...

    def rsync_shell(self) -> str | None:
        """What rsync needs for ``-e`` to reach this host, whatever name the path has before its colon.

        None for this machine.
        """
        ...

    def lost(self) -> bool:
        """Whether there was a connection to the host that is gone; the next command makes a new one."""
        ...

    def close(self) -> None:
        """End the connection, if there is one. The host can still be used: it connects again."""
        ...


class Local:
    """This machine."""

    is_local = True

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
        with logged(self.name, argv, env, input) as ended:
            result = self._run(argv, timeout, env, input)
            ended(result)
        if check and result.code:
            raise failed(self.name, argv, result)
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
                kill_group(process)
                raise HostError(
                    f"{self.name}: {argv[0]} did not end within {timeout:g} s and was killed"
                ) from None
            except BaseException:  # Ctrl-C: the command does not outlive us
                kill_group(process)
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
        log.debug("%s: write %s (%d bytes, mode %o)", self.name, path, len(data), mode)
        try:
            write_file(path, data, mode, parents)
        except OSError as error:
            raise HostError(f"{self.name}: cannot write {path}: {error.strerror}") from None

    def write_tree(self, path: str, files: Mapping[str, bytes], *, mode: int = 0o644) -> bool:
        log.debug("%s: write %s/ (%d files)", self.name, path, len(files))
        try:
            return write_tree(path, files, mode)
        except OSError as error:
            raise HostError(f"{self.name}: cannot write {path}: {error.strerror}") from None

    def read(self, path: str) -> bytes | None:
        try:
            return read_file(path)
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

    def resident(self, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        return self.open_stream(argv)

    def bulk(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        return self.open_stream(argv, env)

    def rsync_shell(self) -> None:
        return None

    def lost(self) -> bool:
        return False

    def close(self) -> None:
        pass


class Address(Protocol):
    """What `connect` needs of a host's settings."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def container(self) -> int | None: ...
    @property
    def python_for_tools(self) -> str | None: ...


def connect(settings: Address, *, accept_new_host_key: bool = False) -> Local | Ssh | Inside:
    """The host that `settings` describe, or the container on it. It is reached at its first use, not here.

    With `accept_new_host_key`, a host key that nobody has seen before is written to known_hosts; one that has
    changed is refused all the same. Raises DeployError for an address that cannot be one.
    """
    address = settings.address or settings.name
    python = settings.python_for_tools or "python3"
    outer: Local | Ssh
    if address in LOCAL_NAMES:
        outer = Local(settings.name, settings.python_for_tools or sys.executable)
    else:
        from deploy import ssh  # here, because it builds on what is above

        outer = ssh.reach(settings.name, address, python, accept_new_host_key=accept_new_host_key)
    if settings.container is None:
        return outer
    from deploy import inside

    return inside.Inside(settings.name, outer, settings.container, python)


@contextlib.contextmanager
def logged(
    name: str, argv: Sequence[str], env: Mapping[str, str] | None, input: bytes | None
) -> Iterator[Callable[[Result], None]]:
    """Write one line for a command to the debug log when it has ended, with its exit code and its time."""
    began = time.monotonic()
    results: list[Result] = []
    try:
        yield results.append
    finally:
        outcome = f"exit code {results[0].code}" if results else "no result"
        seconds = time.monotonic() - began
        log.debug("%s: %s -> %s in %.2f s", name, describe(argv, env, input), outcome, seconds)


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


def failed(host: str, argv: Sequence[str], result: Result) -> HostError:
    """The error for a command that failed; NoPython if it was ours, and Python there is too old for it."""
    kind = NoPython if OLD_PYTHON.encode() in result.err else HostError
    return kind(failure(host, argv, result))


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the command and what it started, and let go of its pipes, which a stray child may hold open."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe:
            with contextlib.suppress(OSError):
                pipe.close()
