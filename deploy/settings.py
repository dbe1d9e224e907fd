"""Hosts and runs, read from fabric.yaml and runs/*.yaml, and validated before anything is touched.

docs/settings.md is the annotated reference of every key. Whatever is wrong raises DeployError with one
sentence that names the file (with its line), the key, and the remedy. Nothing here connects to a host.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from deploy import explain, fabricfile, flags, shellwords, sizes, sshconfig, typedpath, yamlfile
from deploy.errors import USAGE, DeployError, nearest
from deploy.host import CONTAINER, LOCAL_NAMES
from deploy.pct_settings import PctSettings
from deploy.yamlfile import YamlFile, dotted
from trainer.status import valid_name

TOY = "toy"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}")
# Set for every run by launch; a second value would contradict what status and tail expect.
OWN_VARIABLES = ("DRAFTHOUSE_RUN_DIR", "DRAFTHOUSE_ATTEMPT", "DRAFTHOUSE_SECRETS_FILE")


def _natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


# -- what the files may say --------------------------------------------------------------------------------


class HostSettings(_Settings):
    """One entry under `drafthouse: hosts:` in fabric.yaml. Paths are paths on that host."""

    derived: ClassVar[tuple[str, ...]] = ("name",)  # from the entry's key, not from inside it

    name: str = ""
    address: str = ""  # what ssh is given; the entry's name by default
    runtime: Literal["auto", "process", "compose", "pct"] = "auto"
    run: str | None = None  # the run's file when --run is not given
    state: str | None = None  # default: /var/lib/drafthouse as root, else ~/.local/state/drafthouse
    shm: str | None = None  # default: /dev/shm/drafthouse
    cache: str | None = None  # default: names/<name>/cache in the state
    container: int | None = Field(default=None, ge=100, le=999_999_999)  # of a Proxmox host: all runs in it
    python: str | None = None  # the Python that has torch; on localhost the one that runs fab
    python_for_tools: str | None = None  # a Python >= 3.9 for what we run there; on localhost fab's own
    build: Literal["host", "local"] | None = None  # where images are built; default: on the host
    keep_on_disk: bool = True  # weights that were pushed, for the time after a reboot
    pct: PctSettings = PctSettings()  # of the containers that a deploy makes, with runtime: pct

    @property
    def is_local(self) -> bool:
        """Whether its paths are paths of this machine."""
        return self.address in LOCAL_NAMES and self.container is None

    @field_validator("state", "shm", "cache")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("/", "~/")):
            raise ValueError("but must be an absolute path on that host, like /var/lib/drafthouse")
        return value


class SecretSource(_Settings):
    """Where a secret's value is read on this machine at every deploy: exactly one of the three."""

    env: str | None = None  # an environment variable of this machine
    file: str | None = None  # a file of this machine; one newline at the end is dropped
    command: list[str] | str | None = None  # its output; one newline at the end is dropped

    @model_validator(mode="after")
    def _one(self) -> Self:
        if len([source for source in (self.env, self.file, self.command) if source]) != 1:
            raise ValueError("must have exactly one of env, file or command, like {env: WANDB_API_KEY}")
        return self

    @field_validator("command")
    @classmethod
    def _program(cls, value: list[str] | str | None) -> list[str] | str | None:
        try:
            words = shellwords.split(value) if isinstance(value, str) else value
        except ValueError as error:
            raise ValueError(f"is a text, but {error}") from None
        if words is not None and (not words or not words[0]):
            raise ValueError("must name a program, like [pass, show, wandb]")
        if any("\0" in word for word in words or ()):
            raise ValueError("has a zero byte, which no argument can hold; remove it")
        return value


class Restart(_Settings):
    """Crashes that nobody asked for start the next attempt: at most `attempts` in `minutes`."""

    attempts: int = Field(default=3, ge=0, le=100000)
    minutes: float = Field(default=10, gt=0, le=525600)


