"""The testbed's parts as pytest fixtures, one of each for a whole session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import base_image
from .bare import BareMachines
from .docker import Compose, Docker
from .engine import running, wait_for_preparing
from .gpubox import GpuBox
from .pct.box import PveBox
from .place import CHECKOUT, work_directory
from .second import SecondEngine
from .sshd import SshServer


@pytest.fixture(scope="session")
def testbed_directory() -> Path:
    """DRAFTHOUSE_TESTBED: what tests keep between sessions."""
    directory = work_directory()
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@pytest.fixture(scope="session")
def engine(testbed_directory: Path) -> Iterator[Docker]:
    """A real Docker engine of our own; commands to it. Mark the test `engine`.

    DRAFTHOUSE_TESTBED_ENGINE names one that `python3 -m tests.testbed up` has brought up, and keeps up.
    """
    wait_for_preparing()
    with running() as docker:
        yield docker


@pytest.fixture(scope="session")
def base_images(engine: Docker) -> Docker:
    """The engine, knowing debian:bookworm-slim and python:3.11-slim-bookworm."""
    base_image.provide(engine.command)
    return engine


@pytest.fixture(scope="module")
def second_engine(base_images: Docker) -> Iterator[SecondEngine]:
    """The empty engine of another machine, without a network. Mark the test `engine`."""
    own = SecondEngine()
    own.start()
    try:
        yield own
    finally:
        own.stop()


@pytest.fixture(scope="session")
def image(base_images: Docker) -> str:
    """The name of the trainer's image, built by the top-level compose.yaml from this checkout."""
    Compose(base_images, CHECKOUT / "compose.yaml").run("build", timeout=1200)
    return "drafthouse:local"


@pytest.fixture
def compose(engine: Docker) -> Compose:
    """`docker compose` with the top-level compose.yaml."""
    return Compose(engine, CHECKOUT / "compose.yaml")


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    """An SSH server on loopback that lets the user of the tests in. Mark the test `sshd`."""
    server = SshServer(tmp_path_factory.mktemp("sshd"))
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def gpubox() -> Iterator[GpuBox]:
    """Another machine to SSH, without an engine. Mark the test `root` and `sshd`."""
    # Whatever engine this machine may have is none of the box's.
    box = GpuBox({"DOCKER_HOST": "unix:///run/no-engine-on-this-box.sock"})
    box.start()
    try:
        yield box
    finally:
        box.stop()


@pytest.fixture(scope="session")
def docker_box(engine: Docker) -> Iterator[GpuBox]:
    """Another machine to SSH, with the testbed's engine and Compose. Mark the test `engine` and `sshd`."""
    box = GpuBox({**engine.environment, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
    box.start()
    try:
        yield box
    finally:
        box.stop()


@pytest.fixture(scope="module")
def pve_box(testbed_directory: Path) -> Iterator[PveBox]:
    """A Proxmox VE 9.1 host to SSH, without containers and GPUs; see PveBox. Mark the test `pve`."""
    box = PveBox()
    box.start()
    try:
        yield box
    finally:
        box.stop()


@pytest.fixture(scope="module")
def bare_machines(
    testbed_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BareMachines]:
    """Debian machines with next to nothing on them, to be thrown away. Mark the test `bare`."""
    site = BareMachines(tmp_path_factory.mktemp("bare"))
    site.start()
    try:
        yield site
    finally:
        site.stop()


@pytest.fixture(scope="session")
def toy_cache(testbed_directory: Path) -> Path:
    """The toy targets that tests share: the first test that needs one makes it, the others find it."""
    directory = testbed_directory / "toy-cache"
    directory.mkdir(exist_ok=True)
    return directory


@pytest.fixture
def buffered_environment() -> dict[str, str]:
    """The environment without PYTHONUNBUFFERED, which some machines set: for tests of buffering itself."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
