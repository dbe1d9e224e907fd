"""Why ssh did not connect, for people: from what `ssh -v` says, one sentence with what to do."""

from __future__ import annotations

import re

NO_CLIENT = "there is no program ssh on this machine; install OpenSSH's client (openssh-client)"
TOO_LONG = "drafthouse: no connection in time"


def is_busy(errors: str) -> bool:
    """Whether the server closed the connection before it said who it is: too many at once, most likely."""
    return bool(
        re.search(r"^(kex|ssh)_exchange_identification: .*(closed|reset)", errors, re.M)
    ) and not re.search(r"^(stdio forwarding failed|channel \d+: open failed)", errors, re.M)


def last_words(errors: str) -> str:
    """The last line that is no debugging."""
    lines = [line for line in errors.splitlines() if line.strip() and not re.match(r"debug\d: ", line)]
    return lines[-1].strip().rstrip(".") if lines else ""


def explain(name: str, address: str, errors: str, seconds: float) -> str:
    """The sentence for a connection that failed with `errors`."""
    return f"{name}: cannot connect: {last_words(errors)}"
