"""A run's file from a program as somebody started it by hand: what is carried over, and what is not. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deploy import flags, mask, python_start, yamlfile
from deploy.adopt_host import of_a_terminal, secret
from deploy.bash_found import KEPT, POSITIONAL, Note, Start

OURS = ("PYTHONUNBUFFERED", "DRAFTHOUSE_RUN_DIR", "DRAFTHOUSE_ATTEMPT", "DRAFTHOUSE_SECRETS_FILE")
DEVICES = ("--target-gpus", "--drafter-gpus")
AS_WEIGHTS = {"target-model": "weights", "data-dir": "data"}
PLACES = {
    "output-dir": "checkpoints lie with the name, in names/NAME/checkpoints; copy the newest there to go on",
    "cache-dir": "caches lie with the name",
    "run-dir": "every run gets its own directory",
}


@dataclass
class Made:
    """What was made of a program: the file's settings, and what there is to say about them."""

    settings: dict[str, Any]
    notes: list[Note] = field(default_factory=list)


def of_start(
    start: Start,
    login: Mapping[str, str],
    which: Callable[[str, str, str], str | None],
    name: str,
    origin: str,
) -> Made:
    """The run's file for a program that a script starts. `which` looks for a program on the host."""
    made = Made({"name": name, "description": f"adopted from {origin}"})
    said = made.notes
    line = start.line
    argv = [word.text for word in start.argv]
    for word in start.argv:
        if word.unknown:
            said.append(
                Note(
                    "lost",
                    line,
                    word.text,
                    f"{word.unknown}; it stands in command: as it is here, correct it",
                )
            )
    if start.arguments_asked:
        said.append(Note("lost", line, '"$@" or $1 …', "the script was taken as started without arguments"))
    changed = {
        key: text for key, text in start.environment.items() if key in start.touched or login.get(key) != text
    }
    place = program_at(argv)
    found = which(argv[place], start.environment.get("PATH", ""), start.directory)
    if found is None:
        said.append(Note("lost", line, argv[place], "there is no such program on the host; correct command:"))
    elif found != argv[place]:
        said.append(Note("carried", line, argv[place], f"as {found}, which it means there"))
        argv[place] = found
    made.settings["command"] = argv
    if start.directory_unsure:
        said.append(Note("lost", line, "cd", f"{start.directory_unsure}; set working_directory:"))
    else:
        made.settings["working_directory"] = start.directory
        if not start.moved and any(relative(word) for word in argv[1:]):
            said.append(
                Note(
                    "became",
                    0,
                    "",
                    f"working_directory: {start.directory}, a login's, as the script has no cd",
                )
            )
    for key, why in start.unsure.items():
        if not secret(key, ""):
            said.append(Note("lost", line, key, f"its value is not known here: {why}"))
    add_environment(made, {**changed, **{key: None for key in start.unsure if secret(key, "")}}, line)
    for gone in start.removed:
        if not of_a_terminal(gone) and gone not in OURS:
            said.append(Note("became", line, f"unset {gone}", "not needed: a run gets nothing of a login"))
    words_of_command(made, line)
    add_devices(made, line)
    said += start.notes
    return made


def relative(word: str) -> bool:
    return bool(re.match(r"(?!-|/)[^=:]*(/|\.(py|sh|ya?ml|json|toml)$)", word))


def program_at(argv: Sequence[str]) -> int:
    """Where the program itself stands, behind nice and the like."""
    place = 0
    while place < len(argv) - 1 and argv[place] in KEPT:
        wrapper = argv[place]
        place += 1
        while place < len(argv) - 1 and argv[place].startswith("-"):
            place += 2 if argv[place] in KEPT[wrapper] else 1
        place += POSITIONAL.get(wrapper, 0)
    return min(place, len(argv) - 1)


def add_environment(made: Made, changed: Mapping[str, str | None], line: int) -> None:
    """Variables as environment:, and as secrets: those whose values no file should have (None: not known)."""
    environment, secrets = {}, {}
    for key, text in sorted(changed.items()):
        if of_a_terminal(key) and key not in ("LC_ALL",):
            continue
        if key == "PYTHONUNBUFFERED":
            made.notes.append(Note("became", 0, key, "set for every run, whatever it starts"))
        elif key in OURS:
            continue
        elif key == "CUDA_VISIBLE_DEVICES" and text is not None and re.fullmatch(r"\d+(,\d+)*", text):
            made.settings["gpus"] = [int(one) for one in text.split(",")]
            made.notes.append(Note("became", 0, f"{key}={text}", "gpus:, so that others see which are taken"))
        elif not re.fullmatch(r"[A-Za-z_]\w*", key):
            made.notes.append(Note("lost", 0, key, "no name that a variable in a run's file can have"))
        elif text is None or secret(key, text):
            secrets[key] = {"env": key}
            said = f"a secret: set {key} on your machine before fab deploy, its value is in no file"
            made.notes.append(Note("became", 0, key, said))
        elif not yamlfile.is_text(text):
            made.notes.append(Note("lost", 0, key, "its value is no UTF-8 text"))
        else:
            environment[key] = text
    if environment:
        made.settings["environment"] = environment
        made.notes.append(Note("carried", 0, ", ".join(environment), "under environment:"))
    if secrets:
        made.settings["secrets"] = secrets


