"""A process that somebody started by hand: what it is, and how it becomes a run without being touched.

Runs ON the host, asked by `deploy.adopt`; what belongs to an adopted run in progress, and how it ends, is
said here for the probe and the switch. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import stat
import time
from typing import Any

from deploy import adopt_host, mask, new_run, procfs
from deploy.errors import DeployError
from trainer import status

PYTHON = re.compile(r"(python|pypy)\d*(\.\d+)*t?")
WAITING = re.compile(
    r"(ba|da|z|k|a)?sh|tini|docker-init|nohup|time|timeout|tee|sudo|su|script|tmux.*|screen|sshd.*"
)
FIRST_SEGMENT = "00000000000000000000.log"
SHOWN = 100  # characters of a command
OF_A_LAUNCHER = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|LOCAL_WORLD_SIZE|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|ROLE_NAME|"
    r"TORCH_NCCL_ASYNC_ERROR_HANDLING"
)


def look(pid: int, label: str, state_root: str) -> dict[str, Any]:
    """What a run's file for process `pid` needs: see the keys below. Raises DeployError.

    `label` is what the host is called, `state_root` where its runs lie. Of the environment the
    answer has what a login here has not, or has otherwise; None in place of the value of a secret.
    """
    table = procfs.processes()
    pid, notes = _meant(pid, label, table, state_root)
    words = [os.fsdecode(word) for word in procfs.read(pid, "cmdline").split(b"\0")[:-1]]
    variables = _environment(pid, label)
    directory = procfs.link(pid, "cwd")
    if not words or directory is None:
        raise DeployError(f"process {pid} on {label} is just ending, so there is nothing to adopt")
    if directory.endswith(" (deleted)"):
        notes.append(f"its working directory {directory[:-10]} was removed; correct working_directory:")
        directory = directory[:-10]
    notes += _user_of(pid)
    login = adopt_host.login()["environment"]
    ranks = procfs.ranks(pid)
    changed = {
        key: None if adopt_host.secret(key, value) else value  # (which leaves the process for nobody)
        for key, value in variables.items()
        if login.get(key) != value
        and not adopt_host.of_a_terminal(key)
        and not (ranks and OF_A_LAUNCHER.fullmatch(key))
        and key not in ("HOME", "USER", "LOGNAME", "SHELL", "LANG")
    }
    out, said = _log_of(pid, table)
    return {
        "pid": pid,
        "argv": words,
        "program": _program(pid, words[0], variables.get("PATH", ""), directory),
        "directory": directory,
        "environment": changed,
        "stdout": out,
        "notes": [*notes, *said],
        "identity": {**identity(pid), "stdout": out, "argv0": words[0]},
    }


def identity(pid: int) -> dict[str, Any]:
    """What tells a process from every other one that ever has its number."""
    seen = procfs.stat(pid)
    return {"pid": pid, "start": seen["start"] if seen else None, "boot": status.boot_id()}


def _meant(pid: int, label: str, table: dict[int, dict[str, Any]], state_root: str) -> tuple[int, list[str]]:
    """The Python that is meant by a pid: itself, or the only one that it has started; what to say of it."""
    seen = table.get(pid)
    if seen is None or seen["state"] in "ZX":
        raise DeployError(f"there is no process {pid} on {label} (any more); correct --pid")
    if procfs.is_kernel(procfs.read(pid, "stat")):
        raise DeployError(f"process {pid} on {label} is a thread of the kernel, and no training")
    notes: list[str] = []
    who = f"process {pid} on {label} ({_command(pid)})"
    _refuse_ours(pid, who, state_root)
    if not _python(pid):
        if not WAITING.fullmatch(_name_of(pid)):
            raise DeployError(
                f"{who} is no Python, so nothing of it can be adopted; give the pid of the training"
            )
        found = _first_pythons(pid, table)
        if not found:
            raise DeployError(
                f"{who} is no Python and has started none that runs; give the pid of the training"
            )
        if len(found) > 1:
            each = ", ".join(f"{one} ({_command(one)})" for one in found[:4])
            raise DeployError(
                f"{who} has started {len(found)} Pythons: {each}; give --pid of the one that is meant"
            )
        pid = found[0]
        _refuse_ours(pid, f"process {pid} on {label} ({_command(pid)})", state_root)
    above = table.get(table[pid]["ppid"])
    if above and procfs.ranks(pid).get("WORLD_SIZE", 1) > 1 and _python(above["pid"]):
        raise DeployError(
            f"process {pid} on {label} is rank {procfs.ranks(pid).get('RANK', '?')} of a training that "
            f"process {above['pid']} ({_command(above['pid'])}) has started; adopt that one: "
            f"--pid {above['pid']}"
        )
    if above and re.fullmatch(r"(ba|da|z|k|a)?sh", _name_of(above["pid"])):
        words = procfs.read(above["pid"], "cmdline").split(b"\0")[1:-1]
        if words and not words[0].startswith(b"-l"):
            notes.append(
                f"{_command(above['pid'])} (process {above['pid']}) started it and goes on when it ends; "
                "if that would start it again, end that one before fab deploy"
            )
    if procfs.link(pid, "ns/mnt") not in (None, procfs.link(os.getpid(), "ns/mnt")):
        raise DeployError(
            f"process {pid} on {label} lives in a container, where its paths mean something else; adopt it "
            "from inside (container: of the host in fabric.yaml), or by --script"
        )
    return pid, notes


def _refuse_ours(pid: int, who: str, state_root: str) -> None:
    own = procfs.run_of(pid)
    if own is not None:
        run_id = os.path.basename(own)
        raise DeployError(
            f"{who} belongs to run {run_id}, which Drafthouse started itself; fab status shows it"
        )
    found = identity(pid)
    for run in status.list_runs(f"{state_root}/runs"):
        told = adopted(run)
        if (
            told
            and all(told.get(key) == found[key] for key in found)
            and not (run.path / "exit.json").exists()
        ):
            name = status.split_run_id(run.path.name)[1]
            raise DeployError(
                f"{who} is adopted already, as run {run.path.name}; fab status --name {name} shows it"
            )


def adopted(run: status.RunDir) -> dict[str, Any] | None:
    """What run.json says of the process that was adopted as this run; None for a run of our own."""
    with contextlib.suppress(ValueError, OSError):
        made = run.run()
        return made.adopted if made else None
    return None


def _environment(pid: int, label: str) -> dict[str, str]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            data = file.read()
    except PermissionError:
        owner = _user(os.stat(f"/proc/{pid}").st_uid)
        raise DeployError(
            f"process {pid} on {label} belongs to {owner}, so its environment cannot be read; adopt it as "
            "that user, or as root"
        ) from None
    except OSError:
        data = b""
    pairs = [os.fsdecode(item).partition("=") for item in data.split(b"\0") if item]
    return {key: value for key, _, value in pairs}


def _user_of(pid: int) -> list[str]:
    """What to say of a process of somebody else's: the run that replaces it is ours."""
    with contextlib.suppress(OSError):
        info = os.stat(f"/proc/{pid}")
        if info.st_uid != os.geteuid():
            theirs, ours = _user(info.st_uid), _user(os.geteuid())
            return [
                f"it runs as {theirs}, but a run runs as {ours}: what it writes will be {ours}'s, and ~ is "
                "another directory; to keep both, adopt and deploy it as that user, or begin command: with "
                f"env HOME=… setpriv --reuid {info.st_uid} --regid {info.st_gid} --init-groups"
            ]
    return []


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"uid {number}"


