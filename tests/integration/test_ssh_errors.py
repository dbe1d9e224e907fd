"""Why a host cannot be reached: one sentence with what to do, from a real sshd or what is there instead."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from testbed.gpubox import INNER_PORT, GpuBox

from deploy import CHECKOUT
from deploy.errors import DeployError
from deploy.host import HostError, connect
from deploy.settings import HostSettings
from deploy.ssh import Ssh

pytestmark = [pytest.mark.root, pytest.mark.sshd, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _client(gpubox: GpuBox, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in gpubox.environment.items():
        monkeypatch.setenv(key, value)


def why(name: str, **options) -> str:
    """The sentence; it is one, and nothing was left behind."""
    host = Ssh(name, **options)
    try:
        with pytest.raises(HostError) as error:
            host.run(["true"], timeout=30)
        assert "\n" not in str(error.value)
        assert "debug" not in str(error.value)
        assert str(error.value).startswith(f"{name}: ")
        return str(error.value)
    finally:
        host.close()


def shown(gpubox: GpuBox, public_key) -> str:
    """A key's fingerprint by ssh-keygen itself."""
    done = subprocess.run(["ssh-keygen", "-lf", public_key], capture_output=True, text=True, check=True)
    return done.stdout.split()[1]


# -- nobody there ------------------------------------------------------------------------------------------


def test_a_machine_that_refuses(gpubox):
    sentence = why(gpubox.alias("refused", HostName="127.0.0.1", Port=1))
    assert sentence == (
        "refused: 127.0.0.1 port 1 refuses the connection; start its SSH server, or correct the port"
    )


@pytest.fixture
def no_route() -> Iterator[str]:
    subprocess.run(["ip", "route", "add", "unreachable", "10.231.255.1/32"], check=True)
    yield "10.231.255.1"
    subprocess.run(["ip", "route", "del", "unreachable", "10.231.255.1/32"], check=True)


def test_a_machine_to_which_no_way_leads(gpubox, no_route):
    sentence = why(gpubox.alias("no-route", HostName=no_route))
    assert "no-route: 10.231.255.1 port 22 cannot be reached (no route to host); look whether" in sentence
    assert "VPN or a ProxyJump" in sentence


@pytest.fixture
def dropped(gpubox: GpuBox) -> Iterator[str]:
    """An address whose packets reach the box's network, and go no further: as behind a strict firewall."""
    address = "10.231.255.2"
    inside = ["ip", "-n", gpubox.namespace, "route"]
    subprocess.run([*inside, "add", "blackhole", f"{address}/32"], check=True)
    subprocess.run(["ip", "route", "add", f"{address}/32", "via", gpubox.address], check=True)
    yield address
    subprocess.run(["ip", "route", "del", f"{address}/32"], check=True)
    subprocess.run([*inside, "del", f"{address}/32"], check=True)


def test_a_machine_whose_firewall_drops_what_is_sent_to_it(gpubox, dropped):
    sentence = why(gpubox.alias("dropped", HostName=dropped))
    assert sentence == (
        f"dropped: {dropped} port 22 cannot be reached (connection timed out); look whether it is up, and "
        "whether a VPN or a ProxyJump is needed"
    )


@pytest.mark.slow
def test_a_machine_that_takes_the_connection_and_says_nothing(gpubox):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        sentence = why(gpubox.alias("silent", HostName="127.0.0.1", Port=port))
    assert f"127.0.0.1 port {port} takes the connection, but no SSH server answers there" in sentence


def test_a_port_where_something_else_answers(gpubox):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer() -> None:
            connection, _ = server.accept()
            connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        sentence = why(gpubox.alias("http", HostName="127.0.0.1", Port=port))
    assert sentence == (
        f"http: what answers at 127.0.0.1 port {port} is no SSH server "
        "(it says 'HTTP/1.0 400 Bad Request'); correct the port"
    )