def words_of_command(made: Made, line: int) -> None:
    """Nothing secret among them, and nothing that YAML could not hold; how Python's output gets out."""
    argv = made.settings["command"]
    shown = mask.words(argv)
    for place, (word, masked) in enumerate(zip(argv, shown, strict=True)):
        if word != masked or not yamlfile.is_text(word):
            before = argv[place - 1] if place else ""
            flag = before if before.startswith("-") and "=" not in word else masked
            argv[place] = masked if yamlfile.is_text(masked) else mask.MASK
            made.notes.append(
                Note(
                    "lost", line, flag, "its value is a secret and stays out of the file: give it by secrets:"
                )
            )
    program = argv[program_at(argv) :]
    if re.fullmatch(r"(python|pypy)[\d.]*", program[0].rpartition("/")[2]):
        if "u" in set(python_start.switches(program)):
            made.notes.append(
                Note(
                    "carried",
                    line,
                    "-u",
                    "as it stands; PYTHONUNBUFFERED=1, which every run gets, does the same",
                )
            )
        if python_start.ignores_variables(program) and "u" not in set(python_start.switches(program)):
            made.notes.append(
                Note(
                    "became",
                    line,
                    python_start.ignores_variables(program),
                    "tty: true, as it ignores PYTHONUNBUFFERED",
                )
            )
            made.settings["tty"] = True
    made.notes.append(Note("carried", line, " ".join(shown), "under command:"))


def add_devices(made: Made, line: int) -> None:
    """gpus: by the program's own flags, where these number devices as the host does."""
    if "gpus" in made.settings or "CUDA_VISIBLE_DEVICES" in made.settings.get("environment", {}):
        return
    used: set[int] = set()
    argv = made.settings["command"]
    for flag in DEVICES:
        text = value_of(argv, flag)
        if text is not None and re.fullmatch(r"\d+([,\s]\d+)*", text):
            used |= {int(one) for one in re.split(r"[,\s]", text)}
    if used and used == set(range(len(used))):
        made.settings["gpus"] = sorted(used)
        made.notes.append(Note("carried", line, " and ".join(DEVICES), f"as gpus: {sorted(used)}, too"))
    elif used:
        made.notes.append(
            Note("became", line, " and ".join(DEVICES),
                 "no gpus: is set, since that would number the devices anew for the program")
        )  # fmt: skip


def value_of(argv: Sequence[str], flag: str) -> str | None:
    for place, word in enumerate(argv):
        if word == flag and place + 1 < len(argv):
            return argv[place + 1]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


# -- our own trainer's flags -------------------------------------------------------------------------------


def flags_of(argv: Sequence[str]) -> tuple[dict[str, Any], list[tuple[str, str]]] | None:
    """(values by our trainer's flags, (flag, text) of those it has not); None if there are words besides."""
    program = list(argv[program_at(argv) :])
    rest = program[1:]
    while rest and rest[0] in ("-u", "-B", "-O"):
        rest = rest[1:]
    rest = rest[2:] if rest[:1] == ["-m"] else rest[1:]
    found: dict[str, Any] = {}
    other: list[tuple[str, str]] = []
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            return None
        name, equals, text = word[2:].partition("=")
        if not equals:
            several = []
            while rest and not rest[0].startswith("--"):
                several.append(rest.pop(0))
            text, equals = " ".join(several), "=" if several else ""
        name = flags.spelled(name)
        kind = flags.FLAGS.get(name) or flags.FLAGS.get(name.removeprefix("no-"))
        if kind is None:
            other.append((name, text if equals else ""))
        elif kind.kind == "switch" and not equals:
            found[name.removeprefix("no-")] = not name.startswith("no-") or name in flags.FLAGS
        elif kind.kind == "integers":
            found[name] = [int(one) for one in text.split(",") if one.strip().isdigit()]
        else:
            found[name] = text if kind.kind == "text" else yamlfile.parse_value(text)
    return found, other


def could_be_ours(argv: Sequence[str]) -> bool:
    """Whether most of a command's flags are those of our trainer."""
    told = flags_of(argv)
    if told is None:
        return False
    found, other = told
    known = len(found) + sum(name in flags.RESERVED for name, _ in other)
    return known >= 4 and "target-model" in found


def as_trainer(made: Made, line: int) -> Made:
    """The same as trainer: with our trainer's flags in place of command:. Flags that it has not are told."""
    told = flags_of(made.settings["command"])
    if told is None:
        raise ValueError("its command line is not one of flags only")
    found, other = told
    settings = {
        key: value
        for key, value in made.settings.items()
        if key not in ("command", "working_directory", "tty")
    }
    notes = [one for one in made.notes if one.words != "under command:"]
    for flag, key in AS_WEIGHTS.items():
        if flag in found:
            settings[key] = found.pop(flag)
            notes.append(Note("became", line, f"--{flag}", f"{key}:"))
    for name, text in other:
        shown = f"--{name} {text}".strip()
        if name in PLACES:
            notes.append(Note("became", line, shown, PLACES[name]))
        elif name in flags.RESERVED:
            notes.append(Note("became", line, shown, flags.RESERVED[name]))
        else:
            notes.append(Note("lost", line, shown, "our trainer has no such flag"))
    settings["trainer"] = found
    notes.append(Note("carried", line, ", ".join(f"--{one}" for one in found), "under trainer:"))
    return Made(settings, notes)
