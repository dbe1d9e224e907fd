"""What LXC is told of a container: LXC.pm update_lxc_config, and what the hooks around a start do.

Two differences come from Debian's LXC 5.0.2 on a machine with cgroups v1: limits are said in v1's words; and
`env:`, which Proxmox's LXC gives to init alone, stands in the configuration that it starts with, but not in
the one that `lxc-attach` reads.
"""

from __future__ import annotations

import os
import shlex
import socket
import stat
from pathlib import Path

from .config import Config
from .errors import Died
from .properties import Formats, parse
from .storage import volume
from .world import LXC, World

SHARE = Path("/usr/share/lxc/config")
SHIFT, COUNT = 100000, 65536
UNIFIED = Path("/sys/fs/cgroup/cgroup.controllers").exists()


def write(world: World, formats: Formats, vmid: str, config: Config) -> None:
    """LXC's configuration, and the script that mounts its root and mount points before a start.

    Raises Died for what the real one looks at here: a device that is missing, a bridge that is.
    """
    directory = LXC / vmid
    (directory / "rootfs").mkdir(parents=True, exist_ok=True)
    nodes = [(parse(formats.device, value, "path"), key) for key, value in config.numbered("dev")]
    lines = _general(vmid, config)
    if config.get("entrypoint", "/sbin/init") != "/sbin/init" and world.has("6.1.10"):
        lines.append("lxc.mount.entry = shm dev/shm tmpfs rw,nosuid,nodev,create=dir 0 0")
    lines += _limits(config)
    for device, key in nodes:
        lines += _device(directory, device, key)
    lines += _network(formats, vmid, config)
    if "entrypoint" in config.values:
        lines += _entrypoint(directory, config.values["entrypoint"])
    for key, value in config.raw:
        lines += _raw(key, value)
    script = directory / "prestart.sh"
    script.write_text(_prestart(world, formats, vmid, config, [device for device, _ in nodes]))
    script.chmod(0o755)
    lines.append(f"lxc.hook.pre-start = {script}")
    text = "\n".join(lines) + "\n"
    (directory / "config").write_text(text)
    init_only = [f"lxc.environment = {variable}\n" for variable in config.env if variable]
    (directory / "start.config").write_text(text + "".join(init_only))


def _general(vmid: str, config: Config) -> list[str]:
    lines = [
        "lxc.cgroup.relative = 0",
        f"lxc.cgroup.dir.monitor = lxc.monitor/{vmid}",
        f"lxc.cgroup.dir.container = lxc/{vmid}",
        "lxc.cgroup.dir.container.inner = ns",
        f"lxc.arch = {config.get('arch', 'amd64')}",
        f"lxc.include = {SHARE}/common.conf",
        "lxc.apparmor.profile = unconfined",
        "lxc.monitor.unshare = 1",
        f"lxc.tty.max = {config.get('tty', '2')}",
        "lxc.environment = TERM=linux",
        f"lxc.uts.name = {config.get('hostname') or f'CT{vmid}'}",
        f"lxc.rootfs.path = {LXC}/{vmid}/rootfs",
    ]
    if config.unprivileged:
        lines += [f"lxc.include = {SHARE}/userns.conf", "lxc.mount.auto = sys:mixed"]
        if not any(key == "lxc.idmap" for key, _ in config.raw):
            lines += [f"lxc.idmap = u 0 {SHIFT} {COUNT}", f"lxc.idmap = g 0 {SHIFT} {COUNT}"]
    if "nesting=1" in config.get("features").split(","):
        lines.append(f"lxc.include = {SHARE}/nesting.conf")
    if config.get("console") == "0":
        lines.append("lxc.console.path = none")
    return lines


def _limits(config: Config) -> list[str]:
    """512 MiB where nothing is said."""
    mebibytes = int(config.get("memory") or 512)
    lines = []
    if UNIFIED:
        lines.append(f"lxc.cgroup2.memory.max = {mebibytes << 20}")
    else:
        lines.append(f"lxc.cgroup.memory.limit_in_bytes = {mebibytes << 20}")
    own = any(key == "lxc.cgroup2.cpuset.cpus" for key, _ in config.raw)
    if "cores" in config.values and not own and not UNIFIED:
        last = min(int(config.values["cores"]), os.cpu_count() or 1) - 1
        lines.append(f"lxc.cgroup.cpuset.cpus = 0-{last}")
    return lines


def _device(directory: Path, device: dict[str, str], key: str) -> list[str]:
    """Allow it, and bring its node, which the script below makes, into the container."""
    if "path" not in device:
        raise Died(f"Path is not defined for passthrough device {key}")
    path = device["path"]
    kind, major, minor = device_numbers(path)
    permissions = "r" if device.get("deny-write") == "1" else "rw"
    family = "lxc.cgroup2" if UNIFIED else "lxc.cgroup"
    return [
        f"{family}.devices.allow = {kind} {major}:{minor} {permissions}",
        f"lxc.mount.entry = {directory}/passthrough{path} {path[1:]} none bind,create=file 0 0",
    ]