@pytest.mark.slow
def test_a_server_that_closes_before_its_greeting(gpubox):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def close() -> None:
            while True:
                try:
                    server.accept()[0].close()
                except OSError:
                    return

        threading.Thread(target=close, daemon=True).start()
        sentence = why(gpubox.alias("closing", HostName="127.0.0.1", Port=port))
    assert f"the SSH server at 127.0.0.1 port {port} closed the connection before its greeting" in sentence
    assert "MaxStartups" in sentence


def test_a_name_that_nobody_knows(gpubox):
    sentence = why(gpubox.alias("unnamed", HostName="no-such-name.invalid"))
    assert "unnamed: there is no machine called no-such-name.invalid (" in sentence
    assert "correct HostName in the SSH configuration or address: in fabric.yaml" in sentence


# -- not let in --------------------------------------------------------------------------------------------


def test_a_wrong_user_is_named_with_the_key_that_was_offered(gpubox):
    sentence = why(gpubox.alias("wrong-user", User="mallory"))
    assert f"wrong-user: mallory@{gpubox.address} was refused with the key ED25519 SHA256:" in sentence
    assert f"({gpubox.identity})" in sentence
    assert "authorized_keys there (ssh-copy-id), or correct User or IdentityFile" in sentence


def test_a_key_that_is_refused_is_shown_by_its_fingerprint(gpubox):
    key = gpubox.key("stranger")
    sentence = why(gpubox.alias("wrong-key", IdentityFile=key))
    assert f"root@{gpubox.address} was refused with the key ED25519 {shown(gpubox, key)} ({key})" in sentence


def test_no_key_at_all(gpubox):
    sentence = why(gpubox.alias("no-key", IdentityFile="/no/such/key"))
    assert (
        f"root@{gpubox.address} was refused, and no key was offered; name one with IdentityFile" in sentence
    )


def test_a_key_whose_passphrase_nobody_gives(gpubox):
    key = gpubox.key("locked", passphrase="secret", allowed="ada")
    sentence = why(gpubox.alias("locked-key", IdentityFile=key, User="ada"))
    assert f"ada@{gpubox.address} would be let in with the key ED25519 {shown(gpubox, key)}" in sentence
    assert "ssh-add" in sentence


def test_a_key_that_others_may_read(gpubox):
    key = gpubox.key("open", allowed="ada")
    key.chmod(0o644)
    sentence = why(gpubox.alias("open-key", IdentityFile=key, User="ada"))
    assert sentence.endswith(f"since others may read the key {key}; chmod 600 {key}")


def test_too_many_keys(gpubox):
    keys = [gpubox.key(f"many-{number}") for number in range(7)]
    name = gpubox.alias("many-keys", IdentityFile=keys[0], CertificateFile="none")
    with open(gpubox.ssh_config.parent / "hosts.d" / name, "a") as file:
        file.writelines(f"  IdentityFile {key}\n" for key in keys[1:])
    sentence = why(name)
    assert "was refused after too many keys: ED25519 SHA256:" in sentence
    assert "IdentitiesOnly yes" in sentence


# -- host keys ---------------------------------------------------------------------------------------------


def test_an_unknown_host_key_is_refused_with_its_fingerprint_and_accepted_when_asked(gpubox):
    known = gpubox.ssh_config.parent / "known-none"
    known.write_text("")
    name = gpubox.alias("unknown-key", UserKnownHostsFile=known)
    sentence = why(name)
    fingerprint = shown(gpubox, gpubox.directory / "keys" / "host.pub")
    assert f"host key of {gpubox.address} is not known yet: it shows ssh-ed25519 {fingerprint}" in sentence
    assert "--accept-new-host-key" in sentence
    assert known.read_text() == ""
    host = connect(HostSettings(name=name, address=name), accept_new_host_key=True)
    assert host.run(["echo", "in"], timeout=30).text == "in"
    host.close()
    assert gpubox.address in known.read_text()
    host = Ssh(name)  # from now on it is known
    assert host.run(["echo", "in"], timeout=30).text == "in"
    host.close()


