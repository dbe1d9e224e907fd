"""Why ssh did not connect, for people: from what `ssh -v` says, one sentence with what to do."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Callable
from pathlib import Path

NO_CLIENT = "there is no program ssh on this machine; install OpenSSH's client (openssh-client)"
TOO_LONG = "drafthouse: no connection in time"
CONFIGURATION = "the SSH configuration"

# With a proxy or a jump host, ssh itself only knows that its pipe was closed: the reason was said before.
_AFTERMATH = re.compile(
    r"^((kex|ssh)_exchange_identification: .*|Connection closed by UNKNOWN port 65535|stdio forwarding failed"
    r"|Killed by signal \d+|Connection to UNKNOWN port 65535 timed out|drafthouse: .*)\.?$"
)
_NOISE = re.compile(
    r"^(debug\d: .*|OpenSSH_.*|Authenticated to .*|Transferred: .*|Bytes per second: .*|\s*)$"
)


def is_busy(errors: str) -> bool:
    """Whether a server closed the connection before it said who it is: too many at once, most likely."""
    return _busy(errors) is not None


def last_words(errors: str) -> str:
    """The last line that says something, or nothing."""
    lines = [line.strip().rstrip(".") for line in errors.splitlines() if not _NOISE.match(line)]
    telling = [line for line in lines if not _AFTERMATH.match(line)]
    return (telling or lines or [""])[-1]


def explain(name: str, address: str, errors: str, read: Callable[[str], str] | None = None) -> str:
    """The sentence for a connection to `address` that failed with `errors`; `read` reads known_hosts."""
    sentence = (
        _configuration(errors)
        or _changed_key(errors, read or _read)
        or _unknown_key(errors)
        or _denied(errors)
        or _name(errors)
        or _forwarding(errors)
        or _no_ssh(errors)
        or _unreached(errors)
    )
    if sentence:
        return f"{name}: {sentence}"
    busy = _busy(errors)
    if busy:
        return (
            f"{name}: the SSH server at {busy} closed the connection before its greeting, again and again; "
            "it has too many of them at once (MaxStartups), or it blocks this machine: try again in a minute"
        )
    return f"{name}: cannot connect: {last_words(errors) or 'ssh did not say why'}; ssh {address} shows more"


def _configuration(errors: str) -> str | None:
    if re.search(r"^debug1: (Connecting to|Executing proxy command)", errors, re.M):
        return None  # it was read without complaint
    found = re.search(r"^(?!debug)(.*:? line \d+:? .+|Bad owner or permissions on .+)$", errors, re.M)
    if not found:
        return None
    bad = found[1].strip().rstrip(".")
    remedy = "chmod 600 it, as its owner" if bad.startswith("Bad owner") else "correct that line"
    return f"ssh refuses its configuration: {bad}; {remedy}"


def _changed_key(errors: str, read: Callable[[str], str]) -> str | None:
    host = re.search(r"^Host key for (\S+) has changed", errors, re.M)
    if not host:
        return None
    now = _last(r"^debug1: Server host key: (\S+ \S+)$", errors) or "another"
    offending = re.findall(r"^Offending \S+ key in (.+):(\d+)$", errors, re.M)
    remove = _last(r"^\s*(ssh-keygen -f .+ -R .+)$", errors) or f"ssh-keygen -R {host[1]}"
    was = ""
    if offending:
        file, line = offending[-1]
        known = fingerprint(read(file), int(line))
        was = f", but {file} line {line} has {known or 'another'}"
    return (
        f"the host key of {host[1]} has changed: it shows {now}{was}; if that machine was installed anew, "
        f"forget the old key with: {remove} (if it was not, somebody may be between you and it)"
    )


def fingerprint(known_hosts: str, line: int) -> str:
    """Type and SHA256 fingerprint of a line of a known_hosts file, as ssh-keygen shows them; or nothing."""
    lines = known_hosts.splitlines()
    words = lines[line - 1].split() if 0 < line <= len(lines) else []
    if words and words[0].startswith("@"):  # @cert-authority, @revoked
        words = words[1:]
    try:
        digest = hashlib.sha256(base64.b64decode(words[2], validate=True)).digest()
    except (IndexError, binascii.Error):
        return ""
    return f"{words[1]} SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def _read(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(errors="replace")
    except OSError:
        return ""


def _unknown_key(errors: str) -> str | None:
    host = re.search(r"^No (\S+) host key is known for (\S+) and you have requested strict", errors, re.M)
    if not host:
        return None
    shown = _last(r"^debug1: Server host key: (\S+ \S+)$", errors) or host[1]
    return (
        f"the host key of {host[2]} is not known yet: it shows {shown}; if the machine's owner (or "
        "ssh-keygen -lf /etc/ssh/ssh_host_*_key.pub there) says the same, add --accept-new-host-key once"
    )


def _denied(errors: str) -> str | None:
    found = re.search(r"^(\S+): Permission denied \(([^)]*)\)", errors, re.M)
    many = re.search(r"^Received disconnect from (\S+) .*Too many authentication failures", errors, re.M)
    if not found and not many:
        return None
    user = _last(r"^debug1: Authenticating to .* as '(.*)'$", errors)
    who = found[1] if found else f"{user or 'the user'}@{many[1] if many else 'it'}"
    offered = re.findall(r"^debug1: Offering public key: (.+?)(?: explicit| agent)*$", errors, re.M)
    accepted = re.findall(r"^debug1: Server accepts key: (.+?)(?: explicit| agent)*$", errors, re.M)
    through = len(re.findall(r"^Authenticated to ", errors, re.M))  # of jump hosts, whose keys were right
    for key in accepted[:through]:
        if key in offered:
            offered.remove(key)
    for file in re.findall(r"^Permissions \S+ for '(.+)' are too open", errors, re.M):
        return f"{who} was refused, since others may read the key {file}; chmod 600 {file}"
    if len(accepted) > through:
        return (
            f"{who} would be let in with the key {_key(accepted[-1])}, but it cannot be used: its passphrase "
            "or its agent is missing here; load it with ssh-add"
        )
    if many:
        advice = "name the right one with IdentityFile and IdentitiesOnly yes in " + CONFIGURATION
        return f"{who} was refused after too many keys: {', '.join(map(_key, offered))}; {advice}"
    ways = (found[2] if found else "").split(",")
    if "publickey" not in ways:
        return (
            f"{who} was refused: the server takes {' or '.join(ways)} only, which needs a terminal; "
            "run fab at one, or set up a key there (ssh-copy-id)"
        )
    if not offered:
        return (
            f"{who} was refused, and no key was offered; name one with IdentityFile in {CONFIGURATION}, or "
            "load one with ssh-add"
        )
    keys = ", ".join(map(_key, offered))
    those, it = ("the key", "it") if len(offered) == 1 else ("the keys", "one")
    return (
        f"{who} was refused with {those} {keys}; put {it} into that user's authorized_keys there "
        f"(ssh-copy-id), or correct User or IdentityFile in {CONFIGURATION}"
    )


def _key(offered: str) -> str:
    """``/home/ada/.ssh/id ED25519 SHA256:…`` for people: the fingerprint, and where the key lies."""
    file, kind, digest = ([*offered.rsplit(" ", 2), "", ""])[:3]
    return f"{kind} {digest} ({file})" if digest else offered


def _name(errors: str) -> str | None:
    host = re.search(r"^ssh: Could not resolve hostname (.+?): (.+)$", errors, re.M)
    return host and (
        f"there is no machine called {host[1]} ({host[2].strip().lower()}); correct HostName in "
        f"{CONFIGURATION} or address: in fabric.yaml"
    )


def _forwarding(errors: str) -> str | None:
    found = re.search(r"^channel \d+: open failed: (.+)$", errors, re.M)
    if not found:
        return None
    jump = _last(r"^Authenticated to (\S+)", errors) or "the jump host"
    why = found[1].strip().rstrip(".").removeprefix("connect failed: ")
    if "administratively prohibited" in why:
        return f"{jump} may not be jumped over (AllowTcpForwarding there); use another ProxyJump"
    return (
        f"{jump}, over which it is reached, cannot connect to it: {why.lower()}; correct HostName or Port in "
        f"{CONFIGURATION}, as they are seen from there"
    )


def _no_ssh(errors: str) -> str | None:
    said = re.search(r"^debug1: (?:kex|ssh)_exchange_identification: banner line 0: (.+)$", errors, re.M)
    if said and re.match("Exceeded MaxStartups|Not allowed at this time", said[1]):  # sshd itself
        return None
    where = _last(r"^debug1: Connecting to .*\[(.+\] port \d+)\.$", errors)
    if not said or re.search(r"^debug1: Remote protocol version", errors[said.end() :], re.M):
        return None
    at = (where or "its address").replace("]", "")
    return f"what answers at {at} is no SSH server (it says {said[1].strip()!r}); correct the port"


def _unreached(errors: str) -> str | None:
    found = _last_match(r"^ssh: connect to (?:host )?(.+): (.+)$", errors)
    if found:
        where, why = found[1], found[2].strip()
        if why == "Connection refused":
            return f"{where} refuses the connection; start its SSH server, or correct the port"
        return (
            f"{where} cannot be reached ({why.lower()}); look whether it is up, and whether a VPN or a "
            "ProxyJump is needed"
        )
    silent = _last_match(r"^Connection to (\S+) port (\d+) timed out", errors)
    if silent and silent[1] != "UNKNOWN":
        return (
            f"{silent[1]} port {silent[2]} takes the connection, but no SSH server answers there; look "
            "whether the machine hangs, or correct the port"
        )
    if TOO_LONG in errors:
        return "no connection came about in time; look whether it is up, and what ssh -v to it says"
    return None


def _busy(errors: str) -> str | None:
    """Where a server is that closed the connection too early."""
    found = re.search(
        r"^(?:kex|ssh)_exchange_identification: .*(?:closed|reset).*\n"
        r"(?:Connection (?:closed|reset) by (?!UNKNOWN)(\S+ port \d+))",
        errors,
        re.M,
    )
    return None if not found or _no_ssh(errors) else found[1]


def _last(pattern: str, text: str) -> str | None:
    found = _last_match(pattern, text)
    return found[1] if found else None


def _last_match(pattern: str, text: str) -> re.Match[str] | None:
    matches = list(re.finditer(pattern, text, re.M))
    return matches[-1] if matches else None
