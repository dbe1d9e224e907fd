"""Holds the deploy lock of a name for a client that is somewhere else.

Runs ON the host as a child of the connection: it holds the lock for as long as heartbeats come in on stdin,
and lets go at the end of stdin or after a silence, so that a lost client never leaves a lock behind. Standard
library only, Python >= 3.9.

    python3 <this, see deploy.onhost> LOCK-FILE WORDS-AS-JSON WAIT-SECONDS SILENCE-SECONDS

On stdout, one JSON object a line: {"waiting": words of the holder} at most once, then {"held": true}, or
{"busy": words of the holder}.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from typing import Any

from deploy import files

PATIENCE = 0.3  # seconds: a probe that looks at the lock holds it for a moment
PAUSE = 0.05


def main() -> None:
    path, words, patience, silence = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
    os.makedirs(os.path.dirname(path), exist_ok=True)
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    began = time.monotonic()
    told = False
    while not files.take(lock):
        waited = time.monotonic() - began
        if waited > max(patience, PATIENCE):
            say({"busy": files.words(lock)})
            sys.exit(75)  # "try again", in the words of sysexits.h
        if patience > 0 and waited > PATIENCE and not told:
            say({"waiting": files.words(lock)})
            told = True
        if heard(PAUSE) is False:
            sys.exit(0)
    files.say(lock, json.loads(words))
    say({"held": True})
    while heard(silence):
        pass
    with contextlib.suppress(OSError):
        os.ftruncate(lock, 0)


def say(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def heard(seconds: float) -> bool | None:
    """True if the client gave a sign of life, False at the end of stdin, None after `seconds` of silence."""
    ready, _, _ = select.select([0], [], [], seconds)
    return bool(os.read(0, 4096)) if ready else None


if __name__ == "__main__":
    main()
