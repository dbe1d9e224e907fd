"""A `fab` that has imported everything and forks for each command: what people call, without its start.

    server = Server()
    server.run(["status"], cwd=..., env=...)   # as subprocess.run(["fab", "status"], ...) with pipes

Each command is a process with the given environment, directory, arguments and pipes, which reads
the fabfile of its directory and ends as `fab` ends. Tests of what happens while `fab` starts, of Ctrl-C and
of Python's own variables call the program itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

PRELOADED = ("actions", "execute", "explain", "logs", "overview", "plan", "show", "ssh", "switch", "survey")


class Server:
    """One of these processes for each worker; it ends when this end of its socket is closed."""

    def __init__(self, program: str, checkout: Path) -> None:
        ours, theirs = socket.socketpair()
        self._socket = ours
        argv = [sys.executable, __file__, str(theirs.fileno()), program]
        env = {**os.environ, "PYTHONPATH": str(checkout)}
        self._process = subprocess.Popen(argv, env=env, cwd=checkout, pass_fds=[theirs.fileno()])
        theirs.close()

    def run(
        self, words: Sequence[str], cwd: Path, env: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Call fab with `words`. Raises subprocess.TimeoutExpired, once it was killed."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            answer, theirs = socket.socketpair()
            with answer:
                with theirs:
                    request = json.dumps({"words": list(words), "cwd": str(cwd), "env": dict(env)}).encode()
                    fds = [out.fileno(), err.fileno(), theirs.fileno()]
                    socket.send_fds(self._socket, [b"%012d" % len(request)], fds)
                    self._socket.sendall(request)
                pid = int(answer.recv(16))
                if not select.select([answer], [], [], timeout)[0]:
                    os.kill(pid, signal.SIGKILL)
                    raise subprocess.TimeoutExpired(["fab", *words], timeout)
                code = int(answer.recv(16) or b"1")
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode())
        return subprocess.CompletedProcess(["fab", *words], code, *texts)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


# -- in the server -----------------------------------------------------------------------------------------


def serve(requests: socket.socket, program: str) -> None:
    """Fork for each request, until the other end is closed. Returns in the forked process, to be `fab`."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
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
        answer.sendall(b"%d" % pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):
            answer.sendall(b"%d" % code)
        os._exit(0)
    answer.close()
    become(json.loads(body), fds[:2], program)


def become(request: dict[str, object], outputs: list[int], program: str) -> None:
    """The process as one that was started with the request's words."""
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (outputs[0], 1), (outputs[1], 2)):
        os.dup2(source, target)
        os.close(source)
    os.chdir(str(request["cwd"]))
    os.environ.clear()
    os.environ.update(request["env"])  # type: ignore[call-overload]
    sys.argv = [program, *request["words"]]  # type: ignore[misc]
    sys.path[0] = str(Path(program).parent)


def main() -> None:
    requests, program = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    import importlib

    from fabric.main import program as fab

    for name in PRELOADED:
        importlib.import_module(f"deploy.{name}")
    serve(requests, program)
    fab.run()


if __name__ == "__main__":
    main()
