"""The launcher of ranks: small programs stand as ranks, all else is real."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer import ranks
from trainer.errors import InputError
from trainer.processes import all_processes, descendants, read_process
from trainer.ranks import Lines, own
from trainer.roles import Rank
from trainer.status import RANK_VARIABLE

TIMEOUT = 60.0
PLACES = [Rank(0, "drafter", 0, "cpu:2"), Rank(1, "target", 0, "cpu:0"), Rank(2, "target", 1, "cpu:1")]

LAUNCHER = """
import json, sys
from trainer import ranks
from trainer.roles import Rank
command, places, options, constants = json.loads(sys.argv[1])
vars(ranks).update(constants)
sys.exit(ranks.launch(command, [Rank(*place) for place in places], **options))
"""

RANK = """
import os, signal, sys, time
rank, room = int(os.environ["DRAFTHOUSE_RANK"]), sys.argv[1]
def tell(line): os.write(int(os.environ["DRAFTHOUSE_PROGRESS"]), (line + "\\n").encode())
def say(text): os.write(1, text.encode())
def mark(name): open(f"{room}/{name}", "w").close()
def await_mark(name):
    while not os.path.exists(f"{room}/{name}"): time.sleep(0.005)
def stand(number): # as the trainer does from its first step on
    asked = []
    signal.signal(number, lambda *_: asked.append(1))
    return asked
"""


class Started:
    """A launcher in progress, and what it prints."""

    def __init__(self, process: subprocess.Popen[bytes], room: Path) -> None:
        self.process = process
        self.room = room
        self._read = b""

    def read(self) -> bytes:
        """What was printed so far."""
        assert self.process.stdout
        os.set_blocking(self.process.stdout.fileno(), False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.process.stdout.fileno(), 1 << 16):
                self._read += data
        return self._read

    def wait_for(self, text: str) -> None:
        wait_for(lambda: text.encode() in self.read(), lambda: f"{text!r} in {self._read[-2000:]!r}")

    def finish(self) -> tuple[int, str]:
        """(exit code, all that was printed)"""
        wait_for(lambda: self.read() is not None and self.process.poll() is not None, lambda: "its end")
        return self.process.returncode, self.read().decode()

    def pids(self) -> list[int]:
        """Of all processes below the launcher."""
        return [process.pid for process in descendants(all_processes(), self.process.pid)]


def wait_for(condition: Callable[[], Any], what: Callable[[], str]) -> None:
    until = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < until, f"waited in vain for {what()}"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    process = read_process(pid)
    return process is None or process.ended


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Start `source` as so many ranks; whatever is left of it at the end is killed, and counted."""
    started = []

    def begin(
        source: str, *, count: int = 3, moment: float = 0.3, stall: float = 0, **constants: Any
    ) -> Started:
        places = [[rank.number, rank.role, rank.index, rank.device] for rank in PLACES[:count]]
        command = [sys.executable, "-S", "-u", "-c", RANK + source, str(tmp_path)]
        told = [command, places, {"stall_timeout": stall}, {"MOMENT": moment, **constants}]
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", LAUNCHER, json.dumps(told)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            start_new_session=True,
        )
        started.append(Started(process, tmp_path))
        return started[-1]

    yield begin
    for one in started:
        ended = one.process.poll() is not None
        left = [process for process in all_processes().values() if process.session == one.process.pid]
        for process in left:
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)
        one.process.wait()
        assert one.process.stdout
        one.process.stdout.close()
        assert not ended or not [process for process in left if not process.ended]


