"""Images into the template storage of a Proxmox host, over a real sshd: once, resumed, never half there."""

from __future__ import annotations

import itertools
import os
import random
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from images import Engine, file, layer, old_engine
from testbed.gpubox import ALIAS
from testbed.pct.box import PveBox

from deploy import image_tasks, manifest, pct_image, sender, settings
from deploy.errors import USAGE, DeployError
from deploy.host import Local
from deploy.pct_form import Archive
from deploy.ssh import Ssh
from deploy.target import Target

pytestmark = [pytest.mark.pve, pytest.mark.slow]

PROGRAM = file("bin/tini", b"\x7fELF", 0o755)
CONFIG = {"Entrypoint": ["/bin/tini"]}


@pytest.fixture(scope="module")
def box(pve_box: PveBox) -> Iterator[Ssh]:
    with pytest.MonkeyPatch.context() as patch:
        for key, value in pve_box.environment.items():
            patch.setenv(key, value)
        host = Ssh(ALIAS, interactive=False)
        yield host
        host.close()


@pytest.fixture
def pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Archive]:
    """An archive of five chunks, of which four hold a layer that stays the same."""
    monkeypatch.setattr(manifest, "CHUNK", 1 << 20)
    monkeypatch.setattr(manifest.read, "__kwdefaults__", {"chunk": 1 << 20})
    engine = Engine(tmp_path, monkeypatch)
    packages = layer(PROGRAM, file("packages", random.Random(7).randbytes(9 << 19)))

    def make(code: str) -> Archive:
        engine.has(old_engine([packages, layer(file("code", code.encode()))], CONFIG))
        return pct_image.pack(code, "cpu", "oci", lambda text: None, build=lambda: "x:1")

    return make


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each upload that went over the wire."""
    counts: list[int] = []
    send = sender.send

    def counted(*words: Any, **more: Any) -> sender.Sent:
        done = send(*words, **more)
        counts.append(done.bytes)
        return done

    monkeypatch.setattr(sender, "send", counted)
    return counts


@pytest.fixture
def place(box: Ssh, pve_box: PveBox) -> Iterator[str]:
    yield pct_image.directory(box)
    for path in [*pve_box.templates.glob("drafthouse-*"), *pve_box.templates.glob(".drafthouse/*")]:
        path.unlink()


def listed(pve_box: PveBox) -> list[str]:
    return sorted(name for name in os.listdir(pve_box.templates) if name != ".drafthouse")


def test_an_image_arrives_whole_once_and_the_next_sends_only_what_is_new(
    box, pve_box, pack, place, sent
) -> None:
    first, told = pack("one"), []
    assert pct_image.ensure(box, first, place, told.append) == first.name
    assert (pve_box.templates / first.name).read_bytes() == first.path.read_bytes()
    assert (pve_box.templates / first.name).stat().st_mode & 0o777 == 0o644
    assert f"local:vztmpl/{first.name}" in pve_box.call("pvesm", "list", "local").stdout
    pct_image.ensure(box, first, place, told.append)
    assert sent == [first.size]
    second = pack("two")
    pct_image.ensure(box, second, place, told.append)
    assert sent[1] < second.size / 3
    assert (pve_box.templates / second.name).read_bytes() == second.path.read_bytes()
    assert any("of it as in the image before" in line for line in told), told
    left = [name for name in os.listdir(pve_box.templates / ".drafthouse") if not name.endswith(".lock")]
    assert sorted(left) == [f"{name}.json" for name in listed(pve_box)]


def test_an_upload_that_was_broken_off_is_gone_on_with(box, pve_box, pack, place, sent, monkeypatch) -> None:
    archive, pour, count = pack("one"), sender._pour, itertools.count()
    written, arrived = sender._Sending.written, threading.Event()

    def poured(*words: Any) -> None:
        if next(count) == 2:
            assert arrived.wait(60)
            raise DeployError("broken off")
        pour(*words)

    def noted(*words: Any) -> None:
        written(*words)
        arrived.set()

    monkeypatch.setattr(sender, "_pour", poured)
    monkeypatch.setattr(sender._Sending, "written", noted)
    with pytest.raises(DeployError, match="broken off"):
        pct_image.ensure(box, archive, place, print)
    assert listed(pve_box) == []
    pct_image.ensure(box, archive, place, print)
    assert 0 < sent[0] < archive.size
    assert (pve_box.templates / archive.name).read_bytes() == archive.path.read_bytes()


def test_what_is_no_archive_for_proxmox_does_not_travel(box, pack, place, sent, tmp_path) -> None:
    bad = tmp_path / "drafthouse.tar"
    bad.write_bytes(pack("one").path.read_bytes()[:-9000])
    with pytest.raises(DeployError, match="ends early"):
        pct_image.ensure(box, bad, place, print)
    assert sent == []


def test_a_storage_without_room_is_said_before_a_byte_is_sent(box, pack, sent, tmp_path) -> None:
    place = pct_image.directory(box, "small")
    filled = pct_image.Archive(pack("one").path, "oci", 50_000_000, "0" * 64, {})
    words = (
        r"gpu-box has [\d.]+ MB free in /var/lib/small/template/cache, but the image needs 50 MB: \d\d MB too"
    )
    box.run(["mkdir", "-p", place], timeout=30)
    with pytest.raises(DeployError, match=words):
        pct_image.ensure(box, filled, place, print)
    assert sent == []


@pytest.mark.parametrize(
    ("storage", "words"),
    [
        (
            "local-zfs",
            r"storage local-zfs of gpu-box takes no container templates; .*or choose local or small",
        ),
        ("nas", "gpu-box has no storage nas; local or small takes templates"),
    ],
)
def test_a_storage_that_takes_no_templates_is_one_sentence(box, storage: str, words: str) -> None:
    with pytest.raises(DeployError, match=words):
        pct_image.directory(box, storage)


def test_a_storage_says_where_its_templates_lie(box) -> None:
    assert pct_image.directory(box) == "/var/lib/vz/template/cache"
    with pytest.raises(DeployError, match="no directory /nowhere on gpu-box; correct template_storage"):
        pct_image.ensure(box, Archive(Path("x.tar"), "oci", 1, "", {}), "/nowhere", print)


# -- fab image.build ---------------------------------------------------------------------------------------


@pytest.fixture
def goal(box: Ssh, pve_box: PveBox, tmp_path: Path) -> Target:
    project = settings.load_project(pve_box.project(tmp_path / "project"))
    return Target(project, project.hosts[ALIAS], box)


def run(**image: Any) -> settings.RunSettings:
    return settings.RunSettings(name="demo", trainer={}, image=settings.ImageSettings(**image))


@pytest.mark.parametrize(("version", "suffix"), [("8.4", ".tar.zst"), ("9.1", ".tar")])
def test_the_version_of_the_host_decides_the_form(goal, pve_box, pack, version: str, suffix: str) -> None:
    pack("one")  # the engine has it
    pve_box.version = version
    try:
        made = image_tasks.for_pct(goal, run(use="x:1"), None, print)
    finally:
        pve_box.version = "9.1"
    assert re.fullmatch(rf"drafthouse-own-[0-9a-f]{{12}}{re.escape(suffix)}", made.name)


def test_the_hosts_own_devices_and_architecture_decide_the_rest(goal, monkeypatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(pct_image, "pack", lambda *words, **more: asked.append(words))
    image_tasks.for_pct(goal, run(), None, print)
    key, variant, form, _ = asked[0]
    assert (variant, form) == ("cpu", "oci")
    assert re.fullmatch(r"[0-9a-f]{12}-(amd64|arm64)", key)


def test_what_the_host_cannot_take_is_refused_before_anything_is_built(goal, pve_box, monkeypatch) -> None:
    monkeypatch.setattr(pct_image, "pack", lambda *words, **more: pytest.fail("something was built"))
    pve_box.version = "8.4"
    try:
        with pytest.raises(
            DeployError, match=r"gpu-box has Proxmox 8\.4.*, which takes no OCI images"
        ) as caught:
            image_tasks.for_pct(goal, run(), "oci", print)
    finally:
        pve_box.version = "9.1"
    assert caught.value.code == USAGE


def test_a_host_that_is_no_proxmox_is_one_sentence(goal, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    here = Target(goal.project, goal.settings, Local("laptop"))
    with pytest.raises(
        DeployError, match="laptop is no Proxmox host: it has no pveversion; correct runtime:"
    ):
        image_tasks.for_pct(here, run(), None, print)


def test_a_machine_without_an_engine_is_told_what_is_missing(goal, monkeypatch, tmp_path) -> None:
    with pytest.raises(DeployError, match=r"--for pct needs --host, .* or --form oci or --form template"):
        image_tasks.for_pct(goal, run(), None, print, named=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(
        DeployError, match=r"Cannot connect to the Docker daemon .*\(this machine's engine makes"
    ):
        image_tasks.for_pct(goal, run(variant="cpu"), "template", print, named=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeployError, match="this machine has no docker client: fab bootstrap"):
        image_tasks.for_pct(goal, run(variant="cpu"), "template", print, named=False)
