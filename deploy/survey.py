"""What a plan is made from: everything that is read before anything is decided. Reads, never writes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy import (
    CHECKOUT,
    lookup,
    manifest,
    onhost,
    release,
    runtimes,
    secrets,
    strays,
    typedpath,
    weights,
    weights_check,
)
from deploy.errors import DeployError
from deploy.host import Host
from deploy.release import Layout
from deploy.runtimes import compose, pct, process
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
    git: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    weights: Weights | None = None
    weights_problems: tuple[str, ...] = ()
    data: str | None = None  # on the host
    data_copy: Weights | None = None  # how they get there, if they come from this machine
    data_problems: tuple[str, ...] = ()
    secret_problems: tuple[str, ...] = ()
    secret_values: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)  # those known here
    secrets_changed: tuple[str, ...] = ()  # names whose value the run in progress has otherwise
    secrets_unread: tuple[str, ...] = ()  # names of which that is not known, since they cannot be read here
    checkpoint: Mapping[str, Any] | None = None  # state.json of checkpoints/latest
    image: release.Image | None = None  # of a run in a container
    image_there: bool | None = None  # whether the engine has one's own image; None: not asked, or not known
    storages: Mapping[str, Any] | None = None  # with the pct runtime: see lookup.storages
    around: Mapping[str, Any] | None = (
        None  # of a host that is a container: `pve.facts` of the host around it
    )
    strays: tuple[Mapping[str, Any], ...] = ()  # processes of the name outside its runs, see deploy.strays
    copies: tuple[Mapping[str, Any], ...] | None = None  # with --evict-first: see weights_uses.listing

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
    copies: bool = False,
) -> Survey:
    """Read what the plan needs besides the probe's facts.

    The host is asked once, and once more only if weights that lie there must be read, or for `copies`: which
    weights lie there, and who uses them.
    """
    question = _Question.of(project, settings, run, facts)
    wanted = {
        **question.wanted,
        "state": {"checkpoints": question.layout.checkpoints},
        "strays": strays.question(facts, run.name),
    }
    if not question.contained:
        directory = working_directory(project, settings, run)
        wanted["interpreter"] = _interpreters_question(question.python, run, directory)
    values, secret_problems = secrets.look(run.secrets, project.root)
    file = secrets.file_in_use(facts, run.name)
    if file and values:
        wanted["secrets"] = {"path": file, "values": values}
    if question.runtime == "pct":
        paths = [
            question.layout.state,
            question.layout.cache,
            *([question.data.given] if question.data else []),
        ]
        volume = run.image.use if pct.VOLUME in (run.image.use or "") else None
        wanted["storages"] = {"template": volume, "paths": paths}
    elif question.contained and run.image.use is not None and facts["engine"]["answers"]:
        wanted["image"] = {"reference": run.image.use, "address": facts["engine"].get("address")}
    with _Around(host) as around:
        answers = onhost.ask(host, "deploy.lookup:look", wanted, timeout=LOOK_TIMEOUT)
    found = _answered(question, answers, host, progress, read=True)
    return dataclasses.replace(
        found,
        around=around.facts,
        interpreter=found.interpreter
        if question.contained
        else _interpreter(question.python, answers["interpreter"]),
        git=release.git_state(CHECKOUT),
        secret_problems=tuple(secret_problems),
        secret_values=values,
        image_there=answers.get("image"),
        storages=answers.get("storages"),
        secrets_changed=tuple(answers.get("secrets", ())),
        secrets_unread=tuple(sorted(set(run.secrets) - set(values))) if file else (),
        checkpoint=answers["state"],
        strays=tuple(answers["strays"]),
        copies=tuple(_copies(host, question.layout)) if copies else None,
    )


class _Around:
    """Asks the Proxmox host around a container about it, while the container itself is asked."""

    def __init__(self, host: Host) -> None:
        self.facts: Mapping[str, Any] | None = None
        outer = getattr(host, "outer", None)
        self._thread = None if outer is None else threading.Thread(target=self._ask, args=(outer,))

    def _ask(self, outer: Host) -> None:
        # What cannot be known is not checked: a command has come through, so the container can be entered.
        with contextlib.suppress(DeployError):
            self.facts = onhost.ask(outer, "deploy.pve:facts", timeout=LOOK_TIMEOUT)

    def __enter__(self) -> _Around:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._thread.join()


def _copies(host: Host, layout: Layout) -> list[Mapping[str, Any]]:
    words = ("deploy.weights_uses:listing", layout.state, layout.shm)
    found: list[Mapping[str, Any]] = onhost.ask(host, *words, timeout=LOOK_TIMEOUT)
    return found


def of_releases(
    project: Project,
    host: Host,
    settings: HostSettings,
    runs: Sequence[RunSettings],
    facts: Mapping[str, Any],
) -> list[Survey]:
    """What decides the releases that these settings would give, and no more; nothing large is read.

    The host is asked once for all of them.
    """
    if not runs:
        return []
    questions = [_Question.of(project, settings, run, facts) for run in runs]
    wanted = [question.wanted for question in questions]
    answers = (
        onhost.ask(host, "deploy.lookup:look_each", wanted, timeout=LOOK_TIMEOUT) if any(wanted) else wanted
    )
    app = release.trainer_files(CHECKOUT)
    return [
        _answered(question, answer, host, lambda text: None, read=False, app=app)
        for question, answer in zip(questions, answers, strict=True)
    ]


@dataclass(frozen=True)
class _Question:
    """What has to be asked of a host for a run's settings, and whom the answers are for."""

    settings: HostSettings
    run: RunSettings
    facts: Mapping[str, Any]
    layout: Layout
    python: str
    runtime: str
    model: Directory | None
    data: Directory | None

    @classmethod
    def of(
        cls, project: Project, settings: HostSettings, run: RunSettings, facts: Mapping[str, Any]
    ) -> _Question:
        return cls(
            settings,
            run,
            facts,
            layout_of(settings, facts, run.name),
            settings.python or facts["python_path"],
            runtimes.choose(settings, facts, run.name)[0],
            Directory.find(project, settings, run.weights, toy=TOY),
            Directory.find(project, settings, run.data, toy=TOY),
        )

    @property
    def contained(self) -> bool:
        return self.runtime in runtimes.CONTAINED

    @property
    def wanted(self) -> dict[str, Any]:
        """The questions about weights and data, for `deploy.lookup`."""
        model, data, layout = self.model, self.data, self.layout
        asked: dict[str, Any] = {}
        if model and model.here:
            asked["copies"] = {"name": model.name, "places": [f"{layout.state}/weights", layout.shm]}
            asked["held"] = {"name": model.name, "place": layout.shm}
            kept = f"{layout.state}/weights" if self.settings.keep_on_disk else ""
            asked["places"] = {"state": kept, "shm": layout.shm}
        elif model:
            asked["weights"] = {"source": model.given, "shm": layout.shm, "read": False}
        if data and not data.here:
            asked["data"] = {"source": data.given}
        elif data:
            asked["data_copies"] = {"name": data.name, "places": [f"{layout.state}/data"]}
        if any(one and one.here for one in (model, data)):
            asked["hashes"] = {}
        return asked


