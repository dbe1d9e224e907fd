"""deploy.rootfs: layers, whiteouts and links as the one file system that GNU tar unpacks."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from images import device, digest, directory, file, layer, link, symlink

from deploy import image_layers, rootfs
from deploy.errors import DeployError
from deploy.image_layers import Layers
from deploy.manifest import Told

CAPABILITY = b"\x01\x00\x00\x02\x00\x20\x00\x00" + bytes(12)  # cap_net_raw=ep: no text, and zero bytes
XATTR = "SCHILY.xattr.security.capability"


def image(place: Path, *layers: bytes, config: Any = None) -> Layers:
    found = []
    for data in layers:
        path = place / f"{digest(data)}.layer"
        path.write_bytes(data)
        found.append(image_layers.layer(path, digest(data)))
    return Layers(config or {}, tuple(found))


def written(place: Path, *layers: bytes) -> bytes:
    out = io.BytesIO()
    rootfs.write(rootfs.flatten(image(place, *layers)), out, Told("packed", 1, lambda text: None))
    return out.getvalue()


@pytest.fixture
def unpacked(tmp_path: Path):
    """What GNU tar, called as Proxmox does, makes of layers."""

    def unpack(*layers: bytes) -> Path:
        root = tmp_path / "root"
        root.mkdir()
        flags = ["--xattrs", "--xattrs-include=user.*", "--xattrs-include=security.capability"]
        more = ["--numeric-owner", "--skip-old-files", "--anchored", "--exclude", "./dev/*"]
        argv = ["tar", "xpf", "-", *flags, *more, "-C", str(root)]
        done = subprocess.run(argv, input=written(tmp_path, *layers), capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
        return root

    return unpack


def names(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")} - {"dev", "proc", "sys"}


def test_what_a_layer_takes_away_is_gone_and_what_it_brings_instead_is_there(unpacked) -> None:
    root = unpacked(
        layer(
            directory("a"),
            file("a/one", b"1"),
            file("a/two", b"2"),
            directory("b"),
            file("b/old", b"old"),
            directory("b/deep"),
            file("b/deep/er", b"x"),
            symlink("dangling", "nowhere"),
            directory("was-directory"),
            file("was-directory/x"),
            file("was-file"),
        ),
        layer(
            file("a/.wh.one"),
            directory("b"),
            file("b/new", b"new"),
            file("b/.wh..wh..opq"),  # behind what is new in it: it is about the layers below
            file(".wh.dangling"),
            file("was-directory", b"now a file"),
            directory("was-file"),
            file("was-file/x", b"y"),
        ),
    )
    assert names(root) == {"a", "a/two", "b", "b/new", "was-directory", "was-file", "was-file/x"}
    assert (root / "b/new").read_bytes() == b"new"
    assert (root / "was-directory").read_bytes() == b"now a file"


def test_a_whiteout_in_the_layer_that_brings_the_same_name_is_about_the_old_one(unpacked) -> None:
    root = unpacked(layer(file("x", b"old")), layer(file("x", b"new"), file(".wh.x")))
    assert (root / "x").read_bytes() == b"new"


def test_several_names_stay_one_file_also_over_layers(unpacked) -> None:
    root = unpacked(
        layer(file("a", b"content"), link("b", "a"), link("c", "./b")),
        layer(link("d", "/b"), file(".wh.a"), file("c", b"of its own")),
    )
    assert names(root) == {"b", "c", "d"}
    assert (root / "b").read_bytes() == b"content"
    assert (root / "b").stat().st_ino == (root / "d").stat().st_ino
    assert (root / "c").read_bytes() == b"of its own"
    assert (root / "c").stat().st_nlink == 1


@pytest.mark.root
def test_owners_modes_times_and_capabilities_stay(unpacked) -> None:
    long = "d" * 120 + "/" + "n" * 150
    program, data = file("ping", b"\x7fELF", 0o4755, uid=70000, gid=3_000_000, uname="wrong", gname="wrong")
    program.pax_headers = {XATTR: CAPABILITY.decode("utf-8", "surrogateescape"), "comment": "not kept"}
    root = unpacked(
        layer(directory("d" * 120, 0o555), file(long, b"long"), file("umlaut-\udcff", b"no text")),
        layer((program, data), directory("t", 0o1777)),
    )
    found = (root / "ping").stat()
    assert (found.st_uid, found.st_gid) == (70000, 3_000_000)
    assert stat.S_IMODE(found.st_mode) == 0o4755
    assert found.st_mtime == 1_700_000_000
    assert os.getxattr(root / "ping", "security.capability") == CAPABILITY
    assert stat.S_IMODE((root / "t").stat().st_mode) == 0o1777
    assert stat.S_IMODE((root / ("d" * 120)).stat().st_mode) == 0o555
    assert (root / long).read_bytes() == b"long"
    assert (root / os.fsdecode(b"umlaut-\xff")).read_bytes() == b"no text"


def test_devices_which_an_unprivileged_container_may_not_have_are_left_out(tmp_path: Path, unpacked) -> None:
    pipe, _ = file("pipe")
    pipe.type = tarfile.FIFOTYPE
    data = layer(device("var/null", 1, 3), pipe, device("/dev/zero", 1, 5))
    root = unpacked(data)
    assert names(root) == {"pipe"}
    assert stat.S_ISFIFO((root / "pipe").stat().st_mode)


@pytest.mark.parametrize("last", [True, False])
def test_layers_keep_all_but_the_devices(tmp_path: Path, last: bool) -> None:
    """Byte by byte, so that a layer without any stays the same one."""
    long = device("d" * 150, 1, 3)
    others = [file("a", b"1" * 700), file("n" * 150, b"2")]
    with_device = layer(others[0], long, others[1]) if not last else layer(*others, long)
    whole = image(tmp_path, layer(file("x")), with_device, config={"rootfs": {}})
    (tmp_path / "new").mkdir()
    made = image_layers.without_devices(whole, tmp_path / "new")
    found = [one.path.read_bytes() for one in made.layers]
    assert found[0] == layer(file("x"))
    assert found[1].rstrip(b"\0") == layer(*others).rstrip(b"\0")
    assert made.config["rootfs"]["diff_ids"] == [f"sha256:{digest(data)}" for data in found]
    again = image_layers.layer(made.layers[1].path, made.layers[1].diff_id)
    assert [one.name for one in again.members] == ["a", "n" * 150]


def test_paths_go_through_links_but_never_out_of_the_root(unpacked, tmp_path: Path) -> None:
    root = unpacked(
        layer(directory("usr/lib"), symlink("lib", "usr/lib"), symlink("up", "../../../..")),
        layer(file("lib/libc.so", b"c"), file("../../evil", b"here"), file("up/too", b"here, too")),
        layer(file("lib/.wh.libc.so"), file("lib/libm.so", b"m")),
    )
    assert os.readlink(root / "lib") == "usr/lib"
    assert names(root) == {"usr", "usr/lib", "usr/lib/libm.so", "lib", "up", "evil", "too"}
    assert not (tmp_path / "evil").exists()


def test_the_same_layers_make_the_same_bytes(tmp_path: Path) -> None:
    layers = layer(file("b"), file("a", b"1")), layer(link("c", "a"))
    assert written(tmp_path, *layers) == written(tmp_path, *layers)


def test_a_program_is_found_as_init_would_be(tmp_path: Path) -> None:
    root = rootfs.flatten(
        image(
            tmp_path,
            layer(symlink("bin", "usr/bin"), file("usr/bin/tini", b"x", 0o755), file("usr/bin/text", b"x")),
        )
    )
    assert rootfs.has_program(root, "tini", "/nowhere:/bin")
    assert rootfs.has_program(root, "/bin/tini", "")
    assert not rootfs.has_program(root, "text", "/bin")
    assert not rootfs.has_program(root, "tini", "/sbin")
    assert rootfs.content(root, "bin/text") == b"x"
    assert rootfs.content(root, "etc/passwd") is None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (layer(link("a", "gone")), "a is a link to gone, which is no file"),
        (layer(symlink("a", "b"), symlink("b", "a"), file("a/x")), "symbolic link that leads back to itself"),
        (b"x" * 2000, "is no tar"),
    ],
)
def test_a_layer_that_makes_no_sense_is_one_sentence(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(DeployError, match=words):
        written(tmp_path, data)
