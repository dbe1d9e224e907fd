"""rsync, run and heard: how far it is, what went over the wire, and why it failed."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from deploy.errors import DeployError
from deploy.host import Host
from deploy.sizes import size

OLDEST = (3, 1)
VERSION_TIMEOUT = 30.0  # seconds for rsync to say its version
LINK_TIMEOUT = 30  # seconds without a byte, after which rsync gives up
SILENCE = 120.0  # seconds without a word of it, after which we do
SIGN_OF_LIFE = 10.0  # seconds between two words on a transfer

Report = Callable[[str], None]


def check(task: str) -> None:
    """Raises DeployError if this machine's rsync is not good enough for a task, ``ships images``."""
    remedy = "apt install rsync (or brew install rsync)"
    try:
        done = subprocess.run(["rsync", "--version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT)
    except FileNotFoundError:
        raise DeployError(f"this machine has no rsync, which {task}: {remedy}") from None
    except subprocess.TimeoutExpired:
        raise DeployError(
            f"this machine's rsync did not say its version within {VERSION_TIMEOUT:g} s; see whether "
            "rsync --version works here, and whether this machine's disk answers"
        ) from None
    found = re.search(r"rsync\s+version\s+v?(\d+)\.(\d+)", done.stdout)
    if not found or (int(found[1]), int(found[2])) < OLDEST:
        what = f"{found[1]}.{found[2]}" if found else "of an unknown kind"
        raise DeployError(
            f"this machine's rsync is {what} (macOS brings an old one), but what {task} must be 3.1 or "
            f"later: {remedy}"
        )


def run(
    host: Host, argv: Sequence[str], names: bytes, total: int, report: Report, what: str = "the image"
) -> int:
    """Run rsync with `names` on its stdin, tell how far it is, and return the bytes that went over the wire.

    It must have ``--info=progress2,stats1``. Raises DeployError, `what` having not got there whole.
    """
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "LC_ALL": "C"},
        start_new_session=True,  # Ctrl-C is ours to pass on
    )
    assert process.stdin
    assert process.stdout
    errors = process.stderr
    assert errors
    try:
        with contextlib.suppress(OSError):
            process.stdin.write(names)
            process.stdin.close()
        said: list[bytes] = []
        listening = threading.Thread(target=lambda: said.append(errors.read()), daemon=True)
        listening.start()
        sent, told = 0, time.monotonic()
        for line in _lines(process.stdout):
            progress = re.match(r"\s*([\d,]+)\s+\d+%\s+(\S+/s)", line)
            if progress and time.monotonic() - told > SIGN_OF_LIFE:
                done = int(progress[1].replace(",", ""))
                report(f"{host.name}: {what}, {size(done)} of {size(total)}, {progress[2]}")
                told = time.monotonic()
            whole = re.match(r"sent ([\d,]+) bytes\s+received ([\d,]+) bytes", line)
            if whole:
                sent = sum(int(number.replace(",", "")) for number in whole.groups())
        code = process.wait()
        listening.join(5)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # the other side keeps what it has
        process.wait()
        if isinstance(error, TimeoutError):
            raise DeployError(
                f"rsync to {host.name} gave no sign of life for {SILENCE:.0f} s and was ended; run the "
                "command again, it goes on from what has arrived"
            ) from None
        raise
    finally:
        process.stdout.close()
    if code:
        lines = b"".join(said).decode(errors="replace").splitlines()
        reasons = [line.strip() for line in lines if line.strip() and not line.startswith("rsync error")]
        reason = reasons[0] if reasons else f"rsync ended with {code}"
        raise DeployError(
            f"{what} did not get to {host.name} whole: {reason}; run the command again, it goes on from "
            "what has arrived"
        )
    return sent


def _lines(stream: IO[bytes]) -> Iterator[str]:
    """Lines of a progress that is redrawn: a carriage return ends one, too. Raises TimeoutError."""
    rest = b""
    while True:
        if not select.select([stream], [], [], SILENCE)[0]:
            raise TimeoutError
        block = os.read(stream.fileno(), 1 << 16)
        if not block:
            break
        *whole, rest = re.split(rb"[\r\n]", rest + block)
        yield from (line.decode(errors="replace") for line in whole)
    yield rest.decode(errors="replace")
