"""fab peek against real interpreters: what they hold back is read, and they never notice."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import deployed
import fabbed
import pytest
from deployed import HOST, until

from deploy import onhost, peek, peek_flush, peek_host, procfs
from deploy.errors import DeployError

# This Python, and whatever others a machine has: each has layouts of its own.
INTERPRETERS = {sys.executable} | {
    str(path)
    for pattern in (".pyenv/versions/3.*/bin/python3", "/usr/bin/python3.[0-9]*[0-9]")
    for path in (Path("/").glob(pattern[1:]) if pattern.startswith("/") else Path.home().glob(pattern))
    if re.search(r"3\.(8|9|1[0-5])(\.\d+/bin/python3)?$", str(path))
}
WAIT = "import os, sys, time\n{body}\nos.write(3, b'ready')\ntime.sleep(1000)"


def environment(**more: str) -> dict[str, str]:
    return {**{key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}, **more}


@pytest.fixture
def start(tmp_path):
    """Starts Python with a body, its stdout a file; returns (process, file) once the body is done."""
    began = []

    def start(body, *flags, python=sys.executable, **more):
        reading, writing = os.pipe()
        out = tmp_path / f"out{len(began)}"
        with open(out, "wb") as file:
            more = {"stdout": file, "stderr": subprocess.DEVNULL, "env": environment(), **more}
            program = WAIT.format(body=body).replace("os.write(3,", f"os.write({writing},")
            process = subprocess.Popen([python, *flags, "-c", program], pass_fds=[writing], **more)
        began.append(process)
        os.close(writing)
        assert os.read(reading, 5) == b"ready", f"{python} ended with {process.wait()}"
        os.close(reading)
        return process, out

    yield start
    for process in began:
        process.kill()
        process.wait()


def held(found, name="sys.stdout"):
    assert found["refused"] is None, found["refused"]
    (stream,) = [one for one in found["streams"] if one["name"] == name]
    return base64.b64decode(stream["held"])


@pytest.mark.parametrize("python", sorted(INTERPRETERS))
def test_what_is_printed_but_not_written_is_read_in_every_interpreter(start, python):
    body = """
for number in range(700): print("line", number, "é" * (number % 3))
sys.stderr.write("half a line")
"""
    process, out = start(body, python=python)
    whole = "".join(f"line {number} {'é' * (number % 3)}\n" for number in range(700)).encode()
    found = peek_host.one(process.pid)
    assert found["confirmed"]
    assert held(found)
    assert out.read_bytes() + held(found) == whole
    assert held(found, "sys.stderr") in (b"half a line", b"")  # (3.8 writes it in blocks, all keep it)
    assert found["streams"][0]["mode"] == "block"
    assert found["streams"][0]["leads_to"] == str(out)
    said = subprocess.check_output([python, "-c", "import platform; print(platform.python_version())"])
    assert found["version"] == said.decode().strip()
    assert peek_host.one(process.pid)["streams"] == found["streams"]  # it has not moved


@pytest.mark.parametrize("python", sorted(INTERPRETERS))
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("print('x' * 100, end='')", b"x" * 100),  # one text, not a list of them
        ("print('é')", "é\n".encode()),  # bytes
        ("sys.stdout.buffer.write(b'\\x00\\xff' * 50)", b"\x00\xff" * 50),  # below the text
        ("sys.stdout.buffer.write(b'first '); print('second')", b"first second\n"),
        ("print('written'); sys.stdout.flush(); print('held')", b"held\n"),
        ("print('x' * 300_000)", b"\n"),  # what is more than the buffers take is written
    ],
)
def test_every_place_where_python_keeps_output(start, python, body, expected):
    process, _ = start(body, python=python)
    assert held(peek_host.one(process.pid)) == expected


def test_an_unbuffered_python_holds_nothing(start):
    process, out = start("print('hello')", "-u")
    found = peek_host.one(process.pid)
    assert (held(found), out.read_bytes()) == (b"", b"hello\n")
    assert found["streams"][0]["mode"] == "unbuffered"
    assert "holds nothing back" in peek.text([found])


def test_a_stream_that_the_program_has_made_itself(start, tmp_path):
    path = tmp_path / "own"
    body = f"print('old'); sys.stdout = open({str(path)!r}, 'w+', encoding='latin-1'); print('né')"
    found = peek_host.one(start(body)[0].pid)
    assert held(found) == "né\n".encode("latin-1")
    assert held(found, "sys.__stdout__") == b"old\n"
    assert found["streams"][0]["leads_to"] == str(path)
    own = "import io\nclass Tee(io.TextIOBase): pass\nclass Sub(io.TextIOWrapper): pass\n"
    found = peek_host.one(start(own + "sys.stdout = Sub(sys.stdout.buffer); print('sub')")[0].pid)
    assert held(found) == b"sub\n"
    found = peek_host.one(start(own + "print('before'); sys.stdout = Tee()")[0].pid)
    assert found["streams"][0] == {"name": "sys.stdout", "kind": "Tee", "leads_to": None, "held": None}
    assert held(found, "sys.__stdout__") == b"before\n"
    assert peek_host.one(start("sys.stdout = sys.__stdout__ = None")[0].pid)["refused"] is None


@pytest.mark.slow
def test_readings_of_a_process_that_prints_all_the_while_are_never_torn(start):
    body = """
