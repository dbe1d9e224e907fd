"""One command asked for by a `sshcommand.Request`: what goes in, what has come out, how far it has got."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import time
from typing import IO

from deploy.sshcommand import Process, Request


class Talk:
    """A process whose stdin takes the request, and what it has answered."""

    def __init__(
        self, request: Request, data: bytes, process: subprocess.Popen[bytes], shared: bool = False
    ) -> None:
        self.request = request
        self.shared = shared  # with the master's connection
        self.process = process
        self.out = bytearray()
        self.err = bytearray()
        self.begun: str | None = None
        self.remote: Process | None = None
        self.start = 0  # where the command's own output begins in `out`
        self._data = memoryview(data)
        self._close = False  # stdin, when all data is in
        self._open = {pipe_of(pipe) for pipe in (process.stdin, process.stdout, process.stderr)}
        os.set_blocking(pipe_of(process.stdin).fileno(), False)

    def to_its_end(self, deadline: float) -> None:
        """Feed it and read until it has ended. Raises TimeoutError at `deadline` (time.monotonic)."""
        self._close = True
        while self._open:
            self._step(deadline, 65536, self._open)
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise TimeoutError from None

    def until_begun(self, deadline: float) -> None:
        """Go on until the command's own output begins, and not a byte further; or until the session ends."""
        mark = f"\n{self.request.token}\n".encode()
        stdin, stdout = pipe_of(self.process.stdin), pipe_of(self.process.stdout)
        stderr = pipe_of(self.process.stderr)
        while True:
            wanted = {stdin} if self._data else set()
            wanted |= {stdout} if self.begun is None else set()
            wanted |= {stderr} if mark not in self.err else set()
            wanted &= self._open
            if not wanted or (self.begun is None and stdout not in self._open):
                break
            self._step(deadline, 1, wanted)
        if self.begun is None:
            self.to_its_end(deadline)
        elif self.begun == "begun":
            os.set_blocking(stdin.fileno(), True)

    def until_known(self, deadline: float) -> None:
        """Read until it is known which process there is ours."""
        while self.begun is None and self._open:
            self._step(deadline, 65536, self._open)

    def _step(self, deadline: float, size: int, pipes: set[IO[bytes]]) -> None:
        stdin, stdout = pipe_of(self.process.stdin), pipe_of(self.process.stdout)
        with selectors.DefaultSelector() as selector:
            for pipe in pipes:
                selector.register(pipe, selectors.EVENT_WRITE if pipe is stdin else selectors.EVENT_READ)
            ready = selector.select(max(0.0, deadline - time.monotonic()))
        if not ready or time.monotonic() > deadline:
            raise TimeoutError
        for key, _ in ready:
            if key.fileobj is stdin:
                self._feed(stdin)
            else:
                pipe = stdout if key.fileobj is stdout else pipe_of(self.process.stderr)
                self._take(pipe, self.out if pipe is stdout else self.err, size)

    def _feed(self, stdin: IO[bytes]) -> None:
        try:
            if self._data:
                self._data = self._data[os.write(stdin.fileno(), self._data[:65536]) :]
        except BlockingIOError:
            return
        except OSError:  # it reads no more
            self._data = self._data[:0]
        if not self._data and self._close:
            self._open.discard(stdin)
            with contextlib.suppress(OSError):
                stdin.close()

    def _take(self, pipe: IO[bytes], into: bytearray, size: int) -> None:
        data = os.read(pipe.fileno(), size)
        if not data:
            self._open.discard(pipe)
            return
        into += data
        if into is self.out and self.begun is None and b"\n" in data:
            found = self.request.begin(bytes(into))
            if found:
                self.begun, self.remote, self.start = found


def pipe_of(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
