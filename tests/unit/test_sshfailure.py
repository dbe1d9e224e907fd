"""Words of ssh -> sentences: those that no server of the testbed says. The others: test_ssh_errors."""

# ruff: noqa: E501  (whole sentences, as people read them)

from __future__ import annotations

import pytest

from deploy import sshfailure

CONNECTING = "debug1: Connecting to box [10.0.0.7] port 22.\n"
CASES = {
    "a password only": (
        "root@box: Permission denied (password,keyboard-interactive).",
        "root@box was refused: the server takes password or keyboard-interactive only, which needs a terminal; "
        "run fab at one, or set up a key there (ssh-copy-id)",
    ),
    "a time-out": (
        "ssh: connect to host box port 22: Connection timed out",
        "box port 22 cannot be reached (connection timed out); look whether it is up, and whether a VPN or a "
        "ProxyJump is needed",
    ),
    "a time-out of all": (
        sshfailure.TOO_LONG,
        "no connection came about in time; look whether it is up, and what ssh -v to it says",
    ),
    "an unreachable network": (
        "ssh: connect to host 10.0.0.7 port 22: Network is unreachable",
        "10.0.0.7 port 22 cannot be reached (network is unreachable); look whether it is up, and whether a VPN or a "
        "ProxyJump is needed",
    ),
    "no jumping": (
        "Authenticated to bastion ([10.0.0.1]:22) using \"publickey\".\n"
        "channel 0: open failed: administratively prohibited: open failed\nstdio forwarding failed\n"
        "kex_exchange_identification: Connection closed by remote host\nConnection closed by UNKNOWN port 65535",
        "bastion may not be jumped over (AllowTcpForwarding there); use another ProxyJump",
    ),
    "an agent that refuses": (
        "debug1: Offering public key: ada@desk ED25519 SHA256:abc agent\n"
        "debug1: Server accepts key: ada@desk ED25519 SHA256:abc agent\n"
        "sign_and_send_pubkey: signing failed for ED25519 \"ada@desk\" from agent: agent refused operation\n"
        "ada@box: Permission denied (publickey).",
        "ada@box would be let in with the key ED25519 SHA256:abc (ada@desk), but it cannot be used: its passphrase "
        "or its agent is missing here; load it with ssh-add",
    ),
    "nothing in common": (
        "Unable to negotiate with 10.0.0.7 port 22: no matching host key type found. Their offer: ssh-rsa",
        "cannot connect: Unable to negotiate with 10.0.0.7 port 22: no matching host key type found. Their offer: "
        "ssh-rsa; ssh ada@box shows more",
    ),
    "nothing at all": ("", "cannot connect: ssh did not say why; ssh ada@box shows more"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_failure_is_a_sentence_with_a_remedy(case):
    errors, sentence = CASES[case]
    assert sshfailure.explain("gpu-box", "ada@box", CONNECTING + errors) == f"gpu-box: {sentence}"


@pytest.mark.parametrize(
    ("errors", "busy"),
    [
        ("kex_exchange_identification: Connection closed by remote host\nConnection closed by 10.0.0.7 port 22", True),
        ("kex_exchange_identification: read: Connection reset by peer\nConnection reset by 10.0.0.7 port 22", True),
        (
            "debug1: kex_exchange_identification: banner line 0: Exceeded MaxStartups\n"
            "kex_exchange_identification: Connection closed by remote host\nConnection closed by 10.0.0.7 port 22",
            True,
        ),
        ("kex_exchange_identification: Connection closed by remote host\nConnection closed by UNKNOWN port 65535", False),
        ("ssh: connect to host box port 22: Connection refused", False),
        ("root@box: Permission denied (publickey).", False),
    ],
)  # fmt: skip
def test_only_a_server_that_closes_too_early_is_worth_another_try(errors, busy):
    assert sshfailure.is_busy(CONNECTING + errors) is busy


def test_a_line_of_known_hosts_is_shown_as_ssh_keygen_shows_it():
    key = "AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl"  # github.com's, published
    shown = "ssh-ed25519 SHA256:+DiY3wvvV6TuJJhbpZisF/zLDA0zPMSvHdkr4UvCOqU"
    text = f"# x\n|1|salt=|hash= ssh-ed25519 {key} comment\n@cert-authority * ssh-ed25519 {key}\nbroken\n"
    assert [sshfailure.fingerprint(text, line) for line in range(6)] == ["", "", shown, shown, "", ""]
