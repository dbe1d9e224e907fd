"""Parts of the probe that need no run: groups of processes, devices, speeds, network disks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from deployed import until
from situations import memory_group

from deploy import (
    cpu_time,
    health_work,
    machine,
    nvml,
    pace,
    probe,
    procfs,
    run_devices,
    run_processes,
    running,
)

UUIDS = ("GPU-a", "GPU-b")


# -- cgroups -----------------------------------------------------------------------------------------------


@pytest.fixture
def group():
    made = memory_group()
    assert made is not None
    yield made
    until(lambda: not (made / "cgroup.procs").read_text())
    made.rmdir()


@pytest.mark.root
def test_processes_and_limits_are_found_by_the_cgroup(group):
    """Also those that came into a container from outside, whose parents are not in it."""
    both = [subprocess.Popen(["sleep", "1000"]) for _ in range(2)]
    try:
        for one in both:
            (group / "cgroup.procs").write_text(str(one.pid))
        pids = sorted(one.pid for one in both)
        assert procfs.of_group(pids[0]) == pids
        run = {"alive": True, "processes": [{"pid": pids[0], "state": "S"}]}
        assert run_processes.memory_group(run) == {"oom_kills": 0, "limit": 96 << 20}
        assert run_processes.memory_group({**run, "alive": False}) is None
    finally:
        for one in both:
            one.kill()
            one.wait()


def test_a_group_that_we_are_in_ourselves_tells_nothing_of_a_run():
    run = {"alive": True, "processes": [{"pid": os.getpid(), "state": "S"}]}
    assert run_processes.memory_group(run) is None


# -- CPU time ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("got", "waited", "turns", "ran", "wanted"),
    [
        (0.25, 0.0, 5, 0.25, 0.25),  # as much as it wants
        (0.05, 0.8, 5, 0.05, 0.25),  # a fifth of the time in which it did not wait for a CPU
        (0.02, 0.2, 70, 0.02, 0.025),  # wakes often, has little to do, and is kept waiting each time
        (0.1, 0.9, 9, 0.1, 1.0),
        (0.01, 3.0, 1, 0.01, 1.0),  # a wait is counted at its end, this one began before the first look
        (0.0, 1.0, 1, 0.0, 1.0),
        (0.0, 0.0, 0, 0.0, 0.0),
    ],
)
def test_what_a_thread_would_compute_with_a_cpu_of_its_own(got, waited, turns, ran, wanted):
    def look(at: float, *counts: float) -> cpu_time.Look:
        return cpu_time.Look(at, {7: tuple(int(count * 1e9) for count in counts)}, None)

    found = cpu_time.between(7, look(50.0, 3.0, 2.0, 9.0), look(51.0, 3 + got, 2 + waited, 9 + turns), True)
    assert [count / 1e9 for count in found] == pytest.approx([ran, wanted], abs=1e-6)


def test_who_is_ready_and_did_not_sleep_wanted_a_cpu_all_the_time():
    """The wait that goes on is in no count yet."""
    before = cpu_time.Look(50.0, {7: (0, 0, 1)}, slept=3)
    after = cpu_time.Look(51.0, {7: (1000, 0, 1)}, slept=3)
    assert cpu_time.between(7, before, after, True) == (1000, 10**9)
    assert cpu_time.between(7, before, cpu_time.Look(51.0, after.threads, slept=4), True)[1] < 2000
    assert cpu_time.between(7, before, cpu_time.Look(51.0, after.threads, slept=None), True)[1] < 2000


def test_a_thread_that_is_ready_and_had_no_turn_is_asked_only_where_somebody_may_wait():
    found = []

    def look_at_itself() -> None:  # a thread that runs is ready
        own = {threading.get_native_id(): (0, 0, 1)}
        before, after = cpu_time.Look(50.0, own, None), cpu_time.Look(51.0, own, None)
        found.extend(cpu_time.between(os.getpid(), before, after, crowded) for crowded in (False, True))

    other = threading.Thread(target=look_at_itself)
    other.start()
    other.join()
    assert found == [(0, 0), (0, 10**9)]


# -- devices -----------------------------------------------------------------------------------------------


def device(index: int, *holders: dict) -> dict:
    return {"index": index, "path": f"/dev/nvidia{index}", "uuid": UUIDS[index], "holders": list(holders)}


def holder(pid: int, daemon: bool = False) -> dict:
    return {"pid": pid, "command": "python train.py", "age": 7.0, "daemon": daemon}


def told(index: int, processes: tuple = (), **more) -> dict:
    empty = {"lost": False, "error": None, "utilization": [3, 4], "memory_used": 5, "memory_total": 9}
    listed = [{"pid": pid, "memory": memory} for pid, memory in processes]
    return {"index": index, "uuid": UUIDS[index], **empty, "processes": listed, **more}


def run(run_id: str, devices: list[str] | None, *pids: int) -> dict:
    processes = [{"pid": pid} for pid in pids]
    return {
        "run_id": run_id,
        "alive": True,
        "run": {"devices": devices},
        "processes": processes,
        "gpus": None,
    }


def test_a_run_has_the_devices_it_was_given_and_those_that_it_holds():
    by_index, by_uuid, held, none = (
        run("0001-a", ["1"]), run("0002-b", ["GPU-a"]), run("0003-c", None, 17), run("0004-d", None),
    )  # fmt: skip
    run_devices.add([by_index, by_uuid, held, none], [device(0, holder(17)), device(1)], None)
    assert [[gpu["index"] for gpu in one["gpus"]] for one in (by_index, by_uuid, held, none)] == [
        [1],
        [0],
        [0],
        [],
    ]
    assert held["gpus"][0]["own"] == [17]
    assert by_uuid["gpus"][0]["others"][0]["run_id"] == "0003-c"


def test_memory_is_told_by_process_and_daemons_are_nobody():
    mine = run("0001-a", ["0"], 17)
    library = [told(0, ((17, 100), (18, 7), (4_000_000, 50)))]
    run_devices.add([mine], [device(0, holder(17), holder(18, daemon=True))], library)
    (gpu,) = mine["gpus"]
    assert (gpu["own"], gpu["own_memory"], gpu["utilization"]) == ([17], 100, [3, 4])
    assert [(one["pid"], one["memory"], one["command"]) for one in gpu["others"]] == [(4_000_000, 50, None)]


def test_a_device_that_the_library_no_longer_lists_is_missing_and_is_not_taken_for_the_next_one():
    mine = run("0001-a", ["0"])
    run_devices.add([mine], [device(0), device(1)], [{**told(1), "index": 0}])
    assert [(gpu["index"], gpu["missing"]) for gpu in mine["gpus"]] == [(0, True)]
    other = run("0002-b", ["GPU-gone"])
    run_devices.add([other], [device(0)], None)
    assert [(gpu["index"], gpu["missing"]) for gpu in other["gpus"]] == [("GPU-gone", True)]


@pytest.mark.parametrize("library", [None, [], {"unknown": "because it hangs"}])
def test_a_library_that_says_nothing_makes_no_device_lost(library):
    mine = run("0001-a", ["0"])
    run_devices.add([mine], [device(0)], library)
    assert [(gpu["lost"], gpu["missing"], gpu["memory_used"]) for gpu in mine["gpus"]] == [
        (None, False, None)
    ]
    nobody = run("0002-b", ["0"])
    run_devices.add([nobody], [], library)
    assert nobody["gpus"] is None


def test_two_samples_are_one_device():
    first = {**told(0, ((17, 100),)), "utilization": 10, "uses": {}}
    second = {**told(0, ((17, 300), (18, 1))), "utilization": None, "uses": {17: 42}}
    (found,) = nvml.joined([[first], [second]])
    assert found["utilization"] == [10]
    assert found["processes"][0] == {"pid": 17, "memory": 300, "memory_before": 100, "utilization": 42}
    assert found["processes"][1]["memory_before"] is None
    lost = {**first, "lost": True, "error": "GPU is lost"}
    assert nvml.joined([[lost], [second]])[0]["lost"] is True


# -- speeds ------------------------------------------------------------------------------------------------


def metrics(path: Path, records: list) -> Path:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in records))
    return path


def test_the_speed_of_the_last_steps_leaves_out_the_beginning_and_evaluations(tmp_path):
    def record(step: int, speed: object, kind: str = "training") -> dict:
        return {"step": step, "tokens_per_second": speed, "kind": kind}

    path = tmp_path / "metrics.jsonl"
    assert probe.recent(path) is None
    assert probe.recent(metrics(path, [record(10, 1)])) is None
    slow_start = [record(10, 1), record(20, 100), record(20, 7, "evaluation"), "{half", record(30, 120)]
    assert probe.recent(metrics(path, slow_start)) == {"tokens_per_second": 110, "steps": 11, "to": 30}
    long = [record(step, step) for step in range(10, 1010, 10)]
    found = probe.recent(metrics(path, long))
    assert found == {"tokens_per_second": 955, "steps": 100, "to": 1000}
    foreign = ["[]", "null", record(10, "fast"), {"step": None}, {}, "x"]
    assert probe.recent(metrics(path, foreign)) is None


def test_a_long_file_is_read_from_its_end_only(tmp_path):
    path = metrics(
        tmp_path / "m", [{"step": step, "tokens_per_second": 5, "x": "y" * 900} for step in range(2000)]
    )
    began = path.stat().st_size
    assert began > 10 * probe.METRICS_BYTES
    assert probe.recent(path)["to"] == 1999


def test_the_pace_of_an_attempt_is_told_by_the_clock_of_its_last_hour(tmp_path):
    """A step takes 2 s, and each hundredth is followed by 50 s of saving."""

    def record(step: int) -> dict:
        return {"step": step, "time": 1000.0 + 2 * step + 50 * (step // 100), "x": "y" * 400}

    path = metrics(tmp_path / "m", [record(step) for step in range(1, 10001)])
    assert path.stat().st_size > 100 * pace.BLOCK
    hour = pace.pace(path, 0.0)
    assert hour["seconds"] == pytest.approx(3600, abs=60)
    assert hour["seconds"] / hour["steps"] == pytest.approx(2.5, abs=0.05)
    since = record(9900)["time"]  # that of this attempt
    assert pace.pace(path, since) == {"steps": 100, "seconds": 250}
    assert pace.pace(path, record(9990)["time"]) is None  # too few steps
    few = [{"step": 100 + step, "time": 50.0 + step} for step in range(0, 40, 2)]
    assert pace.pace(metrics(path, ["{half", *few, "[]", {"step": "x", "time": 1}]), 0.0) == {
        "steps": 38, "seconds": 38,
    }  # fmt: skip
    assert pace.pace(metrics(path, []), 0.0) is None
    assert pace.pace(tmp_path / "none", 0.0) is None


# -- files -------------------------------------------------------------------------------------------------


def test_files_on_a_network_disk_are_not_asked_for(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.touch()
    monkeypatch.chdir(tmp_path)
    words = [os.fsencode(script), b"train.py"]
    assert len(running.named_files(os.getpid(), words)) == 2
    mounts = b"tmpfs / tmpfs rw 0 0\nserver:/x %s nfs4 rw 0 0\n" % os.fsencode(tmp_path)
    read = procfs.read
    monkeypatch.setattr(procfs, "read", lambda pid, name: mounts if name == "mounts" else read(pid, name))
    assert machine.remote(os.getpid()) == (os.fsencode(tmp_path) + b"/",)
    assert running.named_files(os.getpid(), words) == []


def test_weights_that_are_mapped_and_were_removed_are_named(tmp_path):
    path = tmp_path / "model one.safetensors"
    path.write_bytes(b"x" * 4096)
    source = f"import mmap, time; f = open({str(path)!r}); m = mmap.mmap(f.fileno(), 0, prot=1)"
    argv = ["python3", "-S", "-c", f"{source}; print(flush=True); time.sleep(1000)"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        assert running.deleted([process.pid]) == []
        path.unlink()
        assert running.deleted([process.pid]) == [str(path)]
        process.kill()


def test_files_of_a_copy_that_are_gone_are_named_also_when_nobody_has_them_open(tmp_path):
    path = tmp_path / "m@0123456789ab"
    path.mkdir()
    (path / running.MANIFEST).write_text(json.dumps({"stamp": {"a": [0, 0], "b": [0, 0]}}))
    (path / "a").touch()
    run = {"boot": {"weights": {"path": str(path)}}, "run": None, "alive": True}
    assert running.weights(run, tmp_path) == {"path": str(path), "there": True, "missing": [f"{path}/b"]}
    assert running.weights({**run, "alive": False}, tmp_path)["missing"] == []
    (path / running.MANIFEST).write_text("[]")
    assert running.weights(run, tmp_path)["missing"] == []


def test_a_process_that_nobody_waited_for_tells_how_it_ended():
    child = os.fork()
    if child == 0:
        os._exit(3)
    try:
        until(lambda: procfs.stat(child)["state"] == "Z")
        assert procfs.stat(child)["ended"] == 3 << 8
    finally:
        os.waitpid(child, 0)


def test_what_a_process_has_read_is_counted(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(b"x" * 100_000)
    before = procfs.io(os.getpid())
    path.read_bytes()
    assert procfs.io(os.getpid())[0] - before[0] >= 100_000
    assert procfs.io(2**22) is None
    assert time.time() > procfs.boot_time()


def test_ranks_that_meet_on_the_loopback_are_all_on_this_host():
    told = {}
    for address in ("127.0.0.1", "10.0.0.1"):
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, env=rank_of(address)) as process:
            found = procfs.stat(process.pid)
            until(lambda pid=process.pid: procfs.read(pid, "environ"))
            told[address] = procfs.describe(found, None)["ranks"]
    assert told["127.0.0.1"] == {"WORLD_SIZE": 3, "RANK": 0, "LOCAL_WORLD_SIZE": 3}
    assert told["10.0.0.1"] == {"WORLD_SIZE": 3, "RANK": 0}


def rank_of(address: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "MASTER_ADDR": address, "WORLD_SIZE": "3", "RANK": "0"}


# -- what a process does between two samples ---------------------------------------------------------------


def test_a_rate_is_over_the_time_that_really_passed_between_the_samples(monkeypatch):
    """Where every CPU is taken the pause takes longer than was asked for; no thread has more than one."""
    busy = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    pause = time.sleep
    monkeypatch.setattr(run_processes.time, "sleep", lambda seconds: pause(seconds + 0.2))
    try:
        run = {"path": "/run", "alive": True, "container": None, "launch": {"pid": busy.pid}}
        run_processes.add([run], 0.1)
        run["launch"] = {}  # launch itself does not count, and this is to
        (found,) = run["processes"]
        assert found["elapsed"] >= 0.2
        work = health_work.look(run, 0.1)
        assert 0 < work.cpus <= work.wants <= 1.0
        found["io"], length = [[0, 0, 0], [int(9e6), int(9e6), 0]], found["elapsed"]
        assert health_work.look(run, 0.1).reads == pytest.approx(9e6 / length)
        del found["elapsed"]  # an older probe does not tell
        assert health_work.look(run, 0.1).reads == 9e7
        assert health_work.look(run, 0).cpus is None
    finally:
        busy.kill()
        busy.wait()
