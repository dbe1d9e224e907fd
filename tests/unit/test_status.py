"""The run directory's schema: files that are whole or not there, numbers that only grow, a telling lock."""

import fcntl
import json
import os
import subprocess
import sys
import threading

import pytest

from trainer import status
from trainer.status import Exit, Heartbeat, Launch, Run, RunDir


def test_a_reader_sees_the_old_file_or_the_new_one_and_never_a_part(tmp_path):
    path = tmp_path / "value.json"
    values = [{"number": n, "filling": "x" * 100_000} for n in range(2)]
    status.write_json(path, values[0])
    done = threading.Event()

    def write():
        for n in range(200):
            status.write_json(path, values[n % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        while not done.is_set():
            assert status.read_json(path) in values
    finally:
        writer.join()
    assert os.listdir(tmp_path) == ["value.json"]


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "value.json"
    status.write_json(path, "old")
    with pytest.raises(TypeError):
        status.write_json(path, {"cannot be JSON": object()})
    assert status.read_json(path) == "old"
    assert os.listdir(tmp_path) == ["value.json"]


def test_a_file_has_the_mode_that_was_asked_for_from_its_first_moment(tmp_path):
    old = os.umask(0o077)
    try:
        status.write_json(tmp_path / "a", 1)
        status.write_json(tmp_path / "b", 1, mode=0o600)
    finally:
        os.umask(old)
    assert [os.stat(tmp_path / name).st_mode & 0o777 for name in "ab"] == [0o644, 0o600]


def test_no_file_is_none_and_a_file_that_is_no_json_is_an_error_that_names_it(tmp_path):
    assert status.read_json(tmp_path / "missing.json") is None
    assert status.read_json(tmp_path / "missing" / "directory.json") is None
    (tmp_path / "broken.json").write_text('{"half":')
    with pytest.raises(ValueError, match=r"broken\.json is not valid JSON"):
        status.read_json(tmp_path / "broken.json")


@pytest.mark.parametrize(
    "value",
    [
        Run("0001-demo", "demo", ["a b", "é"], environment={"K": "v"}),
        Launch(pid=7, attempt=2, trainer_pid=8),
        Exit("failed", 137, signal=9, out_of_memory=True),
    ],
)
def test_what_is_written_is_read_again(tmp_path, value):
    run = RunDir(tmp_path)
    kind = type(value).__name__.lower()
    getattr(run, f"write_{kind}")(value)
    assert getattr(run, kind)() == value


def test_a_key_of_a_later_version_is_passed_over(tmp_path):
    value = {"reason": "finished", "code": 0, "time": 5, "invented_later": 1}
    (tmp_path / "exit.json").write_text(json.dumps(value))
    assert RunDir(tmp_path).exit() == Exit("finished", 0, time=5)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[]", "holds list instead of an object"),
        ('"x"', "holds str instead of an object"),
        ("{}", "lacks reason"),
        ('{"reason": "failed", "code": "1"}', "code is '1', which is no int"),
        ('{"reason": "failed", "code": true}', "code is 'True', which is no int"),
        ('{"reason": "failed", "code": 1, "time": "noon"}', "time is 'noon', which is no float"),
        ('{"reason": null, "code": 1}', "reason is 'None', which is no str"),
        ("\xff", "is not valid JSON"),
    ],
)
def test_a_file_that_is_not_ours_is_a_value_error_that_names_it(tmp_path, text, wrong):
    (tmp_path / "exit.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"exit\.json") as error:
        RunDir(tmp_path).exit()
    assert wrong in str(error.value)


def test_a_whole_number_may_stand_for_a_fraction_and_null_where_nothing_is_known(tmp_path):
    value = {"reason": "failed", "code": 1, "signal": None, "out_of_memory": False, "time": 5}
    (tmp_path / "exit.json").write_text(json.dumps(value))
    assert RunDir(tmp_path).exit() == Exit("failed", 1, out_of_memory=False, time=5)


def test_a_file_that_is_no_heartbeat_hides_no_other(tmp_path):
    run = RunDir(tmp_path)
    run.write_heartbeat(Heartbeat(rank=1, step=3))
    for name, text in (("0.json", "[]"), ("2.json", '{"time": "noon"}'), ("3.json", "{"), ("x.json", "{}")):
        (tmp_path / "status" / name).write_text(text)
    assert list(run.heartbeats()) == [1]


def test_heartbeats_come_in_the_order_of_their_ranks(tmp_path):
    run = RunDir(tmp_path)
    for rank in (10, 2, 0):
        run.write_heartbeat(Heartbeat(rank=rank, step=rank))
    assert [(rank, beat.step) for rank, beat in run.heartbeats().items()] == [(0, 0), (2, 2), (10, 10)]


def test_only_known_requests_can_be_asked_and_each_has_its_own_id(tmp_path):
    run = RunDir(tmp_path)
    ids = {run.ask(action, "ada").id for action in status.ACTIONS}
    assert len(ids) == len(status.ACTIONS)
    assert run.request().action == status.ACTIONS[-1]
    with pytest.raises(ValueError, match="unknown request 'explode'"):
        run.ask("explode", "ada")


def test_a_run_is_alive_exactly_as_long_as_a_process_holds_its_lock(tmp_path):
    run = RunDir(tmp_path)
    assert not run.alive()
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True);"
            "sys.stdin.read()",
            str(run.lock),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    holder.stdout.readline()
    assert run.alive()
    holder.kill()
    holder.wait()
    assert not run.alive()


