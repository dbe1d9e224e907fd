"""Addresses, and the configuration of our own connections."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from deploy import sshconfig
from deploy.errors import DeployError

needs_ssh = pytest.mark.program("ssh")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("gpu-box", ["--", "gpu-box"]),
        ("root@10.0.0.7", ["-l", "root", "--", "10.0.0.7"]),
        ("root@gpu-box:2222", ["-p", "2222", "-l", "root", "--", "gpu-box"]),
        ("ssh://ada@gpu-box:2222", ["-p", "2222", "-l", "ada", "--", "gpu-box"]),
        ("fe80::1%eth0", ["--", "fe80::1%eth0"]),
        ("[2001:db8::7]:22", ["-p", "22", "--", "2001:db8::7"]),
        ("DOMAIN\\ada@gpu.example", ["-l", "DOMAIN\\ada", "--", "gpu.example"]),
    ],
)
def test_an_address_becomes_words_of_ssh(address, words):
    assert sshconfig.target(address) == words


@pytest.mark.parametrize("address", ["", "-o", "a b", "a@b@c", "box:port", "box:", "$(id)", "a\n", "'", "ü"])
def test_what_is_no_address_is_refused_in_one_sentence(address):
    with pytest.raises(DeployError, match="is no address for ssh"):
        sshconfig.target(address)


def asked(config: Path, name: str) -> dict[str, str]:
    done = subprocess.run(["ssh", "-F", config, "-G", name], capture_output=True, text=True, check=True)
    return dict(line.partition(" ")[::2] for line in done.stdout.splitlines())


@needs_ssh
def test_what_we_insist_on_comes_before_what_the_user_has_set_and_the_rest_is_the_users(
    tmp_path, monkeypatch
):
    users = tmp_path / "an own config"
    users.write_text(
        "Host box\n HostName 10.0.0.7\n StrictHostKeyChecking no\n BatchMode no\n RemoteCommand tmux\n"
    )
    monkeypatch.setenv(sshconfig.VARIABLE, str(users))
    ours = tmp_path / "ours"
    ours.write_text(sshconfig.own(accept_new=False, interactive=False))
    said = asked(ours, "box")
    assert said["hostname"] == "10.0.0.7"
    assert said["stricthostkeychecking"] == "true"
    assert (said["batchmode"], said["serveraliveinterval"], said["connecttimeout"]) == ("yes", "5", "10")
    assert said.get("remotecommand", "none") == "none"
    ours.write_text(sshconfig.own(accept_new=True, interactive=True))
    assert (asked(ours, "box")["stricthostkeychecking"], asked(ours, "box")["batchmode"]) == (
        "accept-new",
        "no",
    )


@needs_ssh
def test_a_name_is_known_when_ssh_would_go_elsewhere_for_it(tmp_path):
    config = tmp_path / "config"
    config.write_text(
        "Host *\n User me\nMatch host gpu-7\n HostName 10.0.0.7\nMatch host deep\n ProxyJump gpu-7\n"
    )
    hosts = sshconfig.read(config)
    assert hosts.knows("gpu-7")
    assert hosts.knows("deep")
    assert not hosts.knows("gpu-8")
    assert not hosts.knows("-oProxyCommand=id")
    assert not hosts.knows("a;b")
