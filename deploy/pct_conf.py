"""The configuration of a Proxmox container as a text: read, compared, completed for a run, and put in place.

A file of /etc/pve/lxc holds ``key: value`` lines, raw ``lxc.*`` lines, comments (the description, in which
``%`` and ``:`` are escaped) and, behind ``[...]``, snapshots and changes that wait for the next start. Ours
begin with a comment that says whose they are; by it alone we know them.

Runs on both sides. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

MARK = "drafthouse"
VARIABLE = "DRAFTHOUSE_CONTAINER"  # holds the same as the mark
# What a release's pct.conf has for what it cannot know; see `complete`.
RUN, SECRETS, RELEASE, ROOTFS, STATE = (
    f"${{DRAFTHOUSE_{word}}}" for word in ("RUN", "SECRETS", "RELEASE", "ROOTFS", "STATE")
)
LOCKS = "/run/lock/lxc"  # where pct takes the lock of a container's configuration
LOCK_PATIENCE = 10.0  # seconds, as pct itself waits
TOLD = (
    "lxc.idmap",
    "lxc.mount.entry",
    "lxc.cgroup2.devices.allow",
    "lxc.init.cmd",
)  # raw lines that facts have
# What Proxmox changes by itself, or what `pct create` decides.
UNCOMPARED = ("digest", "lock", "parent", "snaptime", "rootfs")
_RAW = re.compile(r"(lxc\.[a-z0-9_.\-]+)(?::|\s*=)\s*(.*?)\s*")
_KEY = re.compile(r"([a-z][a-z_]*\d*):\s*(.+?)\s*")
_SAFE = "".join(
    chr(code) for code in range(0x20, 0x7F) if chr(code) not in "%:"
)  # as PVE::Tools::encode_text


@dataclass(frozen=True)
class Mark:
    """Whose container it is: a name's, for one of its releases, of one state root."""

    name: str
    release: str
    state: str

    def __str__(self) -> str:
        return f"{MARK} name={self.name} release={self.release} state={quote(self.state, safe='/')}"


@dataclass(frozen=True)
class Conf:
    """What a configuration says. `lxc` are the raw lines in their order; `pending`: changes wait in it."""

    values: Mapping[str, str]
    lxc: tuple[tuple[str, str], ...] = ()
    description: tuple[str, ...] = ()
    pending: bool = False

    @property
    def mark(self) -> Mark | None:
        """By which we know it for ours; None for anybody else's.

        It begins the description, since `pct create` can write nothing else; and as people write notes there,
        it stands once more among the variables.
        """
        variables = [value.partition("=")[::2] for key, value in self.lxc if key == "lxc.environment"]
        again = [f"{MARK} {value}" for name, value in variables if name == VARIABLE]
        for line in (*again, *self.description):
            word, _, rest = line.strip().partition(" ")
            if word == MARK:
                found = dict(part.partition("=")[::2] for part in rest.split())
                if {"name", "release", "state"} <= set(found):
                    return Mark(found["name"], found["release"], unquote(found["state"]))
        return None


def parse(text: str) -> Conf:
    """What `pct` reads from such a text. Lines that it would not understand are passed over, as it does."""
    values: dict[str, str] = {}
    lxc: list[tuple[str, str]] = []
    description: list[str] = []
    pending = False
    for line in text.split("\n"):
        if line.startswith("["):  # snapshots, and what waits
            pending = "[pve:pending]" in text.lower()
            break
        raw, key = _RAW.fullmatch(line), _KEY.fullmatch(line)
        if line.startswith("#"):
            description.append(unquote(line[1:]))
        elif raw:
            lxc.append((raw[1], raw[2]))
        elif key and key[1] == "description":
            description.append(unquote(key[2]))
        elif key:
            values[key[1]] = key[2]
    return Conf(values, tuple(lxc), tuple(description), pending)


def escape(text: str) -> str:
    """A text as it stands in a description, but for the # before it."""
    return quote(text, safe=_SAFE)


