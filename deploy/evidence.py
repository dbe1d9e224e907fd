"""Our side of the probe: send it, and get a host's facts back."""

from __future__ import annotations

import json
from typing import Any

from deploy import onhost
from deploy.host import Host, HostError

PROBE = ("trainer.status", "deploy.procfs", "deploy.machine", "deploy.probe")
PROBE_TIMEOUT = 20.0  # seconds; a probe takes less than one, a machine that swaps may need more


def collect(
    host: Host, state_root: str | None = None, shm_root: str | None = None, sample: float = 0.4
) -> dict[str, Any]:
    """The facts of `host`: see `deploy.probe` for their schema.

    `sample` is the time in seconds between two readings of CPU use; 0 reads once, for a caller that only
    plans. Raises HostError if the probe cannot run there or its answer is no JSON.
    """
    argv = onhost.command(host, "-", "--sample", str(sample))
    if state_root:
        argv += ["--state", state_root]
    if shm_root:
        argv += ["--shm", shm_root]
    result = host.run(argv, timeout=PROBE_TIMEOUT + sample, input=onhost.program(PROBE))
    try:
        facts = json.loads(result.out)
    except ValueError:
        raise HostError(f"{host.name}: the probe's answer is no JSON: {result.out[:200]!r}") from None
    if not isinstance(facts, dict):
        raise HostError(f"{host.name}: the probe's answer is no JSON object: {result.out[:200]!r}")
    return facts
