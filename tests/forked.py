"""A Python that has imported everything and forks for each program: what people call, without its start.

    python = Python(preload=("torch", "transformers"), cwd=checkout)
    python.run(["-m", "trainer", *flags], cwd=..., env=...)  # as subprocess.run([sys.executable, ...
    process = python.start(["-c", "print(1)"], cwd=..., env=..., stdout=file)

Each program is a process with the given environment, directory, arguments and outputs, and its standard
input is empty. Tests of what happens while a program starts, of Ctrl-C and of Python's own variables, which
are read when it starts, call the program itself.
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
from collections.abc import Mapping, Sequence
from pathlib import Path


class Process:
    """A program that was started, with subprocess.Popen's words for what tests do with it."""

    def __init__(self, args: Sequence[str], answers: socket.socket) -> None:
        self.args, self._answers = list(args), answers
        self.pid = int(answers.recv(16))
        self.returncode: int | None = None

    def wait(self, timeout: float) -> int:
        """Returns the exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = int(self._answers.recv(16) or b"1")
            self._answers.close()
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


class Python:
    """One of these processes for each worker; it ends when this end of its socket is closed.

    `preload` names modules; one that starts threads cannot be used after the fork, so none of them may.
    """

    def __init__(self, preload: Sequence[str], cwd: Path, **environment: str) -> None:
        ours, theirs = socket.socketpair()
        self._socket = ours
        argv = [sys.executable, __file__, str(theirs.fileno()), *preload]
        env = {**os.environ, "PYTHONPATH": str(cwd), **environment}
        self._process = subprocess.Popen(argv, env=env, cwd=cwd, pass_fds=[theirs.fileno()])
        theirs.close()

    def start(
        self,
        argv: Sequence[str],
        cwd: Path,
        env: Mapping[str, str],
        stdout: int,
        stderr: int,
    ) -> Process:
        """Start ``python ARGV``, where ARGV is [-u] and -m MODULE, -c CODE or a script, and words for it.

        `stdout` and `stderr` are file descriptors.
        """
        answers, theirs = socket.socketpair()
        with theirs:
            request = json.dumps({"argv": list(argv), "cwd": str(cwd), "env": dict(env)}).encode()
            socket.send_fds(self._socket, [b"%012d" % len(request)], [stdout, stderr, theirs.fileno()])
            self._socket.sendall(request)
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
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
    gc.freeze()  # what is imported is garbage in no child, and stays shared
    while True:
        head, fds, _, _ = socket.recv_fds(requests, 12, 3)
        if not head:
            os._exit(0)
        body = b""
        while len(body) < int(head):
            body += requests.recv(int(head) - len(body))
        if os.fork() == 0:
            requests.close()
            break
        for fd in fds:
            os.close(fd)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    answer = socket.socket(fileno=fds[2])
    pid = os.fork()
    if pid:
        for fd in fds[:2]:  # a reader of a pipe sees its end with the program's
            os.close(fd)
        answer.sendall(b"%d" % pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):
            answer.sendall(b"%d" % code)
        os._exit(0)
    answer.close()
    request = json.loads(body)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (fds[0], 1), (fds[1], 2)):
        os.dup2(source, target)
        os.close(source)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
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
        sys.argv, sys.path[0] = ["-c", *argv[2:]], ""
        exec(compile(argv[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[0] = argv, str(Path(argv[0]).parent)
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    become(serve(socket.socket(fileno=int(sys.argv[1]))))
