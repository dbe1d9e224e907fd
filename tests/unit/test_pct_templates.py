"""deploy.pct_templates: what lies in a template storage, whether it is whole, and what goes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from deploy import manifest, pct_templates, weights_store
from deploy.errors import DeployError

NAMES = [f"drafthouse-cpu-{digit * 12}.tar" for digit in "abc"]
OTHERS = ["drafthouse-gpu-aaaaaaaaaaaa.tar", "drafthouse-cpu-aaaaaaaaaaaa.tar.zst", "debian-12.tar.zst"]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def come(place: Path, name: str, data: bytes) -> tuple[str, str]:
    """What an upload leaves for `put`: the manifest's digest, and the file's."""
    source = place / "source" / name
    source.mkdir(parents=True)
    (source / name).write_bytes(data)
    wanted = manifest.read(source)
    target = Path(pct_templates.target(str(place / "cache"), name, wanted["digest"]))
    target.mkdir(parents=True)
    (target / name).write_bytes(data)
    return wanted["digest"], sha256(data)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    found = tmp_path / "cache"
    found.mkdir()
    return found


def test_the_last_two_of_a_kind_stay_and_nothing_else_is_touched(cache: Path, tmp_path: Path) -> None:
    for name in OTHERS:
        (cache / name).write_bytes(b"other")
    gone = [pct_templates.put(str(cache), name, *come(tmp_path, name, name.encode())) for name in NAMES]
    assert gone == [[], [], [NAMES[0]]]
    there = {path.name for path in cache.iterdir()}
    assert there == {*NAMES[1:], *OTHERS, pct_templates.OURS}
    assert (cache / NAMES[2]).stat().st_mode & 0o777 == 0o644


def test_a_file_is_read_once_and_again_when_it_changed(cache: Path, tmp_path: Path, monkeypatch) -> None:
    name, data = NAMES[0], b"an image" * 1000
    (cache / name).write_bytes(data)
    words = (str(cache), "pve", name, len(data), sha256(data))
    assert pct_templates.look(*words)["there"]
    real = hashlib.sha256
    monkeypatch.setattr(pct_templates.hashlib, "sha256", lambda *_: pytest.fail("it was read again"))
    assert pct_templates.look(*words)["there"]
    monkeypatch.setattr(pct_templates.hashlib, "sha256", real)
    (cache / name).write_bytes(data.replace(b"image", b"other"))
    assert not pct_templates.look(*words)["there"]
    assert not pct_templates.look(str(cache), "pve", name, len(data) + 1, sha256(data))["there"]


def test_what_an_interrupted_upload_holds_counts_as_room(cache: Path, monkeypatch) -> None:
    monkeypatch.setattr(pct_templates.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    words = (str(cache), "pve", NAMES[0], 5000, "0" * 64)
    with pytest.raises(
        DeployError, match=r"pve has 1\.0 kB free in .*, but the image needs 5\.0 kB: 4\.0 kB too"
    ):
        pct_templates.look(*words)
    monkeypatch.setattr(weights_store, "held", lambda place, name: 4096)
    assert not pct_templates.look(*words)["there"]


def test_the_next_image_begins_as_the_last_one(cache: Path, tmp_path: Path) -> None:
    old, new = b"a" * 300 + b"b" * 250, b"a" * 300 + b"c" * 300
    pct_templates.put(str(cache), NAMES[0], *come(tmp_path, NAMES[0], old))
    source = tmp_path / "new"
    source.mkdir()
    (source / NAMES[1]).write_bytes(new)
    wanted = manifest.read(source, chunk=100)
    assert pct_templates.seed(str(cache), NAMES[1], wanted) == 300
    coming = Path(pct_templates.target(str(cache), NAMES[1], wanted["digest"]))
    incoming = weights_store.incoming_of(coming)
    assert (incoming / NAMES[1]).read_bytes() == b"a" * 300 + bytes(300)
    assert manifest.of_copy(incoming) == wanted
    assert pct_templates.seed(str(cache), NAMES[1], wanted) == 0, "what is under way is gone on with"


def test_without_an_image_before_nothing_is_taken_over(cache: Path, tmp_path: Path) -> None:
    (cache / NAMES[0]).write_bytes(b"not put there by us")
    source = tmp_path / "new"
    source.mkdir()
    (source / NAMES[1]).write_bytes(b"not put there by us")
    assert pct_templates.seed(str(cache), NAMES[1], manifest.read(source)) == 0


def test_an_image_that_vanished_before_it_had_its_name_is_one_sentence(cache: Path) -> None:
    with pytest.raises(DeployError, match="is not there any more; upload the image again"):
        pct_templates.put(str(cache), NAMES[0], "0" * 32, "0" * 64)
