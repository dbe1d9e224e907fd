"""What bare machines find on their network: Debian's mirror, and what stands for download.docker.com.

They have a network of their own with a loopback and nothing else, where /etc/hosts puts the names below.
Requests for Debian's are passed on to the real mirrors. Docker's repository cannot be counted on from where
tests run, so it is made here: the paths, fields and relations of the real one, over HTTPS, signed; its
packages hold next to nothing (`docker` and `dockerd` are scripts that know what a look at a host asks).
"""

from __future__ import annotations

import ctypes
import gzip
import hashlib
import http.server
import os
import socket
import ssl
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path

from .place import TestbedError, run

DOCKER = "download.docker.com"
ROOT = "/linux/debian"
RELEASE = f"{ROOT}/dists/bookworm/InRelease"
OWNER = "Docker Release (CE deb) <docker@docker.com>"
DEBIAN = ("deb.debian.org", "security.debian.org")
NAMES = (DOCKER, *DEBIAN)
_PASSED_ON = ("If-Modified-Since", "If-Range", "Range", "Cache-Control")
_CLONE_NEWNET = 0x40000000

_DOCKER_COMMAND = r"""#!/bin/sh
# Answers what a look at a host asks, and nothing else. The engine runs once /run/docker.sock is there.
engine() {
  [ -e /run/docker.sock ] && return
  echo 'Cannot connect to the Docker daemon at unix:///run/docker.sock.' >&2; exit 1
}
case "$*" in
  'version --format {{.Server.Version}}') engine; echo 28.5.1;;
  'compose version --short') [ -x /usr/libexec/docker/cli-plugins/docker-compose ] || exit 1; echo 2.40.3;;
  info*) engine; echo 'io.containerd.runc.v2 runc ';;
  *) echo "unknown: docker $*" >&2; exit 125;;
esac
"""
WEIGHT = 3_000_000  # bytes of docker-ce
# package: version, more fields of control, {file: content}. After the real ones.
PACKAGES: dict[str, tuple[str, str, dict[str, str]]] = {
    "containerd.io": (
        "1.7.28-0~debian.12~bookworm",
        "Provides: containerd, runc\nConflicts: containerd, runc\nReplaces: containerd, runc\n",
        {"usr/bin/containerd": "#!/bin/sh\n"},
    ),
    "docker-ce": (
        "5:28.5.1-1~debian.12~bookworm",
        "Depends: containerd.io (>= 1.7.27), docker-ce-cli\nRecommends: docker-ce-rootless-extras\n"
        "Conflicts: docker (<< 1.5~), docker-engine, docker.io\n",
        {
            "usr/bin/dockerd": "#!/bin/sh\ntouch /run/docker.sock\n",
            "usr/share/docker/weight": "-" * WEIGHT,
            "lib/systemd/system/docker.service": "[Service]\nExecStart=/usr/bin/dockerd\n",
        },
    ),
    "docker-ce-cli": (
        "5:28.5.1-1~debian.12~bookworm",
        "Recommends: docker-buildx-plugin, docker-compose-plugin\nConflicts: docker (<< 1.5~)\n",
        {"usr/bin/docker": _DOCKER_COMMAND},
    ),
    "docker-ce-rootless-extras": ("5:28.5.1-1~debian.12~bookworm", "Depends: docker-ce\n", {}),
    "docker-buildx-plugin": (
        "0.29.1-1~debian.12~bookworm",
        "Enhances: docker-ce-cli\n",
        {"usr/libexec/docker/cli-plugins/docker-buildx": "#!/bin/sh\n"},
    ),
    "docker-compose-plugin": (
        "2.40.3-1~debian.12~bookworm",
        "Enhances: docker-ce-cli\n",
        {"usr/libexec/docker/cli-plugins/docker-compose": "#!/bin/sh\n"},
    ),
}


