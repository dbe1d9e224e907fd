"""The trainer's image: what goes into it, and how it gets to a host without a registry.

An image is two, one on the other. The *packages* (Debian, Python, tini, PyTorch: gigabytes, changed once a
month) are built on the host, or built here and shipped. Our own *code* (kilobytes, changed ten times an
hour) is put on top of them by the host's engine, with nothing but files that we send: no network, no package
index. So after a change of the code only the code travels, whoever built the packages.

Both are named by a digest of everything that goes in. A tag appears when its image is whole, never before.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import tarfile
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from deploy import onhost, shipping
from deploy.errors import DeployError
from deploy.host import Host, Local

REPOSITORY = "drafthouse"
HERE = "this machine"
DIGEST_LABEL = "drafthouse.digest"
PACKAGES_LABEL = "drafthouse.packages"
SURVEY_TIMEOUT = 60.0  # seconds; an engine under load takes a while to answer
BUILD_TIMEOUT = 7200.0  # seconds; PyTorch with CUDA over a slow line takes an hour
SILENCE = 120.0  # seconds; a build or load gives a sign of life every 15
Action = Literal["there", "build", "ship"]
Build = Literal["host", "local"]
Report = Callable[[str], None]

# What .dockerignore lets into the build; tests/unit/test_image.py holds the two together.
FILES = ("Dockerfile", "pyproject.toml", "constraints.txt")
CODE = ("runs", "trainer")
# The last stage of the Dockerfile: from here on it is our own code.
CODE_STAGE = "FROM ${PACKAGES}"


class Settings(Protocol):
    """What `describe` needs of the run's `image:`."""

    @property
    def base(self) -> str | None: ...
    @property
    def torch_index_url(self) -> str | None: ...


@dataclass(frozen=True)
class Image:
    """An image as it will be: named by all that goes into it."""

    reference: str  # drafthouse:<first 12 digits of digest>
    digest: str  # SHA-256 of everything that goes in, packages too
    packages: str  # drafthouse:packages-<12 digits>: the same without our own code
    files: Mapping[str, bytes] = field(repr=False)  # the build's context
    arguments: Mapping[str, str]  # the build's arguments


def describe(root: Path, settings: Settings, variant: str) -> Image:
    """The image that the checkout `root` makes with the run's `image:` settings. Only reads files.

    `variant` is ``cpu`` or ``gpu``. Raises DeployError if a file that goes in cannot be read.
    """
    files = _context(root)
    arguments = {"VARIANT": variant}
    if settings.base:
        arguments["BASE_IMAGE"] = settings.base
    if settings.torch_index_url:
        arguments["TORCH_INDEX_URL"] = settings.torch_index_url
    packages = _digest(_packages_inputs(files), arguments)
    whole = _digest({**files, "packages": packages.encode()}, arguments)
    return Image(
        reference=f"{REPOSITORY}:{whole[:12]}",
        digest=whole,
        packages=f"{REPOSITORY}:packages-{packages[:12]}",
        files=files,
        arguments=arguments,
    )


def plan(facts: Mapping[str, Any], image: Image, build: Build) -> Action:
    """What has to be done before a container of `image` can start: nothing, a build, or a ship. Pure."""
    if _is_there(facts, image.reference):
        return "there"
    return "ship" if build == "local" else "build"


def words(facts: Mapping[str, Any], image: Image, action: Action, host: str) -> str:
    """The plan's words for `action`: what will be built where, and what travels. Pure."""
    if action == "there":
        return "there"
    if _is_there(facts, image.packages):
        return f"build on {host} (code only, its packages are there)"
    if action == "ship":
        return f"build here and ship to {host}"
    return f"build on {host} (with its packages: minutes)"


def _is_there(facts: Mapping[str, Any], reference: str) -> bool:
    return any(reference in (found.get("tags") or ()) for found in facts.get("images") or ())


def make(host: Host, state: str, image: Image, action: Action, report: Report) -> None:
    """Carry out what `plan` decided. `state` is the host's state root. Raises DeployError."""
    if action == "build":
        build_on_host(host, state, image, report)
    elif action == "ship":
        ship(host, state, image, report)


def build_on_host(host: Host, state: str, image: Image, report: Report) -> None:
    """Build `image` with the host's engine, packages too unless they are there. Raises DeployError."""
    if not _survey(host, state, image.packages)["id"]:
        report(f"{host.name}: building the packages of the image; this takes minutes, once")
        _build(host, _images(state), image.packages, image.files, _for_packages(image), report)
    _add_code(host, _images(state), image, report)


def ship(host: Host, state: str, image: Image, report: Report) -> None:
    """Bring the packages of `image` from this machine's engine, then add its code there. Raises DeployError.

    What an interrupted ship has brought is used by the next one; nothing half ever has a tag.
    """
    there = _survey(host, state, image.packages)
    if not there["id"]:
        if not host.is_local:  # before minutes go into a build
            shipping.check(host, there)
        here = build_here(image, there["architecture"], report)
        # The engine may be the same one, as on localhost.
        if not _survey(host, state, image.packages)["id"]:
            shipping.send(host, _images(state), here, image.packages, there, report)
    _add_code(host, _images(state), image, report)


