"""What the switch and the probe know of devices: who holds them is found by what processes have open.

A directory stands for the machine's root: /dev/nvidia0 is a file in it, the driver's own files are as the
driver writes them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import deployed
import pytest
from deployed import HOST, Place, steps, until

from deploy import evidence, gpus, switch

pytestmark = pytest.mark.slow

HOLDS = (
    "import sys, time\nkept = open(sys.argv[1])\nprint('open', flush=True)\ntime.sleep(float(sys.argv[2]))"
)
INFORMATION = """Model: \t\t NVIDIA H100 80GB HBM3
IRQ:   \t\t 18
GPU UUID: \t GPU-{number}aaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa
Bus Location: \t {bus}
Device Minor: \t {minor}
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    yield from deployed.place(tmp_path)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch) -> Path:
    """A machine with two devices; the one that comes first on the bus has the higher minor number."""
    root = tmp_path / "machine"
    (root / "dev").mkdir(parents=True)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (root / "dev" / name).touch()
    for number, bus, minor in ((0, "0000:01:00.0", 1), (1, "0000:c1:00.0", 0)):
        information = root / "proc" / "driver" / "nvidia" / "gpus" / bus / "information"
        information.parent.mkdir(parents=True)
        information.write_text(INFORMATION.format(number=number, bus=bus, minor=minor))
    (root / "proc" / "driver" / "nvidia" / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version: 12\n"
    )
    libraries = root / "usr" / "lib" / "x86_64-linux-gnu"
    libraries.mkdir(parents=True)
    (libraries / "libnvidia-ml.so.565.57.01").touch()
    (libraries / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.565.57.01")
    monkeypatch.setenv(gpus.ROOT_VARIABLE, str(root))
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    return root


@pytest.fixture
def hold() -> Iterator:
    """Start a process that has a file open for so many seconds, under a name."""
    started = []

    def start(path: Path, name: str = sys.executable, seconds: float = 1000) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [name, "-c", HOLDS, str(path), str(seconds)], executable=sys.executable, stdout=subprocess.PIPE
        )
        started.append(process)
        assert process.stdout
        process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def spec(place: Place, new, old=None, devices=("0",), **more) -> dict:
    made = place.spec(new, old, **more)
    made["start"]["devices"] = list(devices)
    return made


def go(made: dict) -> switch.Outcome:
    return switch.watch(HOST, switch.start(HOST, made), lambda step: None)


def step(outcome: switch.Outcome, name: str) -> dict:
    return next(step for step in outcome.steps if step["name"] == name)


def test_the_probe_tells_devices_by_their_place_on_the_bus_and_who_holds_them(place, machine, hold):
    holder = hold(machine / "dev" / "nvidia1", "python3")
    daemon = hold(machine / "dev" / "nvidia1", "/usr/bin/nvidia-persistenced")
    hold(machine / "dev" / "nvidiactl", "python3")
    found = evidence.collect(HOST, str(place.root), sample=0)["gpus"]
    first, second = found["devices"]
    assert (first["index"], first["path"]) == (0, str(machine / "dev" / "nvidia1"))
    assert first["uuid"].startswith("GPU-0")
    assert {one["pid"]: one["daemon"] for one in first["holders"]} == {holder.pid: False, daemon.pid: True}
    assert "python3 -c" in next(one["command"] for one in first["holders"] if one["pid"] == holder.pid)
    assert all(one["age"] >= 0 for one in first["holders"])
    assert second["holders"] == []
    assert found["control"] == ["/dev/nvidiactl", "/dev/nvidia-uvm"]
    assert (found["driver"], found["library"]) == ("570.86.15", "565.57.01")


def test_a_machine_without_devices_has_none(place, tmp_path, monkeypatch):
    monkeypatch.setenv(gpus.ROOT_VARIABLE, str(tmp_path / "empty"))
    found = evidence.collect(HOST, str(place.root), sample=0)["gpus"]
    assert (found["devices"], found["control"], found["driver"], found["library"]) == ([], [], None, None)


@pytest.mark.parametrize("wanted", [["0"], ["GPU-0aaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa"], [0]])
def test_a_run_names_its_devices_by_index_or_by_uuid(machine, wanted):
    assert [device["path"] for device in gpus.chosen(wanted)] == [str(machine / "dev" / "nvidia1")]
    assert len(gpus.chosen(["all"])) == 2


def test_free_devices_let_the_start_go_on_whatever_is_on_the_others(place, machine, hold):
    hold(machine / "dev" / "nvidia0", "python3")  # index 1
    hold(machine / "dev" / "nvidia1", "/usr/bin/nv-hostengine")
    outcome = go(spec(place, place.run_dir()))
    assert outcome.word == "done", outcome
    assert [step["name"] for step in outcome.steps][1:5] == ["stop", "devices", "release", "start"]
    assert step(outcome, "devices")["detail"] == "0 free (nv-hostengine may stay)"


def test_a_device_that_is_still_held_after_the_stop_keeps_the_new_run_from_starting(place, machine, hold):
    """CASES 16: an orphan holds the device's memory."""
    old = place.run_dir()
    place.start(old)
    until(lambda: steps(old))
    holder = hold(machine / "dev" / "nvidia1", "python3")
    new = place.run_dir()
    outcome = go(spec(place, new, old, devices_timeout_seconds=0.5))
    assert outcome.word == "failed"
    assert step(outcome, "devices")["outcome"] == "failed"
    assert f"device 0 is held by pid {holder.pid} (python3 -c" in outcome.reason
    assert "0.5 s after the stop, so nothing was started" in outcome.reason
    assert "the checkpoint of step" in outcome.reason
    assert "of run 0001-demo is safe" in outcome.reason
    assert "end that process, then deploy again" in outcome.reason
    assert not new.alive()
    assert not (new.path / "launch.json").exists()
    assert not os.path.lexists(place.root / "names" / "demo" / "current")


def test_the_start_waits_for_a_process_that_is_about_to_end(place, machine, hold):
    hold(machine / "dev" / "nvidia1", "python3", seconds=1.5)
    outcome = go(spec(place, place.run_dir()))
    assert outcome.word == "done", outcome
    assert step(outcome, "devices")["detail"].startswith("0 free after ")


def test_device_files_that_the_engine_makes_at_the_start_are_no_obstacle(place, tmp_path, monkeypatch):
    monkeypatch.setenv(gpus.ROOT_VARIABLE, str(tmp_path / "empty"))
    outcome = go(spec(place, place.run_dir()))
    assert outcome.word == "done", outcome
    assert step(outcome, "devices")["outcome"] == "skipped"
