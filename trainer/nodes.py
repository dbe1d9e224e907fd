"""One machine of a run on several: what it must have in common with the others, and by which network.

Standard library only; Linux.
"""

from __future__ import annotations

import array
import dataclasses
import fcntl
import hashlib
import importlib.metadata
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.data_meta import known_meta
from trainer.errors import InputError
from trainer.link import Node, split
from trainer.modeldir import target_digest

if TYPE_CHECKING:
    from trainer.config import Settings

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # where torch.distributed is told of one
# What may differ from node to node: it is the machine's own, or only node 0 needs it.
_OWN = ("node", "rendezvous", "interface", "run_dir", "output_dir", "cache_dir", "target_model", "data_dir",
        "eval_file", "threads", "wandb_project", "wandb_run_name")  # fmt: skip
_PACKAGES = ("torch", "transformers")
_SIOCGIFCONF = 0x8912
_REQUEST = 40  # bytes of a struct ifreq on 64-bit Linux


@dataclass(frozen=True)
class Meeting:
    """How this node finds the others."""

    own: Node
    address: str  # HOST:PORT
    environment: Mapping[str, str]  # for the ranks

    @property
    def store(self) -> str:
        """torch.distributed's init_method."""
        return f"tcp://{self.address}"


def meeting(settings: Settings, environment: Mapping[str, str] = os.environ, wrong: int = 0) -> Meeting:
    """`wrong`: the exit code of a check that says that this node cannot start; the others are to hear of it.

    Raises InputError for an interface or an address that is not here.
    """
    assert settings.rendezvous
    found = {name: "" for name in INTERFACES if not environment.get(name)}
    if found or settings.interface:
        chosen = settings.interface or leading_to(settings.rendezvous)
        if chosen not in (names := [name for _, name in socket.if_nameindex()]):
            raise InputError(f"--interface {chosen}: there is none here; there are {', '.join(names)}")
        found = dict.fromkeys(found, chosen)
    known = {} if wrong else facts(settings)
    own = Node(settings.node, settings.nodes, socket.gethostname(), known, wrong=wrong)
    return Meeting(own, settings.rendezvous, found)


def facts(settings: Settings) -> dict[str, str]:
    """What must be the same on all nodes: name for people -> value."""
    found = {"the trainer's code": _code_digest()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "missing"
    for field in dataclasses.fields(settings):
        if field.name not in _OWN:
            value = getattr(settings, field.name)
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            found["--" + field.name.replace("_", "-")] = text
    assert settings.data_dir
    found["a target of digest"] = target_digest(settings.target_model)
    meta = repr(sorted(known_meta(settings.data_dir).items()))
    found["data of digest"] = hashlib.sha256(meta.encode()).hexdigest()[:16]
    return found


def leading_to(address: str) -> str:
    """The interface from which HOST:PORT is reached. Raises InputError."""
    host, port = split(address)
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing
            own = probe.getsockname()[0].split("%")[0]
    except OSError as error:
        raise InputError(
            f"--rendezvous {address}: it cannot be reached from here ({error.strerror}); "
            "give an address of node 0"
        ) from None
    for name, known in _addresses():
        if known == ipaddress.ip_address(own):
            return name
    raise InputError(
        f"--rendezvous {address}: no interface here has {own}, from which it is reached; "
        "name one with --interface"
    )


def _addresses() -> list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """(interface, address) of this machine."""
    found: list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]] = []
    room = array.array("B", bytes(_REQUEST * 256))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        told = fcntl.ioctl(asking, _SIOCGIFCONF, struct.pack("iL", len(room), room.buffer_info()[0]))
    size = struct.unpack("iL", told)[0]
    data = room.tobytes()
    for start in range(0, size, _REQUEST):
        name = data[start : start + 16].split(b"\0")[0].decode().split(":")[0]  # eth0:1 is a label of eth0
        found.append((name, ipaddress.IPv4Address(data[start + 20 : start + 24])))
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    found += [(line.split()[5], ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))) for line in lines]
    return found


def _code_digest() -> str:
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
