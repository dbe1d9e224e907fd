"""deploy.pct_image: an image of any engine as an archive, made once, and looked at before it travels."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from images import CONFIG, PASSWD, Engine, digest, file, gzipped, layer, new_engine, old_engine, tar

from deploy import pct_image, zstd
from deploy.archive_check import check
from deploy.errors import DeployError
from deploy.pct_form import Archive, Form

LAYERS = [
    layer(file("etc/passwd", PASSWD), file("bin/tini", b"\x7fELF", 0o755), file("gone"), file("x" * 9, b"y")),
    layer(),  # as an empty layer is, of which an image may have several
    layer(file("opt/bin/tini", b"\x7fELF", 0o755), file(".wh.gone")),
    layer(),
]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(tmp_path, monkeypatch)


@pytest.fixture
def pack(engine: Engine) -> Callable[..., Archive]:
    """Make an archive of what an engine gives away."""
    engine.has(old_engine(LAYERS))

    def make(form: Form, key: str = "one", variant: str = "cpu") -> Archive:
        return pct_image.pack(key, variant, form, lambda text: None, build=lambda: "x:1")

    return make


def entries(archive: Archive) -> dict[str, bytes]:
    with tarfile.open(archive.path, "r:") as opened:
        return {member.name: opened.extractfile(member).read() for member in opened}  # type: ignore[union-attr]


def test_an_oci_archive_is_as_proxmox_recognises_it(pack) -> None:
    made = pack("oci")
    listed = subprocess.run(
        ["tar", "-tf", made.path], capture_output=True, text=True, check=True
    ).stdout.split()
    assert listed[0] == "oci-layout"
    assert "index.json" in listed
    assert all(name in ("oci-layout", "index.json") or name.startswith("blobs/sha256/") for name in listed)
    found = entries(made)
    assert all(name.endswith(digest(data)) for name, data in found.items() if name.startswith("blobs/"))
    blobs = {f"sha256:{digest(data)}": data for data in found.values()}
    described = json.loads(found["index.json"])["manifests"][0]
    assert described["mediaType"] == "application/vnd.oci.image.manifest.v1+json"
    assert described["platform"] == {"architecture": "amd64", "os": "linux"}
    manifest = json.loads(blobs[described["digest"]])
    config = json.loads(blobs[manifest["config"]["digest"]])
    kinds = {one["mediaType"] for one in manifest["layers"]}
    assert kinds == {"application/vnd.oci.image.layer.v1.tar+zstd"}
    unpacked = [zstd.reader(io.BytesIO(blobs[one["digest"]])).read() for one in manifest["layers"]]
    assert unpacked == LAYERS
    assert config["rootfs"]["diff_ids"] == [f"sha256:{digest(data)}" for data in LAYERS]
    assert config["config"] == {**CONFIG, "User": "10001:10002", "StopSignal": "SIGTERM"}
    assert "docker_version" not in config


def test_a_template_is_one_root_that_tells_what_is_lost_of_the_image(pack, tmp_path: Path) -> None:
    made = pack("template")
    root = tmp_path / "root"
    root.mkdir()
    subprocess.run(["tar", "--zstd", "-xf", made.path, "-C", root], check=True)
    assert (root / "opt/bin/tini").is_file()
    assert not (root / "gone").exists()
    assert {path.name for path in root.iterdir()} >= {"dev", "proc", "sys"}
    assert json.loads((root / "etc/drafthouse/image.json").read_text()) == made.start
    assert made.start["entrypoint"][0] == "tini"


@pytest.mark.parametrize("form", ["oci", "template"])
def test_every_engine_makes_the_same_bytes_of_the_same_image(engine: Engine, pack, form: Form) -> None:
    def zstandard(data: bytes) -> bytes:
        return zstd.compressor().compress(data)

    made = [pack(form)]
    for number, saved in enumerate(
        (new_engine(LAYERS), new_engine(LAYERS, packed=gzipped), new_engine(LAYERS, packed=zstandard))
    ):
        engine.has(saved)
        made.append(pack(form, f"other-{number}"))
    assert len({one.name for one in made}) == 1
    assert made[-1].name.startswith(f"drafthouse-cpu-{digest(made[-1].path.read_bytes())[:12]}.tar")
    assert engine.asked.read_text().count("save") == 4


def test_a_second_time_nothing_is_done_and_older_ones_go(engine: Engine, pack) -> None:
    first = pack("oci")
    assert pack("oci") == first
    assert engine.asked.read_text().count("save") == 1
    changed = []
    for number in range(2):
        engine.has(old_engine([*LAYERS, layer(file(f"new-{number}"))]))
        changed.append(pack("oci", f"key-{number}"))
    assert not first.path.exists()
    assert all(one.path.exists() for one in changed)
    assert len({one.name for one in changed}) == 2
    os.utime(changed[1].path)  # somebody touched it
    assert pack("oci", "key-1").sha256 == changed[1].sha256
    places = {path.name for path in pct_image.cache().iterdir()}
    assert places == {"pack.lock", "cpu-oci-key-0", "cpu-oci-key-1"}


def test_an_archive_that_cannot_be_written_leaves_nothing(pack, monkeypatch) -> None:
    def full(*words: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("deploy.oci_archive._add", full)
    with pytest.raises(
        DeployError, match=r"cannot be put together under .*: No space left on device; make room"
    ):
        pack("oci")
    assert [path.name for path in pct_image.cache().iterdir()] == ["pack.lock"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"Env": ["PATH=/bin"]}, "no ENTRYPOINT, no CMD and no /sbin/init: nothing could be its init"),
        ({"Entrypoint": ["nothing"]}, "is to start nothing, which is no program in it"),
        ({"User": "nobody"}, "for the user 'nobody'"),
    ],
)
def test_an_image_that_could_not_start_is_refused(engine: Engine, pack, config: dict, words: str) -> None:
    engine.has(old_engine(LAYERS, config))
    with pytest.raises(DeployError, match=words):
        pack("template")


def test_a_layer_that_is_not_what_the_image_says_is_refused(engine: Engine, pack) -> None:
    engine.has(new_engine(LAYERS, packed=lambda data: gzipped(data + b"more")))
    with pytest.raises(DeployError, match="is not what its configuration says; build it again"):
        pack("oci")


# -- before it travels -------------------------------------------------------------------------------------


def changed(archive: Archive, **more: bytes | None) -> bytes:
    """The archive with other entries: `index` for index.json, `layer` for the first layer; None: without."""
    found = entries(archive)
    first = next(name for name, data in found.items() if data.startswith(b"\x28\xb5\x2f\xfd"))
    for key, data in more.items():
        name = {"index": "index.json", "layer": first}[key]
        if data is None:
            del found[name]
        else:
            found[name] = data
    return tar(list(found.items()))


def damaged(archive: Archive) -> bytes:
    """Its first layer with another byte in it."""
    data = next(data for data in entries(archive).values() if data.startswith(b"\x28\xb5\x2f\xfd"))
    return data[:-1] + bytes([data[-1] ^ 1])


WRONG: dict[str, tuple[Callable[[Archive], bytes], str]] = {
    "prefix": (
        lambda one: tar([(f"./{n}", d) for n, d in entries(one).items()]),
        "has an entry ./oci-layout, but",
    ),
    "compressed": (lambda one: gzipped(one.path.read_bytes()), "compressed with gzip, but Proxmox knows"),
    "zstd": (lambda one: zstd.compressor().compress(one.path.read_bytes()), "compressed with zstd, but"),
    "truncated": (lambda one: one.path.read_bytes()[:-9000], "ends early"),
    "cut at an entry": (lambda one: one.path.read_bytes()[:1024], "ends early|lacks|has no entry"),
    "empty": (lambda one: b"", "is no tar, or ends early"),
    "no index": (lambda one: changed(one, index=None), "has no entry index.json, so Proxmox would take it"),
    "other entry": (
        lambda one: tar([*entries(one).items(), ("etc/passwd", b"")]),
        "etc/passwd, which no OCI",
    ),
    "missing blob": (lambda one: changed(one, layer=None), "lacks the blob sha256:.* of its layer"),
    "short blob": (lambda one: changed(one, layer=b"damage"), "has a damaged layer: blob sha256:"),
    "damaged blob": (lambda one: changed(one, layer=damaged(one)), "has a damaged layer: blob sha256:"),
    "no JSON": (lambda one: changed(one, index=b"{"), "index.json that is no JSON"),
    "no image": (lambda one: changed(one, index=b'{"manifests": []}'), "tells of no image"),
    "kind": (
        lambda one: one.path.read_bytes().replace(b"image.manifest.v1", b"image.manifest.v9"),
        "has a manifest of the kind application/vnd.oci.image.manifest.v9",
    ),
    "its name": (lambda one: one.path.read_bytes() + bytes(10240), "is damaged: its content has the digest"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_proxmox_would_not_recognise_is_said_before_it_travels(pack, tmp_path: Path, case: str) -> None:
    made = pack("oci")
    assert check(made.path).sha256 == made.sha256
    make, words = WRONG[case]
    path = tmp_path / made.name
    path.write_bytes(make(made))
    with pytest.raises(DeployError, match=words) as caught:
        check(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda data: data[:-20], "is damaged|ends early"),
        (lambda data: data[:100] + b"damage" + data[106:], "is damaged|ends early"),
        (lambda data: gzipped(data), "is not compressed with zstd, as its name says"),
        (lambda data: zstd.compressor().compress(b"x" * 2000), "holds no tar, or ends early"),
        (lambda data: zstd.compressor().compress(layer(file("etc/x"))), "etc/x, but each must begin with ./"),
        (
            lambda data: zstd.compressor().compress(layer(file("./etc/x"))),
            "has neither /sbin/init nor /etc/draft",
        ),
    ],
)
def test_a_template_that_is_none_is_said_before_it_travels(pack, tmp_path: Path, make, words: str) -> None:
    made = pack("template")
    assert check(made.path) == made
    path = tmp_path / "drafthouse.tar.zst"
    path.write_bytes(make(made.path.read_bytes()))
    with pytest.raises(DeployError, match=words):
        check(path)


def test_any_template_with_an_init_will_do(tmp_path: Path) -> None:
    path = tmp_path / "own.tar.zst"
    path.write_bytes(zstd.compressor().compress(layer(file("./sbin/init", b"x", 0o755))))
    assert check(path).start["entrypoint"] == ["/sbin/init"]


def test_without_the_package_it_says_what_to_install(pack, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(DeployError, match=r"lacks the Python package zstandard.*pip install"):
        pack("oci")
