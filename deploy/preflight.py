"""What must hold before a deploy. Pure: facts in, findings out, each with what to do about it.

Every check is made and every failure listed, so that nobody corrects one thing only to meet the next. Nothing
has been changed on the host by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from deploy import (
    budget,
    container,
    devices,
    mask,
    preflight_adopted,
    preflight_pve,
    python_start,
    runtimes,
)
from deploy.checks import Check
from deploy.errors import DeployError
from deploy.health_words import command
from deploy.runtimes import compose
from deploy.settings import TOY, HostSettings, RunSettings
from deploy.sizes import age, size
from deploy.survey import Survey

TOOLS_PYTHON = (3, 9)  # what the probe, the switch and the lock's holder are written for
TRAINER_PYTHON = (3, 11)
# Free space without which no run is started: release, log and first checkpoints. Floors, not sums.
DISK_COMMAND = 50_000_000
DISK_TOY = 500_000_000
DISK_MODEL = 4_000_000_000
CLOCKS_APART = 5.0  # seconds: from here on ages and "since" are misleading


def checks(survey: Survey, host: HostSettings, run: RunSettings) -> list[Check]:
    """All checks, in the order in which people would look."""
    facts = survey.facts
    runtime, _ = runtimes.choose(host, facts, run.name)
    found = devices.choose(run.gpus, facts, run.name, host.name, runtime)
    if runtime == "compose":
        weights = survey.weights.path if survey.weights else None
        mounts = compose.mounts(run, survey.layout, weights, survey.data)
        own = container.checks(facts, host, run, found, survey.image, mounts, survey.image_there)
    elif runtime == "pct":
        own = preflight_pve.made(survey, host, run, found)
    else:
        own = [*_python(survey, host, run), *_no_container(survey, host, run)]
    around = preflight_adopted.checks(survey, host, run, runtime)
    problems = [Check("gpus", False, *_halves(problem)) for problem in found.problems]
    if any(check.name == "gpus" and not check.ok and not check.warning for check in around):
        problems = []  # what the container lacks is known better from outside
    memory = _shared_memory(survey, host, run, runtime, found.count)
    if any(check.name == "memory" and not check.ok for check in memory):  # measured, so it says more
        around = [check for check in around if check.name != "memory"]
    return [
        *_tools(facts, host),
        *around,
        *own,
        *problems,
        *_driver(facts, host, found),
        *_unbuffered(facts.get("environment", {}), run.environment),
        *_open_secrets(run),
        _state(facts, host),
        _disk(survey, run),
        *memory,
        *[Check("weights", False, *_halves(problem)) for problem in survey.weights_problems],
        *[Check("data", False, *_halves(problem)) for problem in survey.data_problems],
        *[Check("secrets", False, *_halves(problem)) for problem in survey.secret_problems],
        *_directories(survey, run),
        *_busy(facts, run.name),
        *_clocks(facts, host),
    ]


def _no_container(survey: Survey, host: HostSettings, run: RunSettings) -> list[Check]:
    """A run's file that names an image means a container: its command is not for the bare host."""
    if run.image.use is None or host.runtime != "auto":
        return []
    wanted, why = runtimes.choose(host, survey.facts)
    if survey.live is not None:
        stop = command("stop", run.name, host.name)
        return [
            Check(
                "image",
                False,
                f"the image {run.image.use} of the run's file is not used: {survey.live['run_id']} is in "
                "progress as a plain process, and what takes its place is one too",
                f"after {stop} a deploy starts a container"
                if wanted in runtimes.CONTAINED
                else f"without it there would be no container either: {why}",
                True,
            )
        ]
    return [
        Check(
            "image",
            False,
            f"the run's file names the image {run.image.use}, but {host.name} would start a plain process: "
            f"{why}",
            "put that right, or say so with runtime: process in fabric.yaml",
        )
    ]


def refuse(found: Iterable[Check]) -> None:
    """Raise DeployError with all failures, a line each."""
    failed = [check for check in found if not check.ok and not check.warning]
    if failed:
        raise DeployError("\n".join(check.sentence for check in failed))


def warnings(found: Iterable[Check]) -> list[str]:
    return [check.sentence for check in found if not check.ok and check.warning]


# -- one subject each --------------------------------------------------------------------------------------


def _tools(facts: Mapping[str, Any], host: HostSettings) -> list[Check]:
    if _version(facts["python"]) >= TOOLS_PYTHON:
        return []
    return [
        Check(
            "tools",
            False,
            f"{host.name} has Python {facts['python']}, but Drafthouse's own scripts need 3.9 or later",
            "install a newer python3 there",
        )
    ]


