"""How a run is stopped, and that nothing of it is left: real processes, real signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest
from launching import gone, launched, make_run, python, wait_for

from trainer.processes import all_processes, descendants
from trainer.status import RunDir

pytestmark = pytest.mark.slow

needs_tini = pytest.mark.program("tini")
under_tini_or_alone = pytest.mark.parametrize(
    "wrapper", [[], pytest.param(["tini", "-s", "--"], marks=needs_tini)], ids=["alone", "under tini"]
)

# A main process that saves when it hears TERM, with a worker that must be left alone meanwhile.
SAVING = """
import os, signal, subprocess, sys, time
room = os.environ["DRAFTHOUSE_RUN_DIR"]
worker = subprocess.Popen([sys.executable, "-S", "-c", '''
import os, signal, time
room = os.environ["DRAFTHOUSE_RUN_DIR"]
def heard(*_):
    open(room + "/worker-heard", "w").close()
    os._exit(0)
signal.signal(signal.SIGTERM, heard)
open(room + "/worker-ready", "w").close()
time.sleep(600)
'''])
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
while not os.path.exists(room + "/worker-ready"): time.sleep(0.005)
print("ready", worker.pid)
while not asked: time.sleep(0.005)
print("saving; worker is", "alive" if worker.poll() is None else "dead")
"""


@under_tini_or_alone
def test_the_first_term_reaches_the_main_process_alone(tmp_path, wrapper):
    with launched(tmp_path, python(SAVING), wrapper=wrapper) as run:
        run.wait_for_log(b"ready")
        run.process.send_signal(signal.SIGTERM)  # to tini, where there is one
        record = run.finish()
    assert b"saving; worker is alive" in run.log
    assert (record.reason, record.code, record.asked_by) == ("stopped", 0, "SIGTERM")
    assert run.process.returncode == 0
    assert any("left behind by the trainer" in line for line in run.notes)  # the worker, afterwards


def test_ctrl_c_stops_like_term(tmp_path):
    with launched(tmp_path, python(SAVING)) as run:
        run.wait_for_log(b"ready")
        os.kill(run.launch_pid(), signal.SIGINT)
        record = run.finish()
    assert (record.reason, record.asked_by) == ("stopped", "SIGINT")


def test_the_second_term_reaches_all(tmp_path):
    source = SAVING.replace('print("saving', "print('heard'); worker.wait(); print(\"saving")
    with launched(tmp_path, python(source)) as run:
        run.wait_for_log(b"ready")
        run.term()
        run.wait_for_log(b"heard")
        assert not (tmp_path / "worker-heard").exists()
        run.term()
        record = run.finish()
    assert (tmp_path / "worker-heard").exists()
    assert record.reason == "stopped"


def test_after_the_grace_all_that_is_left_is_killed(tmp_path):
    source = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker = subprocess.Popen(["sleep", "600"])  # inherits the ignored TERM
own = subprocess.Popen(["setsid", "sleep", "601"])
print("ready", worker.pid, own.pid)
time.sleep(600)
"""
    with launched(tmp_path, python(source), grace_seconds=0.3) as run:
        run.wait_for_log(b"ready")
        pids = [int(word) for word in run.log.split()[1:3]]
        run.term()
        record = run.finish()
    assert (record.reason, record.code, record.signal) == ("stopped", 137, 9)
    assert all(gone(pid) for pid in pids)


def test_a_stop_that_comes_before_the_trainer_is_not_lost(tmp_path):
    make_run(tmp_path, ["sh", "-c", "echo started"])
    source = f"""
import os, signal, sys
import trainer.processes, trainer.launch
signals = trainer.processes.Signals()
os.kill(os.getpid(), signal.SIGTERM)
from trainer.status import RunDir
sys.exit(trainer.launch.keep(RunDir({str(tmp_path)!r}), signals))
"""
    answer = subprocess.run([sys.executable, "-c", source], capture_output=True)
    record = RunDir(tmp_path).exit()
    assert answer.returncode == record.code == 143
    assert (record.reason, record.attempts, record.asked_by) == ("stopped", 0, "SIGTERM")
    assert answer.stdout.count(b"\n") == 1  # no banner, no trainer


def test_a_trainer_that_was_asked_to_save_and_stop_has_stopped(tmp_path):
    source = """
import os, time
while not os.path.exists(os.environ["DRAFTHOUSE_RUN_DIR"] + "/request.json"): time.sleep(0.01)
"""
    with launched(tmp_path, python(source), restart_attempts=3) as run:
        run.trainer_pid()
        run.directory.ask("checkpoint-and-stop", by="ann@laptop")
        record = run.finish()
    assert (record.reason, record.code, record.asked_by) == ("stopped", 0, "ann@laptop")


FAMILY = """
import os, subprocess, sys, time
kids = [subprocess.Popen(["sh", "-c", "trap '' TERM HUP INT; sleep 600 & wait"]) for _ in range(3)]
print("ready"); time.sleep(600)
"""


@under_tini_or_alone
def test_killing_launch_leaves_nothing(tmp_path, wrapper):
    with launched(tmp_path, python(FAMILY), wrapper=wrapper) as run:
        run.wait_for_log(b"ready")
        pids = wait_for(lambda: len(tree := run.tree()) >= 9 + len(wrapper[:1]) and tree, "the whole family")
        os.kill(run.launch_pid(), signal.SIGKILL)
        wait_for(lambda: not run.directory.alive(), "the run's lock to be released")
        left = [pid for pid in pids if not gone(pid) and pid != run.process.pid]
        wait_for(lambda: all(gone(pid) for pid in left), f"the end of {left}")  # the guard itself
        assert run.process.wait() in (-9, 137)
    assert run.directory.exit() is None  # which tells that launch was killed