def _program(pid: int, word: str, path: str, directory: str) -> str:
    """The program's whole path: by its own first word, so that a venv's Python stays the venv's."""
    exe = (procfs.link(pid, "exe") or "").replace(" (deleted)", "")
    found = adopt_host.which(word, path, directory)
    if found and (not exe or os.path.realpath(found) == os.path.realpath(exe)):
        return found
    return exe or found or word


def _log_of(pid: int, table: dict[int, dict[str, Any]]) -> tuple[str | None, list[str]]:
    """(the file that it prints into, or that tee writes for it; what to say if there is none)."""
    target = procfs.link(pid, "fd/1") or ""
    if target.startswith("pipe:"):
        for other in table:
            if other != pid and _name_of(other) == "tee" and procfs.link(other, "fd/0") == target:
                for number in sorted(os.listdir(f"/proc/{other}/fd"), key=int):
                    path = procfs.link(other, f"fd/{number}") or ""
                    if int(number) > 2 and _regular(other, number, path):
                        return path, []
    if _regular(pid, "1", target):
        return target, []
    kinds = {"pipe:": "a pipe", "/dev/pts/": "a terminal", "/dev/tty": "a terminal", "socket:": "a socket"}
    what = next((word for start, word in kinds.items() if target.startswith(start)), target or "nothing")
    if target.endswith(" (deleted)"):
        what = f"{target[:-10]}, which was removed"
    return None, [f"it prints into {what}, so fab tail has nothing of it until fab deploy replaces it"]


