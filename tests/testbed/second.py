"""A second Docker engine, beside the testbed's: the one of another machine, which an image is shipped to.

It sits in a network namespace without any way out, so that what it has can only have come by the ship.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from .engine import CGROUP, answers, mount_cgroups
from .place import RUN, TestbedError, run, work_directory

PLACE = RUN.with_name(f"{RUN.name}-2")  # known to engine.stop_leftovers by the beginning of its name


class SecondEngine:
    """An empty engine; all of it goes with `stop`. One of a `place` at a time: others wait for it."""

    def __init__(self, place: Path = PLACE) -> None:
        self.place = place
        self.data = work_directory() / f"engine-{place.name.rpartition('-')[2]}"
        self.socket = place / "docker.sock"
        self.log = work_directory() / f"dockerd-{place.name.rpartition('-')[2]}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._lock: int | None = None

    @property
    def url(self) -> str:
        """What DOCKER_HOST must be to reach it."""
        return f"unix://{self.socket}"

    def start(self, seconds: float = 60) -> None:
        """Bring it up and wait until it answers. Raises TestbedError, with its last lines, if it does not."""
        work_directory().mkdir(parents=True, exist_ok=True)
        lock = work_directory() / f"{self.data.name}.lock"
        self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._remove()
        self.place.mkdir(mode=0o755)
        self.data.mkdir(parents=True)
        mount_cgroups()
        self.switch_on(seconds)

    def switch_on(self, seconds: float = 60) -> None:
        """Bring it up with what it has. Raises TestbedError, with its last lines, if it does not come."""
        inside = ["--data-root", str(self.data), "--exec-root", str(self.place / "exec")]
        inside += ["--pidfile", str(self.place / "dockerd.pid"), "--host", self.url]
        inside += ["--cgroup-parent", f"/{CGROUP}"]
        script = 'ip link set lo up && exec /usr/sbin/dockerd "$@"'
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                ["unshare", "--net", "sh", "-c", script, "dockerd", *inside],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + seconds
        while not answers(self.socket):
            if self.process.poll() is not None or time.monotonic() > deadline:
                last = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
                self.stop()
                raise TestbedError(f"the second dockerd did not come up ({self.log}):\n{last}")
            time.sleep(0.05)

    def stop(self) -> None:
        """End it and remove all that it had."""
        self.switch_off()
        self._remove()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def switch_off(self, seconds: float = 20) -> None:
        """End it as an init system does: with TERM, after which it stops its containers."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)  # a test may have halted it
            self.process.terminate()
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
            self.process = None

    def _remove(self) -> None:
        with open("/proc/self/mounts", encoding="utf-8") as table:
            points = [line.split(" ")[1].replace("\\040", " ") for line in table]
        for point in sorted(points, key=len, reverse=True):
            if point.startswith((f"{self.place}/", f"{self.data}/")):
                run(["umount", "-l", point], check=False)
        for directory in (self.place, self.data):
            shutil.rmtree(directory, ignore_errors=True)
