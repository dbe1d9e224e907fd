"""Containers of ours on a Proxmox host: found, configured, tried out, removed. Runs ON the host.

Which one is meant says a dict: {name, release, state} as in its mark (`pct_conf.Mark`), conf (the file of the
release that it is configured from), pct (the program) and image (the template). A container is touched only
if its configuration has our mark, or while it has none yet and we have written down that we make it.
Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploy import machine, pct_conf, pve
from deploy.errors import DeployError
from deploy.pct_conf import Mark

DESTROY_TIMEOUT = 600.0  # seconds; gigabytes may have to be freed
TIMEOUT = 60.0  # seconds, for what Proxmox does in seconds
TRIAL_TIMEOUT = 180.0  # seconds; the trainer looks at its settings
IDLE = "/bin/sleep 600"  # what a trial's container does, which ends so if nobody else ends it


def drop_rights(inside: str) -> list[str]:
    """What turns a container's root into the user `inside` (uid:gid), who never gets more rights."""
    uid, gid = inside.split(":")
    return [
        *("setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups"),
        *("--no-new-privs", "--inh-caps=-all", "--bounding-set=-all", "--"),
    ]


def mark_of(which: dict[str, Any]) -> Mark:
    return Mark(which["name"], which["release"], which["state"])


def find(which: dict[str, Any]) -> int | None:
    """The container of a release; None if there is none that is whole."""
    wanted = mark_of(which)
    for vmid in pve.ids():
        conf = read(vmid)
        if conf and conf.mark == wanted and conf.values.get("lock") != "create" and "rootfs" in conf.values:
            return vmid
    return None


def ours(vmid: int, state: str) -> Mark | None:
    """Whose a container is, if it is one of this state root's."""
    conf = read(vmid)
    mark = conf.mark if conf else None
    return mark if mark and os.path.realpath(mark.state) == os.path.realpath(state) else None


def read(vmid: int) -> pct_conf.Conf | None:
    """A container's configuration; None if it has none that can be read."""
    try:
        return pct_conf.read(pve.conf_path(vmid))
    except OSError:
        return None


# -- what it is configured from ----------------------------------------------------------------------------


def configure(vmid: int, which: dict[str, Any], run: str, secrets: str | None, change: Any = None) -> None:
    """Write a container's whole configuration for a run. Raises OSError, or DeployError if it is not ours."""
    template = Path(which["conf"]).read_text(encoding="utf-8", errors="surrogateescape")
    with pct_conf.locked(vmid):
        there = read(vmid)
        if there is None:
            raise DeployError(f"container {vmid} is gone; fab deploy makes a new one")
        if there.mark != mark_of(which):
            raise DeployError(
                f"container {vmid} is not the one of release {which['release']} of {which['name']}"
            )
        if there.values.get("lock"):
            raise DeployError(
                f"container {vmid} is locked ({there.values['lock']}); wait for the end of that, or run "
                f"pct unlock {vmid}"
            )
        text = pct_conf.complete(
            template, run=run, secrets=secrets, mark=mark_of(which), rootfs=there.values["rootfs"]
        )
        pct_conf.write(pve.conf_path(vmid), change(text) if change else text)


# -- trying it out -----------------------------------------------------------------------------------------


def trial(vmid: int, which: dict[str, Any], asked: dict[str, Any]) -> None:
    """Start the container, look from inside, end it; `asked` is {run, secrets, user, environment, argv}.

    The user is the run's, as the host numbers it. If the run in progress is of the same release, the
    container works, and is only looked at. Raises DeployError with what is wrong.
    """
    if vmid in pve.active():
        conf = read(vmid)
        if conf is None or ("lxc.init.cmd", IDLE) not in conf.lxc:
            _look(vmid, which["name"], asked)
            return
        stop(vmid)  # a trial whose deploy was killed
    try:
        configure(vmid, which, asked["run"], asked["secrets"], _idle)
    except OSError as error:
        raise DeployError(f"container {vmid} could not be tried out: {error.strerror or error}") from None
    with _started(vmid):
        _look(vmid, which["name"], asked)


