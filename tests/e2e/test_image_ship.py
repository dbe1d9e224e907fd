"""Images reach an engine that has nothing and no network: built there, or built here and shipped.

A second real engine is the other machine; tests/e2e/test_image_ssh.py does the same through a real sshd.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from elsewhere import Elsewhere, describe, holders, small_checkout, tags
from testbed.docker import Docker
from testbed.place import CHECKOUT
from testbed.second import SecondEngine

from deploy import image, onhost, shipping
from deploy.errors import DeployError

pytestmark = [pytest.mark.engine, pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the layers that leave this machine's engine are kept, for all tests of this file."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def there(second_engine: SecondEngine) -> Docker:
    """The other machine's engine, with no image of ours."""
    docker = Docker(second_engine.url)
    _forget(docker)
    return docker


@pytest.fixture
def host(there: Docker) -> Elsewhere:
    return Elsewhere(there.environment)


@pytest.fixture(autouse=True)
def here(base_images: Docker, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Docker:
    """This machine's engine, as its user's environment names it."""
    for key, value in {**base_images.environment, "XDG_CACHE_HOME": str(cache)}.items():
        monkeypatch.setenv(key, value)
    return base_images


@pytest.fixture(scope="module", autouse=True)
def _nothing_left(base_images: Docker, checkout: Path) -> Iterator[None]:
    yield
    _forget(base_images, only=describe(checkout).packages)


def _forget(docker: Docker, only: str = "drafthouse:") -> None:
    for tag in tags(docker):
        if tag.startswith(only):
            docker.run("image", "rm", "--force", tag)
    if only == "drafthouse:":
        docker.run("image", "prune", "--force")


def until(condition: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


class Told(list):
    """What was reported; can wait for words of it."""

    def __call__(self, text: str) -> None:
        self.append(text)


SHIP = """
import sys
from pathlib import Path
from deploy import image
from e2e.elsewhere import Elsewhere, describe
import json
environment, checkout, state = json.loads(sys.argv[1])
image.ship(Elsewhere(environment), state, describe(Path(checkout)), lambda text: print(text, flush=True))
"""


def ship_elsewhere(host: Elsewhere, checkout: Path, state: Path) -> subprocess.Popen[str]:
    """A ship as a process of its own, which can be killed."""
    words = json.dumps([host.environment, str(checkout), str(state)])
    path = f"{CHECKOUT}:{CHECKOUT / 'tests'}"
    return subprocess.Popen(
        [sys.executable, "-c", SHIP, words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )


def works(there: Docker, one: image.Image) -> bool:
    """Whether the image runs our code, by the user without rights, under tini."""
    script = "import os, trainer.status, yaml; print(os.getuid(), open('/proc/1/comm').read().strip())"
    done = there.run("run", "--rm", "--network=none", one.reference, "python", "-c", script)
    return done.split() == ["10001", "tini"]


def test_a_shipped_image_works_and_nothing_else_is_left_there(host, there, checkout, tmp_path) -> None:
    one, told = describe(checkout), Told()
    assert image.plan({"images": []}, one, "local") == "ship"
    image.make(host, str(tmp_path), one, "ship", told)
    assert works(there, one)
    assert {one.reference, one.packages} <= tags(there)
    labels = json.loads(there.run("image", "inspect", one.reference))[0]["Config"]["Labels"]
    assert labels["drafthouse.digest"] == one.digest
    assert labels["drafthouse.packages"] == one.packages
    images = tmp_path / "images"
    assert not list(images.glob(".build-*"))
    assert [path.name for path in (images / "incoming").iterdir()] in ([], [".partial"])
    assert any("travelled" in line for line in told), told


def test_after_a_change_of_the_code_nothing_of_the_packages_travels(
    host, there, checkout, tmp_path, monkeypatch
) -> None:
    image.ship(host, str(tmp_path / "state"), describe(checkout), Told())
    changed_root = tmp_path / "changed"
    changed_root.mkdir()
    small_checkout(changed_root)
    with open(changed_root / "trainer" / "status.py", "a") as file:
        file.write("\nCHANGED = 1\n")
    changed, sent = describe(changed_root), []
    real = onhost.ask

    def counting(*words, data: bytes = b"", **more):
        sent.append(len(data))
        return real(*words, data=data, **more)

    monkeypatch.setattr(onhost, "ask", counting)
    monkeypatch.setattr(shipping, "send", lambda *words: pytest.fail("packages were shipped again"))
    image.ship(host, str(tmp_path / "state"), changed, Told())
    whole = int(there.run("image", "inspect", "--format", "{{.Size}}", changed.reference))
    assert sum(sent) < whole * 0.05
    script = "import trainer.status; print(trainer.status.CHANGED)"
    assert there.run("run", "--rm", changed.reference, "python", "-c", script).strip() == "1"


def test_a_transfer_that_is_killed_is_told_and_gone_on_with(
    host, there, checkout, tmp_path, monkeypatch
) -> None:
    one, told = describe(checkout), Told()
    # Slow enough to be caught in the middle.
    real = shipping.rsync_command
    slowly = ["rsync", "--bwlimit=60m"]
    monkeypatch.setattr(shipping, "rsync_command", lambda *words: [*slowly, *real(*words)[1:]])
    incoming = tmp_path / "images" / "incoming"

    def kill_in_the_middle() -> None:
        until(lambda: any(file.stat().st_size > 8 << 20 for file in _files(incoming)))
        for pid in holders(["rsync", str(incoming)]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    killer = threading.Thread(target=kill_in_the_middle)
    killer.start()
    with pytest.raises(DeployError, match=r"did not get to gpu-box whole: .*; run the command again"):
        image.ship(host, str(tmp_path), one, told)
    killer.join()
    assert not tags(there) & {one.reference, one.packages}
    arrived = sum(file.stat().st_size for file in _files(incoming))
    assert arrived > 8 << 20
    monkeypatch.setattr(shipping, "rsync_command", real)
    image.ship(host, str(tmp_path), one, told)
    assert works(there, one)


def _files(directory: Path) -> list[Path]:
    found = []
    for path in directory.rglob("*") if directory.exists() else ():
        with contextlib.suppress(OSError):
            if path.is_file() and path.stat():
                found.append(path)
    return found


def test_a_client_killed_while_the_engine_loads_changes_nothing(host, there, checkout, tmp_path) -> None:
    one = describe(checkout)
    client = ship_elsewhere(host, checkout, tmp_path)
    state = tmp_path / "images" / "load.json"
    until(lambda: _load(state).get("sent", 0) > 0 or client.poll() is not None)
    os.killpg(client.pid, signal.SIGKILL)
    client.wait()
    told = Told()
    image.ship(host, str(tmp_path), one, told)
    assert works(there, one)
    assert _load(state).get("done"), "the load that was under way went on to its end"


def _load(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def test_a_load_that_is_killed_is_told_and_the_next_one_works(host, there, checkout, tmp_path) -> None:
    one = describe(checkout)
    failures: list[DeployError] = []

    def ship() -> None:
        try:
            image.ship(host, str(tmp_path), one, Told())
        except DeployError as error:
            failures.append(error)

    shipping_it = threading.Thread(target=ship)
    shipping_it.start()
    until(lambda: _load(tmp_path / "images" / "load.json").get("sent", 0) > 0)
    for pid in holders(["docker", "load"]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shipping_it.join()
    assert "the engine on gpu-box could not load the image" in str(failures[0])
    assert not tags(there) & {one.reference, one.packages}
    image.ship(host, str(tmp_path), one, Told())
    assert works(there, one)


def test_an_engine_that_hangs_is_given_up_on_with_the_remedy(
    host, there, second_engine, checkout, tmp_path
) -> None:
    one = describe(checkout)
    images = str(tmp_path / "images")
    with shipping.export(image.build_here(one, _architecture(), Told()), Told()) as (directory, blobs):
        found = onhost.ask(host, "deploy.image_store:wanted", images, "gpu-box", blobs)
        shipping.rsync(host, directory, found["missing"], found["incoming"], 1, Told())
    onhost.ask(host, "deploy.image_store:take_in", images, "gpu-box", blobs, timeout=60)
    assert second_engine.process
    outcome: list[DeployError] = []

    def load() -> None:
        try:
            words = (images, "gpu-box", blobs, one.packages, 2.0)
            onhost.ask(host, "deploy.image_store:load", *words, timeout=120)
        except DeployError as error:
            outcome.append(error)

    loading = threading.Thread(target=load)
    loading.start()
    until(lambda: _load(tmp_path / "images" / "load.json").get("sent", 0) > 0)
    second_engine.process.send_signal(signal.SIGSTOP)
    until(lambda: _load(tmp_path / "images" / "load.json").get("stalled"))
    second_engine.process.send_signal(signal.SIGCONT)
    loading.join()
    assert "without a sign of life" in str(outcome[0])
    assert "systemctl restart docker" in str(outcome[0])
    image.ship(host, str(tmp_path), one, Told())
    assert works(there, one)


def _architecture() -> str:
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)


def test_two_at_once_ship_to_the_same_host(host, there, checkout, tmp_path) -> None:
    one = describe(checkout)
    both = [ship_elsewhere(host, checkout, tmp_path) for _ in range(2)]
    outputs = [process.communicate(timeout=600)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert works(there, one)


def test_a_layer_that_was_damaged_there_is_found_before_the_engine_has_it(
    host, there, checkout, tmp_path, monkeypatch
) -> None:
    one = describe(checkout)
    real = shipping.rsync

    def damaging(*words):
        sent = real(*words)
        largest = max(_files(tmp_path / "images" / "incoming"), key=lambda file: file.stat().st_size)
        with open(largest, "r+b") as file:
            file.seek(1 << 20)
            file.write(b"damage")
        return sent

    monkeypatch.setattr(shipping, "rsync", damaging)
    with pytest.raises(DeployError, match="arrived damaged on gpu-box"):
        image.ship(host, str(tmp_path), one, Told())
    assert not tags(there) & {one.reference, one.packages}
    monkeypatch.setattr(shipping, "rsync", real)
    image.ship(host, str(tmp_path), one, Told())
    assert works(there, one)


def test_a_disk_without_room_there_is_told_before_anything_is_sent(host, there, checkout, tmp_path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(state)], check=True)
    try:
        with pytest.raises(DeployError, match=r"gpu-box has 8\.\d MB free under .*, and what is shipped"):
            image.ship(host, str(state), describe(checkout), Told())
        assert not _files(state / "images" / "incoming")
    finally:
        subprocess.run(["umount", str(state)], check=True)


def test_a_host_without_rsync_or_docker_is_told_what_to_do(there, checkout, tmp_path) -> None:
    bare = tmp_path / "bin"
    bare.mkdir()
    (bare / "docker").symlink_to("/usr/bin/docker")
    with pytest.raises(DeployError, match=r"gpu-box has no rsync.*fab bootstrap --host gpu-box"):
        image.ship(
            Elsewhere({**there.environment, "PATH": str(bare)}), str(tmp_path), describe(checkout), Told()
        )
    (bare / "docker").unlink()
    with pytest.raises(DeployError, match="gpu-box has no docker client: fab bootstrap"):
        image.ship(
            Elsewhere({**there.environment, "PATH": str(bare)}), str(tmp_path), describe(checkout), Told()
        )


def test_on_the_engine_of_this_machine_nothing_is_shipped(here, checkout, tmp_path, monkeypatch) -> None:
    one = describe(checkout)
    monkeypatch.setattr(shipping, "send", lambda *words: pytest.fail("shipped to itself"))
    image.make(Elsewhere({}, "localhost"), str(tmp_path), one, "ship", Told())
    try:
        assert works(here, one)
    finally:
        here.run("image", "rm", one.reference)


def test_a_host_with_network_builds_all_by_itself(here, checkout, tmp_path) -> None:
    one, told = describe(checkout), Told()
    host = Elsewhere({}, "gpu-box")
    image.make(host, str(tmp_path), one, "build", told)
    try:
        assert works(here, one)
        assert image.plan({"images": [{"tags": [one.reference]}]}, one, "host") == "there"
    finally:
        here.run("image", "rm", one.reference)


def test_a_build_that_fails_names_the_step_and_leaves_no_tag(here, tmp_path) -> None:
    root = tmp_path / "checkout"
    root.mkdir()
    one = describe(small_checkout(root, ["drafthouse-needs-what-there-is-not==9"]))
    before = tags(here)
    failed = r"could not be built on gpu-box, at \[venv 4/4\] RUN .*: .*there-is-not"
    with pytest.raises(DeployError, match=failed):
        image.make(Elsewhere({}, "gpu-box"), str(tmp_path / "state"), one, "build", Told())
    assert one.packages not in tags(here) - before
    assert not list((tmp_path / "state" / "images").glob(".build-*"))
