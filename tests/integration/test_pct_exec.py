"""Commands in a container of a Proxmox host, by a strict `pct` over real LXC behind a real sshd."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from testbed.gpubox import ALIAS
from testbed.pct.box import PveBox
from testbed.pct.container import Container

from deploy import onhost, receiver
from deploy.host import HostError, LostError, NoPython, connect
from deploy.inside import Inside
from deploy.settings import HostSettings

pytestmark = [pytest.mark.pve, pytest.mark.slow]

SHOW = (
    "import os, sys, json\n"
    "json.dump([[os.fsencode(a).hex() for a in sys.argv[1:]], os.environb[b'V'].hex()], sys.stdout)"
)
HOSTILE = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=40)
WORDS = ["a b", "$(id -u)", "`id`", "a;b", "'", '"', "\\", "a\nb", "*", "ü→", "", "-n", "%s", "!", "--", "-l"]
NEW, OLD = "9.1", "8.1"  # with and without --keep-env
# What a command finds in its environment, and no word of whoever called pct.
CLEAN = {
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "PATH",
    "PYTHONUNBUFFERED",
    "PWD",
    "container",
    "TERM",
    "_",
    "OLDPWD",
}


def python(*arguments: str) -> list[str]:
    return ["python3", "-I", "-X", "utf8", "-c", *arguments]


@pytest.fixture(scope="module")
def there(pve_box: PveBox) -> Container:
    return pve_box.container(200)


def reach(box: PveBox, container: int = 200, address: str = ALIAS, **more: str) -> Inside:
    made = connect(HostSettings(name="train", address=address, container=container, **more))
    assert isinstance(made, Inside)
    return made


@pytest.fixture(autouse=True)
def _client(pve_box: PveBox, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in pve_box.environment.items():
        monkeypatch.setenv(key, value)


@pytest.fixture(scope="module", params=[NEW, OLD])
def inside(request: pytest.FixtureRequest, pve_box: PveBox, there: Container) -> Iterator[Inside]:
    with pytest.MonkeyPatch.context() as patch:
        for key, value in pve_box.environment.items():
            patch.setenv(key, value)
        pve_box.version = request.param
        host = reach(pve_box)
        host.run(["true"], timeout=30)
        yield host
        host.close()
        pve_box.version = NEW


def until(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


# -- what arrives there, and what comes back ---------------------------------------------------------------


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(words=st.lists(HOSTILE, max_size=3), value=HOSTILE)
def test_arguments_and_variables_arrive_byte_for_byte(inside, words, value):
    result = inside.run(python(SHOW, *words), timeout=30, env={"V": value})
    assert json.loads(result.out) == [[word.encode().hex() for word in words], value.encode().hex()]


def test_no_shell_and_no_option_of_pct_reads_anything_into_a_word(inside):
    hostile = [*WORDS, os.fsdecode(bytes(range(1, 256)))]
    result = inside.run(python(SHOW, *hostile), timeout=30, env={"V": "".join(WORDS)})
    assert json.loads(result.out) == [[os.fsencode(w).hex() for w in hostile], "".join(WORDS).encode().hex()]


def test_no_variable_of_the_caller_reaches_the_container(inside, pve_box, monkeypatch):
    outside = inside.outer.run(["env"], timeout=30).text
    assert "SSH_CONNECTION=" in outside  # there is something that could be handed on
    for shown in (
        inside.run(["env", "-0"], timeout=30).out,
        inside.open_stream(["env", "-0"]).stdout.read(),
        inside.run(["cat", "/proc/self/environ"], timeout=30).out,
    ):
        names = {entry.partition(b"=")[0].decode() for entry in shown.split(b"\0") if entry}
        assert names - CLEAN == set()
        assert b"\0PYTHONUNBUFFERED=1\0" in b"\0" + shown
    # Nor is there anybody in the container who was started with it, not even the shell that took the command.
    for pid in Path("/proc").glob("[0-9]*"):
        try:
            mine = f"/lxc/{inside.container}/" in (pid / "cgroup").read_text()
            if mine and pve_box.cgroup in (pid / "cgroup").read_text():
                assert b"SSH_CONNECTION=" not in (pid / "environ").read_bytes()
        except OSError:
            continue


def test_values_are_in_no_process_list_on_the_way(inside, pve_box):
    with inside.open_stream(python("import sys; sys.stdin.read()"), env={"TOKEN": "secret-4711"}) as process:
        lines = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                lines.append(path.read_bytes())
            except OSError:
                continue
        process.stdin.close()
    assert not [line for line in lines if b"secret-4711" in line]


def test_codes_signals_and_missing_programs_are_told_apart(inside):
    for argv, code in (
        (["sh", "-c", "exit 7"], 7),
        (["sh", "-c", "exit 255"], 255),
        (["sh", "-c", "kill -9 $$"], 137),
        (["no-such-program"], 127),
        (["/etc/passwd"], 126),
    ):
        assert inside.run(argv, timeout=30, check=False).code == code
    with pytest.raises(HostError) as error:
        inside.run(["sh", "-c", "echo first >&2; echo disk full >&2; exit 3"], timeout=30)
    assert str(error.value) == "train: sh failed (exit code 3): disk full"


def test_much_goes_in_and_out(inside):
    data = bytes(range(256)) * 10_000
    assert inside.run(["cat"], timeout=30, input=data).out == data
    with inside.bulk(["cat"]) as process:
        onhost.feed(process, [data])
        assert process.stdout.read() == data


def test_a_command_that_takes_too_long_is_killed_in_the_container(inside, there):
    with pytest.raises(HostError, match="train: sleep did not end within 1 s and was killed"):
        inside.run(["sleep", "4711"], timeout=1)
    until(lambda: "4711" not in there.exec("ps", "-eo", "args").stdout)
    assert inside.run(["echo", "next"], timeout=30).text == "next"


def test_a_stream_ends_with_its_stdin_and_without_a_pty(inside):
    script = "import os, sys; print(os.isatty(0), os.isatty(1), flush=True); print(sys.stdin.read())"
    with inside.open_stream(python(script)) as process:
        assert process.stdout.readline() == b"False False\n"
        process.stdin.write(b"bye")
        process.stdin.close()
        assert process.stdout.read() == b"bye\n"
        assert process.wait(30) == 0


def test_files_appear_whole_there(inside, there):
    inside.write("/root/deep/er/file", b"\0\xff", mode=0o600, parents=True)
    assert (there.files / "root/deep/er/file").read_bytes() == b"\0\xff"
    assert inside.read("/root/deep/er/file") == b"\0\xff"
    assert inside.read("/root/none") is None
    assert inside.write_tree(f"/root/tree{time.monotonic_ns()}", {"a/b": b"c"})
    with pytest.raises(HostError, match=r"^train: cannot write /proc/x/y: "):
        inside.write("/proc/x/y", b"", parents=True)


def test_functions_are_asked_there(inside, there):
    there.write("root/held", b"")
    assert onhost.ask(inside, "deploy.files:holder", "/root/none") is None
    with pytest.raises(HostError, match=r"^train: /root/held/x: Not a directory$"):
        onhost.ask(inside, "deploy.files:holder", "/root/held/x")


def test_rsync_goes_through_it_too(inside, there, tmp_path):
    (tmp_path / "a b").write_bytes(os.urandom(300_000))
    argv = ["rsync", "-a", "-e", inside.rsync_shell(), f"{tmp_path}/", "x:/root/synced/"]
    subprocess.run(argv, check=True, timeout=60)
    assert (there.files / "root/synced/a b").read_bytes() == (tmp_path / "a b").read_bytes()


# -- one that stays ----------------------------------------------------------------------------------------


def test_all_commands_go_through_one_pct_exec_and_it_ends_with_us(inside, there):
    def agents() -> int:
        return there.exec("ps", "-eo", "args").stdout.count("drafthouse agent")

    before = agents()
    assert before == 1
    for _ in range(3):
        inside.run(["true"], timeout=30)
    assert agents() == before
    inside.close()
    until(lambda: agents() == 0)
    assert inside.run(["echo", "again"], timeout=30).text == "again"


def test_a_container_without_python_takes_commands_all_the_same(pve_box, there):
    host = reach(pve_box, python_for_tools="python-of-nobody")
    try:
        assert host.run(["cat"], timeout=30, input=b"in").out == b"in"
        with pytest.raises(NoPython, match=r"there is no python-of-nobody there.*fab bootstrap --host train"):
            host.read("/etc/hostname")
        with pytest.raises(NoPython, match=r"fab bootstrap --host train"):
            onhost.ask(host, "deploy.files:holder", "/root/none")
        with pytest.raises(HostError, match="train: sleep did not end within 1 s and was killed"):
            host.run(["sleep", "4712"], timeout=1)
        until(lambda: "4712" not in there.exec("ps", "-eo", "args").stdout)
    finally:
        host.close()


def test_a_container_that_is_stopped_meanwhile_is_said_and_reached_again_when_it_is_back(pve_box, there):
    host = reach(pve_box)
    try:
        assert host.run(["echo", "1"], timeout=30).text == "1"
        there.stop()
        with pytest.raises(
            HostError, match=r"^train: container 200 is stopped; start it there with pct start 200$"
        ):
            host.run(["echo", "2"], timeout=30)
        there.start()
        assert host.run(["echo", "3"], timeout=30).text == "3"
    finally:
        host.close()


def test_one_that_is_frozen_is_said_and_goes_on_untouched(pve_box, there, monkeypatch):
    monkeypatch.setattr("deploy.inside.BEGIN_TIMEOUT", 1.0)
    pve_box.call("lxc-freeze", "-n", "200")
    try:
        assert refused(reach(pve_box)) == (
            "train: container 200 is frozen, so nothing in it goes on; let it go on there with "
            "lxc-unfreeze 200"
        )
    finally:
        pve_box.call("lxc-unfreeze", "-n", "200")


def test_a_link_that_breaks_while_a_command_runs_ends_it_there(pve_box, there):
    host = reach(pve_box)
    try:
        host.run(["true"], timeout=30)
        agent = host._agent
        assert agent

        def cut() -> None:
            until(lambda: "4713" in there.exec("ps", "-eo", "args").stdout)
            os.killpg(agent._process.pid, signal.SIGKILL)

        thread = threading.Thread(target=cut)
        thread.start()
        with pytest.raises(LostError, match="the connection was lost while sleep ran"):
            host.run(["sleep", "4713"], timeout=60)
        thread.join()
        until(lambda: "4713" not in there.exec("ps", "-eo", "args").stdout)
    finally:
        host.close()


# -- why not -----------------------------------------------------------------------------------------------


def refused(host: Inside) -> str:
    try:
        with pytest.raises(HostError) as error:
            host.run(["true"], timeout=30)
        with pytest.raises(HostError) as streamed:
            host.open_stream(["true"])
        assert str(error.value) == str(streamed.value)
        return str(error.value)
    finally:
        host.close()


def test_what_keeps_a_command_from_running_is_one_sentence_with_its_remedy(pve_box, there):
    assert refused(reach(pve_box, 404)) == (
        "train: there is no container 404 on pve (there are 200); correct container: in fabric.yaml"
    )
    pve_box.conf(300, "pve2").write_text("arch: amd64\n")
    assert refused(reach(pve_box, 300)) == (
        "train: container 300 is on node pve2 and this is pve; set address: in fabric.yaml to pve2"
    )
    (pve_box.pve / "nodes/pve/qemu-server/301.conf").write_text("cores: 1\n")
    assert "301 is a virtual machine on pve" in refused(reach(pve_box, 301))
    off = pve_box.container(201, running=False)
    assert (
        refused(reach(pve_box, 201)) == "train: container 201 is stopped; start it there with pct start 201"
    )
    off.conf.write_text(off.conf.read_text() + "lock: backup\n")
    assert "container 201 is stopped and locked (backup); wait" in refused(reach(pve_box, 201))
    off.remove()


def test_only_root_may_and_only_on_a_proxmox_host(pve_box, there):
    assert refused(reach(pve_box, address=f"ada@{ALIAS}")) == (
        "train: only root can run commands in container 200 by pct exec; log in as root, like address: "
        "root@… in fabric.yaml"
    )
    assert "there is no pct, so it is no Proxmox host" in refused(reach(pve_box, address="localhost"))


def test_a_backup_that_locks_a_running_container_keeps_no_command_from_it(pve_box, there):
    text = there.conf.read_text()
    there.conf.write_text(text + "lock: backup\n")
    try:
        host = reach(pve_box)
        assert host.run(["echo", "1"], timeout=30).text == "1"
        host.close()
    finally:
        there.conf.write_text(text)


def test_a_container_of_this_machine_is_known_to_share_its_cores(inside: Inside) -> None:
    """By which a push decides how many streams it has; LXC gives each container a boot_id of its own."""
    own = inside.run(["cat", "/proc/sys/kernel/random/boot_id"], timeout=30).text
    assert own != Path("/proc/sys/kernel/random/boot_id").read_text()
    assert onhost.ask(inside, "deploy.receiver:kernel") == receiver.kernel() != ""
