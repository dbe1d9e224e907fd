"""Directories sent to a host by several real ssh processes: whole, once, resumed, and never half there."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from testbed.gpubox import ALIAS, SLOW, GpuBox

from deploy import by_rsync, manifest, onhost, pieces, receiver, rsyncing, sender, weights_store
from deploy.errors import DeployError
from deploy.host import HostError, Local
from deploy.ssh import Ssh

pytestmark = [pytest.mark.root, pytest.mark.sshd, pytest.mark.slow]

CHUNK = 64 << 10


@pytest.fixture(autouse=True)
def _client(gpubox: GpuBox, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for key, value in gpubox.environment.items():
        monkeypatch.setenv(key, value)
    yield
    shutil.rmtree(gpubox.shm, ignore_errors=True)


@pytest.fixture(scope="module")
def box(gpubox: GpuBox) -> Iterator[Ssh]:
    with pytest.MonkeyPatch.context() as patch:
        for key, value in gpubox.environment.items():
            patch.setenv(key, value)
        host = Ssh(ALIAS, interactive=False)
        yield host
        host.close()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Files of many and of no chunks; a name with a blank and a quote; two links to one blob."""
    root = tmp_path / "it's a model"
    (root / "sub dir").mkdir(parents=True)
    bytes_of = random.Random(5).randbytes
    (root / "a.bin").write_bytes(bytes_of(20 * CHUNK + 17))
    (root / "b.bin").write_bytes(bytes_of(3 * CHUNK))
    (root / "sub dir" / "c\n.txt").write_bytes(b"x")
    (root / "empty").touch()
    blob = tmp_path / "blobs" / "abc"
    blob.parent.mkdir()
    blob.write_bytes(bytes_of(2 * CHUNK))
    for name in ("one.safetensors", "two.safetensors"):
        (root / name).symlink_to(blob)
    return root


def target_of(gpubox: GpuBox, wanted: dict[str, Any]) -> Path:
    return gpubox.shm / f"it's a model@{wanted['digest'][:12]}"


def read(source: Path) -> dict[str, Any]:
    return manifest.read(source, chunk=CHUNK)


def push(host: Any, source: Path, wanted: dict[str, Any], target: Path, **more: Any) -> sender.Sent:
    options = {"durable": False, "link": True, "streams": 2, "pauses": (0.0, 0.0), **more}
    return sender.send(host, source, wanted, str(target), **options)


def contents(root: Path) -> dict[str, bytes]:
    return {relative: path.read_bytes() for relative, path in manifest.walk(root)}


