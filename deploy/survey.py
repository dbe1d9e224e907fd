"""What a plan is made from: everything that is read before anything is decided. Reads, never writes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy import CHECKOUT, lookup, onhost, release, runtimes, secrets, typedpath, weights, weights_store
from deploy.host import Host
from deploy.release import Layout
from deploy.runtimes import compose, process
from deploy.settings import TOY, HostSettings, Project, RunSettings
from deploy.weights import Weights

# What the trainer imports at its start: without one it would fail in the new run, after the old one ended.
TRAINER_MODULES = ("torch", "transformers", "tokenizers", "safetensors", "pyarrow", "numpy", "yaml")
LOOK_TIMEOUT = 60.0  # seconds; it takes below one, unless a disk is asleep


@dataclass(frozen=True)
class Interpreter:
    """The Python that will run the trainer: on the host, or, with nothing to say of it, in the image."""

    path: str
    version: str = ""
    missing: tuple[str, ...] = ()
    problem: str = ""
    lost: str = ""  # the program of a foreign command, if there is no such program


@dataclass(frozen=True)
class Survey:
    """All evidence for one plan."""

    facts: Mapping[str, Any]  # of the probe
    layout: Layout
    interpreter: Interpreter
    app: Mapping[str, bytes]  # the trainer's sources in this checkout
    git: Mapping[str, Any]
    weights: Weights | None = None
    weights_problems: tuple[str, ...] = ()
    data: str | None = None  # on the host
    data_copy: Weights | None = None  # how they get there, if they come from this machine
    data_problems: tuple[str, ...] = ()
    secret_problems: tuple[str, ...] = ()
    checkpoint: Mapping[str, Any] | None = None  # state.json of checkpoints/latest
    image: release.Image | None = None  # with the compose runtime

    @property
    def runs(self) -> list[Mapping[str, Any]]:
        """The runs of this name, oldest first."""
        return [run for run in self.facts["runs"] if run["name"] == self.layout.name]

    @property
    def live(self) -> Mapping[str, Any] | None:
        """The run of this name that is in progress."""
        return next((run for run in reversed(self.runs) if run["alive"]), None)


def take(
    project: Project,
    host: Host,
    settings: HostSettings,
    run: RunSettings,
    facts: Mapping[str, Any],
    progress: Callable[[str], None] = lambda text: None,
    *,
    read_weights: bool = True,
) -> Survey:
    """Read what the plan needs besides the probe's facts. Without `read_weights` nothing large is read.

    The host is asked once, and once more only if weights that lie there must be read.
    """
    layout = layout_of(settings, facts, run.name)
    python = settings.python or facts["python_path"]
    model = Directory.find(project, settings, run.weights, toy=TOY)
    data = Directory.find(project, settings, run.data, toy=TOY)
    wanted: dict[str, Any] = {"state": {"checkpoints": layout.checkpoints}}
    contained = runtimes.choose(settings, facts, run.name)[0] == "compose"
    if not contained:
        wanted["interpreter"] = _question(python, run, working_directory(project, settings, run))
    if model and model.here:
        wanted["copies"] = {"name": model.name, "places": [f"{layout.state}/weights", layout.shm]}
    elif model:
        wanted["weights"] = {"source": model.given, "shm": layout.shm, "read": False}
    if data and not data.here:
        wanted["data"] = {"source": data.given}
    elif data:
        wanted["data_copies"] = {"name": data.name, "places": [f"{layout.state}/data"]}
    answers = onhost.ask(host, "deploy.lookup:look", wanted, timeout=LOOK_TIMEOUT)
    reading = (host, layout, progress, read_weights)
    staged, weight_problems = _weights(run, model, answers, *reading)
    path, copy, data_problems = _data(run, data, answers, *reading)
    return Survey(
        facts,
        layout,
        Interpreter(compose.python(run)) if contained else _interpreter(python, answers["interpreter"]),
        release.trainer_files(CHECKOUT),
        release.git_state(CHECKOUT),
        staged,
        weight_problems,
        path,
        copy,
        data_problems,
        tuple(secrets.problems(run.secrets, project.root)),
        answers["state"],
        compose.image(CHECKOUT, settings, run, facts),
    )


def working_directory(project: Project, settings: HostSettings, run: RunSettings) -> str | None:
    """Where a run is started: as its file says, else, for a foreign command on this machine, the project."""
    if run.working_directory is not None or run.command is None or not settings.is_local:
        return run.working_directory
    return str(project.root)


def layout_of(settings: HostSettings, facts: Mapping[str, Any], name: str) -> Layout:
    return Layout(facts["state"]["root"], facts["shm"]["root"], name, settings.cache)


@dataclass(frozen=True)
class Directory:
    """A directory that the run's file names, and whether it is looked for on this machine or on the host."""

    given: str  # absolute, as it is called there
    here: bool  # on this machine, which is not the host

    @property
    def name(self) -> str:
        return Path(self.given).resolve().name

    @classmethod
    def find(cls, project: Project, settings: HostSettings, text: str | None, toy: str) -> Directory | None:
        """None for none, and for the toy. This machine first, then the host, if a path means anything there.

        Relative paths count from the project, wherever `fab` is called; so they mean this machine.
        """
        if text is None or text == toy:
            return None
        path = Path(os.path.normpath(project.root / typedpath.expand(text)))
        if settings.is_local:
            return cls(str(path), here=False)
        if os.path.exists(path) or not (text.startswith("~") or os.path.isabs(text)):
            return cls(str(path), here=True)
        return cls(text, here=False)