import threading
def count():
    number = 0
    while True:
        print("line", number)
        number += 1
        if number % 50 == 0: time.sleep(0.001)
threading.Thread(target=count, daemon=True).start()
"""
    process, _ = start(body)
    confirmed = 0
    for _ in range(40):
        found = peek_host.one(process.pid)
        confirmed += found["confirmed"]
        text = held(found).decode()
        if not found["confirmed"] or not text:
            continue
        numbers = [int(number) for number in re.findall(r"line (\d+)\n", text)]
        rest = re.sub(r"line (\d+)\n", "", text)
        assert len(rest) <= 40, rest  # at most the cut lines at both ends
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
    assert confirmed
    assert process.poll() is None


def test_what_cannot_be_read_is_refused_with_its_reason():
    sleeping = subprocess.Popen(["sleep", "1000"])
    try:
        until(lambda: procfs.read(sleeping.pid, "cmdline").startswith(b"sleep"))
        found = peek_host.one(sleeping.pid)
        assert found["python"] is False
        assert "no Python" in found["refused"]
        sleeping.send_signal(signal.SIGKILL)
        until(lambda: procfs.stat(sleeping.pid)["state"] == "Z")
        assert "zombie" in peek_host.one(sleeping.pid)["refused"]
    finally:
        sleeping.kill()
        sleeping.wait()
    assert peek_host.one(sleeping.pid)["refused"] == "there is no such process"


def test_a_process_of_somebody_else_is_refused(start):
    pid = start("print('secret')")[0].pid if os.getuid() == 0 else 1
    code = f"from deploy import peek_host; print(peek_host.one({pid})['refused'])"
    drop = "import os; os.getuid() == 0 and os.setuid(65534)\n"
    argv = [sys.executable, "-c", "import deploy.peek_host\n" + drop + code]
    said = subprocess.check_output(argv, cwd=deployed.CHECKOUT, text=True)
    assert "it belongs to root" in said
    assert "ask as root" in said


@pytest.mark.root
def test_a_process_in_namespaces_of_its_own_is_read_by_its_number_here(start):
    reading, writing = os.pipe()
    body = f"import os, time; print('inside'); os.write({writing}, b'ready'); time.sleep(1000)"
    argv = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", body]
    process = subprocess.Popen(
        argv, stdout=subprocess.DEVNULL, pass_fds=[writing], env=environment(), start_new_session=True
    )
    try:
        assert os.read(reading, 5) == b"ready"
        (child,) = [one["pid"] for one in procfs.processes().values() if one["ppid"] == process.pid]
        found = peek_host.one(child)
        assert (held(found), found["nspid"]) == (b"inside\n", 1)
        assert "(1 in its container)" in peek.text([found])
    finally:
        process.kill()
        process.wait()
        os.close(reading)
        os.close(writing)


# -- flush -------------------------------------------------------------------------------------------------


def test_the_script_that_python_is_given_writes_everything_and_removes_itself(tmp_path):
    folder = tmp_path / "asked"
    folder.mkdir()
    script = folder / "flush.py"
    script.write_text(peek_flush.SCRIPT.format(path=str(script)))
    body = f"""
