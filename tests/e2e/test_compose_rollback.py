"""`fab deploy --rollback-on-failure` of a container to another machine, as people type it."""

from __future__ import annotations

import json
import os

import pytest
from deployed import until
from test_compose_deploy import Remote, remote  # noqa: F401  (the fixture)

pytestmark = [pytest.mark.engine, pytest.mark.sshd, pytest.mark.root, pytest.mark.slow]


def test_a_deploy_whose_run_dies_before_its_first_step_gives_way_to_the_release_before(
    remote: Remote,  # noqa: F811
) -> None:
    remote.ok("deploy", "--no-follow")
    (first,) = remote.runs
    until(lambda: "line 3\n" in remote.log(first))
    name = remote.box.state / "names" / first.run().name
    good = os.readlink(name / "current")
    file = remote.root / "runs" / "demo.yaml"
    broken = file.read_text().replace(
        '  print("user"', '  raise SystemExit("no kernel image is available")\n  print("user"'
    )
    file.write_text(broken + "restart: {attempts: 0}\n")
    done = remote.run("deploy", "--no-follow", "--rollback-on-failure")
    assert done.returncode == 1, done.stdout + done.stderr
    said = done.stdout + done.stderr
    assert "no kernel image is available" in said
    release = good.rpartition("/")[2]
    assert f"release {release} runs again as 0003-{first.run().name}" in said
    _, second, third = remote.runs
    assert (second.exit().reason, third.alive()) == ("failed", True)
    assert os.readlink(name / "current") == good
    assert third.run().release["id"] == release
    until(lambda: "line 3\n" in remote.log(third))
    assert "secret hunter2" in remote.log(third)  # it has its secrets again
    assert json.loads((third.path / "switch.json").read_text())["outcome"] == "done"
    assert len(remote.containers()) == 1
    remote.ok("stop")
    assert third.exit().reason == "stopped"
