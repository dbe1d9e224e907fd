"""Values that look like secrets, for texts that people show around: plans and differences.

Secrets have a place of their own (`secrets:`) and are in no file that we render. This is for those who put
one into `environment:` or into an address all the same.
"""

from __future__ import annotations

import re

MASK = "***"
_NAME = re.compile(
    r"(?:^|[_.-])(?:token|secret|secrets|password|passwd|passphrase|pwd|credential|credentials|apikey|"
    r"auth|(?:api|access|private|secret|signing|encryption|ssh|account|license|wandb|key)[_-]?key)(?:$|[_.-])",
    re.IGNORECASE,
)
_ADDRESS = re.compile(r"(?<=://)([^/@\s:\"']*):([^/@\s\"']+)@")


def secret_name(name: str) -> bool:
    """Whether a variable or a flag of this name holds what nobody else should read."""
    return _NAME.search(name) is not None


def text(value: str) -> str:
    """`value` without the passwords of the addresses in it."""
    return _ADDRESS.sub(rf"\1:{MASK}@", value)


def both(old: bytes | None, new: bytes | None) -> tuple[str | None, str | None]:
    """Two versions of a rendered file with what looks like a secret masked; that it changed still shows."""
    texts = [None if data is None else data.decode("utf-8", "replace") for data in (old, new)]
    found = [{} if text is None else _values(text) for text in texts]
    shown: list[str | None] = []
    for version, whole in enumerate(texts):
        if whole is None:
            shown.append(None)
            continue
        lines = []
        for number, line in enumerate(whole.splitlines()):
            if number in found[version]:
                name, value, start = found[version][number]
                other = [v for n, v, _ in found[0].values() if n == name]
                changed = version == 1 and old is not None and value not in other
                line = f"{line[:start]}{MASK}{' (another value)' if changed else ''}"
            lines.append(text(line))
        shown.append("\n".join(lines) + "\n")
    return shown[0], shown[1]


# One variable, key or word of a list a line, as all files that we render have them.
_LINE = re.compile(
    r"""^\s*(?:-\s+)?["']?(?:--)?(?P<name>[A-Za-z_][A-Za-z0-9_.-]*)["']?\s*(?:=|:\s)\s*(?P<value>\S.*)$"""
)
_WORD = re.compile(r"""^\s*(?:-\s+)?["']?--(?P<name>[A-Za-z][A-Za-z0-9_-]*)["']?,?\s*$""")


def _values(whole: str) -> dict[int, tuple[str, str, int]]:
    """Line number -> (name, value, where the value begins), for the lines that hold a secret."""
    found = {}
    flag = ""
    for number, line in enumerate(whole.splitlines()):
        if flag and line.strip():
            found[number] = (flag, line.strip(), len(line) - len(line.lstrip()))
        word, match = _WORD.match(line), _LINE.match(line)
        flag = word["name"] if word and secret_name(word["name"]) else ""
        if match and secret_name(match["name"]):
            found[number] = (match["name"], match["value"], match.start("value"))
    return found
