"""Secrets: read on this machine, kept on the host in one file a run that nobody but its owner reads.

They never reach an argument, a release, run.json, a plan or a log: what these hold are names. The file lies
outside the releases, `names/<name>/secrets-<run-id>`, mode 0400, and launch hands its lines to the trainer
alone, at every attempt. So it is never written to again, and it goes with the first deploy after its run.
Whether a value has changed since is decided on the host, which answers with names (`deploy.lookup:secrets`).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deploy import shellwords, typedpath
from deploy.errors import USAGE, DeployError
from deploy.settings import RunSettings, SecretSource
from deploy.yamlfile import is_text

TELLING = 8  # characters from which on a value is looked for in settings
COMMAND_TIMEOUT = 60.0  # seconds; a password manager may have to ask


def describe(source: SecretSource) -> str:
    """``from the environment``, without the value and without the command's arguments."""
    if source.env:
        return f"from {source.env} of this machine's environment"
    return f"from the file {source.file}" if source.file else "from a command"


def problems(
    sources: Mapping[str, SecretSource], root: Path, environment: Mapping[str, str] = os.environ
) -> list[str]:
    """What can be seen to be missing without running any command, a sentence each."""
    found = []
    for name, source in sorted(sources.items()):
        if source.env and source.env not in environment:
            found.append(
                f"secret {name} needs the environment variable {source.env}; set it and deploy again"
            )
        elif source.env and not is_text(environment[source.env]):
            found.append(f"secret {name} is no UTF-8 text")
        if source.file:
            path = _file(root, source.file)
            try:
                there = typedpath.look(path, f"secret {name}: the file {path}")
            except DeployError as error:
                found.append(str(error))
                continue
            if there != typedpath.FILE:
                found.append(f"secret {name} needs the file {path}; write it and deploy again")
    return found


def read(
    sources: Mapping[str, SecretSource], root: Path, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The values. Raises DeployError naming the secret, never what was read."""
    return {name: _read(name, source, root, environment) for name, source in sorted(sources.items())}


def look(
    sources: Mapping[str, SecretSource], root: Path, environment: Mapping[str, str] = os.environ
) -> tuple[dict[str, str], list[str]]:
    """(the values that can be read, why the others cannot, a sentence each)."""
    values, wrong = {}, []
    for name, source in sorted(sources.items()):
        missing = problems({name: source}, root, environment)
        try:
            if not missing:
                values[name] = _read(name, source, root, environment)
        except DeployError as error:
            missing = [str(error)]
        wrong += missing
    return values, wrong


def refuse_shown(settings: RunSettings, values: Mapping[str, str]) -> None:
    """Raise DeployError for a setting that has a secret's value in it: settings are rendered for all to read.

    A short value says nothing: it may be a part of anything.
    """
    for way, text in _texts(settings.model_dump(exclude={"secrets", "description"})):
        for name, value in sorted(values.items()):
            if len(value) >= TELLING and value in text:
                raise DeployError(
                    f"{way} has the value of the secret {name} in it, which plans and files of the release "
                    f"would show to all; let the program put it together from {name}",
                    code=USAGE,
                )


def _texts(value: Any, way: str = "") -> Iterator[tuple[str, str]]:
    """Every text in nested settings, with the way to it: ``environment.API``, ``word 3 of command``."""
    if isinstance(value, str):
        yield way, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(inner, f"{way}.{key}" if way else str(key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value, 1):
            yield from _texts(inner, f"word {number} of {way}")


def content(values: Mapping[str, str]) -> bytes:
    """The file for launch: KEY=value entries, ended by newlines, or by NUL if a value has several lines."""
    for name, value in values.items():
        if "\0" in value:
            raise DeployError(
                f"secret {name} has a zero byte, which no environment can hold; correct its source"
            )
    end = "\0" if any("\n" in value for value in values.values()) else "\n"
    return "".join(f"{name}={value}{end}" for name, value in sorted(values.items())).encode()


def file_in_use(facts: Mapping[str, Any], name: str) -> str | None:
    """The secrets file of the run in progress, by the probe's facts; None without one."""
    there = facts["names"].get(name, {}).get("secrets", [])
    live = next((run for run in reversed(facts["runs"]) if run["name"] == name and run["alive"]), None)
    file = ((live or {}).get("run") or {}).get("secrets_file")
    return file if file in there else None


def over(facts: Mapping[str, Any], name: str) -> list[str]:
    """The files of a name that no run in progress reads, by the probe's facts."""
    read = [
        (run["run"] or {}).get("secrets_file")
        for run in facts["runs"]
        if run["name"] == name and run["alive"]
    ]
    return [path for path in facts["names"].get(name, {}).get("secrets", []) if path not in read]


def _read(name: str, source: SecretSource, root: Path, environment: Mapping[str, str]) -> str:
    if source.env:
        if source.env not in environment:
            raise DeployError(
                f"secret {name} needs the environment variable {source.env}; set it and deploy again"
            )
        if not is_text(environment[source.env]):
            raise DeployError(f"secret {name} is no UTF-8 text")
        return environment[source.env]
    if source.file:
        try:
            return _text(name, _file(root, source.file).read_bytes())
        except OSError as error:
            raise DeployError(
                f"secret {name} needs the file {source.file}, which cannot be read "
                f"({error.strerror}); correct secrets: in the run's file"
            ) from None
    argv = shellwords.split(source.command) if isinstance(source.command, str) else list(source.command or ())
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=COMMAND_TIMEOUT, cwd=root
        )
    except OSError as error:
        raise DeployError(f"secret {name}: {argv[0]} cannot be started ({error.strerror})") from None
    except subprocess.TimeoutExpired:
        raise DeployError(f"secret {name}: {argv[0]} did not answer within {COMMAND_TIMEOUT:g} s") from None
    if done.returncode or not done.stdout:
        raise DeployError(f"secret {name}: {argv[0]} gave nothing (exit code {done.returncode})")
    return _text(name, done.stdout)


def _text(name: str, data: bytes) -> str:
    try:
        return data.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise DeployError(f"secret {name} is no UTF-8 text") from None


def _file(root: Path, text: str) -> Path:
    return root / typedpath.expand(text)
