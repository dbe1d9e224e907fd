"""Facts, settings and surveys for tests of what is decided: small, complete, changed by keyword."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy import release, settings
from deploy.settings import HostSettings, Project, Recipe
from deploy.survey import Interpreter, Survey
from deploy.weights import Weights

NOW = 1_800_000_000.0
STATE = "/var/lib/drafthouse"
PYTHON = "/opt/venv/bin/python"
LOCALHOST = HostSettings(name="localhost", address="localhost", python=PYTHON)
APP = {
    "trainer/__init__.py": b"",
    "trainer/launch.py": b"from trainer import status\nfrom trainer.keeper import keep\n",
    "trainer/keeper.py": b"import trainer.status\n",
    "trainer/status.py": b"SCHEMA = 1\n",
    "trainer/loss.py": b"loss = 1\n",
}


def merged(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes`, mappings merged key by key."""
    found = dict(base)
    for key, value in changes.items():
        inner = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
        found[key] = merged(found[key], value) if inner else value
    return found


def facts(**changes: Any) -> dict[str, Any]:
    """What the probe says of a machine where nothing is deployed."""
    base: dict[str, Any] = {
        "schema": 1,
        "time": NOW,
        "hostname": "box",
        "user": "root",
        "uid": 0,
        "home": "/root",
        "python": "3.11.7",
        "python_path": PYTHON,
        "boot_time": NOW - 1e6,
        "clock_ticks": 100,
        "sample_seconds": 0.0,
        "state": {
            "root": STATE,
            "exists": True,
            "writable": True,
            "owner_uid": 0,
            "free_bytes": 10**12,
            "total_bytes": 10**12,
        },
        "shm": {
            "root": "/dev/shm/drafthouse",
            "is_tmpfs": True,
            "writable": True,
            "free_bytes": 10**11,
            "total_bytes": 10**11,
        },
        "memory": {"total": 10**12, "available": 10**12},
        "environment": {},
        "cpus": 2,
        "engine": {
            "client": None,
            "answers": False,
            "version": None,
            "compose": None,
            "error": "no engine at /var/run/docker.sock: No such file or directory",
        },
        "tini": "/usr/bin/tini",
        "apt": "/usr/bin/apt-get",
        "systemd": False,
        "names": {},
        "runs": [],
        "switch": {},
        "locks": {},
        "weights": [],
        "problems": [],
    }
    return merged(base, changes)


def run(run_id: str = "0007-demo", *, alive: bool = True, release_id: str = "0" * 12, **changes: Any) -> dict:
    """One of the probe's runs, training since a minute."""
    path = f"{STATE}/runs/{run_id}"
    command = [PYTHON, "-u", "-m", "trainer", "--output-dir", f"{STATE}/names/demo/checkpoints"]
    base: dict[str, Any] = {
        "run_id": run_id,
        "name": run_id.partition("-")[2],
        "path": path,
        "alive": alive,
        "rebooted": False,
        "run": {
            "run_id": run_id,
            "name": run_id.partition("-")[2],
            "command": command,
            "grace_seconds": 60.0,
            "release": {"id": release_id, "digest": release_id},
            "created": NOW - 60,
            "changes": {},
        },
        "launch": {"pid": 10, "attempt": 1, "trainer_pid": 11, "time": NOW - 60},
        "heartbeats": {
            "0": {
                "rank": 0,
                "pid": 11,
                "attempt": 1,
                "sequence": 60,
                "time": NOW - 0.5,
                "phase": "training",
                "phase_since": NOW - 50,
                "step": 120,
                "total": 600,
                "loss": 3.4,
                "tokens_per_second": {"now": 18432.0, "median": 18000.0},
                "last_step_time": NOW - 0.5,
                "memory": {"now": 812_000_000},
                "links": {},
            }
        },
        "exit": None,
        "switch": None,
        "log": {"bytes": 4096, "last_write": NOW - 1, "first_bytes_offset": 0, "tail": []},
        "processes": [],
    }
    return merged(base, changes)


def recipe(text: str, tmp_path: Path, *changes: str, stem: str = "demo", name: str | None = None) -> Recipe:
    """The settings that a run's file with this `text` gives."""
    (tmp_path / "runs").mkdir(exist_ok=True)
    (tmp_path / "runs" / f"{stem}.yaml").write_text(text)
    return settings.load_run(Project(tmp_path, {}), stem, name=name, changes=changes)


def survey(found: Mapping[str, Any] | None = None, *, name: str = "demo", **changes: Any) -> Survey:
    """A survey of a machine that has all that the toy needs."""
    layout = release.Layout(STATE, "/dev/shm/drafthouse", name)
    values: dict[str, Any] = {
        "facts": found or facts(),
        "layout": layout,
        "interpreter": Interpreter(PYTHON, "3.11.7"),
        "app": APP,
        "git": {"commit": "c" * 40, "dirty": False},
        "weights": Weights("toy", "toy", "toy"),
        "data": "toy",
    }
    return Survey(**{**values, **changes})
