"""deploy/waits.py: where real processes wait, and what is made of /proc's words."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from deployed import until

from deploy import procfs
from deploy.waits import Waits, address, bits

IMPORTS = "import fcntl, os, select, socket, sys, threading, time\n"


@pytest.fixture
def start() -> Iterator:
    """Start a program that says a word and then waits; its pid, once it sleeps."""
    started = []

    def begin(source: str, *arguments: str) -> int:
        argv = [sys.executable, "-S", "-c", IMPORTS + source, *arguments]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout
        process.stdout.readline()
        until(lambda: (found := procfs.stat(process.pid)) and found["state"] == "S")
        return process.pid

    yield begin
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("lock = threading.Lock(); lock.acquire(); print(flush=True); lock.acquire()", "lock"),
        ("print(flush=True); os.read(os.pipe()[0], 1)", "pipe"),
        ("print(flush=True); time.sleep(1000)", "sleep"),
        ("a, b = os.pipe(); print(flush=True); select.select([a], [], [])", "pipe"),
        (
            "a, b = socket.socketpair(); p = select.poll(); p.register(a); print(flush=True); a.recv(1)",
            "socket",
        ),
        ("e = select.epoll(); a, b = os.pipe(); e.register(a); print(flush=True); e.poll()", "pipe"),
        ("pid = os.fork() or time.sleep(1000); print(flush=True); os.waitpid(pid, 0)", "child"),
    ],
)
def test_what_a_process_waits_for_is_told(start, source, kind):
    found = Waits().of(start(source))
    assert found is not None
    assert found["kind"] == kind, found


@pytest.mark.parametrize("wait", ["s.recv(1)", "select.select([s], [], [])", "s.settimeout(1000); s.recv(1)"])
def test_the_other_end_of_a_socket_is_named(start, wait):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"s = socket.create_connection(('127.0.0.1', {port})); print(flush=True); {wait}"
        found = Waits().of(start(connect))
    assert (found["kind"], found["on"]) == ("socket", [f"127.0.0.1:{port}"])


def test_who_waits_for_callers_says_where(start):
    listen = "s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); s.accept()"
    found = Waits().of(start(listen))
    assert found["kind"] == "socket"
    assert found["on"][0].startswith("callers at 127.0.0.1:")


def test_all_threads_are_told_and_no_more_than_were_asked_for(start):
    source = "for _ in range(5): threading.Thread(target=time.sleep, args=(1000,)).start()\nprint(flush=True)"
    pid = start(source)
    waits = Waits()
    until(lambda: all(one["kind"] == "sleep" for one in waits.threads(pid, 9)[0]))
    found, count = waits.threads(pid, 3)
    assert (len(found), count) == (3, 5)


def test_a_process_that_is_gone_waits_nowhere():
    process = subprocess.Popen(["true"])
    process.wait()
    assert Waits().of(process.pid) is None
    assert Waits().threads(process.pid, 9) == ([], 0)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("0100007F:733C", "127.0.0.1:29500"),
        ("00000000000000000000000001000000:0050", "[::1]:80"),
        ("0000000000000000FFFF00000200000A:0050", "10.0.0.2:80"),
        ("rubbish", ""),
        ("01:02:03", ""),
        ("", ""),
    ],
)
def test_addresses_are_shown_as_people_write_them(words, shown):
    assert address(words) == shown


def test_the_numbers_of_a_set_of_descriptors():
    assert bits(bytes([0b1001, 0b1]), 64) == [0, 3, 8]
    assert bits(b"\xff", 3) == [0, 1, 2]


def test_who_may_not_trace_a_process_is_told_the_kernels_function(start, monkeypatch):
    pid = start("lock = threading.Lock(); lock.acquire(); print(flush=True); lock.acquire()")
    read = procfs.read
    monkeypatch.setattr(procfs, "read", lambda pid, name: b"" if name == "syscall" else read(pid, name))
    assert Waits().of(pid) == {"call": None, "kind": "lock", "on": []}
    monkeypatch.setattr(procfs, "read", lambda pid, name: b"")
    assert Waits().of(pid) is None
