"""A connection that is begun while the rest of us is still being imported.

To connect takes eight round trips, and what plans and shows takes half a second to import: side by side they
take the longer of the two. Imports little itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deploy import ssh
from deploy.errors import DeployError
from deploy.host import CONTAINER, LOCAL_NAMES


def begin(host: str | None, root: Path, accept_new_host_key: bool = False) -> None:
    """Begin to connect to `host` of the project in `root`, if it is another machine.

    Nothing is said here, whatever is wrong: `deploy.settings` has the sentences for settings, and the first
    use of the host those for the connection.
    """
    name = CONTAINER.sub("", (host or "localhost").strip())
    address = _address(name, root / "fabric.yaml")
    if address in LOCAL_NAMES or name in LOCAL_NAMES:
        return
    try:
        ssh.begin(name, address, accept_new_host_key=accept_new_host_key)
    except DeployError:
        return


def _address(name: str, path: Path) -> str:
    import yaml

    try:
        value: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return name
    for key in ("drafthouse", "hosts", name, "address"):
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else name
