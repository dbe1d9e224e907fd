"""`fab adopt`: what was started by hand becomes a run's file and, while it runs, a run of ours.

A script is read from the host and gone through without running it (`deploy.bash_walk`); of a process its own
files in /proc tell (`deploy.adopt_process`, on the host). Both end as a file in runs/, checked as any other.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy import adopt_run, lock, mask, onhost, settings, typedpath, yamlfile
from deploy.adopt_run import Made
from deploy.bash_found import Note
from deploy.errors import USAGE, DeployError
from deploy.host import Host
from deploy.target import Target
from trainer import status

MOST_BYTES = 1 << 20  # of a script
TITLES = {"carried": "carried over", "became": "became something else", "lost": "not carried over"}


@dataclass(frozen=True)
class Adopted:
    """The outcome: the file's text, where it goes, what there is to say, and the run, if a process was."""

    name: str
    text: str
    path: Path
    notes: tuple[Note, ...]
    hints: tuple[str, ...] = ()
    process: dict[str, Any] | None = None
    run_id: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "file": str(self.path), "run_id": self.run_id, "text": self.text,
            "notes": [vars(one) for one in self.notes], "hints": list(self.hints),
        }  # fmt: skip

    def words(self) -> str:
        lines = []
        for kind, title in TITLES.items():
            found = [one for one in self.notes if one.kind == kind]
            lines += [f"{title}:", *(f"  {_said(one)}" for one in found)] if found else []
        if not any(one.kind == "lost" for one in self.notes):
            lines.append("nothing was left out")
        return "\n".join([*lines, *self.hints])


def _said(note: Note) -> str:
    where = f"line {note.line}: " if note.line else ""
    text = mask.text(note.text)
    text = text if len(text) <= 160 else f"{text[:157]}…"
    shown = "".join(char if char.isprintable() else " " for char in text)
    return f"{where}{shown}{' → ' if shown else ''}{note.words}"


