"""What a program on a host says for as long as we listen, over a connection that may break meanwhile.

The program gives a sign of life every 2 s, so that silence means that the connection is dead, whatever it
looks like from here. Then a new one is made, for as long as it takes: whoever watches a run does not want to
be told in the morning that the network had a bad minute.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

from deploy import onhost
from deploy.host import Host, HostError

SILENCE = 10.0  # seconds without a sign of life after which a connection counts as lost
DELAYS = (0.0, 1.0, 2.0, 5.0)  # seconds before the attempts to connect again; the last one for all further
TELL = 60.0  # seconds between two words about a connection that does not come back
END = 0.5  # seconds that a program gets to notice that nobody listens any more
BLOCK = 1 << 16

Note = Callable[[str], None]


class Lost(Exception):
    """The connection broke off, or has been silent for too long; says so in words."""


def to_stderr(sentence: str) -> None:
    """Say something about what is shown that is not a part of it."""
    print(sentence, file=sys.stderr, flush=True)


def block(host: Host, process: subprocess.Popen[bytes], silence: float | None = None) -> bytes:
    """The next bytes of a process from `onhost.open`, as soon as there are any; none at its proper end.

    Raises Lost, or HostError with its own words if it failed.
    """
    assert process.stdout
    patience = SILENCE if silence is None else silence
    poll = select.poll()
    poll.register(process.stdout.fileno(), select.POLLIN | select.POLLHUP)
    if not poll.poll(patience * 1000):
        raise Lost(f"no data for {patience:g} s")
    data = os.read(process.stdout.fileno(), BLOCK)
    if data:
        return data
    words = onhost.last_words(process)
    if process.returncode == 0:
        return b""
    # (137: killed there, as when a container is stopped)
    if not host.is_local and (process.returncode < 0 or process.returncode in (137, 255) or host.lost()):
        raise Lost("the connection was lost")
    raise HostError(f"{host.name}: {words}")


def again(
    host: Host, start: Callable[[], subprocess.Popen[bytes]], lost: Lost, note: Note, heard: float
) -> subprocess.Popen[bytes]:
    """Start a process anew after a loss. `note` gets a sentence at once, now and then while it fails, and at
    last one that says how long there was no connection: since `heard` (monotonic, s)."""
    note(f"── {host.name}: {lost}, reconnecting")
    told, attempt = time.monotonic(), 0
    while True:
        time.sleep(DELAYS[min(attempt, len(DELAYS) - 1)])
        attempt += 1
        host.close()  # what is left of the old connection may hang
        try:
            process = start()
            note(f"── {host.name}: connected again after {time.monotonic() - heard:,.0f} s")
            return process
        except HostError as error:
            if time.monotonic() - told > TELL:
                note(f"── still no connection, trying on: {error}")
                told = time.monotonic()


@contextlib.contextmanager
def listening(
    host: Host, start: Callable[[], subprocess.Popen[bytes]], note: Note
) -> Iterator[Callable[[], bytes | None]]:
    """A function that gives the next bytes, b"" at the end, and None when the process was started anew."""
    process = start()
    heard = time.monotonic()

    def step() -> bytes | None:
        nonlocal process, heard
        try:
            data = block(host, process)
            heard = time.monotonic()
            return data
        except Lost as lost:
            onhost.kill(process)
            onhost.close(process)
            process = again(host, start, lost, note, heard)
            return None

    try:
        yield step
    finally:
        onhost.close(process, END)


def values(
    host: Host, function: str, *arguments: Any, note: Note = to_stderr
) -> Generator[dict[str, Any], None, None]:
    """The JSON objects, one a line, of a function on `host`; from its beginning again after a loss."""
    with listening(host, lambda: onhost.open(host, function, *arguments), note) as step:
        rest = b""
        while True:
            data = step()
            if data is None:
                rest = b""
                continue
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield json.loads(line)
            if not data:
                return