def device_numbers(path: str) -> tuple[str, int, int]:
    """b or c, major, minor (LXC/Tools.pm get_device_mode_and_rdev)."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        raise Died(f"Device {path} does not exist") from None
    except OSError:
        raise Died(f"Error accessing device {path}") from None
    if not stat.S_ISBLK(found.st_mode) and not stat.S_ISCHR(found.st_mode):
        raise Died(f"{path} is not a device")
    kind = "b" if stat.S_ISBLK(found.st_mode) else "c"
    return kind, os.major(found.st_rdev), os.minor(found.st_rdev)


def _network(formats: Formats, vmid: str, config: Config) -> list[str]:
    lines = []
    for key, value in config.numbered("net"):
        net = parse(formats.net, value)
        number = key.removeprefix("net")
        prefix = f"lxc.net.{number}"
        bridge = net.get("bridge", "")
        try:
            socket.if_nametoindex(bridge)
        except OSError:
            raise Died(f"bridge '{bridge}' does not exist") from None
        lines += [
            f"{prefix}.type = veth",
            f"{prefix}.veth.pair = veth{vmid}i{number}",
            f"{prefix}.name = {net['name']}",
            f"{prefix}.link = {bridge}",  # the real one attaches it in a script of its own
        ]
        if "hwaddr" in net:
            lines.append(f"{prefix}.hwaddr = {net['hwaddr']}")
        if net.get("host-managed") == "1":
            if net.get("ip", "manual") not in ("dhcp", "manual"):
                lines.append(f"{prefix}.ipv4.address = {net['ip']}")
            if "gw" in net:
                lines.append(f"{prefix}.ipv4.gateway = {net['gw']}")
            lines.append(f"{prefix}.flags = up")
    if not lines and not any(key.startswith("lxc.net.") for key, _ in config.raw):
        lines.append("lxc.net.0.type = empty")
    return lines


def _entrypoint(directory: Path, command: str) -> list[str]:
    """LXC 5.0.2 parts init's command at blanks, quoted or not: a script stands for one with quotes."""
    if shlex.split(command) == command.split():
        return [f"lxc.init.cmd = {command}"]
    script = directory / "init.sh"
    script.write_text(f"#!/bin/sh\nexec {command}\n")
    script.chmod(0o755)
    entry = f"lxc.mount.entry = {script} .pct-init none bind,ro,create=file 0 0"
    return [entry, "lxc.init.cmd = /.pct-init"]


def _raw(key: str, value: str) -> list[str]:
    if key == "lxc.init.groups":
        return []  # LXC 5.0.2 does not know it
    if not key.startswith("lxc.cgroup2.") or UNIFIED:
        return [f"{key} = {value}"]
    words = {"memory.max": "memory.limit_in_bytes"}
    name = key.removeprefix("lxc.cgroup2.")
    if name.startswith(("devices.", "cpuset.", "pids.")) or name in words:
        return [f"lxc.cgroup.{words.get(name, name)} = {value}"]
    return []


def _prestart(
    world: World, formats: Formats, vmid: str, config: Config, devices: list[dict[str, str]]
) -> str:
    """lxc-pve-prestart-hook: mounts that the container and its monitor see, and nobody else.

    A missing source ends it, and with it the start; the reason does not reach whoever called `pct start`.
    """
    directory = LXC / vmid
    root = directory / "rootfs"
    owner = SHIFT if config.unprivileged else 0
    lines = ["#!/bin/sh", "set -eu"]
    for key, value in [("rootfs", config.get("rootfs")), *config.numbered("mp")]:
        mount = formats.volume(key, value)
        source = mount["volume"]
        if mount["type"] == "volume":
            source = str(volume(world, source).path)
        target = str(root / mount.get("mp", "/").strip("/"))
        what, to = shlex.quote(source), shlex.quote(target)
        test = "-b" if mount["type"] == "device" else "-d"
        lines.append(f'[ {test} {what} ] || {{ echo "directory \'"{what}"\' does not exist"; exit 1; }}')
        if key != "rootfs":
            # __mount_prepare_rootdir: what is missing of the way there belongs to the container's root
            made = f'd={to}; while [ ! -d "$d" ]; do set -- "$d" "$@"; d=$(dirname "$d"); done'
            lines.append(f'set --; {made}; for d; do mkdir "$d"; chown {owner}:{owner} "$d"; done')
        lines.append(f"mount {'' if mount['type'] == 'device' else '--bind '}{what} {to}")
        options = [option for option in mount.get("mountoptions", "").split(";") if option.startswith("no")]
        options += ["ro"] if mount.get("ro") == "1" else []
        if options:
            lines.append(f"mount -o remount,bind,{','.join(options)} {to}")
    lines += _device_nodes(directory / "passthrough", devices, owner)
    return "\n".join(lines) + "\n"


def _device_nodes(place: Path, devices: list[dict[str, str]], shift: int) -> list[str]:
    """LXC.pm create_passthrough_device_node: 0660 and root's, unless the entry says otherwise."""
    if not devices:
        return []
    lines = [f"mkdir -p {place}", f"mount -t tmpfs -o mode=755,size=64k none {place}"]
    for device in devices:
        kind, major, minor = device_numbers(device["path"])
        node = shlex.quote(f"{place}{device['path']}")
        owner, group = (int(device.get(name, "0")) + shift for name in ("uid", "gid"))
        lines.append(f'mkdir -p "$(dirname {node})"; mknod {node} {kind} {major} {minor}')
        lines.append(f"chmod {device.get('mode', '0660')} {node}; chown {owner}:{group} {node}")
    return lines