def _idle(text: str) -> str:
    """A configuration whose container does nothing, and reaches nobody."""
    lines = pct_conf.without(text, "net", "lxc.net").split("\n")
    return "\n".join(f"lxc.init.cmd: {IDLE}" if line.startswith("lxc.init.cmd:") else line for line in lines)


def _look(vmid: int, name: str, asked: dict[str, Any]) -> None:
    """Run the trial's program in a container that is up. Raises DeployError with what it says."""
    conf = read(vmid)
    shift = pve.ID_OFFSET if conf and conf.values.get("unprivileged") == "1" else 0
    inside = ":".join(str(int(part) - shift) for part in asked["user"].split(":"))
    # What `pct exec` starts has nothing of the container's environment, and must have nothing of ours.
    variables = [f"{key}={value}" for key, value in sorted(asked["environment"].items())]
    keep = ["--keep-env", "0"] if pve.keep_env() else []
    argv = ["env", "-i", *variables, *drop_rights(inside), *asked["argv"]]
    try:
        code, _, err = _pct("exec", str(vmid), *keep, "--", *argv, timeout=TRIAL_TIMEOUT)
    except OSError as error:
        raise DeployError(f"container {vmid} could not be tried out: {error.strerror or error}") from None
    if code:
        last = pve.last_line(err) or f"exit code {code}"
        raise DeployError(f"container {vmid} of {name}: {last.removeprefix('error: ')}")


@contextlib.contextmanager
def _started(vmid: int) -> Iterator[None]:
    code, out, err = _pct("start", str(vmid))
    try:
        if code:
            why = why_not(vmid, pve.cause(err) or pve.cause(out) or f"exit code {code}")
            raise DeployError(f"container {vmid} does not start: {why}")
        yield
    finally:
        if vmid in pve.active():
            stop(vmid)


def why_not(vmid: int, said: str) -> str:
    """Why a container did not start: `said` by Proxmox, unless it lacks what Proxmox does not name."""
    conf = read(vmid)
    gone = [path for path in pct_conf.sources(conf) if not os.path.lexists(path)] if conf else []
    if not gone:
        return said
    device = gone[0].startswith("/dev/") and not gone[0].startswith("/dev/shm/")
    mend = "run nvidia-modprobe -u -c0" if device else "put it back, or let fab deploy bring it again"
    return f"{gone[0]}, which it is given, is not there any more ({said}); {mend}"


def stop(vmid: int) -> None:
    """End a container at once."""
    _pct("stop", str(vmid))


def _pct(*words: str, timeout: float = TIMEOUT) -> tuple[int, str, str]:
    try:
        return pve.run("pct", *words, timeout=timeout)
    except subprocess.TimeoutExpired:
        return 124, "", f"pct {words[0]} did not end within {timeout:g} s"


# -- removing ----------------------------------------------------------------------------------------------


def discard(vmid: int, which: dict[str, Any], run_path: str | None) -> None:
    """Remove a container that was made for nothing; not if a switch has accepted the run that it is for."""
    conf = read(vmid)
    if run_path and os.path.exists(run_path):
        return
    if conf and conf.mark == mark_of(which) and vmid not in pve.active():
        _pct("destroy", str(vmid), "--purge", "1")


def listing(state: str) -> list[dict[str, Any]]:
    """The containers of this state root: ``{"id", "name", "release", "running"}``."""
    found, running = [], pve.active()
    for vmid in pve.ids():
        mark = ours(vmid, state)
        if mark:
            found.append({"id": vmid, "name": mark.name, "release": mark.release, "running": vmid in running})
    return found


def remove(vmid: int, state: str) -> str | None:
    """Remove a container of `listing`; why not, if it stays. The caller holds the name's deploy lock."""
    mark = ours(vmid, state)
    if mark is None:
        return "it is not ours"
    if vmid in pve.active():
        return "it is running"
    home = Path(state, "names", mark.name)
    if mark.release in (machine.link(home / "current"), machine.link(home / "previous")):
        return "its release is current or previous"
    code, out, err = _pct("destroy", str(vmid), "--purge", "1", timeout=DESTROY_TIMEOUT)
    return None if code == 0 else pve.cause(err) or pve.cause(out) or f"pct destroy ended with {code}"