@pytest.mark.parametrize("accept", [False, True])
def test_a_changed_host_key_is_refused_with_both_fingerprints_whatever_was_asked(gpubox, accept):
    other = gpubox.key(f"other-host-{accept}")
    kind, key = other.with_suffix(".pub").read_text().split()[:2]
    known = gpubox.ssh_config.parent / f"known-changed-{accept}"
    known.write_text(f"# a comment\n{gpubox.address} {kind} {key}\n")
    before = known.read_text()
    name = gpubox.alias(f"changed-key-{accept}", UserKnownHostsFile=known)
    sentence = why(name, accept_new_host_key=accept)
    now = shown(gpubox, gpubox.directory / "keys" / "host.pub")
    was = shown(gpubox, other)
    assert f"host key of {gpubox.address} has changed: it shows ssh-ed25519 {now}" in sentence
    assert f"{known} line 2 has ssh-ed25519 {was}" in sentence
    assert f'ssh-keygen -f "{known}" -R "{gpubox.address}"' in sentence
    assert known.read_text() == before
    remove = re.search(r"(ssh-keygen -f .*? -R \S+)", sentence)[1]
    subprocess.run(remove, shell=True, check=True, capture_output=True)  # the remedy is one
    host = Ssh(name, accept_new_host_key=True)
    assert host.run(["echo", "in"], timeout=30).text == "in"
    host.close()


# -- on the way --------------------------------------------------------------------------------------------


def test_a_jump_host_that_cannot_reach_it(gpubox):
    sentence = why(gpubox.alias("behind", HostName="127.0.0.1", Port=1, ProxyJump="gpu-box"))
    assert sentence.startswith(f"behind: {gpubox.address}, over which it is reached, cannot connect to it: ")
    assert "connection refused" in sentence


def test_a_jump_host_that_refuses_us_is_the_one_that_is_named(gpubox):
    gpubox.alias("bastion", User="mallory")
    sentence = why(gpubox.alias("behind", HostName="127.0.0.1", Port=INNER_PORT, ProxyJump="bastion"))
    assert f"behind: mallory@{gpubox.address} was refused with the key" in sentence


def test_behind_a_jump_host_the_keys_that_were_right_for_it_are_not_blamed(gpubox):
    key = gpubox.key("for-the-inner")
    name = gpubox.alias(
        "behind", HostName="127.0.0.1", Port=INNER_PORT, ProxyJump="gpu-box", IdentityFile=key
    )
    sentence = why(name)
    assert f"root@127.0.0.1 was refused with the key ED25519 {shown(gpubox, key)}" in sentence
    assert str(gpubox.identity) not in sentence


def test_the_host_key_of_a_jump_host_is_checked_in_the_same_way(gpubox):
    known = gpubox.ssh_config.parent / "known-for-jump"
    known.write_text("")
    gpubox.alias("bastion", UserKnownHostsFile=known)
    name = gpubox.alias("behind", HostName="127.0.0.1", Port=INNER_PORT, ProxyJump="bastion")
    assert f"host key of {gpubox.address} is not known yet" in why(name)
    host = Ssh(name, accept_new_host_key=True)
    assert host.run(["echo", "in"], timeout=30).text == "in"
    host.close()


def test_a_proxy_command_that_fails_is_quoted(gpubox):
    sentence = why(gpubox.alias("by-proxy", ProxyCommand="/no/such/proxy %h"))
    assert "/no/such/proxy: " in sentence
    assert "ssh by-proxy shows more" in sentence


# -- this side ---------------------------------------------------------------------------------------------


def test_a_mistake_in_the_ssh_configuration_is_named_with_its_line(gpubox):
    name = gpubox.alias("typo", Prot="22")
    try:
        sentence = why(name)
        file = gpubox.ssh_config.parent / "hosts.d" / name
        assert f"typo: ssh refuses its configuration: {file}: line " in sentence
        assert "Bad configuration option: prot" in sentence
        assert sentence.endswith("correct that line")
    finally:
        (gpubox.ssh_config.parent / "hosts.d" / name).unlink()


def test_a_configuration_that_others_may_write_is_named(gpubox):
    file = gpubox.ssh_config.parent / "hosts.d" / gpubox.alias("writable")
    file.chmod(0o666)
    try:
        assert f"writable: ssh refuses its configuration: Bad owner or permissions on {file}" in why(
            "writable"
        )
    finally:
        file.unlink()


