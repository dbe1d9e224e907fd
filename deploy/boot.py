"""Starts a name's next run after the machine or its engine has restarted, if there is one to go on with.

Runs ON the host, from a unit of systemd or cron, when nobody is there: `deploy.bootunit` installs it, a file
beside each run (`FILE`, made by `template`) says what to do, and what it prints goes to the journal. Standard
library only, Python >= 3.9.

    python3 <state>/tools/boot STATE NAME             stage the weights, start the next run
    python3 <state>/tools/boot STATE NAME --shutdown  save a checkpoint and stop, before the machine goes down

The exit code is 0 if the next run was started or there is none to start, and 1, with one sentence on stderr,
if something is missing; then nothing was changed, and the next boot tries again.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The switch is started as a program of its own, and comes to the host with this one.
from deploy import (
    contained,
    engine,
    files,
    manifest,
    new_run,
    probe,
    procfs,
    pve,
    switch_job,  # noqa: F401
    weights_store,
)
from deploy.errors import DeployError
from trainer import status

FILE = "boot.json"
SCHEMA = 1
CHECKPOINT_TIMEOUT = 300.0  # seconds, where no run's file says otherwise
LOCK_PATIENCE = 3600.0  # seconds; a deploy that is under way may be copying weights
ENGINE_PATIENCE = 180.0  # seconds; cron and a user's systemd start us before the engine is up
ENGINE_TIMEOUT = 10.0
PAUSE = 0.1  # seconds between two looks
FLAGS = ("-I", "-S", "-B", "-X", "utf8")  # as in deploy.host
SIGNALS = ("SIGTERM", "SIGINT")  # what stopped a run that nobody asked to stop: a machine that goes down
SHUTDOWN = "shutdown@"


# -- what a deploy leaves for us ---------------------------------------------------------------------------


def template(
    run: status.Run,
    spec: Mapping[str, Any],
    weights: Mapping[str, Any] | None,
    checkpoint_timeout_seconds: float = CHECKPOINT_TIMEOUT,
    directories: Sequence[str] = (),
) -> dict[str, Any]:
    """What boot.json holds for `run`, pure: all that starting it once more, as another run, takes.

    `run` is run.json as it was written, `spec` the specification of its switch, `weights` ``{"source",
    "path", "digest"}``: the directory on the host that is copied to `path` in shared memory (None: nothing
    is), `checkpoint_timeout_seconds` what a checkpoint may take before the machine goes down, and
    `directories` what the run writes to, which may lie where a restart clears it away.
    """
    # What is about this one start, and not about what is started.
    once = ("rollback", "record", "by", "old_run_path", "settle_seconds")
    kept = {key: value for key, value in spec.items() if key not in once}
    return {
        "schema": SCHEMA,
        "run": dataclasses.asdict(run),
        "spec": copy.deepcopy(kept),
        "weights": dict(weights) if weights else None,
        "checkpoint_timeout_seconds": checkpoint_timeout_seconds,
        "directories": list(directories),
    }


def instance(found: Mapping[str, Any], run_path: str, by: str, now: float) -> dict[str, Any]:
    """The same for the run in `run_path`, which is to be started next; pure.

    What names the old run's directory, its id or its secrets file, names the new one's.
    """
    new = copy.deepcopy(dict(found))
    run, spec = new["run"], new["spec"]
    old_id, new_id = run["run_id"], os.path.basename(run_path)
    moved = {str(spec["run_path"]): run_path}
    if run.get("secrets_file"):
        moved[run["secrets_file"]] = os.path.join(os.path.dirname(run["secrets_file"]), f"secrets-{new_id}")
        run["secrets_file"] = moved[run["secrets_file"]]

    def put(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: put(item) for key, item in value.items()}
        if isinstance(value, list):
            return [put(item) for item in value]
        if isinstance(value, str):
            for old, path in moved.items():
                if value == old or value.startswith(old + "/"):
                    return path + value[len(old) :]
            return new_id if value == old_id else value
        return value

    spec["start"] = put(spec["start"])
    spec.update(run_path=run_path, by=by)
    run.update(run_id=new_id, created=now, who=by, origin=by.partition("@")[2])
    return new


# -- deciding ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decision:
    """`run` goes on as the next run; None: nothing is started. `reason` says why, for people."""

    run: status.RunDir | None
    reason: str


def decide(runs: Sequence[status.RunDir]) -> Decision:
    """What to do about a name, from its runs, oldest first. Raises ValueError if a file is not ours.

    A run that was asked to stop, finished, or failed in spite of its attempts is left as it is. One that
    the machine took with it, one that only a signal stopped, and one that could not be started, go on.
    """
    for run in runs:
        if run.alive():
            return Decision(None, f"run {run.path.name} is in progress")
    for run in reversed(runs):
        name, exit = run.path.name, run.exit()
        if exit is None and run.launch() is None:
            why = never_started(run)
            if why:
                return Decision(run, f"run {name} {why}")
            continue  # the one before it was left running, or none was touched
        if exit is None:
            return Decision(run, f"run {name} was in progress when the machine or its engine went down")
        if exit.reason == "stopped" and not a_person(exit.asked_by):
            return Decision(run, f"run {name} was stopped by {exit.asked_by or 'a signal'}, not by a person")
        if exit.reason == "stopped":
            return Decision(None, f"run {name} was stopped by {exit.asked_by}: fab start starts it again")
        if exit.reason == "finished":
            return Decision(None, f"run {name} has finished")
        return Decision(
            None, f"run {name} {exit.message or f'failed with exit code {exit.code}'}: see fab tail"
        )
    return Decision(None, "there is no run that was ever started")


def a_person(asked_by: str | None) -> bool:
    """Whether a run was stopped by somebody, by the `asked_by` of its exit.json, or only by a signal."""
    asked = asked_by or SIGNALS[0]
    return asked not in SIGNALS and not asked.startswith(SHUTDOWN)


def never_started(run: status.RunDir) -> str:
    """Why a run without launch counts as one to start; empty if it does not.

    What failed since the machine and the engine are up, failed before the eyes of whoever asked for it: that
    a deploy installs and starts our unit must not start it once more.
    """
    record = status.read_json(run.path / "switch.json")
    if not isinstance(record, dict):
        return ""  # its deploy did not come to the switch
    if (probe.number(record, "started") or 0.0) >= came_up(run):
        return ""
    steps = [step for step in record.get("steps") or [] if isinstance(step, dict)]
    if record.get("outcome") == "running":
        return "was about to start when the machine went down"
    stopped = any(step.get("name") == "stop" and step.get("outcome") in ("ok", "skipped") for step in steps)
    return f"could not be started ({record.get('reason')})" if stopped else ""


def came_up(run: status.RunDir) -> float:
    """When the machine, or the engine of a run in a container, came up last; now, if nobody knows."""
    times = [procfs.boot_time() or time.time()]
    with contextlib.suppress(DeployError):
        start = read_template(run)["spec"]["start"]
        if start.get("container") and not contained.is_pct(start):
            times.append(engine_of(start).started() or 0.0)
    return max(times)


# -- acting ------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    print(text, flush=True)


def boot(state: Path, name: str) -> tuple[str, str, str | None]:
    """Start the next run if there is one to start: (outcome, reason, run id). Raises DeployError, OSError."""
    home = state / "names" / name
    if not home.is_dir():
        return "nothing", f"{state} knows no experiment {name}", None
    with locked(home):
        decision = decide(status.list_runs(state / "runs", name))
        old = decision.run
        if old is None:
            return "nothing", decision.reason, None
        say(f"{decision.reason}; the next run of {name} is started")
        found = read_template(old)
        check(found, state, name)
        if found["weights"]:
            stage(found["weights"])
        start = found["spec"]["start"]
        if contained.is_pct(start):
            wait_for_proxmox(start)
        elif start.get("container"):
            wait_for_engine(start)
        run = next_run(state, found)
        try:
            job, record = switch(run, old)
        except DeployError:
            discard(run)
            raise
    outcome, reason = follow(job, record)
    if outcome != "done" and not run.alive():
        raise DeployError(f"run {run.path.name} was not started: {reason}")
    return (
        "started",
        f"run {run.path.name} goes on with {name}" + (f" ({reason})" if reason else ""),
        run.path.name,
    )


@contextlib.contextmanager
def locked(home: Path) -> Iterator[None]:
    """Hold the name's deploy lock, with no switch under way: another boot, or a deploy, is waited for."""
    lock = os.open(home / "deploy.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        wait_for(lambda: files.take(lock), lambda: files.words(lock))
        files.say(lock, {"by": whoami("boot@"), "what": "boot", "since": time.time()})
        wait_for(lambda: switch_words(home) is None, lambda: switch_words(home) or {})
        yield
        os.ftruncate(lock, 0)
    finally:
        os.close(lock)


def wait_for(ready: Any, holder: Any) -> None:
    began, told = time.monotonic(), False
    while not ready():
        if time.monotonic() - began > LOCK_PATIENCE:
            other = holder()
            raise DeployError(
                f"a {other.get('what', 'deploy')} by {other.get('by', 'somebody')} has been under way for "
                f"{LOCK_PATIENCE / 60:g} min: nothing was started, look at fab status"
            )
        if time.monotonic() - began > 1 and not told:
            other = holder()
            say(f"a {other.get('what', 'deploy')} by {other.get('by', 'somebody')} is under way; waiting")
            told = True
        time.sleep(PAUSE)


def switch_words(home: Path) -> dict[str, Any] | None:
    """Who has a switch of the name under way; None if nobody has."""
    with contextlib.suppress(OSError):
        return files.holder(home / "switch.lock")
    return None


def read_template(run: status.RunDir) -> dict[str, Any]:
    """boot.json of a run. Raises DeployError if there is none, or it is of no use."""
    path = run.path / FILE
    try:
        value = status.read_json(path)
    except ValueError as error:
        raise DeployError(f"{error}; fab deploy starts {run.path.name} again") from None
    if value is None:
        raise DeployError(f"there is no {path}, so nothing says how it was started: start it with fab deploy")
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise DeployError(f"{path} was written by another version of Drafthouse: start it with fab deploy")
    try:
        status.parse(status.Run, value["run"], path)
        whole = {"weights": value["weights"], **value}
        wanted = ("state_root", "name", "run_path", "release_id", "start", "first_heartbeat_timeout_seconds")
        if any(key not in value["spec"] for key in wanted) or not value["spec"]["start"]["argv"]:
            raise KeyError
    except (KeyError, TypeError, ValueError):
        raise DeployError(f"{path} is damaged: start {run.path.name} again with fab deploy") from None
    return whole


def check(found: Mapping[str, Any], state: Path, name: str) -> None:
    """What the start needs and cannot be made here. Raises DeployError."""
    release = found["spec"]["release_id"]
    if not (state / "names" / name / "releases" / str(release)).is_dir():
        raise DeployError(f"release {release} of {name} is gone from {state}: start it with fab deploy")
    changed = probe.changed(state / "names" / name / "releases" / str(release))
    if changed:
        raise DeployError(
            f"{changed[0]} of release {release} of {name} was changed on this host since it was deployed: "
            "fab deploy writes it anew and starts it"
        )
    secrets = found["run"].get("secrets_file")
    if secrets and not os.path.isfile(secrets):
        raise DeployError(f"the secrets of {name} in {secrets} are gone: fab deploy brings them again")


def stage(weights: Mapping[str, Any]) -> None:
    """Copy the weights into shared memory, which a restart empties. Raises DeployError."""
    source, path = str(weights["source"]), str(weights["path"])
    if not os.path.isdir(source) and not manifest.whole(Path(path)):
        raise DeployError(
            f"weights {source} lay in shared memory only, which the restart has emptied: put them there "
            "again, or name a directory on a disk in the run's file, then fab deploy"
            if source == path
            else f"weights {source} are not there any more, so that {path} cannot be made: put them back "
            "(or mount their disk), then fab start"
        )
    done = weights_store.restage(source, path, str(weights["digest"]), say)
    say(f"weights {path}: {done}")


def wait_for_engine(start: Mapping[str, Any]) -> None:
    """Until the container engine answers. Raises DeployError if it does not."""
    deadline, told = time.monotonic() + ENGINE_PATIENCE, False
    while True:
        try:
            engine_of(start).ping()
            return
        except engine.EngineError as error:
            why = str(error)
        if time.monotonic() > deadline:
            raise DeployError(
                f"the container engine did not come up within {ENGINE_PATIENCE:g} s ({why}): start it, "
                "then run this unit again"
            )
        if not told:
            say(f"waiting for the container engine ({why})")
            told = True
        time.sleep(PAUSE * 5)


def wait_for_proxmox(start: Mapping[str, Any]) -> None:
    """Until Proxmox has its file system of configurations up. Raises DeployError if it does not come."""
    path = pve.conf_path(start["container"]["vmid"])
    deadline = time.monotonic() + ENGINE_PATIENCE
    while not os.path.exists(path):
        if os.path.isdir(os.path.dirname(path)):  # it has all of this node's at once
            raise DeployError(f"there is no {path} any more: fab deploy makes the container anew")
        if time.monotonic() > deadline:
            raise DeployError(
                f"there is no {path}, {ENGINE_PATIENCE:g} s after the start of this machine: see that "
                "pve-cluster is up there, or let fab deploy make the container anew"
            )
        time.sleep(PAUSE * 5)


def engine_of(start: Mapping[str, Any]) -> engine.Engine:
    return engine.Engine(engine.address(start["environment"]), ENGINE_TIMEOUT)


def next_run(state: Path, found: Mapping[str, Any]) -> status.RunDir:
    """The directory of the next run, with run.json, boot.json and its own copy of the secrets."""
    start, secrets = found["spec"]["start"], found["run"].get("secrets_file")
    owner = start.get("user") if os.geteuid() == 0 else None
    content = None
    if secrets:
        content = Path(secrets).read_bytes().decode("utf-8", "surrogateescape")
    by = whoami("boot@")
    fields = {**found["run"], "who": by, "origin": by.partition("@")[2]}
    made = new_run.make(str(state), fields, content, found.get("directories"), owner)
    run = status.RunDir(made["path"])
    try:
        new = instance(found, made["path"], by, made["run"]["created"])
        status.write_json(run.path / FILE, new, mode=0o600, durable=True)
    except BaseException:
        discard(run)
        raise
    return run


def discard(run: status.RunDir) -> None:
    """Take away a run that was never started."""
    made = run.run()
    new_run.discard(str(run.path), made.secrets_file if made else None)


# -- the switch ----------------------------------------------------------------------------------------------


def switch(run: status.RunDir, old: status.RunDir) -> tuple[subprocess.Popen[bytes], str]:
    """Start the switch to `run`; what `old` may have left behind is cleared away first.

    Returns its process and the path of its record. Raises DeployError if it is refused.
    """
    value = status.read_json(run.path / FILE)
    assert isinstance(value, dict)
    record = str(run.path / "switch.json")
    spec = {
        "grace_seconds": value["run"].get("grace_seconds", 0),
        **value["spec"],
        "old_run_path": str(old.path),
        "checkpoint_timeout_seconds": 0,
        "record": record,
    }
    return begin(spec)


def begin(spec: Mapping[str, Any]) -> tuple[subprocess.Popen[bytes], str]:
    """The switch of `spec` as a process of ours, once it is accepted, and where its record is.

    Raises DeployError if it is not accepted.
    """
    place = str(Path(__file__).resolve().parent.parent)
    program = f"import sys; sys.path.insert(0, {place!r}); from deploy.switch_job import main; main()"
    job = subprocess.Popen(
        [sys.executable, *FLAGS, "-c", program, "-", "--attached"],
        stdin=subprocess.PIPE,  # a full disk must not keep a run from being stopped
        stdout=subprocess.PIPE,
    )
    assert job.stdin
    with contextlib.suppress(BrokenPipeError), job.stdin:
        job.stdin.write(json.dumps(spec).encode("ascii"))
    assert job.stdout
    answer = b""
    while not answered(answer):
        block = os.read(job.stdout.fileno(), 65536)
        if not block:
            break
        answer += block
    reply = answered(answer)
    if not reply:
        raise DeployError(f"the switch did not begin (exit code {job.wait()}): look at fab status")
    if not reply.get("accepted"):
        job.wait()
        raise DeployError(f"{reply.get('message')}: look at fab status")
    return job, str(reply.get("record") or spec["record"])


def answered(data: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(data)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def follow(job: subprocess.Popen[bytes], record: str) -> tuple[str, str]:
    """Say each step of a switch when it has ended, until it is over: (outcome, reason)."""
    told = 0
    value: dict[str, Any] = {}
    while True:
        ended = job.poll() is not None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = status.read_json(record)
            if found["job"]["pid"] == job.pid:  # type: ignore[index]  # else of an earlier one
                value = found  # type: ignore[assignment]
        for step in value.get("steps", [])[told:]:
            if step["outcome"] == "running":
                break
            say(f"{step['name']}: {step['outcome']}" + (f", {step['detail']}" if step["detail"] else ""))
            told += 1
        if ended:
            for line in value.get("last_lines") or []:
                say(f"  {line}")
            if job.returncode == 0:
                return "done", ""
            return "failed", str(value.get("reason") or "the switch was killed")
        time.sleep(PAUSE)


# -- before the machine goes down --------------------------------------------------------------------------


def shut_down(state: Path, name: str) -> tuple[str, str, str | None]:
    """Save a checkpoint and stop the run in progress: an engine that is stopped gives it seconds only."""
    run = next((run for run in reversed(status.list_runs(state / "runs", name)) if run.alive()), None)
    if run is None:
        return "nothing", f"no run of {name} is in progress", None
    found = read_template(run)
    start = found["spec"]["start"]
    docker = start.get("container") and not contained.is_pct(start)
    if docker and not going_down() and keeps_containers(start):
        return (
            "nothing",
            f"run {run.path.name} goes on: only the engine restarts, and it keeps containers",
            None,
        )
    grace = float(found["run"].get("grace_seconds", 60.0))
    seconds = float(found.get("checkpoint_timeout_seconds", CHECKPOINT_TIMEOUT))
    launch = run.launch()
    if launch is None or not launch.stopping:
        record = str(state / "names" / name / "stop.json")
        spec = {
            "state_root": str(state),
            "name": name,
            "run_path": None,
            "release_id": None,
            "old_run_path": str(run.path),
            "grace_seconds": grace,
            "checkpoint_timeout_seconds": seconds,
            "by": whoami(SHUTDOWN),
            "start": None,
            "record": record,
        }
        outcome, reason = follow(*begin(spec))
        if outcome != "done" and run.alive():  # it could not save: what it has saved before must do
            say(f"{reason}; stopping it all the same")
            outcome, reason = follow(*begin({**spec, "checkpoint_timeout_seconds": 0}))
        if outcome != "done":
            raise DeployError(reason)
    else:  # the same signal reached it that told us
        deadline = time.monotonic() + grace
        while run.alive() and time.monotonic() < deadline:
            time.sleep(PAUSE)
    return (
        "stopped",
        f"run {run.path.name} was stopped before the machine or its engine goes down",
        run.path.name,
    )


def going_down() -> bool:
    """Whether the whole machine stops, not only our unit or the engine."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        argv = ["systemctl", "is-system-running"]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=ENGINE_TIMEOUT)
        return done.stdout.strip() == b"stopping"
    return False


def keeps_containers(start: Mapping[str, Any]) -> bool:
    """Whether containers outlive a restart of their engine (live-restore)."""
    with contextlib.suppress(engine.EngineError, TypeError, AttributeError):
        return engine_of(start).get("/info").get("LiveRestoreEnabled") is True
    return False


# -- the program -------------------------------------------------------------------------------------------


def whoami(prefix: str) -> str:
    return prefix + socket.gethostname()


def note(state: Path, name: str, outcome: str, reason: str, run_id: str | None) -> None:
    """Leave a word for `fab status`: nobody reads a journal who does not know that there is a reason to."""
    value = {"time": time.time(), "outcome": outcome, "reason": reason, "run_id": run_id, "schema": SCHEMA}
    with contextlib.suppress(OSError):
        status.write_json(state / "names" / name / "booted.json", value)


def main() -> None:
    if len(sys.argv) not in (3, 4) or sys.argv[3:] not in ([], ["--shutdown"]):
        sys.exit("usage: python3 <state>/tools/boot STATE NAME [--shutdown]")
    state, name = Path(sys.argv[1]), sys.argv[2]
    act = shut_down if sys.argv[3:] else boot
    try:
        outcome, reason, run_id = act(state, name)
    except (DeployError, OSError, ValueError) as error:
        words = str(error)
        if isinstance(error, OSError):
            words = f"{error.filename or state}: {error.strerror or error}; nothing was started"
        note(state, name, "failed", words, None)
        sys.exit(f"drafthouse boot: {words}")
    note(state, name, outcome, reason, run_id)
    say(reason if outcome != "nothing" else f"nothing to do: {reason}")
