"""A host that is reached by SSH, with the OpenSSH client: whatever ~/.ssh/config says works by itself.

There is one connection: a master that every command shares, at most two of them at once (a command, and one
stream beside it), so that sshd's MaxSessions of 2 is enough. What moves very much data has a connection of
its own. The master ends when we do, however we end.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from deploy import sshconfig, sshfailure, sshpipe
from deploy.host import HostError, LostError, Result, describe, failed, kill_group, logged
from deploy.remote_files import RemoteFiles, no_python
from deploy.sshcommand import COMMAND, Process, Request, killing
from deploy.talk import Talk, pipe_of

log = logging.getLogger(__name__)

CONNECT_TIMEOUT = 30.0  # seconds for a connection with all its jumps; ssh itself gives each of them 10
BEGIN_TIMEOUT = 30.0  # seconds that a login may take to start a stream
KILL_TIMEOUT = 5.0
PATIENCE = 15.0  # seconds with a server that closes before its greeting: too many at once (MaxStartups)
REFUSED = b"session request failed"  # of a server whose MaxSessions are in use

# Arguments: a directory, ssh's words. Becomes ssh. What stays beside it ends ssh when our end of stdin closes
# without a word, which is when we were killed; and removes the directory, unless the word is `stay`.
_WATCHED = """\
trap "" INT QUIT
directory=$1
shift
exec 3<&0 </dev/null
(
  trap "" HUP
  IFS= read -r word <&3 || kill "$$"
  [ "$word" = stay ] || rm -rf -- "$directory"
) >/dev/null 2>&1 &
exec 3<&-
exec "$@"
"""


class Ssh(RemoteFiles):
    """A machine that `ssh ADDRESS` reaches. Connects at its first use, and again after a loss."""

    is_local = False

    def __init__(
        self,
        name: str,
        address: str = "",
        python: str = "python3",
        *,
        accept_new_host_key: bool = False,
        interactive: bool | None = None,
    ) -> None:
        self.name = name
        self.address = address or name
        self.python = python
        self._accept_new = accept_new_host_key
        self._interactive = interactive
        self._target = sshconfig.target(self.address)
        self._running = threading.RLock()  # one command at a time
        self._connecting = threading.RLock()
        self._place: _Place | None = None
        self._master: _Master | None = None
        self._stream: subprocess.Popen[bytes] | None = None
        self._silent: bool | None = None  # whether one more connection asks nothing; None: not tried
        self._failed: HostError | None = None  # of a connection that was begun

    def __repr__(self) -> str:
        return f"Ssh({self.name!r}, {self.address!r})"

    # -- the connection ------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect, unless there is a connection. Raises HostError, with what to do, if that fails."""
        with self._connecting:
            if self._failed is not None:
                failed, self._failed = self._failed, None
                raise failed
            if self._master is not None and self._master.alive():
                return
            self._end_master()
            if shutil.which("ssh") is None:
                raise HostError(f"{self.name}: {sshfailure.NO_CLIENT}")
            place = self._own_place()
            began = time.monotonic()
            for attempt in itertools.count():
                master = _Master(place, [*self._ssh(place), "-v", "-N"], self._target, place.interactive)
                errors = master.wait_connected(None if place.interactive else CONNECT_TIMEOUT)
                if errors is None:
                    self._master = master
                    log.debug("%s: connected in %.2f s", self.name, time.monotonic() - began)
                    return
                master.end()
                if not self._patient(began) or not sshfailure.is_busy(errors):
                    raise HostError(sshfailure.explain(self.name, self.address, errors))
                time.sleep(random.uniform(0.1, 0.3) * 2 ** min(attempt, 3))  # not in step with others

    def begin(self) -> None:
        """Connect while something else is done. Whether that fails is told at the first use."""
        locked = threading.Event()

        def work() -> None:
            with self._connecting:
                locked.set()
                try:
                    self.connect()
                except HostError as error:
                    self._failed = error

        threading.Thread(target=work, daemon=True).start()
        locked.wait()

    def lost(self) -> bool:
        return self._master is not None and not self._master.alive()

    def close(self) -> None:
        with self._connecting:
            self._end_master(last=True)
            if self._place is not None:
                self._place.remove()
                self._place = None

    def _end_master(self, *, last: bool = False) -> None:
        if self._master is not None:
            self._master.end(last=last)
            self._master = None

    def _own_place(self) -> _Place:
        if self._place is None or not self._place.path.is_dir():
            interactive = sys.stdin is not None and sys.stdin.isatty()
            if self._interactive is not None:
                interactive = self._interactive
            self._place = _Place(self._accept_new, interactive)
        return self._place

    @staticmethod
    def _ssh(place: _Place) -> list[str]:
        return ["ssh", "-F", str(place.config), "-T"]

    def _own_words(self) -> list[str]:
        """ssh for a connection of its own."""
        place = self._own_place()
        apart = ["-o", "ControlMaster=no", "-o", "ControlPath=none", "-o", "BatchMode=yes"]
        return [*self._ssh(place), *apart, *self._target]

    def _has_own(self) -> bool:
        """Whether a connection of its own comes about without a question.

        A passphrase or a password is asked for once, for the master; what would ask again shares it.
        """
        self.connect()
        if self._own_place().interactive and self._silent is None:
            talk = self._talk(["true"], shared=False)
            try:
                talk.to_its_end(time.monotonic() + CONNECT_TIMEOUT)
            except TimeoutError:
                pass
            finally:
                kill_group(talk.process)
            self._silent = talk.begun is not None
        return self._silent is not False

    def _shared_words(self) -> list[str]:
        """ssh for one more session of the master."""
        assert self._master is not None
        # Without the master ssh would connect by itself, unasked: a proxy that is none keeps it from that.
        never = ["-o", "ControlMaster=no", "-o", "ProxyCommand=false", "-o", "LogLevel=ERROR"]
        return ["ssh", "-F", "none", "-T", "-a", "-x", "-S", self._master.socket, *never, "master"]

    # -- commands ------------------------------------------------------------------------------------------

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        env: Mapping[str, str] | None = None,
        input: bytes | None = None,
        check: bool = True,
    ) -> Result:
        with self._running, logged(self.name, argv, env, input) as ended:
            result = self._run(argv, timeout, env, input)
            ended(result)
        if check and result.code:
            if result.code == 127 and argv[0] == self.python and not result.out:
                raise no_python(self)
            raise failed(self.name, argv, result)
        return result

    def _run(
        self, argv: Sequence[str], timeout: float, env: Mapping[str, str] | None, input: bytes | None
    ) -> Result:
        shared: bool | None = True
        began = time.monotonic()
        while shared is not None:
            self.connect()
            talk = self._talk(argv, env, input or b"", shared=shared)
            self._to_its_end(talk, argv, timeout)
            shared = self._another_way(talk, began)
        return self._result(talk, argv)

    def _another_way(self, talk: Talk, began: float) -> bool | None:
        """Whether to try a command that did not begin again, and if so by the shared connection or not."""
        if talk.begun is not None:
            return None
        if talk.shared:
            if REFUSED in talk.err:  # all sessions that the server allows are in use
                return False
            return True if self._connection_ended(talk) and self._patient(began) else None
        if sshfailure.is_busy(talk.err.decode(errors="replace")) and self._patient(began):
            time.sleep(random.uniform(0.2, 1))
            return False
        return None

    @staticmethod
    def _patient(began: float) -> bool:
        return time.monotonic() - began < PATIENCE

    def _to_its_end(self, talk: Talk, argv: Sequence[str], timeout: float) -> None:
        try:
            talk.to_its_end(time.monotonic() + timeout)
        except TimeoutError:
            killed = self._give_up(talk)
            began = "" if talk.begun else " (its login there has not come to an end either)"
            what = "and was killed" if killed else "and could not be killed: it may go on there"
            raise HostError(
                f"{self.name}: {argv[0]} did not end within {timeout:g} s {what}{began}"
            ) from None
        except BaseException:  # Ctrl-C: the command does not outlive us
            self._give_up(talk)
            raise

    def _talk(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        input: bytes = b"",
        *,
        shared: bool = True,
    ) -> Talk:
        """Start a command in a session of the master, or over a connection of its own."""
        request = Request(argv, env or {})
        try:
            data = request.encode() + input
        except ValueError as error:  # a NUL byte, or a variable's name with '=' in it
            raise HostError(f"{self.name}: {argv[0]} cannot be started: {error}") from None
        process = subprocess.Popen(
            [*(self._shared_words() if shared else self._own_words()), COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # no Ctrl-C of the terminal
        )
        return Talk(request, data, process, shared)

    def _result(self, talk: Talk, argv: Sequence[str]) -> Result:
        code = talk.process.returncode
        code = code if code >= 0 else 128 - code
        if talk.begun is None:
            raise HostError(self._not_begun(talk, argv, code))
        err, own = talk.request.errors(bytes(talk.err))
        out = bytes(talk.out[talk.start :])
        if talk.begun == "missing":
            return Result(127, b"", f"there is no program {argv[0]!r}".encode())
        if talk.begun == "denied":
            return Result(126, b"", f"{argv[0]!r} may not be executed".encode())
        if code == 255 and not own:
            if self._connection_ended(talk):
                why = self._why()
                killed = self._kill(talk.remote)
                rest = "it was killed there" if killed else "what it has started there may go on"
                raise LostError(f"{self.name}: the connection was lost while {argv[0]} ran{why}; {rest}")
            raise HostError(f"{self.name}: {argv[0]} ended without an exit code: its shell there was killed")
        return Result(code, out, err)

    def _not_begun(self, talk: Talk, argv: Sequence[str], code: int) -> str:
        err = talk.err.decode(errors="replace")
        if not talk.shared and code == 255:
            return sshfailure.explain(self.name, self.address, err)
        if talk.shared and self._connection_ended(talk):
            return f"{self.name}: the connection was lost before {argv[0]} began{self._why()}; try again"
        said = (err.strip() or talk.out.decode(errors="replace").strip()).splitlines()
        last = f": {said[-1].strip()}" if said else ""
        return (
            f"{self.name}: the login there does not run commands (exit code {code}{last}); "
            "give its user a shell (chsh), or name another user in fabric.yaml"
        )

    def _connection_ended(self, talk: Talk) -> bool:
        """Whether the connection is gone. A session that ended with it may be a moment earlier to say so."""
        return not talk.shared or self._master is None or self._master.gone_within(1.0)

    def _why(self) -> str:
        words = sshfailure.last_words(self._master.errors() if self._master else "")
        return f" ({words})" if words else ""

    # -- ending what runs there ----------------------------------------------------------------------------

    def _give_up(self, talk: Talk) -> bool:
        """Kill a command there and our end of it. Whether nothing of it is left."""
        with contextlib.suppress(OSError, TimeoutError):
            talk.until_known(time.monotonic() + 0.2)
        kill_group(talk.process)
        return talk.begun in ("missing", "denied") or self._kill(talk.remote)

    def _kill(self, process: Process | None) -> bool:
        if process is None:
            return False
        lives = self._master is not None and self._master.alive()
        for shared in (True, False) if lives else (False,):  # the session to be ended may be one too many
            with contextlib.suppress(HostError, TimeoutError, OSError):
                talk = self._talk(killing(process), shared=shared)
                try:
                    talk.to_its_end(time.monotonic() + KILL_TIMEOUT)
                finally:
                    kill_group(talk.process)
                if talk.begun is not None:
                    return talk.process.returncode == 0
        return False

    # -- streams -------------------------------------------------------------------------------------------

    def open_stream(
        self, argv: Sequence[str], env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        log.debug("%s: open %s", self.name, describe(argv, env, None))
        if self._stream is not None and self._stream.poll() is None and self._has_own():
            return self._open(argv, env, shared=False)
        process = self._open(argv, env, shared=True)
        self._stream = process
        return process

    def resident(self, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        """A stream in the place of the commands of `run`, for whoever runs commands through it."""
        log.debug("%s: open %s to stay", self.name, describe(argv, None, None))
        return self._open(argv, None, shared=True)

    def bulk(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        log.debug("%s: open %s over a connection of its own", self.name, describe(argv, env, None))
        return self._open(argv, env, shared=not self._has_own())

    def _open(
        self, argv: Sequence[str], env: Mapping[str, str] | None, *, shared: bool
    ) -> subprocess.Popen[bytes]:
        way: bool | None = shared
        began = time.monotonic()
        while way is not None:
            self.connect()
            talk = self._talk(argv, env, shared=way)
            self._until_begun(talk, argv)
            if talk.begun == "begun":
                return talk.process
            kill_group(talk.process)
            way = self._another_way(talk, began)
        result = self._result(talk, argv)  # raises if the command did not begin
        if result.code == 127 and argv[0] == self.python:
            raise no_python(self)
        why = "No such file or directory" if result.code == 127 else "Permission denied"
        raise HostError(f"{self.name}: cannot start {argv[0]}: {why}")

    def _until_begun(self, talk: Talk, argv: Sequence[str]) -> None:
        try:
            talk.until_begun(time.monotonic() + BEGIN_TIMEOUT)
        except TimeoutError:
            kill_group(talk.process)
            raise HostError(
                f"{self.name}: the login there did not start {argv[0]} within {BEGIN_TIMEOUT:g} s; "
                "look for what waits in its shell's start-up files"
            ) from None
        except BaseException:
            kill_group(talk.process)
            raise

    def rsync_shell(self, through: bytes = b"") -> str:
        ssh = self._own_words() if self._has_own() else self._shared_words()
        return sshpipe.shell(self._own_place().path, [*ssh, COMMAND], through)


_begun: dict[tuple[str, bool], Ssh] = {}


def begin(name: str, address: str, *, accept_new_host_key: bool = False) -> None:
    """Begin to connect to `address`, for the `reach` that will come."""
    if (address, accept_new_host_key) not in _begun:
        host = Ssh(name, address, accept_new_host_key=accept_new_host_key)
        _begun[address, accept_new_host_key] = host
        host.begin()


def reach(name: str, address: str, python: str, *, accept_new_host_key: bool = False) -> Ssh:
    """The host at `address`: the one whose connection was begun, if it was."""
    host = _begun.pop((address, accept_new_host_key), None)
    if host is None:
        return Ssh(name, address, python, accept_new_host_key=accept_new_host_key)
    host.name, host.python = name, python
    return host


class _Place:
    """A private directory for ssh's configuration and its socket. Goes when it is forgotten."""

    def __init__(self, accept_new: bool, interactive: bool) -> None:
        base = tempfile.gettempdir()
        # A socket's path has at most 104 bytes on some systems, and ssh adds 17 for a while; in a control
        # path it reads %, $ and ~ in its own way.
        if len(base) > 60 or not re.fullmatch(r"[A-Za-z0-9/_.+-]*", base):
            base = "/tmp"
        self.path = Path(tempfile.mkdtemp(prefix="drafthouse-", dir=base))
        self.config = self.path / "config"
        self.interactive = interactive
        self.config.write_text(sshconfig.own(accept_new=accept_new, interactive=interactive))
        self.remove = weakref.finalize(self, shutil.rmtree, self.path, True)


class _Master:
    """The connection that sessions share: an `ssh -M -N`, and what ends it when we are killed."""

    def __init__(self, place: _Place, words: list[str], target: list[str], interactive: bool) -> None:
        # Another name for each: one that was lost may not have removed its own yet.
        self.socket = str(place.path / f"s{time.monotonic_ns() % 10**9}")
        share = ["-M", "-S", self.socket, "-o", "ControlPersist=no"]
        self._lines: deque[str] = deque(maxlen=400)
        self._process = subprocess.Popen(
            ["sh", "-c", _WATCHED, "drafthouse-ssh", str(place.path), *words, *share, *target],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            # ssh may have to ask for a passphrase: then it needs our terminal.
            start_new_session=not interactive,
        )
        self._reader = threading.Thread(
            target=_collect, args=(pipe_of(self._process.stderr), self._lines), daemon=True
        )
        self._reader.start()
        self._at_exit = weakref.finalize(self, _end, self._process, b"end\n")

    def wait_connected(self, seconds: float | None) -> str | None:
        """Wait until sessions can be opened. What ssh said if it ended or `seconds` passed; None: it can."""
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            while not os.path.exists(self.socket):
                if self._process.poll() is not None:
                    return self.errors()
                if deadline is not None and time.monotonic() > deadline:
                    self.end()
                    return f"{self.errors()}\n{sshfailure.TOO_LONG}"
                time.sleep(0.005)
        except BaseException:
            self.end()
            raise
        return None

    def end(self, *, last: bool = False) -> None:
        """End it; with `last`, nothing in its directory is needed any more."""
        if self._at_exit.detach():
            _end(self._process, b"end\n" if last else b"stay\n")

    def alive(self) -> bool:
        return self._process.poll() is None

    def gone_within(self, seconds: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return not self.alive()

    def errors(self) -> str:
        """What ssh has said on stderr."""
        if not self.alive():
            self._reader.join(1)
        return "\n".join(self._lines)


def _collect(pipe: IO[bytes], lines: deque[str]) -> None:
    for line in pipe:
        lines.append(line.decode(errors="replace").rstrip())


def _end(process: subprocess.Popen[bytes], word: bytes) -> None:
    with contextlib.suppress(OSError):
        pipe_of(process.stdin).write(word)  # or the watcher beside it would kill a pid, ours or not any more
        pipe_of(process.stdin).close()
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(3)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
