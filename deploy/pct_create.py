"""Making a container of ours on a Proxmox host, to its end or not at all. Runs ON the host.

Which container is meant says a dict, see `deploy.pct_host`. While it is made, a note beside the name's
releases says so: what a deploy that was killed has left is waited for, or removed. Standard library only,
Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deploy import pct_conf, pct_host, procfs, pve
from deploy.errors import DeployError
from trainer import status

MAKING = "making.json"  # below the name: which container is being made
CREATE_TIMEOUT = 1800.0  # seconds; gigabytes are unpacked, maybe onto a storage on a network
SIGN_OF_LIFE = 15.0  # seconds between two while one is made
TRIES = 5  # ids that somebody else took in the meantime
# What Proxmox is told when it makes a container; the rest is written down after that, and tried out. Of the
# network it must be told now: a trial has none, so a mistake would show when the run before is over.
CREATED_WITH = (
    *("arch", "ostype", "hostname", "memory", "swap", "unprivileged", "features", "cores", "onboot"),
    "net0",
)
TEMPLATE = re.compile(
    r"does not exist|no such (file|volume)|unable to parse|unrecognized|not look like a template|\btar\b|"
    r"usernsexec|unable to detect|extract|OCI",
    re.IGNORECASE,
)

Progress = Callable[[str], None]


def silent(text: str) -> None:
    """A progress report that nobody reads."""


def existing(which: dict[str, Any], progress: Progress = silent) -> int | None:
    """The container of a release, if it is there. What a deploy that was killed has begun is gone then."""
    clear_half_made(which["state"], which["name"], progress)
    return pct_host.find(which)


def make(which: dict[str, Any], make: dict[str, Any], progress: Progress = silent) -> int:
    """Make the container of a release; its id. `make` is {template, rootfs, range}.

    Raises DeployError, and leaves nothing, if it cannot be made.
    """
    say = progress
    template = Path(which["conf"]).read_text(encoding="utf-8", errors="surrogateescape")
    refused: set[int] = set()
    for _ in range(TRIES):
        vmid = free_id(make["range"], refused)
        say(f"making container {vmid} from {make['template']}")
        problem = _create(vmid, which, make, pct_conf.parse(template), say)
        if problem is None:
            return vmid
        if "already exists" not in problem:
            raise DeployError(_sentence(vmid, problem, make))
        refused.add(vmid)
    raise DeployError(f"no id is left for a container of {which['name']}; widen pct: vmid in fabric.yaml")


def free_id(range_: list[int] | None, refused: set[int]) -> int:
    """An id that no guest of the cluster has."""
    taken = {int(key) for key in pve.guests() if key.isdigit()} | set(pve.ids()) | refused
    if range_ is not None:
        found = next((vmid for vmid in range(range_[0], range_[1] + 1) if vmid not in taken), None)
        if found is None:
            raise DeployError(
                f"every id from {range_[0]} to {range_[1]} is taken; widen pct: vmid in fabric.yaml, or let "
                "fab prune remove old containers"
            )
        return found
    try:
        code, out, _ = pve.run("pvesh", "get", "/cluster/nextid", timeout=pct_host.TIMEOUT)
        word = out.strip().strip('"')
        if code == 0 and word.isdigit() and int(word) not in taken:
            return int(word)
    except (OSError, subprocess.TimeoutExpired):
        pass
    return next(vmid for vmid in range(100, 1000000) if vmid not in taken)


def _create(
    vmid: int, which: dict[str, Any], make: dict[str, Any], conf: pct_conf.Conf, say: Progress
) -> str | None:
    """Run `pct create`; None, or why it failed, and then nothing of it is left."""
    if os.path.lexists(pve.conf_path(vmid)):
        return f"CT {vmid} already exists"
    values = conf.values
    program = which["pct"]
    argv = [program, "create", str(vmid), make["template"], "--rootfs", make["rootfs"]]
    for key in CREATED_WITH:
        if key in values:
            argv += [f"--{key}", values[key]]
    argv += ["--description", str(pct_host.mark_of(which))]
    note = Path(which["state"], "names", which["name"], MAKING)
    # It stays if nobody listens to us any more: `pct create` goes on, and the next deploy looks after it.
    status.write_json(note, {"vmid": vmid, "release": which["release"]})
    try:
        code, out, err = _patiently(argv, say)
    except BrokenPipeError:
        raise
    except OSError as error:
        note.unlink()
        raise DeployError(f"{which['pct']} cannot be started: {error.strerror}") from None
    problem = (
        None
        if code == 0 and pct_host.find(which) == vmid
        else pve.cause(err) or pve.cause(out) or f"exit code {code}"
    )
    if problem is not None and "already exists" not in problem:  # that one is somebody else's
        _remove_half(vmid, which["state"])
    note.unlink()
    return problem


def _patiently(argv: list[str], say: Progress) -> tuple[int, str, str]:
    """Run a program that may take long: (exit code, stdout, stderr). Raises OSError."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=pve.environment(),
            start_new_session=True,
        )
        deadline = time.monotonic() + CREATE_TIMEOUT
        while True:
            try:
                code = process.wait(SIGN_OF_LIFE)
                break
            except subprocess.TimeoutExpired:
                say("")
                if time.monotonic() > deadline:
                    os.killpg(process.pid, signal.SIGKILL)
                    return 124, "", f"it did not end within {CREATE_TIMEOUT:g} s"
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
    return code, texts[0], texts[1]


