"""Stacks of several ranks: the next is asked when the last one has answered, or has had its time."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from trainer.asked import Dump
from trainer.processes import Process, read_process
from trainer.status import Heartbeat, Request

TRAINER = """
import signal
signal.signal(signal.SIGUSR1, lambda *_: print("asked", flush=True))
print("ready", flush=True)
while True: signal.pause()
"""


@contextlib.contextmanager
def trainers(count: int) -> Iterator[list[subprocess.Popen[str]]]:
    argv = [sys.executable, "-S", "-c", TRAINER]
    found = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        assert [one.stdout and one.stdout.readline() for one in found] == ["ready\n"] * count
        yield found
    finally:
        for one in found:
            one.kill()
            one.communicate()


def test_no_rank_is_asked_before_the_last_one_has_answered() -> None:
    log: list[str] = []
    answered = 0
    with trainers(2) as (first, second):
        members = [
            process for one in (first, second) if isinstance(process := read_process(one.pid), Process)
        ]
        beats = {
            0: Heartbeat(pid=first.pid, attempt=2),
            1: Heartbeat(rank=1, pid=second.pid, attempt=2),
            2: Heartbeat(rank=2, pid=first.pid, attempt=1),  # of the attempt before
        }
        dump = Dump(Request("id", "dump-stacks", by="ada"), members, beats, attempt=2)

        def go_on(now: float) -> bool:
            return dump.go_on(now, log.append, lambda: 100 * len(log) + answered)

        assert not go_on(10.0)
        assert first.stdout
        assert first.stdout.readline() == "asked\n"
        assert log == ["stacks asked for by ada", f"stacks of rank 0 (pid {first.pid})"]
        assert not go_on(10.1)
        answered = 50
        assert not go_on(10.2)  # it may be writing still
        assert len(log) == 2
        assert not go_on(10.3)
        assert log[2] == f"stacks of rank 1 (pid {second.pid})"
        assert not go_on(11.2)
        assert go_on(11.4)
    told = [f"SIGUSR1 to rank 0 (pid {first.pid})", f"SIGUSR1 to rank 1 (pid {second.pid})"]
    told[1] += ", which gave no answer within 1 s"
    assert dump.outcome == "; ".join([*told, f"rank 2 (pid {first.pid}) is not running"])
    assert log[3:] == [f"end of the stacks: {dump.outcome}"]
    answer = dump.answer(end=900)
    assert (answer["id"], answer["log"]) == ("id", [0, 900])


def test_without_heartbeats_nobody_is_asked() -> None:
    log: list[str] = []
    dump = Dump(Request("id", "dump-stacks"), [], {}, attempt=1)
    assert dump.go_on(1.0, log.append, lambda: 7)
    assert log[1] == "end of the stacks: no process of this run has written a heartbeat yet"