def _python(survey: Survey, host: HostSettings, run: RunSettings) -> list[Check]:
    """The interpreter of the process runtime; a container brings its own."""
    found = []
    interpreter = survey.interpreter
    if interpreter.problem:
        found.append(
            Check(
                "python",
                False,
                f"{interpreter.path} on {host.name} {interpreter.problem}",
                f"set python: of {host.name} in fabric.yaml to one that has the trainer's packages",
            )
        )
    elif run.command is None and _version(interpreter.version) < TRAINER_PYTHON:
        found.append(
            Check(
                "python",
                False,
                f"{interpreter.path} on {host.name} is Python {interpreter.version}, but "
                "the trainer needs 3.11 or later",
                f"set python: of {host.name} in fabric.yaml to a newer one",
            )
        )
    elif run.command is None and interpreter.missing:
        found.append(
            Check(
                "packages",
                False,
                f"{interpreter.path} on {host.name} lacks {', '.join(interpreter.missing)}",
                "install the trainer there with pip install -c constraints.txt '.[trainer]', or set "
                f"python: of {host.name} in fabric.yaml",
            )
        )
    if interpreter.lost:
        found.append(
            Check(
                "command",
                False,
                f"there is no program {interpreter.lost} on {host.name}",
                "correct command: in the run's file, or give the program's whole path",
            )
        )
    return found or [Check("python", True)]


def _unbuffered(host: Mapping[str, str], run: Mapping[str, str]) -> list[Check]:
    """A typo seen in real projects, and values that switch off what they seem to switch on."""
    found = []
    for where, variables, warning in (
        ("the run's environment", run, False),
        ("the host's environment", host, True),
    ):
        for typo in ("PYTHONBUFFERED", "PYTHONUNBUFERED", "PYTHON_UNBUFFERED", "PYTHONUNBUFFER"):
            if typo in variables:
                found.append(
                    Check(
                        "unbuffered",
                        False,
                        f"{where} has {typo}, which Python does not know",
                        "the name is PYTHONUNBUFFERED, and Drafthouse sets it: remove yours",
                        warning,
                    )
                )
        value = variables.get("PYTHONUNBUFFERED")
        if value is not None and python_start.is_off(value):
            shown = value or "an empty text"
            found.append(
                Check(
                    "unbuffered",
                    False,
                    f"{where} sets PYTHONUNBUFFERED to {shown}, which means off: "
                    "output would wait in a buffer",
                    "remove it, Drafthouse sets it to 1",
                    warning,
                )
            )
    return found or [Check("unbuffered", True)]


def _driver(facts: Mapping[str, Any], host: HostSettings, found: devices.Devices) -> list[Check]:
    """After an upgrade of packages the loaded module is still the old one, and every CUDA call fails."""
    gpus = facts.get("gpus") or {}
    module, library = gpus.get("driver"), gpus.get("library")
    if not (devices.there(facts) and module and library) or module == library or found.ids == ():
        return []
    return [
        Check(
            "driver",
            False,
            f"the NVIDIA driver that {host.name} has loaded is {module}, but its library is {library}: "
            "no CUDA call would work",
            "reboot that machine, or unload the nvidia modules and load them again",
        )
    ]


def _open_secrets(run: RunSettings) -> list[Check]:
    """Values that belong under secrets:, since what is in environment: can be read by all on the host."""
    return [
        Check(
            "secrets",
            False,
            f"environment.{key} looks like a secret, but is kept in files of the release that all can read",
            f"move {key} to secrets: in the run's file",
            True,
        )
        for key, value in run.environment.items()
        if value and mask.secret_name(key)
    ]


def _clocks(facts: Mapping[str, Any], host: HostSettings) -> list[Check]:
    ours = facts.get("client_time")
    apart = 0.0 if ours is None else facts["time"] - ours
    if abs(apart) < CLOCKS_APART:
        return [Check("clocks", True)]
    way = "ahead of" if apart > 0 else "behind"
    return [
        Check(
            "clocks",
            False,
            f"the clock of {host.name} is {age(abs(apart))} {way} this machine's: times will not agree",
            "set both by NTP: timedatectl set-ntp true",
            True,
        )
    ]


def _place(key: str, host: HostSettings) -> str:
    """What chooses another place: the variables count on this machine only."""
    return f"{key}: in fabric.yaml" + (f" or DRAFTHOUSE_{key.upper()}" if host.is_local else "")


