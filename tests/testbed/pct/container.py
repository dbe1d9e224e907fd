"""A container on a `pve_box` as its owner made it: none of Drafthouse's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..place import run
from . import rootfs
from .standin.lxcconfig import SHIFT

if TYPE_CHECKING:
    from .box import PveBox

POOL = "/var/lib/rpool/data"


class Container:
    """`vmid` on `box`: a Debian with Python, bash, procps and tini; no cron.

    `systemd`: that is its init; otherwise something that only sleeps. `unprivileged`: its ids are shifted by
    100000. `tests_python`: the interpreter of the tests, with all that it has installed, and this checkout
    lie there read-only, at the same paths. `settings` are further lines of its configuration.
    """

    def __init__(
        self,
        box: PveBox,
        vmid: int,
        *,
        unprivileged: bool = True,
        systemd: bool = False,
        tests_python: bool = False,
        **settings: str | int,
    ) -> None:
        self.box = box
        self.vmid = str(vmid)
        self.unprivileged = unprivileged
        self.systemd = systemd
        self.settings: dict[str, Any] = {
            "arch": "amd64",
            "cores": 2,
            "features": "nesting=1",
            "hostname": "trainer",
            "memory": 4096,
            "ostype": "debian",
            "rootfs": f"local-zfs:subvol-{vmid}-disk-0,size=8G",
            "swap": 512,
        }
        if unprivileged:
            self.settings["unprivileged"] = 1
        if tests_python:
            checkout = Path(__file__).parents[3]
            places = {Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve(), checkout} - {Path("/usr")}
            if sys.pycache_prefix:  # of use to who has PYTHONPYCACHEPREFIX set there, too
                places.add(Path(sys.pycache_prefix).resolve())
            for number, place in enumerate(sorted(places)):
                self.settings[f"mp{90 + number}"] = f"{place},mp={place},ro=1"
        self.settings.update(settings)

    @property
    def conf(self) -> Path:
        return self.box.conf(int(self.vmid))

    @property
    def files(self) -> Path:
        """Its root directory without what is mounted on it, whether it runs or not, as seen from here."""
        return Path(f"{self.box.root}{POOL}/subvol-{self.vmid}-disk-0")

    @property
    def root(self) -> Path:
        """Its root directory as its processes have it, as seen from here."""
        return Path(f"/proc/{self.pid}/root")

    @property
    def pid(self) -> int:
        """Its init, as we see it."""
        done = self.box.call("lxc-info", "-n", self.vmid, "-p", "-H")
        there = int(done.stdout)
        for entry in Path("/proc").iterdir():  # the box counts its processes by itself
            if entry.name.isdigit():
                try:
                    status = (entry / "status").read_text()
                except OSError:
                    continue
                numbers = next(
                    (line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")), []
                )
                if (
                    len(numbers) >= 3
                    and numbers[-1] == "1"
                    and numbers[-2] == str(there)
                    and self._ours(entry)
                ):
                    return int(entry.name)
        raise ProcessLookupError(f"container {self.vmid} does not run")

    def _ours(self, entry: Path) -> bool:
        return f"/{self.box.cgroup}/lxc/{self.vmid}/" in (entry / "cgroup").read_text()

    def make(self) -> None:
        """Its files and its configuration; it is stopped."""
        lower = self.box.shifted(rootfs.provide()) if self.unprivileged else rootfs.provide()
        place = f"{POOL}/subvol-{self.vmid}-disk-0"
        top = f"{POOL}/.overlays/{self.vmid}"
        script = 'rm -rf "$1"; mkdir -p "$1/upper" "$1/work" "$2" && chown --reference="$3" "$1/upper" && '
        script += 'mount -t overlay -o "lowerdir=$3,upperdir=$1/upper,workdir=$1/work" overlay "$2"'
        run([*self.box.enter(), "sh", "-c", script, "sh", top, place, lower])
        if not self.systemd:
            init = self.files / "usr/sbin/init"
            init.unlink()
            init.symlink_to("/usr/local/sbin/plain-init")
        self.write("etc/hostname", f"{self.settings['hostname']}\n")
        self.write("root/.profile", "PATH=$PATH:/root/bin\n")
        self.conf.write_text("".join(f"{key}: {value}\n" for key, value in sorted(self.settings.items())))

    def write(self, path: str, text: str | bytes, mode: int = 0o644) -> Path:
        """A file of its root's, to `path` below its root directory; directories on the way are made."""
        owner = SHIFT if self.unprivileged else 0
        missing = []
        file = self.files / path
        for parent in file.parents:
            if parent.exists():
                break
            missing.append(parent)
        for parent in reversed(missing):
            parent.mkdir()
            os.chown(parent, owner, owner)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        file.chmod(mode)
        os.chown(file, owner, owner)
        return file

    def start(self) -> None:
        self.box.pct("start", self.vmid)

    def stop(self) -> None:
        self.box.pct("stop", self.vmid)

    def exec(self, *argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run `argv` in it; raises TestbedError if that fails, unless `check=False`."""
        return run([*self.box.enter(), "lxc-attach", "-n", self.vmid, "--clear-env", "--", *argv], **options)

    def remove(self) -> None:
        self.box.remove(int(self.vmid))
