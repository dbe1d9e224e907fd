"""deploy/executor.py: several hosts side by side, through Fabric's own program."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading

import pytest
from fabric import Config, task
from fabric.main import Fab
from invoke import Collection, Exit

from deploy import CHECKOUT
from deploy.errors import DeployError
from deploy.executor import Parallel, Prefixed, hosts_of

meeting = threading.Barrier(2)


@task
def meet(context):
    """Ends only if both hosts are at work at the same time."""
    meeting.wait(30)
    print(f"met on {context.host}")


@task
def fail(context):
    print("before")
    if context.host == "b":
        raise DeployError("no space on b", code=7)
    print("after")


@task
def crash(context):
    if context.host == "b":
        raise RuntimeError("a programming error")


@task
def end(context):
    if context.host == "b":
        raise Exit("run failed", code=3)


@task
def lines(context):
    for n in range(200):
        print(context.host, end=" ")
        sys.stdout.write(f"{n} ")
        sys.stdout.buffer.write("τ\n".encode()[:1])
        sys.stdout.buffer.write("τ\n".encode()[1:])
        sys.stdout.flush()


@task
def one(context, host=None):
    print("on", getattr(context, "host", "no host"))


class Program(Fab):
    def load_collection(self):
        self.collection = Collection(meet, fail, crash, end, lines, one)


def fab(words: str, capsys) -> tuple[int, str, str]:
    program = Program(executor_class=Parallel, config_class=Config)
    code = 0
    try:
        program.run(["fab", *words.split()])
    except SystemExit as error:
        code = error.code
    except DeployError as error:  # the fabfile's decorator turns it into an exit
        code = error.code
        print(error, file=sys.stderr)
    out, err = capsys.readouterr()
    return code, out, err


def test_the_hosts_of_a_task_are_at_work_at_the_same_time(capsys):
    code, out, _ = fab("-H a,b meet", capsys)
    assert code == 0
    assert sorted(out.splitlines()) == ["a   ok", "a │ met on a", "b   ok", "b │ met on b"]


def test_a_failure_on_one_host_leaves_the_others_alone_and_decides_the_exit_code(capsys):
    code, out, err = fab("-H a,b,c fail", capsys)
    assert code == 7
    assert "a │ after" in out
    assert "c │ after" in out
    assert "b │ after" not in out
    assert out.splitlines()[-3:] == ["a   ok", "b   no space on b", "c   ok"]
    assert "failed on b" in err


def test_an_exit_code_of_a_task_counts_as_that_hosts_result(capsys):
    code, out, _ = fab("-H a,b end", capsys)
    assert code == 3
    assert "b   run failed" in out


def test_a_programming_error_shows_its_traceback_and_the_other_host_goes_on(capsys):
    code, out, err = fab("-H a,b crash", capsys)
    assert code == 1
    assert "a   ok" in out
    assert "b │ RuntimeError: a programming error" in err


def test_lines_of_two_hosts_never_mix_and_each_says_where_it_comes_from(capsys):
    _, out, _ = fab("-H left,r lines", capsys)
    for host in ("left", "r"):
        mine = [line for line in out.splitlines() if line.startswith(f"{host:4} │ ")]
        assert mine == [f"{host:4} │ {host} {n} τ" for n in range(200)]


def test_one_host_is_shown_as_if_it_were_the_only_one(capsys):
    assert fab("-H a one", capsys)[:2] == (0, "on a\n")
    assert fab("one", capsys)[:2] == (0, "on no host\n")


@pytest.mark.parametrize("hosts", ["a,,b", "a,", ",", "a, ,b"])
def test_an_empty_host_among_several_is_refused_in_one_sentence_before_any_is_touched(hosts, capsys):
    with pytest.raises(Exit) as caught:
        hosts_of(hosts)
    assert caught.value.code == 2
    assert str(caught.value) == f"-H {hosts!r} names an empty host; give it like -H gpu-box,other-box"
    code, out, err = fab(f"-H {hosts.replace(' ', '')} one", capsys)
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        f"-H {hosts.replace(' ', '')!r} names an empty host; give it like -H gpu-box,other-box"
    ]


def test_a_host_that_is_named_twice_is_used_once(capsys):
    assert fab("-H a,a one", capsys)[:2] == (0, "on a\n")
    assert fab("-H a,b,a one", capsys)[1].splitlines()[-2:] == ["a   ok", "b   ok"]
    assert hosts_of(" a, b,a") == ["a", "b"]


def test_results_that_nobody_reads_any_more_end_quietly():
    """``fab -H a,b runs | head -n 1``"""
    reader, writer = os.pipe()
    os.close(reader)
    said = subprocess.run(
        [sys.executable, "-c", "from deploy.executor import show_results; show_results({'a': (0, 'ok')})"],
        stdout=writer, stderr=subprocess.PIPE, cwd=CHECKOUT,
    )  # fmt: skip
    os.close(writer)
    assert (said.returncode, said.stderr) == (0, b"")


def test_naming_hosts_in_two_ways_is_refused_as_a_usage_error_before_any_is_touched(capsys):
    """Fabric alone would take one of them without a word."""
    for words in ("-H a one --host b", "-H a,b one --host c"):
        code, out, err = fab(words, capsys)
        assert (code, out) == (2, "")
        assert re.search(r"^-H a(,b)? and --host [bc] both name hosts: use --host for one", err)


def test_a_thread_without_a_prefix_writes_through():
    stream = io.StringIO()
    prefixed = Prefixed(stream)
    prefixed.write("a")
    prefixed.begin("x │ ")
    prefixed.write("half")
    prefixed.end()
    assert stream.getvalue() == "ax │ half\n"


def test_the_results_are_listed_even_if_a_task_prints_nothing(capsys):
    _, out, _ = fab("-H a,b end", capsys)
    assert re.fullmatch(r"a   ok\nb   run failed\n", out)


@pytest.mark.parametrize("words", ["-H a,b fail meet"])
def test_a_task_that_failed_on_a_host_keeps_the_next_task_from_starting(words, capsys):
    code, out, _ = fab(words, capsys)
    assert code == 7
    assert "met" not in out
