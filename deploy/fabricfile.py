"""fabric.yaml as Fabric will read it: checked first, since Fabric answers a mistake in it with a traceback.

Light on purpose: every `fab` begins with it. What is below `drafthouse:` is checked by `deploy.settings`.
"""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path
from typing import Any

from deploy import yamlfile
from deploy.errors import USAGE, DeployError, nearest
from deploy.yamlfile import YamlFile

SECTION = "drafthouse"
OURS = ("hosts", "defaults")
# Keys of Fabric and Invoke whose misspelling would be passed over in silence as well.
FABRIC = (
    *("tasks", "run", "runners", "sudo", "timeouts", "connect_kwargs", "connect_timeout", "forward_agent"),
    *("gateway", "inline_ssh_env", "load_ssh_configs", "port", "ssh_config_path", "user", "authentication"),
)
HOLD_KEYS = ("tasks", "run", "runners", "sudo", "timeouts", "connect_kwargs")
NEAR = 0.75  # how like one of these a key must be to count as its misspelling


def check(path: Path) -> YamlFile | None:
    """Raise DeployError, with file, line and remedy, if `fab` could not work with `path`."""
    if not path.exists():
        return None
    file = yamlfile.read(path, path.name)
    if file.value is None:
        return file
    if not isinstance(file.value, dict):
        kind = "a list" if isinstance(file.value, list) else "a single value"
        raise DeployError(
            f"{file.name} holds {kind}, but must hold keys; begin it with {SECTION}: and hosts: below that",
            code=USAGE,
        )
    for key in file.value:
        _key(file, str(key))
    for section in HOLD_KEYS:
        if not isinstance(file.value.get(section, {}), dict):
            raise DeployError(
                f"{file.at((section,))}: {section} holds no keys, but must; remove it, or read Fabric's docs",
                code=USAGE,
            )
    executor = file.value.get("tasks", {}).get("executor_class")
    if executor is not None:
        _executor(file, executor)
    return file


def _key(file: YamlFile, key: str) -> None:
    if key == SECTION or key in FABRIC:
        return
    if key in OURS:
        raise DeployError(
            f"{file.at((key,))}: {key} stands at the top, but belongs below {SECTION}:; indent it there",
            code=USAGE,
        )
    meant = difflib.get_close_matches(key, [SECTION, *FABRIC, *OURS], 1, NEAR)
    if meant:
        raise DeployError(f"{file.at((key,))}: unknown key {key!r}; did you mean {meant[0]}?", code=USAGE)


def _executor(file: YamlFile, value: Any) -> None:
    """`tasks: executor_class:` names a class that can be imported."""
    where = file.at(("tasks", "executor_class"))
    module, dot, name = str(value).rpartition(".")
    remedy = "write executor_class: deploy.executor.Parallel, or remove it"
    if not isinstance(value, str) or not dot or not module:
        raise DeployError(
            f"{where}: tasks.executor_class is {value!r}, which names no class; {remedy}", code=USAGE
        )
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise DeployError(
            f"{where}: tasks.executor_class is {value}, but {error}; {remedy}", code=USAGE
        ) from None
    if not isinstance(getattr(found, name, None), type):
        offered = nearest(name, [word for word in vars(found) if isinstance(vars(found)[word], type)])
        raise DeployError(
            f"{where}: tasks.executor_class is {value}, but {module} has no class {name}"
            f"{offered or f'; {remedy}'}",
            code=USAGE,
        )
