"""What the SSH configuration says of hosts, and the configuration that our own connections use.

Which file is meant is in DRAFTHOUSE_SSH_CONFIG (as with `ssh -F`), else ~/.ssh/config and the system's.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.errors import USAGE, DeployError

VARIABLE = "DRAFTHOUSE_SSH_CONFIG"
DEFAULT = Path("~/.ssh/config")
_DEPTH = 16  # OpenSSH's own limit for Include


@dataclass(frozen=True)
class SshHosts:
    """The patterns of every `Host` line, with those of included files, in order."""

    blocks: tuple[tuple[str, ...], ...] = ()
    file: str | None = None  # as ssh is given it with -F; None: ssh's own

    @property
    def names(self) -> list[str]:
        """Names that are no patterns: what can be offered to someone who mistyped."""
        return sorted({word for block in self.blocks for word in block if not set(word) & set("*?!")})

    def knows(self, name: str) -> bool:
        """Whether some `Host` line means `name`. `Host *` gives defaults to everyone and so means nobody.

        A name is known too if ssh would go elsewhere for it or by another machine (Match, %h, ProxyJump):
        then it need not resolve here.
        """
        return any(_matches(block, name) for block in self.blocks) or _leads_elsewhere(name, self.file)


def _leads_elsewhere(name: str, file: str | None) -> bool:
    if not _SAFE.fullmatch(name) or name.startswith("-"):
        return False
    words = ["ssh", *(["-F", file] if file else []), "-G", "--", name]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return False
    said = dict(line.partition(" ")[::2] for line in done.stdout.lower().splitlines())
    by = [key for key in ("proxyjump", "proxycommand") if said.get(key, "none") != "none"]
    return done.returncode == 0 and (bool(by) or said.get("hostname", name.lower()) != name.lower())


def _matches(block: tuple[str, ...], name: str) -> bool:
    if any(fnmatch.fnmatchcase(name, word[1:]) for word in block if word.startswith("!")):
        return False
    return any(
        word.strip("*") and fnmatch.fnmatchcase(name, word) for word in block if not word.startswith("!")
    )


def read(path: Path | None = None) -> SshHosts:
    """Read the file and what it includes, as far as it can be read."""
    chosen = str(path) if path else os.environ.get(VARIABLE)
    path = Path(chosen or DEFAULT)
    blocks: list[tuple[str, ...]] = []
    _read(path.expanduser(), path.expanduser().parent, blocks, 0)
    return SshHosts(tuple(blocks), chosen)


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


# -- connecting --------------------------------------------------------------------------------------------

_ADDRESS = re.compile(
    r"(?:ssh://)?(?:(?P<user>[^@]+)@)?(?P<host>\[[^\]]+\]|[^:@]+|[^@]*:[^@]*:[^@]*)(?::(?P<port>\d+))?/?"
)
_SAFE = re.compile(r"[A-Za-z0-9_.%+\\@:\[\]/~-]+")


def target(address: str) -> list[str]:
    """ssh's words for an address: ``gpu-box``, ``root@10.0.0.7``, ``root@box:2222``, ``[fe80::1]:22``.

    Raises DeployError for one that no SSH host can have: it might end up in a shell (ProxyCommand's %h).
    """
    found = _ADDRESS.fullmatch(address)
    if not found or not _SAFE.fullmatch(address) or address.startswith("-") or found["host"].startswith("-"):
        raise DeployError(
            f"{address!r} is no address for ssh; write it like gpu-box, root@10.0.0.7 or root@gpu-box:2222",
            code=USAGE,
        )
    words = ["-p", found["port"]] if found["port"] else []
    words += ["-l", found["user"]] if found["user"] else []
    return [*words, "--", found["host"].strip("[]")]


def own(*, accept_new: bool, interactive: bool, environment: Mapping[str, str] = os.environ) -> str:
    """The text of the configuration for our connections: what we insist on, then the user's own.

    ssh takes the first value that it finds for each setting, and hands the file on to the ssh of a ProxyJump,
    so that jump hosts are checked, and given up on, in the same way.
    """
    chosen = environment.get(VARIABLE)
    # ~ is ssh's own word for the home of the user: not always HOME.
    included = [os.path.abspath(chosen)] if chosen else ["~/.ssh/config", "/etc/ssh/ssh_config"]
    lines = [
        f"BatchMode {'no' if interactive else 'yes'}",
        f"StrictHostKeyChecking {'accept-new' if accept_new else 'yes'}",
        *_INSISTED,
        *(f'Include "{path}"' for path in included),
    ]
    return "\n".join(lines) + "\n"


_INSISTED = (
    "ConnectTimeout 10",
    "ServerAliveInterval 5",  # with the next: a lost link shows within 20 s
    "ServerAliveCountMax 3",
    "ClearAllForwardings yes",  # a LocalForward of the user's is taken by the user's own session
    "ForwardX11 no",
    "PermitLocalCommand no",
    "RemoteCommand none",
    "RequestTTY no",
    "LogLevel ERROR",  # no banners
)