# -- lines -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunks", "records"),
    [
        ([b"a\nb\n"], [b"a\n", b"b\n"]),
        ([b"a", b"b\nc\n"], [b"ab\n", b"c\n"]),
        ([b"a\n\nb\n"], [b"a\n", b"\n", b"b\n"]),
        ([b"1 %\r2 %\r", b"3 %\n"], [b"1 %\r", b"2 %\r", b"3 %\n"]),
        ([b"\r1 %", b"\r2 %", b"\nrest\n"], [b"1 %\r", b"2 %\n", b"rest\n"]),
        ([b"dos\r\n"], [b"dos\r\n"]),
        ([b"dos\r", b"\n"], [b"dos\r", b""]),
        ([b"slow", None, b"er\n"], [b"slow\n", b"er\n"]),
        ([b"slow", None, b"\nnext\n"], [b"slow\n", b"", b"next\n"]),
        ([b"\r1 %", None, b"\r2 %", None, b"\n"], [b"1 %\r", b"2 %\r", b""]),
        ([b"last"], [b"last\n"]),
    ],
)
def test_output_is_cut_into_records_at_each_newline_carriage_return_and_pause(chunks, records) -> None:
    lines, found = Lines(), []
    for number, chunk in enumerate(chunks):
        found += lines.end() if chunk is None else lines.feed(chunk, float(number))
    assert found + lines.end() == records


def test_each_line_comes_whole_with_its_rank_and_in_its_order(start) -> None:
    source = """
for number in range(40):
    line = f"{number} " + chr(97 + rank) * (65536 if number % 4 == 0 else 9)
    for place in range(0, len(line), 5000): say(line[place : place + 5000])
    say("\\n")
"""
    code, text = start(source).finish()
    assert code == 0
    for rank in range(3):
        letter = chr(97 + rank)
        wanted = [f"[{rank}] {n} {letter * (65536 if n % 4 == 0 else 9)}" for n in range(40)]
        assert [line for line in text.splitlines() if line.startswith(f"[{rank}]")] == wanted
    assert len(text.splitlines()) == 120


def test_a_line_without_end_is_there_while_the_rank_goes_on(start) -> None:
    run = start('say("how are you? "); await_mark("go"); say("fine\\n")', count=2)
    run.wait_for("[0] how are you? \n")
    run.wait_for("[1] how are you? \n")
    (run.room / "go").touch()
    code, text = run.finish()
    assert (code, text.count("] fine\n")) == (0, 2)


def test_a_progress_bar_and_the_line_of_another_rank_do_not_meet_on_one_line(start) -> None:
    source = """
if rank == 0:
    for share in range(3): say(f"\\r {share} of 3")
    await_mark("told"); say("\\r 3 of 3\\ndone\\n")
else:
    await_mark("shown"); say("beside it\\n")
"""
    run = start(source, count=2)
    run.wait_for(" 2 of 3")
    (run.room / "shown").touch()
    run.wait_for("beside it")
    (run.room / "told").touch()
    code, text = run.finish()
    assert code == 0
    assert text == "[0]  0 of 3\r[0]  1 of 3\r[0]  2 of 3\r\n[1] beside it\n[0]  3 of 3\n[0] done\n"


def test_a_stdout_that_nobody_reads_stops_neither_the_ranks_nor_the_end(start) -> None:
    source = """
asked = stand(signal.SIGTERM)
for number in range(120): say("x" * 65535 + "\\n")
mark(f"printed-{rank}")
while rank == 0 and not asked: time.sleep(0.01)
"""
    run = start(source, count=2, HOLD_SECONDS=0.2, STDOUT_SECONDS=[0.1, 0.1])
    for rank in range(2):
        wait_for((run.room / f"printed-{rank}").exists, lambda: "all that is printed")
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(TIMEOUT) == 0
    kept = run.read().decode().split("\n")
    assert all(re.fullmatch(r"\[\d] x{65535}", line) for line in kept[:-1])


@pytest.mark.slow
def test_a_slow_reader_gets_all(start) -> None:
    source = 'for number in range(100): say("x" * 65535 + "\\n")\nmark(f"printed-{rank}")'
    run = start(source, count=2)
    time.sleep(0.3)
    assert not (run.room / "printed-0").exists()  # it waits
    code, text = run.finish()
    assert (code, text.count("\n")) == (0, 200)