def test_a_run_counts_as_alive_until_nothing_of_it_lives(tmp_path):
    with launched(tmp_path, python(FAMILY)) as run:
        run.wait_for_log(b"ready")
        pids = run.tree()
        guard = wait_for(lambda: guard_of(run.process.pid))
        os.kill(guard, signal.SIGSTOP)
        run.process.kill()
        run.process.wait()
        assert run.directory.alive()
        os.kill(guard, signal.SIGCONT)
        wait_for(lambda: not run.directory.alive(), "the run's lock to be released")
        assert all(gone(pid) for pid in pids if pid not in (guard, run.process.pid))


def guard_of(launch: int) -> int | None:
    found = descendants(all_processes(), launch)
    return next((p.pid for p in found if p.name == "launch-guard"), None)


def test_killing_launch_and_its_guard_at_once_still_ends_the_main_process(tmp_path):
    with launched(tmp_path, python("import time; print('ready'); time.sleep(600)")) as run:
        run.wait_for_log(b"ready")
        trainer = run.trainer_pid()
        for pid in [pid for pid in run.tree() if pid not in (trainer, run.process.pid)]:
            os.kill(pid, signal.SIGSTOP)  # the guard sees nothing
        run.process.kill()
        wait_for(lambda: gone(trainer), "the end of the trainer by the parent-death signal")
        for process in all_processes().values():
            if process.name == "launch-guard" and process.state == "T":
                os.kill(process.pid, signal.SIGKILL)


def test_a_guard_that_was_killed_is_replaced(tmp_path):
    with launched(tmp_path, python(FAMILY)) as run:
        run.wait_for_log(b"ready")
        first = wait_for(lambda: guard_of(run.process.pid))
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: (now := guard_of(run.process.pid)) and now != first, "a new guard")
        pids = run.tree()
        run.process.kill()
        wait_for(lambda: all(gone(pid) for pid in pids if pid != run.process.pid), "the end of all")


@pytest.mark.slow
def test_what_outlives_the_main_process_is_ended_and_named(tmp_path):
    script = """
    sleep 611 &
    setsid sleep 612 &
    sh -c 'trap "" TERM; echo stubborn $$; sleep 613 & wait' &
    sleep 0.3
    exit 4
    """
    with launched(tmp_path, ["sh", "-c", script]) as run:
        record = run.finish()
    assert record.code == 4
    told = "\n".join(run.notes)
    for command in ("sleep 611", "sleep 612", "sleep 613"):  # 612 has left the session
        assert f"({command})" in told
    named = {int(pid) for pid in re.findall(r"pid (\d+) \(", told)}
    assert int(run.log.split()[1]) in named
    assert all(gone(pid) for pid in named)


def test_a_pipe_that_somebody_else_holds_open_does_not_hang_launch(tmp_path):
    with launched(tmp_path, ["sh", "-c", "echo ready; sleep 600"]) as run:
        run.wait_for_log(b"ready")
        with open(f"/proc/{run.trainer_pid()}/fd/1", "wb", buffering=0) as held:
            held.write(b"from outside\n")
            run.term()
            record = run.finish()
    assert record.code == 143
    assert b"from outside\n" in run.log


def test_orphans_are_reaped(tmp_path):
    source = """
import os, time
for _ in range(5):
    pid = os.fork()
    if pid == 0:
        if os.fork() == 0:
            time.sleep(0.2)
        os._exit(0)
    os.waitpid(pid, 0)
print("ready"); time.sleep(600)
"""
    with launched(tmp_path, python(source)) as run:
        run.wait_for_log(b"ready")
        launch = run.launch_pid()

        def children():
            return [p for p in all_processes().values() if p.parent == launch]

        wait_for(lambda: len(children()) == 2, "trainer and guard alone to be left, without zombies")
        run.term()
        run.finish()


@pytest.mark.root
@needs_tini
def test_in_a_container_of_its_own_tini_passes_term_on_and_nothing_outlives_it(tmp_path):
    wrapper = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "tini", "--"]
    with launched(tmp_path, python(SAVING), wrapper=wrapper) as run:
        run.wait_for_log(b"ready")
        assert "· under tini ·" in run.notes[0]
        tini = next(p for p in descendants(all_processes(), run.process.pid) if p.name == "tini")
        pids = run.tree()
        os.kill(tini.pid, signal.SIGTERM)
        record = run.finish()
    assert b"saving; worker is alive" in run.log
    assert (record.reason, record.code) == ("stopped", 0)
    assert all(gone(pid) for pid in pids)


@pytest.mark.root
def test_as_pid_1_without_tini_launch_still_hears_term_and_reaps(tmp_path):
    wrapper = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    with launched(tmp_path, python(SAVING), wrapper=wrapper) as run:
        run.wait_for_log(b"ready")
        assert run.launch_pid() == 1
        inner = next(p for p in descendants(all_processes(), run.process.pid) if p.parent == run.process.pid)
        os.kill(inner.pid, signal.SIGTERM)
        record = run.finish()
    assert (record.reason, record.code) == ("stopped", 0)
