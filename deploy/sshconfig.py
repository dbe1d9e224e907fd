"""Which hosts the SSH configuration knows. Connecting is Fabric's; here only the names are looked up."""

from __future__ import annotations

import fnmatch
import glob
import shlex
from dataclasses import dataclass
from pathlib import Path

DEFAULT = Path("~/.ssh/config")
_DEPTH = 16  # OpenSSH's own limit for Include


@dataclass(frozen=True)
class SshHosts:
    """The patterns of every `Host` line, with those of included files, in order."""

    blocks: tuple[tuple[str, ...], ...] = ()

    @property
    def names(self) -> list[str]:
        """Names that are no patterns: what can be offered to someone who mistyped."""
        return sorted({word for block in self.blocks for word in block if not set(word) & set("*?!")})

    def knows(self, name: str) -> bool:
        """Whether some `Host` line means `name`. `Host *` gives defaults to everyone and so means nobody."""
        return any(_matches(block, name) for block in self.blocks)


def _matches(block: tuple[str, ...], name: str) -> bool:
    if any(fnmatch.fnmatchcase(name, word[1:]) for word in block if word.startswith("!")):
        return False
    return any(
        word.strip("*") and fnmatch.fnmatchcase(name, word) for word in block if not word.startswith("!")
    )


def read(path: Path = DEFAULT) -> SshHosts:
    """Read the file and what it includes (paramiko does not follow `Include`), as far as it can be read."""
    blocks: list[tuple[str, ...]] = []
    _read(path.expanduser(), path.expanduser().parent, blocks, 0)
    return SshHosts(tuple(blocks))


def _read(path: Path, base: Path, blocks: list[tuple[str, ...]], depth: int) -> None:
    if depth > _DEPTH:
        return
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        keyword, rest = ([*line.replace("=", " ", 1).split(None, 1), "", ""])[:2]
        if keyword.lower() not in ("host", "include"):
            continue
        try:
            words = shlex.split(rest, comments=True)
        except ValueError:  # an open quote: OpenSSH refuses the file when it connects
            continue
        if keyword.lower() == "host":
            blocks.append(tuple(words))
            continue
        for word in words:
            for found in sorted(glob.glob(str(base / Path(word).expanduser()))):
                _read(Path(found), base, blocks, depth + 1)
