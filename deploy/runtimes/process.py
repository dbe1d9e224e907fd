"""The runtime without an engine: launch as a plain process of the deploying user, under tini if there is one.

Pure: what to start is computed here; `deploy.switch` starts it.
"""

from __future__ import annotations

import os
from typing import Any

from trainer import status

# Where programs are looked for. The deployer's own PATH stays out of it: a run must not depend on the
# terminal that it was deployed from.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def start_spec(
    run: status.Run, facts: dict[str, Any], release_path: str, *, run_path: str, python: str
) -> dict[str, Any]:
    """What the switch starts for `run`: ``{"argv", "environment", "working_directory", "devices"}``.

    `facts` is the probe's JSON, `release_path` the release's directory with ``app/trainer`` in it, `python`
    the interpreter that has the trainer's packages. The environment is complete and starts from nothing;
    what the run's file asks for (`run.environment`) is added by launch, for the trainer alone.
    """
    argv = [python, "-u", "-m", "trainer.launch", "--run-dir", run_path]
    if facts.get("tini"):
        # -s: as a subreaper, since tini is not PID 1 here. Never -g: it would hand TERM to loader workers
        # before the checkpoint is written.
        argv = [facts["tini"], "-s", "--", *argv]
    home = facts.get("home") or "/"
    user = facts.get("user") or str(facts.get("uid", ""))
    environment = {
        "HOME": home,
        "USER": user,
        "LOGNAME": user,
        "LANG": "C.UTF-8",
        "PATH": search_path(python),
        "PYTHONPATH": f"{release_path}/app",
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # devices are numbered as nvidia-smi and NVML number them
        "DRAFTHOUSE_STATE": facts["state"]["root"],
        "DRAFTHOUSE_SHM": facts["shm"]["root"],
    }
    if run.devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, run.devices))
    return {
        "argv": argv,
        "environment": environment,
        "working_directory": run_path,
        "devices": [str(device) for device in run.devices or []],  # have to be free before it starts
    }


def search_path(python: str) -> str:
    """Where the programs of a run are looked for: beside its Python first."""
    return os.path.dirname(python) + ":" + PATH if os.path.isabs(python) else PATH


def reaper(facts: dict[str, Any]) -> str:
    """Who adopts orphaned children, in the words of the plan."""
    if facts.get("tini"):
        return f"tini ({facts['tini']} -s)"
    return "trainer.launch itself (no tini on this machine)"
