"""A Docker engine of our own: own data, own socket, own network namespace, own cgroup."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from . import network
from .docker import Docker
from .place import RUN, TestbedError, run, work_directory

LOCK = RUN.with_suffix(".lock")
PREPARING = "prepare.lock"  # in the work directory
CGROUP = "drafthouse-testbed"
FURTHER = (2, 3)  # the engines of other machines, see testbed.second
CGROUPS = Path("/sys/fs/cgroup")
CONTROLLERS = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids")


class Engine:
    """The testbed's engine. There is one on a machine at a time: a lock sees to that.

    Its data (images, build cache) lies in the work directory and outlives it; all else goes with `stop`.
    """

    def __init__(self) -> None:
        self.data = work_directory() / "engine"
        self.socket = RUN / "docker.sock"
        self.log = work_directory() / "dockerd.log"
        self._lock: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """What DOCKER_HOST must be to reach it."""
        return f"unix://{self.socket}"

    def start(self, seconds: float = 60) -> None:
        """Bring it up and wait until it answers. Raises TestbedError, with its last lines, if it does not."""
        self._lock = take_lock()
        stop_leftovers()  # of a session that was killed: the lock says that nobody else's are meant
        RUN.mkdir(mode=0o755)
        (RUN / "data").write_text(str(self.data))
        self.data.mkdir(parents=True, exist_ok=True)
        mount_cgroups()
        namespace = network.up(RUN / "ip_forward")
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                [
                    *("nsenter", f"--net={namespace}", "/usr/sbin/dockerd"),
                    *(
                        "--data-root",
                        self.data,
                        "--exec-root",
                        RUN / "exec",
                        "--pidfile",
                        RUN / "dockerd.pid",
                    ),
                    *("--host", self.url, "--cgroup-parent", f"/{CGROUP}"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C on the tests does not reach it; `stop` does
            )
        deadline = time.monotonic() + seconds
        while not self.answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                last = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
                self.stop()
                raise TestbedError(f"dockerd did not come up ({self.log}):\n{last}")
            time.sleep(0.05)

    def answers(self) -> bool:
        """Whether it answers a ping."""
        return answers(self.socket)

    def stop(self) -> None:
        """End it and everything that it started; give the lock back."""
        stop_leftovers()
        if self._process is not None:
            self._process.wait(10)
        if self._lock is not None:
            LOCK.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None


def answers(path: Path) -> bool:
    """Whether the engine behind the socket `path` answers a ping."""
    with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
        connection.settimeout(5)
        connection.connect(str(path))
        connection.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
        return b" 200 " in connection.recv(64)
    return False


@contextlib.contextmanager
def preparing() -> Iterator[None]:
    """While images are made in the work directory; sessions that use it wait (see `wait_for_preparing`)."""
    with open(work_directory() / PREPARING, "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def wait_for_preparing() -> None:
    """Return once `python3 -m tests.testbed prepare` has ended, if it is at work in our work directory."""
    with contextlib.suppress(FileNotFoundError), open(work_directory() / PREPARING, "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)


@contextlib.contextmanager
def running() -> Iterator[Docker]:
    """Commands to the testbed's engine: one that is up already (DRAFTHOUSE_TESTBED_ENGINE, see
    `python3 -m tests.testbed up`), which stays so, or one of our own for as long as it is wanted."""
    url = os.environ.get("DRAFTHOUSE_TESTBED_ENGINE")
    if url:
        yield Docker(url)
        return
    own = Engine()
    own.start()
    try:
        yield Docker(own.url)
    finally:
        own.stop()


def take_lock() -> int:
    """The descriptor that holds the machine's testbed. Raises TestbedError if another session has it."""
    descriptor = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino == os.stat(LOCK).st_ino:  # not one that its holder has just removed
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    raise TestbedError("another test session on this machine has the testbed's engine: wait for it to end")


def mount_cgroups() -> None:
    """Mount the cgroup hierarchies where no init system has done so. They stay: the machine lacked them."""
    if (CGROUPS / "cgroup.controllers").exists():
        return  # cgroup v2
    if not os.path.ismount(CGROUPS):
        run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", CGROUPS])
    for controller in CONTROLLERS:
        directory = CGROUPS / controller
        directory.mkdir(exist_ok=True)
        if not os.path.ismount(directory):
            run(["mount", "-t", "cgroup", "-o", controller, "cgroup", directory])


# -- what an engine leaves ---------------------------------------------------------------------------------


def processes() -> list[tuple[int, str]]:
    """(pid, command line) of our engine, its helpers and what runs in its containers.

    Known by the cgroup or by our own directory on the command line of one of the engine's programs.
    """
    programs = ("dockerd", "containerd", "containerd-shim-runc-v2", "docker-proxy", "sshd")
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                line = " ".join(words).strip()
                ours = Path(words[0]).name.rstrip(":") in programs and str(RUN) in line
                if line and (ours or f"/{CGROUP}/" in (entry / "cgroup").read_text()):
                    found.append((int(entry.name), line))
    return found


def mounts() -> list[str]:
    """Mount points of our engine, deepest first."""
    places = [str(RUN), str(work_directory() / "engine")]  # and those of further engines, engine-2 and on
    roots = [*places, *(f"{place}-{number}" for place in places for number in FURTHER)]
    with contextlib.suppress(OSError):
        roots.append((RUN / "data").read_text())
    with open("/proc/self/mounts", encoding="utf-8") as table:
        points = [line.split(" ")[1].replace("\\040", " ") for line in table]
    return sorted({p for p in points if p.startswith(tuple(f"{r}/" for r in roots))}, key=len, reverse=True)


def cgroups() -> list[Path]:
    """Our cgroup in every hierarchy."""
    return [path for path in (CGROUPS / CGROUP, *CGROUPS.glob(f"*/{CGROUP}")) if path.is_dir()]


def stop_leftovers() -> None:
    """End and remove whatever an engine of ours left: processes, mounts, namespace, cgroups, sockets."""
    _end_processes()
    for point in mounts():
        run(["umount", "-l", point], check=False)
    network.down(RUN / "ip_forward")
    for top in cgroups():
        for directory, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(directory)
    for place in (RUN, *(RUN.with_name(f"{RUN.name}-{number}") for number in FURTHER)):
        shutil.rmtree(place, ignore_errors=True)


def _end_processes(seconds: float = 20) -> None:
    """TERM to dockerd, which ends its containers; KILL to what is left after `seconds`."""
    for pid, line in processes():
        if Path(line.split(" ")[0]).name in ("dockerd", "sshd"):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)
    started = time.monotonic()
    while left := processes():
        waited = time.monotonic() - started
        if waited > seconds + 10:
            raise TestbedError(f"these processes of the testbed cannot be ended: {left}")
        if waited > seconds:
            for pid, _ in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