def _regular(pid: int, number: str, path: str) -> bool:
    if not path.startswith("/") or path.endswith(" (deleted)"):
        return False
    with contextlib.suppress(OSError):
        return stat.S_ISREG(os.stat(f"/proc/{pid}/fd/{number}").st_mode)
    return False


def _python(pid: int) -> bool:
    exe = (procfs.link(pid, "exe") or "").replace(" (deleted)", "")
    return bool(PYTHON.fullmatch(os.path.basename(exe))) or b"/libpython" in procfs.read(pid, "maps")


def _name_of(pid: int) -> str:
    word = procfs.read(pid, "cmdline").split(b"\0")[0]
    return os.path.basename(os.fsdecode(word)).lstrip("-").partition(":")[0]


def _command(pid: int) -> str:
    words = mask.words(os.fsdecode(procfs.read(pid, "cmdline")).split("\0")[:-1])
    shown = "".join(char if char.isprintable() else " " for char in " ".join(words))
    return shown if len(shown) <= SHOWN else f"{shown[: SHOWN - 1]}…"


def _first_pythons(pid: int, table: dict[int, dict[str, Any]]) -> list[int]:
    """The Pythons below a process that have no Python between it and themselves."""
    found = []
    for one in sorted(
        other for other, item in table.items() if item["ppid"] == pid and item["state"] not in "ZX"
    ):
        found += [one] if _python(one) else _first_pythons(one, table)
    return found


# -- as a run ----------------------------------------------------------------------------------------------


def register(state_root: str, name: str, who: dict[str, Any], run: dict[str, Any]) -> str:
    """Make a run of `name` of a process that goes on; its id. Nothing is sent to the process.

    Raises DeployError if it is gone meanwhile, or if a run of the name is in progress.
    """
    if not status.same_process(who):
        raise DeployError(f"process {who['pid']} has ended meanwhile, so nothing was adopted")
    for other in status.list_runs(f"{state_root}/runs", name):
        if other.alive():
            raise DeployError(
                f"run {other.path.name} of {name} is in progress, so no other process can be adopted as "
                f"{name}; choose another --name"
            )
    visible = str(run["environment"].get("CUDA_VISIBLE_DEVICES", ""))
    devices = visible.split(",") if re.fullmatch(r"\d+(,\d+)*", visible) else None
    made = new_run.make(
        state_root, {**run, "name": name, "adopted": who, "devices": devices, "restart_attempts": 0}
    )
    directory = status.RunDir(made["path"])
    try:
        directory.log.mkdir()
        if who.get("stdout"):
            os.symlink(who["stdout"], directory.log / FIRST_SEGMENT)
        booted = procfs.boot_time()
        began = booted + who["start"] / procfs.TICK if booted else None
        kills = procfs.oom_kills()
        directory.write_launch(
            status.Launch(
                who["pid"], 1, who["pid"], began, output=0, offset=0, oom_kills=kills, time=time.time()
            )
        )
    except OSError as error:
        new_run.discard(made["path"])
        raise DeployError(f"{made['path']} cannot be written: {error.strerror}") from None
    return str(made["run"]["run_id"])


def tree(pid: int) -> dict[int, int]:
    """A process and its descendants, by pid with the start of each, which tells it from a later one."""
    table = procfs.processes()
    own = table.get(pid)
    session = pid if own and own["session"] == pid else 0
    return {one: table[one]["start"] for one in procfs.of_run(pid, session, table)}


def send(pid: int, start: int, number: int) -> bool:
    """Signal a process if it is the one that began at `start`, whatever happens to its number meanwhile.

    Whether it was there. Raises PermissionError.
    """
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except (AttributeError, OSError):
        handle = None  # a kernel before 5.3
    try:
        seen = procfs.stat(pid)
        if seen is None or seen["start"] != start:
            return False
        if handle is None:
            os.kill(pid, number)
        else:
            import signal

            signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        if handle is not None:
            os.close(handle)
    return True


def living(known: dict[int, int]) -> dict[int, int]:
    """Those of `known` that are there still; one that only waits to be waited for is not."""
    found = {}
    for pid, start in known.items():
        seen = procfs.stat(pid)
        if seen and seen["start"] == start and seen["state"] not in "ZX":
            found[pid] = start
    return found
