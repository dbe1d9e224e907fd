"""deploy.image_store: what an engine's builder says, what has to come, and the archive that it loads."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from pathlib import Path

import pytest

from deploy import image_store
from deploy.errors import DeployError
from deploy.image_store import Said


def blob(data: bytes) -> tuple[str, int]:
    return hashlib.sha256(data).hexdigest(), len(data)


OLD, NEW, SHARED, CONFIGURATION = b"old layer" * 500, b"new layer" * 500, b"shared" * 500, b'{"rootfs": {}}'


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """An images directory after a ship of SHARED, OLD."""
    root = tmp_path / "images"
    (root / "blobs").mkdir(parents=True)
    blobs = [blob(SHARED), blob(OLD), blob(b"{}")]
    for data in (SHARED, OLD, b"{}"):
        (root / "blobs" / blob(data)[0]).write_bytes(data)
    (root / "shipped.json").write_text(json.dumps({"blobs": blobs}))
    return root


SHIP = [blob(SHARED), blob(NEW), blob(CONFIGURATION)]


def wanted(images: Path) -> dict:
    return image_store.wanted(str(images), "gpu-box", SHIP, False)


def test_only_what_is_not_there_has_to_come(images: Path) -> None:
    found = wanted(images)
    assert found["missing"] == [blob(NEW)[0], blob(CONFIGURATION)[0]]
    assert found["incoming"] == str(images / "incoming")


def test_the_old_layer_in_its_place_is_what_a_new_one_is_compared_with(images: Path) -> None:
    wanted(images)
    assert (images / "seeds" / blob(NEW)[0]).read_bytes() == OLD
    assert not (images / "seeds" / blob(SHARED)[0]).exists()


def test_what_came_whole_need_not_come_again(images: Path) -> None:
    wanted(images)
    (images / "incoming" / blob(NEW)[0]).write_bytes(NEW)
    assert wanted(images)["missing"] == [blob(CONFIGURATION)[0]]


def test_what_a_killed_transfer_left_is_gone_on_from(images: Path) -> None:
    wanted(images)
    left = images / "incoming" / f".{blob(NEW)[0]}.Xa81Zq"
    left.write_bytes(NEW[:1000])
    os.utime(left, (1, 1))
    wanted(images)
    assert (images / "incoming" / ".partial" / blob(NEW)[0]).read_bytes() == NEW[:1000]
    assert not left.exists()


def test_a_transfer_of_now_is_not_touched(images: Path) -> None:
    wanted(images)
    live = images / "incoming" / f".{blob(NEW)[0]}.Xa81Zq"
    live.write_bytes(NEW[:1000])
    wanted(images)
    assert live.exists()


def test_leftovers_of_ships_long_ago_are_removed(images: Path) -> None:
    wanted(images)
    old, young = images / "incoming" / ".partial" / ("a" * 64), images / "incoming" / ("b" * 64)
    for file in (old, young):
        file.write_bytes(b"x")
    os.utime(old, (1, 1))
    wanted(images)
    assert young.exists()
    assert not old.exists()


def test_what_does_not_fit_is_told_before_a_byte_is_sent(images: Path, monkeypatch) -> None:
    monkeypatch.setattr(image_store, "_free", lambda path: 1000)
    with pytest.raises(
        DeployError, match=r"has 1\.0 kB free under .*, and what is shipped takes 4\.5 kB: free"
    ):
        wanted(images)


def test_an_engine_without_room_to_unpack_is_told_before_a_byte_is_sent(images: Path, monkeypatch) -> None:
    monkeypatch.setattr(image_store, "_docker", lambda *words: "/engine\n")
    monkeypatch.setattr(image_store, "_free", lambda path: 1000 if path == "/engine" else 10**9)
    with pytest.raises(DeployError, match=r"has 1\.0 kB free under /engine, and what the engine unpacks"):
        image_store.wanted(str(images), "gpu-box", SHIP)


def test_an_engine_that_does_not_say_where_its_disk_is_keeps_nobody(images: Path, monkeypatch) -> None:
    def fail(*words: str) -> str:
        raise DeployError("no answer")

    monkeypatch.setattr(image_store, "_docker", fail)
    assert image_store.wanted(str(images), "gpu-box", SHIP)["missing"]


def test_what_has_come_is_checked_and_put_to_the_others(images: Path) -> None:
    wanted(images)
    (images / "incoming" / blob(NEW)[0]).write_bytes(NEW)
    (images / "incoming" / blob(CONFIGURATION)[0]).write_bytes(CONFIGURATION)
    image_store.take_in(str(images), "gpu-box", SHIP)
    assert (images / "blobs" / blob(NEW)[0]).read_bytes() == NEW
    assert wanted(images)["missing"] == []


def test_what_arrived_damaged_is_removed_and_named(images: Path) -> None:
    wanted(images)
    (images / "incoming" / blob(NEW)[0]).write_bytes(NEW[:-1] + b"?")
    with pytest.raises(DeployError, match="arrived damaged on gpu-box and was removed: run"):
        image_store.take_in(str(images), "gpu-box", SHIP)
    assert blob(NEW)[0] in wanted(images)["missing"]


def test_what_did_not_arrive_is_told(images: Path) -> None:
    wanted(images)
    with pytest.raises(DeployError, match="did not reach gpu-box"):
        image_store.take_in(str(images), "gpu-box", SHIP)


def test_the_archive_has_each_layer_once_and_the_tag_of_the_image(tmp_path: Path) -> None:
    contents = [SHARED, NEW, SHARED, b"", CONFIGURATION]
    for data in contents:
        (tmp_path / blob(data)[0]).write_bytes(data)
    whole = b"".join(image_store.archive(tmp_path, [blob(data) for data in contents], "drafthouse:x"))
    with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
        names = archive.getnames()
        manifest = json.load(archive.extractfile("manifest.json"))
        found = [archive.extractfile(name).read() for name in [*manifest[0]["Layers"], manifest[0]["Config"]]]
    assert found == contents
    assert len(names) == len(set(names)) == 5
    assert manifest[0]["RepoTags"] == ["drafthouse:x"]


def test_two_loads_share_no_name_that_an_engine_could_have_left_locked(tmp_path: Path) -> None:
    (tmp_path / blob(CONFIGURATION)[0]).write_bytes(CONFIGURATION)
    names = []
    for _ in range(2):
        whole = b"".join(image_store.archive(tmp_path, [blob(CONFIGURATION)], "drafthouse:x"))
        with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
            names.append(set(archive.getnames()) - {"manifest.json"})
    assert not names[0] & names[1]


BUILDKIT = """\
time="2026-11-29T10:00:00Z" level=warning msg="a warning of Compose's"
#1 [image internal] load build definition from Dockerfile
#1 DONE 0.0s
#5 [image base 1/3] FROM docker.io/library/python:3.11-slim-bookworm
#5 CACHED
#7 [image] exporting to image
#6 [image base 2/3] RUN set -eu;   packages="";   command -v tini
#6 0.241 Reading package lists...
#6 0.551 E: Unable to locate package tini
#6 ERROR: process "/bin/sh -c set -eu" did not complete successfully: exit code: 100
------
 > [image base 2/3] RUN set -eu:
------
failed to solve: process "/bin/sh -c set -eu" did not complete successfully: exit code: 100
"""


def test_a_failed_build_names_the_step_and_its_last_line() -> None:
    said = Said()
    said.read(io.BytesIO(BUILDKIT.encode()))
    assert said.reason("gpu-box") == (
        'the image could not be built on gpu-box, at [base 2/3] RUN set -eu; packages=""; command -v tini: '
        "E: Unable to locate package tini"
    )


def test_a_build_tells_each_step_once_and_none_of_the_builders_own() -> None:
    said = Said()
    said.read(io.BytesIO(BUILDKIT.encode()))
    assert said.steps() == [
        "[base 1/3] FROM docker.io/library/python:3.11-slim-bookworm",
        "exporting to image",
        '[base 2/3] RUN set -eu; packages=""; command -v tini',
    ]
    assert said.steps() == []


def test_a_build_that_did_not_begin_tells_what_compose_said() -> None:
    said = Said()
    words = "Cannot connect to the Docker daemon at unix:///x. Is the docker daemon running?"
    said.read(io.BytesIO(words.encode()))
    assert said.reason("gpu-box") == f"the image could not be built on gpu-box: {words}"
