"""The launchers of several machines: two of them on loopback, small programs as ranks, all else is real."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from many import meeting_place

from trainer import nodes, roles
from trainer.config import parse
from trainer.errors import InputError
from trainer.processes import all_processes

TIMEOUT = 60.0
GIVEN = ["--target-model", "t", "--data-dir", "d"]

LAUNCHER = """
import json, sys
from trainer import link, ranks
from trainer.errors import InputError
from trainer.link import Node
from trainer.roles import Rank
node, number, address, command, stall, constants, skew = json.loads(sys.argv[1])

class Meeting:
    own, store, environment = Node(**node), "tcp://" + address, {}
Meeting.address = address
real = link.time.time
link.time.time = lambda: real() + skew
for name, value in constants.items():
    setattr(link if hasattr(link, name) else ranks, name, value)
place = Rank(number, "colocated", number, "cpu", number)
try:
    code = ranks.launch(command, [place], stall_timeout=stall, meeting=Meeting)
except InputError as error:
    print(f"error: {error}", flush=True)
    code = error.code
sys.exit(code)
"""

RANK = """
import os, signal, sys, time
rank, room = int(os.environ["DRAFTHOUSE_RANK"]), sys.argv[1]
def tell(line): os.write(int(os.environ["DRAFTHOUSE_PROGRESS"]), (line + "\\n").encode())
def say(text): os.write(1, (text + "\\n").encode())
def mark(name): open(f"{room}/{name}", "w").close()
def await_mark(name):
    while not os.path.exists(f"{room}/{name}"): time.sleep(0.005)
def stand(number): # as the trainer does from its first step on
    asked = []
    signal.signal(number, lambda *_: asked.append(1))
    return asked
