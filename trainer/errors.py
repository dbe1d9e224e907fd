"""Errors for people: one sentence that names the input, what is wrong with it, and what to do."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterable

NO_READER = 141  # exit code of a command whose output nobody reads any more, as a shell gives it
USAGE = 2  # exit code for input that can be corrected before anything has run


class InputError(Exception):
    """Something that the person who wrote the command, the file or the data can put right.

    The message is one sentence. `python -m trainer` prints it to stderr without a traceback and exits with
    `code`.
    """

    def __init__(self, message: str, *, code: int = USAGE) -> None:
        super().__init__(message)
        self.code = code


def counted(count: int, word: str, plural: str = "") -> str:
    """``1 thread``, ``2 threads``; `plural` where an s does not make it."""
    return f"{count:,} {word if count == 1 else plural or word + 's'}"


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word closest to `word`, as the end of a sentence: ``; did you mean 'x'?`` or nothing."""
    close = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def to_the_end(command: Callable[[], int]) -> int:
    """The exit code of `command`. One whose reader has left (``| head``) ends without a word."""
    try:
        code = command()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # what is still buffered goes there when Python ends
        return NO_READER
