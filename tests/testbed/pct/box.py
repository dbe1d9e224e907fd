"""A Proxmox host to SSH: a gpu-box with `pct` and its siblings, /etc/pve and storages of its own.

It is more of a machine than the gpu-box is: it has processes, cgroups and a name of its own, too, so that
several of them have a container 200 beside each other, and that nothing outlives it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..engine import CGROUPS, mount_cgroups
from ..gpubox import GpuBox
from ..place import TestbedError, run
from .container import Container

PROGRAMS = {"/usr/sbin": ("pct", "pvesm"), "/usr/bin": ("pvesh", "pveversion")}
STANDIN = Path(__file__).parent
SHIFTED = Path(__file__).with_name("shifted.py")
PYTHON = os.path.realpath(sys.executable)
SHIM = """#!{python} -IS
import sys
sys.pycache_prefix = {cache!r}
sys.path.insert(0, {directory!r})
from standin.program import main
main({name!r}, {settings!r})
"""
STORAGES = """\
dir: local
\tpath /var/lib/vz
\tcontent iso,vztmpl,backup,snippets

zfspool: local-zfs
\tpool rpool/data
\tmountpoint /var/lib/rpool/data
\tcontent images,rootdir
\tsparse 1

dir: small
\tpath /var/lib/small
\tcontent vztmpl,images,rootdir
"""
BRIDGE = "vmbr0"
# name: major, minor; the majors as a driver would get them
NODES = {
    "nvidiactl": (195, 255),
    "nvidia-uvm": (511, 0),
    "nvidia-uvm-tools": (511, 1),
    "nvidia-modeset": (195, 254),
}
CAPABILITIES = {"nvidia-cap1": (237, 1), "nvidia-cap2": (237, 2)}
SLICE = "system.slice"
OVERLAID = ("/etc", "/var/lib", "/usr/sbin", "/usr/bin")


class PveBox(GpuBox):
    """One Proxmox host. `version` is a key of `standin.world.RELEASES`; `gpus` has device nodes, no driver.

    Storages: `local` (templates), `local-zfs` (containers), `small` (both, 8 MB: to be filled up).
    """

    def __init__(
        self,
        version: str = "9.1",
        *,
        node: str = "pve",
        other_nodes: tuple[str, ...] = ("pve2",),
        gpus: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__({"DOCKER_HOST": "unix:///run/no-engine-on-this-box.sock", **(environment or {})})
        self.node = node
        self.other_nodes = other_nodes
        self.gpus = gpus
        self._version = version
        self._pid = 0

    # where things are

    @property
    def version(self) -> str:
        return self._version

    @version.setter
    def version(self, version: str) -> None:
        """From now on it is another release: a box is dearer than a file."""
        self._version = version
        settings = {"version": version, "node": self.node, "other_nodes": list(self.other_nodes)}
        self.settings_file.write_text(json.dumps(settings))

    @property
    def settings_file(self) -> Path:
        """What the programs there read first."""
        return self.directory / "pve.json"

    @property
    def pve(self) -> Path:
        """/etc/pve there, as seen from here."""
        return self.directory / "pve"

    @property
    def templates(self) -> Path:
        """/var/lib/vz/template/cache there, as seen from here."""
        return self.directory / "vz" / "template" / "cache"

    @property
    def snippets(self) -> Path:
        return self.directory / "vz" / "snippets"

    @property
    def pid(self) -> int:
        """Its first process, as we see it."""
        if not self._pid:
            assert self._process
            children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
            self._pid = int(children.read_text().split()[0])
        return self._pid

    @property
    def root(self) -> Path:
        """Its file system, as seen from here."""
        return Path(f"/proc/{self.pid}/root")

    @property
    def cgroup(self) -> str:
        return self.namespace

    def conf(self, vmid: int, node: str = "") -> Path:
        """The file of a container's settings, as seen from here."""
        return self.pve / "nodes" / (node or self.node) / "lxc" / f"{vmid}.conf"

    def enter(self) -> list[str]:
        """The words before a command that is to run there: in its namespaces, and in its cgroup."""
        inside = ["nsenter", f"--target={self.pid}", "--mount", "--net", "--uts", "--pid", "--cgroup", "--"]
        return [*_joining(self.cgroup), *inside]

    def call(self, *argv: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run `argv` there, not by way of SSH; it may fail."""
        return run([*self.enter(), *argv], check=False, **options)

    def pct(self, *argv: str | Path, **options: Any) -> str:
        """`pct …` there; its output. Raises TestbedError if it fails."""
        return run([*self.enter(), "pct", *argv], **options).stdout

    # its containers

    def container(self, vmid: int = 200, **options: Any) -> Container:
        """A container that somebody made here long ago; see Container. It runs, unless `running=False`."""
        running = options.pop("running", True)
        made = Container(self, vmid, **options)
        made.make()
        if running:
            made.start()
        return made

    def shifted(self, directory: Path) -> Path:
        """`directory` there with the ids that an unprivileged container's files have outside."""
        place = self.directory / "memory" / "shifted"
        if self.call("mountpoint", "-q", place).returncode != 0:
            run([*self.enter(), "mkdir", "-p", place])
            run([*self.enter(), PYTHON, "-IS", SHIFTED, directory, place])
        return place

    def remove(self, vmid: int) -> None:
        """Take a container away, however it is; no matter if there is none."""
        path = self.conf(vmid)
        if path.exists():
            text = path.read_text()
            path.write_text(re.sub(r"^(lock|protection):.*\n", "", text, flags=re.M))
            self.pct("destroy", str(vmid), "--force", "1")

    # its life

    def stop(self) -> None:
        if self._process is not None:  # its first process first, whom its parent then buries
            with contextlib.suppress(OSError, IndexError):
                os.kill(self.pid, signal.SIGKILL)
                self._process.wait(10)
        super().stop()
        self._pid = 0
        if self.number >= 0:
            remove_cgroups(self.cgroup)

    def _network(self) -> None:
        super()._network()
        within = ["ip", "-n", self.namespace]
        run([*within, "link", "add", BRIDGE, "type", "bridge"])
        run([*within, "addr", "add", "10.99.0.1/24", "dev", BRIDGE])
        run([*within, "link", "set", BRIDGE, "up"])

    def _files(self) -> None:
        super()._files()
        nodes = self.pve / "nodes"
        for node in (self.node, *self.other_nodes):
            (nodes / node / "lxc").mkdir(parents=True)
            (nodes / node / "qemu-server").mkdir()
        (self.pve / "local").symlink_to(f"nodes/{self.node}")
        (self.pve / "lxc").symlink_to(f"nodes/{self.node}/lxc")
        (self.pve / "storage.cfg").write_text(STORAGES)
        (self.pve / ".vmlist").write_text('{"version": 1, "ids": {}}\n')
        for name in ("template/cache", "snippets", "dump", "images"):
            (self.directory / "vz" / name).mkdir(parents=True)
        for name in ("lxc", "memory"):
            (self.directory / name).mkdir()
        self.version = self._version
        for folder, names in PROGRAMS.items():
            for name in names:
                self._program(folder, name)

    def _program(self, folder: str, name: str) -> None:
        text = SHIM.format(
            python=PYTHON,
            cache=str(self.directory / "pycache"),
            directory=str(STANDIN),
            name=name,
            settings=str(self.settings_file),
        )
        place = self.directory / "programs" / folder.lstrip("/")
        place.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
        (place / name).chmod(0o755)

    def _enter(self) -> list[str]:
        mount_cgroups()
        for place in cgroup_places(self.cgroup):
            place.mkdir(exist_ok=True)
            if (place / "cpuset.cpus").exists() and (place.parent / "cpuset.mems").exists():
                for file in ("cpuset.mems", "cpuset.cpus"):  # a new one has none, and takes nobody
                    (place / file).write_text((place.parent / file).read_text())
        own = ["unshare", "--mount", "--propagation", "private", "--cgroup", "--uts", "--pid"]
        own += ["--fork", "--kill-child", "--mount-proc"]
        enter = ["nsenter", f"--net=/run/netns/{self.namespace}", *own]
        return [*_joining(self.cgroup), *enter]

    def _steps(self) -> list[list[str | Path]]:
        memory = self.directory / "memory"
        steps: list[list[str | Path]] = [
            ["hostname", self.node],
            ["mount", "-t", "sysfs", "sysfs", "/sys"],  # with its own network interfaces
            *_own_cgroups(),
            ["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", memory],
        ]
        for number, place in enumerate(OVERLAID):  # to have places to mount on, and programs beside others
            upper, work = memory / f"upper{number}", memory / f"work{number}"
            options = f"lowerdir={place},upperdir={upper},workdir={work}"
            steps += [["mkdir", upper, work], ["mount", "-t", "overlay", "-o", options, "pve", place]]
        for folder in PROGRAMS:
            steps.append(["cp", "-a", f"{self.directory}/programs{folder}/.", folder])
        steps.append(["mkdir", "-p", "/etc/pve", "/var/lib/vz", "/var/lib/lxc", "/var/lib/small"])
        steps.append(["mkdir", "-p", "/var/lib/rpool/data", "/var/lib/drafthouse"])
        for here, there in (("pve", "/etc/pve"), ("vz", "/var/lib/vz"), ("lxc", "/var/lib/lxc")):
            steps.append(["mount", "--bind", self.directory / here, there])
        steps.append(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/var/lib/rpool/data"])
        steps.append(["mount", "-t", "tmpfs", "-o", "mode=755,size=8m", "tmpfs", "/var/lib/small"])
        steps.append(["mkdir", "-p", "/var/lib/small/template/cache"])
        steps += self._devices(memory / "dev")
        steps.append(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run"])
        steps.append(["mkdir", "-p", "/run/sshd", "/run/lock/lxc", "/run/pve", "/run/lxc"])
        base = super()._steps()
        return [*steps, *base[:-1], ["exec", "tini", "--", *base[-1][1:]]]

    def _devices(self, dev: Path) -> list[list[str | Path]]:
        """A /dev of its own, so that it has GPUs which the machine has not."""
        steps: list[list[str | Path]] = [["mkdir", "-p", dev / "pts", dev / "shm", dev / "net"]]
        for name in ("null", "zero", "full", "random", "urandom", "tty", "fuse"):
            if os.path.exists(f"/dev/{name}"):
                steps += [["touch", dev / name], ["mount", "--bind", f"/dev/{name}", dev / name]]
        steps += [["mount", "-t", "devpts", "-o", "newinstance,ptmxmode=0666", "devpts", dev / "pts"]]
        steps += [["ln", "-s", "pts/ptmx", dev / "ptmx"], ["ln", "-s", "/proc/self/fd", dev / "fd"]]
        steps += [["mount", "--bind", "/dev/shm", dev / "shm"]]
        if self.gpus:
            nodes = {**{f"nvidia{n}": (195, n) for n in range(self.gpus)}, **NODES}
            nodes.update({f"nvidia-caps/{name}": numbers for name, numbers in CAPABILITIES.items()})
            steps.append(["mkdir", dev / "nvidia-caps"])
            for name, (major, minor) in nodes.items():
                steps.append(["mknod", "-m", "666", dev / name, "c", str(major), str(minor)])
        return [*steps, ["mount", "--rbind", dev, "/dev"]]


def _joining(cgroup: str) -> list[str]:
    """The words before a command that is to run in that cgroup, in every hierarchy."""
    places = cgroup_places(cgroup)
    if len(places) == 1 and (places[0] / SLICE).exists():  # v2: where there are others below, nobody may be
        places = [places[0] / SLICE]
    join = " && ".join(f"echo $$ >{place}/cgroup.procs" for place in places)
    return ["sh", "-c", f'{join} && exec "$@"', "sh"]


def _own_cgroups() -> list[list[str | Path]]:
    """The hierarchies once more, beginning at the box's own cgroup, as a machine's root cgroup."""
    if (CGROUPS / "cgroup.controllers").exists():
        # Nobody may be in a cgroup that hands its controllers down.
        down = f"cd {CGROUPS}; mkdir -p {SLICE}; for p in $PPID $$; do echo $p >{SLICE}/cgroup.procs; done"
        given = "for c in memory pids cpu cpuset; do echo +$c >cgroup.subtree_control; done; true"
        return [["mount", "-t", "cgroup2", "cgroup2", CGROUPS], ["sh", "-c", f"{down}; {given}"]]
    steps: list[list[str | Path]] = [["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", CGROUPS]]
    for point, kind, options in _hierarchies():
        steps += [["mkdir", point]]
        steps += [["mount", "-t", kind, *(["-o", options] if options else []), kind, point]]
    return steps


def _hierarchies() -> list[tuple[Path, str, str]]:
    """(mount point, cgroup or cgroup2, its controllers) of this machine, which has cgroups v1."""
    found = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, options, *_ = line.split(" ")
        if kind in ("cgroup", "cgroup2") and Path(point).parent == CGROUPS:
            words = [word for word in options.split(",") if word not in ("rw", "relatime", "nosuid", "nodev")]
            words = [
                word for word in words if word not in ("noexec", "xattr", "nsdelegate", "clone_children")
            ]
            if any(word.startswith("name=") for word in words):
                words = ["none", *words]
            found.append((Path(point), kind, ",".join(words)))
    return found


def cgroup_places(name: str) -> list[Path]:
    """Where a cgroup of that name lies, in every hierarchy."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS / name]
    return [point / name for point, _, _ in _hierarchies()]


def remove_cgroups(name: str, seconds: float = 10) -> None:
    """Remove it once what was in it has ended. Raises TestbedError if something has not."""
    deadline = time.monotonic() + seconds
    while left := [place for place in cgroup_places(name) if place.exists()]:
        if time.monotonic() > deadline:
            raise TestbedError(f"these cgroups of a Proxmox box are still in use: {left}")
        for place in left:
            for folder, _, _ in os.walk(place, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
        time.sleep(0.01)


def cgroups_left() -> list[Path]:
    """Cgroups of boxes whose network is gone, and so they too should be."""
    up = {path.name for path in Path("/run/netns").glob("drafthouse-box*")}
    places = [place for place in cgroup_places("drafthouse-box*") for place in place.parent.glob(place.name)]
    return [place for place in places if place.name not in up]
