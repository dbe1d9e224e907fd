"""The run directory: all that deploy/ and trainer/ tell each other.

One run owns one directory, ``runs/<run-id>/``. Each file in it has one writer, appears by rename and is
never edited in place, so a reader sees the whole old file or the whole new one:

===================  =======================  =======================================================
file                 written by               what
===================  =======================  =======================================================
run.json             deploy, before the start what was started: command, release, environment, who
log/                 launch                   the exact bytes of the run, in segments named by offset
launch.lock          launch                   a flock that is held exactly as long as the run lives
launch.json          launch                   pids and attempt of a run in progress
status/<rank>.json   each trainer process     its heartbeat
metrics.jsonl        rank 0                   one line per logged step
events/              rank 0                   TensorBoard event files
request.json         deploy                   what is asked of a run in progress
launch-request.json  deploy                   what is asked of its launch: stacks
switch.json          switch                   the steps from the old run to this one
container.json       switch                   which container it was started in, of a run in one
boot.json            deploy                   how to start it again with the machine
exit.json            launch                   how it ended
===================  =======================  =======================================================

A process that was started by hand and adopted (`Run.adopted`) has no launch: its launch.json is written by
deploy, once, and log/ leads to the file that it prints into.

Standard library only and Python >= 3.9: this module also runs on hosts that have nothing installed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1
RUN_DIR_VARIABLE = "DRAFTHOUSE_RUN_DIR"
ATTEMPT_VARIABLE = "DRAFTHOUSE_ATTEMPT"
SECRETS_VARIABLE = "DRAFTHOUSE_SECRETS_FILE"  # where launch reads the secrets, if not where run.json says
# What trainer/ranks.py tells each of the processes that it starts; no other process has them.
RANK_VARIABLE = "DRAFTHOUSE_RANK"  # its number
STORE_VARIABLE = "DRAFTHOUSE_STORE"  # where they find each other: a file; tcp://HOST:PORT of several machines
LOST_VARIABLE = "DRAFTHOUSE_LOST"  # the descriptor from which it reads that another machine is lost
PROGRESS_VARIABLE = "DRAFTHOUSE_PROGRESS"  # the descriptor that it tells its phase and its steps to
STALLED = 4  # exit code of a trainer that took no step for --stall-timeout

PHASES = ("starting", "loading", "compiling", "training", "evaluating", "checkpointing", "finishing")
# `stop` asks nothing: it says who sends the SIGTERM that follows, since a signal has no name on it.
ACTIONS = ("checkpoint", "checkpoint-and-stop", "dump-stacks", "stop")
REQUEST, LAUNCH_REQUEST = "request.json", "launch-request.json"
REASONS = ("finished", "stopped", "failed")

_RUN_ID = re.compile(r"(\d{4,})-([A-Za-z0-9][A-Za-z0-9._-]*)")
_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")


def valid_name(name: str) -> bool:
    """Whether `name` may name an experiment: it becomes a directory, a Compose project and a unit name."""
    return bool(_NAME.fullmatch(name)) and ".." not in name


# -- files -------------------------------------------------------------------------------------------------


def write_json(path: str | Path, value: Any, *, mode: int = 0o644, durable: bool = False) -> None:
    """Write `value` to `path` whole: a temporary file beside it, then a rename.

    `durable` also waits for the disk, for files that must survive a power cut (run.json, exit.json).
    Raises OSError when the file cannot be written; then what was there before is still there.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(value, file, ensure_ascii=False, indent=1, sort_keys=False)
            file.write("\n")
            file.flush()
            os.fchmod(file.fileno(), mode)
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def read_json(path: str | Path) -> Any | None:
    """Read what `write_json` wrote; None if there is no such file.

    Raises ValueError, naming the file, if it is there but is no JSON.
    """
    try:
        data = Path(path).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); it was not written by Drafthouse") from None


# What JSON gives for a field's annotation; exact types, since Python takes True for an int.
_JSON = {
    "str": (str,),
    "int": (int,),
    "float": (float, int),
    "dict": (dict,),
    "list": (list,),
    "bool": (bool,),
}


