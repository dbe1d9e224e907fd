"""The layers of an image as the one file system that a container of it sees, written as a tar.

Each layer says what changed over those below it: what is new, and by whiteouts what is gone. A file may have
several names (hard links), also over layers, and the last layer that has a name decides what it means. So
all headers are read first, and then only what is left is written, its content copied from the layers.

See the layer filesystem changeset of the OCI image specification for the rules.
"""

from __future__ import annotations

import contextlib
import posixpath
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from deploy import image_layers
from deploy.errors import DeployError
from deploy.image_layers import Layers
from deploy.manifest import Told

WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
XATTR = "SCHILY.xattr."  # what GNU tar and Docker call an extended attribute in a header
LINKS = 40  # symbolic links that one path may go through, as for the kernel
BLOCK = 1 << 20


@dataclass(eq=False)
class Node:
    """What names lead to: a file, directory, symbolic link or pipe, and where its content lies."""

    layer: Path
    member: tarfile.TarInfo
    data: bytes | None = None  # the content, if it lies in no layer
    children: dict[str, Node] = field(default_factory=dict)  # of a directory

    @property
    def is_directory(self) -> bool:
        return self.member.isdir()


def flatten(image: Layers) -> Node:
    """The root directory of the image. Reads the headers of all layers. Raises DeployError for a bad one."""
    root = _directory("")
    for layer in image.layers:
        # Whiteouts are about the layers below, wherever in the tar they are.
        for member in layer.members:
            _remove(root, _path(member.name))
        for member in layer.members:
            if not image_layers.is_device(member):
                _put(root, layer.path, member)
    for name in ("dev", "proc", "sys"):  # what every container is mounted over; an engine makes them, too
        root.children.setdefault(name, _directory(name))
    return root


def add(root: Node, path: str, data: bytes) -> None:
    """Put a file of ours into the image, readable for everybody."""
    *above, name = _path(path)
    parent = _follow(root, above, make=True)
    assert parent
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), 0o444
    parent.children[name] = Node(Path(), member, data)


def _path(name: str) -> list[str]:
    """The parts of a member's name; nothing leads out of the root."""
    return [part for part in posixpath.normpath(f"/{name}").split("/") if part]


def _directory(name: str) -> Node:
    """A directory that no layer tells of."""
    member = tarfile.TarInfo(name)
    member.type, member.mode = tarfile.DIRTYPE, 0o755
    return Node(Path(), member)


def _remove(root: Node, path: list[str]) -> None:
    """Carry out a whiteout; any other name is none."""
    if not path or not path[-1].startswith(WHITEOUT):
        return
    parent = _follow(root, path[:-1])
    if parent is None or not parent.is_directory:
        return
    if path[-1] == OPAQUE:
        parent.children.clear()
    else:
        parent.children.pop(path[-1].removeprefix(WHITEOUT), None)


def _put(root: Node, layer: Path, member: tarfile.TarInfo) -> None:
    path = _path(member.name)
    if not path:
        root.layer, root.member = layer, member
        return
    if path[-1].startswith(WHITEOUT):
        return
    parent = _follow(root, path[:-1], make=True)
    assert parent
    old = parent.children.get(path[-1])
    if member.islnk():
        node = _follow(root, _path(member.linkname), last=False)
        if node is None or node.is_directory:
            raise DeployError(f"the image's {member.name} is a link to {member.linkname}, which is no file")
    elif old is not None and old.is_directory and member.isdir():
        old.layer, old.member = layer, member
        return
    else:
        node = Node(layer, member)
    # At the end, behind all that a link could lead to.
    parent.children.pop(path[-1], None)
    parent.children[path[-1]] = node


def _follow(root: Node, path: Iterable[str], make: bool = False, last: bool = True) -> Node | None:
    """What a path leads to, through symbolic links inside the root; one at the `last` place only if wanted.

    With `make`, directories on the way that nobody told of are there.
    """
    at, trail, left, links = root, [root], list(path)[::-1], 0
    while left:
        part = left.pop()
        if part == "..":
            trail = trail[:-1] or [root]
            at = trail[-1]
            continue
        found = at.children.get(part) if at.is_directory else None
        if found is not None and found.member.issym() and (left or last):
            links += 1
            if links > LINKS:
                raise DeployError(f"the image's {part} is a symbolic link that leads back to itself")
            target = found.member.linkname
            if target.startswith("/"):
                trail = [root]
                at = root
            left += [one for one in target.split("/") if one not in ("", ".")][::-1]
            continue
        if make and (found is None or not found.is_directory):
            found = at.children[part] = _directory(part)
        if found is None:
            return None
        at = found
        trail.append(at)
    return at