import os, sys
print("held"); sys.stderr.write("half"); sys.stderr = None
with open({str(script)!r}) as file: text = file.read()
before = set(globals()) | {{"before"}}
exec(text)
assert set(globals()) == before, set(globals()) - before
os._exit(0)  # writes nothing
"""
    argv = [sys.executable, "-c", body]
    done = subprocess.run(argv, capture_output=True, env=environment(), check=True)
    assert (done.stdout, done.stderr) == (b"held\n", b"half")
    assert not folder.exists()


def test_flush_is_refused_where_python_has_no_safe_way(start):
    process, out = start("print('held')")
    if sys.version_info >= (3, 14):
        assert "3.13" in peek_flush.refusal(process.pid, (3, 13, 1), peek_host.one(process.pid))
        return
    ((pid, sentence, done),) = peek.flush(HOST, [peek_host.one(process.pid)])
    assert (pid, done) == (process.pid, False)
    assert "the safe way (sys.remote_exec) came with 3.14" in sentence
    assert out.read_bytes() == b""


def test_flush_is_refused_where_the_process_would_wait_or_cannot_hear(start):
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETFL, os.O_NONBLOCK)
    process, _ = start("print('held')", stdout=writing)
    found = peek_host.one(process.pid)
    assert peek_flush.refusal(process.pid, (3, 14, 0), found) == ""
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    assert "would wait" in peek_flush.refusal(process.pid, (3, 14, 0), found)
    os.close(reading)
    os.close(writing)
    assert "would wait" in peek_flush.refusal(process.pid, (3, 14, 0), found)
    quiet = {**found, "command": ["python", "-X", "disable-remote-debug", "x.py"]}
    assert "disabled" in peek_flush.refusal(process.pid, (3, 14, 0), quiet)
    nothing, _ = start("pass")
    assert peek_flush.flush(nothing.pid) == {"flushed": 0, "left": 0, "waiting": None}
    with pytest.raises(DeployError, match="no such process"):
        peek_flush.flush(4_000_000)


def test_a_python_that_asks_is_of_the_same_version(start):
    process, _ = start("pass")
    assert peek_flush.interpreter(process.pid, sys.version_info[:2])[0] == sys.executable
    path, *_ = peek_flush.interpreter(process.pid, (3, 99))
    assert path == os.path.realpath(sys.executable)


# -- as people call it -------------------------------------------------------------------------------------


def test_it_is_asked_of_a_host_as_a_function(start):
    process, _ = start("print('held')")
    (found,) = onhost.ask(HOST, "deploy.peek_host:look", [process.pid])
    assert held(found) == b"held\n"


@pytest.fixture
def fab(tmp_path):
    yield from fabbed.project(tmp_path)


@pytest.mark.slow
def test_peek_shows_what_a_run_holds_back_and_why(fab):
    code = "print('not yet'); import time; time.sleep(1000)"
    fab.file(f'command: [python, -I, -c, "{code}"]\ngrace_seconds: 1\nsettle_seconds: 0\n')
    fab.ok("deploy", "--no-follow")
    until(lambda: "│ not yet" in fab.run("peek").stdout)
    assert "-I makes Python ignore PYTHONUNBUFFERED" in fab.ok("peek")
    fab.ok("stop")
    done = fab.run("peek")
    assert (done.returncode, done.stdout) == (1, "")
    assert "has no process on localhost any more" in done.stderr
    assert fab.run("peek", "--pid", "1", "--name", "demo").returncode == 2
    assert fab.run("peek", "--run-id", "0001-demo", "--name", "other").returncode == 2


@pytest.mark.slow
def test_a_run_of_another_program_is_told_of_tty_and_launch_is_not_listed(fab):
    fab.file("command: [sh, -c, 'echo up; exec sleep 1000']\ngrace_seconds: 1\nsettle_seconds: 0\n")
    fab.ok("deploy", "--no-follow")
    done = fab.run("peek")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("no process of this run on localhost is a Python (sleep 1000): what ")
    assert done.stderr.endswith("tty: true in the run's file makes it write each line\n")
    program = "print(1); import time; time.sleep(1000)"
    words = f"echo up; sleep 1000 & exec python -I -c '{program}'"
    fab.file(f"command: [sh, -c, {json.dumps(words)}]\ngrace_seconds: 1\nsettle_seconds: 0\n")
    fab.ok("restart", "--no-follow")
    until(lambda: "│ 1" in fab.run("peek").stdout)
    lines = fab.ok("peek").splitlines()
    assert [line.split("  ")[1] for line in lines if line[0].isdigit() and "  " in line] == [
        f"python -I -c {program}"
    ]
    assert lines[-1].startswith("1 process of other programs: ")
    (pid,) = [one["pid"] for one in json.loads(fab.ok("peek", "--json"))["processes"] if one["python"]]
    for task in ("peek", "stacks"):
        sleeping = [p for p in procfs.processes() if procfs.read(p, "cmdline") == b"sleep\x001000\0"]
        other = next(p for p in sleeping if procfs.run_of(p) == procfs.run_of(pid))
        done = fab.run(task, "--pid", str(other))
        assert (done.returncode, done.stdout) == (1, "")
        assert "Python" in done.stderr
