"""The trainer's image for a Proxmox host: made here of what the engine holds, and brought there as one file.

`deploy.pct_form` says which form a host gets. An upload goes the way of weights (`deploy.sender`): over
several connections, gone on with after a lost link, read back there chunk by chunk, and it appears by a
rename. What it has in common with the image before it does not travel: an OCI archive begins with the layers
that stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deploy import (
    archive_check,
    files,
    hashing,
    image_layers,
    manifest,
    oci_archive,
    onhost,
    pct_templates,
    rootfs,
    sender,
    shipping,
    zstd,
)
from deploy.errors import DeployError
from deploy.host import Host
from deploy.image_layers import Layers
from deploy.manifest import Told
from deploy.meter import on_terminal
from deploy.pct_form import INSIDE, SUFFIX, Archive, Form, check_start, image_config, sha256
from deploy.sizes import size

RECORD = ".archive.json"  # beside an archive in the cache
KEPT = 2  # archives of a kind that the cache holds: of today's image, and of the one before
PAUSE = 0.2  # seconds between two looks at a lock that somebody else has
SILENCE = 120.0  # seconds without a word of the host; a long step tells how far it is every 10 s
ASK_TIMEOUT = 100.0  # seconds for up to three questions to Proxmox

Report = Callable[[str], None]


# -- making ------------------------------------------------------------------------------------------------


def cache() -> Path:
    """Where this machine keeps the archives that it made."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "drafthouse" / "pct"


def pack(key: str, variant: str, form: Form, report: Report, *, build: Callable[[], str]) -> Archive:
    """An image as an archive in the cache; made, of what this machine's engine holds, unless it is there.

    `key` names the image's content (letters, digits, ``-``); `build` has the engine build it, if it did not
    yet, and returns the name that it has there. Raises DeployError.
    """
    place = cache()
    final = place / f"{variant}-{form}-{key}"
    found = _kept(final)
    if found:
        return found
    try:
        place.mkdir(parents=True, exist_ok=True)
        with _alone(place, report):
            found = _kept(final)
            if found is None:
                with shipping.export(build(), report) as (directory, blobs):
                    _make(image_layers.read(directory, blobs), variant, form, final, report)
                found = _kept(final)
            _forget_older(place, f"{variant}-{form}-", final)
    except OSError as error:
        raise DeployError(
            f"the image cannot be put together under {place}: {error.strerror}; make room there, or set "
            "XDG_CACHE_HOME to another disk"
        ) from None
    assert found
    return found


def _kept(directory: Path) -> Archive | None:
    """The archive that an earlier call made; None without one, or if it is not any more what it was."""
    try:
        record = json.loads((directory / RECORD).read_bytes())
        path = directory / record.pop("name")
        stamp = path.stat()
        if [stamp.st_size, stamp.st_mtime_ns] == [record["size"], record.pop("mtime_ns")]:
            return Archive(path=path, **record)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _make(image: Layers, variant: str, form: Form, final: Path, report: Report) -> None:
    """Write the archive; the directory `final` appears with it and its record, by a rename."""
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        began, incoming = time.monotonic(), partial / "incoming"
        root = rootfs.flatten(image)
        words = (rootfs.content(root, f"etc/{name}") for name in ("passwd", "group"))
        start = image_config(image.config, *words)
        check_start(start, lambda program, path: rootfs.has_program(root, program, path))
        if form == "oci":
            image = image_layers.without_devices(image, partial)
            total = sum(layer.path.stat().st_size for layer in image.layers)
            oci_archive.write(image, start, incoming, Told("packed", total, report))
        else:
            template(root, start, incoming, report)
        digest = sha256(incoming)
        path = partial / f"drafthouse-{variant}-{digest[:12]}{SUFFIX[form]}"
        incoming.rename(path)
        for left in partial.glob("*.layer"):
            left.unlink()
        made = archive_check.check(path)
        record = {**asdict(made), "start": start, "name": made.name, "mtime_ns": path.stat().st_mtime_ns}
        del record["path"]
        (partial / RECORD).write_text(json.dumps(record))
        shutil.rmtree(final, ignore_errors=True)  # what is damaged
        partial.rename(final)
        report(f"{made.name}: {size(made.size)}, packed in {time.monotonic() - began:.0f} s")
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def template(root: rootfs.Node, start: Mapping[str, Any], target: Path, report: Report) -> None:
    """Write the template of a flattened image to `target`. Raises OSError, DeployError."""
    rootfs.add(root, INSIDE, json.dumps(start, sort_keys=True, indent=1).encode() + b"\n")
    told = Told("packed", rootfs.size(root), report)
    with open(target, "wb") as out, zstd.compressor().stream_writer(out, closefd=False) as stream:
        rootfs.write(root, stream, told)


