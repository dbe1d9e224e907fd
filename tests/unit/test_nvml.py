"""deploy/nvml.py against a stand-in that is as strict as NVIDIA's library."""

from __future__ import annotations

import os

import pytest
from fakes import nvml as fake

from deploy import nvml


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return fake.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def ask(library, tmp_path, monkeypatch):
    """Ask the library about a machine in a given state."""
    monkeypatch.setattr(nvml, "LIBRARY", str(library))
    monkeypatch.setenv(fake.STATE, str(tmp_path / "state"))

    def asked(state: str, pause: float = 0.0):
        (tmp_path / "state").write_text(state)
        return nvml.Asking(pause).result()

    return asked


def test_memory_and_use_are_told_by_device_and_by_process_at_both_samples(ask):
    busy = fake.device("GPU-a", used=20480, percent=97, processes=[(17, 20000, 90), (18, 300, 7)])
    first, second = ask(busy + fake.device("GPU-b", used=3), pause=0.01)
    assert (first["index"], first["uuid"], first["lost"], first["error"]) == (0, "GPU-a", False, None)
    assert first["utilization"] == [97, 97]
    assert (first["memory_used"], first["memory_total"]) == (20480 << 20, 81559 << 20)
    process = {"pid": 17, "memory": 20000 << 20, "memory_before": 20000 << 20, "utilization": 90}
    assert first["processes"][0] == process
    assert first["processes"][1]["utilization"] == 7
    assert (second["index"], second["processes"], second["utilization"]) == (1, [], [0, 0])


def test_more_processes_than_there_was_room_for_are_all_told(ask):
    processes = [(pid, 1, 0) for pid in range(1000, 1300)]
    (only,) = ask(fake.device("GPU-a", processes=processes))
    assert [one["pid"] for one in only["processes"]] == [pid for pid, _, _ in processes]


def test_a_lost_device_hides_no_other(ask):
    lost, well = ask(fake.device("GPU-a", lost=True) + fake.device("GPU-b", percent=5), pause=0.01)
    assert lost["lost"] is True
    assert "GPU is lost" in lost["error"]
    assert lost["memory_used"] is None
    assert (well["lost"], well["utilization"]) == (False, [5, 5])


REFUSALS = [("init 9\n", "Driver Not Loaded"), ("init 18\n", "version mismatch")]


@pytest.mark.parametrize(("state", "why"), REFUSALS)
def test_a_library_that_does_not_work_is_unknown_with_its_words(ask, state, why):
    assert why in ask(state)["unknown"]


def test_a_machine_without_devices_has_none(ask):
    assert ask("") == []


def test_a_missing_library_is_unknown(monkeypatch):
    monkeypatch.setattr(nvml, "LIBRARY", "libnvidia-ml-of-nobody.so.1")
    assert "cannot be used" in nvml.Asking(0).result()["unknown"]


def test_a_library_that_hangs_is_given_up_on_and_no_second_process_waits_for_it(ask, monkeypatch):
    with monkeypatch.context() as impatient:
        impatient.setattr(nvml, "PATIENCE", 0.2)
        assert "does not answer within 0.2 s" in ask("hang\n")["unknown"]
    for pid in list(nvml._left):  # what was killed goes at once, unless the kernel holds it
        os.waitpid(pid, 0)
        nvml._left.remove(pid)
    assert ask(fake.device("GPU-a"))[0]["uuid"] == "GPU-a"
    child = os.fork()
    if child == 0:  # one that cannot be ended
        os.read(os.pipe()[0], 1)
    nvml._left.append(child)
    try:
        assert "still waits for its answer" in ask(fake.device("GPU-a"))["unknown"]
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ask(fake.device("GPU-a"))[0]["uuid"] == "GPU-a"
