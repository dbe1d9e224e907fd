"""Bare machines: Debian systems with next to nothing on them, to be thrown away; real sshd, real apt.

All live in one set of namespaces, and in memory: when the process that holds these ends, all is gone. Each is
an overlay over the same minimal Debian, so that what was changed on it is what lies in its upper directory. A
login gets there by an sshd that is this machine's and has the bare one as its root (ChrootDirectory).
"""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
import subprocess
from collections.abc import Mapping
from pathlib import Path

from . import base_image
from .archive import NAMES, Archive
from .place import TestbedError, run

PLACE = Path("/mnt")  # in the namespace; sshd wants a path that only root can change
HOLD = f"""
set -eu
hostname bare
ip link set lo up
mount -t tmpfs -o mode=755,size=3g tmpfs {PLACE}
mkdir {PLACE}/base
tar -xf "$1" -C {PLACE}/base --numeric-owner --exclude='./dev/*'
echo ready
exec cat >/dev/null  # until our stdin ends, with the tests' process at the latest
"""
# $1 the machine's directory, $2 what it lies over, $3 the size of the disk that it writes to
BRING_UP = """
set -eu
mkdir -p "$1/disk" "$1/root"
mount -t tmpfs -o "mode=755,size=$3" tmpfs "$1/disk"
mkdir "$1/disk/upper" "$1/disk/work"
mount -t overlay -o "lowerdir=$2,upperdir=$1/disk/upper,workdir=$1/disk/work" bare "$1/root"
mount -t proc proc "$1/root/proc"
mount -t tmpfs -o mode=755 tmpfs "$1/root/dev"
mkdir "$1/root/dev/pts" "$1/root/dev/shm"
for node in null zero full random urandom tty; do
  : >"$1/root/dev/$node"; mount --bind "/dev/$node" "$1/root/dev/$node"
done
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$1/root/dev/pts"
ln -s pts/ptmx "$1/root/dev/ptmx"
ln -s /proc/self/fd "$1/root/dev/fd"
mount -t tmpfs -o mode=755 tmpfs "$1/root/run"
"""
SERVER = """\
HostKey {keys}/host
AuthorizedKeysFile {keys}/id.pub
ChrootDirectory {root}
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
"""
# Stands for a systemd that runs: takes the one order that bootstrap gives it, and carries it out.
SYSTEMCTL = """#!/bin/sh
[ "$*" = "enable --now docker" ] || { echo "systemctl: $*: not known here" >&2; exit 1; }
unit=/lib/systemd/system/docker.service
[ -e "$unit" ] || { echo "Failed to enable unit: Unit file docker.service does not exist." >&2; exit 1; }
mkdir -p /etc/systemd/system/multi-user.target.wants
ln -sf "$unit" /etc/systemd/system/multi-user.target.wants/docker.service
exec $(sed -n 's/^ExecStart=//p' "$unit")
"""


