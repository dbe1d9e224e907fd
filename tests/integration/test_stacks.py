"""`fab stacks` on real processes: asked through launch, and read by the real py-spy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import Launched, gone, launched, wait_for

from deploy import onhost, py_spy, stacks, stacks_host
from deploy.errors import DeployError
from deploy.host import Local, Result
from trainer.status import RunDir

pytestmark = pytest.mark.slow

# One process per rank, as trainers are; "loader" is one of their helpers, which sends no heartbeat.
RANKS = """
import faulthandler, os, queue, signal, subprocess, sys, threading, time
from trainer.status import Heartbeat, RunDir
rank, how = int(sys.argv[1]), sys.argv[2]
children = []
if rank == 0:
    for other in (1, 2):
        children.append(subprocess.Popen([sys.executable, __file__, str(other), how]))
    children.append(subprocess.Popen(["sleep", "600"]))
if how == "handler":
    faulthandler.register(signal.SIGUSR1)
gate = queue.Queue()
threading.Thread(target=gate.get, daemon=True).start()
beat = Heartbeat(rank=rank, pid=os.getpid(), attempt=1, time=time.time())
RunDir(os.environ["DRAFTHOUSE_RUN_DIR"]).write_heartbeat(beat)
def all_reduce():
    print(f"waiting {rank}\\n", end="", flush=True)  # in one piece
    gate.get()
all_reduce()
"""


@pytest.fixture
def without_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks_host, "find_tool", lambda more: None)


def ranks(path: Path, how: str, **fields: Any) -> Any:
    (path / "ranks.py").write_text(RANKS)
    fields["environment"] = {"PYTHONPATH": os.getcwd()}
    return launched(path, [sys.executable, str(path / "ranks.py"), "0", how], **fields)


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Launched]:
    with ranks(tmp_path, "handler") as run:
        wait_for(lambda: run.log.count(b"waiting") == 3, "three ranks")
        yield run


def asked(run: Launched) -> dict[str, Any]:
    found = stacks_host.of_run(str(run.directory.path), 0, "ada@desk")
    return {"host": "here", "run_id": "0001-demo", **found}


def test_every_rank_is_asked_through_launch_and_all_wait_at_one_place(
    waiting: Launched, without_py_spy: None
) -> None:
    told = asked(waiting)
    by_rank = {one["rank"]: one for one in told["processes"] if one["rank"] is not None}
    assert sorted(by_rank) == [0, 1, 2]
    line = RANKS.splitlines().index("    gate.get()") + 1
    for one in by_rank.values():
        assert one["by"] == "faulthandler"
        main, other = one["threads"]
        assert [frame["function"] for frame in main["frames"]] == ["wait", "get", "all_reduce", "<module>"]
        assert main["frames"][2]["line"] == line
        assert other["frames"][1]["function"] == "get"
    said = stacks.summary(told)
    assert said.startswith("all ranks wait in wait (threading.py:")
    assert said.endswith(f"from all_reduce ({waiting.directory.path}/ranks.py:{line})")
    [sleep] = [one for one in told["processes"] if one["rank"] is None]
    assert (sleep["command"][0], sleep["python"], sleep["threads"]) == ("sleep", False, [])
    assert waiting.process.poll() is None
    assert not any(gone(one["pid"]) for one in told["processes"])


def test_the_answers_of_ranks_are_told_apart_in_the_log_and_a_second_asking_too(
    waiting: Launched, without_py_spy: None
) -> None:
    before = waiting.directory.ask("checkpoint", by="a switch")  # nobody has seen it yet
    for _ in range(2):
        assert stacks.summary(asked(waiting)).startswith("all ranks wait")
    assert waiting.directory.request() == before
    notes = [line[3:] for line in waiting.notes if "stacks" in line]
    once = [f"stacks of rank {n} (pid" for n in range(3)]
    shape = ["stacks asked for by ada@desk", *once, "end of the stacks: SIGUSR1 to rank 0"]
    assert [note.startswith(wanted) for note, wanted in zip(notes, shape * 2, strict=True)] == [True] * 10


def test_a_rank_that_is_halted_or_dead_is_named_beside_those_that_wait(
    waiting: Launched, without_py_spy: None
) -> None:
    beats = waiting.directory.heartbeats()
    os.kill(beats[1].pid, signal.SIGSTOP)
    os.kill(beats[2].pid, signal.SIGKILL)
    wait_for(lambda: gone(beats[2].pid), "the rank to end")
    told = asked(waiting)
    said = stacks.summary(told)
    assert said.startswith(f"rank 0 (pid {beats[0].pid}) waits in wait")
    assert said.endswith(f"; no stack of rank 1 (pid {beats[1].pid}); rank 2 is not running")
    assert f"halted by a signal (kill -CONT {beats[1].pid} lets it go on)" in stacks.text(told)
    assert "gave no answer within 1 s" in told["asked"]


def test_a_rank_without_a_handler_is_left_alone_and_the_remedy_is_said(
    tmp_path: Path, without_py_spy: None
) -> None:
    with ranks(tmp_path, "none") as run:
        wait_for(lambda: run.log.count(b"waiting") == 3, "three ranks")
        told = asked(run)
        with pytest.raises(
            DeployError, match=r"py-spy is not there; pipx install py-spy on here.*no handler"
        ):
            stacks.check(told, None)
        assert not any(gone(beat.pid) for beat in run.directory.heartbeats().values())


LAUNCHER = """
import os, subprocess, sys, threading, time
if "RANK" in os.environ:
    print("waiting", flush=True)
    threading.Event().wait()
size = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
argv = [sys.executable, *sys.argv]
for rank in range(3):
    subprocess.Popen(argv, env={**os.environ, **size, "RANK": str(rank), "LOCAL_RANK": str(rank)})
time.sleep(600)
"""


def test_the_ranks_of_a_command_without_heartbeats_are_known_by_their_environment(tmp_path: Path) -> None:
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    with launched(tmp_path, [sys.executable, str(tmp_path / "launcher.py")]) as run:
        wait_for(lambda: run.log.count(b"waiting") == 3, "three ranks")
        told = asked(run)
        assert stacks.summary(told).startswith("all ranks wait in ")
        last = next(one for one in told["processes"] if one["rank"] == 2)
        os.kill(last["pid"], signal.SIGKILL)
        wait_for(lambda: gone(last["pid"]), "the rank to end")
        said = stacks.summary(asked(run))
        assert said.startswith("2 of 3 ranks wait in ")
        assert said.endswith("; rank 2 is not running")


@pytest.mark.root  # (another user's kernel may forbid reading a process that is no child)
def test_py_spy_reads_every_process_and_nobody_is_asked(waiting: Launched) -> None:
    size = len(waiting.raw_log)
    told = asked(waiting)
    assert os.path.basename(told["tool"]) == "py-spy"
    assert {one["by"] for one in told["processes"] if one["python"]} == {"py-spy"}
    assert stacks.summary(told).startswith("all ranks wait in Condition.wait (threading.py:")
    assert told["asked"] is None
    assert len(waiting.raw_log) == size


@pytest.mark.root
@pytest.mark.parametrize("by", ["py-spy", "faulthandler"])
def test_a_run_with_numbers_of_its_own_is_read_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """As in a container: heartbeats and launch tell the numbers of another namespace."""
    if by == "faulthandler":
        monkeypatch.setattr(stacks_host, "find_tool", lambda more: None)
    inside = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with ranks(tmp_path, "handler", wrapper=inside) as run:
        wait_for(lambda: run.log.count(b"waiting") == 3, "three ranks")
        told = asked(run)
        for one in told["processes"]:
            assert one["pid"] != one["nspid"]
        assert [one["by"] for one in told["processes"] if one["rank"] is not None] == [by] * 3
        assert stacks.summary(told).startswith("all ranks wait in ")


@pytest.mark.root
def test_a_process_of_anybody_is_read_by_its_number(tmp_path: Path) -> None:
    source = "import time\ndef stuck_here():\n    print(flush=True)\n    time.sleep(600)\nstuck_here()"
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout
            assert process.stdout.readline()
            told = onhost.ask(Local(), "deploy.stacks_host:of_process", process.pid, "here")
            [found] = told["processes"]
            assert [one["function"] for one in found["threads"][0]["frames"]] == ["stuck_here", "<module>"]
        finally:
            process.kill()
    with pytest.raises(DeployError, match=f"there is no process {process.pid} on here"):
        onhost.ask(Local(), "deploy.stacks_host:of_process", process.pid, "here")


@pytest.mark.root
def test_py_spy_without_the_right_to_read_says_so(tmp_path: Path) -> None:
    tool = stacks_host.find_tool([])
    assert tool
    as_nobody = tmp_path / "py-spy"
    as_nobody.write_text(
        f'#!/bin/sh\nexec setpriv --reuid 65534 --clear-groups --bounding-set=-all {tool} "$@"\n'
    )
    as_nobody.chmod(0o755)
    threads, why = stacks_host.dump(str(as_nobody), os.getpid())
    assert threads == []
    assert "ermission" in why


def test_a_run_that_is_over_has_no_stacks(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"run_id": "0001-demo", "name": "demo", "command": ["true"]}')
    with pytest.raises(DeployError, match="is not in progress any more, so it has no stacks"):
        stacks_host.of_run(str(tmp_path), 0, "ada@desk")
    assert RunDir(tmp_path).request("launch-request.json") is None


def test_a_launch_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks_host, "RANK_SECONDS", 0.05)
    with ranks(tmp_path, "handler") as run:
        wait_for(lambda: run.log.count(b"waiting") == 3, "three ranks")
        os.kill(run.launch_pid(), signal.SIGSTOP)
        said = stacks_host.ask_launch(run.directory, "ada@desk", [], 1)
        os.kill(run.launch_pid(), signal.SIGCONT)
    assert said == "its launch did not answer: it is of a version before this one, or halted"


def test_a_host_without_py_spy_gets_ours_once_and_is_told(tmp_path: Path) -> None:
    said: list[str] = []
    path = py_spy.bring(Local("box"), str(tmp_path), said.append)
    assert path == py_spy.bring(Local("box"), str(tmp_path), said.append)
    assert path
    assert path.startswith(f"{tmp_path}/tools/py-spy-")
    assert len(said) == 1
    assert said[0].startswith("box has no py-spy; ours (")
    assert subprocess.check_output([path, "--version"]).startswith(b"py-spy ")


class Elsewhere(Local):
    """A machine with another processor."""

    def run(self, argv, **how):
        assert argv == ["uname", "-sm"], "nothing is written to a machine on which it cannot run"
        return Result(0, b"Linux riscv64\n", b"")


def test_a_host_on_which_ours_cannot_run_gets_nothing(tmp_path: Path) -> None:
    assert py_spy.bring(Elsewhere(), str(tmp_path), pytest.fail) is None
    (tmp_path / "file").touch()
    said: list[str] = []
    assert py_spy.bring(Local("box"), str(tmp_path / "file"), said.append) is None
    assert said[1].startswith("py-spy could not be put on box: box: cannot write")
