"""A run in a Proxmox container, on the host's side: its container.json, its signals, its end.

The counterpart of `deploy.contained` for Docker. The run's lock says whether the run lives; of the container
itself the kernel tells whether it does, without a program of Proxmox. Runs ON the host, as a part of the
switch and of the probe. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path
from signal import SIGKILL, Signals
from typing import Any

from deploy import machine, pct_conf, pct_host, procfs, pve
from deploy.errors import DeployError
from trainer import status

KIND = "pct"
START_TIMEOUT = 120.0  # seconds for `pct start`
ASKED = 5.0  # seconds in which `pct shutdown` has to have passed the signal on, or to have said why not
MARGIN = 5  # seconds that `pct shutdown` gets beyond the run's grace


class PctContainer:
    """The container of one run."""

    def __init__(self, run: status.RunDir, kept: dict[str, Any]) -> None:
        self.run = run
        self.kept = kept
        self.vmid = int(kept["vmid"])

    def words(self) -> str:
        return f"container {self.vmid} ({self.kept.get('name')})"

    def running(self) -> bool | None:
        """Whether any process of it is left."""
        return self.vmid in pve.active()

    def signal(self, number: Signals) -> str:
        """Let Proxmox end it: who sent what, in words. Raises OSError.

        TERM is `pct shutdown`, which asks its first process; KILL is `pct stop`. If Proxmox does not do it
        (the container is locked, say), launch, which holds the run's lock, gets the signal directly.
        """
        if not self.mine():  # somebody has made another one of this id
            return self.directly(number, f"container {self.vmid} is another one by now")
        why = self.stop() if number == SIGKILL else self.shut_down()
        if why is None or not self.run.alive():
            return number.name
        return self.directly(number, why)

    def mine(self) -> bool:
        with contextlib.suppress(OSError):
            conf = pct_conf.read(pve.conf_path(self.vmid))
            mark = conf.mark if conf else None
            return mark is not None and mark.name == self.kept.get("project")
        return False

    def shut_down(self) -> str | None:
        made = None
        with contextlib.suppress(ValueError, OSError):
            made = self.run.run()
        grace = int(made.grace_seconds if made else 60) + MARGIN
        program = machine.program("pct") or "pct"
        with open(self.run.path / "launch.err", "ab") as errors:
            begun = {
                "argv": [program, "shutdown", str(self.vmid), "--timeout", str(grace)],
                "environment": pve.environment(),
                "working_directory": "/",
            }
            process = procfs.begin(begun, errors)
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(ASKED)
            if code and self.running():
                return f"pct shutdown ended with exit code {code}"
        return None

    def stop(self) -> str | None:
        try:
            code, _, err = pve.run("pct", "stop", str(self.vmid), timeout=pct_host.TIMEOUT)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        return (
            None if code == 0 or not self.running() else pve.last_line(err) or f"pct stop ended with {code}"
        )

    def directly(self, number: Signals, why: str) -> str:
        pid = procfs.holding(str(self.run.lock), procfs.processes())
        if pid is None:
            if self.run.alive():
                raise PermissionError(0, f"{self.words()} cannot be signalled: {why}")
            return number.name
        os.kill(pid, number)
        return f"{number.name} (to pid {pid} itself: {why})"

    def end_words(self) -> str:
        """How it ended, for people; empty while it has not. (Proxmox keeps no exit codes.)"""
        return "" if self.running() else f"container {self.vmid} has ended"

    def last_lines(self) -> list[str]:
        """What it printed last: nobody keeps that of a container without a log of its own."""
        return []


def up(run: status.RunDir, start: dict[str, Any]) -> tuple[PctContainer | None, str, list[str]]:
    """Configure the start's container for the run, and start it.

    Returns the container, which is then in container.json; why it failed, or an empty text; and what was said
    last.
    """
    which = start["container"]
    vmid = int(which["vmid"])
    made = run.run()
    if vmid in pve.active() and pct_host.ours(vmid, which["state"]):
        pct_host.stop(vmid)  # by now no run of ours is in it: a trial, or somebody has started it by hand
    try:
        pct_host.configure(vmid, which, str(run.path), made.secrets_file if made else None)
    except (DeployError, OSError) as error:
        why = error if isinstance(error, DeployError) else error.strerror or error
        return None, f"the container was not started: {why}", []
    conf = pct_conf.read(pve.conf_path(vmid))
    kept = {
        "kind": KIND,
        "id": str(vmid),
        "vmid": vmid,
        "name": conf.values.get("hostname") if conf else None,
        "image": which.get("image"),
        "project": which["name"],
        "release": which["release"],
        "state": which["state"],
        "conf": which["conf"],
        "time": time.time(),
    }
    with contextlib.suppress(OSError):  # a full disk: without the file, the run's lock tells its process
        status.write_json(run.path / "container.json", kept)
    container = PctContainer(run, kept)
    errors = run.path / "launch.err"
    with open(errors, "ab") as stream:
        try:
            process = procfs.begin(start, stream)
            code = process.wait(start.get("timeout_seconds", START_TIMEOUT))
        except OSError as error:
            return container, f"{start['argv'][0]} cannot be started: {error.strerror}", []
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, SIGKILL)
            process.wait()
            return container, f"Proxmox did not start container {vmid} in time", _last(errors)
    said = _last(errors)
    if code:
        why = said[-1] if said else f"pct start ended with exit code {code}"
        return container, f"container {vmid} was not started: {pct_host.why_not(vmid, why)}", said
    return container, "", said


def check(start: dict[str, Any]) -> str:
    """Why the start's container cannot be started, before anything is stopped; empty if it can be."""
    which = start["container"]
    vmid, name = int(which["vmid"]), which["name"]
    try:
        conf = pct_conf.read(pve.conf_path(vmid))
    except OSError as error:
        return f"{pve.conf_path(vmid)} cannot be read: {error.strerror}"
    if conf is None:
        return f"container {vmid} of release {which['release']} is gone from this node: fab deploy makes one"
    if conf.mark != pct_host.mark_of(which):
        return (
            f"container {vmid} is not {name}'s for release {which['release']} any more: fab deploy makes one"
        )
    if conf.values.get("lock"):
        return (
            f"container {vmid} is locked ({conf.values['lock']}): wait for its end, or run pct unlock {vmid}"
        )
    if not os.path.isfile(which["conf"]):
        return f"there is no {which['conf']}: fab deploy writes it anew"
    return ""


