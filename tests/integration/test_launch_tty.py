"""`tty: true`: programs that Python's variable does not reach write line by line, and nothing is added."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import gone, launched, python, wait_for

from trainer.processes import read_process
from trainer.status import RunDir

pytestmark = pytest.mark.slow

EVERY_BYTE = bytes(range(256))
# A line that the program does not flush, then a wait for a file: if seen before, it was not held back.
C = r"""
#include <stdio.h>
#include <unistd.h>
int main(int count, char **words) {
    printf("early\n");
    fclose(fopen(words[1], "w"));
    while (access(words[2], F_OK)) usleep(10000);
    printf("late\n");
    return 7;
}
"""


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("c")
    (place / "held.c").write_text(C)
    subprocess.run(["cc", "-o", place / "held", place / "held.c"], check=True, timeout=60)
    return str(place / "held")


PYTHON = """
import os, time
print('early')
open('printed', 'w').close()
while not os.path.exists('go'): time.sleep(0.02)
print('late')
"""
NEEDS_CC = pytest.mark.program("cc")


@pytest.mark.parametrize("which", [pytest.param("C", marks=NEEDS_CC), "python -I", "pipeline"])
@pytest.mark.parametrize("tty", [True, False])
def test_a_line_comes_at_once_on_a_terminal_and_is_held_back_by_a_pipe(
    tmp_path: Path, request: pytest.FixtureRequest, which: str, tty: bool
) -> None:
    # Only the last program of a pipeline writes to the terminal; the one before it is told by its own switch.
    wait = "while ! [ -e go ]; do sleep 0.02; done"
    words = f"(echo early; touch printed; {wait}; echo late) | sed -u s/x/y/ | grep a"
    command = {
        "C": lambda: [request.getfixturevalue("program"), "printed", "go"],
        "python -I": lambda: [sys.executable, "-I", "-S", "-c", PYTHON],
        "pipeline": lambda: ["sh", "-c", words],
    }[which]()
    with launched(tmp_path, command, tty=tty, working_directory=str(tmp_path)) as run:
        if tty:
            run.wait_for_log(b"early\n")
        else:  # it has printed the line and all of its programs wait, but no byte has come
            wait_for((tmp_path / "printed").exists, "the line to be printed")
            wait_for(lambda: all(sleeps(pid) for pid in run.tree()), "all programs to wait")
            assert run.log == b""
        (tmp_path / "go").touch()
        assert run.finish().code == (7 if which == "C" else 0)
    assert run.log == b"early\nlate\n"
    assert run.stdout.endswith(b"early\nlate\n" + run.notes[-1].encode() + b"\n")
    assert ("stdout line by line (tty: true, /dev/pts/" in run.notes[0]) == tty


def sleeps(pid: int) -> bool:
    process = read_process(pid)
    return process is None or process.state in "SZ"


@pytest.mark.parametrize("tty", [True, False])
def test_every_byte_arrives_as_it_was_written(tmp_path: Path, tty: bool) -> None:
    """Beyond what a terminal holds, to its last byte, which has no newline; stdin is what it always was."""
    source = """
import os
data = bytes(range(256)) * 2000 + b"end"
while data: data = data[os.write(1, data):]
os.write(2, os.readlink("/proc/self/fd/0").encode())
"""
    with launched(tmp_path, python(source), tty=tty) as run:
        assert run.finish().code == 0
    assert run.raw_log.count(EVERY_BYTE) == 2000
    start = run.raw_log.index(EVERY_BYTE)
    assert run.raw_log[start : start + 512_000 + 12] == EVERY_BYTE * 2000 + b"end/dev/null"


def test_a_program_sees_a_terminal_that_is_nobodys(tmp_path: Path) -> None:
    source = """
import os, termios
print(os.isatty(1), os.isatty(2), os.isatty(0), os.get_terminal_size(1), os.environ["TERM"])
print(os.getsid(0) == os.getpid(), os.path.exists("/proc/self/fd/3"))
iflag, oflag, cflag, lflag = termios.tcgetattr(1)[:4]
print(oflag & termios.OPOST, lflag & (termios.ECHO | termios.ISIG | termios.ICANON))
try:
    os.open("/dev/tty", os.O_RDWR)
except OSError as error:
    print("no controlling terminal:", error.strerror)
"""
    with launched(tmp_path, python(source), tty=True) as run:
        run.finish()
    assert run.log.decode().splitlines() == [
        "True True False os.terminal_size(columns=120, lines=24) dumb",
        "True False",
        "0 0",
        "no controlling terminal: No such device or address",
    ]


def test_a_run_with_a_terminal_stops_and_records_its_end_as_any_other(tmp_path: Path) -> None:
    source = """
import os, signal, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)  # keeps the terminal open
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), os._exit(5)))
print(child.pid, flush=True)
while True: time.sleep(0.05)
"""
    with launched(tmp_path, python(source), tty=True, restart_attempts=3) as run:
        child = int(wait_for(lambda: run.log.strip(), "the child's pid"))
        run.term()
        record = run.finish()
    assert (record.reason, record.code, record.attempts) == ("stopped", 5, 1)
    assert run.log == f"{child}\nsaved\n".encode()
    assert any("left behind by the trainer" in line for line in run.notes)
    assert gone(child)


def test_every_attempt_has_a_terminal_of_its_own_and_its_last_words_are_kept(tmp_path: Path) -> None:
    source = "import os, signal; print('last words', os.isatty(1)); os.kill(os.getpid(), signal.SIGKILL)"
    with launched(tmp_path, python(source), tty=True, restart_attempts=1) as run:
        record = run.finish()
    assert (record.attempts, record.signal) == (2, signal.SIGKILL)
    assert run.log == b"last words True\n" * 2
    assert record.last_lines == ["last words True"]


def test_a_program_that_closes_its_terminal_is_waited_for(tmp_path: Path) -> None:
    source = "import os, time; print('bye'); os.close(1); os.close(2); time.sleep(0.7); os._exit(4)"
    with launched(tmp_path, python(source), tty=True) as run:
        record = run.finish()
    assert (record.code, run.log) == (4, b"bye\n")


@pytest.mark.root
def test_where_there_are_no_terminals_the_run_fails_with_the_remedy(tmp_path: Path) -> None:
    hidden = ["unshare", "-m", "sh", "-c", 'mount --bind /dev/null /dev/ptmx && exec "$@"', "sh"]
    with launched(tmp_path, ["true"], tty=True, wrapper=hidden, restart_attempts=3) as run:
        record = run.finish()
    assert (record.reason, record.code, record.attempts) == ("failed", 2, 1)
    assert "tty: true needs a pseudo-terminal, and there is none" in record.message


def test_a_run_json_from_before_has_no_terminal(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"run_id": "0001-a", "name": "a", "command": ["true"]}')
    assert RunDir(tmp_path).run().tty is False