class HostPlace:
    """The host of a script, as far as its evaluation asks."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._known: dict[tuple[str, ...], Any] = {}

    def _ask(self, *words: str) -> Any:
        if words not in self._known:
            self._known[words] = onhost.ask(self.host, f"deploy.adopt_host:{words[0]}", *words[1:])
        return self._known[words]

    def read(self, path: str) -> bytes | None:
        return self.host.read(path)

    def test(self, operator: str, path: str) -> bool:
        return bool(self._ask("test", operator, path))

    def which(self, program: str, path: str, directory: str) -> str | None:
        found: str | None = self._ask("which", program, path, directory)
        return found

    def real(self, path: str) -> str:
        return str(self._ask("real", path))


# -- a script ----------------------------------------------------------------------------------------------


def script(
    goal: Target,
    path: str,
    *,
    name: str | None,
    out: str | None,
    line: int | None = None,
    trainer: bool = False,
) -> Adopted:
    """The run's file for what a script on the host starts. Nothing is written yet, and nothing is run.

    Raises DeployError if there is no such script, or if it starts no program, or several and `line` chooses
    none.
    """
    try:
        from deploy.bash_shell import Shell
        from deploy.bash_walk import Walk

        import_parser()
    except ImportError:
        raise DeployError(
            "fab adopt needs tree-sitter to read scripts; install the client's packages again: "
            "pip install -c constraints.txt -e '.[deploy]'"
        ) from None
    host, label = goal.host, goal.settings.name
    login = onhost.ask(host, "deploy.adopt_host:login")
    where = os.getcwd() if host.is_local and not path.startswith("~/") else login["home"]
    whole = os.path.normpath(os.path.join(where, path[2:] if path.startswith("~/") else path))
    data = host.read(whole)
    if data is None:
        raise DeployError(f"there is no script {whole} on {label}; correct --script", code=USAGE)
    _check_script(data, whole, label)
    environment = dict(login["environment"])
    place = HostPlace(host)
    shell = Shell(place, dict(environment), exported=set(environment), directory=login["home"], zero=whole)
    walk = Walk(shell, environment)
    walk.script(data)
    start = _chosen(walk, whole, label, line)
    named = _name(name, value_of_name(start.argv), whole)
    made = adopt_run.of_start(start, environment, place.which, named, os.path.basename(whole))
    hints = []
    if trainer:
        try:
            made = adopt_run.as_trainer(made, start.line)
        except ValueError as error:
            raise DeployError(
                f"--as-trainer does not fit {whole}: {error}; leave it out", code=USAGE
            ) from None
    elif adopt_run.could_be_ours(made.settings["command"]):
        hints.append("its flags are our trainer's: --as-trainer writes trainer: in place of command:")
    made.notes[:0] = walk.notes
    unknown = [word for word in start.argv if word.unknown]
    if unknown:
        hints.append(
            f"correct the file before fab deploy: {len(unknown)} of its words could not be known"
            f" (command: [bash, {whole}] starts the script itself, if that puts nothing into the background)"
        )
    return _adopted(goal, made, named, out, hints)


def import_parser() -> None:
    import tree_sitter  # noqa: F401
    import tree_sitter_bash  # noqa: F401


def _check_script(data: bytes, path: str, label: str) -> None:
    first = data.split(b"\n", 1)[0].decode("utf-8", "replace")
    if b"\0" in data:
        raise DeployError(
            f"{path} on {label} is a program and no script; give the script that starts it", code=USAGE
        )
    if len(data) > MOST_BYTES:
        raise DeployError(
            f"{path} on {label} has {len(data):,} bytes, which is no script to start a run", code=USAGE
        )
    if first.startswith("#!") and not re.search(r"\b(ba|da|z|k)?sh\b", first):
        raise DeployError(
            f"{path} on {label} is a script for {first[2:].strip()[:60]}, and only those of bash are read; "
            "give the script that starts it, or --pid of what runs",
            code=USAGE,
        )


def _chosen(walk: Any, path: str, label: str, line: int | None) -> Any:
    found = walk.starts
    if line is not None:
        found = [one for one in found if one.line == line]
    if not found:
        those = ", ".join(f"line {one.line}" for one in walk.starts)
        if walk.starts:
            raise DeployError(f"line {line} of {path} starts no program; {those} does", code=USAGE)
        lost = [_said(one) for one in walk.notes if one.kind == "lost"]
        more = f" (not understood: {'; '.join(lost[:3])})" if lost else ""
        raise DeployError(
            f"{path} on {label} starts no Python program, so there is nothing to adopt{more}; give the "
            "script that does, or --pid of what runs",
            code=USAGE,
        )
    if len(found) > 1:
        each = ", ".join(f"line {one.line} ({mask.text(one.text)[:60]})" for one in found[:5])
        raise DeployError(
            f"{path} on {label} starts {len(found)} programs: {each}; choose one with --line N", code=USAGE
        )
    return found[0]


def value_of_name(argv: Sequence[Any]) -> str | None:
    """A name that the command itself gives to what it does."""
    words = [word.text for word in argv if not word.unknown]
    for flag in ("--wandb-run-name", "--run-name", "--run_name", "--exp-name", "--exp_name", "--name"):
        found = adopt_run.value_of(words, flag)
        if found:
            return found
    return None


def _name(given: str | None, told: str | None, path: str) -> str:
    """--name, else the one that the command gives, else the file's."""
    if given is not None:
        if not status.valid_name(given):
            raise DeployError(
                f"--name {given!r} cannot be a name; use lower-case letters, digits, '.', '_' and '-'",
                code=USAGE,
            )
        return given
    for text in (told, os.path.basename(path).partition(".")[0], "adopted"):
        made = re.sub(r"[^a-z0-9._-]+", "-", (text or "").lower()).strip("-._")[:63].strip("-._")
        if made and status.valid_name(made) and made not in ("run", "start", "train", "launch"):
            return made
    return "adopted"


# -- a process ---------------------------------------------------------------------------------------------


