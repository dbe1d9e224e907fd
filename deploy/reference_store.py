"""The reference of a name: the run that its speed is compared with, in ``names/<name>/reference.json``.

Runs ON the host, asked by `fab reference`. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from deploy.errors import USAGE, DeployError, nearest
from deploy.room import state_root
from trainer import status


def write(state: str | None, name: str, value: dict[str, Any] | None, host: str) -> str:
    """Write `value` whole, or remove what is there; the path.

    Raises DeployError, which names `host`, for a name that nothing was ever deployed under.
    """
    names = Path(state or state_root()) / "names"
    if not (names / name).is_dir():
        known = [entry for entry in (os.listdir(names) if names.is_dir() else []) if status.valid_name(entry)]
        offered = nearest(name, known) or "; fab status shows what there is"
        raise DeployError(f"there is no {name} on {host}{offered}", code=USAGE)
    path = names / name / "reference.json"
    if value is None:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    else:
        status.write_json(path, value, durable=True)
    return str(path)
