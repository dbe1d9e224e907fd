"""Runs one command after the other in a container. Runs IN it: standard library only, Python >= 3.9.

`pct exec` takes half a second to start, since it loads all of Proxmox; so what a task asks of a container
goes through one that stays. A request is a line ``{"bytes", "timeout"}`` and that many bytes, which a shell
gets on its stdin (see `deploy.sshcommand`); the answer is a line ``{"code", "out", "err"}`` and as many bytes
of stdout and stderr. After `timeout` seconds the command is killed with its group, and ``code`` is null.

When stdin ends the command ends, too: nobody is there for its answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from typing import IO, Any

BLOCK = 1 << 16
READY = b"drafthouse agent\n"


def main() -> None:
    """Serve requests from stdin until it ends. ``sys.argv[1:]`` is the shell that takes each of them."""
    os.environ.pop("LC_CTYPE", None)  # Python's own doing, where there is no locale
    os.write(1, READY)
    while True:
        line = _line()
        if not line:
            return
        wanted = json.loads(line)
        answer, out, err = _serve(sys.argv[1:], _take(wanted["bytes"]), wanted["timeout"])
        said = {"code": answer, "out": len(out), "err": len(err)}
        _write(json.dumps(said).encode() + b"\n" + out + err)


def _serve(argv: list[str], data: bytes, timeout: float) -> tuple[Any, bytes, bytes]:
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # one group to kill
    )
    stdin, stdout, stderr = _pipes(process)
    found = {stdout: bytearray(), stderr: bytearray()}
    rest = memoryview(data)
    deadline = time.monotonic() + timeout
    os.set_blocking(stdin.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(stdin, selectors.EVENT_WRITE)
        selector.register(stdout, selectors.EVENT_READ)
        selector.register(stderr, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        reading = 2
        while reading:
            left = deadline - time.monotonic()
            if left <= 0:
                return _kill(process)
            for key, _ in selector.select(left):
                pipe: Any = key.fileobj
                if pipe == 0:  # nothing is asked before the answer: this is the end
                    _kill(process)
                    os._exit(1)
                if pipe is stdin:
                    rest = _feed(pipe.fileno(), rest)
                    if not rest:
                        selector.unregister(pipe)
                        pipe.close()
                    continue
                block = os.read(pipe.fileno(), BLOCK)
                found[pipe] += block
                if not block:
                    selector.unregister(pipe)
                    reading -= 1
    try:
        code = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return _kill(process)
    stdout.close()
    stderr.close()
    return code if code >= 0 else 128 - code, bytes(found[stdout]), bytes(found[stderr])


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
    assert process.stdin
    assert process.stdout
    assert process.stderr
    return process.stdin, process.stdout, process.stderr


def _feed(descriptor: int, rest: memoryview) -> memoryview:
    try:
        return rest[os.write(descriptor, rest[:BLOCK]) :]
    except BlockingIOError:
        return rest
    except OSError:  # it reads no more
        return rest[:0]


def _kill(process: subprocess.Popen[bytes]) -> tuple[None, bytes, bytes]:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in _pipes(process):
        with contextlib.suppress(OSError):  # stdin may hold what nobody has read
            pipe.close()
    return None, b"", b""


def _line() -> bytes:
    """The next line of stdin, not a byte more; empty at its end."""
    found = bytearray()
    while True:
        byte = os.read(0, 1)
        found += byte
        if not byte or byte == b"\n":
            return bytes(found)


def _take(count: int) -> bytes:
    parts = []
    while count:
        block = os.read(0, min(count, 1 << 20))
        if not block:
            os._exit(1)
        parts.append(block)
        count -= len(block)
    return b"".join(parts)


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


if __name__ == "__main__":
    main()
