"""deploy/inside.py: why a command cannot run in a container of Proxmox, in one sentence."""

from __future__ import annotations

import pytest

from deploy.inside import refusal
from deploy.remote_files import RemoteFiles

HERE = [("uid", "0"), ("pct", "1"), ("here", "pve1")]


@pytest.mark.parametrize(
    ("look", "words", "remedy"),
    [
        ([("uid", "0")], "no Proxmox host", "correct address:"),
        ([("uid", "1000"), ("pct", "1")], "only root", "address: root@"),
        ([*HERE, ("machine", "pve1")], "a virtual machine on pve1", "by SSH, without container:"),
        ([*HERE, ("on", "pve2")], "on node pve2 and this is pve1", "set address: in fabric.yaml to pve2"),
        (
            [*HERE, ("there", "100"), ("there", "101")],
            "no container 200 on pve1 (there are 100, 101)",
            "correct",
        ),
        (HERE, "no container 200 on pve1 (there are none)", "correct container:"),
        ([*HERE, ("on", "pve1"), ("state", "stopped")], "is stopped", "pct start 200"),
        (
            [*HERE, ("on", "pve1"), ("lock", "backup"), ("state", "stopped")],
            "stopped and locked (backup)",
            "pct unlock 200",
        ),
        (
            [*HERE, ("on", "pve1"), ("state", "running"), ("frozen", "1")],
            "container 200 is frozen",
            "lxc-unfreeze 200",
        ),
    ],
)
def test_what_keeps_a_command_from_running_is_said_with_what_to_do(look, words, remedy):
    sentence = refusal(200, "pve", look)
    assert sentence.startswith("pve: ")
    assert words in sentence
    assert remedy in sentence
    assert "\n" not in sentence


def test_of_a_container_that_runs_nothing_is_claimed():
    assert refusal(200, "pve", [*HERE, ("on", "pve1"), ("lock", "backup"), ("state", "running")]) == ""


def test_files_of_a_host_need_a_way_to_run_commands_there() -> None:
    with pytest.raises(TypeError, match="run"):
        RemoteFiles()  # type: ignore[abstract]
