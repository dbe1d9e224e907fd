"""Errors for people: one sentence that names the input, what is wrong with it, and what to do."""

from __future__ import annotations

from collections.abc import Iterable

USAGE = 2  # exit code for input that can be corrected without looking at any host


class DeployError(Exception):
    """Something that the person at the keyboard can put right.

    The message is one sentence (it may list several findings, one a line, when they belong together). The
    fabfile prints it to stderr without a traceback and exits with `code`.
    """

    def __init__(self, message: str, *, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class Changed(DeployError):
    """What a plan was made for does not hold any more, and nothing was done: a fresh plan may be."""


def nearest(word: str, known: Iterable[str]) -> str:
    """The known words closest to `word`, as the end of a sentence: ``"; did you mean demo?"`` or nothing."""
    import difflib  # only here: what runs on a host, too, hardly ever offers a word

    scores = {one: difflib.SequenceMatcher(None, word, one).ratio() for one in set(known)}
    best = max(scores.values(), default=0.0)
    close = sorted(
        (one for one in scores if scores[one] > 0.55 and scores[one] > best - 0.1),
        key=lambda one: (scores[one], one),
    )
    return f"; did you mean {either(reversed(close[-3:]))}?" if close else ""


def either(words: Iterable[str]) -> str:
    """``a``, ``a or b``, ``a, b or c``."""
    *head, last = list(words) or ["nothing"]
    return f"{', '.join(head)} or {last}" if head else last
