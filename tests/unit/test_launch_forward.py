"""Writing to a stdout that may be slow, stuck or gone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket

import pytest

from trainer.forward import Forward


def read_all(descriptor: int) -> bytes:
    os.set_blocking(descriptor, False)
    found = b""
    try:
        while data := os.read(descriptor, 1 << 16):
            found += data
    except BlockingIOError:
        pass
    return found


@pytest.fixture
def pipe():
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    yield reading, writing
    for descriptor in (reading, writing):
        with contextlib.suppress(OSError):  # a test has closed it
            os.close(descriptor)


def line(number: int) -> bytes:
    return b"line %06d %s\n" % (number, b"x" * 80)


def test_what_a_blocked_stdout_cannot_take_is_dropped_as_whole_records_counted_and_told(pipe):
    reading, writing = pipe
    forward = Forward(writing, queue_bytes=10_000)
    for number in range(1000):
        forward.put(line(number), 1)
    assert forward.dropped > 800
    got = b""
    while forward.waiting:
        got += read_all(reading)
        forward.pump()
    forward.put(line(1000), 1)
    got += read_all(reading)
    lines = got.decode().splitlines()
    told = [text for text in lines if text.startswith("──")]
    kept = [text for text in lines if not text.startswith("──")]
    assert len(told) == 1
    assert int(re.search(r"([\d,]+) records", told[0])[1].replace(",", "")) == forward.dropped
    assert [text.encode() + b"\n" for text in kept] == [line(n) for n in range(len(kept) - 1)] + [line(1000)]
    assert len(kept) + forward.dropped == 1001
    assert lines.index(told[0]) == len(kept) - 1  # where the lines are missing


def test_stdout_stays_blocking_for_the_others_who_share_it(pipe):
    _, writing = pipe
    forward = Forward(writing)
    forward.put(b"x" * 100_000 + b"\n", 1)
    assert forward.waiting
    assert os.get_blocking(writing)


def test_a_pipe_that_may_not_be_opened_again_is_still_never_waited_for(pipe, monkeypatch):
    reading, writing = pipe

    def refuse(*_args, **_keywords):
        raise PermissionError(13, "as in a container whose stdout belongs to root")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        forward = Forward(writing)
    data = b"".join(line(number) for number in range(500))
    forward.put(data, 500)
    got = b""
    while forward.waiting:
        got += read_all(reading)
        forward.pump()
    assert got + read_all(reading) == data


def test_a_stdout_without_reader_ends_nothing(pipe):
    reading, writing = pipe
    forward = Forward(writing)
    forward.put(b"first\n", 1)
    os.close(reading)
    forward.put(b"second\n", 1)
    forward.put(b"third\nfourth\n", 2)
    assert forward.closed
    assert forward.dropped == 3


def test_a_socket_is_never_waited_for():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        forward = Forward(theirs.fileno())
        data = b"".join(line(number) for number in range(10_000))
        forward.put(data, 10_000)
        assert forward.waiting
        got = b""
        while forward.waiting:
            got += ours.recv(1 << 20)
            forward.pump()
        got += read_all(ours.fileno())
        assert got == data
        forward.close()


def test_a_file_keeps_the_offset_that_it_shares_with_others(tmp_path):
    with open(tmp_path / "out", "wb", buffering=0) as file:
        file.write(b"before\n")
        Forward(file.fileno()).put(b"ours\n", 1)
        file.write(b"after\n")
    assert (tmp_path / "out").read_bytes() == b"before\nours\nafter\n"


def test_a_full_device_costs_records_and_nothing_else():
    with open("/dev/full", "wb", buffering=0) as full:
        forward = Forward(full.fileno())
        forward.put(b"a\nb\n", 2)
        assert forward.dropped == 2
        assert not forward.waiting


def test_what_is_queued_at_the_end_is_counted_without_the_part_that_arrived(pipe):
    reading, writing = pipe
    forward = Forward(writing)
    data = b"".join(line(number) for number in range(100))
    forward.put(data, 100)
    forward.close()
    arrived = read_all(reading)
    assert arrived == data[: len(arrived)]
    assert forward.dropped == 100 - arrived.count(b"\n")