def comment(text: str) -> str:
    """A line of the description as it stands in the file."""
    return "#" + escape(text)


def complete(template: str, *, run: str, secrets: str | None, mark: Mark, rootfs: str) -> str:
    """A release's pct.conf for one run of it, in the container whose root is `rootfs`."""
    for word, value in (
        (RUN, run),
        (SECRETS, secrets or ""),
        (RELEASE, mark.release),
        (STATE, quote(mark.state, safe="/")),
        (ROOTFS, rootfs),
    ):
        template = template.replace(word, value)
    lines = (comment(line[1:]) if line.startswith("#") else line for line in template.split("\n"))
    return "\n".join(lines)


def without(template: str, *keys: str) -> str:
    """A configuration without the keys that begin so, like ``net``; their numbers do not count."""
    kept = [
        line
        for line in template.split("\n")
        if not any(re.match(rf"{re.escape(key)}\d*(?:\.[\w.]+)?:", line) for key in keys)
    ]
    return "\n".join(kept)


def differences(there: Conf, wanted: Conf) -> list[tuple[str, str | None, str | None]]:
    """(key, what is there, what was deployed) for each difference; None for what is not there.

    Raw lines of one key are compared as a whole, since their order counts. What a variable holds that
    somebody has added is not told: it may be a secret.
    """
    before, now = _flat(wanted), _flat(there)
    shown = {key: "set" if key.startswith("lxc.env") and key not in before else now[key] for key in now}
    return [
        (key, shown.get(key), before.get(key))
        for key in [*before, *(key for key in now if key not in before)]
        if now.get(key) != before.get(key)
    ]


def sources(conf: Conf) -> list[str]:
    """The paths of the host that a container is given: directories, files, devices."""
    given = [value for key, value in conf.values.items() if re.fullmatch(r"(mp|dev)\d+", key)]
    found = [value.partition(",")[0] for value in given]
    for key, value in conf.lxc:
        if key == "lxc.mount.entry":
            path = value.split(" ")[0]
            found.append(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), path))
    return [path for path in found if path.startswith("/")]


def _flat(conf: Conf) -> dict[str, str]:
    found = {key: value for key, value in conf.values.items() if key not in UNCOMPARED}
    for key, value in conf.lxc:
        if key == "lxc.environment":
            name, _, value = value.partition("=")
            key = f"{key} {name}"
        found[key] = f"{found[key]}, {value}" if key in found else value
    return found


# -- on a Proxmox host -------------------------------------------------------------------------------------


def read(path: str | Path) -> Conf | None:
    """The configuration in a file; None if there is none. Raises OSError for one that cannot be read."""
    try:
        return parse(Path(path).read_text(encoding="utf-8", errors="surrogateescape"))
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def locked(vmid: int, place: str | None = None) -> Iterator[None]:
    """Hold the lock that `pct` takes while it reads, changes and writes a configuration.

    Raises TimeoutError if somebody else holds it for too long.
    """
    place = place or LOCKS
    os.makedirs(place, exist_ok=True)
    lock = os.open(f"{place}/pve-config-{vmid}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + LOCK_PATIENCE
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        0, f"its configuration is locked by another task for {LOCK_PATIENCE:g} s"
                    ) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(lock)


def write(path: str | Path, text: str) -> None:
    """Put a configuration in place whole. (In /etc/pve no file can be given another mode.) Raises OSError."""
    temporary = f"{path}.tmp.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
    try:
        with open(descriptor, "wb") as file:
            file.write(text.encode("utf-8", "surrogateescape"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def facts(conf: Conf) -> dict[str, Any]:
    """A configuration as JSON, for the probe: what plans and checks ask about, and nobody's environment."""
    mark = conf.mark
    return {
        "values": dict(conf.values),
        "lxc": [list(item) for item in conf.lxc if item[0] in TOLD],
        "lock": conf.values.get("lock"),
        "ours": {"name": mark.name, "release": mark.release, "state": mark.state} if mark else None,
    }
