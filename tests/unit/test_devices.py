"""Which GPUs a run gets: what its file asks for, what the host has, what others have already."""

# ruff: noqa: E501  (whole sentences, as people read them)

from __future__ import annotations

from typing import Any

import pytest
from samples import facts, run

from deploy import devices


def gpus(count: int, *, driver: str | None = "550.54", **held: list[dict]) -> dict[str, Any]:
    """The probe's words on a host with so many devices; `_0=[...]` are holders of device 0."""
    found = [
        {"index": index, "path": f"/dev/nvidia{index}", "holders": held.get(f"_{index}", [])}
        for index in range(count)
    ]
    return {"devices": found, "driver": driver, "library": driver, "control": ["/dev/nvidiactl"]}


def other(*ids: str) -> dict[str, Any]:
    return run("0009-exp", run={"devices": list(ids)})


def choose(wanted: devices.Wanted, found: dict[str, Any], runtime: str = "compose") -> devices.Devices:
    return devices.choose(wanted, found, "demo", "box", runtime)


@pytest.mark.parametrize(
    ("wanted", "there", "ids"),
    [
        (None, 2, ("0", "1")),
        (None, 0, ()),
        (0, 2, ()),
        ("all", 2, ("0", "1")),
        (1, 2, ("0",)),
        (2, 2, ("0", "1")),
        ([1], 2, ("1",)),
    ],
)
def test_a_container_gets_what_is_asked_for_and_all_without_a_word(
    wanted: Any, there: int, ids: tuple
) -> None:
    assert choose(wanted, facts(gpus=gpus(there))) == devices.Devices(ids)


def test_a_plain_process_sees_all_unless_it_is_told() -> None:
    assert choose(None, facts(gpus=gpus(2)), "process").ids is None
    assert choose(0, facts(gpus=gpus(2)), "process").ids == ()
    assert choose([1], facts(gpus=gpus(2)), "process").ids == ("1",)


def test_so_many_are_taken_from_those_that_no_other_name_has_and_kept_while_the_run_lives() -> None:
    found = facts(gpus=gpus(4), runs=[other("0")])
    assert choose(2, found).ids == ("1", "2")
    mine = run(run={"devices": ["2", "3"]})
    assert choose(2, facts(gpus=gpus(4), runs=[other("0"), mine])).ids == ("2", "3"), "no move without need"
    assert choose(1, facts(gpus=gpus(4), runs=[other("0"), mine])).ids == ("1",)
    over = {**other("0"), "alive": False}
    assert choose(2, facts(gpus=gpus(4), runs=[over])).ids == ("0", "1")


@pytest.mark.parametrize(
    ("wanted", "found", "said"),
    [
        ("all", facts(gpus=gpus(0, driver=None)), "the run has gpus: all, but box has no NVIDIA driver loaded; install it there, or set gpus: 0 to compute on the CPU"),
        ("all", facts(), "the run has gpus: all, but box has no NVIDIA driver loaded; install it there, or set gpus: 0 to compute on the CPU"),
        (1, facts(gpus=gpus(0)), "the run has gpus: 1, but box shows no /dev/nvidia0 though its driver is loaded; run nvidia-modprobe -u -c0 there, or set gpus: 0"),
        (3, facts(gpus=gpus(2)), "the run has gpus: 3, but box has devices 0 to 1; correct gpus: in the run's file"),
        ([1, 7], facts(gpus=gpus(1)), "the run has gpus: [1, 7], but box has device 0 only; correct gpus: in the run's file"),
        (2, facts(gpus=gpus(2), runs=[other("1")]), "gpus: 2, but only 1 of the 2 devices of box are free (1 by 0009-exp); stop that run, or ask for fewer"),
        ([1], facts(gpus=gpus(2), runs=[other("1")]), "device 1 of box is in use by 0009-exp, a run of another name; give each name its own with gpus: in its file, like gpus: [1], or stop that run"),
        (None, facts(gpus=gpus(1), runs=[other("0")]), "device 0 of box is in use by 0009-exp, a run of another name; give each name its own with gpus: in its file, like gpus: [0], or stop that run"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_one_sentence_with_its_remedy(wanted: Any, found: dict, said: str) -> None:
    assert choose(wanted, found).problems == (said,)


def test_disjoint_names_share_a_host() -> None:
    assert choose([1], facts(gpus=gpus(2), runs=[other("0")])) == devices.Devices(("1",))


def test_a_stranger_on_a_device_is_named_and_a_daemon_or_our_own_run_is_not() -> None:
    held = [
        {"pid": 41, "command": "python train.py", "age": 7500.0, "daemon": False},
        {"pid": 42, "command": "nvidia-persistenced", "age": 1.0, "daemon": True},
        {"pid": 43, "command": "python -m trainer", "age": 1.0, "daemon": False},
    ]
    mine = run(processes=[{"pid": 43}], run={"devices": ["0"]})
    found = facts(gpus=gpus(2, _0=held), runs=[mine])
    assert choose([0], found).problems == (
        "device 0 of box is in use by process 41 (python train.py, for 2 h 05 min); end it, or choose other devices with gpus:",
    )
    assert choose([1], found).problems == ()
    theirs = run("0009-exp", processes=[{"pid": 41}])  # a plain process, which was told of no devices
    assert choose([0], facts(gpus=gpus(1, _0=held[:1]), runs=[theirs])).problems == (
        "device 0 of box is in use by 0009-exp, a run of another name, as process 41 (python train.py, for 2 h 05 min); end it, or choose other devices with gpus:",
    )


def test_device_files_are_those_of_the_chosen_and_those_that_go_with_any() -> None:
    found = facts(gpus=gpus(2))
    assert devices.files(choose([1], found), found) == ("/dev/nvidia1", "/dev/nvidiactl")
    assert devices.files(choose(0, found), found) == ()