"""
WAITING = 'tell("phase training"); tell("step 1"); say("here"); mark(f"here-{rank}"); await_mark("never")\n'


class Machines:
    """Launchers in progress, by their nodes."""

    def __init__(self, room: Path) -> None:
        self.room = room
        self.address = meeting_place()
        self.started: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        source: str,
        number: int,
        count: int = 2,
        *,
        stall: float = 0,
        skew: float = 0,
        facts: dict[str, str] | None = None,
        wrong: int = 0,
        **constants: Any,
    ) -> subprocess.Popen[bytes]:
        known = facts or {"--lr": "0.1"}
        node = {"number": number, "count": count, "host": f"host-{number}", "facts": known, "wrong": wrong}
        command = [sys.executable, "-S", "-u", "-c", RANK + source, str(self.room)]
        told = [node, number, self.address, command, stall, {"MOMENT": 0.3, **constants}, skew]
        with open(self.room / f"out-{len(self.started)}", "wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-S", "-c", LAUNCHER, json.dumps(told)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(self.room)},
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def both(self, source: str, **more: Any) -> tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]:
        return self.start(source, 0, **more), self.start(source, 1, **more)

    def here(self) -> None:
        """Wait until the ranks of both are at it."""
        for number in range(2):
            wait_for((self.room / f"here-{number}").exists, lambda: self.said(0) + self.said(1))

    def said(self, index: int) -> str:
        return (self.room / f"out-{index}").read_text()

    def ends(self) -> list[tuple[int, str]]:
        """(exit code, last line) of each launcher."""
        for process in self.started:
            process.wait(TIMEOUT)
        return [
            (process.returncode, (self.said(index).splitlines() or [""])[-1])
            for index, process in enumerate(self.started)
        ]


def wait_for(condition: Callable[[], Any], what: Callable[[], str]) -> None:
    until = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < until, what()
        time.sleep(0.01)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path)
    yield made
    left = []
    for process in made.started:
        ended = process.poll() is not None
        found = [one for one in all_processes().values() if one.session == process.pid and not one.ended]
        for one in found:
            with contextlib.suppress(OSError):
                os.kill(one.pid, signal.SIGKILL)
        process.wait()
        left += found if ended else []
    assert not left


# -- which ranks -------------------------------------------------------------------------------------------


def test_drafters_of_all_machines_come_first_and_rank_0_is_on_node_0() -> None:
    def ranks(*flags: str) -> list[str]:
        more = ["--nodes", "2", "--node", "1", "--rendezvous", "h:1"]
        return [str(rank) for rank in roles.of(parse([*GIVEN, *more, *flags]).settings).ranks]

    assert ranks("--target-gpus", "0,1", "--drafter-gpus", "2") == [
        "rank 0 (drafter 0 on cuda:2 of node 0)",
        "rank 1 (drafter 1 on cuda:2 of node 1)",
        "rank 2 (target 0 on cuda:0 of node 0)",
        "rank 3 (target 1 on cuda:1 of node 0)",
        "rank 4 (target 2 on cuda:0 of node 1)",
        "rank 5 (target 3 on cuda:1 of node 1)",
    ]
    assert ranks("--device", "cpu") == [
        "rank 0 (colocated on cpu of node 0)",
        "rank 1 (colocated on cpu of node 1)",
    ]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--nodes", "2"], "--nodes needs --rendezvous HOST:PORT beside it"),
        (
            ["--nodes", "2", "--node", "2", "--rendezvous", "h:1"],
            "--node 2 is none of --nodes 2: give a number",
        ),
        (["--node", "1"], "--node 1 is none of --nodes 1"),
        (["--rendezvous", "h:1"], "--rendezvous means nothing without --nodes of at least 2"),
        (["--interface", "lo"], "--interface means nothing without --nodes of at least 2"),
        (["--nodes", "2", "--rendezvous", "h"], "--rendezvous 'h' must be HOST:PORT, with a port from 1"),
        (["--nodes", "2", "--rendezvous", "h:65535"], "--rendezvous 'h:65535' must be HOST:PORT"),
        (["--nodes", "2", "--rendezvous", "::1:80"], "an IPv6 address in brackets"),
        (
            ["--nodes", "2", "--rendezvous", "h:1", "--target-model", "toy"],
            "--target-model toy is made on each machine and comes out differently",
        ),
    ],
)
def test_a_wrong_flag_is_one_sentence(flags: list[str], says: str) -> None:
    with pytest.raises(InputError) as caught:
        parse([*GIVEN, *flags])
    assert says in str(caught.value)


def test_the_interface_is_the_one_that_leads_to_the_meeting() -> None:
    assert nodes.leading_to("127.0.0.1:5") == "lo"
    assert nodes.leading_to("localhost:5") == "lo"
    with pytest.raises(InputError, match=r"^--rendezvous nowhere\.invalid:5: it cannot be reached from here"):
        nodes.leading_to("nowhere.invalid:5")


def test_an_interface_that_is_set_already_is_left_alone(tmp_path: Path) -> None:
    target = tiny.target_directory(tmp_path / "target")
    data = tiny.data_directory(tmp_path / "data", target)
    more = {"nodes": 2, "rendezvous": "127.0.0.1:5"}

    def found(environment: dict[str, str], **flags: str) -> dict[str, str]:
        settings = parse(tiny.flags(target, data, tmp_path, **more, **flags)).settings
        return dict(nodes.meeting(settings, environment).environment)

    assert found({}) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert found({"NCCL_SOCKET_IFNAME": "ib0"}) == {"GLOO_SOCKET_IFNAME": "lo"}
    with pytest.raises(InputError, match=r"^--interface ib9: there is none here; there are .*lo"):
        found({}, interface="ib9")


# -- a meeting ---------------------------------------------------------------------------------------------


def test_all_begin_and_end_together(machines: Machines) -> None:
    machines.both("say('done')")
    assert machines.ends() == [(0, "[0] done"), (0, "[1] done")]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            {"facts": {"--lr": "0.2"}},
            "node 1 (host-1) has --lr 0.2 and node 0 (host-0) has 0.1: all nodes need",
        ),
        ({"wrong": 7}, "node 1 (host-1) cannot start: its own log says why"),
        ({"count": 3}, "node 1 (host-1) has --nodes 3 and node 0 (host-0) has --nodes 2"),
        (
            {"skew": -60},
            "the clock of node 1 (host-1) is 60 s behind that of node 0 (host-0): set both, by NTP",
        ),
    ],
    ids=["another setting", "a check that failed there", "another number of nodes", "clocks apart"],
)
def test_unequal_machines_are_refused_in_one_sentence_on_both(
    machines: Machines, other: dict[str, Any], says: str
) -> None:
    machines.start("say('started')", 0)
    machines.start("say('started')", 1, **other)
    (code, first), (other_code, second) = machines.ends()
    wanted = other.get("wrong", 2)
    assert (code, other_code) == (wanted, wanted)
    assert first.startswith(f"error: {says}")
    assert first == second
    assert "started" not in machines.said(0) + machines.said(1)


def test_the_same_number_twice_is_refused_on_all(machines: Machines) -> None:
    for number in (0, 1, 1):
        machines.start("say('started')", number, count=3)
    sentence = "error: node 1 (host-1) and node 1 (host-1) have the same --node: give each machine its own"
    assert machines.ends() == [(2, sentence)] * 3


@pytest.mark.slow
def test_a_machine_that_does_not_come_is_named_on_all_others(machines: Machines) -> None:
    for number in (0, 2):
        machines.start("say('started')", number, count=4, JOIN_SECONDS=2)
    (code, first), (other_code, second) = machines.ends()
    assert (code, other_code) == (1, 1)
    assert first == second
    assert "nodes 1, 3 of --nodes 4 did not come to node 0 (host-0) within 2 s" in first


def test_a_meeting_place_that_cannot_be_is_one_sentence(machines: Machines) -> None:
    host, port = machines.address.split(":")
    with socket.socket() as taken:
        taken.bind((host, int(port)))
        taken.listen()
        machines.start("", 0)
        [(code, said)] = machines.ends()
    assert code == 2
    assert said.startswith(
        f"error: --rendezvous {machines.address}: ports {port} and {int(port) + 1} are needed"
    )
    machines.address = f"192.0.2.1:{port}"
    machines.start("", 0)
    assert "this is node 0, and no address of this machine" in machines.ends()[1][1]
    machines.address = f"127.0.0.1:{port}"
    machines.start("", 1, JOIN_SECONDS=0)
    assert "did not reach node 0 on port" in machines.ends()[2][1]
    machines.address = f"nowhere.invalid:{port}"
    machines.start("", 1)
    assert "the host cannot be resolved" in machines.ends()[3][1]


def test_another_program_that_calls_changes_nothing(machines: Machines) -> None:
    machines.start("say('done')", 0)
    host, port = machines.address.split(":")

    def called() -> bool:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port) + 1)) as stranger:
            stranger.sendall(b'GET / HTTP/1.0\n{"hello": 1}\n')
            return True
        return False

    wait_for(called, lambda: machines.said(0))
    machines.start("say('done')", 1)
    assert machines.ends() == [(0, "[0] done"), (0, "[1] done")]


def test_a_stop_before_all_have_come_ends_those_that_have(machines: Machines) -> None:
    first, _ = machines.start("", 0, count=3), machines.start("", 1, count=3)
    wait_for(lambda: "node 1 (host-1) is here" in machines.said(0), lambda: machines.said(0))
    first.send_signal(signal.SIGTERM)
    sentence = "ended by SIGTERM before the first step: nothing was to be saved"
    (code, said), (other_code, other_said) = machines.ends()
    assert (code, other_code) == (143, 143)
    assert said.endswith(sentence)
    assert other_said.endswith(sentence)


# -- ends --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize(
    ("end", "code", "how"),
    [
        ("os.kill(os.getpid(), 9)", 137, "by SIGKILL"),
        (
            "print('error: no room', flush=True); sys.exit(3)",
            3,
            "with exit code 3; its last line: error: no room",
        ),
    ],
    ids=["killed", "an error"],
)
def test_the_first_rank_to_fail_is_named_on_all(
    machines: Machines, node: int, end: str, code: int, how: str
) -> None:
    machines.both(f"if rank == {node}: {end}\n" + WAITING)
    sentence = f"error: rank {node} (colocated on cpu of node {node}) on host-{node} failed first, {how}"
    assert machines.ends() == [(code, sentence)] * 2


@pytest.mark.parametrize("node", [0, 1])
def test_a_stop_on_any_machine_reaches_rank_0_and_waits_for_its_checkpoint(
    machines: Machines, node: int
) -> None:
    source = """
