"""Values such as "/data,mp=/x,ro=1", and the keys of a container's configuration with their types."""

from __future__ import annotations

import re
from collections.abc import Mapping

from .errors import Died
from .options import FALSE, FLAG, TEXT, TRUE, Option, wrong
from .world import World

MANY = 256  # mp0…, dev0…, unused0… (LXC/Config.pm: $MAX_MOUNT_POINTS)
NETS = 32

Format = Mapping[str, Option]


def parse(form: Format, text: str, default: str = "") -> dict[str, str]:
    """JSONSchema.pm parse_property_string: the parts by name; `default` names the one that needs no name."""
    found: dict[str, str] = {}
    for part in text.split(","):
        if not part.strip():
            continue
        key, equals, value = part.partition("=")
        if not equals:
            if not default:
                raise Died("value without key, but schema does not define a default key")
            if default in found:
                raise Died(f"duplicate key in comma-separated list property: {default}")
            found[default] = part
            continue
        if not key or not value:
            raise Died("missing key in comma-separated list property")
        if key in found:
            raise Died(f"duplicate key in comma-separated list property: {key}")
        if key not in form:
            raise Died(f"invalid key in comma-separated list property: {key}")
        if form[key].type == "boolean":
            value = "1" if TRUE.match(value) else "0" if FALSE.match(value) else value
        found[key] = value
    errors = [f"{k}: {said}" for k, value in found.items() if (said := _wrong(form[k], value))]
    errors += [
        f"{k}: property is missing and it is not optional"
        for k, option in form.items()
        if option.required and k not in found
    ]
    if errors:
        raise Died("format error\n" + "\n".join(errors))
    return found


def _wrong(option: Option, value: str) -> str | None:
    if option.type == "boolean" and value not in ("0", "1"):
        return f"type check ('boolean') failed - got '{value}'"
    return wrong(option, value)


def _path(value: str) -> None:  # LXC/Config.pm verify_lxc_mp_string
    if re.search(r"/\.\.?/|/\.\.?$|^\.\./", value):
        raise Died(f"{value} contains illegal character sequences")


def _device(value: str) -> None:  # LXC/Config.pm verify_lxc_dev_string
    if re.search(r"/\.\.?(?:/|$)", value) or not value.startswith("/dev/"):
        raise Died(f"{value} is not a valid device path")


def _ipv4(value: str) -> None:
    if value in ("dhcp", "manual"):
        return
    import ipaddress

    try:
        ipaddress.IPv4Interface(value)
        if "/" not in value:
            raise ValueError
    except ValueError:
        raise Died("value does not look like a valid ipv4 network configuration") from None


def _address(value: str) -> None:
    import ipaddress

    try:
        ipaddress.ip_address(value)
    except ValueError:
        raise Died("value does not look like a valid IP address") from None


def _addresses(value: str) -> None:
    for word in re.split(r"[\s,;]+", value):
        _address(word)


def _dns_name(value: str) -> None:
    label = r"[a-zA-Z0-9]([a-zA-Z0-9\-]*[a-zA-Z0-9])?"
    if not re.fullmatch(rf"({label}\.)*{label}", value):
        raise Died("value does not look like a valid DNS name")


def _volume(value: str) -> None:
    if not re.match(r"[a-zA-Z][a-zA-Z0-9\-_.]*[a-zA-Z0-9]:.+", value):
        raise Died(f"unable to parse volume ID '{value}'")


def _startup(value: str) -> None:  # pve-startup-order
    for part in value.split(","):
        if not re.fullmatch(r"(order=)?\d+|(up|down)=\d+", part):
            raise Died("value does not look like a valid startup order")


def _tags(value: str) -> None:
    for tag in re.split(r"[\s,;]+", value):
        if tag and not re.fullmatch(r"[a-zA-Z0-9_][a-zA-Z0-9_\-+.]*", tag):
            raise Died("value does not look like a valid tag")


