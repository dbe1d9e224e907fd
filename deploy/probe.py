"""The probe: what there is on a host, as one JSON object on stdout.

Runs ON the host, sent over stdin by `deploy.evidence`. It only reads, it never fails on what it finds: a file
that is half-written, foreign or forbidden is named under "problems". Standard library only, Python >= 3.9.

The object: schema time hostname user uid gid groups home python python_path boot_time clock_ticks
sample_seconds probe_seconds (from the first look to the last),
os {id version_id codename}, unattended_upgrades, systemd, programs {name: path or null} (and tini, apt),
state {root exists writable owner_uid free_bytes total_bytes}, shm {root is_tmpfs writable free_bytes
total_bytes}, memory {total available room (within our cgroup's limit)}, environment {PYTHON*}, cpus,
engine {client address variables answers permitted version api compose error started root storage_free_bytes
live_restore rootless buildx runtimes cdi}, images [{id tags bytes created labels}] (ours only),
containers [{name project directory here}] (running ones of our projects; here: made from this state root),
gpus {devices [{index path uuid holders [{pid command age daemon}]}] control driver library toolkit
nvidia_smi nvml (see `deploy.nvml`: a list, or {unknown: why}; null without a sample)},
pve (see `deploy.pve`: what there is of Proxmox, or null),
names {name: {current previous releases stop booted reference secrets [paths] changed {release: files that
are not as they were deployed} added {release: those of them that were not deployed at all}
images {release: image}}}, runs [..], switch and locks
{name: null or who holds it}, weights [{name digest path bytes}], problems [..]. Sizes are bytes, times Unix
seconds, `cpu_ticks` two counts `sample_seconds` apart (one, without a sample or once the process is gone), of
which there are `clock_ticks` a second.

Of a run, `boot` is {release weights} of its boot.json, empty if that may not be read, null without one;
`rebooted`: whether the machine, or the container that we are in, started after its launch (`only_container`).
Of a run in a container, `container` is {id name image image_id running paused pid exit_code oom_killed error
started finished engine_started gone unknown}: gone if the engine has it no more, unknown (why) if the engine
could not be asked; of one of Proxmox see `contained_pct.state`. A process's `nspid` is its pid as its own
files call it. `running` is what the trainer really runs with, {argv environment image_id started
files [{path modified}]}, from /proc (its files: what its command line names); null where that cannot be read.
A process has `elapsed`, the seconds that really passed between its two samples (on a busy machine more than
`sample_seconds`, the pause that was asked for); `io` like `cpu_ticks`, [bytes read, of these from a disk,
bytes written] each; `ran`, too, the nanoseconds that its threads have computed; `wanted`, those that they
would have computed meanwhile with a CPU for each (null where the kernel does not tell it); `wait` and
`threads` if it used no CPU meanwhile (see `deploy.waits`), `reading` if it read much, `stdout_file` if it
prints into one, `ended` (a wait status) if nobody has waited for its end. `load` {average ready cpus} is the
machine's at the second sample. `gpus` of a run: see `deploy.run_devices`; `log` {bytes last_write
first_bytes_offset tail last_line free_bytes}, the last line being the newest that is not launch's own;
`oom_kills_since`: how many the kernel counts since the launch began that is gone without a word; `weights`
{path there missing}; `deleted` weights that its ranks have open and that were removed; `memory_group`
{oom_kills limit}; `reference` {run_id tokens_per_second steps} of its name and its own speed over as many
steps, `recent`; `pace`: see `deploy.pace`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from deploy import (
    contained,
    contained_pct,
    engine,
    files,
    machine,
    pace,
    procfs,
    pve,
    room,
    run_devices,
    run_processes,
    running,
)
from trainer import status

RUNS_PER_NAME = 20
OURS = "── "  # begins each of launch's own lines in a log
TAIL_BYTES = 4096
METRICS_BYTES = 1 << 16  # the end of metrics.jsonl that is read: about 60 records
WINDOW = 100  # steps over which a run's speed is held against its reference
MANIFEST = "release.json"
OTHERS = "other files"  # of a release: they differ, and nothing is left that says which
COMPOSE_FILE = "compose.yaml"
IMAGE = re.compile(r"""^\s+image:\s*["']?([^"'\s]+)""", re.MULTILINE)
SECRETS = re.compile(r"^secrets(-.*)?$")  # by name only: what is in them leaves the host nowhere
LOCKS = ("deploy", "switch")
CONTAINER = ("running", "paused", "pid", "exit_code", "oom_killed", "error", "started", "finished")
WEIGHTS = re.compile(r"^(?P<name>.+)@(?P<digest>[0-9a-f]{6,64})$")


class Probe:
    """Collects, and remembers what could not be read."""

    def __init__(self, state: Path, shm: Path, sample: float) -> None:
        self.state = state
        self.shm = shm
        self.sample = sample
        self.problems: list[str] = []
        self.booted = procfs.boot_time()
        self.began = procfs.container_time()

    def facts(self) -> dict[str, Any]:
        began = time.monotonic()
        library = machine.asked_library(self.sample)  # (a child, made before there are threads)
        told: dict[str, Any] = {}
        asking = threading.Thread(target=lambda: told.update(machine.engine_facts()), daemon=True)
        asking.start()  # meanwhile we read; every question to the engine has its own timeout
        names = self.names()
        # Before the runs, a client's before its switch's: who finds none at work does not miss their run.
        locks, switch = ({name: self.holder(name, f"{kind}.lock") for name in names} for kind in LOCKS)
        runs = self.runs()
        self.add_changed(names, runs)
        devices = machine.nvidia(self.sample)
        if any(run["container"] for run in runs):  # only then what we read depends on what it says
            asking.join()
        self.add_containers(runs, told)
        run_processes.add(runs, self.sample)
        self.add_evidence(runs, names)
        if library:
            devices["nvml"] = library.result()
        run_devices.add(runs, devices["devices"], devices["nvml"])
        asking.join()
        return {
            "schema": 1,
            "time": time.time(),
            "hostname": socket.gethostname(),
            "user": machine.user_name(),
            "uid": os.getuid(),
            "gid": os.getgid(),
            "groups": machine.groups(),
            "home": os.path.expanduser("~"),
            "python": ".".join(str(part) for part in sys.version_info[:3]),
            "python_path": sys.executable,
            "boot_time": self.booted,
            "clock_ticks": os.sysconf("SC_CLK_TCK"),
            "sample_seconds": self.sample,
            "probe_seconds": time.monotonic() - began,
            **room.look(str(self.state), str(self.shm)),
            "environment": {key: value for key, value in os.environ.items() if key.startswith("PYTHON")},
            "cpus": len(os.sched_getaffinity(0)),
            "os": machine.system(),
            "unattended_upgrades": machine.unattended_upgrades(),
            "engine": told["engine"],
            "images": told["images"],
            "containers": self.containers(told),
            "gpus": devices,
            "pve": pve.facts(),
            "programs": machine.programs(),
            "tini": machine.program("tini"),
            "apt": machine.program("apt-get"),
            "systemd": os.path.isdir("/run/systemd/system"),
            "names": names,
            "runs": runs,
            # And after them: a record that says "running" has a job, unless it is found without a lock.
            "switch": {name: self.holder(name, "switch.lock") or switch[name] for name in names},
            "locks": {name: self.holder(name, "deploy.lock") or locks[name] for name in names},
            "weights": self.weights(),
            "problems": list(dict.fromkeys(self.problems)),  # a lock is looked at twice
        }

    # -- files ---------------------------------------------------------------------------------------------

    def object(self, path: Path) -> dict[str, Any] | None:
        """A JSON object from a file; None, with a note in `problems`, if there is something else in it."""
        try:
            value = status.read_json(path)
        except (OSError, ValueError, RecursionError) as error:
            self.problems.append(str(error) if str(path) in str(error) else f"{path}: {error}")
            return None
        if value is not None and not isinstance(value, dict):
            self.problems.append(f"{path} holds no JSON object; it was not written by Drafthouse")
            return None
        return value

    def entries(self, path: Path) -> list[str]:
        """The visible names in a directory, sorted; none if there is no such directory."""
        try:
            return sorted(name for name in os.listdir(path) if not name.startswith("."))
        except FileNotFoundError:
            return []
        except OSError as error:
            self.problems.append(f"{path}: {error.strerror}")
            return []

    def names(self) -> dict[str, Any]:
        found = {}
        for name in self.entries(self.state / "names"):
            path = self.state / "names" / name
            if path.is_dir() and status.valid_name(name):
                found[name] = {
                    "current": machine.link(path / "current"),
                    "previous": machine.link(path / "previous"),
                    "releases": self.entries(path / "releases"),
                    "stop": self.object(path / "stop.json"),
                    "booted": self.object(path / "booted.json"),
                    "secrets": [
                        str(path / entry)
                        for entry in self.entries(path)
                        if SECRETS.match(entry) and not (path / entry).is_symlink()
                    ],
                    "images": self.images(path / "releases"),
                    "reference": self.object(path / "reference.json"),
                }
        return found

    def boot(self, path: Path) -> dict[str, Any] | None:
        """What a run would be started with again; only its release and weights leave the host."""
        if not os.access(path, os.R_OK):
            return {} if path.exists() else None
        value = self.object(path) or {}
        run, weights = value.get("run"), value.get("weights")
        release = run.get("release") if isinstance(run, dict) else None
        return {
            "release": release.get("id") if isinstance(release, dict) else None,
            "weights": weights if isinstance(weights, dict) else None,
        }

    def images(self, releases: Path) -> dict[str, str]:
        """The image that each release names, for those that need one."""
        found = {}
        for entry in self.entries(releases):
            try:
                manifest = json.loads((releases / entry / MANIFEST).read_bytes())
                image = manifest.get("image") if isinstance(manifest, dict) else None
                text = image if isinstance(image, str) else None
                if text is None and (releases / entry / COMPOSE_FILE).is_file():
                    words = (releases / entry / COMPOSE_FILE).read_text(encoding="utf-8", errors="replace")
                    line = IMAGE.search(words)
                    text = line[1] if line else None
                if text:
                    found[entry] = text
            except (OSError, ValueError, RecursionError):
                continue  # `changed` names what is damaged
        return found

    def add_changed(self, names: dict[str, Any], runs: list[dict[str, Any]]) -> None:
        """Give every name what was changed in the releases that count: the current one, and what runs."""
        for name, found in names.items():
            wanted = [found["current"]]
            for run in runs:
                if run["name"] == name and run["alive"]:
                    release = (run["run"] or {}).get("release")
                    wanted.append(release.get("id") if isinstance(release, dict) else None)
            home = self.state / "names" / name / "releases"
            found["changed"] = {key: changed(home / key) for key in found["releases"] if key in wanted}
            found["added"] = {key: added(home / key, names) for key, names in found["changed"].items()}

    def holder(self, name: str, lock: str) -> dict[str, Any] | None:
        """Who holds a lock of `name`, in the holder's own words; None if it is free."""
        path = self.state / "names" / name / lock
        try:
            return files.holder(path)
        except OSError as error:
            self.problems.append(f"{path}: {error.strerror}")
            return None

    def weights(self) -> list[dict[str, Any]]:
        found = []
        for entry in self.entries(self.shm):
            path = self.shm / entry
            match = WEIGHTS.match(entry)
            if match and path.is_dir() and not path.is_symlink():
                found.append({**match.groupdict(), "path": str(path), "bytes": machine.tree_bytes(path)})
        return found

    # -- runs ----------------------------------------------------------------------------------------------

    def runs(self) -> list[dict[str, Any]]:
        """The newest runs of every name, and whichever are in progress, oldest first."""
        kept = []
        count: dict[str, int] = {}
        for run in reversed(status.list_runs(self.state / "runs")):
            name = status.split_run_id(run.path.name)[1]
            count[name] = count.get(name, 0) + 1
            if count[name] <= RUNS_PER_NAME or run.alive():
                kept.append(self.run(run, name))
        return kept[::-1]

    def run(self, run: status.RunDir, name: str) -> dict[str, Any]:
        # Liveness first: what is read afterwards can then only be newer than the verdict "alive".
        alive = run.alive()
        launch = self.object(run.path / "launch.json")
        launched = number(launch, "time")
        ended = self.object(run.path / "exit.json")
        return {
            "run_id": run.path.name,
            "name": name,
            "path": str(run.path),
            "alive": alive,
            "rebooted": launched is not None and launched < (self.began or 0),
            "only_container": launched is not None and launched >= (self.booted or 0),
            "run": self.object(run.path / "run.json"),
            "launch": launch,
            "heartbeats": self.heartbeats(run),
            "exit": ended,
            "oom_kills_since": self.oom_kills(launch, alive or bool(ended)),
            "switch": self.object(run.path / "switch.json"),
            "log": self.log(run),
            "boot": self.boot(run.path / "boot.json"),
            "container": self.object(run.path / "container.json"),
            "processes": [],
            "running": None,
            "reference": None,
            "recent": None,
            "weights": None,
            "deleted": [],
            "memory_group": None,
            "gpus": None,
            "load": None,
            "pace": None,
        }

    def add_evidence(self, runs: list[dict[str, Any]], names: dict[str, Any]) -> None:
        """Complete what is known of each run with what its processes, its reference and its metrics tell."""
        for run in runs:
            run["running"] = running.running(run)
            run["weights"] = running.weights(run, self.shm)
            run["memory_group"] = run_processes.memory_group(run)
            found = names.get(run["name"], {}).get("reference")
            if found and run["alive"]:
                run["reference"] = {key: found.get(key) for key in ("run_id", "tokens_per_second")}
                run["reference"]["steps"] = WINDOW
                run["recent"] = recent(Path(run["path"]) / "metrics.jsonl")
            if run["alive"] and self.sample > 0:
                began = number(run["launch"], "trainer_started")
                run["pace"] = pace.pace(Path(run["path"]) / "metrics.jsonl", began or 0.0)
                ranks = {beat.get("pid") for beat in run["heartbeats"].values()}
                ranks.add((run["launch"] or {}).get("trainer_pid"))
                pids = [one["pid"] for one in run["processes"] if one["nspid"] in ranks]
                run["deleted"] = running.deleted(pids)

    def oom_kills(self, launch: dict[str, Any] | None, ended: bool) -> int | None:
        """Kills for want of memory on this machine since a launch began that is gone without a word."""
        before, since = number(launch, "oom_kills"), number(launch, "time")
        if ended or before is None or since is None or since < (self.began or 0):
            return None
        now = procfs.oom_kills()
        return None if now is None else max(0, now - int(before))

    def heartbeats(self, run: status.RunDir) -> dict[str, Any]:
        found = {}
        for entry in self.entries(run.path / "status"):
            rank, _, rest = entry.partition(".")
            if rank.isdigit() and rest == "json":
                value = self.object(run.path / "status" / entry)
                if value is not None:
                    found[rank] = value
        return found

    def log(self, run: status.RunDir) -> dict[str, Any]:
        """Bytes printed so far, of which the first ones may be gone, when last, and the last lines."""
        segments = []
        for entry in self.entries(run.log):
            offset, _, rest = entry.partition(".")
            if offset.isdigit() and rest == "log":
                segments.append((int(offset), run.log / entry))
        result: dict[str, Any] = {"bytes": 0, "last_write": None, "first_bytes_offset": 0, "tail": []}
        result["free_bytes"] = result["last_line"] = None
        if segments:
            segments.sort()
            start, newest = segments[-1]
            try:
                with open(newest, "rb") as file:
                    info = os.fstat(file.fileno())
                    file.seek(max(0, info.st_size - TAIL_BYTES))
                    text = file.read().decode("utf-8", "replace")
                lines = [line for line in re.split(r"[\r\n]+", text) if line.strip()]
                result.update(bytes=start + info.st_size, last_write=info.st_mtime, tail=lines[-3:])
                result["last_line"] = next((line for line in lines[::-1] if not line.startswith(OURS)), None)
                result["first_bytes_offset"] = segments[0][0]
                space = os.statvfs(run.log)
                result["free_bytes"] = space.f_bavail * space.f_frsize
            except OSError as error:
                self.problems.append(f"{newest}: {error.strerror}")
        return result

    def add_containers(self, runs: list[dict[str, Any]], told: dict[str, Any]) -> None:
        """Complete what container.json says of each run's container with what the engine says now."""
        active = pve.active() if any((run["container"] or {}).get("kind") for run in runs) else {}
        for run in runs:
            kept = run["container"]
            if not kept:
                continue
            if kept.get("kind") == contained_pct.KIND:
                run["container"] = contained_pct.state(kept, run["path"], active)
                continue
            facts = told["engine"]
            unknown = None if facts["answers"] and not facts.get("incomplete") else str(facts["error"])
            now = told["containers"].get(kept.get("id"))
            if kept.get("engine") != facts["address"]:  # this login looks elsewhere than the deploy did
                now, unknown = inspect(kept)
            run["container"] = {
                **{key: kept.get(key) for key in ("id", "name", "image", "image_id")},
                **{key: now[key] if now else None for key in CONTAINER},
                "engine_started": facts["started"] if kept.get("engine") == facts["address"] else None,
                "gone": (now is None) if unknown is None else None,
                "unknown": unknown,
            }

    def containers(self, told: dict[str, Any]) -> list[dict[str, Any]]:
        """The running containers of projects with our names, whoever has made them."""
        found = []
        for one in told["containers"].values():
            labels = one["labels"]
            if one["running"]:
                found.append(
                    {
                        "name": one["name"],
                        "project": labels.get(engine.PROJECT),
                        "directory": labels.get(engine.DIRECTORY),
                        "here": contained.made_here(labels, self.state),
                    }
                )
        return found


def inspect(kept: dict[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
    """(a container's state or None if it is gone, None), or (None, why the engine could not be asked)."""
    try:
        return engine.Engine(str(kept.get("engine"))).inspect(str(kept.get("id"))), None
    except engine.EngineError as error:
        return None, None if error.status == 404 else str(error)


def recent(metrics: Path) -> dict[str, Any] | None:
    """``{"tokens_per_second", "steps", "to"}``: the median over the last WINDOW steps that a run has logged,
    how many these are, and the last one. None without two records, of which the first is passed over: it has
    what is slow at the beginning.
    """
    try:
        with open(metrics, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - METRICS_BYTES))
            lines = file.read(METRICS_BYTES).split(b"\n")[1:-1]  # the first is cut, or the run's first
    except OSError:
        return None
    speeds: dict[float, float] = {}
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and record.get("kind") != "evaluation":
            step, speed = number(record, "step"), number(record, "tokens_per_second")
            if step is not None and speed is not None:
                speeds[step] = speed
    chosen = [step for step in speeds if step > max(speeds) - WINDOW]
    if not chosen:
        return None
    # A record stands for the steps since the one before it.
    before = max((step for step in speeds if step < min(chosen)), default=min(chosen) - 1)
    ordered = sorted(speeds[step] for step in chosen)
    median = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    return {"tokens_per_second": median, "steps": max(chosen) - before, "to": max(chosen)}


def changed(release: Path) -> list[str]:
    """The files of a release that are not what its manifest says, or that it does not name.

    The manifest is one of them, and the first, if it is missing or if its digests do not give the release's
    id. A file that was added counts, since Python would import it; Python's own caches do not.
    """
    digests, here = manifest(release), files_of(release)
    found = [name for name, digest in digests.items() if digest_of(release / name) != digest]
    found = sorted([*found, *(name for name in here if name not in digests)])
    if gives(digests, release.name):
        return found
    # Then nothing that it says can be relied on. The id itself still tells whether all other files are right.
    if gives({name: digest_of(release / name) or "" for name in here}, release.name):
        return [MANIFEST]
    return [MANIFEST, *(found if digests else [OTHERS])]


def added(release: Path, files: list[str]) -> list[str]:
    """Those of `files` that a release's manifest does not name."""
    known = manifest(release)
    return [name for name in files if name not in known and name not in (MANIFEST, OTHERS)]


def manifest(release: Path) -> dict[str, str]:
    """The digest of every file, as the release's manifest has them; none if it is damaged or missing."""
    try:
        digests = json.loads((release / MANIFEST).read_bytes())["files"]
        return {str(name): str(digest) for name, digest in digests.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def files_of(release: Path) -> list[str]:
    """All files in a release but its manifest and Python's caches; a link to a directory counts as a file."""
    found = []
    for folder, folders, names in os.walk(release):
        folders[:] = [name for name in folders if name != "__pycache__"]
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        found += [os.path.relpath(os.path.join(folder, name), release) for name in (*names, *links)]
    return [name for name in found if name != MANIFEST]


def digest_of(path: Path) -> str | None:
    """None for what is no file or cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    except OSError:
        return None


def gives(digests: dict[str, str], release_id: str) -> bool:
    """Whether a release of files with these digests has this id."""
    whole = "".join(f"{name}\0{digest}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(whole.encode("utf-8", "replace")).hexdigest().startswith(release_id)


def number(value: dict[str, Any] | None, key: str) -> float | None:
    """A number of a JSON object that somebody else wrote; None if it is missing or something else."""
    found = (value or {}).get(key)
    return found if isinstance(found, (int, float)) and not isinstance(found, bool) else None


def main() -> None:
    import argparse  # only here: with what it needs, it is a tenth of a look that a plan takes

    parser = argparse.ArgumentParser(prog="probe")
    parser.add_argument("--state", default=room.state_root())
    parser.add_argument("--shm", default=room.shm_root())
    parser.add_argument("--sample", type=float, default=0.4)
    arguments = parser.parse_args()
    json.dump(Probe(Path(arguments.state), Path(arguments.shm), arguments.sample).facts(), sys.stdout)


if __name__ == "__main__":
    main()
