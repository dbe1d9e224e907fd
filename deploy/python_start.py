"""How a Python was started, as far as it decides when it writes: its switches, and PYTHONUNBUFFERED. Pure.

As CPython has it (`_PyOS_GetOpt`, `_Py_get_env_flag`). The trainer's package has its own, for the banner.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

VARIABLE = "PYTHONUNBUFFERED"
ENDS = "cm"  # the switches after which all words are the program's
TAKES_A_WORD = "WX"  # those that are followed by a word, or by the rest of their own
_OFF = re.compile(r"\s*[+-]?0+|", re.ASCII)  # all other text is on, a negative number and "0 " included


def is_off(value: str) -> bool:
    """Whether Python takes a variable of this value for not set: an empty text, or a number that is 0."""
    return _OFF.fullmatch(value) is not None


def at_once(argv: Sequence[str], variable: str | None) -> str:
    """What makes the Python started by `argv` write at once: ``-u``, ``PYTHONUNBUFFERED=1``; empty: nothing.

    `variable` is the value of PYTHONUNBUFFERED in its environment, None without one.
    """
    if "u" in switches(argv):
        return "-u"
    on = variable is not None and not is_off(variable)
    return f"{VARIABLE}={variable}" if on and not ignores_variables(argv) else ""


def ignores_variables(argv: Sequence[str]) -> str:
    """The switch that makes it ignore PYTHONUNBUFFERED, ``-I`` or ``-E``; empty if there is none."""
    found = set(switches(argv))
    return next((f"-{letter}" for letter in "IE" if letter in found), "")


def switches(argv: Sequence[str]) -> Iterator[str]:
    """The letters of the switches between the interpreter and the program, ``u I`` of ``python -uI x.py -v``.

    Those that end them, and those that are followed by a word, are left out.
    """
    words = iter(argv[1:])
    for word in words:
        if not word.startswith("-") or word in ("-", "--"):
            return
        if word.startswith("--"):
            if word == "--check-hash-based-pycs":
                next(words, None)
            continue
        for place, letter in enumerate(word[1:], 2):
            if letter in ENDS:
                return
            if letter in TAKES_A_WORD:
                if place == len(word):
                    next(words, None)
                break
            yield letter