class LogKeeping(_Settings):
    """How much of a run's log is kept."""

    segment_megabytes: int = Field(default=64, ge=1, le=4096)
    segments: int = Field(default=16, ge=2, le=100000)


class ImageSettings(_Settings):
    """What the compose runtime starts a run from: an image of this checkout, or one of your own (`use`)."""

    build: Literal["host", "local"] | None = None  # default: as the host has it
    base: str | None = None  # the Dockerfile's BASE_IMAGE
    variant: Literal["auto", "cpu", "gpu"] = "auto"  # auto: gpu if the run gets devices
    torch_index_url: str | None = None  # the Dockerfile's TORCH_INDEX_URL
    use: str | None = None  # an image that is on the host already and has Python 3.9 or later

    @field_validator("base", "use")
    @classmethod
    def _reference(cls, value: str | None) -> str | None:
        if value is not None and not _IMAGE.fullmatch(value):
            raise ValueError("but must be an image's name, like debian:bookworm-slim")
        return value

    @field_validator("torch_index_url")
    @classmethod
    def _index(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if "@" in value.partition("://")[2].partition("/")[0]:
            raise ValueError(
                "holds a password, which would lie in the image and in the release; give pip's configuration "
                "to the build as a secret instead (docs/docker.md)"
            )
        if not re.fullmatch(r"(https?|file)://[^\s]+", value):
            raise ValueError("but must be the address of a package index, like https://index.example/cpu")
        return value

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.use is not None:
            for key in ("build", "base", "torch_index_url"):
                if getattr(self, key) is not None:
                    raise ValueError(
                        f"has {key} beside use, but an image that is used as it is cannot be built; keep one"
                    )
        return self


class RunSettings(_Settings):
    """A file in runs/: one experiment. `trainer:` for our trainer, `command:` for any other."""

    name: str
    description: str = ""
    trainer: dict[str, Any] | None = None  # flags of the trainer, checked against deploy/flags.py
    command: list[str] | None = None
    weights: str | None = None  # a model directory, or toy
    data: str | None = None  # a directory of tokenised completions, or toy
    environment: dict[str, str] = {}
    secrets: dict[str, SecretSource] = {}
    working_directory: str | None = None
    tty: bool = False  # stdout and stderr are a pseudo-terminal, so that C programs write line by line
    grace_seconds: float = Field(default=60, ge=1, le=86400)  # from TERM to KILL
    checkpoint_timeout_seconds: float = Field(
        default=300, ge=0, le=86400
    )  # how long a stop waits for the checkpoint
    first_heartbeat_timeout_seconds: float = Field(default=600, ge=1, le=86400)
    settle_seconds: float = Field(default=3, ge=0, le=3600)  # that a command: has to live to count as started
    restart: Restart = Restart()
    log: LogKeeping = LogKeeping()
    gpus: Literal["all"] | int | list[int] | None = None  # None: all that the host has; 0: none
    image: ImageSettings = ImageSettings()
    memory: str | None = None  # of the container, like 64g; default: no limit
    shm_size: str | None = None  # of the container's own /dev/shm; default: computed
    user: str | None = None  # of the container: root, or uid:gid; default: 10001:10001, or the deployer

    @field_validator("gpus", mode="before")
    @classmethod
    def _gpus(cls, value: Any) -> Any:
        many = isinstance(value, list) and all(_natural(item) for item in value)
        if value is not None and value != "all" and not _natural(value) and not many:
            raise ValueError("but must be all, how many (0: none), or a list of devices like [0, 1]")
        if many and len(set(value)) < len(value):
            raise ValueError("but names a device twice; name each once")
        return 0 if value == [] else sorted(value) if many else value

    @field_validator("memory", "shm_size", mode="before")
    @classmethod
    def _size(cls, value: Any) -> Any:
        if value is None:
            return None
        text = str(value) if not isinstance(value, bool) else ""
        if sizes.parse(text) is None:
            raise ValueError("but must be a size, like 512m or 64g")
        return text

    @field_validator("user", mode="before")
    @classmethod
    def _user(cls, value: Any) -> Any:
        if value is None or value == "root":
            return value
        text = f"{value}:{value}" if _natural(value) else value
        if not isinstance(text, str) or not re.fullmatch(r"\d{1,9}:\d{1,9}", text):
            raise ValueError("but must be root or numbers like 1000:1000; a name means nothing in an image")
        return text

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not valid_name(value):
            raise ValueError(
                "but a name needs lower-case letters, digits, '.', '_' and '-', begins and ends with a "
                "letter or a digit, and has at most 63 characters"
            )
        return value

    @field_validator("command", mode="before")
    @classmethod
    def _argv(cls, value: Any) -> Any:
        if isinstance(value, str):
            try:
                value = shellwords.split(value)
            except ValueError as error:
                raise ValueError(f"but {error}") from None
        if isinstance(value, list):
            value = [
                str(word) if isinstance(word, int | float) and not isinstance(word, bool) else word
                for word in value
            ]
            if not value or value[0] == "":
                raise ValueError("but must name a program, like [python, train.py]")
            if any(isinstance(word, str) and "\0" in word for word in value):
                raise ValueError("but an argument cannot hold a zero byte")
        return value

    @field_validator("environment", "secrets")
    @classmethod
    def _variables(cls, value: dict) -> dict:
        for key, item in value.items():
            if not _VARIABLE.fullmatch(key):
                raise ValueError(f"names the variable {key!r}, but a name has letters, digits and '_' only")
            if key in OWN_VARIABLES:
                raise ValueError(f"sets {key}, which every run gets from Drafthouse; remove it")
            if isinstance(item, str) and "\0" in item:
                raise ValueError(f"gives {key} a zero byte, which no environment can hold; remove it")
        return value

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if self.trainer is not None and self.command is not None:
            raise ValueError("has both trainer: and command:; keep the one that is to be started")
        if self.trainer is None and self.command is None:
            raise ValueError("has neither trainer: nor command:, so there is nothing to start; add one")
        both = sorted(set(self.environment) & set(self.secrets))
        if both:
            raise ValueError(f"has {both[0]} under both environment: and secrets:; keep the secret")
        if self.command is not None:
            for key in ("weights", "data"):
                if getattr(self, key) == TOY:
                    raise ValueError(
                        f"has {key}: toy, which only our trainer can make; give command: a directory"
                    )
        return self


@dataclass(frozen=True)
class Project:
    """fabric.yaml beside the fabfile, and the directory of run files."""

    root: Path
    hosts: Mapping[str, HostSettings]
    default_run: str = "demo"

    @property
    def runs(self) -> dict[str, Path]:
        """Run files by stem."""
        found = sorted([*(self.root / "runs").glob("*.yaml"), *(self.root / "runs").glob("*.yml")])
        return {path.stem: path for path in found}


@dataclass(frozen=True)
class Recipe:
    """One run's settings, where they come from, and what the command line changed in them."""

    settings: RunSettings
    path: Path
    why: str  # why this file: "--run", "run: of gpu-box in fabric.yaml", …
    changes: Mapping[str, str] = field(default_factory=dict)


# -- reading -----------------------------------------------------------------------------------------------


def load_project(root: Path) -> Project:
    """Read `root`/fabric.yaml. Without one, localhost is all there is."""
    file = fabricfile.check(root / "fabric.yaml")
    if file is None:
        return Project(root, {})
    top = explain.mapping(file, (), file.value)
    section = explain.mapping(file, ("drafthouse",), top.get("drafthouse"))
    explain.known(file, ("drafthouse",), section, ("hosts", "defaults"))
    defaults = explain.mapping(file, ("drafthouse", "defaults"), section.get("defaults"))
    hosts = {}
    for name, value in explain.mapping(file, ("drafthouse", "hosts"), section.get("hosts")).items():
        way = ("drafthouse", "hosts", str(name))
        entry = {**defaults, **explain.mapping(file, way, value)}
        hosts[str(name)] = explain.build(
            HostSettings, {"address": str(name), **entry, "name": str(name)}, file, way
        )
    shared = explain.build(HostSettings, defaults, file, ("drafthouse", "defaults"))
    return Project(root, hosts, shared.run or "demo")


def find_host(
    project: Project,
    name: str | None,
    *,
    ssh: sshconfig.SshHosts | None = None,
    resolves: Callable[[str], bool] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> HostSettings:
    """The settings of host `name` (None: localhost): from fabric.yaml, else a bare SSH host.

    A name is accepted without an entry if some `Host` of the SSH configuration means it or if it resolves;
    ``HOST/200`` is container 200 of the Proxmox host HOST.
    Raises DeployError, offering the nearest names, for any other.
    """
    name = "localhost" if name is None else name.strip()
    if not name or name.startswith("-") or any(character.isspace() for character in name):
        raise DeployError(f"--host {name!r} is no host name; give one like --host localhost", code=USAGE)
    if name in project.hosts:
        return _with_environment(project.hosts[name], environment)
    inside = CONTAINER.search(name)
    if inside:
        found = find_host(project, name[: inside.start()], ssh=ssh, resolves=resolves, environment={})
        if found.container is not None:
            raise DeployError(
                f"host {name!r} is a container in {found.name}, which is container {found.container} itself; "
                f"name the Proxmox host, like {found.address}/{inside[1]}",
                code=USAGE,
            )
        return HostSettings(
            name=name,
            address=found.address,
            container=int(inside[1]),
            run=found.run,
            python_for_tools=None if found.is_local else found.python_for_tools,
        )
    if name in LOCAL_NAMES:
        local = project.hosts.get("localhost", HostSettings(name="localhost", address="localhost"))
        return _with_environment(local, environment)
    ssh = sshconfig.read() if ssh is None else ssh
    bare = name.rpartition("@")[2].partition(":")[0] or name
    if ssh.knows(bare) or (resolves or _resolves)(bare):
        return HostSettings(name=name, address=name)
    known = [*project.hosts, "localhost", *ssh.names]
    raise DeployError(
        f"host {name!r} is neither in fabric.yaml nor a Host of the SSH configuration, and its name does not "
        f"resolve{nearest(name, known) or '; add it under drafthouse: hosts: in fabric.yaml'}",
        code=USAGE,
    )


def load_run(
    project: Project,
    run: str | None,
    *,
    host: HostSettings | None = None,
    name: str | None = None,
    changes: Iterable[str] = (),
) -> Recipe:
    """Read the run's file: `run` (a stem in runs/, or a path), else the host's `run:`, else the project's.

    `changes` are the KEY=VALUE of --set: a bare key is a flag of the trainer if there is one of that
    name, else a key of the file; a dotted key (`environment.LEVEL`, `restart.attempts`) is always one of the
    file.
    """
    path, why = _run_file(project, run, host)
    if not yamlfile.is_text(str(path)):
        raise DeployError(f"run file {str(path)!r} has a name that is no UTF-8 text; rename it", code=USAGE)
    try:
        shown = str(path.relative_to(project.root))
    except ValueError:
        shown = str(path)
    file = yamlfile.read(path, shown)
    top = dict(explain.mapping(file, (), file.value))
    written: dict[yamlfile.Key, str] = dict(file.written)
    origins: dict[yamlfile.Key, str] = {}
    applied: dict[str, str] = {}
    for change in changes:
        key, value, text = _change(change, top)
        _put(top, key, value)
        written[key] = text
        origins[key] = f"--set {change.partition('=')[0].strip()}"
        applied[dotted(key)] = text  # as written: what `fab render --set` can be given again
    if name is not None:
        top["name"], origins[("name",)] = name, "--name"
    file = YamlFile(file.name, top, file.lines, written, origins)
    return Recipe(read_run(file, path.stem), path, why, applied)


def read_run(file: YamlFile, stem: str) -> RunSettings:
    """The settings that a run's file of this stem gives. Raises DeployError for what is wrong in it."""
    top = dict(explain.mapping(file, (), file.value))
    top.setdefault("name", stem)
    file = YamlFile(file.name, top, file.lines, file.written, file.origins)
    return explain.build(RunSettings, _normalised(file, top), file, ())


def _run_file(project: Project, run: str | None, host: HostSettings | None) -> tuple[Path, str]:
    if run is not None:
        why = "--run"
    elif host is not None and host.run is not None:
        run, why = host.run, f"run: of {host.name} in fabric.yaml"
    else:
        run, why = project.default_run, "the default"
    known = project.runs
    if run in known:
        return known[run], why
    path = typedpath.expand(run)
    if path.suffix in (".yaml", ".yml") or "/" in run:
        path = path if path.is_absolute() else project.root / path
        if typedpath.look(path, f"run file {run}") == typedpath.FILE:
            return path, why
        raise DeployError(f"run file {run} does not exist{nearest(path.stem, known)}", code=USAGE)
    listed = nearest(run, known) or (f"; there are {', '.join(known)}" if known else "; runs/ holds none")
    raise DeployError(f"run {run!r} ({why}) is no file in runs/{listed}", code=USAGE)


def _normalised(file: YamlFile, top: dict[str, Any]) -> dict[str, Any]:
    """Settings as the model wants them: flags checked, texts of the environment exactly as written."""
    top = dict(top)
    if top.get("trainer") is not None and isinstance(top["trainer"], Mapping):
        top["trainer"] = trainer = _trainer(file, top["trainer"])
        for key, flag in (("weights", "target-model"), ("data", "data-dir")):
            value = trainer.pop(flag, None)
            if value is not None and top.setdefault(key, value) != value:
                raise DeployError(
                    f"{file.at(('trainer', flag))}: {key} is {top[key]!r} and trainer.{flag} is "
                    f"{value!r}, which are the same setting; keep {key}",
                    code=USAGE,
                )
    for key in ("environment", "secrets"):
        if top.get(key, {}) is None:
            top[key] = {}
    if isinstance(top.get("environment"), Mapping):
        top["environment"] = {
            str(name): file.written.get(("environment", str(name)), value)
            for name, value in top["environment"].items()
        }
    if isinstance(top.get("secrets"), Mapping):
        top["secrets"] = {
            name: {"env": name} if value == "env" else value for name, value in top["secrets"].items()
        }
    return top


def _trainer(file: YamlFile, given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the `trainer:` mapping against the table of flags."""
    found: dict[str, Any] = {}
    for key, value in given.items():
        way, flag = ("trainer", str(key)), flags.spelled(str(key))
        where = file.at(way)
        if flag in flags.RESERVED:
            raise DeployError(
                f"{where}: trainer.{key} is set by Drafthouse ({flags.RESERVED[flag]}); remove it", code=USAGE
            )
        if flag not in flags.FLAGS:
            raise DeployError(
                f"{where}: the trainer has no flag {key!r}{nearest(flag, flags.FLAGS) or '; remove it'}",
                code=USAGE,
            )
        if flag in found:
            raise DeployError(
                f"{where}: trainer.{key} is given twice, once with '-' and once with '_'; keep one",
                code=USAGE,
            )
        if value is None:  # `max-steps:` with nothing after it: the trainer's own default
            continue
        kind = flags.FLAGS[flag]
        if not kind.fits(value):
            raise DeployError(
                f"{where}: trainer.{key} is {explain.shown(value)}, but must be {kind.wanted()}", code=USAGE
            )
        if kind.kind == "text":
            value = file.written.get(way, str(value))
        found[flag] = float(value) if kind.kind == "float" else value
    conflict = flags.conflict(found)
    if conflict:
        flag, problem = conflict
        key = next((str(key) for key in given if flags.spelled(str(key)) == flag), flag)
        raise DeployError(f"{file.at(('trainer', key))}: trainer.{key} {problem}", code=USAGE)
    return {flag: found[flag] for flag in flags.FLAGS if flag in found}


# -- --set -------------------------------------------------------------------------------------------------


def _change(change: str, top: Mapping[str, Any]) -> tuple[tuple[str, ...], Any, str]:
    """``lr=3e-4`` -> (("trainer", "lr"), 0.0003, "3e-4")."""
    key, equals, text = change.partition("=")
    key = key.strip()
    if not equals or not key:
        raise DeployError(f"--set {change!r} is no KEY=VALUE; write it like --set lr=3e-4", code=USAGE)
    way = tuple(key.split("."))
    if not yamlfile.is_text(change):
        raise DeployError(f"--set {change!r} is no UTF-8 text; correct it", code=USAGE)
    has_trainer = top.get("command") is None
    known = sorted(RunSettings.model_fields)
    if len(way) == 1 and flags.spelled(key) in (flags.FLAGS | flags.RESERVED) and has_trainer:
        way = ("trainer", key)
    elif way[0] not in known:
        offered = nearest(key, [*known, *(flags.FLAGS if has_trainer else [])])
        if not has_trainer and len(way) == 1 and flags.spelled(key) in flags.FLAGS:
            offered = (
                "; flags without a prefix are those of trainer:, and this file has command: instead: change "
                "that with --set command=…"
            )
        whose = (
            "a flag of the trainer nor a key of the run's file" if has_trainer else "a key of the run's file"
        )
        raise DeployError(
            f"--set {key}: {key!r} is {'neither ' if has_trainer else 'not '}{whose}"
            f"{offered or '; docs/settings.md lists them'}",
            code=USAGE,
        )
    if way[0] == "name":
        raise DeployError(f"--set {key}: use --name for the name", code=USAGE)
    if way[0] == "secrets":
        raise DeployError(
            f"--set {key}: secrets are named in the run's file only, so that none gets into a "
            "command line; add it there",
            code=USAGE,
        )
    if way[0] == "trainer" and len(way) == 2:
        flagged = top.get("trainer")
        for existing in flagged if isinstance(flagged, Mapping) else ():  # max_steps there, max-steps here
            if flags.spelled(str(existing)) == flags.spelled(way[1]):
                way = ("trainer", str(existing))
    return way, yamlfile.parse_value(text), text


def _put(top: dict[str, Any], way: tuple[str, ...], value: Any) -> None:
    """Set one value in nested mappings, copying what it changes."""
    for part in way[:-1]:
        inner = top.get(part)
        if inner is not None and not isinstance(inner, Mapping):
            raise DeployError(f"--set {dotted(way)}: {part} holds no keys; set {part} itself", code=USAGE)
        top[part] = dict(inner or {})
        top = top[part]
    top[way[-1]] = value


def _with_environment(host: HostSettings, environment: Mapping[str, str]) -> HostSettings:
    """On localhost DRAFTHOUSE_STATE, _SHM and _CACHE win over fabric.yaml, and Python is fab's own."""
    if not host.is_local:
        return host
    changes: dict[str, str] = {} if host.python else {"python": sys.executable}
    for key in ("state", "shm", "cache"):
        value = environment.get(f"DRAFTHOUSE_{key.upper()}") or getattr(host, key)
        if value:
            changes[key] = os.path.abspath(os.path.expanduser(value))
    return host.model_copy(update=changes)


def _resolves(name: str, seconds: float = 3.0) -> bool:
    """Whether the name has an address; a resolver that does not answer in time counts as no."""
    found: list[Any] = []

    def ask() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            found.extend(socket.getaddrinfo(name, None))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(found)
