"""What the evaluation of a script asks of the host that the script is for.

Runs ON the host, asked by `deploy.adopt`. It only reads. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import os
import re
import stat
from typing import Any

from deploy import mask

_SECRET = re.compile(
    r"(TOKEN|KEY|PASSWORD|PASSWD|SECRET|CREDENTIALS?)(_?\d+)?$|(^|_)(PASSWORD|PASSWD|SECRETS?|CREDENTIALS?)_",
    re.IGNORECASE,
)

# Of a login these say where and how somebody sits, and nothing of what a program needs.
LOGIN_ONLY = ("_", "PWD", "OLDPWD", "SHLVL", "TERM", "PS1", "PS2", "LS_COLORS", "COLORTERM", "TMUX",
              "TMUX_PANE", "STY", "WINDOW", "DISPLAY", "MAIL", "LINES", "COLUMNS", "HISTFILE", "EDITOR",
              "PAGER", "LESSOPEN", "LESSCLOSE", "LESS", "WINDOWID", "NOTIFY_SOCKET", "JOURNAL_STREAM",
              "INVOCATION_ID", "SYSTEMD_EXEC_PID", "MANAGERPID", "VIRTUAL_ENV_PROMPT",
              "CONDA_PROMPT_MODIFIER", "CONDA_SHLVL", "SUDO_USER", "SUDO_UID", "SUDO_GID",
              "SUDO_COMMAND")  # fmt: skip
LOGIN_PREFIXES = ("SSH_", "XDG_", "DBUS_", "BASH_FUNC_", "LC_", "_CE_", "DRAFTHOUSE_")


def login() -> dict[str, Any]:
    """``{"home", "environment"}`` of a login here."""
    home = os.path.expanduser("~")
    found = {key: text for key, text in os.environ.items() if not of_a_terminal(key)}
    return {"home": home, "environment": {"HOME": home, **found}}


def of_a_terminal(name: str) -> bool:
    """Whether a variable belongs to whoever sits there, and to no program that is started."""
    return name in LOGIN_ONLY or name.startswith(LOGIN_PREFIXES)


def secret(name: str, value: str) -> bool:
    """Whether a variable is kept out of files and answers: rather one too many."""
    return bool(_SECRET.search(name)) or mask.secret_name(name) or mask.text(value) != value


def test(operator: str, path: str) -> bool:
    """What ``[ -f path ]`` and its like say here."""
    if operator in ("-L", "-h"):
        return os.path.islink(path)
    try:
        info = os.stat(path)
    except (OSError, ValueError):
        return False
    answers = {
        "-e": True,
        "-f": stat.S_ISREG(info.st_mode),
        "-d": stat.S_ISDIR(info.st_mode),
        "-s": info.st_size > 0,
        "-r": os.access(path, os.R_OK),
        "-w": os.access(path, os.W_OK),
        "-x": os.access(path, os.X_OK),
    }
    return answers[operator]


def which(program: str, path: str, directory: str) -> str | None:
    """Where `program` is found on the search path `path`, seen from `directory`; None if it is not."""
    if "/" in program:
        places = [os.path.join(directory, program)]
    else:
        places = [os.path.join(directory, place or ".", program) for place in path.split(":")]
    for place in places:
        if os.path.isfile(place) and os.access(place, os.X_OK):
            return os.path.normpath(place)
    return None


def real(path: str) -> str:
    """A path without links."""
    return os.path.realpath(path)