def _sentence(vmid: int, problem: str, make: dict[str, Any]) -> str:
    head = f"container {vmid} could not be made ({problem})"
    storage = make["rootfs"].partition(":")[0]
    if pve.SPACE.search(problem):
        return (
            f"{head}: free some of storage {storage} (fab prune removes old containers), or lower pct: rootfs"
        )
    if TEMPLATE.search(problem):
        return f"{head}: is {make['template']} a whole template? fab image.build --for pct makes one anew"
    return f"{head}; nothing of it is left"


def _remove_half(vmid: int, state: str) -> None:
    """Remove what a `pct create` of ours has left; a container that is not ours is never touched."""
    conf = pct_host.read(vmid)
    if conf is None:
        return
    bare = not (set(conf.values) - {"lock", "arch"})  # how a container begins that is being made
    if not (bare and conf.values.get("lock") == "create") and pct_host.ours(vmid, state) is None:
        return
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        if conf.values.get("lock"):
            pve.run("pct", "unlock", str(vmid), timeout=pct_host.TIMEOUT)
        every = ("--force", "1", "--purge", "1", "--destroy-unreferenced-disks", "1")
        pve.run("pct", "destroy", str(vmid), *every, timeout=pct_host.TIMEOUT)
    left = pct_host.read(vmid)
    if left and not (set(left.values) - {"arch"}):  # without a root there is nothing that pct could destroy
        with contextlib.suppress(OSError):
            os.unlink(pve.conf_path(vmid))


def clear_half_made(state: str, name: str, say: Progress) -> None:
    """Remove what was being made when a deploy was killed; the caller holds the name's deploy lock.

    One that Proxmox still makes is waited for: the deploy may go on with it.
    """
    note = Path(state, "names", name, MAKING)
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        vmid = int(status.read_json(note)["vmid"])  # type: ignore[index]
        told = 0.0
        while _being_made(vmid):
            if time.monotonic() - told > SIGN_OF_LIFE:
                say("" if told else f"waiting for container {vmid}, which an earlier deploy began to make")
                told = time.monotonic()
            time.sleep(0.2)
        conf = pct_host.read(vmid)
        if conf is None or pct_host.ours(vmid, state) is None or conf.values.get("lock"):
            _remove_half(vmid, state)
        note.unlink()


def _being_made(vmid: int) -> bool:
    """Whether a `pct create` of this id is at work still; it goes on when its client has gone."""
    worker = f":vzcreate:{vmid}:".encode()
    for pid in procfs.processes():
        words = procfs.read(pid, "cmdline").split(b"\0")
        if worker in words[0] or any(
            os.path.basename(word) == b"pct" and words[at + 1 : at + 3] == [b"create", str(vmid).encode()]
            for at, word in enumerate(words[:4])
        ):
            return True
    return False
