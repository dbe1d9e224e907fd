"""What an image is for a Proxmox host: its two forms, and what a container of it is started with. Pure.

Proxmox 9.1 and later reads an OCI archive (`deploy.oci_archive`), earlier ones a root file system
(`deploy.rootfs`) as a template. Either is one file, ``drafthouse-<variant>-<digest>``, named by the first
digits of its own SHA-256: the same image makes the same file. `deploy.pct_image` makes and brings it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from deploy.errors import USAGE, DeployError
from deploy.sizes import size

Form = Literal["oci", "template"]

SUFFIX: dict[Form, str] = {"oci": ".tar", "template": ".tar.zst"}
NAME = re.compile(r"drafthouse-[a-z]+-([0-9a-f]{12})(\.tar|\.tar\.zst)")
OCI_SINCE = (9, 1)  # the version of Proxmox that can read an OCI archive
INSIDE = "etc/drafthouse/image.json"  # where a template holds what is lost of an image in that form
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BLOCK = 1 << 20


@dataclass(frozen=True)
class Archive:
    """An image as one file for a Proxmox host."""

    path: Path
    form: Form
    size: int  # bytes
    sha256: str  # 64 hex digits
    start: Mapping[str, Any]  # what `image_config` says

    @property
    def name(self) -> str:
        return self.path.name

    def words(self) -> str:
        what = {"oci": "an OCI archive", "template": "a template of the root file system"}[self.form]
        return f"{what}, {size(self.size)}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path), "name": self.name}


def form_for(version: str, wanted: str | None = None, host: str = "this host") -> Form:
    """The form of image that a Proxmox of `version`, like ``9.1.4``, gets; `wanted` (--form) overrides. Pure.

    Raises DeployError for a form that there is not, or that the host cannot take.
    """
    check_form(wanted)
    numbers = [int(one) for one in re.findall(r"\d+", version)[:2]]
    if len(numbers) < 2:
        raise DeployError(
            f"{host} says that its version of Proxmox is {version[:40]!r}, which names no version; "
            "give the image's form with --form oci or --form template"
        )
    reads_oci = tuple(numbers) >= OCI_SINCE
    if wanted == "oci" and not reads_oci:
        raise DeployError(
            f"{host} has Proxmox {version}, which takes no OCI images (9.1 is the first that does); "
            "use --form template, or leave --form away",
            code=USAGE,
        )
    return "template" if wanted == "template" or not reads_oci else "oci"


def check_form(wanted: str | None) -> None:
    """Raises DeployError for a --form that there is not."""
    if wanted is not None and wanted not in get_args(Form):
        raise DeployError(f"--form {wanted[:40]} must be oci or template", code=USAGE)


def image_config(
    config: Mapping[str, Any], passwd: bytes | None = None, group: bytes | None = None
) -> dict[str, Any]:
    """What a container of the image is started with, of which each form of Proxmox loses some. Pure.

    `config` is the image's configuration, `passwd` and `group` are its files of these names, which tell who
    a user is that the image names. Returns ``entrypoint`` (the words of the command), ``environment``,
    ``working_directory``, ``user`` (``uid:gid``, numbers) and ``stop_signal`` (SIGTERM if it says none).

    In pct.conf the environment has to stand as ``lxc.environment: KEY=VALUE``, a line for each, whatever the
    form: that alone reaches init and what `pct exec` starts. (Proxmox's own ``env:`` becomes
    ``lxc.environment.runtime``, which what `pct exec` starts never sees.)
    """
    inner = config.get("config") or {}
    environment = dict(word.partition("=")[::2] for word in inner.get("Env") or ())
    return {
        "entrypoint": [*(inner.get("Entrypoint") or ()), *(inner.get("Cmd") or ())],
        "environment": {"PATH": PATH, **environment, "PYTHONUNBUFFERED": "1"},
        "working_directory": inner.get("WorkingDir") or "/",
        "user": _numbers(inner.get("User") or "0", passwd or b"", group or b""),
        "stop_signal": inner.get("StopSignal") or "SIGTERM",
    }


def _numbers(user: str, passwd: bytes, group: bytes) -> str:
    """``uid:gid`` of ``name``, ``name:group``, ``uid`` or ``uid:gid``. Raises DeployError for an unknown."""
    name, _, of = user.partition(":")
    users, groups = _fields(passwd), _fields(group)
    found = next((one for one in users if name in (one[0], one[2])), None)
    uid = name if name.isdecimal() else found[2] if found else None
    gid = of if of.isdecimal() else next((one[2] for one in groups if one[0] == of), None)
    if not of:
        gid = found[3] if found else "0"
    if uid is None or gid is None:
        raise DeployError(
            f"the image is for the user {user!r}, whom its /etc/passwd and /etc/group do not know; "
            "give USER in its Dockerfile as numbers"
        )
    return f"{uid}:{gid}"


def _fields(table: bytes) -> list[list[str]]:
    lines = (line.split(":") for line in table.decode(errors="replace").splitlines())
    return [fields for fields in lines if len(fields) > 3 or (len(fields) > 2 and fields[2].isdecimal())]


def check_start(start: Mapping[str, Any], has: Callable[[str, str], bool]) -> None:
    """Raises DeployError if nothing of the image can be init. `has` tells if a program is in a PATH of it."""
    words: Sequence[str] = start["entrypoint"]
    if not words and not has("/sbin/init", ""):
        raise DeployError("the image has no ENTRYPOINT, no CMD and no /sbin/init: nothing could be its init")
    if words and not has(words[0], start["environment"]["PATH"]):
        raise DeployError(
            f"the image is to start {words[0][:80]}, which is no program in it; correct ENTRYPOINT"
        )


def sha256(path: Path) -> str:
    """Of a file, 64 hex digits. Raises OSError."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()
