"""Images over a real sshd (MaxSessions 2, MaxStartups 3) to an engine that reaches no network."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from elsewhere import describe, holders, small_checkout, tags, wire_bytes
from testbed.docker import Docker
from testbed.gpubox import GpuBox
from testbed.place import CHECKOUT
from testbed.second import SecondEngine

from deploy import image, shipping
from deploy.errors import DeployError
from deploy.ssh import Ssh

pytestmark = [
    pytest.mark.engine,
    pytest.mark.root,
    pytest.mark.sshd,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

# What an older release of the recipe needed, and a newer one: one of the pins has moved.
BEFORE, AFTER = ("numpy", "pyyaml"), ("numpy", "pyyaml", "safetensors")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkout(tmp_path_factory.mktemp("checkout"), BEFORE)


@pytest.fixture(scope="module")
def there(second_engine: SecondEngine) -> Docker:
    return Docker(second_engine.url)


@pytest.fixture(scope="module")
def box(there: Docker) -> Iterator[GpuBox]:
    own = GpuBox({**there.environment, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
    own.start()
    try:
        yield own
    finally:
        own.stop()


@pytest.fixture
def host(box: GpuBox, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ssh]:
    for key, value in box.environment.items():
        monkeypatch.setenv(key, value)
    own = Ssh("gpu-box", python="/usr/bin/python3")
    try:
        yield own
    finally:
        own.close()


@pytest.fixture(autouse=True)
def here(
    base_images: Docker, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Docker:
    cache = tmp_path_factory.getbasetemp() / "image-cache"
    for key, value in {**base_images.environment, "XDG_CACHE_HOME": str(cache)}.items():
        monkeypatch.setenv(key, value)
    return base_images


@pytest.fixture(scope="module", autouse=True)
def _nothing_left(base_images: Docker, checkout: Path) -> Iterator[None]:
    yield
    for tag in tags(base_images) & {describe(checkout).packages}:
        base_images.run("image", "rm", "--force", tag)


def until(condition: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


def works(there: Docker, one: image.Image) -> bool:
    script = "import os, trainer.status, yaml; print(os.getuid(), open('/proc/1/comm').read().strip())"
    done = there.run("run", "--rm", "--network=none", one.reference, "python", "-c", script)
    return done.split() == ["10001", "tini"]


def size_of(there: Docker, one: image.Image) -> int:
    return int(there.run("image", "inspect", "--format", "{{.Size}}", one.reference))


def forget(there: Docker) -> None:
    for tag in tags(there):
        if tag.startswith("drafthouse:"):
            there.run("image", "rm", "--force", tag)
    there.run("image", "prune", "--force")


def test_interrupted_by_a_lost_link_then_shipped_then_only_changes_travel(
    host: Ssh, box: GpuBox, there: Docker, here: Docker, checkout: Path, tmp_path: Path
) -> None:
    """The life of an image on one host: each part goes on from what the one before has left there."""
    one, state = describe(checkout), str(box.state)
    incoming = box.state / "images" / "incoming"

    # The link is lost in the middle of the transfer.
    def lose_the_link() -> None:
        until(lambda: _arrived(incoming) > 16 << 20)
        for pid in set(holders(["rsync", "--server"])) & set(box.pids()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=lose_the_link)
    thread.start()
    with pytest.raises(DeployError, match=r"the image did not get to gpu-box whole: .*run the command again"):
        image.make(host, state, one, "ship", lambda text: None)
    thread.join()
    assert not tags(there) & {one.reference, one.packages}

    # Again: it works, and what had arrived does not travel again.
    image.make(host, state, one, "ship", lambda text: None)
    assert works(there, one)
    whole = size_of(there, one)

    # A change of the trainer: less than 5 % of the image's bytes, everything that passed the wire counted.
    changed_root = tmp_path / "changed"
    changed_root.mkdir()
    changed = small_checkout(changed_root, BEFORE)
    with open(changed / "trainer" / "status.py", "a") as file:
        file.write("\nCHANGED = 1\n")
    counted = wire_bytes(box.number)
    image.make(host, state, describe(changed), "ship", lambda text: None)
    travelled = wire_bytes(box.number) - counted
    assert works(there, describe(changed))
    assert travelled < 0.05 * whole, f"{travelled} of {whole} bytes"

    # A package more: new packages, of which rsync takes the difference to the old ones.
    pinned_root = tmp_path / "pinned"
    pinned_root.mkdir()
    pinned = small_checkout(pinned_root, AFTER)
    counted = wire_bytes(box.number)
    image.make(host, state, describe(pinned), "ship", lambda text: None)
    travelled = wire_bytes(box.number) - counted
    assert works(there, describe(pinned))
    assert travelled < 0.2 * whole, f"{travelled} of {whole} bytes"
    here.run("image", "rm", "--force", describe(pinned).packages)


def _arrived(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*") if directory.exists() else ():
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


SHIP = """
import sys
from pathlib import Path
from deploy import image
from deploy.ssh import Ssh
from e2e.elsewhere import describe
image.ship(Ssh("gpu-box", python="/usr/bin/python3"), sys.argv[1], describe(Path(sys.argv[2])), print)
"""


@pytest.mark.parametrize("when", ["shipping", "loading"])
def test_a_client_that_is_killed_spoils_nothing(
    host: Ssh, box: GpuBox, there: Docker, checkout: Path, tmp_path: Path, when: str
) -> None:
    forget(there)
    one = describe(checkout)
    state = box.directory / f"state-{when}"
    client = subprocess.Popen(
        [sys.executable, "-c", SHIP, str(state), str(checkout)],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'tests'}"},
        start_new_session=True,
    )
    incoming, loading = state / "images" / "incoming", state / "images" / "load.json"
    if when == "shipping":
        until(lambda: _arrived(incoming) > 16 << 20 or client.poll() is not None)
    else:
        until(lambda: loading.exists() or client.poll() is not None)
    os.killpg(client.pid, signal.SIGKILL)
    client.wait()
    image.ship(host, str(state), one, lambda text: None)
    assert works(there, one)


def test_a_host_without_rsync_is_told_before_anything_is_taken_from_the_engine(
    host: Ssh, box: GpuBox, there: Docker, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget(there)
    real = image._survey
    monkeypatch.setattr(image, "_survey", lambda *words: {**real(*words), "rsync": None})
    monkeypatch.setattr(shipping, "export", lambda *words: pytest.fail("it was exported"))
    with pytest.raises(DeployError, match=r"gpu-box has no rsync.*fab bootstrap --host gpu-box"):
        image.ship(host, str(box.state), describe(checkout), lambda text: None)


def test_a_build_there_ends_when_the_client_that_asked_for_it_is_killed(
    docker_box: GpuBox, here: Docker, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "checkout"
    root.mkdir()
    small_checkout(root, BEFORE)
    text = (root / "Dockerfile").read_text()
    (root / "Dockerfile").write_text(text.replace("ARG VARIANT=cpu", "RUN sleep 600\nARG VARIANT=cpu", 1))
    state = docker_box.directory / "state-build"
    program = SHIP.replace("image.ship(", "image.build_on_host(")
    client = subprocess.Popen(
        [sys.executable, "-c", program, str(state), str(root)],
        stdout=subprocess.DEVNULL,
        env={**os.environ, **docker_box.environment, "PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'tests'}"},
        start_new_session=True,
    )

    def building() -> list[int]:
        return holders(["compose.build.json", str(state)])

    until(lambda: building() or client.poll() is not None)
    os.killpg(client.pid, signal.SIGKILL)
    client.wait()
    until(lambda: not building(), seconds=60)
    until(lambda: not list((state / "images").glob(".build-*")))
