"""Stacks: what the two sources write, who is grouped with whom, and the one line above all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from samples import facts, run

from deploy import stacks, stacks_parse
from deploy.errors import DeployError

FAULTHANDLER = """\
step 12/400 · 905 tok/s
Thread 0x00007f52e61ff6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/srv/n\\xe4me/monitor.py", line 88 in b\\u03b2at
a line of another thread
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f52e6a4b740 (most recent call first):
  Garbage-collecting
  File "/srv/app/train.py", line ??? in step
  File "<frozen runpy>", line 88 in _run_code
  ...
  File "<frozen runpy>", line 198 in _run_module_as_main
"""
NAMED = """\
Thread 0x00007f00000006c0 [MainThread] (most recent call first):
  File "a.py", line 1 in main
Current thread 0x00007f00000007c0 [loader-3] (most recent call first):
  <no Python frame>

Current thread's C stack trace (most recent call first):
  Binary file "/lib/libc.so", at f+0x1 [0x7f]
Extension modules: numpy (total: 1)
"""


def frames(*texts: str) -> list[dict[str, Any]]:
    """``f /srv/a.py 3`` each, innermost first."""
    found = [text.split() for text in texts]
    return [{"function": f, "file": file, "line": int(line)} for f, file, line in found]


def thread(*calls: str, main: bool = True, name: str = "") -> dict[str, Any]:
    return {"id": 1, "name": name, "main": main, "active": None, "frames": frames(*calls)}


def process(pid: int, *threads: dict[str, Any], rank: int | None = None, **more: Any) -> dict[str, Any]:
    base = {"pid": pid, "nspid": pid, "rank": rank, "command": ["python", "train.py"], "state": "S",
            "python": True, "kernel": False, "cpu": 0.0, "by": "py-spy" if threads else None,
            "beats": rank is not None, "why": ""}  # fmt: skip
    return {**base, "threads": list(threads), **more}


def told(*processes: dict[str, Any], **more: Any) -> dict[str, Any]:
    base = {
        "host": "box",
        "run_id": "0007-demo",
        "tool": "/usr/bin/py-spy",
        "gone": [],
        "absent": [],
        "asked": None,
    }
    return {**base, "processes": list(processes), **more}


WAIT = ("wait /usr/lib/python3.11/threading.py 331", "all_reduce /srv/app/comm.py 20", "step /srv/app/t.py 5")
LOAD = ("read /srv/app/data.py 88", "step /srv/app/t.py 4")


# -- the two sources ---------------------------------------------------------------------------------------


def test_faulthandlers_text_is_read_whatever_a_log_has_between_its_lines() -> None:
    main, other = stacks_parse.faulthandler(FAULTHANDLER)
    assert (main["main"], other["main"]) == (True, False)
    assert [frame["function"] for frame in main["frames"]] == ["step", "_run_code", "_run_module_as_main"]
    assert main["frames"][0] == {"function": "step", "file": "/srv/app/train.py", "line": 0}
    assert [(frame["file"], frame["function"]) for frame in other["frames"]][1] == (
        "/srv/näme/monitor.py",
        "bβat",
    )
    assert len(other["frames"]) == 3


def test_names_of_threads_and_c_stacks_of_later_pythons_are_told_apart() -> None:
    main, loader = stacks_parse.faulthandler(NAMED)
    assert (main["name"], main["main"], len(main["frames"])) == ("MainThread", True, 1)
    assert (loader["name"], loader["main"], loader["frames"]) == ("loader-3", False, [])


def test_what_this_python_prints_is_read() -> None:
    source = (
        "import faulthandler, threading\n"
        "gate = threading.Event()\n"
        "threading.Thread(target=gate.wait, daemon=True).start()\n"
        "def inner(): faulthandler.dump_traceback(all_threads=True)\n"
        "inner()\n"
    )
    done = subprocess.run([sys.executable, "-c", source], stderr=subprocess.PIPE, text=True, check=True)
    main, other = stacks_parse.faulthandler(done.stderr)
    assert [(one["function"], one["line"]) for one in main["frames"]] == [("inner", 4), ("<module>", 5)]
    assert other["frames"][0]["function"] == "wait"


def test_py_spys_json_is_read_main_thread_first() -> None:
    frame = {"name": "f", "filename": "/a.py", "short_filename": "a.py", "line": 3, "locals": None}
    worker = {
        "pid": 7,
        "thread_id": 1,
        "thread_name": "w",
        "os_thread_id": 8,
        "active": True,
        "frames": [frame],
    }
    main = {**worker, "thread_name": "MainThread", "os_thread_id": 7, "active": False}
    first, second = stacks_parse.py_spy(json.dumps([worker, main]))
    assert (first["id"], first["main"], first["active"]) == (7, True, False)
    assert second["frames"] == [{"function": "f", "file": "/a.py", "line": 3}]
    assert stacks_parse.py_spy("[]") == []


@pytest.mark.parametrize(
    "text", ["", "{", "{}", "[1]", '[{"frames": 3}]', '[{"frames": [{"name": "f"}]}]', "null"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        stacks_parse.py_spy(text)


def test_launchs_lines_tell_whose_stacks_are_whose() -> None:
    log = (
        "step 1\n── stacks asked for by ada@desk\n── stacks of rank 0 (pid 7)\nA\n"
        "── stacks of rank 12 (pid 9)\nB\xff\nC\n── end of the stacks: SIGUSR1 to rank 0 (pid 7)\nD\n"
    )
    assert stacks_parse.sections(log.encode("utf-8")) == {0: "A", 12: "B\xff\nC"}
    assert stacks_parse.sections(b"\xff\xfe nothing") == {}


# -- who is where ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("processes", "more", "line"),
    [
        (
            [process(9 + n, thread(*WAIT), rank=n) for n in range(8)],
            {},
            "all ranks wait in wait (threading.py:331), from all_reduce (/srv/app/comm.py:20)",
        ),
        (
            [*(process(9 + n, thread(*WAIT), rank=n) for n in (0, 1, 3)),
             process(12, thread(*LOAD), rank=2, cpu=0.9)],
            {},
            "3 of 4 ranks wait in wait (threading.py:331), from all_reduce (/srv/app/comm.py:20); "
            "rank 2 (pid 12) is in read (/srv/app/data.py:88), using CPU",
        ),
        (
            [process(9, thread(*WAIT), rank=0), process(10, thread(*WAIT), rank=1)],
            {"gone": [2]},
            "2 of 3 ranks wait in wait (threading.py:331), from all_reduce (/srv/app/comm.py:20); "
            "rank 2 is not running",
        ),
        (
            [process(9, thread(*WAIT), rank=0), process(8, thread(*WAIT), rank=1), process(7, thread(*LOAD))],
            {"gone": [2], "absent": [4, 5, 6]},
            "2 of 6 ranks wait in wait (threading.py:331), from all_reduce (/srv/app/comm.py:20); "
            "rank 2 is not running; ranks 4-6 are not running on box",
        ),
        (
            [process(9, thread(*WAIT), rank=0), process(10, thread(*WAIT), rank=1), process(11, rank=2)],
            {},
            "2 of 3 ranks wait in wait (threading.py:331), from all_reduce (/srv/app/comm.py:20); "
            "no stack of rank 2 (pid 11)",
        ),
        (
            [process(9, thread(*WAIT), rank=0, cpu=1.0), process(10, thread(*WAIT), rank=1, cpu=1.0)],
            {},
            "all ranks are in wait (threading.py:331), from all_reduce (/srv/app/comm.py:20), using CPU",
        ),
        ([process(9, thread(*LOAD), rank=0)], {}, "rank 0 (pid 9) waits in read (/srv/app/data.py:88)"),
        (
            [process(9, thread(*LOAD), rank=0, state="T")],
            {},
            "rank 0 (pid 9) is halted by a signal in read (/srv/app/data.py:88)",
        ),
        (
            [process(9, thread(*LOAD)), process(10, thread(*LOAD)), process(11, python=False)],
            {},
            "all processes wait in read (/srv/app/data.py:88)",
        ),
        (
            [process(9, thread(*LOAD), rank=0), process(10, thread(*WAIT), rank=1)],
            {},
            "no two of 2 ranks are at the same place",
        ),
        ([process(9, rank=0)], {}, ""),
    ],
)  # fmt: skip
def test_one_line_says_where_all_are(processes: list, more: dict, line: str) -> None:
    assert stacks.summary(told(*processes, **more)) == line


def test_the_ranks_speak_for_a_run_and_not_their_workers() -> None:
    worker = process(30, thread(*LOAD), thread(*WAIT, main=False))
    assert stacks.summary(told(process(9, thread(*WAIT), rank=0), worker)).startswith(
        "rank 0 (pid 9) waits in wait"
    )


def test_one_stack_of_many_is_shown_once_with_the_list_of_ranks() -> None:
    pool = [thread("get /x/q.py 3", main=False, name=f"loader-{n}") for n in range(4)]
    ranks = [process(10 + n, thread(*WAIT), *pool, rank=n) for n in (3, 0, 1)]
    answer = told(
        *ranks, process(40, thread(*LOAD), command=["python", "-c", "worker"]), process(41, python=False)
    )
    assert (
        stacks.text(answer)
        == """\
