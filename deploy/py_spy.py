"""py-spy for a host that has none: ours, if it can run there, put beside our scripts."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from deploy.host import Host, HostError
from deploy.sizes import size

NAME = "py-spy"
TIMEOUT = 20.0


def ours() -> Path | None:
    """The py-spy that came with our own installation; None without one."""
    beside = Path(sys.executable).with_name(NAME)
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which(NAME)
    return Path(found) if found else None


def bring(host: Host, state_root: str, report: Callable[[str], None]) -> str | None:
    """Put our py-spy on `host`, after saying so, and return its path there; None if it cannot run there.

    It is one program without needs but the C library. Its directory is named by its content, so that it is
    sent once, and `fab prune` removes it like any of our scripts.
    """
    mine = ours()
    here = os.uname()
    if mine is None:
        return None
    try:
        if host.run(["uname", "-sm"], timeout=TIMEOUT).text != f"{here.sysname} {here.machine}":
            return None
        data = mine.read_bytes()
        place = f"{state_root}/tools/{NAME}-{hashlib.sha256(data).hexdigest()[:12]}"
        path = f"{place}/{NAME}"
        if host.run(["test", "-x", path], timeout=TIMEOUT, check=False).code:
            report(f"{host.name} has no py-spy; ours ({size(len(data))}) is put into {place} there")
            host.write_tree(place, {NAME: data}, mode=0o755)
        # Another C library, a file system that runs no programs: then it is as if there were none.
        return path if host.run([path, "--version"], timeout=TIMEOUT, check=False).code == 0 else None
    except (HostError, OSError) as error:
        report(f"py-spy could not be put on {host.name}: {error}")
        return None
