"""Values that look like secrets, for texts that people show around: plans and differences.

Secrets have a place of their own (`secrets:`) and are in no file that we render. This is for those who put
one into `environment:`, a command line or an address all the same.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

MASK = "***"
OTHER = " (another value)"  # so that a change shows, though not what it is
# The end of a name tells: HF_TOKEN is one, token-budget is not.
_NAME = re.compile(
    r"(?:^|[_.-])(?:token|secrets?|password|passwd|passphrase|pwd|credentials?|apikey|auth|"
    r"(?:api|access|private|secret|signing|encryption|ssh|account|license|licence|wandb)[_-]?key)(?:[_-]?\d+)?$",
    re.IGNORECASE,
)
_ADDRESS = re.compile(r"(?<=://)(?P<user>[^/@\s:\"']*):(?P<value>[^/@\s\"']+)@")
# In the middle of a line: NAME=value, --name=value, --name value.
_INLINE = re.compile(
    r"""(?:--(?P<flag>[A-Za-z][\w-]*)(?:=|\s+)|(?<![\w.-])(?P<variable>[A-Za-z_]\w*)=)"""
    r"""(?P<value>(?:'[^']*'|"(?:[^"\\]|\\.)*"|[^\s"';])+)"""
)
# A line of its own: KEY: value in YAML and JSON, "--flag" in a list with its value on the next line.
_KEY = re.compile(r"""^\s*["']?(?P<name>[A-Za-z_][\w.-]*)["']?:\s+(?P<value>\S.*)$""")
_FLAG = re.compile(r"""^\s*(?:-\s+)?["']?--(?P<name>[A-Za-z][\w-]*)["']?,?\s*$""")


def secret_name(name: str) -> bool:
    """Whether a variable or a flag of this name holds what nobody else should read."""
    return _NAME.search(name) is not None and name != "secrets"  # (which, in run.yaml, lists names only)


def pairs(values: Mapping[str, str]) -> list[tuple[str, str]]:
    """Names and values, as they may be shown."""
    return [(name, MASK if secret_name(name) else text(str(value))) for name, value in values.items()]


def text(value: str) -> str:
    """`value` with its secrets masked."""
    return "\n".join(_masked(value.split("\n"), None))


def words(values: Sequence[str]) -> list[str]:
    """A command line, masked word by word: the value of a flag may be the word after it."""
    return _masked([text(value) for value in values], None)


def tree(value: Any) -> Any:
    """What JSON can hold, masked at every depth: for answers that scripts read, and keep in their logs."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, Mapping):
        return {
            key: MASK if secret_name(str(key)) and isinstance(inner, str) else tree(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        if value and all(isinstance(inner, str) for inner in value):
            return words(value)
        return [tree(inner) for inner in value]
    return value


def both(old: bytes | None, new: bytes | None) -> tuple[str | None, str | None]:
    """Two versions of a rendered file with their secrets masked; that one was changed still shows."""
    before, after = (
        None if data is None else data.decode("utf-8", "replace").split("\n") for data in (old, new)
    )
    known = None if before is None else {before[line][start:end] for line, start, end in _found(before)}
    return (
        None if before is None else "\n".join(_masked(before, None)),
        None if after is None else "\n".join(_masked(after, known)),
    )


def _masked(lines: list[str], known: Collection[str] | None) -> list[str]:
    """The lines, masked; a value that is not among the `known` ones is marked as another."""
    shown = list(lines)
    for line, start, end in sorted(_found(lines), reverse=True):
        other = OTHER if known is not None and lines[line][start:end] not in known else ""
        shown[line] = shown[line][:start] + MASK + other + shown[line][end:]
    return shown


def _found(lines: list[str]) -> set[tuple[int, int, int]]:
    """(line, start, end) of every value that looks like a secret."""
    found = set()
    expected = False
    for number, line in enumerate(lines):
        key, flag = _KEY.match(line), _FLAG.match(line)
        if expected and line.strip():
            found.add((number, len(line) - len(line.lstrip(" -")), len(line)))
        elif key and secret_name(key["name"]):
            found.add((number, *key.span("value")))
        else:
            for match in _INLINE.finditer(line):
                if secret_name(match["flag"] or match["variable"]):
                    found.add((number, *match.span("value")))
            found |= {(number, *match.span("value")) for match in _ADDRESS.finditer(line)}
        expected = bool(flag and secret_name(flag["name"]))
    return found