def test_a_directory_arrives_whole_over_several_connections_and_is_not_sent_again(
    box: Ssh, gpubox: GpuBox, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sshd lets three knock at a time; the fourth gets in all the same, and each takes its part."""
    wanted = read(source)
    target = target_of(gpubox, wanted)
    together, pour, parts = threading.Barrier(4), sender._pour, set()

    def poured(*arguments: Any) -> None:
        if threading.get_ident() not in parts:
            parts.add(threading.get_ident())
            together.wait(60)
        pour(*arguments)

    monkeypatch.setattr(sender, "_pour", poured)
    sent = push(box, source, wanted, target, streams=4)
    assert (sent.streams, len(parts)) == (4, 4)
    assert contents(target) == contents(source)
    assert contents(gpubox.shm / "it's a model") == contents(source)
    assert (target / "one.safetensors").stat().st_ino == (target / "two.safetensors").stat().st_ino
    assert (sent.bytes, sent.there) == (25 * CHUNK + 18, 0)
    assert sorted(os.listdir(gpubox.shm)) == [".it's a model.lock", "it's a model", target.name]
    assert manifest.verify(target) == []
    again = push(box, source, wanted, target)
    assert (again.bytes, again.there) == (0, sent.bytes)


def break_off(monkeypatch: pytest.MonkeyPatch, after: int, act: Any) -> None:
    """Do something once, before chunk number `after` is sent."""
    count, pour, lock = [0], sender._pour, threading.Lock()

    def poured(*arguments: Any) -> None:
        with lock:
            count[0] += 1
            number = count[0]
        if number == after:
            act()
        pour(*arguments)

    monkeypatch.setattr(sender, "_pour", poured)


def test_a_lost_link_is_gone_on_with_and_sends_only_what_is_missing(
    gpubox: GpuBox, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, said = Ssh(SLOW, interactive=False), []
    wanted = read(source)
    target = target_of(gpubox, wanted)
    assert gpubox.link
    break_off(monkeypatch, 12, gpubox.link.reset)
    try:
        sent = push(host, source, wanted, target, streams=2, progress=said.append)
    finally:
        host.close()
    assert contents(target) == contents(source)
    assert sent.bytes <= 25 * CHUNK + 18
    assert sum("trying again in 0 s" in words for words in said) == 1


def test_a_link_that_does_not_come_back_is_one_sentence_and_the_next_push_goes_on(
    gpubox: GpuBox, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = read(source)
    target = target_of(gpubox, wanted)
    with monkeypatch.context() as patch:
        pour, written, done, arrived = sender._pour, sender._Sending.written, [], threading.Event()

        def poured(*arguments: Any) -> None:
            if len(done) == 10:
                assert arrived.wait(60)
                raise BrokenPipeError
            done.append(1)
            pour(*arguments)

        def heard(self: Any, stream: Any, number: int) -> None:
            written(self, stream, number)
            if number == 9:
                arrived.set()

        patch.setattr(sender, "_pour", poured)
        patch.setattr(sender._Sending, "written", heard)
        options = {"streams": 1, "pauses": (), "again": "fab weights.push X"}
        with pytest.raises(DeployError) as caught:
            push(Local(), source, wanted, target, **options)
    words = str(caught.value)
    assert words.startswith("localhost: the connection was lost")
    assert words.endswith(f" of {source} have arrived; fab weights.push X goes on from there")
    assert not target.exists()
    sent = push(Local(), source, wanted, target, streams=1)
    assert (sent.there, sent.bytes) == (10 * CHUNK, 15 * CHUNK + 18)
    assert manifest.verify(target) == []


def test_a_host_that_is_away_for_a_moment_after_a_lost_link_is_tried_again(
    gpubox: GpuBox, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, said, opened = read(source), [], []
    program, pour = onhost.sent, sender._pour

    def opening(host: Any, function: str, *arguments: Any) -> bytes:
        opened.append(function.rpartition(":")[2])
        if len(opened) == 3:
            raise HostError("gpu-box: no route to it")
        return program(host, function, *arguments)

    def poured(*arguments: Any) -> None:
        if len(opened) == 2:
            raise BrokenPipeError
        pour(*arguments)

    monkeypatch.setattr(onhost, "sent", opening)
    monkeypatch.setattr(sender, "_pour", poured)
    push(Local(), source, wanted, target_of(gpubox, wanted), streams=1, progress=said.append)
    assert opened == ["control", "stream", "control", "control", "stream"]
    assert [words.endswith("; trying again in 0 s") for words in said] == [True, True]
    assert contents(target_of(gpubox, wanted)) == contents(source)


def test_a_file_that_changes_while_it_is_sent_is_found_and_nothing_appears(
    gpubox: GpuBox, source: Path
) -> None:
    wanted = read(source)
    target = target_of(gpubox, wanted)
    with open(source / "a.bin", "r+b") as file:
        file.seek(5 * CHUNK)
        file.write(b"changed")
    with pytest.raises(DeployError) as caught:
        push(Local(), source, wanted, target)
    assert str(caught.value) == f"{source}/a.bin changed while it was sent; push it again when it is whole"
    assert not target.exists()
    (source / "a.bin").write_bytes(b"short")
    with pytest.raises(DeployError, match=r"a\.bin became shorter while it was"):
        push(Local(), source, wanted, target)
    (source / "a.bin").unlink()
    with pytest.raises(DeployError, match=r"a\.bin cannot be read: No such file or directory$"):
        push(Local(), source, wanted, target)


def test_a_connection_that_hangs_keeps_no_push_from_its_end(
    gpubox: GpuBox, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, hanging, send = read(source), [], sender._Sending._send

    def with_one_more(self: Any, words: tuple[Any, ...], count: int) -> None:
        hanging.append(onhost.open(Local(), "deploy.receiver:stream", *words))
        send(self, words, count)

    monkeypatch.setattr(sender._Sending, "_send", with_one_more)
    push(Local(), source, wanted, target_of(gpubox, wanted))
    assert hanging[0].wait(60) == 1
    assert contents(target_of(gpubox, wanted)) == contents(source)
    onhost.close(hanging[0])


def test_a_receiver_that_is_killed_is_started_again(
    gpubox: GpuBox, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, killed, said, send = read(source), [], [], sender._Sending._send

    def after_a_kill(self: Any, words: tuple[Any, ...], count: int) -> None:
        if not killed:
            killed.append(words[2])
            os.kill(words[2], signal.SIGKILL)
        send(self, words, count)

    monkeypatch.setattr(sender._Sending, "_send", after_a_kill)
    push(Local(), source, wanted, target_of(gpubox, wanted), streams=1, progress=said.append)
    assert ["trying again" in words for words in said] == [True]
    assert contents(target_of(gpubox, wanted)) == contents(source)


def test_what_another_try_left_damaged_is_sent_again(gpubox: GpuBox, source: Path) -> None:
    wanted = read(source)
    target = target_of(gpubox, wanted)
    left = weights_store.incoming_of(target)
    gpubox.shm.mkdir()
    weights_store.prepare(left, wanted, "x", "y", lambda text: None)
    shutil.copytree(source, left, dirs_exist_ok=True)
    with open(left / "a.bin", "r+b") as file:
        file.seek(7 * CHUNK + 3)
        file.write(b"?")
    (left / "b.bin").write_bytes(b"short")
    (left / manifest.FILE).write_text(json.dumps(wanted))
    sent = push(Local(), source, wanted, target)
    assert sent.bytes == 4 * CHUNK
    assert contents(target) == contents(source)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs with something in it, and too little room."""
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=755", "tmpfs", place], check=True)
    (place / "before").write_text("there")
    yield place
    subprocess.run(["umount", place], check=True)


def test_without_room_nothing_is_sent_and_what_was_there_stays(source: Path, small: Path) -> None:
    wanted = read(source)
    with pytest.raises(DeployError) as caught:
        push(Local(), source, wanted, small / f"m@{wanted['digest'][:12]}")
    words = str(caught.value)
    assert words.startswith(f"localhost: {small} has 1.0 MB free, but weights {source} need 1.6 MB: 594 kB")
    assert "Traceback" not in words
    assert sorted(os.listdir(small)) == [".m.lock", "before"]


KILLED = """\
import json, os, sys
from pathlib import Path
from deploy import sender
from deploy.host import Local
source, wanted, target, most = sys.argv[1:]
written, count = sender._Sending.written, []
def heard(self, stream, number):
    written(self, stream, number)
    count.append(number)
    if len(count) == int(most):
        os.kill(os.getpid(), 9)
sender._Sending.written = heard
options = {"durable": False, "link": True, "streams": 1}
sender.send(Local(), Path(source), json.loads(Path(wanted).read_text()), target, **options)
"""


def test_killed_clients_leave_no_lock_and_each_next_one_sends_what_is_missing(
    gpubox: GpuBox, source: Path, tmp_path: Path
) -> None:
    """(bench/weights.py does this thirty times, at random moments, over ssh.)

    What a killed client has written into the pipe still arrives: 16 chunks at most, besides those that it
    knew of.
    """
    (source / "a.bin").write_bytes(random.Random(6).randbytes(70 * CHUNK))
    wanted = read(source)
    target = target_of(gpubox, wanted)
    described = tmp_path / "wanted.json"
    described.write_text(json.dumps(wanted))
    root = Path(__file__).resolve().parents[2]
    for most in ("7", "9"):
        done = subprocess.run(
            [sys.executable, "-c", KILLED, source, described, target, most],
            env={**os.environ, "PYTHONPATH": str(root)},
            timeout=120,
        )
        assert done.returncode == -signal.SIGKILL
    sent = push(Local(), source, wanted, target)
    assert sent.there >= 16 * CHUNK
    assert sent.there + sent.bytes == 75 * CHUNK + 1
    assert sent.bytes > 0
    assert manifest.verify(target) == []
    assert contents(target) == contents(source)


def test_two_pushes_of_one_name_at_once_take_turns(gpubox: GpuBox, source: Path) -> None:
    wanted = read(source)
    target = target_of(gpubox, wanted)
    said: list[str] = []
    waiting = threading.Event()

    def hear(text: str) -> None:
        said.append(text)
        if "waiting for it" in text:
            waiting.set()

    with weights_store.locked(target.parent, "it's a model", "x", lambda text: None):
        results: list[sender.Sent] = []
        thread = threading.Thread(
            target=lambda: results.append(push(Local(), source, wanted, target, progress=hear))
        )
        thread.start()
        assert waiting.wait(60)
        assert not target.exists()
    thread.join(60)
    assert results
    assert said[0] == f"another deploy copies it's a model into {gpubox.shm}; waiting for it"
    assert contents(target) == contents(source)


def test_a_name_that_leads_out_of_the_place_is_refused(gpubox: GpuBox, source: Path) -> None:
    wanted = read(source)
    wanted["stamp"]["../out.bin"] = [1, 1]
    with pytest.raises(DeployError, match=r"\.\./out\.bin leads out of its directory"):
        push(Local(), source, wanted, target_of(gpubox, wanted))
    assert not (gpubox.shm / "out.bin").exists()


def test_a_file_that_may_not_be_read_is_one_sentence(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """(Root may read everything, but not what a disk has lost.)"""
    preadv = os.preadv

    def lost(file: int, *rest: Any) -> int:
        if os.readlink(f"/proc/self/fd/{file}").endswith("b.bin"):
            raise OSError(5, "Input/output error")
        return preadv(file, *rest)

    monkeypatch.setattr(os, "preadv", lost)
    with pytest.raises(DeployError) as caught:
        read(source)
    assert str(caught.value) == f"{source}/b.bin cannot be read: Input/output error"


@pytest.mark.parametrize(
    ("kernel", "round_trip", "count"),
    [
        ("another", 0.0, 4),
        ("another", 0.06, 4),
        ("another", 0.1, 7),
        ("", 0.0, 4),
        ("ours", 0.0, 2),
        ("ours", 5.0, 8),
    ],
)
def test_streams_are_chosen_from_cores_and_distance(
    kernel: str, round_trip: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(receiver, "kernel", lambda: "ours")
    assert sender._count(6, kernel, round_trip) == count
    assert sender._count(1, "another", 0.0) == 1


# -- behind another command, as pct exec is ----------------------------------------------------------------


class Inside(Local):
    """Commands in other namespaces of this machine, by a command before them, as ``pct exec ID --`` is.

    Only stdin, stdout, stderr and the exit code come through, and none of our variables.
    """

    is_local = False

    def __init__(self, pid: int) -> None:
        super().__init__("inside", "/usr/bin/python3")
        self.pid = pid

    def _start(self, argv: Any, env: Any, stdin: int) -> Any:
        before = ["nsenter", "-t", str(self.pid), "-p", "-m", "env", "-i", "PATH=/usr/bin:/bin"]
        return super()._start([*before, *argv], env, stdin)


def test_a_push_goes_through_any_command_that_passes_stdin_and_stdout(
    gpubox: GpuBox, source: Path, tmp_path: Path
) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    script = 'mount -t tmpfs -o size=8m,mode=755 tmpfs "$1" && echo ready && exec sleep 1000'
    container = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script, "sh", shm]
    with subprocess.Popen(container, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == b"ready\n"
            (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            host, wanted = Inside(int(first)), read(source)
            sent = push(host, source, wanted, shm / f"m@{wanted['digest'][:12]}")
            assert sent.bytes == 25 * CHUNK + 18
            assert contents(Path(f"/proc/{first}/root{shm}/m")) == contents(source)
            assert os.listdir(shm) == []
        finally:
            process.kill()


# -- by rsync ----------------------------------------------------------------------------------------------


def by_rsync_to(host: Any, source: Path, wanted: dict[str, Any], target: Path) -> sender.Sent:
    return by_rsync.send(host, source, wanted, str(target), link=True)


def test_rsync_brings_the_same_and_a_damaged_file_is_found_and_sent_again(
    gpubox: GpuBox, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, real, runs = read(source), rsyncing.run, []
    target = target_of(gpubox, wanted)
    incoming = weights_store.incoming_of(target)
    incoming.mkdir(parents=True)
    (incoming / "a.bin").write_bytes((source / "a.bin").read_bytes()[: 9 * CHUNK])  # of a try before

    def damaging(*arguments: Any) -> int:
        done = real(*arguments)
        runs.append(done)
        if len(runs) == 1:
            with open(incoming / "b.bin", "r+b") as file:
                file.write(b"?")
            os.utime(incoming / "b.bin", ns=(0, wanted["stamp"]["b.bin"][1]))
        return done

    monkeypatch.setattr(rsyncing, "run", damaging)
    sent = by_rsync_to(Local(), source, wanted, target)
    assert len(runs) == 2
    assert contents(target) == contents(gpubox.shm / "it's a model") == contents(source)
    assert (target / "one.safetensors").stat().st_ino == (target / "two.safetensors").stat().st_ino
    assert manifest.whole(target)
    assert sent.bytes > 16 * CHUNK
    assert by_rsync_to(Local(), source, wanted, target).bytes == 0


def test_rsync_repairs_what_is_not_whole_there_and_lets_the_plain_name_lead_to_what_is(
    gpubox: GpuBox, source: Path
) -> None:
    wanted, said = read(source), []
    target, plain = target_of(gpubox, wanted), gpubox.shm / "it's a model"
    assert by_rsync_to(Local(), source, wanted, target).streams == 1
    plain.unlink()
    plain.symlink_to("it's a model@another")
    assert by_rsync_to(Local(), source, wanted, target).streams == 0
    assert os.readlink(plain) == target.name

    def emptied() -> None:
        shutil.rmtree(target)
        target.mkdir()

    for spoil in (lambda: os.truncate(target / "sub dir" / "c\n.txt", 0), (target / "empty").unlink, emptied):
        spoil()
        options = {"link": True, "progress": said.append}
        assert by_rsync.send(Local(), source, wanted, str(target), **options).streams == 1
        assert said[0] == f"{target} on localhost is not whole; it is sent again"
        assert manifest.verify(target) == []
    assert sorted(os.listdir(gpubox.shm)) == ["it's a model", target.name]


def test_rsync_without_room_or_for_a_source_that_changes_leaves_what_was_there(
    gpubox: GpuBox, source: Path, small: Path
) -> None:
    wanted = read(source)
    with pytest.raises(
        DeployError, match=rf"^{small} has 1\.0 MB free, but 1\.6 MB are needed: .* too little"
    ):
        by_rsync_to(Local(), source, wanted, small / f"m@{wanted['digest'][:12]}")
    os.utime(source / "b.bin")
    with pytest.raises(DeployError, match="changed while it was sent; push it again when it is whole"):
        by_rsync_to(Local(), source, wanted, target_of(gpubox, wanted))
    assert not target_of(gpubox, wanted).exists()
    assert (small / "before").read_text() == "there"


def test_a_file_that_changes_after_it_has_gone_is_found_too(
    gpubox: GpuBox, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = read(source)
    send = sender._Sending._send

    def changing(sending: Any, *arguments: Any) -> None:
        send(sending, *arguments)
        os.utime(source / "a.bin", ns=(1, 1))

    monkeypatch.setattr(sender._Sending, "_send", changing)
    with pytest.raises(DeployError) as caught:
        push(Local(), source, wanted, target_of(gpubox, wanted))
    assert str(caught.value) == f"{source}/a.bin changed while it was sent; push it again when it is whole"
    assert not target_of(gpubox, wanted).exists()


def test_more_files_than_a_process_may_have_open_are_written(tmp_path: Path) -> None:
    names = [f"f{number}" for number in range(3 * pieces.OPEN)]
    for name in names:
        (tmp_path / name).touch()
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.closing(pieces.Files(tmp_path)) as files:
        for name in [*names, names[0]]:
            os.write(files[name], name.encode())
        assert len(os.listdir("/proc/self/fd")) <= before + pieces.OPEN
    assert [(tmp_path / name).read_text() for name in names[1:]] == names[1:]
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_error_of_the_host_ends_a_push_with_its_sentence(
    gpubox: GpuBox, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as a lost connection, which would be tried again and again."""
    wanted = read(source)
    target = target_of(gpubox, wanted)
    said: list[str] = []

    def spoil(sending: Any, *arguments: Any) -> None:
        (weights_store.incoming_of(target) / "a.bin").unlink()
        send(sending, *arguments)

    send = sender._Sending._send
    monkeypatch.setattr(sender._Sending, "_send", spoil)
    with pytest.raises(DeployError) as caught:
        push(Local(), source, wanted, target, progress=said.append)
    assert str(caught.value).endswith("/a.bin: No such file or directory")
    assert not any("trying again" in words for words in said)
