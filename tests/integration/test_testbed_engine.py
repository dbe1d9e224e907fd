"""The testbed's engine is apart from whatever else is on the machine."""

from __future__ import annotations

import os
import subprocess

import pytest
from testbed import leftovers
from testbed.docker import Docker
from testbed.engine import Engine
from testbed.place import RUN, TestbedError

pytestmark = pytest.mark.engine


def test_its_firewall_rules_and_bridge_are_in_a_namespace_of_their_own(engine: Docker) -> None:
    rules = subprocess.run(["iptables", "-S"], capture_output=True, text=True, check=True).stdout
    inside = ["nsenter", "--net=/run/netns/drafthouse-testbed", "iptables", "-S"]
    assert "DOCKER" in subprocess.run(inside, capture_output=True, text=True, check=True).stdout
    ours = [line for line in rules.splitlines() if "dh-testbed" in line]
    assert len(ours) == 2, "the two that let the veth pair through"
    assert all("DOCKER" not in line for line in ours)


def test_a_second_session_is_refused_in_one_sentence_and_changes_nothing(engine: Docker) -> None:
    with pytest.raises(TestbedError, match="another test session on this machine"):
        Engine().start()
    assert engine.run("version", "--format", "{{.Server.Version}}").strip()


def test_it_speaks_to_no_engine_but_its_own(engine: Docker) -> None:
    assert engine.environment["DOCKER_HOST"] == f"unix://{RUN}/docker.sock"
    assert engine.run("info", "--format", "{{.DockerRootDir}}").startswith(
        os.environ.get("DRAFTHOUSE_TESTBED") or os.getcwd()
    )


def test_while_it_is_up_the_search_for_leftovers_finds_it(engine: Docker) -> None:
    found = "\n".join(leftovers.found())
    for part in ("dockerd", "containerd", "network namespace", str(RUN)):
        assert part in found
