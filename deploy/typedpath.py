"""Looking at a path that a person typed: what is wrong with it is a sentence, never a traceback.

Runs also on the host. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from deploy.errors import USAGE, DeployError

FILE, DIRECTORY, OTHER, NOTHING = "file", "directory", "other", ""


def expand(text: str) -> Path:
    """`~` and `~user` of this machine; one of a user that is not there stays as it was typed."""
    return Path(os.path.expanduser(text))


def look(path: Path, what: str) -> str:
    """FILE, DIRECTORY, OTHER or NOTHING. Raises DeployError, which begins with `what`, if we may not see it.

    Path.exists and its like raise for a directory above that is closed to us, or a name that is too long.
    """
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            with os.scandir(path):
                return DIRECTORY
        return FILE if stat.S_ISREG(mode) else OTHER
    except (FileNotFoundError, NotADirectoryError):
        return NOTHING
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DeployError(f"{what} cannot be looked at ({reason}); correct it", code=USAGE) from None