def test_when_the_reader_has_left_the_training_is_saved_and_ended(start) -> None:
    source = """
asked = stand(signal.SIGTERM)
tell("phase training")
while rank == 0 and not asked: say("step\\n"); time.sleep(0.01)
mark(f"saved-{rank}")
"""
    run = start(source, count=2)
    run.wait_for("[0] step")
    run.process.stdout.close()
    assert run.process.wait(TIMEOUT) == 141
    assert (run.room / "saved-0").exists()
    run.process.stdout = open(os.devnull, "rb")  # noqa: SIM115 (closed with the others)


def test_so_it_is_before_the_first_step_when_they_die_of_the_signal(start) -> None:
    source = 'tell("phase loading")\nwhile True: say("loading\\n"); time.sleep(0.01)'
    run = start(source, count=2)
    run.wait_for("[0] loading")
    run.process.stdout.close()
    assert run.process.wait(TIMEOUT) == 141
    run.process.stdout = open(os.devnull, "rb")  # noqa: SIM115 (closed with the others)


# -- the end -----------------------------------------------------------------------------------------------


def test_ranks_that_end_one_after_the_other_are_no_error(start) -> None:
    source = """
mark(f"ended-{rank}") if rank else await_mark("ended-1")
if not rank: time.sleep(1); say(os.environ["DRAFTHOUSE_STORE"] + " " + os.environ["OMP_NUM_THREADS"])
"""
    code, text = start(source, moment=0.1).finish()
    assert code == 0
    store, threads = text.removeprefix("[0] ").split()
    assert not Path(store).parent.exists()
    assert int(threads) == max(1, len(os.sched_getaffinity(0)) // 3)


def test_the_first_to_fail_is_named_after_its_last_words_and_the_others_are_ended(start) -> None:
    source = """
if rank == 2:
    await_mark("0"); await_mark("1")
    say("x" * 200_000 + "\\n"); raise ValueError("no such shard")
mark(str(rank)); time.sleep(600)
"""
    run = start(source)
    code, text = run.finish()
    lines = text.splitlines()
    assert code == 1
    assert lines.index("[2] ValueError: no such shard") < lines.index(
        "rank 2 (target 1 on cpu:1) failed first, with exit code 1: the others are ended"
    )
    assert len(lines[0]) == 200_004
    wanted = (
        "error: rank 2 (target 1 on cpu:1) failed first, with exit code 1; "
        "its last line: ValueError: no such shard"
    )
    assert lines[-1] == wanted


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_signal_is_named_and_is_the_exit_code(start, number) -> None:
    run = start(f'if rank == 1: os.kill(os.getpid(), {number:d})\nsay("here\\n"); time.sleep(600)', count=2)
    code, text = run.finish()
    assert code == 128 + number
    assert text.splitlines()[-1] == f"error: rank 1 (target 0 on cpu:0) failed first, by {number.name}"


@pytest.mark.parametrize("code", [2, 3])
def test_the_exit_code_is_that_of_the_first_whatever_the_others_say_later(start, code) -> None:
    source = f"""
if rank == 1: sys.stderr.write("error: no such file; make it\\n"); mark("failed"); sys.exit({code})
await_mark("failed"); time.sleep(0.2); raise ConnectionError("rank 1 has left")
"""
    found, text = start(source, count=2, moment=5).finish()
    assert found == code
    assert "[0] ConnectionError: rank 1 has left\n" in text
    assert text.endswith(
        f"failed first, with exit code {code}; its last line: error: no such file; make it\n"
    )


def test_who_notices_a_failure_and_ends_sooner_is_not_taken_for_the_first(start) -> None:
    source = """
if rank == 1:
    sys.stderr.write("Traceback (most recent call last):\\nOutOfMemory: of device 1\\n")
    mark("failing"); await_mark("ended"); time.sleep(0.3); say("late words of a library\\n"); sys.exit(1)
await_mark("failing"); time.sleep(0.1)
sys.stderr.write("Traceback (most recent call last):\\nConnectionError: rank 1 has left\\n")
mark("ended"); sys.exit(1)
"""
    code, text = start(source, count=2, moment=5).finish()
    assert code == 1
    assert "rank 1 (target 0 on cpu:0) failed first, with exit code 1" in text.splitlines()[-1]


def test_an_abort_after_a_failure_is_not_the_first_and_a_kill_is(start) -> None:
    source = """
if rank == 0:
    sys.stderr.write("Traceback (most recent call last):\\nMine: first\\n"); mark("failed"); sys.exit(1)
await_mark("failed"); time.sleep(0.2); os.kill(os.getpid(), NUMBER)
"""
    _, text = start(source.replace("NUMBER", "signal.SIGABRT"), count=2, moment=5).finish()
    assert "error: rank 0 (drafter 0 on cpu:2) failed first" in text
    _, text = start(source.replace("NUMBER", "signal.SIGKILL"), count=2, moment=5).finish()
    assert "error: rank 1 (target 0 on cpu:0) failed first, by SIGKILL" in text


def test_a_halted_rank_is_ended_too(start) -> None:
    source = """
if rank == 0: mark("halted"); os.kill(os.getpid(), signal.SIGSTOP)
await_mark("halted"); time.sleep(0.2); sys.exit(3)
"""
    code, text = start(source, count=2).finish()
    assert code == 3
    assert "rank 0 (drafter 0 on cpu:2) did not end by itself: KILL" in text


@pytest.mark.slow
def test_who_saves_a_checkpoint_when_another_fails_may_finish_it(start) -> None:
    source = """
if rank == 0:
    tell("phase checkpointing"); mark("saving"); time.sleep(1.5); say("saved\\n")
    tell("phase training"); time.sleep(600)
await_mark("saving"); os.kill(os.getpid(), signal.SIGKILL)
"""
    code, text = start(source, count=2, stall=600).finish()
    assert code == 137
    assert (
        text.index("failed first")
        < text.index("[0] saved")
        < text.index("rank 0 (drafter 0 on cpu:2) did not")
    )


def test_a_checkpoint_that_does_not_end_has_the_time_of_a_stall(start) -> None:
    source = """
if rank == 0: tell("phase checkpointing"); mark("saving"); time.sleep(600)
await_mark("saving"); os.kill(os.getpid(), signal.SIGKILL)
"""
    code, text = start(source, count=2, stall=1).finish()
    assert code == 137
    assert "rank 0 (drafter 0 on cpu:2) did not end by itself: KILL" in text


@pytest.mark.slow
def test_what_a_rank_has_started_ends_with_it(start) -> None:
    source = """
import subprocess
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
say(f"child {child.pid}\\n")
if rank == 0: await_mark("go"); sys.exit(1)
time.sleep(600)
"""
    run = start(source, count=2)
    run.wait_for("[0] child")
    run.wait_for("[1] child")
    (run.room / "go").touch()
    code, text = run.finish()
    children = [int(pid) for pid in re.findall(r"] child (\d+)", text)]
    assert (code, len(children)) == (1, 2)
    assert all(map(gone, children))
    assert "left behind by the ranks" in text


def test_when_the_launcher_is_killed_its_ranks_end(start) -> None:
    run = start('signal.signal(signal.SIGTERM, signal.SIG_IGN); say("here\\n"); time.sleep(600)')
    for rank in range(3):
        run.wait_for(f"[{rank}] here")
    pids = run.pids()
    assert len(pids) == 3
    run.process.kill()
    wait_for(lambda: all(map(gone, pids)), lambda: f"the end of {pids}")


def test_a_command_that_cannot_be_started_is_one_sentence(capfd) -> None:
    with pytest.raises(InputError, match=r"^rank 0 \(drafter 0 on cpu:2\) cannot be started: No such file"):
        ranks.launch(["/no/such/python"], PLACES, stall_timeout=0)


# -- a stop ------------------------------------------------------------------------------------------------

SAVING = """
asked = stand(signal.SIGTERM)
say("ready\\n")
if rank == 0:
    while not asked: time.sleep(0.01)
    tell("phase training")
    tell("phase checkpointing"); mark("saving"); await_mark("disk"); say("saved\\n"); mark("saved")
else:
    await_mark("saved")
    say(f"heard {len(asked)}\\n")
"""


def test_a_stop_reaches_rank_0_and_waits_for_a_slow_checkpoint(start) -> None:
    run = start(SAVING, stall=0.5)
    for rank in range(3):
        run.wait_for(f"[{rank}] ready")
    run.process.send_signal(signal.SIGTERM)
    wait_for((run.room / "saving").exists, lambda: "rank 0 to save")
    time.sleep(1)  # longer than a hang, and than ranks have after a failure
    (run.room / "disk").touch()
    code, text = run.finish()
    assert code == 0
    assert text.count("heard 0") == 2
    assert "saved" in text


def test_the_second_stop_reaches_all(start) -> None:
    run = start(SAVING)
    for rank in range(3):
        run.wait_for(f"[{rank}] ready")
    run.process.send_signal(signal.SIGTERM)
    wait_for((run.room / "saving").exists, lambda: "rank 0 to save")
    run.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    (run.room / "disk").touch()
    code, text = run.finish()
    assert (code, text.count("heard 1")) == (0, 2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_before_the_first_step_ends_all_at_once(start, number) -> None:
    source = (
        'signal.signal(signal.SIGINT, signal.SIG_DFL); say("here\\n"); tell("phase loading"); time.sleep(600)'
    )
    run = start(source, moment=600)
    for rank in range(3):
        run.wait_for(f"[{rank}] here")
    run.process.send_signal(number)
    code, text = run.finish()
    assert code == 128 + number
    assert text.splitlines()[-1] == f"ended by {number.name} before the first step: nothing was to be saved"


# -- a hang ------------------------------------------------------------------------------------------------

HANGING = """
import ctypes, faulthandler
faulthandler.register(signal.SIGUSR1, all_threads=True)
def holds_the_lock():
    while True: ctypes.PyDLL(None).usleep(100_000_000)
def waits_for_it(): time.sleep(600)
def is_halted(): os.kill(os.getpid(), signal.SIGSTOP)
tell("phase training"); tell("step 1"); say("here\\n")
(holds_the_lock, waits_for_it, is_halted)[rank]()
"""


@pytest.mark.slow
def test_a_hang_is_told_with_all_stacks_one_after_the_other(start) -> None:
    code, text = start(HANGING, stall=1).finish()
    assert code == 4
    parts = re.split(r"stacks of rank (\d) \(pid \d+\)\n", text)
    assert "no step of any rank for 1 s (--stall-timeout) while training" in parts[0]
    assert parts[1::2] == ["0", "1", "2"]
    assert "[0]   File" in parts[2]
    assert "in holds_the_lock" in parts[2]
    assert "in waits_for_it" in parts[4]
    assert "gave no answer within 1 s" in parts[6]
    assert parts[6].splitlines()[-1].startswith("error: no step of any rank for 1 s (--stall-timeout)")


@pytest.mark.parametrize("phase", ["loading", "compiling", "evaluating", "checkpointing"])
def test_there_is_no_hang_while_a_rank_does_what_has_no_steps(start, phase) -> None:
    source = f"""
if rank: tell("phase {phase}"); mark("at-it")
else: await_mark("at-it"); tell("phase training")
time.sleep(1.2); say("done\\n")
"""
    code, text = start(source, count=2, stall=0.3).finish()
    assert (code, text.count("done")) == (0, 2)


@pytest.mark.parametrize("phase", ["loading", "finishing"])
def test_there_is_no_hang_while_rank_0_does_not_train(start, phase) -> None:
    source = f"""
if rank: await_mark("at-it"); tell("phase training")
else: tell("phase {phase}"); mark("at-it")
time.sleep(1.2); say("done\\n")
"""
    code, text = start(source, count=2, stall=0.3).finish()
    assert (code, text.count("done")) == (0, 2)


def test_a_rank_that_does_not_end_after_rank_0_hangs(start) -> None:
    code, text = start('tell("phase training"); time.sleep(600 if rank else 0)', count=2, stall=0.7).finish()
    assert code == 4
    assert "rank 0 (pid " in text


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "stall"), [(0, 1), (1, 1), (2, 0)])
def test_there_is_no_hang_while_any_rank_takes_steps_or_none_is_looked_for(start, rank, stall) -> None:
    source = f"""
mark(f"here-{{rank}}"); await_mark(f"here-{{1 - rank}}")
tell("phase training")
for step in range(30):
    time.sleep(0.05)
    if rank == {rank}: tell(f"step {{step}}")
"""
    assert start(source, count=2, stall=stall).finish() == (0, "")