def test_without_an_ssh_client_there_is_a_sentence(monkeypatch, tmp_path):
    (tmp_path / "sh").symlink_to(shutil.which("sh"))
    monkeypatch.setenv("PATH", str(tmp_path))
    host = Ssh("gpu-box")
    with pytest.raises(HostError, match="no program ssh on this machine; install OpenSSH's client"):
        host.run(["true"], timeout=30)
    host.close()


@pytest.mark.parametrize(
    "address",
    ["-oProxyCommand=id", "root@-oProxyCommand=id", "a b", "a;id", "$(id)", "`id`", "a\nb", "box:port", "'"],
)
def test_an_address_that_might_reach_a_shell_is_refused(address):
    with pytest.raises(DeployError, match="is no address for ssh; write it like gpu-box") as error:
        connect(HostSettings(name="box", address=address))
    assert error.value.code == 2


# -- let in ------------------------------------------------------------------------------------------------


def test_a_key_in_an_agent_is_used(gpubox, tmp_path):
    key = gpubox.key("in-agent", passphrase="secret", allowed="ada")
    socket_path = gpubox.directory / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", socket_path], stdout=subprocess.DEVNULL)
    try:
        ask = tmp_path / "ask"
        ask.write_text("#!/bin/sh\necho secret\n")
        ask.chmod(0o755)
        variables = {
            "SSH_AUTH_SOCK": str(socket_path),
            "SSH_ASKPASS": str(ask),
            "SSH_ASKPASS_REQUIRE": "force",
        }
        add = ["ssh-add", "-q", key]
        for _ in range(200):
            done = subprocess.run(add, env={**os.environ, **variables}, capture_output=True, text=True)
            if done.returncode != 2:  # it listens
                break
            time.sleep(0.02)
        assert done.returncode == 0, done.stderr
        name = gpubox.alias("by-agent", User="ada", IdentityFile=key, IdentityAgent=socket_path)
        host = Ssh(name)
        assert host.run(["id", "-un"], timeout=30).text == "ada"
        with host.bulk(["id", "-un"]) as process:
            assert process.stdout.read() == b"ada\n"
        host.close()
    finally:
        agent.terminate()
        agent.wait(10)


AT_A_TERMINAL = f"""\
import subprocess, sys
sys.path.insert(0, {str(CHECKOUT)!r})
from deploy.ssh import Ssh
box = Ssh("asks")
print("in as", box.run(["id", "-un"], timeout=30).text, flush=True)
with box.bulk(["id", "-un"]) as process:
    print("much as", process.stdout.read().decode(), flush=True)
subprocess.run(["rsync", "-e", box.rsync_shell(), "x:/etc/hostname", sys.argv[1]], check=True)
print("copied", flush=True)
box.run(["sleep", "1000"], timeout=1000)
"""


def test_at_a_terminal_ssh_may_ask_for_the_passphrase_once_and_ctrl_c_still_works(gpubox, tmp_path):
    key = gpubox.key("asked-for", passphrase="secret", allowed="ada")
    gpubox.alias("asks", User="ada", IdentityFile=key)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", AT_A_TERMINAL, str(tmp_path / "copy")])
    said = b""

    def until(word: bytes) -> None:
        nonlocal said
        while word not in said:
            assert select.select([terminal], [], [], 60)[0], said
            said += os.read(terminal, 4096)

    until(b"Enter passphrase for key")
    os.write(terminal, b"secret\n")
    until(b"in as ada")
    until(b"much as ada")  # over the same connection: one more would ask again
    until(b"copied")
    assert (tmp_path / "copy").exists()
    assert said.count(b"Enter passphrase") == 1
    os.write(terminal, b"\x03")
    until(b"KeyboardInterrupt")
    with contextlib.suppress(OSError):  # the end of a terminal, when nobody has it any more
        while os.read(terminal, 4096):
            pass
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) in (1, -signal.SIGINT, 130)
    os.close(terminal)
