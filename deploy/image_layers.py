"""An image as its engine gives it away: the layers as plain tars, and the configuration.

`docker save` of an engine before 25, and of one with Docker's own image store, holds plain layers; one with
containerd's image store hands out what it pulled, compressed. Here all are plain: what a layer is, is said by
the digest of that (its ``diff_id``), so that the same image makes the same archive whatever engine it is of.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from deploy import zstd
from deploy.errors import DeployError

BLOCK = 1 << 20
ZSTD, GZIP = b"\x28\xb5\x2f\xfd", b"\x1f\x8b"


@dataclass(frozen=True)
class Layer:
    """A layer as a plain tar on this machine's disk."""

    path: Path
    diff_id: str  # SHA-256 of it, 64 hex digits


@dataclass(frozen=True)
class Layers:
    """An image: its layers from the bottom up, and its configuration as the engine has it."""

    config: dict[str, Any]
    layers: tuple[Layer, ...]


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
    layers = [
        Layer(directory / name if name == diff_id else _plain(directory, name, diff_id), diff_id)
        for (name, _), diff_id in zip(packed, wanted, strict=True)
    ]
    return Layers(config, tuple(layers))


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