def process(
    goal: Target,
    pid: int,
    *,
    name: str | None,
    out: str | None,
    trainer: bool = False,
) -> Adopted:
    """The run's file for a process of the host. It is only looked at; `register` makes a run of it.

    Raises DeployError for one that is not there, is no Python, or belongs to a run of ours.
    """
    facts = goal.facts()
    label = goal.settings.name
    root = facts["state"]["root"]
    found = onhost.ask(goal.host, "deploy.adopt_process:look", pid, label, root)
    at_work = [run["run_id"] for run in facts["runs"] if run["name"] == name and run["alive"]]
    if at_work:
        raise DeployError(
            f"run {at_work[-1]} of {name} is in progress on {label}, so no other process can be adopted as "
            f"{name}; choose another --name"
        )
    named = _name(name, value_of_name([_Plain(word) for word in found["argv"]]), _script_of(found["argv"]))
    made = Made({"name": named, "description": f"adopted from process {found['pid']} on {label}"})
    made.settings["command"] = list(found["argv"])
    made.settings["working_directory"] = found["directory"]
    if found["program"] != found["argv"][0]:
        made.notes.append(Note("carried", 0, found["argv"][0], f"as {found['program']}, which it is"))
        made.settings["command"][0] = found["program"]
    adopt_run.add_environment(made, found["environment"], 0)
    adopt_run.words_of_command(made, 0)
    adopt_run.add_devices(made, 0)
    if found["stdout"]:
        made.notes.append(
            Note("became", 0, f"> {found['stdout']}", "the log: Drafthouse keeps what the next run prints")
        )
    for sentence in found["notes"]:
        made.notes.append(Note("lost", 0, "", sentence))
    hints = []
    if trainer:
        try:
            made = adopt_run.as_trainer(made, 0)
        except ValueError as error:
            raise DeployError(
                f"--as-trainer does not fit process {pid}: {error}; leave it out", code=USAGE
            ) from None
    elif adopt_run.could_be_ours(made.settings["command"]):
        hints.append("its flags are our trainer's: --as-trainer writes trainer: in place of command:")
    done = _adopted(goal, made, named, out, hints)
    return Adopted(done.name, done.text, done.path, done.notes, done.hints, {**found, "state": root})


@dataclass(frozen=True)
class _Plain:
    text: str
    unknown: str = ""


def _script_of(argv: Sequence[str]) -> str:
    return next((word for word in argv[1:] if word.endswith(".py")), "adopted")


def register(goal: Target, made: Adopted, run_file: str) -> str:
    """Make a run of an adopted process, which is not touched. Returns the run's id. Raises DeployError."""
    assert made.process is not None
    found, state, who = made.process, made.process["state"], lock.who()
    variables = found["environment"]
    with lock.hold(goal.host, state, made.name, "adopt", 0.0):
        return str(
            onhost.ask(
                goal.host, "deploy.adopt_process:register", state, made.name, found["identity"],
                {
                    "command": mask.words(found["argv"]),
                    "environment": {key: text for key, text in variables.items() if text is not None},
                    "secrets": sorted(key for key, text in variables.items() if text is None),
                    "working_directory": found["directory"],
                    "run_file": run_file,
                    "who": who,
                    "origin": who.partition("@")[2],
                },
            )
        )  # fmt: skip


# -- the file ----------------------------------------------------------------------------------------------


def _adopted(goal: Target, made: Made, name: str, out: str | None, hints: list[str]) -> Adopted:
    """The text of the file, read back as a deploy would read it. Raises DeployError."""
    order = ("name", "description", "trainer", "command", "weights", "data", "environment", "secrets",
             "working_directory", "tty", "gpus")  # fmt: skip
    chosen = {key: made.settings[key] for key in order if made.settings.get(key) not in (None, {})}
    root = goal.project.root
    path = typedpath.expand(out) if out else root / "runs" / f"{name}.yaml"
    path = path if path.is_absolute() else root / path
    if path.suffix not in (".yaml", ".yml"):
        raise DeployError(f"--out {out} must end in .yaml", code=USAGE)
    text = yamlfile.dump(chosen)
    check(text, str(path.relative_to(root)) if path.is_relative_to(root) else str(path), chosen)
    return Adopted(name, text, path, tuple(dict.fromkeys(made.notes)), tuple(hints))


def check(text: str, shown: str, chosen: dict[str, Any]) -> None:
    """Read the file's text as a deploy would. Raises DeployError if it says something else than is meant."""
    read = settings.read_run(yamlfile.parse(text, shown), Path(shown).stem)
    meant = chosen.get("command")
    if meant is not None and read.command != [str(word) for word in meant]:
        raise DeployError(f"{shown} would not start what was read: {json.dumps(meant)[:200]}; report this")
    if read.environment != chosen.get("environment", {}):
        raise DeployError(f"{shown} would not set the variables that were read; report this")


def write(made: Adopted, *, force: bool) -> None:
    """Put the file in its place whole. Raises DeployError if another one is there."""
    path = made.path
    try:
        if not force and os.path.lexists(path):
            if path.is_file() and path.read_text(encoding="utf-8", errors="replace") == made.text:
                return
            raise DeployError(
                f"{path} is there already and stays as it is; --force replaces it, --out FILE writes another",
                code=USAGE,
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(made.text, encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        raise DeployError(f"{path} cannot be written: {error.strerror}") from None
