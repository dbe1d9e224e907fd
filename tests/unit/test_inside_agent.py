"""deploy/inside_agent.py: one command after the other, each as if it had been started by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import inside_agent
from deploy.host import SCRIPT_FLAGS
from deploy.inside import Agent
from deploy.sshcommand import COMMAND, Request

SHELL = ["/bin/sh", "-c", COMMAND]


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    source = Path(inside_agent.__file__).read_text()
    argv = [sys.executable, *SCRIPT_FLAGS, "-c", source, *SHELL]
    pipe = subprocess.PIPE
    started = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    yield started
    Agent(started).close()


@pytest.fixture
def agent(process: subprocess.Popen[bytes]) -> Agent:
    return Agent(process)


def run(agent: Agent, *argv: str, input: bytes = b"", timeout: float = 30, **env: str):
    request = Request(argv, env)
    done = agent.ask(request.encode() + input, timeout)
    begun = request.begin(done.out)
    assert begun is not None
    return done.code, done.out[begun[2] :], request.errors(done.err)[0]


def until(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def test_commands_follow_each_other_and_none_sees_the_others_input_or_variables(agent: Agent) -> None:
    assert run(agent, "cat", input=b"a\0\n\xff") == (0, b"a\0\n\xff", b"")
    assert run(agent, "sh", "-c", 'echo "$V"; echo e >&2; exit 7', V="x'\n$(id)") == (
        7,
        b"x'\n$(id)\n",
        b"e\n",
    )
    assert run(agent, "sh", "-c", "cat; echo [$V]") == (0, b"[]\n", b"")
    assert run(agent, "sh", "-c", "kill -9 $$")[0] == 137


def test_much_goes_in_and_out_at_once(agent: Agent) -> None:
    data = os.urandom(5 << 20)
    assert run(agent, "sh", "-c", "tee /dev/stderr", input=data) == (0, data, data)


def test_a_command_that_reads_nothing_ends_all_the_same(agent: Agent) -> None:
    assert run(agent, "true", input=bytes(5 << 20)) == (0, b"", b"")


def test_what_takes_too_long_is_killed_with_all_that_it_started_and_the_next_one_runs(
    agent: Agent, tmp_path: Path
) -> None:
    script = f"sleep 600 & echo $! >{tmp_path}/pid; wait"
    with pytest.raises(TimeoutError):
        run(agent, "sh", "-c", script, timeout=1)
    child = int((tmp_path / "pid").read_text())
    until(lambda: not Path(f"/proc/{child}").exists() or "Z" in stat(child))
    assert run(agent, "echo", "next") == (0, b"next\n", b"")


def stat(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_when_nobody_waits_any_more_the_command_ends(
    agent: Agent, process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    script = f"echo $$ >{tmp_path}/pid; exec sleep 600"
    request = Request(["sh", "-c", script]).encode()
    assert process.stdin
    process.stdin.write(b'{"bytes": %d, "timeout": 600}\n%s' % (len(request), request))
    process.stdin.flush()
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
    process.stdin.close()
    until(lambda: stat(int((tmp_path / "pid").read_text())) == "Z")
    assert process.wait(30) == 1


def test_an_agent_that_is_gone_is_told_from_one_that_answers(
    agent: Agent, process: subprocess.Popen[bytes]
) -> None:
    assert agent.lives()
    process.kill()
    process.wait()
    assert not agent.lives()
    with pytest.raises(EOFError):
        agent.ask(b"", 5)


def test_python_is_not_to_be_noticed_in_what_a_command_gets(agent: Agent) -> None:
    code, out, _ = run(agent, "env")
    assert code == 0
    assert b"LC_CTYPE" not in out
