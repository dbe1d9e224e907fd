"""Containers of ours on a Proxmox host: found, made, tried out, removed. Runs ON the host.

Which one is meant says a dict: {name, release, state} as in its mark (`pct_conf.Mark`), conf (the file of the
release that it is configured from), pct (the program) and image (the template). A container is touched only
if its configuration has our mark, or while it has none yet and we have written down that we make it.
Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deploy import machine, pct_conf, procfs, pve
from deploy.errors import DeployError
from deploy.pct_conf import Mark
from trainer import status

MAKING = "making.json"  # below the name: which container is being made
CREATE_TIMEOUT = 1800.0  # seconds; gigabytes are unpacked, maybe onto a storage on a network
TIMEOUT = 60.0  # seconds, for what Proxmox does in seconds
TRIAL_TIMEOUT = 180.0  # seconds; the trainer looks at its settings
IDLE = "/bin/sleep 600"  # what a trial's container does, which ends so if nobody else ends it
SIGN_OF_LIFE = 15.0  # seconds between two while one is made
TRIES = 5  # ids that somebody else took in the meantime
SPACE = re.compile(
    r"no space left|not enough|out of space|insufficient|disk quota|cannot allocate", re.IGNORECASE
)
TEMPLATE = re.compile(
    r"does not exist|no such (file|volume)|unable to parse|unrecognized|not look like a template|\btar\b|"
    r"unable to detect|extract|OCI",
    re.IGNORECASE,
)

Progress = Callable[[str], None]


def silent(text: str) -> None:
    """A progress report that nobody reads."""


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
        conf = _read(vmid)
        if conf and conf.mark == wanted and conf.values.get("lock") != "create" and "rootfs" in conf.values:
            return vmid
    return None


def ours(vmid: int, state: str) -> Mark | None:
    """Whose a container is, if it is one of this state root's."""
    conf = _read(vmid)
    mark = conf.mark if conf else None
    return mark if mark and os.path.realpath(mark.state) == os.path.realpath(state) else None


def _read(vmid: int) -> pct_conf.Conf | None:
    try:
        return pct_conf.read(pve.conf_path(vmid))
    except OSError:
        return None


# -- making one --------------------------------------------------------------------------------------------


def existing(which: dict[str, Any], progress: Progress = silent) -> int | None:
    """The container of a release, if it is there. What a deploy that was killed has begun is gone then."""
    clear_half_made(which["state"], which["name"], progress)
    return find(which)


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
        code, out, _ = pve.run("pvesh", "get", "/cluster/nextid", timeout=TIMEOUT)
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
    for key in (
        "arch",
        "ostype",
        "hostname",
        "memory",
        "swap",
        "unprivileged",
        "features",
        "cores",
        "onboot",
    ):
        if key in values:
            argv += [f"--{key}", values[key]]
    argv += ["--description", str(mark_of(which))]
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
    problem = None if code == 0 and find(which) == vmid else _cause(err) or _cause(out) or f"exit code {code}"
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


def _cause(text: str) -> str:
    """Of all that a failing `pct` prints, the line that says why."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if SPACE.search(line)] or [
        line for line in lines if re.search(r"unable|error|fail|cannot|not |4\d\d ", line, re.IGNORECASE)
    ]
    return re.sub(r"command '(\S+) .*' failed", r"\1 failed", (telling or lines or [""])[-1])


def _sentence(vmid: int, problem: str, make: dict[str, Any]) -> str:
    head = f"container {vmid} could not be made ({problem})"
    storage = make["rootfs"].partition(":")[0]
    if SPACE.search(problem):
        return (
            f"{head}: free some of storage {storage} (fab prune removes old containers), or lower pct: rootfs"
        )
    if TEMPLATE.search(problem):
        return f"{head}: is {make['template']} a whole template? fab image.build --for pct makes one anew"
    return f"{head}; nothing of it is left"


def _remove_half(vmid: int, state: str) -> None:
    """Remove what a `pct create` of ours has left; a container that is not ours is never touched."""
    conf = _read(vmid)
    if conf is None:
        return
    bare = not (set(conf.values) - {"lock", "arch"})  # how a container begins that is being made
    if not (bare and conf.values.get("lock") == "create") and ours(vmid, state) is None:
        return
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        if conf.values.get("lock"):
            pve.run("pct", "unlock", str(vmid), timeout=TIMEOUT)
        every = ("--force", "1", "--purge", "1", "--destroy-unreferenced-disks", "1")
        pve.run("pct", "destroy", str(vmid), *every, timeout=TIMEOUT)
    left = _read(vmid)
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
        conf = _read(vmid)
        if conf is None or ours(vmid, state) is None or conf.values.get("lock"):
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


# -- what it is configured from ----------------------------------------------------------------------------


def configure(vmid: int, which: dict[str, Any], run: str, secrets: str | None, change: Any = None) -> None:
    """Write a container's whole configuration for a run. Raises OSError, or DeployError if it is not ours."""
    template = Path(which["conf"]).read_text(encoding="utf-8", errors="surrogateescape")
    with pct_conf.locked(vmid):
        there = _read(vmid)
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
        conf = _read(vmid)
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
    conf = _read(vmid)
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
            raise DeployError(
                f"container {vmid} does not start: {_cause(err) or _cause(out) or f'exit code {code}'}"
            )
        yield
    finally:
        if vmid in pve.active():
            stop(vmid)


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
    conf = _read(vmid)
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
    code, out, err = _pct("destroy", str(vmid), "--purge", "1", timeout=CREATE_TIMEOUT)
    return None if code == 0 else _cause(err) or _cause(out) or f"pct destroy ended with {code}"