@contextlib.contextmanager
def _alone(place: Path, report: Report) -> Iterator[None]:
    """One at a time makes archives here: a second one finds them made."""
    with open(place / "pack.lock", "w") as lock:
        if not files.take(lock.fileno()):
            report("another command on this machine puts an image together: waiting for it")
            while not files.take(lock.fileno()):
                time.sleep(PAUSE)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)


def _forget_older(place: Path, prefix: str, newest: Path) -> None:
    """Remove the archives of images before the last one. (Who uploads one has its file open.)"""
    (newest / RECORD).touch()
    found = [one for one in place.iterdir() if one.name.startswith(prefix) and (one / RECORD).exists()]
    found.sort(key=lambda one: (one / RECORD).stat().st_mtime_ns, reverse=True)
    for old in found[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)


# -- over to the host --------------------------------------------------------------------------------------


def version(host: Host) -> str:
    """The version of Proxmox on the host. Raises DeployError where there is none."""
    found: str = onhost.ask(host, "deploy.pct_templates:version", host.name, timeout=ASK_TIMEOUT)
    return found


def directory(host: Host, storage: str = "local") -> str:
    """The directory of the templates in a storage of the host. Raises DeployError for one that takes none."""
    found: str = onhost.ask(host, "deploy.pct_templates:directory", host.name, storage, timeout=ASK_TIMEOUT)
    return found


def ensure(host: Host, archive: Archive | Path, storage_dir: str, report: Report) -> str:
    """Have an archive in the directory of templates `storage_dir` on the host; its name there.

    If it is there, whole, nothing is sent. One that `pack` did not make is looked at first. Raises
    DeployError: no room, an archive that no container could be made of, a link that does not come back.
    """
    if isinstance(archive, Path):
        archive = archive_check.check(archive)
    words = (archive.name, archive.size, archive.sha256)
    long: dict[str, Any] = {"timeout": SILENCE, "progress": report}
    found = onhost.ask(host, "deploy.pct_templates:look", storage_dir, host.name, *words, **long)
    if found["there"]:
        return archive.name
    with tempfile.TemporaryDirectory(prefix="drafthouse-image-") as alone:
        (Path(alone) / archive.name).symlink_to(archive.path.absolute())
        wanted = manifest.read(Path(alone), hashing.common(found["hashes"]), report)
        wanted["source"] = f"{socket.gethostname()}:{archive.path}"
        seeded = onhost.ask(host, "deploy.pct_templates:seed", storage_dir, archive.name, wanted, **long)
        told = f", {size(seeded)} of it as in the image before" if seeded else ""
        report(f"{host.name}: sending the image {archive.name} ({size(archive.size)}{told})")
        sent = sender.send(
            host,
            Path(alone),
            wanted,
            pct_templates.target(storage_dir, archive.name, wanted["digest"]),
            durable=True,
            link=False,
            progress=report,
            meter=on_terminal(report),
        )
    arguments = (storage_dir, archive.name, wanted["digest"], archive.sha256)
    gone = onhost.ask(host, "deploy.pct_templates:put", *arguments, timeout=SILENCE)
    report(f"{host.name}: {archive.name} is there, {size(sent.bytes)} travelled in {sent.seconds:.0f} s")
    for old in gone:
        report(f"{host.name}: {old}, an older image of Drafthouse's, was removed")
    return archive.name
