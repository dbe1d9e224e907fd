"""The testbed's SSH server serves real clients."""

import subprocess

import pytest
from testbed.gpubox import GpuBox
from testbed.sshd import ALIAS, SshServer

pytestmark = pytest.mark.sshd


def ssh(server: SshServer, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["ssh", "-F", str(server.client), ALIAS, *words],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_a_command_runs_and_its_exit_code_comes_back(sshd: SshServer) -> None:
    done = ssh(sshd, "echo over $((20 + 22)); exit 7")
    assert (done.stdout, done.returncode) == ("over 42\n", 7)


def test_a_host_key_that_is_not_known_is_refused(sshd: SshServer, tmp_path) -> None:
    (tmp_path / "nobody").touch()
    words = ["ssh", "-F", str(sshd.client), "-o", f"UserKnownHostsFile={tmp_path / 'nobody'}", ALIAS, "true"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 255
    assert "Host key verification failed" in done.stderr


@pytest.mark.root
def test_a_box_that_stops_takes_nothing_from_the_one_beside_it(gpubox: GpuBox) -> None:
    gpubox.run("touch", "/var/lib/drafthouse/here")
    other = GpuBox()
    other.start()
    other.stop()
    assert gpubox.run("ls", "/var/lib/drafthouse") == "here\n"
    gpubox.run("rm", "/var/lib/drafthouse/here")
