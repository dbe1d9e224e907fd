"""Where the testbed keeps things, and one way to run commands."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
RUN = Path(
    "/run/drafthouse-testbed"
)  # sockets and pid files: a short path, since a socket's may have 107 bytes


class TestbedError(Exception):
    """A part of the testbed could not be brought up; one sentence for the person who runs the tests."""

    __test__ = False  # no test class, whatever its name says


def work_directory() -> Path:
    """Where images, caches and state of the tests lie: DRAFTHOUSE_TESTBED, else .testbed/ in the checkout."""
    return Path(os.environ.get("DRAFTHOUSE_TESTBED") or CHECKOUT / ".testbed").absolute()


def run(
    argv: Sequence[str | Path],
    *,
    timeout: float = 60,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    input: str | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `argv` (no shell) and capture its text. Raises TestbedError with its last lines if it fails."""
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env=None if env is None else {**os.environ, **env},
            input=input,
            stdin=None if input is not None else subprocess.DEVNULL,
            cwd=cwd,
        )
    except FileNotFoundError:
        raise TestbedError(f"{words[0]} is not on this machine: python3 -m tests.testbed install") from None
    except subprocess.TimeoutExpired:
        raise TestbedError(f"{' '.join(words[:4])} … did not end within {timeout:.0f} s") from None
    if check and done.returncode != 0:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-25:])
        raise TestbedError(f"{' '.join(words[:6])} … ended with {done.returncode}:\n{last}")
    return done