class Archive:
    """Docker's repository in `directory`, and what serves it. `certificate` is to be trusted by its users.

    `replaced` are answers to be given in place of a file, by path: a status without a body, or other bytes.
    `requests` are the paths that were asked of Docker's.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.certificate = directory / "ca.pem"
        self.architecture = run(["dpkg", "--print-architecture"]).stdout.strip()
        self.files: dict[str, bytes] = {}
        self.replaced: dict[str, int | bytes] = {}
        self.requests: list[str] = []
        self.fingerprint = ""
        self.other_key = b""  # another one of the same owner's name
        self.early_release = b""  # signed tomorrow
        self._servers: list[http.server.ThreadingHTTPServer] = []

    def make(self) -> None:
        """Packages, lists, signatures and certificates."""
        self.directory.mkdir(parents=True, exist_ok=True)
        suite = f"{ROOT}/dists/bookworm"
        entries = []
        for name, (version, fields, content) in PACKAGES.items():
            plain = version.partition(":")[2] or version
            file = f"pool/stable/{self.architecture}/{name}_{plain}_{self.architecture}.deb"
            control, data = self._package(name, version, fields, content)
            self.files[f"{suite}/{file}"] = data
            entries.append(
                f"{control}Filename: dists/bookworm/{file}\nSize: {len(data)}\n"
                f"SHA256: {hashlib.sha256(data).hexdigest()}\n"
            )
        packages = "\n".join(entries).encode()
        lists = {
            f"stable/binary-{self.architecture}/Packages": packages,
            f"stable/binary-{self.architecture}/Packages.gz": gzip.compress(packages, mtime=0),
        }
        sums = "".join(
            f" {hashlib.sha256(data).hexdigest()} {len(data)} {name}\n" for name, data in lists.items()
        )
        release = (
            "Origin: Docker\nLabel: Docker CE\nSuite: bookworm\nCodename: bookworm\nDate: {date}\n"
            f"Architectures: {self.architecture}\nComponents: stable\nSHA256:\n{sums}"
        )
        self.files.update({f"{suite}/{name}": data for name, data in lists.items()})
        with _Keys() as keys:
            self.fingerprint, self.files[f"{ROOT}/gpg"] = keys.make(OWNER)
            _, self.other_key = keys.make(OWNER)
            now = time.time()
            dated = [release.format(date=formatdate(when, usegmt=True)) for when in (now, now + 86_400)]
            self.files[RELEASE], self.early_release = (keys.sign(text, self.fingerprint) for text in dated)
        self._certificates()

    def _package(self, name: str, version: str, fields: str, content: dict[str, str]) -> tuple[str, bytes]:
        control = (
            f"Package: {name}\nVersion: {version}\nArchitecture: {self.architecture}\n"
            f"Maintainer: Docker <support@docker.com>\nSection: admin\nPriority: optional\n{fields}"
            f"Description: stand-in for {name}\n"
        )
        return control, package(control, content)

    def _certificates(self) -> None:
        at = self.directory
        new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        run([*new, "-keyout", at / "ca.key", "-out", self.certificate, "-days", "2", "-subj", "/CN=testbed"])
        own = ["-CA", self.certificate, "-CAkey", at / "ca.key", "-addext", f"subjectAltName=DNS:{DOCKER}"]
        own += ["-addext", "basicConstraints=critical,CA:FALSE"]
        run([*new, "-keyout", at / "key", "-out", at / "crt", "-days", "2", "-subj", f"/CN={DOCKER}", *own])

    # serving

    def serve(self, network: Path) -> None:
        """Listen on ports 80 and 443 of the loopback of the network namespace `network`."""
        self._start(_socket_in(network, 80), self._answer_debian)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.directory / "crt", self.directory / "key")
        self._start(_socket_in(network, 443), self._answer_docker, context)

    def stop(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()
        self._servers = []

    def _start(
        self,
        listening: socket.socket,
        answer: Callable[[http.server.BaseHTTPRequestHandler], tuple[int, dict[str, str], bytes]],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                if tls:  # here, in the connection's own thread
                    self.request = tls.wrap_socket(self.request, server_side=True)
                super().setup()

            def do_GET(self) -> None:
                status, headers, body = answer(self)
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:  # a client that has gone
                pass

        server = Server(("", 0), Handler, bind_and_activate=False)
        server.socket.close()
        server.socket = listening
        self._servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def _answer_docker(
        self, request: http.server.BaseHTTPRequestHandler
    ) -> tuple[int, dict[str, str], bytes]:
        self.requests.append(request.path)
        # apt writes ~ as %7e
        path = urllib.request.url2pathname(request.path)
        found = self.replaced.get(path, self.files.get(path, 404))
        return (found, {}, b"") if isinstance(found, int) else (200, {}, found)

    def _answer_debian(
        self, request: http.server.BaseHTTPRequestHandler
    ) -> tuple[int, dict[str, str], bytes]:
        name = request.headers.get("Host", "")
        if name not in DEBIAN:
            return 403, {}, b""
        headers = {key: request.headers[key] for key in _PASSED_ON if key in request.headers}
        asked = urllib.request.Request(f"http://{name}{request.path}", headers=headers)
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                kept = ("Last-Modified", "Content-Range", "ETag")
                return (
                    answer.status,
                    {k: answer.headers[k] for k in kept if k in answer.headers},
                    answer.read(),
                )
        except urllib.error.HTTPError as error:
            return error.code, {}, b""
        except OSError:
            return 502, {}, b""


class _Keys:
    """A gpg of our own, for as long as it is needed."""

    def __enter__(self) -> _Keys:
        self.home = tempfile.TemporaryDirectory(
            prefix="dh-gpg-"
        )  # a short path: its agent has a socket there
        self.environment = {"GNUPGHOME": self.home.name}
        return self

    def __exit__(self, *_: object) -> None:
        run(["gpgconf", "--kill", "all"], env=self.environment, check=False)
        self.home.cleanup()

    def make(self, owner: str) -> tuple[str, bytes]:
        """A new key's fingerprint, and the key, armored."""
        new = [
            "gpg",
            "--batch",
            "--yes",
            "--passphrase",
            "",
            "--status-fd",
            "1",
            "--quick-generate-key",
            owner,
        ]
        said = run([*new, "ed25519", "sign", "never"], env=self.environment)
        fingerprint = said.stdout.split("KEY_CREATED ")[1].split()[1]
        return fingerprint, run(
            ["gpg", "--armor", "--export", fingerprint], env=self.environment
        ).stdout.encode()

    def sign(self, text: str, fingerprint: str) -> bytes:
        sign = ["gpg", "--batch", "--clearsign", "--digest-algo", "SHA512", "--local-user", fingerprint]
        return run(sign, env=self.environment, input=text).stdout.encode()


def package(control: str, content: dict[str, str], scripts: dict[str, str] | None = None) -> bytes:
    """A Debian package with these files, all of them executable."""
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary) / "tree"
        files = {"DEBIAN/control": control, **content}
        files |= {f"DEBIAN/{name}": text for name, text in (scripts or {}).items()}
        for name, text in files.items():
            path = tree / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o644 if name == "DEBIAN/control" else 0o755)
        for folder, _, _ in os.walk(tree):
            os.chmod(folder, 0o755)
        run(["dpkg-deb", "-Znone", "--root-owner-group", "--build", tree, Path(temporary) / "made.deb"])
        return (Path(temporary) / "made.deb").read_bytes()


def _socket_in(network: Path, port: int) -> socket.socket:
    """A listening socket on the loopback of another network namespace. A thread is there for a moment."""
    found: list[socket.socket | OSError] = []

    def enter() -> None:
        try:
            with open(network) as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            found.append(socket.create_server(("127.0.0.1", port), backlog=64))
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if isinstance(found[0], OSError):
        raise TestbedError(f"port {port} of the bare machine's network: {found[0]}")
    return found[0]