def _answered(
    question: _Question,
    answers: Mapping[str, Any],
    host: Host,
    progress: Callable[[str], None],
    *,
    read: bool,
    app: Mapping[str, bytes] | None = None,
) -> Survey:
    run, layout = question.run, question.layout
    reading = (host, layout, progress, read)
    keep = question.settings.keep_on_disk
    staged, weights_problems = _weights(run, question.model, answers, *reading, keep)
    path, copy, data_problems = _data(run, question.data, answers, *reading)
    return Survey(
        question.facts,
        layout,
        Interpreter(compose.python(run) if question.contained else question.python),
        release.trainer_files(CHECKOUT) if app is None else app,
        weights=staged,
        weights_problems=weights_problems,
        data=path,
        data_copy=copy,
        data_problems=data_problems,
        image=compose.image(CHECKOUT, question.settings, run, question.facts),
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
        return manifest.name_of(Path(self.given))

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


def _interpreters_question(python: str, run: RunSettings, directory: str | None) -> dict[str, Any]:
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
    keep: bool,
) -> tuple[Weights | None, tuple[str, ...]]:
    if run.weights is None:
        if run.command is not None:
            return None, ()
        return None, ("the run's file names no weights; add weights: with a model directory, or toy",)
    if model is None:
        return Weights(TOY, "toy", TOY), ()
    if model.here:
        source = Path(model.given)
        problems = weights_check.check_model_dir(source)
        if problems:
            return None, tuple(problems)
        if answers["places"]:  # before all of them is read
            return None, tuple(answers["places"])
        there, staged = answers["copies"]
        place = f"{layout.state}/weights" if keep else ""
        known = {"hashes": answers["hashes"], "held": answers["held"]}
        return weights.pushed(source, place, layout.shm, there, staged, progress, read=read, **known), ()
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
    hashes = answers["hashes"]
    copy = weights.pushed(source, f"{layout.state}/data", "", there, [], progress, read=read, hashes=hashes)
    return copy.path, copy, ()
