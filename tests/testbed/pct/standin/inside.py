"""`pct exec`, `pct push` and `pct pull` (CLI/pct.pm)."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from . import config as configs
from .errors import Died
from .properties import Formats
from .tasks import task
from .world import World

NEW_MOUNTS, NEW_USERS = 0x20000, 0x10000000


def exec_command(world: World, formats: Formats, given: dict[str, Any]) -> NoReturn:
    """Become `words` in the container: no shell, stdin and exit code as they are.

    The caller's environment goes along, unless it is told not to (where it can be); only PATH is not the
    caller's but Proxmox's (CLIHandler.pm), and two variables for TLS are dropped.
    """
    vmid, words = given["vmid"], given["extra-args"]
    configs.load(world, formats, vmid)
    if not configs.running(vmid):
        raise Died(f"container '{vmid}' not running!")
    if not words:
        raise Died("missing command at /usr/share/perl5/PVE/CLI/pct.pm line 271.")
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if world.has("5.0.9") else ():
        os.environ.pop(name, None)
    command = ["lxc-attach", "-n", vmid]
    if world.has("5.0.9"):
        command.append("--keep-env" if given.get("keep-env", "1") == "1" else "--clear-env")
    os.execvp("lxc-attach", [*command, "--", *words])


def push(world: World, formats: Formats, given: dict[str, Any]) -> None:
    """One file into a running container: an existing one is emptied first, and filled while others see it."""
    vmid = given["vmid"]
    with configs.locked(vmid):
        if not configs.running(vmid):
            raise Died("can only push files to a running CT")
        config = configs.load(world, formats, vmid)

        def work() -> None:
            from .lxc import init_pid

            pid = init_pid(vmid)
            try:
                source = os.open(given["file"], os.O_RDONLY)
            except OSError:
                raise Died(f"failed to open {given['file']} for reading") from None
            _enter(pid, users=config.get("unprivileged") == "1")
            with os.fdopen(source, "rb") as read, os.fdopen(_create(given), "wb") as target:
                _copy(read, target)

        task(work)


def pull(world: World, formats: Formats, given: dict[str, Any]) -> None:
    """One file out of a running container."""
    vmid = given["vmid"]
    with configs.locked(vmid):
        if not configs.running(vmid):
            raise Died("can only pull files from a running VM")

        def work() -> None:
            from .lxc import init_pid

            pid = init_pid(vmid)
            with os.fdopen(_create(given), "wb") as target:
                _enter(pid, users=False)
                try:
                    with open(given["path"], "rb") as source:
                        _copy(source, target)
                except OSError as error:
                    raise Died(f"failed to open {given['path']}: {error.strerror}") from None

        task(work)


def _copy(source: BinaryIO, target: BinaryIO) -> None:
    while block := source.read(1 << 20):
        target.write(block)


def _enter(pid: int, *, users: bool) -> None:
    """This process goes into the container's mounts, and becomes its root."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    mounts = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
    names = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY)
    if libc.setns(mounts, NEW_MOUNTS) != 0:
        raise Died("failed to enter the container's mount namespace")
    os.chdir("/")
    if users:
        if libc.setns(names, NEW_USERS) != 0:
            raise Died("failed to enter the container's user namespace")
        os.setgid(0)
        os.setuid(0)


def _create(given: dict[str, Any]) -> int:
    """create_file: a descriptor to write to."""
    path, permissions = given["destination"], given.get("perms")
    mode = None
    if permissions is not None:
        try:
            text = permissions if permissions.startswith("0") else f"0{permissions}"
            mode = int(text, 16 if text[:2].lower() == "0x" else 8)
        except ValueError:
            raise Died(f"invalid mode: '{permissions}'") from None
    user, group = (_id(given.get(what), what) for what in ("user", "group"))
    try:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0)
            mask = os.umask(0)
            os.umask(mask)
            mode = 0o666 & ~mask if mode is None else mode
        except FileExistsError:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    except OSError as error:
        raise Died(f"failed to create file: {path}: {error.strerror}") from None
    if mode is not None:
        os.fchmod(descriptor, stat.S_IMODE(mode))
    if user is not None or group is not None:
        os.fchown(descriptor, -1 if user is None else user, -1 if group is None else group)
    return descriptor


def _id(name: str | None, what: str) -> int | None:
    """Names are the container's own: they are read after it was entered, without the C library's cache."""
    if name is None or name.isdigit():
        return None if name is None else int(name)
    table = Path("/etc/passwd" if what == "user" else "/etc/group").read_text()
    for line in table.splitlines():
        if line.split(":")[0] == name:
            return int(line.split(":")[2])
    raise Died(f"failed to get {'uid' if what == 'user' else 'gid'} for: {name}")
