"""Images over a real sshd (MaxSessions 2, MaxStartups 3) to an engine that reaches no network."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from deployed import Place
from elsewhere import describe, holders, require, small_checkout, tags, wire_bytes
from fabbed import FAB, of_checkout
from testbed.base_image import SMALL
from testbed.docker import Docker
from testbed.gpubox import GpuBox
from testbed.place import CHECKOUT
from testbed.second import SecondEngine

from deploy import image, shipping
from deploy.errors import DeployError
from deploy.ssh import Ssh
from trainer import status

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


# In the place of the training itself, which needs PyTorch: it tells by which code of ours it was started.
COUNTING = """\
import itertools, time
from trainer import status
def run(settings, monitor):
    print("code", getattr(status, "CHANGED", 0), flush=True)
    monitor.phase("training")
    for number in itertools.count():
        print("line", number, flush=True)
        time.sleep(0.05)
"""
RECIPE = f"""\
name: shipped1
image: {{base: "{SMALL}"}}
weights: toy
data: toy
trainer: {{epochs: 1}}
grace_seconds: 5
"""


class Shipped:
    """`fab` in a checkout of its own, which deploys to the box."""

    def __init__(self, box: GpuBox, there: Docker, root: Path) -> None:
        self.box, self.there, self.root = box, there, root
        small_checkout(root, BEFORE)
        for directory in ("deploy", "templates"):
            without = shutil.ignore_patterns("__pycache__")
            shutil.copytree(CHECKOUT / directory, root / directory, ignore=without)
        shutil.rmtree(root / "runs")
        box.project(root)
        (root / "runs" / "shipped1.yaml").write_text(RECIPE)
        (root / "trainer" / "train.py").write_text(COUNTING)
        self.python = of_checkout(root)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        own = {"HOME": str(self.root), "DRAFTHOUSE_BOOT": "no", "PYTHONPATH": str(self.root)}
        environment = {**os.environ, **own, **self.box.environment}
        return self.python.run([*FAB, *words, "--host", "gpu-box"], self.root, environment, 600)

    def ok(self, *words: str) -> str:
        done = self.run(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def deploy(self, *words: str) -> tuple[status.RunDir, image.Image, int]:
        """The run that lives then, the image of the checkout, and the bytes that passed the wire."""
        counted = wire_bytes(self.box.number)
        self.ok("deploy", "--name", "shipped1", "--build", "local", "--no-follow", *words)
        travelled = wire_bytes(self.box.number) - counted
        run = self.runs[-1]
        until(lambda: "\nline 3\n" in self.log(run))
        one = describe(self.root)
        made = run.run()
        assert made
        assert (made.image, made.runtime) == (one.reference, "compose")
        return run, one, travelled

    @property
    def runs(self) -> list[status.RunDir]:
        return status.list_runs(self.box.state / "runs")

    def log(self, run: status.RunDir) -> str:
        return "".join(path.read_text() for path in sorted(run.log.glob("*.log")))

    def needs(self, requirements: Sequence[str]) -> None:
        require(self.root, requirements)

    def close(self) -> None:
        self.python.close()
        for container in self.there.run("ps", "-a", "-q").split():
            self.there.run("rm", "-f", container)
        Place(self.box.state).end_all()


@pytest.fixture
def shipped(box: GpuBox, there: Docker, tmp_path: Path) -> Iterator[Shipped]:
    root = tmp_path / "checkout"
    root.mkdir()
    made = Shipped(box, there, root)
    try:
        yield made
    finally:
        made.close()


def test_interrupted_by_a_lost_link_then_shipped_then_only_changes_travel_and_what_is_old_goes(
    shipped: Shipped, box: GpuBox, there: Docker, here: Docker
) -> None:
    """The life of an image on one host: each part goes on from what the one before has left there."""
    images = box.state / "images"

    # The link is lost in the middle of the transfer.
    def lose_the_link() -> None:
        until(lambda: _arrived(images / "incoming") > 4 << 20)
        until(lambda: [pid for pid in set(holders(["rsync", "--server"])) & set(box.pids()) if killed(pid)])

    thread = threading.Thread(target=lose_the_link)
    thread.start()
    done = shipped.run("deploy", "--name", "shipped1", "--build", "local", "--no-follow")
    thread.join()
    assert (done.returncode, shipped.runs) == (1, []), done.stdout + done.stderr
    assert "the image did not get to gpu-box whole: " in done.stderr
    assert "run the command again" in done.stderr
    one = describe(shipped.root)
    assert "build here and ship to gpu-box" in done.stdout
    assert not tags(there) & {one.reference, one.packages}

    # Again: what had arrived does not travel again, and the run starts in it.
    first, one, _ = shipped.deploy()
    assert works(there, one)
    whole = size_of(there, one)

    # Once more: nothing is built, shipped or touched.
    before = (tags(there), there.run("ps", "-a", "-q"))
    counted = wire_bytes(box.number)
    said = shipped.ok("deploy", "--name", "shipped1", "--build", "local", "--no-follow")
    assert said.startswith(f"unchanged: {first.path.name} runs release "), said
    assert wire_bytes(box.number) - counted < 0.02 * whole
    assert (tags(there), there.run("ps", "-a", "-q"), len(shipped.runs)) == (*before, 1)

    # A package more: new packages, of which rsync takes the difference to the old ones.
    shipped.needs(AFTER)
    second, pinned, travelled = shipped.deploy()
    assert travelled < 0.2 * whole, f"{travelled} of {whole} bytes"
    assert (first.alive(), second.alive()) == (False, True)
    assert pinned.packages != one.packages

    # Back, with a change of the trainer: less than 5 % of the image's bytes.
    shipped.needs(BEFORE)
    with open(shipped.root / "trainer" / "status.py", "a") as file:
        file.write("\nCHANGED = 1\n")
    third, changed, travelled = shipped.deploy()
    assert travelled < 0.05 * whole, f"{travelled} of {whole} bytes"
    assert "\ncode 1\n" in shipped.log(third)

    # Two releases of that image: what is only of those before goes, from the engine too, and no more.
    shipped.ok("restart", "--name", "shipped1", "--set", "environment.LEVEL=two", "--no-follow")
    assert (images / "blobs").exists()
    planned = shipped.ok("prune", "--keep", "1", "--dry-run")
    going = {one.reference, pinned.reference, pinned.packages}
    assert {line.split()[1] for line in planned.splitlines() if line.startswith("  image")} == going
    layers = next(line for line in planned.splitlines() if line.startswith("  layers"))
    assert f"shipped for {pinned.packages}" in layers
    assert "MB" in layers, planned
    assert tags(there) >= going
    freed = shipped.ok("prune", "--keep", "1", "--yes")
    assert freed.startswith(planned)
    assert freed.splitlines()[-1].endswith(" freed on gpu-box"), freed
    assert {tag for tag in tags(there) if tag.startswith("drafthouse:")} == {changed.reference, one.packages}
    assert not (images / "blobs").exists()
    assert works(there, changed)
    assert shipped.ok("prune", "--keep", "1", "--yes") == "nothing to prune on gpu-box\n"
    assert shipped.runs[-1].alive()
    here.run("image", "rm", "--force", pinned.packages)


def killed(pid: int) -> bool:
    """Kill it; whether it was there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


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