@pytest.mark.slow
def test_the_time_in_which_all_were_halted_does_not_count(start) -> None:
    run = start(
        'tell("phase training"); say("here\\n"); time.sleep(1.5)', stall=2, PAUSED=0.5, LONGEST_TURN=0.1
    )
    for rank in range(3):
        run.wait_for(f"[{rank}] here")
    os.killpg(run.process.pid, signal.SIGSTOP)
    time.sleep(2.2)
    os.killpg(run.process.pid, signal.SIGCONT)
    assert run.finish()[0] == 0


# -- the rank's side ---------------------------------------------------------------------------------------


def test_a_rank_knows_itself_by_its_environment() -> None:
    assert own(PLACES, {}) is None
    assert own(PLACES, {RANK_VARIABLE: "1"}) is PLACES[1]
    for text in ("3", "-1", "x", ""):
        with pytest.raises(InputError, match=f"^{RANK_VARIABLE}={text}: there are 3 ranks here"):
            own(PLACES, {RANK_VARIABLE: text})


APART = """
import os, sys
from trainer.errors import InputError
from trainer.ranks import apart
def imports(): import wave
def refuses(): raise InputError("no such thing; make it", code=7)
def crashes(): raise ValueError("a defect")
def dies(): os.kill(os.getpid(), 9)
print([apart(check) for check in (imports, refuses, crashes, dies)], "wave" in sys.modules)
"""


def test_a_check_apart_leaves_nothing_but_its_exit_code() -> None:
    answer = subprocess.run([sys.executable, "-c", APART], capture_output=True, text=True, timeout=60)
    assert answer.stdout == "[0, 7, 1, 137] False\n"
    first, *trace = answer.stderr.splitlines()
    assert first == "error: no such thing; make it"
    assert (trace[0], trace[-1]) == ("Traceback (most recent call last):", "ValueError: a defect")


def test_what_is_wrong_is_said_once_before_any_rank_is_started(tmp_path: Path) -> None:
    devices = ["--target-gpus", "cpu:0", "--drafter-gpus", "cpu:1"]
    command = [sys.executable, "-m", "trainer", "--target-model", str(tmp_path), "--data-dir", "x", *devices]
    for environment, words in (
        ({}, f"error: --target-model {tmp_path}: "),
        ({RANK_VARIABLE: "2"}, f"error: {RANK_VARIABLE}=2: there are 2 ranks here, from 0"),
    ):
        answer = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, timeout=60)
        assert (answer.returncode, answer.stdout) == (2, b"")
        assert answer.stderr.decode().startswith(words)
        assert answer.stderr.count(b"\n") == 1