def parse(cls: Any, value: Any, path: Path) -> Any:
    """Build a dataclass from the JSON of `path`, passing over keys of a newer schema.

    Raises ValueError, naming the file, if it holds something else than we write: a run must not die of it.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__} instead of an object")
    found = {}
    for item in dataclasses.fields(cls):
        if item.name not in value:
            if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
                raise ValueError(f"{path} lacks {item.name}")
            continue
        given = value[item.name]
        kinds = [kind.strip() for kind in str(item.type).split("|")]
        types = [kind for name in kinds for kind in _JSON.get(name.partition("[")[0], ())]
        if type(given) not in types and not (given is None and "None" in kinds):
            raise ValueError(f"{path}: {item.name} is {str(given)[:80]!r}, which is no {item.type}")
        found[item.name] = given
    return cls(**found)


# -- what the files hold -----------------------------------------------------------------------------------


@dataclass
class Run:
    """run.json: what was started. Written before the start; never changed afterwards."""

    run_id: str
    name: str
    command: list  # argv of the trainer, which launch starts
    runtime: str = "process"  # compose | pct | process
    release: dict = field(default_factory=dict)  # {id, digest}
    git: dict = field(default_factory=dict)  # {commit, dirty}; empty if the source was no git checkout
    image: str | None = None  # as compose.yaml names it, where there is one: drafthouse:<digest>
    user: str | None = None  # uid:gid of the run's processes; None: whoever starts it
    devices: list | None = None  # indices of its GPUs, as texts; None: it was not told, and sees all
    environment: dict = field(default_factory=dict)  # variables that launch adds for the trainer
    secrets: list = field(default_factory=list)  # names only
    secrets_file: str | None = None  # KEY=value lines (0400), read by launch and by nobody else
    run_file: str | None = None  # where its settings came from, relative to the project
    changes: dict = field(default_factory=dict)  # --set
    working_directory: str | None = None
    tty: bool = False  # stdout and stderr are a pseudo-terminal instead of a pipe
    # A process that was started by hand, and is a run by name only: {pid, start: clock ticks since the boot,
    # boot: its id, stdout: the file that it prints into or None}. Such a run has no launch, so no lock of it.
    adopted: dict | None = None
    grace_seconds: float = 60.0  # from TERM to KILL
    checkpoint_timeout_seconds: float = 300.0  # a stop waits so long for the checkpoint that it asks for
    restart_attempts: int = 3  # crashes that start the next attempt: at most this many ...
    restart_minutes: float = 10.0  # ... within this time
    segment_bytes: int = 64 << 20  # a log segment is closed at this size
    segments: int = 16  # so many are kept
    created: float = field(default_factory=time.time)  # Unix time, s
    who: str = ""
    origin: str = ""  # the machine that it was deployed from
    schema: int = SCHEMA


@dataclass
class Launch:
    """launch.json: who runs it now. Only meaningful while `RunDir.alive()`."""

    pid: int  # of launch, as seen inside its container
    attempt: int
    trainer_pid: int | None = None
    trainer_started: float | None = None  # Unix time, s
    stdout_dropped: int = 0  # records that stdout could not take; log/ has them
    stopping: str | None = None  # who asked, once a stop was asked for
    ended: dict | None = None  # {attempt, how: "by SIGKILL after 2 min 3 s"}: the last attempt that has ended
    answered: dict | None = None  # {id, action, outcome, time, log: offsets} of the last dump-stacks
    log_missing: int = 0  # bytes that log/ could not take; a line in it says so where they are missing
    # What the trainer itself has printed, apart from launch's own lines: so much, up to `offset` of the log.
    # launch.json is written after each of these lines, so all that lies behind `offset` is the trainer's.
    output: int = 0  # bytes of this attempt
    output_time: float | None = None  # when the newest of them came, Unix time, s
    offset: int | None = None  # None: not told, by an older launch
    oom_kills: int | None = None  # the machine's count of kills for want of memory when launch began
    time: float = field(default_factory=time.time)
    schema: int = SCHEMA


@dataclass
class Heartbeat:
    """status/<rank>.json: what one trainer process says of itself each second and at a change of phase."""

    rank: int = 0
    role: str = "colocated"  # target | drafter | colocated
    pid: int = 0
    attempt: int = 1
    sequence: int = 0  # grows by one with each write
    time: float = 0.0  # Unix time of the write, s
    phase: str = "starting"  # one of PHASES
    phase_since: float = 0.0
    detail: str = ""  # free text for people: "toy target: 12 s of 45 s"
    step: int = 0  # of the optimiser; of a target: micro-batches that it has served
    total: int | None = None
    loss: float | None = None
    tokens_per_second: dict = field(default_factory=dict)  # {now, median}
    last_step_time: float | None = None  # Unix time, s
    phase_seconds: dict = field(default_factory=dict)  # of the last step: {data, target, forward, ...}
    memory: dict = field(default_factory=dict)  # bytes: {min, now, peak}
    last_checkpoint: dict | None = None  # {path, step, time}
    links: dict = field(default_factory=dict)  # {wandb: URL, tensorboard: directory}, once this run has them
    metrics: dict = field(default_factory=dict)  # the newest of tau_hat, tau, lr ...
    answered: dict | None = None  # {id, action, outcome, time}; the outcome is "done", or why not
    schema: int = SCHEMA

    @property
    def trains(self) -> bool:
        """Whether its `step` counts optimiser steps: a target's counts the micro-batches it has served."""
        return self.role != "target"


