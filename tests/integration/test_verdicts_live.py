"""Verdicts of real processes: every situation is staged, seen by one probe, and judged.

Where a silence is the point, the moment of judging is moved on by ten minutes; nobody waits for them here.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from deployed import HOST, Place, until
from situations import Staged, python, staged, trainer

from deploy import evidence
from deploy.health import Verdict, verdict

pytestmark = pytest.mark.slow

LATER = 600.0  # seconds
ROOT = ("memory", "disk")  # situations that only root can stage


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[tuple[Staged, dict[str, Any]]]:
    with staged(tmp_path_factory.mktemp("verdicts")) as here:
        root = here.place.root
        yield here, evidence.collect(HOST, str(root), str(root / "shm"))


def run_of(facts: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [run for run in facts["runs"] if run["name"] == name]
    return found


def judged(facts: dict[str, Any], name: str, later: float = 0.0) -> Verdict:
    return verdict(run_of(facts, name), facts["time"] + later, sample=facts["sample_seconds"])


HELD = r"its output is held back in its buffer \(pid \d+ prints into a pipe, without PYTHONUNBUFFERED or -u\)"
# What a process does that works: on a machine that is busy with others, it gets less than it wants.
WORKS = r"1 process (using 0\.\d+ CPUs|busy, but getting only \d+ % of the CPU time it wants \([^)]*\))"
# (situation, seconds until it is judged, word, what the reason must say, the next task). ADDRESS and ORPHAN
# stand for what was staged.
EXPECTED = [
    ("training", 0, "training", r"^step \d+/600, last step \d s ago$", "tail"),
    ("foreign", 0, "training", r"^sends no heartbeat; [\d,]+ bytes of output, .* line: epoch 1$", "tail"),
    ("foreign", 90, "training", r", the newest \d+ s ago, 1 process using .* last line: epoch 1$", None),
    ("mute", 0, "starting", r"^began \d+ s ago, no output and no heartbeat yet", None),
    ("mute", 30, "starting", rf"no heartbeat yet, {WORKS}, {HELD}", "peek"),
    ("mute", 90, "silent", rf"^sends no heartbeat, no output yet after .*, {WORKS}, {HELD}", "peek"),
    ("mute-idle", 30, "starting", rf"using no CPU, waiting asleep .*, {HELD}", "peek"),
    ("mute-idle", 90, "stalled", rf"using no CPU, waiting asleep .*, {HELD}", "peek"),
    ("mute-isolated", 90, "silent", r"held back in its .* -I makes Python ignore PYTHONUNBUFFERED", "peek"),
    ("mute-lock", 90, "stalled", rf"using no CPU, waiting in a lock \(futex\), {HELD}", "peek"),
    ("mute-c", 90, "silent", r"may be held back by its C library \(pid \d+ prints into a pipe; tty", "tail"),
    ("hardly", 90, "silent", rf"using hardly any CPU \(\d.\d % of one\), .*{HELD}", "peek"),
    ("killed-rank", 0, "stalled", r"^rank 1 \(pid \d+\) was killed by signal 9, of 3 ranks, ", "restart"),
    ("elsewhere", 0, "training", r"prints into /\S+/out/lines.txt, \d+ bytes, the newest \d s ago", "tail"),
    ("loading", 0, "loading", r"but it reads \d+\.\d MB/s, model.bin: \d+\.\d MB of 34.4 GB$", "tail"),
    ("loading", LATER, "loading", r"no output yet after 10 min, but it reads .*model.bin", "tail"),
    ("compiling", LATER, "compiling", r"no output yet after 10 min, but pid \d+ \(cc1\) compiles", "tail"),
    (
        "buffered", LATER, "silent",
        rf"{WORKS}, its output is held back in its buffer \(pid \d+ prints into a file, without "
        r"PYTHONUNBUFFERED or -u\); fab peek shows it$", "peek",
    ),
    ("idle", LATER, "stalled", r"using no CPU, waiting asleep .*, its output is held back in", "peek"),
    ("lock", LATER, "stalled", r"waiting in a lock \(futex\), and so does each of its other 1 th", "stacks"),
    ("socket", LATER, "stalled", r"using no CPU, waiting on a socket to ADDRESS \(recvfrom\)$", "stacks"),
    ("poll", LATER, "stalled", r"waiting on a socket to ADDRESS \(poll\)$", "stacks"),
    ("halted", 0, "stalled", r"^step \d+/600, .*, 1 process halted by a signal \(kill -CONT \d+ l", "-CONT"),
    ("rank", 30, "stalled", r"^rank 1 \(pid \d+\) was killed by signal 11, of 2 ranks, ", "restart"),
    ("foreign-rank", 0, "stalled", r"^rank 1 of 2 on this host is gone, ", "restart"),
    ("loader", 0, "training", r"^step 41/600, last step \d+ s ago$", "tail"),
    (
        "loader", LATER, "stalled",
        r"no progress for 10 min after step 41, 1 process using no CPU, waiting on a pipe \(read\), pid \d+, "
        r"a child of pid \d+, was killed by signal 9, which its parent has not noticed", "stacks",
    ),
    ("traceback", 0, "failed", r"exit code 1, last line: ValueError: loss is nan$", "tail"),
    ("finished", 0, "finished", r"^ended \d+ s ago$", "tail"),
    ("stopped", 0, "stopped", r"exit code 0, asked by ada@desk$", "start"),
    ("killed", 0, "failed", r"exit code 137 \(signal 9\), SIGKILL from somebody else", "tail"),
    (
        "keeper", 0, "failed",
        r"^gone without a record of its end: launch was killed by somebody \(the kernel has killed nothing|"
        r"^gone .* launch was killed, maybe for want of memory .the kernel counts \d+ kill", "tail",
    ),
    ("lost", 0, "gpu-lost", r"^GPU 1 is lost \(as NVML says\); reset it .*, step 41/600", "restart"),
    ("device", LATER, "silent", r"using no CPU, GPU 2 at 97 % \(which alone proves no progress\)", "stacks"),
    ("orphan", 0, "finished", r"pid ORPHAN of it was left behind, which holds 21.0 GB of GPU 0: ", "tail"),
    ("after-orphan", 0, "training", r"GPU 0 is also held by pid ORPHAN with 21.0 GB, left of run", "tail"),
    ("attempts", 0, "failed", r"exit code 1, all 2 attempts used up, last line: ValueError", "tail"),
    ("weights", 0, "training", r"its weights /\S+/toy@0123456789ab were deleted", "tail"),
    ("slow", 0, "slow", r"^[45],\d\d\d tok/s over the last 59 steps, \d\d % of the 10,000 of", "compare"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "later", "word", "reason", "task"), EXPECTED, ids=[f"{case[0]}-{case[1]:g}" for case in EXPECTED]
)
def test_a_real_situation_gets_its_verdict(world, name, later, word, reason, task):
    here, facts = world
    found = judged(facts, name, later)
    wanted = reason.replace("ADDRESS", re.escape(here.address)).replace("ORPHAN", str(here.orphan))
    assert found.word == word, found
    assert re.search(wanted, found.reason), found
    assert task is None or (found.next_command or "").split()[1:2] == [task]


@pytest.mark.root
def test_a_run_out_of_memory_is_told_from_one_that_was_killed(world):
    found = judged(world[1], "memory")
    assert (found.word, found.next_command) == ("failed", "fab tail --name memory --lines 50")
    assert found.reason.endswith("exit code 137 (signal 9), out of memory")


@pytest.mark.root
def test_a_full_disk_is_the_reason_of_a_silence(world):
    found = judged(world[1], "disk", LATER)
    assert (found.word, found.next_command) == ("stalled", "fab prune")
    assert "the disk of its log is full (0 bytes free)" in found.reason


def test_what_a_rank_has_mapped_and_somebody_removed_is_named(world):
    (path,) = run_of(world[1], "weights")["deleted"]
    assert path.endswith("/toy@0123456789ab/model.safetensors")


def test_the_devices_of_the_machine_are_told_at_both_samples(world):
    here, facts = world
    orphan, lost, busy = facts["gpus"]["nvml"]
    assert [one["pid"] for one in orphan["processes"]] == [here.orphan]
    assert (lost["lost"], lost["utilization"]) == (True, [])
    assert busy["utilization"] == [97, 97]


def test_nothing_was_a_problem_and_the_way_there_was_measured(world):
    facts = world[1]
    assert facts["problems"] == []
    assert 0 <= facts["link_seconds"] < facts["probe_seconds"] + 60
    assert facts["probe_seconds"] >= facts["sample_seconds"]


def test_processes_of_another_user_are_judged_without_what_may_not_be_read(world):
    """As of a container that runs as somebody else: unknown, never guessed."""
    run = run_of(world[1], "buffered")
    for item in run["processes"]:
        item.update(
            dict.fromkeys(("stdout", "wait", "threads", "unbuffered", "program"), None), io=[], ranks={}
        )
    found = verdict(run, world[1]["time"] + LATER)
    assert found.word == "silent"
    assert "held back" not in found.reason


# All on one CPU. Some kernels share a CPU out among sessions before they look at processes, so the session is
# made as nice as the process.
PINNED = "import os\nos.sched_setaffinity(0, {max(os.sched_getaffinity(0))})\n"
SPINS = PINNED + "print(flush=True)\nwhile True: pass"
STARVES = (
    PINNED
    + """
import contextlib
with contextlib.suppress(OSError):
    open("/proc/self/autogroup", "w").write("19")
os.nice(19)
while True: pass
"""
)


def test_a_process_that_wants_the_cpu_and_does_not_get_it_is_busy(tmp_path):
    place, others = Place(tmp_path), []
    run = place.run_dir(python(STARVES))
    try:
        place.start(run)
        until(lambda: trainer(run) and os.getpriority(os.PRIO_PROCESS, trainer(run)) == 19)
        for _ in range(4):
            others.append(subprocess.Popen(python(SPINS), stdout=subprocess.PIPE, start_new_session=True))
        for one in others:
            assert one.stdout
            one.stdout.readline()
        facts = evidence.collect(HOST, str(place.root), str(place.root / "shm"))
    finally:
        for one in others:
            one.kill()
            one.communicate()
        place.end_all()
    found = judged(facts, "demo", LATER)
    assert found.word == "silent", found
    wanted = (
        r"1 process busy, but getting only \d+ % of the CPU time it wants \(0\.\d+ of \d\.\d CPUs; load \d+ "
    )
    assert re.search(wanted, found.reason), found
