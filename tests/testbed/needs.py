"""What each part needs from the machine, whether it is there, and how to get it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from .place import TestbedError, run

# command -> the Debian package that brings it
ENGINE = {
    "/usr/sbin/dockerd": "docker.io",
    "/usr/bin/docker": "docker.io",
    "iptables": "iptables",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "mmdebstrap": "mmdebstrap",
    "rsync": "rsync",  # images are shipped with it
}
SSHD = {
    "/usr/sbin/sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "ip": "iproute2",  # the gpu-box's own address
}
BOOT = {"/lib/systemd/systemd": "systemd", "systemctl": "systemd", "crontab": "cron"}
BARE = {
    "mmdebstrap": "mmdebstrap",
    "/usr/sbin/sshd": "openssh-server",
    "ssh": "openssh-client",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "openssl": "openssl",
    "gpg": "gnupg",
    "gpg-agent": "gnupg",
}
PVE = {
    "lxc-start": "lxc",
    "lxc-usernsexec": "lxc",
    "mmdebstrap": "mmdebstrap",
    "zstd": "zstd",
    "tini": "tini",
    "/usr/sbin/sshd": "openssh-server",
    "ssh": "openssh-client",
    "ip": "iproute2",
    "nsenter": "util-linux",
}
# Without these the product is tested in part only: its fallbacks, no login shell but bash, no C program.
# (g++ brings libc's headers along, which gcc only recommends.)
ALWAYS = {"tini": "tini", "rsync": "rsync", "fish": "fish", "tcsh": "tcsh", "cc": "g++"}


def lacking(commands: dict[str, str]) -> list[str]:
    """Those of `commands` that this machine does not have."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    return [command for command in commands if shutil.which(command, path=path) is None]


def why_no_root() -> str | None:
    """Why tests marked `root` cannot run here; None if they can."""
    return None if os.geteuid() == 0 else "this user is not root"


def why_no_engine() -> str | None:
    """Why tests marked `engine` cannot run here; None if they can."""
    if os.geteuid() != 0:
        return "the testbed starts an engine of its own, which takes root"
    return _missing(ENGINE)


def why_no_sshd() -> str | None:
    """Why tests marked `sshd` cannot run here; None if they can."""
    return _missing(SSHD)


def why_no_boot() -> str | None:
    """Why tests marked `boot` cannot run here; None if they can."""
    if os.geteuid() != 0:
        return "the testbed boots a systemd in namespaces, which takes root"
    return _missing(BOOT)


def why_no_bare() -> str | None:
    """Why tests marked `bare` cannot run here; None if they can."""
    if os.geteuid() != 0:
        return "bare machines live in namespaces, which takes root"
    return _missing(BARE)


def why_no_pve() -> str | None:
    """Why tests marked `pve` cannot run here; None if they can."""
    if os.geteuid() != 0:
        return "a Proxmox box and its containers take root"
    return _missing(PVE)


def why_no_program(names: tuple[str, ...]) -> str | None:
    """Why tests marked `program(NAME, …)` cannot run here; None if they can."""
    return _missing(dict.fromkeys(names, ""))


def _missing(commands: dict[str, str]) -> str | None:
    missing = lacking(commands)
    if not missing:
        return None
    return f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing (as root: make testbed)"


def install() -> list[str]:
    """Install by apt what is missing; returns the packages. Raises TestbedError if that cannot be done."""
    everything = {**ENGINE, **SSHD, **BOOT, **BARE, **PVE, **ALWAYS}
    packages = sorted({everything[command] for command in lacking(everything)})
    if not packages:
        return []
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise TestbedError(f"these Debian packages are missing, and need root and apt: {' '.join(packages)}")
    # A machine without an init system has nothing to start the packages' services with; where there is one,
    # it must not start a second engine or another sshd: the testbed brings up its own.
    policy = Path("/usr/sbin/policy-rc.d")
    ours = not policy.exists()
    if ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        quiet = {"DEBIAN_FRONTEND": "noninteractive"}
        run(["apt-get", "update", "-q"], timeout=300, env=quiet)
        run(["apt-get", "install", "-y", "-q", "--no-install-recommends", *packages], timeout=900, env=quiet)
    finally:
        if ours:
            policy.unlink()
    return packages
