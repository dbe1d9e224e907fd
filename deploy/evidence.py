"""Our side of the probe: send it, and get a host's facts back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deploy.host import SCRIPT_FLAGS, Host, HostError
from trainer import status

PROBE_TIMEOUT = 20.0  # seconds; a probe takes less than one, a machine that swaps may need more


def collect(
    host: Host, state_root: str | None = None, shm_root: str | None = None, sample: float = 0.4
) -> dict[str, Any]:
    """The facts of `host`: see `deploy.probe` for their schema.

    `sample` is the time in seconds between two readings of CPU use; 0 reads once, for a caller that only
    plans. Raises HostError if the probe cannot run there or its answer is no JSON.
    """
    argv = [host.python, *SCRIPT_FLAGS, "-", "--sample", str(sample)]
    if state_root:
        argv += ["--state", state_root]
    if shm_root:
        argv += ["--shm", shm_root]
    result = host.run(argv, timeout=PROBE_TIMEOUT + sample, input=program("probe.py"))
    try:
        facts = json.loads(result.out)
    except ValueError:
        raise HostError(f"{host.name}: the probe's answer is no JSON: {result.out[:200]!r}") from None
    if not isinstance(facts, dict):
        raise HostError(f"{host.name}: the probe's answer is no JSON object: {result.out[:200]!r}")
    return facts


def program(script: str) -> bytes:
    """`script` of this package and the run directory's schema as one program for ``python -``.

    The schema becomes the module `trainer.status`, so that the script imports it as everybody else does.
    """
    schema = Path(status.__file__).read_text(encoding="utf-8")
    source = Path(__file__).with_name(script).read_text(encoding="utf-8")
    return _PROGRAM.format(schema=schema, script=script, source=source).encode()


_PROGRAM = """\
import sys, types
package, schema = types.ModuleType("trainer"), types.ModuleType("trainer.status")
package.status, package.__path__ = schema, []
sys.modules.update({{"trainer": package, "trainer.status": schema}})
exec(compile({schema!r}, "trainer/status.py", "exec"), schema.__dict__)
exec(compile({source!r}, {script!r}, "exec"))
"""