def build_here(image: Image, architecture: str, report: Report) -> str:
    """Build the packages of `image` with this machine's engine, unless it has them; returns their name here.

    `architecture` is the host's: where this machine has another, the engine emulates it. Raises DeployError.
    """
    local = Local(HERE)
    cache = str(shipping.cache())
    found = onhost.ask(
        local, "deploy.image_store:survey", cache, HERE, image.packages, timeout=SURVEY_TIMEOUT
    )
    foreign = found["architecture"] != architecture
    reference = f"{image.packages}-{architecture}" if foreign else image.packages
    if foreign:
        other = onhost.ask(local, "deploy.image_store:image_id", HERE, reference, timeout=SURVEY_TIMEOUT)
        found = {**found, "id": other}
    if not found["id"]:
        report(f"{HERE}: building the packages of the image; this takes minutes, once")
        settings = _for_packages(image)
        if foreign:
            settings["platforms"] = [f"linux/{architecture}"]
        _build(local, cache, reference, image.files, settings, report)
    return reference


def build_whole_here(image: Image, architecture: str | None, report: Report) -> str:
    """Build all of `image` with this machine's engine, unless it has it; returns its name here.

    `architecture` as for `build_here`; None: that of the engine here. Raises DeployError.
    """
    local, cache = Local(HERE), str(shipping.cache())
    if architecture is None:
        survey = ("deploy.image_store:survey", cache, HERE, image.packages)
        architecture = str(onhost.ask(local, *survey, timeout=SURVEY_TIMEOUT)["architecture"])
    packages = build_here(image, architecture, report)
    if packages == image.packages:
        if there(local, image.reference) is None:
            _add_code(local, cache, image, report)
        return image.reference
    reference = f"{image.reference}-{architecture}"
    if there(local, reference) is None:
        foreign = dataclasses.replace(image, reference=reference, packages=packages)
        _add_code(local, cache, foreign, report, platforms=[f"linux/{architecture}"])
    return reference


def there(host: Host, reference: str) -> str | None:
    """The id of an image that the host's engine has; None if it has none of that name. Raises DeployError."""
    found: str | None = onhost.ask(
        host, "deploy.image_store:image_id", host.name, reference, timeout=SURVEY_TIMEOUT
    )
    return found


def _survey(host: Host, state: str, reference: str) -> dict[str, Any]:
    found: dict[str, Any] = onhost.ask(
        host, "deploy.image_store:survey", _images(state), host.name, reference, timeout=SURVEY_TIMEOUT
    )
    return found


def _add_code(host: Host, images: str, image: Image, report: Report, **more: Any) -> None:
    needed = ("Dockerfile", *CODE)
    files = {name: data for name, data in image.files.items() if name.partition("/")[0] in needed}
    settings = {
        "args": {"PACKAGES": image.packages},
        "network": "none",  # nothing of it is fetched: this works on a host that reaches no network at all
        "labels": {DIGEST_LABEL: image.digest, PACKAGES_LABEL: image.packages},
        **more,
    }
    _build(host, images, image.reference, files, settings, report)
    report(f"{host.name}: image {image.reference} is there")


def _for_packages(image: Image) -> dict[str, Any]:
    return {"target": "packages", "args": dict(image.arguments), "labels": {PACKAGES_LABEL: image.packages}}


def _build(
    host: Host,
    images: str,
    reference: str,
    files: Mapping[str, bytes],
    settings: Mapping[str, Any],
    report: Report,
) -> None:
    onhost.ask(
        host,
        "deploy.image_store:build",
        images,
        host.name,
        reference,
        settings,
        BUILD_TIMEOUT,
        data=_tar(files),
        timeout=SILENCE,
        progress=lambda text: report(f"{host.name}: {text}") if text else None,
    )


def _images(state: str) -> str:
    return f"{state}/images"


def _tar(files: Mapping[str, bytes]) -> bytes:
    """`files` as a tar that depends on nothing else."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, data in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return whole.getvalue()


# -- what goes in ------------------------------------------------------------------------------------------


def _context(root: Path) -> dict[str, bytes]:
    """Name -> content of every file that the Dockerfile can copy."""
    found = {}
    try:
        for name in FILES:
            found[name] = (root / name).read_bytes()
        for directory in CODE:
            for path in sorted((root / directory).rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
                    found[path.relative_to(root).as_posix()] = path.read_bytes()
    except OSError as error:
        raise DeployError(
            f"{error.filename} cannot be read ({error.strerror}), and it goes into the image; "
            "run fab in a whole checkout"
        ) from None
    return found


def _packages_inputs(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """What the packages depend on: not the code, and not each line of pyproject.toml."""
    stages, code, _ = files["Dockerfile"].decode().partition(CODE_STAGE)
    if not code:
        raise DeployError(
            f"Dockerfile has no stage '{CODE_STAGE}', on which a deploy puts the code; restore it"
        )
    try:
        project = tomllib.loads(files["pyproject.toml"].decode())["project"]
        wanted = project["optional-dependencies"]["trainer"]
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise DeployError(
            f"pyproject.toml has no project.optional-dependencies.trainer to install ({error}); restore it"
        ) from None
    return {
        "Dockerfile": stages.encode(),
        "requirements": "\n".join(wanted).encode(),
        "constraints.txt": files["constraints.txt"],
    }


def _digest(files: Mapping[str, bytes], arguments: Mapping[str, str]) -> str:
    total = hashlib.sha256()
    for name, data in sorted({**files, "arguments": json.dumps(arguments, sort_keys=True).encode()}.items()):
        total.update(f"{name}\0{len(data)}\0".encode())
        total.update(data)
    return total.hexdigest()
