"""A Python that has imported everything and forks for each program: what people call, without its start.

    python = Python(preload=("torch", "transformers"), cwd=checkout)
    python.run(["-m", "trainer", *flags], cwd=..., env=...)  # as subprocess.run([sys.executable, ...
    process = python.start(["-c", "print(1)"], cwd=..., env=..., stdout=file)

Each program is a process with the given environment, directory, arguments and outputs, and its standard
input is empty unless one is given. Tests of what happens while a program starts, of Ctrl-C and of Python's
own variables, which are read when it starts, call the program itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Process:
    """A program that was started, with subprocess.Popen's words for what tests do with it."""

    def __init__(self, args: Sequence[str], answers: socket.socket) -> None:
        self.args, self._answers, self._reading = list(args), answers, threading.Lock()
        self.pid = int(answers.recv(16))
        self.returncode: int | None = None

    def __del__(self) -> None:
        self._answers.close()

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code; several threads may wait. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            with self._reading:
                if self.returncode is None:
                    self.returncode = int(self._answers.recv(16) or b"1")
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ends just now
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Popen(subprocess.Popen[Any]):
    """A program that was started, with subprocess.Popen's pipes and all of its methods.

    `stdin`, `stdout` and `stderr` are PIPE, DEVNULL, a file or its descriptor; `stderr` may be STDOUT.
    """

    def __init__(
        self,
        python: Python,
        argv: Sequence[str],
        cwd: str | Path,
        env: Mapping[str, str],
        stdin: Any = subprocess.DEVNULL,
        stdout: Any = subprocess.DEVNULL,
        stderr: Any = subprocess.DEVNULL,
        text: bool = False,
        start_new_session: bool = False,
    ) -> None:
        # As subprocess.Popen leaves them, for the methods that it has.
        self.args, self.returncode = list(argv), None
        self.encoding = self.errors = self._input = None
        self.text_mode = text
        self._child_created, self._communication_started = True, False
        self._sigint_wait_secs = 0.25
        with contextlib.ExitStack() as theirs:

            def pipe(given: Any, theirs_is: int) -> tuple[int, int | None]:
                """The program's end, and ours."""
                if given == subprocess.PIPE:
                    ends = os.pipe()
                    theirs.callback(os.close, ends[theirs_is])
                    return ends[theirs_is], ends[1 - theirs_is]
                if given == subprocess.DEVNULL:
                    return theirs.enter_context(open(os.devnull, "r+b", buffering=0)).fileno(), None
                return given if isinstance(given, int) else given.fileno(), None

            first, fed = pipe(stdin, 0)
            second, out = pipe(stdout, 1)
            third, err = (second, None) if stderr == subprocess.STDOUT else pipe(stderr, 1)
            self._process = python.start(argv, cwd, env, second, third, first, start_new_session)
        self.pid = self._process.pid
        self.stdin, self.stdout, self.stderr = (
            None if fd is None else os.fdopen(fd, mode if text else f"{mode}b")
            for fd, mode in ((fed, "w"), (out, "r"), (err, "r"))
        )

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            self.returncode = self._process.poll()
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        self.returncode = self._process.wait(timeout)
        return self.returncode


class Python:
    """One of these processes for each worker; it ends when this end of its socket is closed.

    `preload` names modules; one that starts threads cannot be used after the fork, so none of them may.
    `flags` are Python's own.
    """

    def __init__(
        self, preload: Sequence[str], cwd: Path, flags: Sequence[str] = (), **environment: str
    ) -> None:
        # Whole messages, so that several processes may send theirs at once.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        argv = [sys.executable, *flags, __file__, str(theirs.fileno()), *preload]
        env = {**os.environ, "PYTHONPATH": str(cwd), **environment}
        self._process = subprocess.Popen(argv, env=env, cwd=cwd, pass_fds=[theirs.fileno()])
        theirs.close()

    def start(
        self,
        argv: Sequence[str],
        cwd: str | Path,
        env: Mapping[str, str],
        stdout: int,
        stderr: int,
        stdin: int | None = None,
        new_session: bool = False,
    ) -> Process:
        """Start ``python ARGV``, where ARGV is [-u] and -m MODULE, -c CODE or a script, and words for it.

        `stdin`, `stdout` and `stderr` are file descriptors.
        """
        answers, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as request, open(os.devnull, "rb") as null:
            words = {"argv": list(argv), "cwd": str(cwd), "env": dict(env), "new_session": new_session}
            request.write(json.dumps(words).encode())
            request.flush()
            first = null.fileno() if stdin is None else stdin
            socket.send_fds(self._socket, [b"!"], [request.fileno(), theirs.fileno(), first, stdout, stderr])
        return Process(argv, answers)

    def run(
        self, argv: Sequence[str], cwd: Path, env: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Start it and wait. Raises subprocess.TimeoutExpired, once it was killed."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = self.start(argv, cwd, env, out.fileno(), err.fileno())
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode())
        return subprocess.CompletedProcess(process.args, process.wait(0), *texts)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


# -- in the server -----------------------------------------------------------------------------------------


def serve(requests: socket.socket) -> list[str]:
    """Fork for each request, until the other end is closed. Returns its argv where it is to be run."""
    gc.freeze()  # what is imported is garbage in no child, and stays shared
    ended, wake = os.pipe()
    for fd in (ended, wake):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    waiting: dict[int, socket.socket] = {}  # who wants to know how a child ends
    while True:
        ready, _, _ = select.select([requests, ended], [], [])
        if ended in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(ended, 4096)
            while waiting:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                with contextlib.suppress(OSError), waiting.pop(pid) as answer:
                    answer.sendall(b"%d" % os.waitstatus_to_exitcode(status))
        if requests not in ready:
            continue
        head, fds, _, _ = socket.recv_fds(requests, 1, 5)
        if not head:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            break
        waiting[pid] = answer = socket.socket(fileno=fds[1])
        for fd in (fds[0], *fds[2:]):  # a reader of a pipe sees its end with the program's
            os.close(fd)
        with contextlib.suppress(OSError):
            answer.sendall(b"%d" % pid)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for other in (requests, *waiting.values()):
        other.close()
    with open(fds[0], "rb") as file:
        file.seek(0)
        request = json.load(file)
    if request["new_session"]:
        os.setsid()
    for target, fd in enumerate(fds[2:]):
        os.dup2(fd, target)
    for fd in (ended, wake, *fds[1:]):
        os.close(fd)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    return request["argv"]


def become(argv: list[str]) -> None:
    """Run what ``python ARGV`` runs."""
    if argv[0] == "-u":
        argv = argv[1:]
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    if argv[0] == "-m":
        sys.argv, sys.path[0] = argv[1:], os.getcwd()
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    elif argv[0] == "-c":
        sys.argv = ["-c", *argv[2:]]
        if not sys.flags.isolated:
            sys.path[0] = ""
        exec(compile(argv[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[0] = argv, str(Path(argv[0]).parent)
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    number, *names = sys.argv[1:]
    for name in names:
        importlib.import_module(name)
    become(serve(socket.socket(fileno=int(number))))
