"""An SSH server on loopback with keys of its own, and the client's configuration to reach it."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from .place import TestbedError, run

ALIAS = "testbed"


class SshServer:
    """sshd in `directory`, on a free port of 127.0.0.1, for the user that runs the tests.

    `client` is an OpenSSH client configuration with the host alias `testbed`, and a known_hosts of its own:
    nothing is read from or written to the user's ~/.ssh.
    """

    def __init__(self, directory: Path, set_environment: Mapping[str, str] | None = None) -> None:
        self.directory = directory
        self.set_environment = dict(set_environment or {})
        self.user = pwd.getpwuid(os.geteuid()).pw_name
        self.port = 0
        self.identity = directory / "id"
        self.known_hosts = directory / "known_hosts"
        self.client = directory / "ssh_config"
        self.log = directory / "sshd.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, seconds: float = 10) -> None:
        """Write keys and configuration, start, and wait for its banner. Raises TestbedError otherwise."""
        self.directory.mkdir(parents=True, exist_ok=True)
        os.chmod(self.directory, 0o700)
        for key in (self.identity, self.directory / "host_key"):
            run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "drafthouse-testbed", "-f", key])
        shutil.copy(f"{self.identity}.pub", self.directory / "authorized_keys")
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # sshd's empty directory for privilege separation
        for _ in range(5):  # the free port may be taken before sshd has it
            self.port = _free_port()
            self._write_configuration()
            server = shutil.which("sshd", path=f"/usr/sbin:/sbin:{os.environ['PATH']}") or "sshd"
            self._process = subprocess.Popen(
                [server, "-D", "-f", str(self.directory / "sshd_config"), "-E", str(self.log)],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            deadline = time.monotonic() + seconds
            while self._process.poll() is None and time.monotonic() < deadline:
                if self._speaks():
                    return
                time.sleep(0.02)
            self.stop()
        raise TestbedError(f"sshd did not come up:\n{self.log.read_text(errors='replace')[-2000:]}")

    def stop(self) -> None:
        """End it, and the sessions that it still serves."""
        if self._process is None:
            return
        for pid in _children(self._process.pid):
            with contextlib.suppress(OSError):
                os.kill(pid, 15)
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)
        self._process = None

    def _write_configuration(self) -> None:
        here = self.directory
        server = [
            f"Port {self.port}",
            "ListenAddress 127.0.0.1",
            f"HostKey {here}/host_key",
            f"PidFile {here}/sshd.pid",
            f"AuthorizedKeysFile {here}/authorized_keys",
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin prohibit-password",
            f"AllowUsers {self.user}",
            "Subsystem sftp internal-sftp",
            "KexAlgorithms curve25519-sha256",  # what takes the least CPU
            "Ciphers aes128-gcm@openssh.com",
            "MaxStartups 100:30:200",  # tests open many connections at once
            "MaxSessions 50",
        ]
        if self.set_environment:  # one line: sshd takes the first SetEnv only
            server.append("SetEnv " + " ".join(f'"{k}={v}"' for k, v in self.set_environment.items()))
        (here / "sshd_config").write_text("\n".join(server) + "\n")
        host_key = (here / "host_key.pub").read_text().split()
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {host_key[0]} {host_key[1]}\n")
        self.client.write_text(
            f"Host {ALIAS}\n"
            f"  HostName 127.0.0.1\n  Port {self.port}\n  User {self.user}\n"
            f"  IdentityFile {self.identity}\n  IdentitiesOnly yes\n  IdentityAgent none\n"
            f"  UserKnownHostsFile {self.known_hosts}\n  GlobalKnownHostsFile /dev/null\n"
            f"  StrictHostKeyChecking yes\n  BatchMode yes\n"
        )

    def _speaks(self) -> bool:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port), 1) as connection,
        ):
            return connection.recv(4) == b"SSH-"
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []
