"""The switch: from the old run of a name to the new one, as one job that nobody needs to watch.

Runs ON the host, detached: a session of its own, no terminal, no pipe to whoever started it. Each step is
recorded in a JSON file beside the run as it happens; `deploy.switch` starts the job and reads that file.
Standard library only, Python >= 3.9.

    python3 <directory of this tool> SPEC.json [--attached]

One JSON object comes on stdout, {"accepted": bool, "message": str, "record": path}, once the job has the lock
and nothing more can refuse it. The specification (``-``: from stdin) says which run to stop and what to
start:

===============================  ==========================================================================
state_root, name, by             whose switch it is
old_run_path                     the run to stop, or null; ``grace_seconds``, ``checkpoint_timeout_seconds``
start                            null: stop only; else what to start, see below
run_path, release_id             the new run's directory, with its run.json, and its release
first_heartbeat_timeout_seconds  from the start to the first line, and again to the first heartbeat
heartbeats                       false for a command that sends none
settle_seconds                   how long such a command has to live after its first line; 0: not watched
wait_first_step                  true: watch until the first step (``first_step_timeout_seconds``)
rollback                         {release_id, start, run}: what to start again, as the next run, if the new
                                 one dies before its first step; from the boot.json of the run that was
record                           the file that tells what was done
===============================  ==========================================================================

``start`` is {argv, environment, working_directory}: launch itself or, with ``container`` {project, service,
image}, a command that makes a container and ends (with a ``vmid`` among these, see `deploy.pct_host`, one
that starts a container of Proxmox). ``user`` [uid, gid] is whom a restored run belongs to, ``devices``
(indices or UUIDs) have to be free before anything is started.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from deploy import contained, contained_pct, engine, files, new_run, probe
from deploy.errors import DeployError
from deploy.switch_record import Record
from deploy.switch_steps import Failed, Switch, wait
from trainer import status

ENGINE_PATIENCE = 10.0  # seconds that the engine has to answer before anything is touched
LOCK_PATIENCE = 1.0  # seconds: a probe that looks at the lock holds it for a moment


class Refused(Exception):
    """The job cannot begin; nothing was changed."""


class Begun(Exception):
    """The job has begun already: its specification came twice, the second time after a lost connection."""


# -- before anything is touched ----------------------------------------------------------------------------


def claim(spec: dict[str, Any]) -> int:
    """Take the name's switch lock and check what can be checked. The lock's descriptor.

    Raises Refused, or Begun.
    """
    name = Path(spec["state_root"]) / "names" / spec["name"]
    os.makedirs(name, exist_ok=True)
    lock = take(spec, name)
    try:
        if spec["start"] and os.path.exists(spec["record"]):
            raise Begun  # and has let go of the lock, since its run lives or it has failed
        old = spec["old_run_path"]
        for run in status.list_runs(Path(spec["state_root"]) / "runs", spec["name"]):
            if run.alive() and not (old and os.path.samefile(run.path, old)):
                raise Refused(f"run {run.path.name} is in progress, which this switch was not planned for")
        if spec["start"]:
            check_start(spec, name)
    except BaseException:
        os.close(lock)
        raise
    return lock


def take(spec: dict[str, Any], name: Path) -> int:
    """Take the name's switch lock and say in it what it is for. Raises Refused, or Begun."""
    lock = os.open(name / "switch.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    if not wait(lambda: files.take(lock), LOCK_PATIENCE):
        other = files.words(lock)
        os.close(lock)
        if spec["start"] and spec["run_path"] and other.get("run_path") == spec["run_path"]:
            raise Begun
        who = f"{other['what']} (by {other['by']})" if "what" in other and "by" in other else "switch"
        raise Refused(f"another {who} of {spec['name']} is under way")
    files.say(lock, lock_words(spec))
    return lock


def lock_words(spec: dict[str, Any]) -> dict[str, Any]:
    """What the switch lock is for, and where it is told how it goes on, for those who find it held."""
    return {
        "what": "switch" if spec["start"] else "stop",
        "run_path": spec["run_path"] or spec["old_run_path"],
        "record": spec["record"],
        "by": spec["by"],
        "task": spec.get("task"),
        "since": time.time(),
        "pid": os.getpid(),
    }


def check_start(spec: dict[str, Any], name: Path) -> None:
    """What the start needs must be there before the old run is touched."""
    start = spec["start"]
    if not Path(spec["run_path"], "run.json").is_file():
        raise Refused(f"{spec['run_path']} has no run.json")
    if not shutil.which(start["argv"][0], path=start["environment"].get("PATH")):
        raise Refused(f"there is no program {start['argv'][0]}")
    if not (name / "releases" / spec["release_id"]).is_dir():
        raise Refused(f"release {spec['release_id']} of {spec['name']} is not on this host")
    if contained.is_pct(start):
        problem = contained_pct.check(start)
        if problem:
            raise Refused(problem)
    elif start.get("container"):
        check_engine(start, spec["state_root"])


def check_release(path: Path) -> None:
    """A release that is started again must be what was deployed; a deploy has looked at its own already."""
    changed = probe.changed(path) if path.is_dir() else []  # (one that is gone is told as such)
    if changed:
        raise Refused(f"{changed[0]} of release {path.name} was changed on the host since it was deployed")


def check_engine(start: dict[str, Any], state_root: str) -> None:
    """An engine that hangs, lacks the image or is busy with somebody else's run must show before the stop."""
    one = engine.Engine(
        engine.address(start["environment"]), timeout=start.get("engine_seconds", ENGINE_PATIENCE)
    )
    image, project = start["container"].get("image"), start["container"]["project"]
    try:
        one.ping()
        other = contained.foreign(one.containers(project), project, state_root)
        if image:
            one.image(image)
    except engine.EngineError as error:
        if error.status == 404:
            raise Refused(f"the engine has no image {image}: fab deploy builds or ships it") from None
        raise Refused(str(error)) from None
    if other:
        raise Refused(other)


# -- the job -----------------------------------------------------------------------------------------------


def perform(switch: Switch, record: Record) -> str:
    """Go through the steps; the outcome is recorded in any case."""
    try:
        for name, step in switch.steps():
            record.begin(name)
            outcome, detail = step()
            record.end_step(outcome, detail)
    except Exception as error:
        if not isinstance(error, Failed):
            traceback.print_exc()
            error = Failed(f"{type(error).__name__}: {error}")
        record.end_step("failed", str(error))
        restored = roll_back(switch, record) if switch.spec.get("rollback") and switch.died() else ""
        record.end("failed", error, restored)
    else:
        record.end("done")
    return str(record.value["outcome"])


def roll_back(switch: Switch, record: Record) -> str:
    """Start the release that ran before as a new run, and record it; what became of it, in words.

    It is a switch of its own, with its own record beside its own run.
    """
    spec, plan = switch.spec, switch.spec["rollback"]
    record.begin("rollback")
    told: dict[str, Any] = {"release_id": plan["release_id"], "run_path": None, "outcome": "failed"}
    record.value["rollback"] = told
    try:
        switch.started()  # gives the lock back, if the new run never lived
        inner = {
            **spec,
            "old_run_path": None,
            "release_id": plan["release_id"],
            "rollback": None,
            "wait_first_step": False,
            "settle_seconds": 0,  # it was live once
            "start": plan["start"],
            "run_path": None,
        }
        lock = take(inner, switch.name)
        try:
            for run in status.list_runs(Path(spec["state_root"]) / "runs", spec["name"]):
                if run.alive():
                    raise Refused(f"run {run.path.name} is in progress by now")
            check_release(switch.name / "releases" / plan["release_id"])
            run_path, start = restore(spec, plan)
            inner.update(run_path=run_path, start=start, record=f"{run_path}/switch.json")
            told["run_path"] = run_path
            files.say(lock, lock_words(inner))
            check_start(inner, switch.name)
        except BaseException:
            os.close(lock)
            raise
        own = Record(inner["record"], inner)
        again = Switch(inner, Lock(lock).release)
        again.restores = switch.links
        told["outcome"] = perform(again, own)
    except (Refused, DeployError, OSError, ValueError, KeyError, TypeError) as error:
        words = f"release {plan.get('release_id')} was not started again: {error}"
    else:
        words = f"release {plan['release_id']} runs again as {os.path.basename(run_path)}"
        if told["outcome"] != "done":
            words = f"release {plan['release_id']} was not restored: {own.value['reason']}"
    record.end_step("ok" if told["outcome"] == "done" else "failed", words)
    return words


def restore(spec: dict[str, Any], plan: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Make the run that starts the release before again; its directory, and its start with its own paths.

    Raises DeployError or OSError if it cannot be made.
    """
    before, start = plan["run"], plan["start"]
    old = status.RunDir(Path(spec["state_root"]) / "runs" / before["run_id"])
    secrets = None
    if before.get("secrets_file"):
        with open(before["secrets_file"], encoding="utf-8", errors="surrogateescape", newline="") as file:
            secrets = file.read()
    who = {"who": f"rollback of {spec['by']}", "origin": os.uname().nodename}
    made = new_run.make(spec["state_root"], {**before, **who}, secrets, owner=start.get("user"))
    run, path = made["run"], made["path"]
    changes = {str(old.path): path, before["run_id"]: run["run_id"]}
    if before.get("secrets_file"):
        changes[before["secrets_file"]] = run["secrets_file"]
    if run.get("working_directory"):
        run["working_directory"] = moved(run["working_directory"], changes)
        status.write_json(Path(path) / "run.json", run, durable=True)
    boot = status.read_json(old.path / "boot.json")
    if isinstance(boot, dict):  # so that it also starts again with the machine
        status.write_json(Path(path) / "boot.json", {**moved(boot, changes), "run": run}, mode=0o600)
    return path, moved(start, changes)


def moved(value: Any, changes: dict[str, str]) -> Any:
    """A JSON value in which what names a thing of the old run, or a file below it, names the new one's."""
    if isinstance(value, str):
        for old, new in changes.items():
            if value == old or value.startswith(old + "/"):
                return new + value[len(old) :]
        return value
    if isinstance(value, list):
        return [moved(item, changes) for item in value]
    if isinstance(value, dict):
        return {key: moved(item, changes) for key, item in value.items()}
    return value


class Lock:
    """The switch lock, given back once; a run that lives says by its own lock that it is there."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor: int | None = descriptor

    def release(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def detach(errors: str) -> int:
    """Go on as a process that nothing of the caller reaches. Returns, in that process, where to answer.

    The caller's process writes that answer to stdout and ends. Two forks: the first for a session of our own,
    the second so that this session can never get a terminal.
    """
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        with os.fdopen(reader, "rb") as answer:
            sys.stdout.buffer.write(answer.read())
        sys.stdout.flush()
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    try:
        error = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        error = null  # a full disk, or one that has become read-only; the record will tell
    for source, target in ((null, 0), (null, 1), (error, 2)):
        os.dup2(source, target)
    os.closerange(3, writer)
    os.closerange(writer + 1, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 1 << 16 else 1 << 16)
    os.chdir("/")
    os.umask(0o022)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # the run must not inherit what our caller ignored
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    return writer


def main() -> None:
    path = sys.argv[1]
    attached = "--attached" in sys.argv[2:]
    with open(0 if path == "-" else path, encoding="utf-8", closefd=path != "-") as file:
        spec = json.load(file)
    answer = os.dup(1) if attached else detach(str(Path(spec["record"]).with_suffix(".err")))
    try:
        try:
            lock: Lock | None = Lock(claim(spec))
            record = Record(spec["record"], spec)
            reply = {"accepted": True, "message": "", "record": record.path}
        except Begun:
            lock, reply = None, {"accepted": True, "message": "", "record": spec["record"]}
        except (Refused, OSError) as error:
            reply = {"accepted": False, "message": str(error)}
        os.write(answer, json.dumps(reply).encode())
    finally:
        os.close(answer)
    if not reply["accepted"]:
        sys.exit(1)
    if lock is None:
        return
    # The switch lock is held until the new run lives: one that loads for minutes can be stopped meanwhile.
    switch = Switch(spec, started=lock.release)
    sys.exit(0 if perform(switch, record) == "done" else 1)