class BareMachines:
    """Where they live, with the network that they are in. `client` is a client's SSH configuration."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.client = directory / "ssh_config"
        self.archive = Archive(directory / "archive")
        self.pid = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._made = 0

    def start(self) -> None:
        tarball = base_image.debian_tarball()
        hold = [
            "unshare",
            "--mount",
            "--net",
            "--uts",
            "--ipc",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ]
        self._process = subprocess.Popen(
            [*hold, "sh", "-c", HOLD, "sh", tarball], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            self.archive.make()
            for key in ("host", "id"):
                run(
                    [
                        "ssh-keygen",
                        "-q",
                        "-t",
                        "ed25519",
                        "-N",
                        "",
                        "-C",
                        "drafthouse-testbed",
                        "-f",
                        self.directory / key,
                    ]
                )
            self.client.write_text("")
            assert self._process.stdout
            if self._process.stdout.readline() != b"ready\n":
                raise TestbedError("the namespaces of the bare machines did not come up")
            self.pid = int(Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text())
            self.archive.serve(Path(f"/proc/{self.pid}/ns/net"))
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self.archive.stop()
        if self._process is not None:
            assert self._process.stdin
            assert self._process.stdout
            self._process.stdin.close()
            self._process.wait(30)
            self._process.stdout.close()
            self._process = None

    def machine(self, over: BareMachine | None = None, *, disk: str = "1g") -> BareMachine:
        """A new one; as `over` is now, if given, which must not be used any more."""
        self._made += 1
        machine = BareMachine(self, f"bare-{self._made}", over)
        machine.start(disk)
        return machine

    def enter(self) -> list[str]:
        return ["nsenter", f"--target={self.pid}", "--mount", "--net", "--uts", "--ipc", "--pid", "--"]


class BareMachine:
    """One of them. `name` is its alias in the client's configuration."""

    def __init__(self, site: BareMachines, name: str, over: BareMachine | None) -> None:
        self.site = site
        self.name = name
        self.layers: list[str] = [f"{over.place}/disk/upper", *over.layers] if over else [f"{PLACE}/base"]
        self.place = PLACE / name

    @property
    def root(self) -> Path:
        """Its root directory, as seen from here."""
        return Path(f"/proc/{self.site.pid}/root{self.place}/root")

    def start(self, disk: str) -> None:
        up = ["sh", "-c", BRING_UP, "sh", str(self.place), ":".join(self.layers), disk]
        run([*self.site.enter(), *up])
        if len(self.layers) == 1:
            self._settle()
        site = self.site.directory
        server = site / f"{self.name}.sshd"
        server.write_text(SERVER.format(keys=site, root=f"{self.place}/root"))
        proxy = shlex.join([*self.site.enter(), "/usr/sbin/sshd", "-i", "-f", str(server)])
        kind, key, *_ = (site / "host.pub").read_text().split()
        known = site / "known_hosts"
        with open(known, "a") as file:
            file.write(f"{self.name} {kind} {key}\n")
        with open(self.site.client, "a") as file:
            file.write(
                f"Host {self.name}\n  User root\n  ProxyCommand {proxy}\n  IdentityFile {site}/id\n"
                f"  IdentitiesOnly yes\n  IdentityAgent none\n  UserKnownHostsFile {known}\n"
                "  GlobalKnownHostsFile /dev/null\n"
            )

    def _settle(self) -> None:
        """What a base image lacks of a machine: names in its network, and whom it trusts there."""
        self.write("etc/hosts", f"127.0.0.1 localhost {' '.join(NAMES)}\n")
        with open(self.root / "etc/ssl/certs/ca-certificates.crt", "a") as trusted:
            trusted.write(self.site.archive.certificate.read_text())
        self.write("etc/dpkg/dpkg.cfg.d/testbed", "force-unsafe-io\n")  # it is thrown away

    def with_tools(self) -> BareMachine:
        """It has all that Debian's archive gives; and no source of packages: its lists take their time."""
        self.write("usr/bin/python3", "#!/bin/sh\necho 3.11.2\n", 0o755)
        for name in ("tini", "rsync"):
            self.write(f"usr/bin/{name}", "#!/bin/sh\n", 0o755)
        self.write("etc/apt/sources.list", "")
        return self

    def with_systemd(self) -> BareMachine:
        """From now on it seems to run systemd."""
        self.write("usr/bin/systemctl", SYSTEMCTL, 0o755)
        self.write("run/systemd/system/.testbed", "")
        return self

    def write(self, path: str, text: str | bytes, mode: int = 0o644) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        file.chmod(mode)

    def run(self, *argv: str, **options: object) -> subprocess.CompletedProcess[str]:
        """Run `argv` there, not by way of SSH."""
        return run([*self.site.enter(), "chroot", str(self.place / "root"), *argv], **options)  # type: ignore[arg-type]

    def popen(self, *argv: str) -> subprocess.Popen[bytes]:
        """Start `argv` there; it ends with its stdin, or when it is killed."""
        command = [*self.site.enter(), "chroot", str(self.place / "root"), *argv]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def packages(self) -> dict[str, str]:
        """Package: state, of all that dpkg knows."""
        listed = self.run("dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n").stdout
        return dict(line.split() for line in listed.splitlines())  # type: ignore[misc]

    def files(self) -> Mapping[str, tuple[object, ...]]:
        """All that has been written on it since it was made: path -> type and mode, size, times of change."""
        top = Path(f"/proc/{self.site.pid}/root{self.place}/disk/upper")
        found = {}
        for folder, _, names in os.walk(top):
            for path in (Path(folder), *(Path(folder) / name for name in names)):
                with contextlib.suppress(FileNotFoundError):
                    known = path.lstat()
                    size = known.st_size if stat.S_ISREG(known.st_mode) else 0
                    found[str(path.relative_to(top))] = (known.st_mode, size, known.st_mtime_ns, known.st_ino)
        return found
