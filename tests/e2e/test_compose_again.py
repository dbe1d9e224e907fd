"""start, restart --same and rollback of containers on another machine, as people type them."""

from __future__ import annotations

import pytest
from deployed import until
from test_compose_deploy import Remote, remote  # noqa: F401  (the fixture)

from trainer import status

pytestmark = [pytest.mark.engine, pytest.mark.sshd, pytest.mark.root, pytest.mark.slow]


def release_of(run: status.RunDir) -> str:
    made = run.run()
    assert made is not None
    return str(made.release["id"])


def test_what_is_deployed_is_started_again_and_the_release_before_comes_back(
    remote: Remote,  # noqa: F811
) -> None:
    remote.ok("deploy", "--no-follow")
    remote.ok("stop")
    remote.ok("start", "--no-follow")
    remote.ok("restart", "--same", "--no-follow")
    file = remote.root / "runs" / "demo.yaml"
    file.write_text(file.read_text() + "restart: {attempts: 0}\n")
    remote.ok("restart", "--no-follow")
    shown = remote.ok("rollback", "--no-follow")
    first, second, third, fourth, fifth = remote.runs
    assert {release_of(run) for run in (first, second, third, fifth)} == {release_of(first)}
    assert release_of(fourth) != release_of(first)
    assert "restart.attempts: 0 → " in shown
    assert [run.alive() for run in remote.runs] == [False, False, False, False, True]
    until(lambda: "line 3\n" in remote.log(fifth))
    assert len(remote.containers()) == 1
    remote.ok("stop")
