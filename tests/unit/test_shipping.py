"""deploy.shipping: the layers of an image as files, and the rsync that brings them."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import tarfile
from pathlib import Path

import pytest

from deploy import rsyncing, shipping
from deploy.errors import DeployError
from deploy.host import Local

FIRST, SECOND, CONFIGURATION = b"first layer" * 100, b"second layer" * 100, b'{"architecture": "amd64"}'


def saved(*members: tuple[str, bytes | str]) -> io.BytesIO:
    """An archive as `docker save` gives it; a member with text for content is a link to that."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
                archive.addfile(member)
            else:
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return io.BytesIO(whole.getvalue())


def manifest(*layers: str, configuration: str) -> bytes:
    return json.dumps([{"Config": configuration, "RepoTags": ["x:1"], "Layers": list(layers)}]).encode()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


OLD_ENGINE = saved(  # 20.10: a directory for each layer, a link where two are the same, the manifest last
    ("aaa/layer.tar", FIRST),
    ("aaa/VERSION", b"1.0"),
    ("bbb/layer.tar", SECOND),
    ("ccc/layer.tar", "../aaa/layer.tar"),
    ("abc.json", CONFIGURATION),
    (
        "manifest.json",
        manifest("aaa/layer.tar", "bbb/layer.tar", "ccc/layer.tar", configuration="abc.json"),
    ),
    ("repositories", b"{}"),
).getvalue()
NEW_ENGINE = saved(  # 25 and later: an OCI layout with a manifest.json beside it
    (f"blobs/sha256/{digest(FIRST)}", FIRST),
    (f"blobs/sha256/{digest(SECOND)}", SECOND),
    (f"blobs/sha256/{digest(CONFIGURATION)}", CONFIGURATION),
    ("index.json", b"{}"),
    (
        "manifest.json",
        manifest(
            *(f"blobs/sha256/{digest(data)}" for data in (FIRST, SECOND, FIRST)),
            configuration=f"blobs/sha256/{digest(CONFIGURATION)}",
        ),
    ),
    ("oci-layout", b"{}"),
).getvalue()


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A `docker` that gives what a test says for `docker save`, and an id for `docker image inspect`."""
    programs = tmp_path / "bin"
    programs.mkdir()
    output = tmp_path / "saved.tar"
    docker = programs / "docker"
    docker.write_text(
        f'#!/bin/sh\nif [ "$1" = image ]; then echo sha256:0123456789abcdef; exit; fi\ncat {output}\n'
        f"if [ -e {tmp_path}/fails ]; then echo 'Error: no such image' >&2; exit 1; fi\n"
    )
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return output


@pytest.mark.parametrize("archive", [OLD_ENGINE, NEW_ENGINE], ids=["20.10", "25"])
def test_layers_leave_the_engine_as_files_named_by_their_content(engine: Path, archive: bytes) -> None:
    engine.write_bytes(archive)
    with shipping.export("x:1", lambda text: None) as (directory, blobs):
        contents = [(directory / name).read_bytes() for name, _ in blobs]
        assert contents == [FIRST, SECOND, FIRST, CONFIGURATION]
        assert [(digest(data), len(data)) for data in contents] == list(blobs)
        assert {path.name for path in directory.iterdir()} == {*dict(blobs), "blobs.json"}


def test_they_are_taken_from_the_engine_once(engine: Path) -> None:
    engine.write_bytes(OLD_ENGINE)
    with shipping.export("x:1", lambda text: None) as first:
        pass
    engine.write_bytes(b"")
    with shipping.export("x:1", lambda text: None) as second:
        assert second == first


def test_an_engine_that_stops_in_the_middle_leaves_nothing(engine: Path, tmp_path: Path) -> None:
    engine.write_bytes(OLD_ENGINE[:2000])
    (tmp_path / "fails").touch()
    failed = "docker save failed on this machine: Error: no such image"
    with pytest.raises(DeployError, match=failed), shipping.export("x:1", lambda text: None):
        pass
    assert [path.name for path in shipping.cache().iterdir()] == ["export.lock"]


def test_another_image_takes_the_place_of_the_last_one_unless_that_is_in_use(engine: Path) -> None:
    engine.write_bytes(OLD_ENGINE)
    with shipping.export("x:1", lambda text: None) as (used, blobs):
        docker = Path(os.environ["PATH"].partition(":")[0]) / "docker"
        docker.write_text(docker.read_text().replace("0123", "4567"))
        with shipping.export("x:2", lambda text: None) as (other, _):
            assert other != used
            assert all((used / name).exists() for name, _ in blobs)
    docker.write_text(docker.read_text().replace("4567", "89ab"))
    with shipping.export("x:3", lambda text: None) as (third, _):
        assert not used.exists()
        assert not other.exists()
        assert third.exists()


def test_an_engine_that_gives_nothing_is_given_up(engine: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "bin" / "docker").write_text(
        '#!/bin/sh\nif [ "$1" = image ]; then echo sha256:0123456789abcdef; else exec sleep 600; fi\n'
    )
    monkeypatch.setattr(shipping, "SAVE_SILENCE", 0.2)
    silent = r"docker save on this machine gave no sign of life for .* and was ended: look at its engine"
    with pytest.raises(DeployError, match=silent), shipping.export("x:1", lambda text: None):
        pass
    assert [path.name for path in shipping.cache().iterdir()] == ["export.lock"]


def test_an_engine_that_does_not_answer_or_is_not_there_is_one_sentence(
    engine: Path, tmp_path: Path, monkeypatch
) -> None:
    docker = tmp_path / "bin" / "docker"
    docker.write_text("#!/bin/sh\nexec sleep 600\n")
    monkeypatch.setattr(shipping, "DOCKER_TIMEOUT", 0.2)
    with pytest.raises(DeployError, match=r"did not answer docker image within 0\.2 s: see whether"):
        shipping._docker("image", "inspect", "x:1")
    docker.unlink()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(DeployError, match="this machine has no docker client"):
        shipping._docker("image", "inspect", "x:1")


def test_another_deploy_that_never_ends_its_export_is_named(engine: Path, monkeypatch) -> None:
    monkeypatch.setattr(shipping, "EXPORT_PATIENCE", 0.3)
    said: list[str] = []
    with open(shipping.cache() / "export.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with (
            pytest.raises(DeployError, match=r"another deploy .* more than .*export\.lock is locked"),
            shipping.export("x:1", said.append),
        ):
            pass
    assert said == ["another deploy on this machine takes the image out of the engine: waiting for it"]


def test_an_rsync_that_does_not_say_its_version_is_one_sentence(tmp_path: Path, monkeypatch) -> None:
    program = tmp_path / "rsync"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(rsyncing, "VERSION_TIMEOUT", 0.2)
    with pytest.raises(DeployError, match=r"rsync did not say its version within 0\.2 s; see whether"):
        rsyncing.check("ships images")


class Reached(Local):
    def rsync_shell(self) -> str:  # type: ignore[override]
        return "sh /run/user/1000/drafthouse/rsh"


def test_rsync_goes_over_the_hosts_own_connection_and_resumes() -> None:
    argv = shipping.rsync_command(
        Reached("gpu-box"), Path("/cache/0123"), "/var/lib/it's here/images/incoming"
    )
    assert argv == [
        *("rsync", "--files-from=-", "--ignore-times", "--partial-dir=.partial", "--copy-dest=../seeds"),
        *("--timeout=30", "--info=progress2,stats1", "--no-inc-recursive", "--protect-args"),
        *("--compress", "--compress-level=1", "--rsh=sh /run/user/1000/drafthouse/rsh"),
        *("/cache/0123/", "host:/var/lib/it's here/images/incoming/"),
    ]


def test_a_progress_that_is_redrawn_is_read_as_lines() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"    1,024  10%  1.00MB/s\r  10,240 100%  9.00MB/s\nsent 10 bytes  received 5 bytes\n")
    os.close(writing)
    with open(reading, "rb") as stream:
        lines = [line for line in rsyncing._lines(stream) if line]
    assert lines == [
        "    1,024  10%  1.00MB/s",
        "  10,240 100%  9.00MB/s",
        "sent 10 bytes  received 5 bytes",
    ]


def test_an_rsync_that_says_nothing_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rsyncing, "SILENCE", 0.2)
    monkeypatch.setattr(shipping, "rsync_command", lambda *words: ["sleep", "600"])
    with pytest.raises(DeployError, match=r"rsync to gpu-box gave no sign of life .* run the command again"):
        shipping.rsync(Reached("gpu-box"), tmp_path, ["a"], "/nowhere", 1, lambda text: None)


@pytest.mark.parametrize(
    ("said", "finding"),
    [
        ("openrsync: protocol version 29\nrsync version 2.6.9 compatible", "is 2.6"),
        ("rsync  version 3.0.9  protocol version 30", "is 3.0"),
        ("something else", "of an unknown kind"),
    ],
)
def test_an_rsync_that_is_too_old_is_refused(tmp_path: Path, monkeypatch, said: str, finding: str) -> None:
    program = tmp_path / "rsync"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(
        DeployError, match=rf"this machine's rsync .*{finding}.* ships images must be 3\.1 or later: apt"
    ):
        rsyncing.check("ships images")


def test_a_machine_without_rsync_is_told_how_to_get_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeployError, match="this machine has no rsync, which ships images: apt install rsync"):
        rsyncing.check("ships images")


@pytest.mark.parametrize(
    "said", ["rsync  version 3.2.7  protocol version 31", "rsync version v3.1.0  protocol"]
)
def test_an_rsync_of_today_will_do(tmp_path: Path, monkeypatch, said: str) -> None:
    program = tmp_path / "rsync"
    program.write_text(f"#!/bin/sh\necho '{said}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    rsyncing.check("ships images")
