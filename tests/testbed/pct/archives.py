"""Small templates: what `pct create` unpacks, in both forms, with a shell, tini and little else (7 MB)."""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..place import run
from . import rootfs

PROGRAMS = [
    "dash",
    "sh",
    "cat",
    "chmod",
    "env",
    "id",
    "ls",
    "mkdir",
    "mv",
    "ps",
    "rm",
    "sleep",
    "stat",
    "tini",
    "touch",
    "mount",
    "uname",
]
FILES = ("etc/os-release", "usr/lib/os-release", "etc/passwd", "etc/group", "etc/hostname", "etc/machine-id")
LINKS = ("bin", "sbin", "lib", "lib64")
EMPTY = ("dev", "proc", "sys", "run", "tmp", "root", "var", "mnt")
INIT = ["/usr/bin/tini", "--", "sleep", "1000000"]


@functools.cache
def _root() -> bytes:
    """The files as an uncompressed tar with names that begin with ./ as Proxmox's own templates have them."""
    top = rootfs.provide()
    programs = [f"usr/bin/{name}" for name in PROGRAMS]
    real = [f"/{program}" for program in programs if not (top / program).is_symlink()]
    libraries = sorted(set(re.findall(r"/\S+\.so\S*", run(["chroot", top, "ldd", *real]).stdout)))
    behind = run(["chroot", top, "readlink", "-f", *libraries]).stdout.split()
    libraries = sorted({f"usr/{name.lstrip('/').removeprefix('usr/')}" for name in [*libraries, *behind]})
    names = [*LINKS, *programs, *libraries, *FILES]
    empty = [f"./{name}" for name in EMPTY]
    flags = ["--numeric-owner", "--no-recursion", "-C", str(top), "-cf", "-"]
    command = [
        "tar",
        *flags,
        *empty,
        *(f"./{name}" for name in names if os.path.lexists(top / name)),
    ]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout


def root_tarball(path: Path, *, files: Sequence[tarfile.TarInfo] = ()) -> Path:
    """A root file system's template; `path` ends in .tar.zst, .tar.gz or .tar. `files` are added, empty.

    /sbin/init starts tini.
    """
    data = io.BytesIO(_root())
    with tarfile.open(fileobj=data, mode="a") as archive:
        script = b"#!/bin/sh\nexec /usr/bin/tini -s -- sleep 1000000\n"
        entry = tarfile.TarInfo("./usr/sbin/init")
        entry.size, entry.mode = len(script), 0o755
        archive.addfile(entry, io.BytesIO(script))
        for file in files:
            archive.addfile(file)
    how = {".zst": ["zstd", "-q", "-1", "-c"], ".gz": ["gzip", "-1", "-c"]}.get(path.suffix, ["cat"])
    with open(path, "wb") as target:
        subprocess.run(how, input=data.getvalue(), stdout=target, check=True)
    return path


def oci_archive(path: Path, config: dict[str, Any] | None = None, *, prefix: str = "") -> Path:
    """An OCI archive; `config` is what an image says of how it is run. `prefix` spoils the names."""
    layer = gzip.compress(_root(), 1, mtime=0)
    blobs: dict[str, bytes] = {}

    def blob(data: bytes, kind: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = data
        media = f"application/vnd.oci.image.{kind}"
        return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(data)}

    said = {"Entrypoint": INIT[:2], "Cmd": INIT[2:], "Env": ["PATH=/usr/bin:/bin", "PYTHONUNBUFFERED=1"]}
    image = {
        "architecture": "amd64",
        "os": "linux",
        "config": {**said, **(config or {})},
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(_root()).hexdigest()]},
    }
    manifest = {
        "schemaVersion": 2,
        "config": blob(json.dumps(image).encode(), "config.v1+json"),
        "layers": [blob(layer, "layer.v1.tar+gzip")],
    }
    index = {"schemaVersion": 2, "manifests": [blob(json.dumps(manifest).encode(), "manifest.v1+json")]}
    files = {
        "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
        "index.json": json.dumps(index).encode(),
        **blobs,
    }
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(prefix + name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return path
