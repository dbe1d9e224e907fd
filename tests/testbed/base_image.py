"""The base images of the tests, made without a container registry.

``debian:bookworm-slim`` is a minimal Debian from Debian's own packages; ``python:3.11-slim-bookworm`` (the
Dockerfile's default) is that with Python. So the product's Dockerfile is built exactly as users have it.
Where an image travels, it is built on the second without PyTorch's wheel, which is half of it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import ssl
import sys
import tempfile
from pathlib import Path

from .place import CHECKOUT, TestbedError, run, work_directory

DEBIAN = "debian:bookworm-slim"
PYTHON = "python:3.11-slim-bookworm"
SMALL = "testbed-python:3.11-slim-bookworm"
RECIPE = Path(__file__).with_name("python-base")
_SLIM = [f"--dpkgopt=path-exclude=/usr/share/{part}/*" for part in ("man", "locale", "doc")]
_SLIM += ["--dpkgopt=force-unsafe-io"]  # as in Docker's own image: no fsync for each file


def provide(docker: list[str]) -> None:
    """Make these images known to the engine behind the command `docker`; what is there already stays."""
    debian_digest = _digest("debian", *_SLIM)
    if _label(docker, DEBIAN) != debian_digest:
        label = f"LABEL drafthouse.testbed={debian_digest}"
        run([*docker, "import", "--change", label, debian_tarball(), DEBIAN], timeout=300)
    certificates, settings = certificate_bundle(), pip_settings()
    recipe = (RECIPE / "Dockerfile").read_text()
    digest = _digest(debian_digest, recipe, certificates.read_text(errors="replace"), settings, torch_pin())
    if _label(docker, PYTHON) == digest:
        return
    with tempfile.TemporaryDirectory(dir=work_directory()) as temporary:
        context = Path(temporary)
        shutil.copy(RECIPE / "Dockerfile", context)
        shutil.copy(certificates, context / "ca.crt")
        (context / "pip.conf").write_text(settings)
        shutil.copytree(torch_wheels(), context / "wheels")
        for tag, stage in ((SMALL, ["--target", "small"]), (PYTHON, [])):
            run(
                [*docker, "build", "-q", "--build-arg", f"DIGEST={digest}", *stage, "-t", tag, context],
                timeout=900,
                env={"DOCKER_BUILDKIT": "1"},
            )


def debian_tarball() -> Path:
    """The root file system of a minimal Debian, kept in the work directory between sessions."""
    tarball = work_directory() / f"debian-{_digest('debian', *_SLIM)}.tar"
    with open(tarball.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may be at it
        _make_tarball(tarball)
    return tarball


def _make_tarball(tarball: Path) -> None:
    if not tarball.exists():
        partial = tarball.with_suffix(".partial.tar")
        quiet = '--aptopt=Acquire::Languages "none"'
        with tempfile.TemporaryDirectory(dir=work_directory()) as temporary:
            os.chmod(temporary, 0o755)  # apt's own user reads there
            bootstrap = ["mmdebstrap", "--quiet", "--variant=minbase", "--include=ca-certificates"]
            run(
                [*bootstrap, *_SLIM, quiet, "bookworm", partial],
                timeout=900,
                env={"TMPDIR": temporary},
            )
        partial.rename(tarball)


def torch_wheels() -> Path:
    """A directory with the torch wheel that pip on this machine would install for the image's Python.

    Fetched here rather than in the build, where a wheel that lies on this machine's disk cannot be seen.
    """
    directory = work_directory() / f"wheels-{_digest(torch_pin(), platform.machine())}"
    if not directory.exists():
        partial = directory.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(partial)]
        target = ["--python-version", "3.11", "--only-binary=:all:"]
        run(
            [*download, *target, "--platform", f"manylinux_2_28_{platform.machine()}", torch_pin()],
            timeout=1800,
        )
        partial.rename(directory)
    return directory


def torch_pin() -> str:
    """The line for torch in constraints.txt."""
    found = re.search(r"^torch==\S+$", (CHECKOUT / "constraints.txt").read_text(), re.M)
    if not found:
        raise TestbedError("constraints.txt has no line torch==…: make lock")
    return found[0]


def certificate_bundle() -> Path:
    """The certificates that pip on this machine trusts: a build behind the same network needs them too."""
    candidates = [os.environ.get("PIP_CERT"), os.environ.get("SSL_CERT_FILE")]
    candidates += [ssl.get_default_verify_paths().cafile, "/etc/ssl/certs/ca-certificates.crt"]
    for candidate in candidates:
        if candidate and os.path.isfile(candidate):
            return Path(candidate)
    raise TestbedError("no certificate bundle found: apt-get install ca-certificates")


def pip_settings() -> str:
    """A pip.conf for the image with this machine's package index, as far as a container can reach it."""
    lines = ["[global]", "cert = /etc/testbed/ca.crt", "find-links = /etc/testbed/wheels"]
    listed = run([sys.executable, "-m", "pip", "config", "list"]).stdout
    for key, value in re.findall(
        r"^(?:global|:env:)\.(index-url|extra-index-url|trusted-host)='(.*)'$", listed, re.M
    ):
        reachable = [word for word in re.split(r"\\n|\s+", value) if word and not word.startswith("file:")]
        if reachable:
            lines.append(f"{key} = {' '.join(reachable)}")
    return "\n".join(lines) + "\n"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _label(docker: list[str], image: str) -> str:
    done = run(
        [*docker, "image", "inspect", "-f", '{{index .Config.Labels "drafthouse.testbed"}}', image],
        check=False,
    )
    return done.stdout.strip()
