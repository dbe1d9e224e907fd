"""deploy/peek.py: what the answers of a host mean, in words. And who may read a process."""

from __future__ import annotations

import base64

import pytest

from deploy import peek, peek_host, procfs
from deploy.errors import DeployError


def stream(data: bytes = b"hello\n", **more):
    held = base64.b64encode(data).decode()
    base = {"name": "sys.stdout", "kind": "_io.TextIOWrapper", "fd": 1, "mode": "block", "encoding": "utf-8"}
    return {**base, "leads_to": "pipe:[7]", "held": held, **more}


def process(*streams, command=("python", "train.py"), variables=None, **more):
    base = {"pid": 7, "nspid": 7, "waits": None, "version": "3.11.7", "confirmed": True, "python": True}
    rest = {"refused": None, "seconds": 0.004, "command": list(command), "variables": variables or {}}
    return {**base, **rest, "streams": list(streams), **more}


@pytest.mark.parametrize(
    ("command", "variables", "says", "remedy"),
    [
        (["python", "x.py"], {}, "PYTHONUNBUFFERED is not set, and there is no -u", "PYTHONUNBUFFERED=1"),
        (["python", "x.py"], {"PYTHONUNBUFFERED": ""}, "is empty, which is off", "PYTHONUNBUFFERED=1"),
        (["python", "x.py"], {"PYTHONUNBUFFERED": "0"}, "is 0, which is off", "PYTHONUNBUFFERED=1"),
        (["python", "x.py"], {"PYTHONUNBUFFERED": "00"}, "is 00, which is off", "PYTHONUNBUFFERED=1"),
        (["python", "x.py"], {"PYTHONBUFFERED": "1"}, "which no Python knows", "PYTHONUNBUFFERED=1"),
        (["python", "-I", "x"], {"PYTHONUNBUFFERED": "1"}, "-I makes Python ignore", "add -u to -I"),
        (["python", "-E", "x"], {}, "is not set", "add -u"),
        (["python", "-u", "x"], {}, "-u was given, but the program has made this stream", "line_buffering"),
        (["python", "x"], {"PYTHONUNBUFFERED": "1"}, "has made this stream itself", "line_buffering"),
    ],
)
def test_why_a_stream_is_silent_and_how_to_start_it_right(command, variables, says, remedy):
    first, second = peek.why(process(command=command, variables=variables), stream())
    assert "a pipe (fd 1) is written in blocks" in first
    assert says in first
    assert remedy in second


def test_a_line_without_an_end_and_a_reader_that_does_not_read_have_reasons_of_their_own():
    assert "no end yet" in peek.why(process(), stream(mode="line"))[0]
    assert "does not read" in peek.why(process(waits="pipe_write"), stream())[0]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("pipe:[7]", "a pipe (fd 1)"),
        ("socket:[7]", "a socket (fd 1)"),
        ("/dev/pts/3", "a terminal (fd 1)"),
        ("/dev/null", "/dev/null (fd 1)"),
        ("/tmp/a\x1b[2Jb", "the file /tmp/a [2Jb (fd 1)"),
        (None, "nothing (it is closed) (fd 1)"),
    ],
)
def test_where_a_stream_leads(target, words):
    assert peek.where(stream(leads_to=target)) == words


def test_what_is_held_cannot_harm_the_terminal_and_only_the_last_lines_are_shown():
    lines = [b"line %d" % number for number in range(100)]
    text = peek.text([process(stream(b"\n".join(lines) + b"\n\x1b]0;title\x07\x9b2J \xff\n"))])
    assert "line 99" in text
    assert "line 10\n" not in text
    assert f"… {101 - peek.MOST_LINES} lines before" in text
    assert not any(ord(char) < 32 and char != "\n" for char in text)
    assert "\x9b" not in text


def test_text_is_read_in_the_encoding_of_its_stream():
    assert "│ é" in peek.text([process(stream("é".encode("latin-1"), encoding="iso8859-1"))])
    assert "│ é" in peek.text([process(stream("é".encode(), encoding="of their own"))])
    assert "│ " in peek.text([process(stream(b"ab", encoding="base64"))])