def content(root: Node, path: str) -> bytes | None:
    """What a small file of the image holds; None if there is none."""
    found = _follow(root, _path(path))
    if found is None or not found.member.isreg():
        return None
    if found.data is not None:
        return found.data
    with open(found.layer, "rb") as file:
        return b"".join(_content(file, found.member))


def has_program(root: Node, program: str, search: str) -> bool:
    """Whether a program can be started: one named without a slash is looked for in the PATH `search`."""
    places = [""] if "/" in program else search.split(":")
    found = (_follow(root, _path(f"{place}/{program}")) for place in places)
    return any(one is not None and one.member.isreg() and bool(one.member.mode & 0o111) for one in found)


# -- as a tar ----------------------------------------------------------------------------------------------


def write(root: Node, out: IO[bytes], told: Told) -> None:
    """Write a tar of all of it to `out`. Raises OSError.

    Names begin with ``./``, as those of Proxmox's own templates do. The same image makes the same bytes:
    owners are numbers, and no time of today is in it.
    """
    first: dict[int, str] = {}  # a node's number -> the first of its names
    opened: dict[Path, IO[bytes]] = {}
    with contextlib.ExitStack() as stack:
        for name, node in _walk(root):
            member = _clean(name, node)
            if not node.is_directory:
                other = first.setdefault(id(node), name)
                if other != name:
                    member.type, member.linkname, member.size = tarfile.LNKTYPE, other, 0
                    out.write(_header(member, {}))
                    continue
            out.write(_header(member, _xattrs(node.member)))
            if node.data is not None:
                out.write(node.data + bytes(-member.size % tarfile.BLOCKSIZE))
            elif member.isreg() and member.size:
                if node.layer not in opened:
                    opened[node.layer] = stack.enter_context(open(node.layer, "rb"))
                for block in _content(opened[node.layer], node.member):
                    out.write(block)
                    told.add(len(block))
                out.write(bytes(-member.size % tarfile.BLOCKSIZE))
    out.write(bytes(tarfile.RECORDSIZE))


def size(root: Node) -> int:
    """Bytes of all files, each once."""
    nodes = {id(node): node.member.size for _, node in _walk(root) if node.member.isreg()}
    return sum(nodes.values())


def _walk(root: Node) -> Iterator[tuple[str, Node]]:
    waiting = [("./", root)]
    while waiting:
        name, node = waiting.pop()
        yield name, node
        below = name if name.endswith("/") else f"{name}/"
        waiting += [(below + part, child) for part, child in reversed(node.children.items())]


def _clean(name: str, node: Node) -> tarfile.TarInfo:
    """The header of a node under one of its names: nothing of the layer's own form stays."""
    old = node.member
    member = tarfile.TarInfo(name)
    member.mode, member.uid, member.gid = old.mode & 0o7777, old.uid, old.gid
    member.mtime = int(old.mtime)
    member.type = tarfile.REGTYPE if old.isreg() else old.type
    member.size = old.size if old.isreg() else 0
    member.linkname = old.linkname if old.issym() else ""
    return member


def _xattrs(member: tarfile.TarInfo) -> dict[str, str]:
    return {key: value for key, value in sorted(member.pax_headers.items()) if key.startswith(XATTR)}


def _header(member: tarfile.TarInfo, xattrs: Mapping[str, str]) -> bytes:
    own = member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
    if not xattrs:
        return own
    # By hand, since Python's tarfile marks values that are no text in a way that other programs warn of.
    records = b"".join(_record(key.encode(), _bytes(value)) for key, value in xattrs.items())
    told = tarfile.TarInfo("././@PaxHeader")
    told.type, told.size = tarfile.XHDTYPE, len(records)
    return told.tobuf(tarfile.USTAR_FORMAT) + records + bytes(-len(records) % tarfile.BLOCKSIZE) + own


def _bytes(value: str) -> bytes:
    return value.encode("utf-8", "surrogateescape")


def _record(key: bytes, value: bytes) -> bytes:
    """``LENGTH KEY=VALUE\\n``, whose length counts its own digits."""
    rest = b" " + key + b"=" + value + b"\n"
    length = len(rest) + len(str(len(rest)))
    length = len(rest) + len(str(length))
    return str(length).encode() + rest


def _content(file: IO[bytes], member: tarfile.TarInfo) -> Iterator[bytes]:
    if member.issparse():  # no engine writes these, but they are allowed
        file.seek(0)
        with tarfile.open(fileobj=file, mode="r:", errors="surrogateescape") as archive:
            stream = archive.extractfile(member)
            while stream and (block := stream.read(BLOCK)):
                yield block
        return
    file.seek(member.offset_data)
    left = member.size
    while left:
        block = file.read(min(BLOCK, left))
        if not block:
            raise DeployError(f"a layer of the image ends in the middle of {member.name}; build it again")
        left -= len(block)
        yield block