def state(kept: dict[str, Any], run_path: str, running: dict[int, str] | None = None) -> dict[str, Any]:
    """What the probe says of a run's container, from its container.json and from what is there now.

    {id vmid kind name image image_id running paused pid exit_code oom_killed error started finished
    engine_started gone unknown differs [[key, there, deployed]]}
    """
    vmid = int(kept["vmid"])
    running = pve.active() if running is None else running
    place = running.get(vmid)
    conf, unknown = None, None
    try:
        conf = pct_conf.read(pve.conf_path(vmid))
    except OSError as error:
        unknown = f"{pve.conf_path(vmid)} cannot be read ({error.strerror})"
    mark = conf.mark if conf else None
    mine = mark is not None and (mark.name, mark.state) == (kept.get("project"), kept.get("state"))
    here = place is not None and mine
    pid = pve.first_process(vmid, place) if here and place else None
    return {
        **{key: kept.get(key) for key in ("id", "vmid", "kind", "name", "image")},
        **dict.fromkeys(("image_id", "exit_code", "oom_killed", "error", "finished", "engine_started")),
        "running": here,
        "paused": False,
        "pid": pid,
        "started": None,
        "gone": None if unknown else not mine,
        "unknown": unknown,
        "differs": _differs(kept, conf, run_path) if conf and mine and here else [],
    }


def _differs(kept: dict[str, Any], conf: pct_conf.Conf, run_path: str) -> list[list[str | None]]:
    """How the configuration that is there differs from what its release says for this run."""
    try:
        template = Path(kept["conf"]).read_text(encoding="utf-8", errors="surrogateescape")
        made = status.RunDir(run_path).run()
    except (OSError, ValueError, KeyError):
        return []
    mark = pct_conf.Mark(kept["project"], kept["release"], kept["state"])
    secrets = made.secrets_file if made else None
    rootfs = conf.values.get("rootfs", "")
    wanted = pct_conf.parse(
        pct_conf.complete(template, run=run_path, secrets=secrets, mark=mark, rootfs=rootfs)
    )
    found: list[list[str | None]] = [list(item) for item in pct_conf.differences(conf, wanted)]
    if conf.pending:
        found.append(["[pve:pending]", "changes that wait for the next start", None])
    return found


def _last(path: Path) -> list[str]:
    try:
        text = path.read_bytes()[-8192:].decode("utf-8", "replace")
    except OSError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()][-10:]
