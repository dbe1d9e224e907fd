"""Our side of the probe: send it, and get a host's facts back."""

from __future__ import annotations

import json
import time
from typing import Any

from deploy import bootunit, onhost
from deploy.host import Host, HostError

PROBE = "deploy.probe"
PROBE_TIMEOUT = 20.0  # seconds; a probe takes less than one, a machine that swaps may need more


def collect(
    host: Host, state_root: str | None = None, shm_root: str | None = None, sample: float = 0.4
) -> dict[str, Any]:
    """The facts of `host`: see `deploy.probe` for their schema; and client_time, what this machine's clock
    showed when the host's showed `time`, as well as it can be known; and boot_unit, whether one is wanted.

    `sample` is the time in seconds between two readings of CPU use; 0 reads once, for a caller that only
    plans. Raises HostError if the probe cannot run there or its answer is no JSON.
    """
    arguments = ["--sample", str(sample)]
    if state_root:
        arguments += ["--state", state_root]
    if shm_root:
        arguments += ["--shm", shm_root]
    argv, stdin = onhost.script(host, PROBE, *arguments)
    began = time.time()
    result = host.run(argv, timeout=PROBE_TIMEOUT + sample, input=stdin)
    ended = time.time()
    try:
        facts = json.loads(result.out)
    except ValueError:
        raise HostError(f"{host.name}: the probe's answer is no JSON: {result.out[:200]!r}") from None
    if not isinstance(facts, dict):
        raise HostError(f"{host.name}: the probe's answer is no JSON object: {result.out[:200]!r}")
    # Its time is from within the call. A clock that is apart by more than the call took is apart for certain.
    facts["client_time"] = min(max(facts["time"], began), ended)
    facts["link_seconds"] = max(0.0, ended - began - facts["probe_seconds"])
    facts["boot_unit"] = bootunit.wanted()
    return facts
