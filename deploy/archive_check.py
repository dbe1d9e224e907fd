"""Whether an archive is what a Proxmox host takes, seen here before it travels: it would be told there late,
by a container that is half made.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from deploy import image_layers, oci_archive, pct_form, zstd
from deploy.errors import DeployError
from deploy.pct_form import INSIDE, NAME, PATH, SUFFIX, Archive

XZ = b"\xfd7zXZ"
COMPRESSED = {image_layers.GZIP: "gzip", image_layers.ZSTD: "zstd", XZ: "xz", b"BZh": "bzip2"}
OF_THE_NEXT = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE)  # told of the next header
SMALL = 16 << 20  # bytes: more than any index, manifest or configuration has


class Wrong(Exception):
    """What is wrong with an archive, as the end of a sentence."""


def check(path: Path) -> Archive:
    """Look at all of an archive: every entry, every digest, and whether there is something to start.

    Its form is known by the end of its name. Raises DeployError, one sentence that says what is wrong.
    """
    try:
        if path.name.endswith(SUFFIX["template"]):
            start, form = _template(path), "template"
        elif path.name.endswith(SUFFIX["oci"]):
            start, form = _oci(path), "oci"
        else:
            raise Wrong("must end in .tar (an OCI archive) or .tar.zst (a template)")
        digest = pct_form.sha256(path)
        named = NAME.fullmatch(path.name)
        if named and named[1] != digest[:12]:
            raise Wrong(f"is damaged: its content has the digest {digest[:12]}, not that of its name")
        return Archive(path, form, path.stat().st_size, digest, start)  # type: ignore[arg-type]
    except Wrong as error:
        raise DeployError(f"{path} {error}; fab image.build --for pct makes it anew") from None
    except OSError as error:
        raise DeployError(f"{path} cannot be read: {error.strerror}") from None


# -- OCI ---------------------------------------------------------------------------------------------------


def _oci(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        _plain(file)
        try:
            with tarfile.open(fileobj=file, mode="r:") as archive:
                return _entries(archive, file)
        except tarfile.TarError:
            raise Wrong("is no tar, or ends early") from None


def _plain(file: IO[bytes]) -> None:
    begin = file.read(8)
    file.seek(0)
    for magic, name in COMPRESSED.items():
        if begin.startswith(magic):
            raise Wrong(f"is compressed with {name}, but Proxmox knows an OCI archive only as a plain tar")


def _entries(archive: tarfile.TarFile, file: IO[bytes]) -> dict[str, Any]:
    members = archive.getmembers()
    end = archive.offset
    file.seek(end)
    if not members or len(file.read(tarfile.BLOCKSIZE)) < tarfile.BLOCKSIZE:
        raise Wrong("ends early" if members else "is empty")
    found = {member.name: member for member in members if member.isreg()}
    for member in members:
        name = member.name
        if name.startswith(("./", "/")) and name != "./":
            raise Wrong(
                f"has an entry {name[:80]}, but Proxmox wants the names without {name[: name.find('/') + 1]}"
            )
        known = name in ("oci-layout", "index.json", "blobs", "blobs/sha256") or name.startswith(
            "blobs/sha256/"
        )
        if not known:
            raise Wrong(f"has an entry {name[:80]}, which no OCI archive has")
    for name in ("oci-layout", "index.json"):
        if name not in found:
            raise Wrong(f"has no entry {name}, so Proxmox would take it for a root file system")

    def blob(descriptor: Any, kinds: tuple[str, ...], what: str) -> tarfile.TarInfo:
        try:
            digest, kind, size = descriptor["digest"], descriptor["mediaType"], descriptor["size"]
        except (TypeError, KeyError):
            raise Wrong(f"does not say which blob its {what} is") from None
        member = found.get(f"blobs/{str(digest).replace(':', '/', 1)}")
        if kind not in kinds:
            raise Wrong(f"has a {what} of the kind {str(kind)[:80]}, which Proxmox does not read")
        if member is None:
            raise Wrong(f"lacks the blob {str(digest)[:19]} of its {what}")
        if member.size != size or f"sha256:{_digest(file, member)}" != digest:
            raise Wrong(f"has a damaged {what}: blob {str(digest)[:19]} is not what its digest says")
        return member

    def read(member: tarfile.TarInfo) -> Any:
        if member.size > SMALL:
            raise Wrong(f"has {member.name[:80]} with {member.size:,} bytes, which is too long to be one")
        file.seek(member.offset_data)
        try:
            return json.loads(file.read(member.size))
        except ValueError:
            raise Wrong(f"has {member.name[:80]} that is no JSON") from None

    try:
        one = read(found["index.json"])["manifests"][0]
        manifest = read(blob(one, (oci_archive.MANIFEST,), "manifest"))
        config = read(blob(manifest["config"], (oci_archive.CONFIG,), "configuration"))
        layers = [blob(layer, oci_archive.LAYER_TYPES, "layer") for layer in manifest["layers"]]
        start, told = pct_form.image_config(config), config["rootfs"]["diff_ids"]
    except (KeyError, TypeError, IndexError, AttributeError):
        raise Wrong("has an index, manifest or configuration that tells of no image") from None
    if len(told) != len(layers):
        raise Wrong(f"has {len(layers)} layers, but its configuration tells of {len(told)}")
    if not start["entrypoint"] and not any(_has_init(file, layer) for layer in layers):
        raise Wrong("has neither an entrypoint nor /sbin/init, so nothing could be a container's init")
    return start


def _digest(file: IO[bytes], member: tarfile.TarInfo) -> str:
    digest, left = hashlib.sha256(), member.size
    file.seek(member.offset_data)
    while left and (block := file.read(min(left, pct_form.BLOCK))):
        digest.update(block)
        left -= len(block)
    return digest.hexdigest()


def _has_init(file: IO[bytes], layer: tarfile.TarInfo) -> bool:
    file.seek(layer.offset_data)
    try:
        with tarfile.open(fileobj=image_layers.opened(file), mode="r|") as archive:
            return any(member.name.removeprefix("./") in ("sbin/init", "usr/sbin/init") for member in archive)
    except (tarfile.TarError, OSError, EOFError, zstd.errors()):
        raise Wrong("has a layer that cannot be unpacked") from None


# -- template ----------------------------------------------------------------------------------------------


def _template(path: Path) -> dict[str, Any]:
    programs: set[str] = set()
    start: dict[str, Any] | None = None
    with open(path, "rb") as file:
        if file.read(4) != image_layers.ZSTD:
            raise Wrong("is not compressed with zstd, as its name says")
        file.seek(0)
        try:
            stream = zstd.reader(file)
            for member in _headers(stream):
                if member.name != "." and not member.name.startswith("./"):
                    raise Wrong(f"has an entry {member.name[:80]}, but each must begin with ./")
                if member.name == f"./{INSIDE}":
                    start = json.loads(_take(stream, min(member.size, SMALL)))
                    member.size = 0
                elif member.mode & 0o111 and not member.isdir():
                    programs.add(member.name.removeprefix("."))
            while stream.read(pct_form.BLOCK):  # to the end: its checksum is there
                pass
        except tarfile.TarError:
            raise Wrong("holds no tar, or ends early") from None
        except zstd.errors():
            raise Wrong("is damaged: it cannot be unpacked") from None
        except ValueError:
            raise Wrong(f"has a damaged /{INSIDE}") from None
    if start is None and "/sbin/init" not in programs and "/usr/sbin/init" not in programs:
        raise Wrong(f"has neither /sbin/init nor /{INSIDE}, so nothing could be a container's init")
    if start is not None:
        try:
            pct_form.check_start(start, lambda program, search: _is_there(program, search, programs))
        except DeployError as error:
            raise Wrong(f"cannot be started: {error}") from None
        except (KeyError, TypeError):
            raise Wrong(f"has a damaged /{INSIDE}") from None
    return start or pct_form.image_config({"config": {"Entrypoint": ["/sbin/init"], "Env": [f"PATH={PATH}"]}})


def _headers(stream: IO[bytes]) -> Iterator[tarfile.TarInfo]:
    """Each header of a tar that is read once, over its content, of which who asks may have read `size` less.

    Python's own way through a stream takes three times as long.
    """
    long: bytes | None = None
    while any(block := _take(stream, tarfile.BLOCKSIZE)):
        member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        size = member.size if member.type in (*tarfile.REGULAR_TYPES, *OF_THE_NEXT) else 0
        padding = -size % tarfile.BLOCKSIZE
        if member.type == tarfile.GNUTYPE_LONGNAME:
            long = _take(stream, size).rstrip(b"\0")
            size = 0
        elif member.type not in OF_THE_NEXT:
            if long is not None:
                member.name, long = long.decode("utf-8", "surrogateescape"), None
            member.size = size
            yield member
            size = member.size
        left = size + padding
        while left:
            left -= len(_take(stream, min(left, pct_form.BLOCK)))


def _take(stream: IO[bytes], count: int) -> bytes:
    data = stream.read(count)
    while len(data) < count:
        more = stream.read(count - len(data))
        if not more:
            raise tarfile.ReadError("unexpected end of data")
        data += more
    return data


def _is_there(program: str, search: str, programs: set[str]) -> bool:
    names = [program] if "/" in program else [f"{place}/{program}" for place in search.split(":")]
    # /bin and /sbin are links into /usr on today's systems.
    return any(name in programs or f"/usr{name}" in programs for name in names)
