"""`pct:` of a host in fabric.yaml: the containers that a deploy makes there. A part of `deploy.settings`."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from deploy import sizes


class PctSettings(BaseModel):
    """What fabric.yaml may say of them. Names of storages and bridges are Proxmox's."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    template_storage: str = "local"  # where templates lie: one with the content vztmpl
    storage: str | None = None  # where root file systems lie; default: the first one with the content rootdir
    rootfs: str = "24g"  # the size of a container's root
    bridge: str | None = None  # the network: a bridge of the host; default: none
    ip: str = "dhcp"  # on that bridge: dhcp, or an address like 10.0.0.5/24
    gateway: str | None = None
    net0: str | None = None  # instead of these three: as Proxmox has it
    unprivileged: bool = True
    cores: int | None = Field(default=None, ge=1, le=8192)
    memory: str | None = None  # default: computed; memory: of the run's file wins
    swap: str = "0"
    nesting: bool = False  # for Docker inside
    order: int | None = Field(default=None, ge=0, le=100000)  # among the guests, when the host goes down
    vmid: str | None = None  # a range like 900-949 that ids are taken from; default: the cluster's next one

    @field_validator("template_storage", "storage")
    @classmethod
    def _storage(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]*[A-Za-z0-9]", value):
            raise ValueError("but must be the name of a storage, like local (pvesm status lists them)")
        return value

    @field_validator("rootfs", "memory", "swap", mode="before")
    @classmethod
    def _size(cls, value: Any) -> Any:
        text = "" if isinstance(value, bool) else str(value)
        if value is not None and text != "0" and sizes.parse(text) is None:
            raise ValueError("but must be a size, like 512m or 24g")
        return None if value is None else text

    @field_validator("ip")
    @classmethod
    def _ip(cls, value: str) -> str:
        with contextlib.suppress(ValueError):
            if value == "dhcp" or (re.search(r"/\d\d?$", value) and ipaddress.IPv4Interface(value)):
                return value
        raise ValueError("but must be an address of version 4 with its network, like 10.0.0.5/24, or dhcp")

    @field_validator("gateway")
    @classmethod
    def _gateway(cls, value: str | None) -> str | None:
        with contextlib.suppress(ValueError):
            if value is None or ipaddress.IPv4Address(value):
                return value
        raise ValueError("but must be an address of version 4 without a network, like 10.0.0.1")

    @field_validator("bridge")
    @classmethod
    def _bridge(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]{0,14}", value):
            raise ValueError("but must be the name of a bridge, like vmbr0")
        return value

    @field_validator("net0")
    @classmethod
    def _net0(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"name=(?=.*,bridge=[^,])[!-~]+", value):
            raise ValueError("but must be what Proxmox has as net0, like name=eth0,bridge=vmbr0,ip=dhcp")
        return value

    @field_validator("vmid", mode="before")
    @classmethod
    def _vmid(cls, value: Any) -> Any:
        if value is None:
            return None
        text = f"{value}-{value}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
        found = re.fullmatch(r"(\d{3,9})-(\d{3,9})", text)
        if not found or not 100 <= int(found[1]) <= int(found[2]):
            raise ValueError("but must be a range of ids from 100 on, like 900-949")
        return text

    @model_validator(mode="after")
    def _one_network(self) -> Self:
        if self.net0 is not None and self.bridge is not None:
            raise ValueError("has both bridge and net0, which are the same; keep one")
        return self

    @property
    def range(self) -> tuple[int, int] | None:
        """The ids that may be taken; None: Proxmox says which."""
        if self.vmid is None:
            return None
        first, _, last = self.vmid.partition("-")
        return int(first), int(last)