@dataclass
class Request:
    """request.json: what is asked of a run in progress; launch-request.json: of its launch."""

    id: str
    action: str  # one of ACTIONS
    by: str = ""
    time: float = field(default_factory=time.time)
    schema: int = SCHEMA


@dataclass
class Exit:
    """exit.json: how the run ended. Written once, after the last attempt."""

    reason: str  # one of REASONS
    code: int  # as a shell would report it: 128 + signal after a signal
    signal: int | None = None
    out_of_memory: bool | None = None  # None: could not be known
    attempts: int = 1
    last_step: int | None = None
    last_checkpoint: dict | None = None
    asked_by: str | None = None  # who asked for the stop
    last_lines: list = field(default_factory=list)  # of the log, for a run that failed
    message: str = ""  # one sentence for people
    log_bytes: int = 0
    log_missing: int = 0  # bytes that log/ could not take
    stdout_dropped: int = 0  # records that stdout could not take; log/ has them
    time: float = field(default_factory=time.time)
    schema: int = SCHEMA


class RunDir:
    """The directory of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    def _read(self, name: str, cls: Any) -> Any:
        """What the file holds, None without one. Raises ValueError, naming the file, if it is not ours."""
        path = self.path / name
        value = read_json(path)
        return None if value is None else parse(cls, value, path)

    @property
    def run_id(self) -> str:
        """From run.json (inside a container the directory has another name), else the directory's name."""
        run = self.run()
        return run.run_id if run else self.path.name

    @property
    def log(self) -> Path:
        return self.path / "log"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events"

    @property
    def lock(self) -> Path:
        return self.path / "launch.lock"

    def run(self) -> Run | None:
        return self._read("run.json", Run)

    def write_run(self, run: Run) -> None:
        write_json(self.path / "run.json", dataclasses.asdict(run), durable=True)

    def launch(self) -> Launch | None:
        return self._read("launch.json", Launch)

    def write_launch(self, launch: Launch) -> None:
        write_json(self.path / "launch.json", dataclasses.asdict(launch))

    def exit(self) -> Exit | None:
        return self._read("exit.json", Exit)

    def write_exit(self, exit: Exit) -> None:
        write_json(self.path / "exit.json", dataclasses.asdict(exit), durable=True)

    def heartbeats(self) -> dict[int, Heartbeat]:
        """The newest heartbeat of every rank that wrote one; a file that holds none is passed over."""
        try:
            names = os.listdir(self.path / "status")
        except OSError:
            return {}
        found: dict[int, Heartbeat] = {}
        for name in names:
            if name.endswith(".json") and name[:-5].isdigit():
                with contextlib.suppress(ValueError, OSError):
                    beat = self._read(f"status/{name}", Heartbeat)
                    if beat is not None:
                        found[int(name[:-5])] = beat
        return dict(sorted(found.items()))

    def write_heartbeat(self, heartbeat: Heartbeat) -> None:
        (self.path / "status").mkdir(exist_ok=True)
        write_json(self.path / "status" / f"{heartbeat.rank}.json", dataclasses.asdict(heartbeat))

    def request(self, name: str = REQUEST) -> Request | None:
        return self._read(name, Request)

    def ask(self, action: str, by: str) -> Request:
        """Ask the run in progress for `action`; the answer appears as `Heartbeat.answered` with this id.

        For stacks launch is asked, in a file of its own, and answers as `Launch.answered`: looking at a run
        must not take the place of a request for a checkpoint that nobody has seen yet.
        """
        if action not in ACTIONS:
            raise ValueError(f"unknown request {action!r}; known: {', '.join(ACTIONS)}")
        request = Request(id=f"{time.time_ns():x}-{os.getpid():x}", action=action, by=by)
        name = LAUNCH_REQUEST if action == "dump-stacks" else REQUEST
        write_json(self.path / name, dataclasses.asdict(request))
        return request

    def alive(self) -> bool:
        """Whether launch holds the run's lock: true from its start until the kernel has ended it.

        The lock says more than a pid: it cannot be reused, and it is seen alike from inside a container
        and from the host, since both look at the same file. A run that was adopted has no launch: of it the
        process itself counts.
        """
        try:
            descriptor = os.open(self.lock, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return self._adopted_lives()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def _adopted_lives(self) -> bool:
        """Of a run that launch never began: whether it is a process that was adopted, and goes on."""
        try:
            made = self.run()
        except (ValueError, OSError):
            return False
        return made is not None and made.adopted is not None and same_process(made.adopted)


def boot_id() -> str | None:
    """What tells this start of the machine from every other one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None


def same_process(known: dict) -> bool:
    """Whether the process {pid, start, boot} is there still: numbers are used again, also after a reboot."""
    try:
        text = Path(f"/proc/{int(known['pid'])}/stat").read_bytes().decode("utf-8", "replace")
        fields = text.rpartition(")")[2].split()  # the name before may hold blanks and parentheses
        return fields[0] not in "ZX" and int(fields[19]) == known["start"] and boot_id() == known.get("boot")
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return False


# -- the numbering of runs ---------------------------------------------------------------------------------


def split_run_id(run_id: str) -> tuple[int, str]:
    """``0007-exp-ddtree`` -> ``(7, "exp-ddtree")``. Raises ValueError for anything else."""
    match = _RUN_ID.fullmatch(run_id)
    if not match:
        raise ValueError(f"{run_id!r} is not a run id (like 0007-exp-ddtree)")
    return int(match[1]), match[2]


def list_runs(runs: str | Path, name: str | None = None) -> list[RunDir]:
    """The runs under `runs`, oldest first (by number, never by clock); only those of `name` if given."""
    try:
        entries = os.listdir(runs)
    except OSError:
        return []
    found = []
    for entry in entries:
        match = _RUN_ID.fullmatch(entry)
        if match and (name is None or match[2] == name):
            found.append((int(match[1]), entry))
    return [RunDir(os.path.join(runs, entry)) for _, entry in sorted(found)]


def allocate_run(runs: str | Path, name: str) -> RunDir:
    """Make the directory of the next run of `name`. Numbers only grow, also when old runs were pruned.

    Raises ValueError for a name that cannot be one, OSError when the directory cannot be made.
    """
    if not valid_name(name):
        raise ValueError(
            f"{name!r} cannot name an experiment: "
            "use lower-case letters, digits, '.', '_' and '-', at most 63 of them"
        )
    runs = Path(runs)
    runs.mkdir(parents=True, exist_ok=True)
    with open(runs / ".last", "a+", encoding="ascii") as counter:
        fcntl.flock(counter, fcntl.LOCK_EX)
        counter.seek(0)
        text = counter.read().strip()
        last = int(text) if text.isdigit() else 0
        existing = [split_run_id(run.path.name)[0] for run in list_runs(runs)]
        number = max([last, *existing]) + 1
        directory = runs / f"{number:04d}-{name}"
        directory.mkdir()
        counter.seek(0)
        counter.truncate()
        counter.write(f"{number}\n")
    return RunDir(directory)
