"""A command that is written as a text: its words, where no shell is needed to tell them. Pure.

Nothing here, or on the host, gives the text to a shell. So what only a shell understands is found and named
before it becomes an argument of some program in silence.
"""

from __future__ import annotations

import json
import re
import shlex

ANYWHERE = "|&;<>()*?"  # mean something to a shell unless they are quoted
EXPANDS = "$`"  # ... also in double quotes
AT_THE_START = "#~"  # ... as the first sign of a word
BUILT_IN = frozenset((
    ".", "[[", "!", "{", "alias", "bg", "break", "builtin", "case", "cd", "continue", "declare", "do",
    "elif", "else", "eval", "exec", "exit", "export", "fg", "fi", "for", "function", "if", "jobs", "local",
    "read", "readonly", "return", "select", "set", "shift", "shopt", "source", "then", "trap", "typeset",
    "ulimit", "umask", "unalias", "unset", "until", "wait", "while",
))  # fmt: skip
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")


def split(text: str) -> list[str]:
    """The words of `text`. Raises ValueError, with the end of a sentence, for what takes a shell."""
    text = text.strip()
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"its quotes do not match ({str(error).lower()}); write it as a list") from None
    sign = needs_shell(text, words)
    if sign is not None:
        whole = json.dumps(text, ensure_ascii=False) if len(text) <= 200 else '"…"'
        raise ValueError(
            f"no shell reads it, so {sign} would not mean what it means there; write [sh, -c, {whole}], or "
            "quote it if it is meant as it stands"
        )
    return words


def needs_shell(text: str, words: list[str]) -> str | None:
    """The first thing in `text` that only a shell understands; None if there is none."""
    if words and words[0] in BUILT_IN and text.startswith(words[0]):
        return words[0]
    if _ASSIGNMENT.match(text):
        return text.split()[0]
    quote, previous, escaped = "", " ", False
    for sign in text:
        if sign == "\n" and quote != "'" and (escaped or not quote):
            return "a line break"
        if quote == '"' and sign in EXPANDS:  # also escaped: shlex would keep the backslash
            return sign
        if escaped:
            escaped = False
        elif quote == "'":
            quote = "" if sign == "'" else quote
        elif sign == "\\":
            escaped = True
        elif sign in EXPANDS:
            return sign
        elif quote:
            quote = "" if sign == '"' else quote
        elif sign in "'\"":
            quote = sign
        elif sign in ANYWHERE or (sign in AT_THE_START and previous.isspace()):
            return sign
        previous = sign
    return None