class Formats:
    """Every key that a container's configuration may have in this release (LXC/Config.pm $confdesc)."""

    def __init__(self, world: World) -> None:
        mount = {
            "volume": Option(check=_path, required=True),
            "size": Option(pattern=r"\d+(\.\d+)?[KMGT]?"),
            "acl": FLAG,
            "mountoptions": Option(
                pattern=r"(discard|lazytime|noatime|nodev|noexec|nosuid)"
                r"(;(discard|lazytime|noatime|nodev|noexec|nosuid))*"
            ),
            "ro": FLAG,
            "quota": FLAG,
            "replicate": FLAG,
            "shared": FLAG,
        }
        if world.has("6.1.6"):
            rule = r"[ug]:\d+:\d+:[1-9]\d*"
            mount["idmap"] = Option(pattern=rf"passthrough|{rule}(;{rule})*")
        self.rootfs: Format = mount
        self.mount: Format = {**mount, "backup": FLAG, "mp": Option(check=_path, required=True)}
        if world.has("6.0.19"):
            self.mount = {**self.mount, "keepattrs": FLAG}
        device = {
            "path": Option(check=_device),
            "mode": Option(pattern=r"0[0-7]{3}"),
            "uid": Option("integer", 0),
            "gid": Option("integer", 0),
        }
        self.device: Format = {**device, "deny-write": FLAG} if world.has("5.2.0") else device
        net = {
            "type": Option(enum=("veth",)),
            "name": Option(pattern=r"[-_.\w]+", required=True),
            "bridge": Option(pattern=r"[-_.\w]+"),
            "hwaddr": Option(pattern=r"[0-9A-Fa-f][02468ACEace](:[0-9A-Fa-f]{2}){5}"),
            "mtu": Option("integer", 64, 65535),
            "ip": Option(check=_ipv4),
            "gw": Option(check=_address),
            "ip6": TEXT,
            "gw6": Option(check=_address),
            "firewall": FLAG,
            "tag": Option("integer", 1, 4094),
            "trunks": Option(pattern=r"\d+(;\d+)*"),
            "rate": Option("number"),
            "link_down": FLAG,
        }
        self.net: Format = {**net, "host-managed": FLAG} if world.has("6.0.15") else net
        self.features: Format = {
            "mount": Option(pattern=r"[a-zA-Z0-9_; ]+"),
            **dict.fromkeys(("nesting", "keyctl", "fuse", "mknod", "force_rw_sys"), FLAG),
        }
        self.unused: Format = {"volume": Option(check=_volume, required=True)}
        self.keys = self._keys(world)

    def _keys(self, world: World) -> dict[str, Option]:
        ostypes = "debian devuan ubuntu centos fedora opensuse archlinux alpine gentoo nixos unmanaged"
        locks = "backup create destroyed disk fstrim migrate mounted rollback snapshot snapshot-delete"
        keys = {
            "lock": Option(enum=tuple(locks.split())),
            "onboot": FLAG,
            "startup": Option(check=_startup),
            "template": FLAG,
            "arch": Option(enum=("amd64", "i386", "arm64", "armhf", "riscv32", "riscv64")),
            "ostype": Option(enum=tuple(ostypes.split())),
            "console": FLAG,
            "tty": Option("integer", 0, 6),
            "cores": Option("integer", 1, 8192),
            "cpulimit": Option("number", 0, 8192),
            "cpuunits": Option("integer", 0, 500000),
            "memory": Option("integer", 16),
            "swap": Option("integer", 0),
            "hostname": Option(check=_dns_name, longest=255),
            "description": Option(longest=8192),
            "searchdomain": TEXT,
            "nameserver": Option(check=_addresses, list=True),
            "timezone": TEXT,
            "rootfs": Option(check=lambda text: parse(self.rootfs, text, "volume")),
            "cmode": Option(enum=("shell", "console", "tty")),
            "protection": FLAG,
            "unprivileged": FLAG,
            "features": Option(check=lambda text: parse(self.features, text)),
            "hookscript": Option(check=_volume),
            "tags": Option(check=_tags, list=True),
            "debug": FLAG,
        }
        if world.has("6.0.15"):
            text = r"[^\x00-\x08\x0a-\x1f\x7f]"
            keys["entrypoint"] = Option(pattern=f"{text}+")
            keys["env"] = Option(pattern=rf"\w+={text}*(\0\w+={text}*)*")
        for number in range(MANY):
            keys[f"mp{number}"] = Option(check=lambda text: parse(self.mount, text, "volume"))
            keys[f"unused{number}"] = Option(check=lambda text: parse(self.unused, text, "volume"))
            if world.has("5.0.5"):
                keys[f"dev{number}"] = Option(check=lambda text: parse(self.device, text, "path"))
        for number in range(NETS):
            keys[f"net{number}"] = Option(check=lambda text: parse(self.net, text))
        return keys

    def volume(self, key: str, text: str) -> dict[str, str]:
        """A rootfs's or mount point's parts; `type` is bind, device or volume (classify_mountpoint)."""
        found = parse(self.rootfs if key == "rootfs" else self.mount, text, "volume")
        volume = found["volume"]
        found["type"] = "device" if volume.startswith("/dev/") else "bind" if volume[0] == "/" else "volume"
        return found
