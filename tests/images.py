"""Small images as engines give them away, for tests of what is made of them."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Entry = tuple[str, Any]  # name, and content or (type, mode, ...) as `layer` has them

CONFIG = {
    "User": "trainer",
    "Env": ["PATH=/opt/bin:/bin", "COLOUR=blue green"],
    "Entrypoint": ["tini", "--"],
    "Cmd": ["run me", "--help"],
    "WorkingDir": "/work",
    "Labels": {"a": "b"},
}
PASSWD = b"root:x:0:0::/root:/bin/sh\ntrainer:x:10001:10002::/work:/bin/sh\n"


def layer(*entries: tarfile.TarInfo | tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    """A layer with these members."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w", format=form) as archive:
        for one in entries:
            member, data = one if isinstance(one, tuple) else (one, b"")
            archive.addfile(member, io.BytesIO(data))
    return whole.getvalue()


def file(name: str, data: bytes = b"", mode: int = 0o644, **more: Any) -> tuple[tarfile.TarInfo, bytes]:
    member = _member(name, tarfile.REGTYPE, mode, **more)
    member.size = len(data)
    return member, data


def directory(name: str, mode: int = 0o755, **more: Any) -> tarfile.TarInfo:
    return _member(name, tarfile.DIRTYPE, mode, **more)


def symlink(name: str, target: str) -> tarfile.TarInfo:
    return _member(name, tarfile.SYMTYPE, 0o777, linkname=target)


def link(name: str, target: str) -> tarfile.TarInfo:
    return _member(name, tarfile.LNKTYPE, 0o644, linkname=target)


def device(name: str, major: int, minor: int) -> tarfile.TarInfo:
    return _member(name, tarfile.CHRTYPE, 0o666, devmajor=major, devminor=minor)


def _member(name: str, kind: bytes, mode: int, **more: Any) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.mtime = kind, mode, 1_700_000_000
    for key, value in more.items():
        setattr(member, key, value)
    return member


def configuration(layers: Sequence[bytes], config: Mapping[str, Any] = CONFIG) -> bytes:
    digests = [f"sha256:{digest(one)}" for one in layers]
    value = {
        "architecture": "amd64",
        "os": "linux",
        "created": "2026-01-02T03:04:05Z",
        "docker_version": "20.10",
        "config": dict(config),
        "rootfs": {"type": "layers", "diff_ids": digests},
    }
    return json.dumps(value).encode()


def old_engine(layers: Sequence[bytes], config: Mapping[str, Any] = CONFIG) -> bytes:
    """`docker save` of an engine before 25."""
    members = [(f"{number:064x}/layer.tar", data) for number, data in enumerate(layers)]
    described = [("abc.json", configuration(layers, config))]
    return _saved(members, described, "abc.json")


def new_engine(
    layers: Sequence[bytes],
    config: Mapping[str, Any] = CONFIG,
    packed: Callable[[bytes], bytes] = lambda data: data,
) -> bytes:
    """`docker save` of an engine from 25 on; with containerd's image store the layers are `packed`."""
    blobs = [packed(one) for one in layers]
    made = configuration(layers, config)
    members = [(f"blobs/sha256/{digest(data)}", data) for data in blobs]
    own = f"blobs/sha256/{digest(made)}"
    return _saved(members, [(own, made), ("oci-layout", b"{}"), ("index.json", b"{}")], own)


def gzipped(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def _saved(members: list[tuple[str, bytes]], others: list[tuple[str, bytes]], config: str) -> bytes:
    manifest = [{"Config": config, "RepoTags": ["x:1"], "Layers": [name for name, _ in members]}]
    described = ("manifest.json", json.dumps(manifest).encode())
    return tar([*dict(members).items(), *others, described])


def tar(members: Sequence[tuple[str, bytes]]) -> bytes:
    return layer(*(file(name, data) for name, data in members), form=tarfile.GNU_FORMAT)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Engine:
    """A `docker` that has one image: what a test says that `docker save` gives."""

    def __init__(self, place: Path, monkeypatch: Any) -> None:
        self.output, programs = place / "saved.tar", place / "bin"
        programs.mkdir()
        docker = programs / "docker"
        docker.write_text(
            f'#!/bin/sh\nif [ "$1" = image ]; then sha256sum <{self.output} | sed s/^/sha256:/; exit; fi\n'
            f"echo save >>{place}/asked\ncat {self.output}\n"
        )
        docker.chmod(0o755)
        self.asked = place / "asked"
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))

    def has(self, archive: bytes) -> None:
        self.output.write_bytes(archive)
