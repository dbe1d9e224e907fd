"""deploy/lock.py with real holders: one client at a time, and a lost client leaves no lock behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from deployed import CHECKOUT, HOST, until

from deploy import evidence, lock, procfs
from deploy.errors import DeployError
from deploy.host import HostError

pytestmark = pytest.mark.slow


def lock_file(root: Path, name: str = "demo") -> Path:
    return root / "names" / name / "deploy.lock"


def free(root: Path) -> bool:
    """Whether the lock can be had right now."""
    try:
        with lock.hold(HOST, str(root), "demo"):
            return True
    except DeployError:
        return False


def test_the_lock_is_held_for_the_body_and_free_afterwards(tmp_path):
    with lock.hold(HOST, str(tmp_path), "demo") as held:
        held.check()
        assert not free(tmp_path)
    assert free(tmp_path)


def test_who_holds_it_from_where_since_when_and_what_for_is_said(tmp_path):
    with (
        lock.hold(HOST, str(tmp_path), "demo", what="weights push"),
        pytest.raises(DeployError) as error,
        lock.hold(HOST, str(tmp_path), "demo"),
    ):
        pass
    assert str(error.value).startswith(f"demo on localhost is locked by {lock.who()} (weights push, since 20")
    assert "--lock-wait" in str(error.value)


def test_the_probe_sees_the_holder(tmp_path):
    with lock.hold(HOST, str(tmp_path), "demo", what="deploy"):
        facts = evidence.collect(HOST, str(tmp_path), str(tmp_path / "shm"), sample=0)
        assert facts["locks"]["demo"]["by"] == lock.who()
    facts = evidence.collect(HOST, str(tmp_path), str(tmp_path / "shm"), sample=0)
    assert facts["locks"]["demo"] is None


def test_names_do_not_wait_for_each_other(tmp_path):
    with lock.hold(HOST, str(tmp_path), "demo"), lock.hold(HOST, str(tmp_path), "other"):
        pass


def test_a_body_that_fails_frees_the_lock(tmp_path):
    with pytest.raises(ZeroDivisionError), lock.hold(HOST, str(tmp_path), "demo"):
        raise ZeroDivisionError
    assert free(tmp_path)


def test_waiting_says_for_whom_and_goes_on_when_the_lock_comes_free(tmp_path):
    told: list[str] = []
    got = threading.Event()

    def second():
        with lock.hold(HOST, str(tmp_path), "demo", wait=60, waiting=told.append):
            got.set()

    with lock.hold(HOST, str(tmp_path), "demo", what="a long deploy"):
        thread = threading.Thread(target=second)
        thread.start()
        until(lambda: told)
        assert "a long deploy" in told[0]
        assert not got.is_set()
    thread.join(60)
    assert got.is_set()


def test_a_holder_without_heartbeats_lets_go_and_its_client_learns_of_it(tmp_path):
    with lock.hold(HOST, str(tmp_path), "demo", silence=0.3, beat=1000) as held:
        until(lambda: free(tmp_path))
        with pytest.raises(DeployError, match="was lost on the way"):
            held.check()


def test_heartbeats_keep_the_lock_beyond_the_silence(tmp_path):
    with lock.hold(HOST, str(tmp_path), "demo", silence=0.5, beat=0.05) as held:
        for _ in range(6):  # each attempt takes longer than half of the silence
            assert not free(tmp_path)
        held.check()


CLIENT = """
import sys, time
from deploy import lock
from deploy.host import Local
with lock.hold(Local(), sys.argv[1], "demo"):
    print("held", flush=True)
    time.sleep(1000)
"""


def test_a_client_that_is_killed_leaves_no_lock_behind(tmp_path):
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, str(tmp_path)], cwd=CHECKOUT, stdout=subprocess.PIPE
    )
    assert client.stdout
    assert client.stdout.readline() == b"held\n"
    assert not free(tmp_path)
    client.send_signal(signal.SIGKILL)
    client.wait()
    until(lambda: free(tmp_path))


def test_a_client_that_waits_and_is_killed_leaves_no_waiter_that_takes_the_lock(tmp_path):
    with lock.hold(HOST, str(tmp_path), "demo"):
        waiting = CLIENT.replace(
            '"demo")', '"demo", wait=1000, waiting=lambda words: print(words, flush=True))'
        )
        client = subprocess.Popen(
            [sys.executable, "-c", waiting, str(tmp_path)], cwd=CHECKOUT, stdout=subprocess.PIPE
        )
        assert client.stdout
        assert b"waiting" in client.stdout.readline()
        client.send_signal(signal.SIGKILL)
        client.wait()
        path = str(lock_file(tmp_path))
        until(lambda: sum(procfs.has_open(pid, path) for pid in procfs.processes()) == 1)
    until(lambda: free(tmp_path))


def test_words_that_nobody_can_read_still_make_a_sentence(tmp_path):
    with lock.hold(HOST, str(tmp_path), "demo"):
        lock_file(tmp_path).write_text("{half")
        with pytest.raises(DeployError, match="locked by somebody"), lock.hold(HOST, str(tmp_path), "demo"):
            pass


def test_a_state_root_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    refused = pytest.raises(HostError, match="cannot take the deploy lock of demo")
    with refused, lock.hold(HOST, str(tmp_path / "file"), "demo"):
        pass


def test_the_words_in_the_file_are_json_with_nothing_secret(tmp_path):
    with lock.hold(HOST, str(tmp_path), "demo", what="deploy"):
        assert set(json.loads(lock_file(tmp_path).read_text())) == {"by", "what", "since"}
    assert os.path.getsize(lock_file(tmp_path)) == 0
