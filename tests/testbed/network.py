"""A network namespace for the engine.

An engine manages docker0 and its iptables chains as if it were alone on the machine: a second one beside it
rewrites the first one's rules. In a namespace of its own it sees, and can break, nothing of the machine.
One veth pair and one masquerade rule lead out, to the package registries.
"""

from __future__ import annotations

from pathlib import Path

from .place import TestbedError, run

NAMESPACE = "drafthouse-testbed"
OUTSIDE, INSIDE = "dh-testbed0", "dh-testbed1"
SUBNET, OUTSIDE_ADDRESS, INSIDE_ADDRESS = "10.231.7.0/30", "10.231.7.1", "10.231.7.2"
FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")

# Each rule as its table, chain and match; added with -I (before a DROP of somebody else's), removed with -D.
_RULES = (
    ("nat", "POSTROUTING", ["-s", SUBNET, "!", "-o", OUTSIDE, "-j", "MASQUERADE"]),
    ("filter", "FORWARD", ["-i", OUTSIDE, "-j", "ACCEPT"]),
    ("filter", "FORWARD", ["-o", OUTSIDE, "-j", "ACCEPT"]),
)


def up(note: Path) -> Path:
    """Make the namespace and return its file. What has to be put back later is kept in `note`."""
    if FORWARDING.read_text().strip() == "0":
        note.write_text("ip_forward was 0\n")
        FORWARDING.write_text("1\n")
    run(["ip", "netns", "add", NAMESPACE])
    run(["ip", "link", "add", OUTSIDE, "type", "veth", "peer", "name", INSIDE, "netns", NAMESPACE])
    run(["ip", "addr", "add", f"{OUTSIDE_ADDRESS}/30", "dev", OUTSIDE])
    run(["ip", "link", "set", OUTSIDE, "up"])
    inside = ["ip", "-n", NAMESPACE]
    run([*inside, "addr", "add", f"{INSIDE_ADDRESS}/30", "dev", INSIDE])
    run([*inside, "link", "set", INSIDE, "up"])
    run([*inside, "link", "set", "lo", "up"])
    run([*inside, "route", "add", "default", "via", OUTSIDE_ADDRESS])
    for table, chain, match in _RULES:
        run(["iptables", "-w", "-t", table, "-I", chain, *match])
    return Path("/run/netns") / NAMESPACE


def down(note: Path) -> None:
    """Take away what `up` made; also after half an `up`."""
    for table, chain, match in _RULES:
        while run(["iptables", "-w", "-t", table, "-D", chain, *match], check=False).returncode == 0:
            pass
    run(["ip", "link", "del", OUTSIDE], check=False)
    run(["ip", "netns", "del", NAMESPACE], check=False)
    if note.exists():
        # Another engine that came up meanwhile needs it; then it stays.
        if not Path("/sys/class/net/docker0").exists():
            FORWARDING.write_text("0\n")
        note.unlink()
    if is_up():
        raise TestbedError(
            f"the network namespace {NAMESPACE} could not be removed: ip netns del {NAMESPACE}"
        )


def is_up() -> bool:
    return (Path("/run/netns") / NAMESPACE).exists() or (Path("/sys/class/net") / OUTSIDE).exists()
