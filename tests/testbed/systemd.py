"""A machine that can be switched off: a real systemd as PID 1 of namespaces of its own.

It knows no other units than those that are put there: those of this machine would set it up, and clear its
/tmp, once more. And should one of them ever be found, it could do no harm: all that it sees of this machine's
disk is read-only, but for the test's own directory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .engine import mount_cgroups
from .place import TestbedError, run

# All that our units refer to, without saying so or by name. They have nothing to do here.
TARGETS = ("sysinit", "basic", "local-fs", "remote-fs", "umount", "multi-user", "shutdown")
ENTER = ("nsenter", "--mount", "--pid", "--uts", "--ipc", "--cgroup")
CGROUPS = Path("/sys/fs/cgroup")

BOOT = r"""
set -eu
echo $$ >"$cgroup/cgroup.procs"
exec unshare --cgroup --pid --fork --mount --uts --ipc --mount-proc --kill-child sh -euc '
  mount --bind "$directory" "$directory"
  mount -o remount,bind,ro /
  ! touch /tmp/.testbed-systemd 2>/dev/null || { echo "the disk is not read-only"; exit 1; }
  hostname testbed-systemd
  mount -t tmpfs -o mode=755 tmpfs /run
  mount -t tmpfs -o mode=1777 tmpfs /dev/shm
  for place in $volatile; do mount -t tmpfs -o mode=1777 tmpfs "$place"; done
  if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
    line=
  else
    : >/run/none  # no controllers: they are in use, and nothing here is limited
    mount --bind /run/none /proc/cgroups
    mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
    mkdir /sys/fs/cgroup/systemd
    mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
    line="systemd.unified_cgroup_hierarchy=0 systemd.legacy_systemd_cgroup_controller=1"
  fi
  mount --bind "$directory/units" /etc/systemd/system
  exec env -i container=testbed PATH="$PATH" SYSTEMD_PROC_CMDLINE="$line" \
    SYSTEMD_UNIT_PATH=/etc/systemd/system SYSTEMD_GENERATOR_PATH=/run/none-at-all \
    /lib/systemd/systemd --system --unit=multi-user.target --log-target=console --show-status=no
'
"""


class Machine:
    """systemd with its files in `directory`, which keep from one boot to the next.

    `volatile` are directories that a reboot empties, such as a shared memory. `journal` is what units print.
    """

    def __init__(self, directory: Path, volatile: Sequence[Path] = ()) -> None:
        self.directory = directory
        self.units = directory / "units"
        self.journal = directory / "journal"
        self.log = directory / "systemd.log"
        self.volatile = list(volatile)
        self.pid = 0  # of systemd, as we see it
        self._process: subprocess.Popen[bytes] | None = None
        base = CGROUPS if (CGROUPS / "cgroup.controllers").exists() else CGROUPS / "systemd"
        self.cgroup = base / f"drafthouse-testbed-systemd-{os.getpid()}-{id(self):x}"
        self.units.mkdir(parents=True)
        for target in TARGETS:
            (self.units / f"{target}.target").write_text("[Unit]\nDefaultDependencies=no\n")
        (self.units / "service.d").mkdir()
        output = f"[Service]\nStandardOutput=append:{self.journal}\nStandardError=append:{self.journal}\n"
        (self.units / "service.d" / "journal.conf").write_text(output)

    def boot(self) -> None:
        """Switch on, and wait until systemd takes orders. Raises TestbedError if it does not."""
        for place in self.volatile:
            place.mkdir(parents=True, exist_ok=True)
        mount_cgroups()
        if self.cgroup.parent == CGROUPS / "systemd" and not os.path.ismount(self.cgroup.parent):
            self.cgroup.parent.mkdir(exist_ok=True)
            run(["mount", "-t", "cgroup", "-o", "none,name=systemd", "cgroup", self.cgroup.parent])
        self.cgroup.mkdir(exist_ok=True)
        environment = {
            **os.environ,
            "cgroup": str(self.cgroup),
            "directory": str(self.directory),
            "volatile": " ".join(str(place) for place in self.volatile),
        }
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", BOOT],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if not self._wait(self._is_up, 30):
            words = self.log.read_text(errors="replace")[-2000:]
            self.power_cut()
            raise TestbedError(f"systemd did not start; its log ends with:\n{words}")

    def command(self, *argv: str) -> list[str]:
        """`argv` as a command on the machine."""
        return [*ENTER, f"--target={self.pid}", "--", *argv]

    def run(self, *argv: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*argv), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout
        )

    def settled(self, unit: str, seconds: float = 120) -> str:
        """Wait until `unit` has been started or stopped: active, inactive or failed."""
        words = ("active", "inactive", "failed")

        def state() -> str:
            found = self.run("systemctl", "is-active", unit).stdout.strip()
            return found if found in words else ""

        found = self._wait(state, seconds)
        if not found:
            raise TestbedError(f"{unit} is still at it after {seconds:g} s")
        return str(found)

    def power_off(self, seconds: float = 120) -> None:
        """Shut down in order: units are stopped, then every process that is left is ended."""
        try:
            done = self.run(
                "systemctl", "start", "--job-mode=replace-irreversibly", "shutdown.target", timeout=seconds
            )
        except subprocess.TimeoutExpired:
            raise TestbedError(f"systemd did not stop its units within {seconds:g} s") from None
        finally:
            self.power_cut()
        if done.returncode:
            raise TestbedError(f"systemd does not shut down: {done.stderr}")

    def power_cut(self) -> None:
        """Pull the plug: every process ends at once."""
        if self._process and self._process.poll() is None:
            if self.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._away()

    def printed(self) -> str:
        return self.journal.read_text(errors="replace") if self.journal.exists() else ""

    def _is_up(self) -> bool:
        assert self._process
        if self._process.poll() is not None:
            return False
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        if not children:
            return False
        self.pid = int(children[0])
        return self.run("systemctl", "list-jobs").returncode == 0

    def _away(self) -> None:
        self.pid = 0
        deadline = time.monotonic() + 30
        while self.cgroup.exists() and time.monotonic() < deadline:
            for folder, _, _ in os.walk(self.cgroup, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
            time.sleep(0.05)

    @staticmethod
    def _wait(look: Callable[[], object], seconds: float) -> object:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = look()
            if found:
                return found
            time.sleep(0.05)
        return None


def program() -> str | None:
    return shutil.which("systemd", path="/lib/systemd:/usr/lib/systemd")
