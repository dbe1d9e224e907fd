"""Drift: what a run in progress really runs, against what was deployed. Pure.

Three things can come apart: the process (its argv, environment and image, as /proc and the engine show them),
the release (files on the host), and what the files here would give now. A corrected file does nothing for a
process that is already running, and that is what this says. The third comparison is `release.differences`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deploy import mask

# What a program is likely to read at its start, and unlikely to write while it runs.
_READ_AT_START = (".py", ".sh", ".bash", ".yaml", ".yml", ".toml")
_SLACK = 1.0  # seconds: a process's start is known to a clock tick, a file's time of change to its own clock


def of_process(run: Mapping[str, Any], images: Iterable[Mapping[str, Any]] = ()) -> list[str]:
    """How the trainer's process differs from what run.json says was started, a line for each difference.

    `run` is one of the probe's runs. Its "running" holds argv, environment (only variables that run.json
    names), image_id, files [{path, modified}] and started; each may be missing, and is then not compared.
    """
    running = run.get("running")
    written = run.get("run") or {}
    container = _container(run.get("container") or {})
    if not isinstance(running, Mapping):
        return container
    return [
        *_words(written.get("command") or [], running.get("argv") or []),
        *_variables(written.get("environment") or {}, running.get("environment")),
        *_image(written.get("image"), running.get("image_id"), images),
        *container,
        *_files(running.get("files") or [], running.get("argv") or [], running.get("started")),
    ]


def _words(deployed: Sequence[str], running: Sequence[str]) -> list[str]:
    """Words of the command line. Only where both start the same program: a wrapper may `exec` another one."""
    if not deployed or not running or list(deployed) == list(running):
        return []
    if len(running) > len(deployed) and list(running[-len(deployed) :])[1:] == list(deployed[1:]):
        return []  # a script with a #! line: the kernel put its interpreter in front
    if os.path.basename(deployed[0]) != os.path.basename(running[0]) or len(running) == 1 < len(deployed):
        return []  # another program, or one that wrote itself a title
    found = []
    before, now = _flags(deployed[1:]), _flags(running[1:])
    for key in [*before, *(key for key in now if key not in before)]:
        hidden = mask.MASK in (before.get(key) or "")  # of a process that was adopted
        if before.get(key) != now.get(key) and not hidden:
            found.append(_differs(key, now.get(key), before.get(key)))
    return found


def _flags(words: Sequence[str]) -> dict[str, str]:
    """A command line as names and values: flags by their name, other words by their place."""
    found: dict[str, str] = {}
    key, place = None, 0
    for word in words:
        if word.startswith("--"):
            key, _, value = word.partition("=")
            found[key] = f"{found.get(key, '')} {value}".strip()  # a flag may be given several times
            if value:
                key = None
        elif key is not None:
            found[key] = f"{found[key]} {word}".strip()
        else:
            place += 1
            found[f"word {place}"] = word
    return found


def _variables(deployed: Mapping[str, str], running: Any) -> list[str]:
    if not isinstance(running, Mapping):
        return []
    return [
        _differs(key, running.get(key), value)
        for key, value in sorted(deployed.items())
        if running.get(key) != value
    ]


def _image(deployed: str | None, running: str | None, images: Iterable[Mapping[str, Any]]) -> list[str]:
    if not deployed or not running or deployed == running:
        return []
    known = {image.get("id") for image in images if deployed in (image.get("tags") or ())}
    # Of an image that is not ours the host's probe does not list the tags: its id says nothing about it then.
    if running in known or not (known or deployed.startswith("drafthouse:")):
        return []
    return [f"process: image {running[:19]} runs, but {deployed[:64]} was deployed"]


def _container(container: Mapping[str, Any]) -> list[str]:
    """Entries of a Proxmox container's configuration that are not what its release says for this run."""
    return [
        f"container {container.get('vmid')}: {_word(key)} is {_masked(key, there)}, but "
        f"{_masked(key, deployed)} was deployed"
        for key, there, deployed in container.get("differs") or ()
    ]


def _word(key: str) -> str:
    return key if key.isprintable() else repr(key)


def _masked(key: str, value: str | None) -> str:
    hidden = value is not None and mask.secret_name(key)
    return _say(mask.MASK if hidden else value and mask.text(value))


def _files(files: Iterable[Mapping[str, Any]], argv: Sequence[str], started: float | None) -> list[str]:
    """Files named on the command line that were changed after the process had read them."""
    if started is None:
        return []
    script = next((word for word in argv[1:] if not word.startswith("-")), None)
    found = []
    for file in files:
        path, modified = str(file.get("path")), file.get("modified")
        reads = path.endswith(_READ_AT_START) or (
            script is not None and os.path.basename(script) == os.path.basename(path)
        )
        if reads and isinstance(modified, int | float) and modified > started + _SLACK:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(modified))
            found.append(f"{path}: changed at {when}, after the process had started")
    return found


def _differs(key: str, running: str | None, deployed: str | None) -> str:
    """The line for one difference; of what looks like a secret it only says that there is one."""
    name = key.lstrip("-")
    now, before = (
        value if value is None else mask.MASK if mask.secret_name(name) else mask.text(value)
        for value in (running, deployed)
    )
    other = mask.OTHER if now == before else ""
    return f"process: {key} is {_say(now)}{other}, but {_say(before)} was deployed"


def _say(value: str | None) -> str:
    if value is None:
        return "not set"
    text = repr(value) if not value or not value.isprintable() or " " in value else value
    return text if len(text) <= 80 else text[:77] + "…"
