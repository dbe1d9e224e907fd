"""An image as an OCI archive that Proxmox (from 9.1 on) recognises as one.

The outside is a plain tar with the entries ``oci-layout``, ``index.json`` and ``blobs/sha256/...``: with
another prefix or compression `pct create` takes it for a root file system. The layers inside are compressed;
Proxmox reads tar, tar+gzip and tar+zstd. What stays the same from one image to the next comes first, so that
the next archive begins like this one.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from deploy import zstd
from deploy.image_layers import Layer, Layers
from deploy.manifest import Told

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
LAYER_TYPES = (LAYER, f"{LAYER}+gzip", f"{LAYER}+zstd")
LAYOUT = b'{"imageLayoutVersion":"1.0.0"}'
# Of an image's configuration, what the standard knows and a container's start needs.
KEPT = ("Cmd", "Entrypoint", "Env", "ExposedPorts", "Labels", "StopSignal", "User", "Volumes", "WorkingDir")

Descriptor = dict[str, Any]


def write(image: Layers, start: Mapping[str, Any], target: Path, told: Told) -> None:
    """Write `image` to `target`. `start` is what `deploy.pct_form.image_config` says of it. Raises OSError.

    The same image makes the same bytes. Nothing of a layer is held in memory but a block.
    """
    with open(target, "wb") as out:
        _add(out, "oci-layout", LAYOUT)
        found: dict[str, Descriptor] = {}
        for layer in image.layers:
            if layer.diff_id not in found:  # an empty layer may be there twice
                found[layer.diff_id] = _layer(out, layer, told)
        layers = [found[layer.diff_id] for layer in image.layers]
        config = _blob(out, CONFIG, _json(configuration(image.config, start)))
        made = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers}
        manifest = _blob(out, MANIFEST, _json(made))
        manifest["platform"] = {key: image.config.get(key) for key in ("architecture", "os")}
        index = {"schemaVersion": 2, "manifests": [manifest]}
        _add(out, "index.json", _json(index))
        out.write(bytes(2 * tarfile.BLOCKSIZE))
        out.write(bytes(-out.tell() % tarfile.RECORDSIZE))


def configuration(config: Mapping[str, Any], start: Mapping[str, Any]) -> dict[str, Any]:
    """An engine's configuration of an image as the standard has it. Pure.

    The user is there by numbers, since Proxmox starts init before any name can be looked up, and the signal
    that ends it is always said.
    """
    inner = {key: value for key, value in (config.get("config") or {}).items() if key in KEPT and value}
    inner["StopSignal"] = start["stop_signal"]
    inner["User"] = start["user"]
    found = {key: config[key] for key in ("created", "architecture", "variant", "os") if config.get(key)}
    diff_ids = list(config["rootfs"]["diff_ids"])
    return {**found, "config": inner, "rootfs": {"type": "layers", "diff_ids": diff_ids}}


def _layer(out: IO[bytes], layer: Layer, told: Told) -> Descriptor:
    """Compress a layer straight into the archive: its header, which needs the result, is written after it."""
    start = out.tell()
    out.write(bytes(tarfile.BLOCKSIZE))
    hashed = _Hashed(out)
    with open(layer.path, "rb") as file:
        size = layer.path.stat().st_size
        zstd.compressor().copy_stream(_Counted(file, told), hashed, size=size, read_size=zstd.BLOCK)  # type: ignore[arg-type]
    digest = hashed.digest.hexdigest()
    out.write(bytes(-hashed.count % tarfile.BLOCKSIZE))
    end = out.tell()
    out.seek(start)
    out.write(_header(f"blobs/sha256/{digest}", hashed.count))
    out.seek(end)
    return {"mediaType": f"{LAYER}+zstd", "digest": f"sha256:{digest}", "size": hashed.count}


def _blob(out: IO[bytes], kind: str, data: bytes) -> Descriptor:
    digest = hashlib.sha256(data).hexdigest()
    _add(out, f"blobs/sha256/{digest}", data)
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}


def _add(out: IO[bytes], name: str, data: bytes) -> None:
    out.write(_header(name, len(data)) + data + bytes(-len(data) % tarfile.BLOCKSIZE))


def _header(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf(tarfile.GNU_FORMAT)


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


class _Hashed:
    """Writes to a file, counts and hashes."""

    def __init__(self, out: IO[bytes]) -> None:
        self.out, self.digest, self.count = out, hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.count += len(data)
        return self.out.write(data)


class _Counted:
    """Reads a file and tells how far that is."""

    def __init__(self, file: IO[bytes], told: Told) -> None:
        self.file, self.told = file, told

    def read(self, count: int = -1) -> bytes:
        block = self.file.read(count)
        self.told.add(len(block))
        return block
