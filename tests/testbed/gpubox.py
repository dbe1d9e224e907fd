"""The "gpu-box": another machine to SSH, in a network and a mount namespace of this one.

It has an address, a home and users of its own, and a strict sshd (MaxSessions 2, MaxStartups 3). The file
system is this machine's, so that a test can look at what was written there; except for /root, /home, /etc's
users and /var/lib/drafthouse, which are the box's own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .delay import Link
from .place import CHECKOUT, TestbedError, run

ALIAS, JUMP, SLOW = "gpu-box", "gpu-box-jump", "slow-box"
ROUND_TRIP = 0.060  # seconds, of slow-box
OTHER_PORT = 2222  # the same server
INNER_PORT = 2200  # the same server, on the box's own loopback: only who jumps over the box gets there
USERS = {"ada": "/bin/bash", "nobody-home": "/usr/sbin/nologin"}  # name: shell
LOCKS = Path("/run/drafthouse-gpu-boxes")
MOUNTED_ON = Path("/var/lib/drafthouse")
_SUBNETS = 62  # 10.231.8.0/30 and following: as many boxes at once as there are


class GpuBox:
    """One box. `ssh_config` is a client's configuration; nothing of the user's ~/.ssh is read or written."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self.set_environment = dict(environment or {})
        self.directory = Path()
        self.address = ""
        self.number = -1
        self.link: Link | None = None  # slow-box's
        self.users: dict[str, int] = {}
        self._lock: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    # where things are

    @property
    def home(self) -> Path:
        """Root's home there, as seen from here."""
        return self.directory / "root"

    @property
    def state(self) -> Path:
        """A state directory that has the same path here and there."""
        return self.directory / "state"

    @property
    def shm(self) -> Path:
        return Path(f"/dev/shm/drafthouse-box{self.number}")

    @property
    def ssh_config(self) -> Path:
        return self.directory / "client" / "config"

    @property
    def known_hosts(self) -> Path:
        return self.directory / "client" / "known_hosts"

    @property
    def identity(self) -> Path:
        return self.directory / "client" / "id"

    @property
    def log(self) -> Path:
        return self.directory / "sshd.log"

    @property
    def namespace(self) -> str:
        return f"drafthouse-box{self.number}"

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs in its environment to know the box."""
        return {"DRAFTHOUSE_SSH_CONFIG": str(self.ssh_config)}

    def settings(self, **changes: Any) -> dict[str, Any]:
        """What fabric.yaml says of it."""
        return {
            "address": ALIAS,
            "state": str(self.state),
            "shm": str(self.shm),
            "python": sys.executable,
            **changes,
        }

    def project(self, path: Path, **changes: Any) -> Path:
        """A directory to run `fab` in: this checkout's fabfile and recipes, and a fabric.yaml with the box.

        `changes` are settings of gpu-box. gpu-box-jump and slow-box have entries with the same settings.
        """
        import yaml

        path.mkdir(parents=True, exist_ok=True)
        shutil.copy(CHECKOUT / "fabfile.py", path)  # a link would be followed, and mean the checkout
        shutil.copytree(CHECKOUT / "runs", path / "runs")
        hosts = {name: self.settings(**{**changes, "address": name}) for name in (ALIAS, JUMP, SLOW)}
        top = {"tasks": {"executor_class": "deploy.executor.Parallel"}, "drafthouse": {"hosts": hosts}}
        (path / "fabric.yaml").write_text(yaml.safe_dump(top))
        return path

    # its life

    def start(self, seconds: float = 20) -> None:
        """Bring it up and wait until it can be reached. Raises TestbedError otherwise."""
        self._lock, self.number = _take_number()
        remove_namespace(self.number)  # of a session that was killed
        self.address = f"10.231.{8 + self.number // 64}.{self.number % 64 * 4 + 2}"
        self.directory = Path(tempfile.mkdtemp(prefix="drafthouse-box-"))
        os.chmod(self.directory, 0o755)  # containers and other users look for their files below
        try:
            self._network()
            self._files()
            self._serve(seconds)
            self.link = Link((self.address, 22), ROUND_TRIP)
            self.link.start()
            self._client(self.link.port)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End everything that runs in it, and take it away."""
        if self.link is not None:
            self.link.stop()
            self.link = None
        if self.number >= 0:
            remove_namespace(self.number)
        if self._process is not None:
            self._process.wait(10)
            self._process = None
        shutil.rmtree(self.shm, ignore_errors=True)
        # Made to have something to mount on; kept if there is anything in it, and while another box has its
        # own on it: what is removed here is unmounted there.
        if not any(Path("/run/netns").glob("drafthouse-box*")):
            with contextlib.suppress(OSError):
                MOUNTED_ON.rmdir()
        if self.directory != Path():
            shutil.rmtree(self.directory, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def pids(self) -> list[int]:
        """The processes that run in it."""
        return _pids(self.number)

    def alias(self, name: str, **options: Any) -> str:
        """Give the client one more `Host`: gpu-box with other `options` of ssh_config. Returns its name."""
        self._host(name, {"HostName": self.address, "User": "root", "IdentityFile": self.identity, **options})
        return name

    def key(self, name: str, *, passphrase: str = "", allowed: str | None = None) -> Path:
        """A new key of the client's, with which the user `allowed` there lets it in."""
        path = self.ssh_config.parent / name
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", name, "-f", path])
        if allowed:
            with open(self.directory / "keys" / allowed, "a") as keys:
                keys.write(path.with_suffix(".pub").read_text())
        return path

    def user(self, name: str, shell: str) -> str:
        """A new user there with a home, who is let in with the client's key. Returns the name."""
        if name not in self.users:
            self.users[name] = number = 20001 + len(self.users)
            home = self.directory / "home" / name
            home.mkdir()
            os.chown(home, number, number)
            (self.directory / "keys" / name).write_text(self.identity.with_suffix(".pub").read_text())
            lines = {
                "passwd": f"{name}:x:{number}:{number}::/home/{name}:{shell}\n",
                "group": f"{name}:x:{number}:\n",
                "shadow": f"{name}:*:20000:0:99999:7:::\n",
            }
            for file, line in lines.items():
                with open(self.directory / "etc" / file, "a") as users:
                    users.write(line)
        return name

    def run(self, *words: str | Path, user: str = "root", **options: Any) -> str:
        """Run `words` there by plain ssh, for tests that look at it; their output."""
        command = " ".join(shlex.quote(str(word)) for word in words)
        return run(["ssh", "-F", self.ssh_config, "-l", user, ALIAS, command], **options).stdout

    def _network(self) -> None:
        outside, inside = f"dh-box{self.number}", f"dh-box{self.number}i"
        first = self.address.rpartition(".")
        here = f"{first[0]}.{int(first[2]) - 1}"
        run(["ip", "netns", "add", self.namespace])
        run(["ip", "link", "add", outside, "type", "veth", "peer", "name", inside, "netns", self.namespace])
        run(["ip", "addr", "add", f"{here}/30", "dev", outside])
        run(["ip", "link", "set", outside, "up"])
        within = ["ip", "-n", self.namespace]
        run([*within, "addr", "add", f"{self.address}/30", "dev", inside])
        run([*within, "link", "set", inside, "up"])
        run([*within, "link", "set", "lo", "up"])
        run([*within, "route", "add", "default", "via", here])

    def _files(self) -> None:
        for name in ("root", "home", "etc", "client", "client/hosts.d", "keys", "var-lib", "state"):
            (self.directory / name).mkdir(mode=0o755)
        self.shm.mkdir(mode=0o755, exist_ok=True)
        for key in (self.identity, self.directory / "keys" / "host"):
            run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "drafthouse-testbed", "-f", key])
        allowed = self.identity.with_suffix(".pub").read_text()
        (self.directory / "keys" / "root").write_text(allowed)
        for name in ("passwd", "group", "shadow"):
            shutil.copy(f"/etc/{name}", self.directory / "etc")
        for name, shell in USERS.items():
            self.user(name, shell)
        server = [
            "Port 22",
            f"ListenAddress {self.address}:22",
            f"ListenAddress {self.address}:{OTHER_PORT}",
            f"ListenAddress 127.0.0.1:{INNER_PORT}",
            f"HostKey {self.directory}/keys/host",
            f"PidFile {self.directory}/sshd.pid",
            f"AuthorizedKeysFile {self.directory}/keys/%u",
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin prohibit-password",
            "Subsystem sftp internal-sftp",
            "KexAlgorithms curve25519-sha256",  # what takes the least CPU
            "Ciphers aes128-gcm@openssh.com",
            "MaxStartups 3",
            "MaxSessions 2",
            "LogLevel VERBOSE",
        ]
        if self.set_environment:  # one line: sshd takes the first SetEnv only
            server.append("SetEnv " + " ".join(f'"{k}={v}"' for k, v in self.set_environment.items()))
        (self.directory / "sshd_config").write_text("\n".join(server) + "\n")

    def _serve(self, seconds: float) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd's empty directory for privilege separation
        MOUNTED_ON.mkdir(exist_ok=True)
        script = " && ".join(" ".join(shlex.quote(str(word)) for word in step) for step in self._steps())
        with open(self.directory / "start.log", "wb") as output:
            self._process = subprocess.Popen(
                [*self._enter(), "sh", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
                start_new_session=True,
            )
        deadline = time.monotonic() + seconds
        while self._process.poll() is None and time.monotonic() < deadline:
            with (
                contextlib.suppress(OSError),
                socket.create_connection((self.address, 22), 1) as connection,
            ):
                if connection.recv(4) == b"SSH-":
                    return
            time.sleep(0.02)
        said = (self.directory / "start.log").read_text(errors="replace")
        said += self.log.read_text(errors="replace") if self.log.exists() else ""
        raise TestbedError(f"the gpu-box's sshd did not come up:\n{said[-2000:]}")

    def _enter(self) -> list[str]:
        """The words before its first program, which put that into the box's namespaces."""
        # Not `ip netns exec`, which remounts /sys and so hides the cgroups.
        return ["nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "-m", "--propagation", "private"]

    def _steps(self) -> list[list[str | Path]]:
        """What is mounted there, as commands of a shell; the last becomes its server."""
        box, root = self.directory, Path(pwd.getpwuid(0).pw_dir)
        steps: list[list[str | Path]] = []
        for prefix in {Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}:
            if prefix.is_relative_to(root):  # the Python of the tests, and what it has: there too
                inside = self.home / prefix.relative_to(root)
                inside.mkdir(parents=True, exist_ok=True)
                steps.append(["mount", "--bind", prefix, inside])
        steps += [["mount", "--rbind", self.home, root], ["mount", "--bind", box / "home", "/home"]]
        steps += [["mount", "--bind", box / "etc" / name, f"/etc/{name}"] for name in ("passwd", "group")]
        steps += [["mount", "--bind", box / "etc" / "shadow", "/etc/shadow"]]
        steps += [["mount", "--bind", box / "var-lib", MOUNTED_ON]]
        return [
            *steps,
            ["cd", "/"],
            ["exec", "/usr/sbin/sshd", "-D", "-f", box / "sshd_config", "-E", self.log],
        ]

    def _client(self, slow_port: int) -> None:
        kind, key, *_ = (self.directory / "keys" / "host.pub").read_text().split()
        names = [self.address, f"[{self.address}]:{OTHER_PORT}"]
        names += [f"[127.0.0.1]:{INNER_PORT}", f"[127.0.0.1]:{slow_port}"]
        self.known_hosts.write_text("".join(f"{name} {kind} {key}\n" for name in names))
        self.alias(ALIAS)
        self.alias(f"{ALIAS}-port", Port=OTHER_PORT)
        self.alias(JUMP, HostName="127.0.0.1", Port=INNER_PORT, ProxyJump=ALIAS)
        self.alias(SLOW, HostName="127.0.0.1", Port=slow_port)
        self.ssh_config.write_text(f"Include {self.ssh_config.parent}/hosts.d/*\n")

    def _host(self, name: str, options: Mapping[str, Any]) -> None:
        """By Include, as people with many hosts have it."""
        defaults = {
            "IdentitiesOnly": "yes",
            "IdentityAgent": "none",
            "UserKnownHostsFile": self.known_hosts,
            "GlobalKnownHostsFile": "/dev/null",
        }
        lines = [f"  {key} {value}\n" for key, value in {**defaults, **options}.items()]
        (self.ssh_config.parent / "hosts.d" / name).write_text(f"Host {name}\n" + "".join(lines))


def _take_number() -> tuple[int, int]:
    """The descriptor that holds a number, and the number: other sessions have boxes beside ours."""
    LOCKS.mkdir(exist_ok=True)
    for number in range(_SUBNETS):
        descriptor = os.open(LOCKS / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor, number
        os.close(descriptor)
    raise TestbedError(f"{_SUBNETS} gpu-boxes are up on this machine: wait for some to end")


def left() -> list[int]:
    """Numbers of boxes that are up although no session holds them."""
    found = []
    for namespace in Path("/run/netns").glob("drafthouse-box*"):
        number = namespace.name.removeprefix("drafthouse-box")
        with open(LOCKS / number, "w") as lock, contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found.append(int(number))
    return sorted(found)


def remove_namespace(number: int, seconds: float = 10) -> None:
    """End what runs in a box, and remove its network."""
    deadline = time.monotonic() + seconds
    while pids := _pids(number):
        if time.monotonic() > deadline:
            raise TestbedError(f"these processes of a gpu-box cannot be ended: {pids}")
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    run(["ip", "link", "del", f"dh-box{number}"], check=False)
    run(["ip", "netns", "del", f"drafthouse-box{number}"], check=False)


def _pids(number: int) -> list[int]:
    done = run(["ip", "netns", "pids", f"drafthouse-box{number}"], check=False)
    return [int(word) for word in done.stdout.split()] if done.returncode == 0 else []