def test_to_look_whether_a_run_is_alive_leaves_its_lock_free(tmp_path):
    run = RunDir(tmp_path)
    run.lock.touch()
    assert not run.alive()
    with open(run.lock) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_numbers_only_grow_also_when_old_runs_were_removed(tmp_path):
    first = status.allocate_run(tmp_path, "demo")
    second = status.allocate_run(tmp_path, "other")
    second.path.rmdir()
    third = status.allocate_run(tmp_path, "demo")
    assert [run.path.name for run in (first, second, third)] == ["0001-demo", "0002-other", "0003-demo"]
    assert [run.path.name for run in status.list_runs(tmp_path, "demo")] == ["0001-demo", "0003-demo"]


def test_runs_are_ordered_by_number_also_beyond_four_digits(tmp_path):
    for name in ("10000-demo", "9999-demo", "0002-demo", "notes", "7-demo"):
        (tmp_path / name).mkdir()
    assert [run.path.name for run in status.list_runs(tmp_path)] == ["0002-demo", "9999-demo", "10000-demo"]
    assert status.allocate_run(tmp_path, "demo").path.name == "10001-demo"


def test_two_who_allocate_at_once_get_different_numbers(tmp_path):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(status.allocate_run(tmp_path, "demo").path.name))
        for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [f"{n:04d}-demo" for n in range(1, 21)]


@pytest.mark.parametrize("name", ["", "Demo", "a/b", "..", "a..b", "-a", "a-", "a b", "a\n", "x" * 64, "é"])
def test_a_name_that_cannot_be_a_directory_a_project_and_a_unit_is_refused(tmp_path, name):
    assert not status.valid_name(name)
    with pytest.raises(ValueError, match="cannot name an experiment"):
        status.allocate_run(tmp_path, name)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["a", "demo", "exp-ddtree", "qwen3.6-27b-8gpu", "a_b", "x" * 63])
def test_names_that_people_use_are_accepted(name):
    assert status.valid_name(name)


def test_a_run_id_is_a_number_and_a_name():
    assert status.split_run_id("0007-exp-ddtree") == (7, "exp-ddtree")
    for wrong in ("7-demo", "demo", "0007", "0007-", "0007-demo\n"):
        with pytest.raises(ValueError, match="is not a run id"):
            status.split_run_id(wrong)
