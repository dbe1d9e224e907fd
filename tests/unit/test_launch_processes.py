"""What /proc says, and what follows from it."""

from __future__ import annotations

import pytest

from trainer.oom import Kills, memory_events, out_of_memory
from trainer.processes import Process, catches, descendants, of_session, parse_stat


def process(pid, parent=1, session=100, state="S", started=10):
    return Process(pid, parent, session, state, started, "x")


def table(*processes):
    return {p.pid: p for p in processes}


def test_a_name_with_blanks_and_parentheses_is_read_whole():
    rest = " ".join(["S", "7", "12", "13"] + ["0"] * 15 + ["4711"] + ["0"] * 30)
    assert parse_stat(f"12 (a) b (c)) {rest}") == Process(12, 7, 13, "S", 4711, "a) b (c)")


def test_a_session_is_all_its_living_members_also_when_its_leader_is_gone():
    found = of_session(table(process(101), process(102, state="Z"), process(7, session=7)), 100, 10)
    assert [p.pid for p in found] == [101]


def test_a_session_id_that_went_to_another_process_is_not_ours():
    assert of_session(table(process(100, started=99), process(101, started=100)), 100, 10) == []


def test_a_process_that_started_before_the_leader_is_not_of_its_session():
    assert of_session(table(process(101, started=9)), 100, 10) == []


def test_descendants_are_found_through_parents_that_have_ended():
    found = descendants(
        table(process(2), process(3, parent=2, state="Z"), process(4, parent=3), process(5)), 2
    )
    assert [p.pid for p in found] == [4]


@pytest.mark.parametrize(("mask", "caught"), [("0000000000000200", True), ("0000000000000100", False)])
def test_a_handler_is_seen_in_the_mask_of_caught_signals(mask, caught):
    status = f"Name:\tx\nSigIgn:\tffffffffffffffff\nSigCgt:\t{mask}\n".encode()
    assert catches(status, 10) is caught


def test_a_process_whose_status_cannot_be_read_catches_nothing():
    assert not catches(b"", 10)


@pytest.mark.parametrize(
    ("before", "after", "killed", "verdict"),
    [
        (Kills(0, 0), Kills(1, 1), True, True),
        (Kills(0, 0), Kills(1, 1), False, True),  # a worker was killed, and the main process gave up
        (Kills(0, 0), Kills(0, 5), True, False),  # others were killed for want of memory
        (Kills(None, 0), Kills(None, 1), True, True),
        (Kills(None, 0), Kills(None, 1), False, False),
        (Kills(None, 0), Kills(None, 0), True, False),
        (Kills(None, None), Kills(None, None), True, None),
        (Kills(None, None), Kills(None, None), False, False),
    ],
)
def test_out_of_memory_is_what_the_nearest_counter_says(before, after, killed, verdict):
    assert out_of_memory(before, after, killed) is verdict


@pytest.mark.parametrize(
    ("membership", "first"),
    [
        ("0::/user.slice/x\n", "/sys/fs/cgroup/user.slice/x/memory.events"),
        ("0::/\n", "/sys/fs/cgroup/memory.events"),
        ("4:memory:/docker/abc\n0::/\n", "/sys/fs/cgroup/memory/docker/abc/memory.oom_control"),
        ("3:cpu,memory:/a\n", "/sys/fs/cgroup/memory/a/memory.oom_control"),
    ],
)
def test_the_counter_is_looked_for_in_both_versions_of_cgroups(membership, first):
    assert memory_events(membership)[0] == first


def test_no_memory_controller_means_no_counter():
    assert memory_events("9:name=systemd:/\n8:pids:/\n") == []
