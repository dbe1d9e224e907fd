"""The one remote command line: tried with the shells of this machine, without a connection."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deploy.sshcommand import COMMAND, Process, Request, killing

SHOW = (
    "import os, sys, json\n"
    "json.dump([[os.fsencode(a).hex() for a in sys.argv[1:]], os.environb[b'V'].hex()], sys.stdout)"
)
HOSTILE = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=60)


@pytest.fixture(params=[pytest.param(shell, marks=pytest.mark.program(shell)) for shell in ("dash", "bash")])
def path(request, tmp_path: Path) -> str:
    """A PATH in which `sh` is another shell."""
    (tmp_path / "sh").symlink_to(shutil.which(request.param))
    return f"{tmp_path}:{os.environ['PATH']}"


def run(request: Request, path: str, data: bytes = b"", login: str = "sh") -> subprocess.CompletedProcess:
    return subprocess.run(
        [login, "-c", COMMAND],
        input=request.encode() + data,
        capture_output=True,
        timeout=60,
        env={**os.environ, "PATH": path},
    )


def output(request: Request, done: subprocess.CompletedProcess) -> bytes:
    word, _, start = request.begin(done.stdout)
    assert word == "begun"
    return done.stdout[start:]


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(words=st.lists(HOSTILE, max_size=3), value=HOSTILE, data=st.binary(max_size=200))
def test_arguments_variables_and_input_arrive_byte_for_byte(path, words, value, data):
    code = SHOW + "\nsys.stdout.flush(); sys.stdout.buffer.write(sys.stdin.buffer.read())"
    request = Request([sys.executable, "-I", "-X", "utf8", "-c", code, *words], {"V": value})
    out = output(request, run(request, path, data))
    shown, end = json.JSONDecoder().raw_decode(out.decode("latin-1"))
    assert shown == [[word.encode().hex() for word in words], value.encode().hex()]
    assert out[end:] == data


def test_no_login_shell_reads_the_line_in_its_own_way():
    assert not set(COMMAND.removeprefix("exec sh -c '").removesuffix("'")) & set("'\\!\n")
    request = Request(["printf", "%s", "a 'b' $(c)"])
    for login in ("sh", "bash", "dash", "fish", "tcsh", "zsh"):
        if shutil.which(login):
            assert output(request, run(request, os.environ["PATH"], login=login)) == b"a 'b' $(c)"


@pytest.mark.parametrize(
    "name", ["UID", "EUID", "PPID", "SHELLOPTS", "IFS", "LC_ALL", "_", "A.B", "1", "PS4"]
)
def test_variables_that_a_shell_keeps_for_itself_arrive(path, name):
    request = Request([sys.executable, "-c", f"import os; print(os.environ[{name!r}])"], {name: "C"})
    assert output(request, run(request, path)) == b"C\n"


def test_the_program_is_looked_for_in_the_path_that_it_gets(path, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "only-here").symlink_to(shutil.which("true"))
    request = Request(["only-here"], {"PATH": f"{tmp_path / 'bin'}:{path}"})
    assert run(request, path).returncode == 0


@pytest.mark.parametrize("code", [0, 3, 127, 254, 255])
def test_an_exit_code_of_255_can_be_told_from_a_lost_connection(path, code):
    request = Request(["sh", "-c", f"echo err >&2; exit {code}"])
    done = run(request, path)
    assert done.returncode == code
    assert request.errors(done.stderr) == (b"err\n", code == 255)


def test_what_is_killed_leaves_no_words_of_the_shell(path):
    request = Request(["sh", "-c", "kill -KILL $$"])
    done = run(request, path)
    assert (done.returncode, request.errors(done.stderr)) == (137, (b"", False))


def test_what_came_before_the_begin_is_not_ours():
    request = Request(["true"], token="drafthouse-t")
    noise = b"welcome, drafthouse-t begun"
    assert request.begin(noise) is None
    assert request.begin(noise + b"\ndrafthouse-t begun 7 (sh) S 1") is None  # half a line
    word, process, start = request.begin(noise + b"\ndrafthouse-t begun\nout")
    assert (word, process, start) == ("begun", None, len(noise) + 20)
    assert request.errors(b"noise\n\ndrafthouse-t\nerr\n\ndrafthouse-t 255\n") == (b"err\n", True)
    assert request.errors(b"noise only") == (b"noise only", False)


def test_a_process_is_killed_with_its_group_and_no_other_is():
    victim = subprocess.Popen(["sh", "-c", "sleep 1000 & wait"], start_new_session=True)
    fields = Path(f"/proc/{victim.pid}/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19])

    def kill(process: Process) -> str:
        return subprocess.run(killing(process), capture_output=True, text=True, check=True).stdout.strip()

    assert kill(Process(victim.pid, victim.pid, started + 1)) == "gone"  # the pid is another's by now
    assert victim.poll() is None
    assert kill(Process(victim.pid, victim.pid, started)) == "killed"
    assert victim.wait(10) == -9


def test_what_no_environment_can_hold_is_refused():
    for env in ({"": "x"}, {"A=B": "x"}, {"A": "a\0b"}):
        with pytest.raises(ValueError, match=r"illegal environment|null byte"):
            Request(["true"], env).encode()
    with pytest.raises(ValueError, match="null byte"):
        Request(["true", "\0"]).encode()