0007-demo on box: 5 processes, stacks by py-spy, innermost call first
all ranks wait in wait (threading.py:331), from all_reduce (/srv/app/comm.py:20)

ranks 0-1, 3 · main thread · waits
    wait (threading.py:331)
    all_reduce (/srv/app/comm.py:20)
    step (/srv/app/t.py:5)

pid 40 (python -c worker) · main thread · waits
    read (/srv/app/data.py:88)
    step (/srv/app/t.py:4)

ranks 0-1, 3 · 12 threads loader-N
    get (/x/q.py:3)

no stack of pid 41 (python train.py): no Python"""
    )


def test_a_method_is_the_same_place_whatever_its_source_calls_it() -> None:
    by_spy = process(9, thread("Queue.get /x/q.py 3"), rank=0)
    by_handler = process(10, thread("get /x/q.py 3"), rank=1, by="faulthandler")
    answer = told(by_spy, by_handler)
    assert len(stacks.groups(answer["processes"])) == 1
    assert "stacks by faulthandler and py-spy" in stacks.text(answer)


def test_what_a_process_calls_itself_cannot_steer_the_terminal() -> None:
    wild = thread("\x1b]0;title\x07f /a\x9b2J.py 3", main=False, name="\x1b[2J")
    shown = stacks.text(
        told(process(9, thread(*LOAD), wild, command=["python\n\x1b[31m", "--token", "hunter2"]))
    )
    assert not set(shown) & {"\x1b", "\x07", "\x9b"}
    assert "hunter2" not in shown + json.dumps(
        stacks.to_json(told(process(9, command=["x", "--token", "hunter2"])))
    )


# -- what cannot be had ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (
            told(process(9), tool=None),
            "no stack can be read on box: py-spy is not there, and only trainers that send heartbeats can be "
            "asked through launch; pipx install py-spy on box, or put it beside the run's Python",
        ),
        (
            told(process(9, rank=0), tool=None, asked="rank 0 (pid 9) was left alone"),
            "no stack can be read on box: py-spy is not there; pipx install py-spy on box, or put it beside "
            "the run's Python; launch: rank 0 (pid 9) was left alone",
        ),
        (
            told(process(9, why="py-spy: Permission Denied")),
            "no stack can be read on box: py-spy may not read that process; log in as root or as the user "
            "who runs it, with kernel.yama.ptrace_scope=0",
        ),
        (
            told(process(9, rank=0, state="T"), tool=None, asked="SIGUSR1 to rank 0, which gave no answer"),
            "no stack can be read on box: halted by a signal (kill -CONT 9 lets it go on); "
            "launch: SIGUSR1 to rank 0, which gave no answer",
        ),
        (
            told(process(9, python=False, command=["sh", "-c", "x"])),
            "no process of 0007-demo on box runs Python (sh -c x)",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_one_sentence_with_the_remedy(answer: dict, sentence: str) -> None:
    with pytest.raises(DeployError) as failed:
        stacks.check(answer, None)
    assert str(failed.value) == sentence


def test_a_process_without_python_is_refused_by_its_number() -> None:
    with pytest.raises(DeployError, match=r"process 9 on box \(sh\) runs no Python.*gdb -p 9") as failed:
        stacks.check(told(process(9, python=False, command=["sh"]), run_id=None), 9)
    assert failed.value.code == 1
    kernel = process(2, python=False, command=[""], kernel=True)
    with pytest.raises(DeployError, match=r"^process 2 on box is a thread of the kernel, .* /proc/2/stack "):
        stacks.check(told(kernel, run_id=None), 2)


def test_what_is_said_of_one_process_begins_with_it() -> None:
    line = stacks.text(told(process(9, thread(*WAIT)), run_id=None)).split("\n")[0]
    assert line == "pid 9 (python train.py) on box: 1 process, stacks by py-spy, innermost call first"


def test_the_run_in_progress_is_meant_and_one_that_is_over_says_how_it_ended() -> None:
    over = run("0008-demo", alive=False, exit={"reason": "failed", "code": 3})
    assert stacks.choose(facts(runs=[run("0007-demo"), over]), "box", "demo", None)["run_id"] == "0007-demo"
    with pytest.raises(DeployError, match=r"0008-demo is not in progress on box \(failed with exit code 3\)"):
        stacks.choose(facts(runs=[run("0007-demo"), over]), "box", "demo", "0008-demo")


def test_of_a_run_that_lost_its_launch_the_processes_that_are_left_are_named() -> None:
    alone = run("0008-demo", alive=False)
    with pytest.raises(
        DeployError, match=r"has lost its launch .it was killed., and no process of it is left"
    ):
        stacks.choose(facts(runs=[alone]), "box", "demo", None)
    left = {**alone, "processes": [{"pid": 7, "state": "S"}, {"pid": 8, "state": "Z"}]}
    with pytest.raises(DeployError, match="1 process of it is left: fab stacks --host box --pid 7 shows"):
        stacks.choose(facts(runs=[left]), "box", "demo", None)