def _state(facts: Mapping[str, Any], host: HostSettings) -> Check:
    state = facts["state"]
    if state["writable"]:
        owner = state.get("owner_uid")
        if facts["uid"] != 0 or not state["exists"] or owner in (None, 0, compose.IMAGE_USER):
            return Check("state", True)
        return Check(
            "state",
            False,
            f"the state directory {state['root']} belongs to uid {owner}, and you are root: that user could "
            "not manage what you deploy there",
            f"deploy as its owner, or choose another with {_place('state', host)}",
        )
    owner = state.get("owner_uid")
    whose = (
        f" (it belongs to uid {owner}, you are {facts['user']}, uid {facts['uid']})"
        if owner is not None
        else ""
    )
    return Check(
        "state",
        False,
        f"the state directory {state['root']} cannot be written{whose}",
        f"deploy as its owner, or choose another with {_place('state', host)}",
    )


def _disk(survey: Survey, run: RunSettings) -> Check:
    state = survey.facts["state"]
    need = DISK_COMMAND if run.command is not None else DISK_TOY if run.weights == TOY else DISK_MODEL
    copies = [copy for copy in (survey.weights, survey.data_copy) if copy and copy.action in ("push", "keep")]
    pushed = sum(copy.bytes for copy in copies if copy.kept)
    free = state.get("free_bytes")
    if free is None or free >= need + pushed:
        return Check("disk", True)
    return Check(
        "disk",
        False,
        f"{state['root']} has {size(free)} free, but a run needs at least {size(need + pushed)} for "
        + ("what is pushed there, " if pushed else "")
        + "release, log and checkpoints",
        "free some, or choose another place with state: in fabric.yaml",
    )


def _shared_memory(
    survey: Survey, host: HostSettings, run: RunSettings, runtime: str, count: int
) -> list[Check]:
    """Whether the weights fit in, and the run beside them. `count`: the devices that it gets."""
    shm = survey.facts["shm"]
    if not budget.need_of(survey.weights):
        return [Check("shm", True)]
    found = []
    if not shm["writable"]:
        message = f"{shm['root']} cannot be written by {survey.facts['user']}"
        found.append(Check("shm", False, message, f"choose another place with {_place('shm', host)}"))
    else:
        found += budget.of_run(survey, host.name, run, runtime, count).checks
    if not shm.get("is_tmpfs"):
        found.append(
            Check(
                "shm",
                False,
                f"{shm['root']} is no tmpfs, so weights would be read from disk",
                f"choose a place below /dev/shm with {_place('shm', host)}",
                True,
            )
        )
    return found or [Check("shm", True)]


def _directories(survey: Survey, run: RunSettings) -> list[Check]:
    """Two runs must not write the same checkpoints: the second would resume from the first's."""
    found = []
    mine = survey.layout.checkpoints
    for other in survey.facts.get("runs", []):
        words = (other.get("run") or {}).get("command") or []
        used = words[words.index("--output-dir") + 1] if "--output-dir" in words[:-1] else None
        if not other["alive"] or used is None or (other.get("run") or {}).get("adopted"):
            continue
        if other["name"] != run.name and used == mine:
            found.append(
                Check(
                    "in use",
                    False,
                    f"{mine} is in use by {other['run_id']}, a run of another name",
                    f"stop it with fab stop --name {other['name']}",
                )
            )
        if other["name"] == run.name and used != mine:
            found.append(
                Check(
                    "in use",
                    False,
                    f"{other['run_id']} runs as {run.name} with its checkpoints in {used}, not in {mine}",
                    f"stop it with fab stop --name {run.name}, or choose another --name",
                )
            )
    return found or [Check("in use", True)]


def _busy(facts: Mapping[str, Any], name: str) -> list[Check]:
    """A switch that is under way. A deploy that is only warns here: by the time of ours it may be over."""
    holder = (facts.get("switch") or {}).get(name)
    if holder is None:
        other = (facts.get("locks") or {}).get(name)
        if other is None:
            return [Check("busy", True)]
        who = f" by {other['by']}" if isinstance(other, Mapping) and other.get("by") else ""
        return [
            Check(
                "busy",
                False,
                f"another deploy of {name}{who} is under way, and holds the lock",
                "wait for it with --lock-wait SECONDS",
                True,
            )
        ]
    since = holder.get("since")
    ago = f" for {age(facts['time'] - since)}" if isinstance(since, int | float) else ""
    who = f", by {holder['by']}" if holder.get("by") else ""
    return [
        Check(
            "busy",
            False,
            f"a {holder.get('what', 'switch')} of {name} has been under way{ago}{who}",
            "wait for it with --lock-wait SECONDS, or look with fab status",
        )
    ]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


def _halves(problem: str) -> tuple[str, str]:
    message, _, remedy = problem.partition("; ")
    return message, remedy