asked = stand(signal.SIGTERM)
tell("phase training"); tell("step 1"); mark(f"here-{rank}")
if rank == 0:
    while not asked: time.sleep(0.01)
    tell("phase checkpointing"); time.sleep(1); mark("saved")
else: await_mark("saved"); say(f"asked {len(asked)} times")
"""
    started = machines.both(source)
    machines.here()
    started[node].send_signal(signal.SIGTERM)
    assert [code for code, _ in machines.ends()] == [0, 0]
    assert "asked 0 times" in machines.said(1)


def test_a_stop_of_both_machines_is_one_stop_and_a_second_reaches_all(machines: Machines) -> None:
    source = """
asked = stand(signal.SIGTERM)
tell("phase training"); tell("step 1"); mark(f"here-{rank}")
while not asked: time.sleep(0.01)
say("asked"); mark(f"asked-{rank}"); await_mark("go")
"""
    first, second = machines.both(source)
    machines.here()
    for one in (first, second):
        one.send_signal(signal.SIGTERM)
    wait_for((machines.room / "asked-0").exists, lambda: machines.said(0))
    time.sleep(0.5)
    assert not (machines.room / "asked-1").exists()
    second.send_signal(signal.SIGTERM)
    wait_for((machines.room / "asked-1").exists, lambda: machines.said(1))
    (machines.room / "go").touch()
    assert [code for code, _ in machines.ends()] == [0, 0]


def test_a_stop_before_the_first_step_ends_all(machines: Machines) -> None:
    _, second = machines.both('tell("phase loading"); mark(f"here-{rank}"); time.sleep(600)')
    machines.here()
    second.send_signal(signal.SIGTERM)
    assert machines.ends() == [(143, "ended by SIGTERM before the first step: nothing was to be saved")] * 2


LOOKING = """
if os.read(int(os.environ["DRAFTHOUSE_LOST"]), 1): say("woken"); sys.exit(1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_machine_that_is_gone_or_silent_is_named_and_the_others_are_woken(
    machines: Machines, node: int, number: signal.Signals
) -> None:
    source = WAITING.replace('await_mark("never")', "") + LOOKING
    started = machines.both(source, SILENT_SECONDS=3, BEAT_SECONDS=0.2, PAUSED_SECONDS=2)
    machines.here()
    started[node].send_signal(number)
    other = 1 - node
    assert started[other].wait(TIMEOUT) == 1
    why = "its connection has ended: the process that started its ranks is gone"
    if number == signal.SIGSTOP:
        why = "not heard of for 3 s: its host or the network to it is gone"
    assert f"[{other}] woken" in machines.said(other)
    assert machines.said(other).splitlines()[-1] == f"error: node {node} (host-{node}) failed first, {why}"
    started[node].send_signal(signal.SIGCONT)
    if number == signal.SIGSTOP and node == 1:
        code, said = machines.ends()[node]
        assert (code, said) == (1, f"error: node {node} (host-{node}) failed first, {why}")


@pytest.mark.slow
def test_a_hang_is_seen_by_the_steps_of_all_and_told_on_all(machines: Machines) -> None:
    source = """
import faulthandler
faulthandler.register(signal.SIGUSR1, all_threads=True)
tell("phase training")
for step in range(30):
    time.sleep(0.05)
    if rank == 1: tell(f"step {step}")
mark(f"here-{rank}"); say("stepped")
time.sleep(600)
"""
    machines.both(source, stall=1.2, BEAT_SECONDS=0.1, LONGEST_TURN=0.1)
    for code, said in machines.ends():
        assert code == 4
        assert said.startswith("error: no step of any rank for 1.2 s (--stall-timeout) while training")
    for index in range(2):
        assert "stepped" in machines.said(index), "one that takes steps is enough"
        assert f"stacks of rank {index} " in machines.said(index)
