"""An image as its engine gives it away: the layers as plain tars, and the configuration.

`docker save` of an engine before 25, and of one with Docker's own image store, holds plain layers; one with
containerd's image store hands out what it pulled, compressed. Here all are plain: what a layer is, is said by
the digest of that (its ``diff_id``), so that the same image makes the same archive whatever engine it is of.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from deploy import zstd
from deploy.errors import DeployError

Member = tarfile.TarInfo
BLOCK = 1 << 20
ZSTD, GZIP = b"\x28\xb5\x2f\xfd", b"\x1f\x8b"


@dataclass(frozen=True)
class Layer:
    """A layer as a plain tar on this machine's disk."""

    path: Path
    diff_id: str  # SHA-256 of it, 64 hex digits
    members: tuple[Member, ...] = field(compare=False, repr=False)  # all its headers


@dataclass(frozen=True)
class Layers:
    """An image: its layers from the bottom up, and its configuration as the engine has it."""

    config: dict[str, Any]
    layers: tuple[Layer, ...]


def is_device(member: Member) -> bool:
    """Whether it is a device node: no container needs one, since it has a /dev of its own, and who unpacks
    an unprivileged one may make none."""
    return member.ischr() or member.isblk()


def without_devices(image: Layers, place: Path) -> Layers:
    """The image without device nodes. Layers that have some are written anew into the directory `place`."""
    layers = [_without_devices(one, place) for one in image.layers]
    diff_ids = [f"sha256:{layer.diff_id}" for layer in layers]
    config = {**image.config, "rootfs": {**image.config["rootfs"], "diff_ids": diff_ids}}
    return Layers(config, tuple(layers))


def _without_devices(layer: Layer, place: Path) -> Layer:
    """A layer without device nodes; what stays of it is byte by byte as it was."""
    if not any(is_device(member) for member in layer.members):
        return layer
    digest, path = hashlib.sha256(), place / f"{layer.diff_id}.layer"
    ends = [*(member.offset for member in layer.members[1:]), layer.path.stat().st_size]
    with open(layer.path, "rb") as file, open(path, "wb") as out:
        for member, end in zip(layer.members, ends, strict=True):
            file.seek(member.offset)
            left = 0 if is_device(member) else end - member.offset
            while left and (block := file.read(min(BLOCK, left))):
                left -= len(block)
                digest.update(block)
                out.write(block)
        if is_device(layer.members[-1]):
            end_of_tar = bytes(2 * tarfile.BLOCKSIZE)
            digest.update(end_of_tar)
            out.write(end_of_tar)
    kept = tuple(member for member in layer.members if not is_device(member))
    return Layer(path, digest.hexdigest(), kept)


def read(directory: Path, blobs: Sequence[tuple[str, int]]) -> Layers:
    """The image whose layers from the bottom up, then configuration, `deploy.shipping.export` has put there.

    A compressed layer is unpacked beside it. Raises DeployError if the configuration does not fit the layers.
    """
    *packed, (last, _) = blobs
    try:
        config = json.loads((directory / last).read_bytes())
        wanted = [str(one).removeprefix("sha256:") for one in config["rootfs"]["diff_ids"]]
    except (ValueError, KeyError, TypeError):
        raise DeployError("the image's configuration has no rootfs.diff_ids; build it again") from None
    if len(wanted) != len(packed):
        raise DeployError(
            f"the image has {len(packed)} layers, but its configuration tells of {len(wanted)}; "
            "build it again"
        )
    found: dict[str, Layer] = {}  # an empty layer may be there several times
    for (name, _), diff_id in zip(packed, wanted, strict=True):
        if diff_id not in found:
            path = directory / name if name == diff_id else _plain(directory, name, diff_id)
            found[diff_id] = layer(path, diff_id)
    return Layers(config, tuple(found[diff_id] for diff_id in wanted))


def layer(path: Path, diff_id: str) -> Layer:
    """A layer with its headers. Raises DeployError if it is no tar."""
    try:
        with tarfile.open(path, "r:", encoding="utf-8", errors="surrogateescape") as archive:
            return Layer(path, diff_id, tuple(archive.getmembers()))
    except tarfile.TarError as error:
        raise DeployError(f"layer {diff_id[:12]} of the image is no tar ({error})") from None


def _plain(directory: Path, name: str, diff_id: str) -> Path:
    """The layer `name` unpacked, as a file called by its diff_id."""
    final, temporary = directory / diff_id, directory / f"{diff_id}.partial"
    if final.exists():
        return final
    digest = hashlib.sha256()
    try:
        with open(directory / name, "rb") as file, opened(file) as stream, open(temporary, "wb") as out:
            while block := stream.read(BLOCK):
                digest.update(block)
                out.write(block)
    except (gzip.BadGzipFile, EOFError, zlib.error, zstd.errors()) as error:
        raise DeployError(f"layer {name[:12]} of the image cannot be unpacked ({error})") from None
    if digest.hexdigest() != diff_id:
        temporary.unlink()
        raise DeployError(
            f"layer {name[:12]} of the image is not what its configuration says; build it again"
        )
    temporary.rename(final)
    return final


def opened(file: IO[bytes]) -> IO[bytes]:
    """A layer as a plain tar, from where `file` stands, whichever way it is compressed."""
    here = file.tell()
    start = file.read(4)
    file.seek(here)
    if start.startswith(GZIP):
        return gzip.open(file)  # type: ignore[return-value]
    if start == ZSTD:
        return zstd.reader(file)
    return file
