"""Our end of `deploy.receiver.control`, which holds the lock on a host while a directory is sent."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from deploy import manifest, onhost
from deploy.errors import DeployError
from deploy.host import Host, HostError

HERE = 5.0  # seconds between two words that we are there
SILENCE = 180.0  # seconds without a word of the host, which says something every 10 s while it works


class Lost(HostError):
    """A connection broke off; another try goes on where it stopped."""


class Control:
    """The process that holds the lock there, and what it says."""

    def __init__(self, host: Host, process: subprocess.Popen[bytes]) -> None:
        self.host, self.process = host, process
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._over = threading.Event()
        for work in (self._hear, self._live):
            threading.Thread(target=work, daemon=True).start()

    def _hear(self) -> None:
        assert self.process.stdout
        with contextlib.suppress(OSError, ValueError):
            for line in self.process.stdout:
                self._lines.put(line)
        self._lines.put(None)

    def _live(self) -> None:
        """Tell that we are there: it gives the lock up if it does not hear of us."""
        while not self._over.wait(HERE):
            self.say("here")

    def say(self, word: str) -> None:
        onhost.feed(self.process, [word.encode() + b"\n"], end=False)

    def answer(self, progress: Callable[[str], None], *keys: str) -> dict[str, Any]:
        """The next answer with one of `keys`; what it tells before is progress. Raises Lost, DeployError."""
        for said in self._said():
            if "told" in said:
                progress(said["told"])
            elif any(key in said for key in keys):
                return said
        words = onhost.last_words(self.process)
        code = self.process.wait()
        if code == 1:  # a sentence of its own
            raise DeployError(f"{self.host.name}: {words}")
        raise Lost(f"{self.host.name}: the connection was lost ({words})")

    def _said(self) -> Iterator[dict[str, Any]]:
        while True:
            try:
                line = self._lines.get(timeout=SILENCE)
            except queue.Empty:
                raise Lost(f"{self.host.name}: no sign of life for {SILENCE:g} s") from None
            if line is None:
                return
            with contextlib.suppress(ValueError):
                yield json.loads(line)

    def round_trip(self) -> float:
        """Seconds for a word there and back."""
        began = time.monotonic()
        self.say("ping")
        self.answer(manifest.silent, "pong")
        return time.monotonic() - began

    def close(self) -> None:
        self._over.set()
        onhost.close(self.process)
