"""One command for a host, as bytes for the stdin of a constant remote command line.

sshd gives what it is told to run to the login shell, which may be fish or csh. So what it is told is always
the same, in words that mean the same in each of them: start `sh`, and let it read what is to be done from
stdin. Arguments and variables come that way too: no shell of the login sees them, no limit of a command line
holds for all of them together, and they are not to be seen in the process list of the connection.

What the login prints before (an `echo` in ~/.bashrc) ends at a line that nobody could have guessed.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# No single quote, backslash, newline or exclamation mark inside: csh and fish read those in their own way.
COMMAND = (
    "exec sh -c 'IFS= read -r drafthouse_n"
    ' && drafthouse_s=$(head -c "$drafthouse_n") && eval "$drafthouse_s"\''
)

MARK = re.compile(r"drafthouse-[0-9a-f]{24}\b")  # of a line that is ours, between those of a command

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Variables that some shell keeps for itself, so that it would refuse or lose an assignment.
_OF_THE_SHELL = re.compile(
    "BASH.*|SHELLOPTS|E?UID|PPID|GROUPS|DIRSTACK|FUNCNAME|PIPESTATUS|LINENO|RANDOM|SECONDS|OPT.*|PS4|SHLVL|_"
    "|(OLD)?PWD|IFS|ENV|LC_.*|LANG|drafthouse_.*"
)

_SCRIPT = """\
{exports}
IFS= read -r drafthouse_p 2>/dev/null </proc/$$/stat
printf '\\n%s\\n' {token} >&2
drafthouse_w=begun
case {program} in
*/*) if [ ! -e {program} ]; then drafthouse_w=missing
elif [ -d {program} ] || [ ! -x {program} ]; then drafthouse_w=denied; fi ;;
*) command -v {program} >/dev/null 2>&1 || drafthouse_w=missing ;;
esac
printf '\\n%s %s %s\\n' {token} "$drafthouse_w" "$drafthouse_p"
[ "$drafthouse_w" = begun ] || exit 127
exec 3>&2 2>/dev/null
(exec 2>&3 3>&-; exec {argv})
drafthouse_c=$?
[ "$drafthouse_c" != 255 ] || printf '\\n%s 255\\n' {token} >&3
exit "$drafthouse_c"
"""


@dataclass(frozen=True)
class Process:
    """The remote shell of one command: the leader of the group that the command runs in."""

    pid: int
    group: int
    started: int  # field 22 of /proc/PID/stat: with the pid, one process only


@dataclass
class Request:
    """One command: what is sent, and what its answer looks like."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    token: str = field(default_factory=lambda: f"drafthouse-{secrets.token_hex(12)}")

    def encode(self) -> bytes:
        """The bytes for stdin; what the command itself reads follows them. Raises ValueError for a NUL."""
        plain: dict[str, str] = {}
        odd: dict[str, str] = {}
        for name, value in self.env.items():
            if not name or "=" in name:
                raise ValueError(f"illegal environment variable name {name!r}")
            simple = _NAME.fullmatch(name) and not _OF_THE_SHELL.fullmatch(name)
            (plain if simple else odd)[name] = value
        argv = list(self.argv)
        if odd:  # not by the shell, then by a program
            argv = ["env", *(f"{name}={value}" for name, value in odd.items()), *argv]
        script = _SCRIPT.format(
            token=self.token,
            program=quote(self.argv[0]),
            exports="\n".join(f"export {name}={quote(value)}" for name, value in plain.items()),
            argv=" ".join(map(quote, argv)),
        )
        data = script.encode("utf-8", "surrogateescape")
        if b"\0" in data:
            raise ValueError("embedded null byte")
        return b"%d\n%s" % (len(data), data)

    def begin(self, out: bytes) -> tuple[str, Process | None, int] | None:
        """What the line at which the command's own output begins says, and where that output begins.

        ``begun``, ``missing`` or ``denied``; None while the line has not come.
        """
        mark = b"\n" + self.token.encode() + b" "
        at = out.find(mark)
        end = out.find(b"\n", at + 1)
        if at < 0 or end < 0:
            return None
        word, _, stat = out[at + len(mark) : end].decode(errors="replace").partition(" ")
        return word, _process(stat), end + 1

    def errors(self, err: bytes) -> tuple[bytes, bool]:
        """The command's own errors, without the login's; and whether it ended with 255 by itself."""
        mark = b"\n" + self.token.encode()
        head, found, own = err.partition(mark + b"\n")
        own = own if found else head
        said = own.endswith(mark + b" 255\n")
        return (own[: -len(mark + b" 255\n")] if said else own), said


def _process(stat: str) -> Process | None:
    """A line of /proc/PID/stat. None without one (a host that is no Linux)."""
    head, _, rest = stat.rpartition(")")
    words = rest.split()
    try:
        return Process(int(head.partition(" ")[0]), int(words[2]), int(words[19]))
    except (IndexError, ValueError):
        return None


def quote(word: str) -> str:
    """A word for sh, whatever is in it."""
    return "'" + word.replace("'", "'\"'\"'") + "'"


def killing(process: Process) -> list[str]:
    """The argv that kills a command with its whole group, unless its pid means another process by now.

    Says ``killed`` when nothing of it is left, ``gone`` when there was nothing.
    """
    return ["sh", "-c", _KILL, "sh", str(process.pid), str(process.group), str(process.started)]


_KILL = """\
if IFS= read -r line 2>/dev/null <"/proc/$1/stat"; then
  set -f
  set -- "$1" "$2" "$3" ${line##*) }
  [ "${23}" = "$3" ] || { echo gone; exit 0; }
fi
if kill -s KILL -- "-$2" 2>/dev/null; then echo killed; else echo gone; fi
"""