def _question(python: str, run: RunSettings, directory: str | None) -> dict[str, Any]:
    """To the trainer's Python: who it is, what it has, and whether a foreign command's program exists."""
    return {
        "python": python,
        "modules": TRAINER_MODULES,
        "program": run.command[0] if run.command else None,
        "path": run.environment.get("PATH") or process.search_path(python),
        "directory": directory,
    }


def _interpreter(python: str, answer: Mapping[str, Any]) -> Interpreter:
    missing = tuple(answer.get("missing", ()))
    return Interpreter(
        python, answer.get("version", ""), missing, answer.get("problem", ""), answer.get("lost", "")
    )


def _weights(
    run: RunSettings,
    model: Directory | None,
    answers: Mapping[str, Any],
    host: Host,
    layout: Layout,
    progress: Callable[[str], None],
    read: bool,
) -> tuple[Weights | None, tuple[str, ...]]:
    if run.weights is None:
        if run.command is not None:
            return None, ()
        return None, ("the run's file names no weights; add weights: with a model directory, or toy",)
    if model is None:
        return Weights(TOY, "toy", TOY), ()
    if model.here:
        source = Path(model.given)
        problems = weights_store.check_model_dir(source)
        if problems:
            return None, tuple(problems)
        there, staged = answers["copies"]
        place = f"{layout.state}/weights"
        return weights.pushed(source, place, layout.shm, there, staged, progress, read=read), ()
    found = answers["weights"]
    if found.get("action") == "changed" and read:
        found = onhost.ask(
            host,
            "deploy.weights_store:look",
            model.given,
            layout.shm,
            timeout=weights.SILENCE,
            progress=progress,
        )
    if found.get("problems"):
        return None, tuple(found["problems"])
    return Weights(**found), ()


def _data(
    run: RunSettings,
    data: Directory | None,
    answers: Mapping[str, Any],
    host: Host,
    layout: Layout,
    progress: Callable[[str], None],
    read: bool,
) -> tuple[str | None, Weights | None, tuple[str, ...]]:
    """(their path on the host, how they get there, what is wrong with them)."""
    if run.data == TOY or (run.data is None and (run.weights == TOY or run.command is not None)):
        return run.data if run.command is not None else TOY, None, ()
    if data is None:
        return (
            None,
            None,
            ("the run's file names no data; add data: with a directory of tokenised completions, or toy",),
        )
    if not data.here:
        found = answers["data"]
        problems = tuple(found["problems"])
        return (None if problems else found["path"]), None, problems
    source = Path(data.given)
    problems = tuple(lookup.data_problems(source))
    if problems:
        return None, None, problems
    there = answers["data_copies"][0]
    copy = weights.pushed(source, f"{layout.state}/data", "", there, [], progress, read=read)
    return copy.path, copy, ()
