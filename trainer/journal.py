"""What a long generation keeps, so that it can go on: finished batches in a file, and how far it is."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from trainer.errors import InputError

PERIOD = 10.0  # s between lines of progress

Say = Callable[[str], None]
Asking = Sequence[tuple[list[int], int]]  # prompts, and how long an answer may be


def journal_path(data_dir: Path) -> Path:
    return data_dir.with_name(f".{data_dir.name}.answers")


def forget(data_dir: Path) -> None:
    """The data is complete: what was kept for going on is not needed any more."""
    journal_path(data_dir).unlink(missing_ok=True)


class Journal:
    """Finished batches, a JSON line each, in the order in which they are due; the first line is for what.

    Batches are read as they are due again, so it takes no memory. A line that broke off is cut away.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.number = 0  # of the batch that is due
        self.kept = 0
        self._file = open(path, "a+b")  # noqa: SIM115  (closed by __exit__)
        self._file.seek(0)
        end = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            if not end:
                self._check(line, settings)
            end += len(line)
            self.kept += 1
        if end:
            self.kept -= 1
            self._file.truncate(end)
        else:
            self._file.truncate(0)
            self._append(settings)
        self._file.seek(0)
        self._file.readline()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _check(self, line: bytes, settings: dict[str, Any]) -> None:
        try:
            before = json.loads(line)
            differing = [key for key in settings if before.get(key) != settings[key]]
        except (ValueError, AttributeError):
            differing = ["what it is"]
        if differing:
            raise InputError(
                f"--regenerate: {self.path} holds answers of a run with another {', '.join(differing)}; go "
                "on with the same settings, choose another --data-dir, or remove that file to begin anew"
            )

    def replay(self, batch: Asking) -> list[list[int]] | None:
        """The answers to a batch that an earlier run finished; None if it has to be written now."""
        if self.number >= self.kept:
            return None
        line = self._file.readline()
        self.number += 1
        try:
            value = json.loads(line)
            answers, asked = value["answers"], value["asked"]
        except (ValueError, KeyError, TypeError):
            asked, answers = None, []
        if asked != _fingerprint(batch) or len(answers) != len(batch):
            raise InputError(
                f"--regenerate: {self.path} is damaged in line {self.number + 1}, or the input was changed; "
                "remove it to begin anew"
            )
        return answers

    def append(self, batch: Asking, answers: Collection[list[int]]) -> None:
        self._append({"asked": _fingerprint(batch), "answers": list(answers)})
        self.number += 1
        self.kept += 1

    def _append(self, value: dict[str, Any]) -> None:
        self._file.seek(0, os.SEEK_END)
        self._file.write(json.dumps(value, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _fingerprint(batch: Asking) -> str:
    return hashlib.sha256(json.dumps(batch).encode()).hexdigest()[:16]


class Progress:
    """A line every few seconds: how far, how fast, how long still."""

    def __init__(self, total: int, say: Say) -> None:
        self.total = total
        self.conversations = 0.0  # of those at hand the part that is answered
        self.tokens = 0  # written by this run
        self._say = say
        self._began = self._said = time.monotonic()
        self._replayed: float | None = None  # conversations that were there before this run wrote any

    def tell(self, *, last: bool = False) -> None:
        now = time.monotonic()
        if self._replayed is None:
            self._replayed, self._began = self.conversations, now
        if now - self._said < PERIOD and not last:
            return
        self._said = now
        passed = max(now - self._began, 1e-9)
        done = self.conversations - self._replayed
        line = (
            f"regenerating: {self.conversations:,.0f} of {self.total:,} conversations · "
            f"{self.tokens / passed:,.0f} tok/s"
        )
        if done and not last:
            left = passed / done * (self.total - self.conversations)
            line += f" · {_duration(left)} left"
        self._say(line)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"