def test_json_has_the_bytes_as_they_are():
    (found,) = peek.to_json(process(stream(b"\x1b[2Jx")))["streams"]
    assert (base64.b64decode(found["held"]), found["text"], found["bytes"]) == (b"\x1b[2Jx", "\x1b[2Jx", 5)
    assert found["why"]


def test_a_stream_of_the_programs_own_and_other_processes_are_named_not_read():
    own = {"name": "sys.stdout", "kind": "Tee", "leads_to": None, "held": None}
    shell = process(python=False, refused="it is no Python", version=None)
    text = peek.text([process(own), shell])
    assert "sys.stdout is a Tee of the program's own: not read" in text
    assert "\n1 process of other programs: what other programs hold back cannot be read; into a pipe" in text
    assert text.endswith("tty: true in the run's file makes it write each line")
    assert "tty: true is set" in peek.text([process(own), shell], tty=True)


def test_nothing_readable_is_an_error_with_its_reasons():
    shell = process(python=False, refused="it is no Python", version=None)
    locked = process(python=None, refused="it belongs to ada", version=None)
    with pytest.raises(
        DeployError, match=r"no process of this run on gpu is a Python \(.*; .* tty: true in "
    ):
        peek.check("gpu", [shell], None)
    with pytest.raises(DeployError, match="tty: true is set, so"):
        peek.check("gpu", [shell], None, tty=True)
    with pytest.raises(DeployError, match="it belongs to ada"):
        peek.check("gpu", [shell, locked], None)
    with pytest.raises(DeployError, match="process 7 on gpu cannot be read: it is no Python"):
        peek.check("gpu", [shell], 7)
    peek.check("gpu", [shell, locked, process()], None)


def test_a_run_without_processes_holds_nothing():
    run = {
        "run_id": "0001-demo",
        "name": "demo",
        "path": "/r/0001-demo",
        "processes": [],
        "run": {"tty": True},
    }
    with pytest.raises(DeployError, match="fab tail --run-id 0001-demo"):
        peek.pids({"runs": [run]}, "gpu", "demo", None)
    alive = {**run, "processes": [{"pid": 4, "state": "S"}, {"pid": 5, "state": "Z"}]}
    assert peek.pids({"runs": [alive]}, "gpu", "demo", None) == ([4], True)


@pytest.mark.parametrize(
    ("owner", "user", "scope", "traces", "says"),
    [
        (0, 0, 1, False, "root has no CAP_SYS_PTRACE here, as in most containers; "),
        (0, 0, 3, True, "the kernel lets nobody read it (kernel.yama.ptrace_scope is 3, "),
        (0, 0, 1, True, "root has CAP_SYS_PTRACE here, but not over that process: "),
        (0, 65534, 1, False, "it belongs to root, and we are nobody; ask as root"),
        (65534, 1000, 1, False, "it belongs to nobody, and we are "),
        (1000, 1000, 1, False, "the kernel lets only its parent or root read it (kernel.yama."),
        (1000, 1000, 0, False, "it has rights of its own or hides its memory"),
    ],
)  # fmt: skip
def test_who_may_not_read_a_process_is_told_who_may(owner, user, scope, traces, says):
    said = peek_host.denied(owner, user, scope, traces)
    assert said.startswith(says)
    assert (said.endswith("ask as root")) == (says.endswith("ask as root")) or owner == user
    assert "as root or as root" not in said


def test_whether_we_may_trace_is_read_not_guessed():
    assert peek_host.may_trace(b"Name:\tx\nCapEff:\t0000000000080000\nCapBnd:\t0\n")
    assert not peek_host.may_trace(b"CapEff:\t00000000a80425fb\nCapBnd:\t0000000000080000\n")
    assert not peek_host.may_trace(b"")


def test_threads_of_the_kernel_are_told_by_their_flags():
    line = b"2 (k (thr) ead) S 0 0 0 0 -1 2129984 0 0 0 0 0 5 0 0 20 0 1 0 31 0 0"
    assert procfs.is_kernel(line)
    assert not procfs.is_kernel(line.replace(b"2129984", b"4194304"))
    assert not procfs.is_kernel(b"")
