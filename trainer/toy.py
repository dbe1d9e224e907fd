"""The embedded default: a small real target and its completions, made on the spot and kept.

Nothing is downloaded: the text is the Python standard library that every machine has. What is made lies in

    <cache>/toy-<digest>/target/       a model directory like any other (Qwen3, its own tokenizer)
                         data/         tokenised completions by that target
                         prompts.json  {"known": …, "held_out": …} for evaluation, token ids
                         toy.json      how it was made, and how long that took
    <shm>/toy@<digest>/                the target once more, in memory
    <shm>/toy -> toy@<digest>

Both appear by rename, complete or not at all. The first digest is over the recipe, the code and the text,
so a change of any of them makes a new toy; the second is over the target's files. What takes time is in
toy_target.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from trainer.data_meta import read_meta
from trainer.errors import InputError, nearest
from trainer.files import flush
from trainer.modeldir import check_weights, read_config
from trainer.staging import stage

RECIPE_VARIABLE = "DRAFTHOUSE_TOY"
ENOUGH = 0.8  # of the recipe's steps: with fewer, what the target writes begins to go round in circles
REPETITIVE = 0.3  # a file that compresses better than this is a table or boilerplate
CODE = ("toy_target.py", "optim.py", "speculative.py", "completions.py")  # what decides how a toy comes out

Report = Callable[[str], None]
Prompts = dict[str, list[list[int]]]


@dataclass(frozen=True)
class Recipe:
    """How a toy is made. Lengths are in tokens, `seconds` is a ceiling, all else decides the result."""

    known_bytes: int  # of source text that the target learns by heart
    held_out_files: int
    vocab_size: int  # the end-of-text token first, the mask token last
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    intermediate_size: int
    sequence: int  # of a training window
    batch: int  # windows in a step
    steps: int
    seconds: float  # the schedule ends here on a slow machine
    rate: float  # learning rate
    prompt: int
    completion: int
    documents: int  # completions to train the drafter on
    side_by_side: int  # completions generated at one time
    evaluation_prompts: int
    seed: int = 0

    @property
    def shape(self) -> SimpleNamespace:
        """What a check has to know of the target's config before there is one."""
        return SimpleNamespace(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.hidden_size // self.heads,
        )


RECIPES = {
    "demo": Recipe(
        known_bytes=28_000,
        held_out_files=24,
        vocab_size=1024,
        hidden_size=128,
        layers=4,
        heads=4,
        kv_heads=2,
        intermediate_size=384,
        sequence=160,
        batch=8,
        steps=220,
        seconds=55,
        rate=5e-3,
        prompt=32,
        completion=128,
        documents=512,
        side_by_side=128,
        evaluation_prompts=32,
    ),
    # The same code in seconds, for tests: this target knows next to nothing.
    "tiny": Recipe(
        known_bytes=8_000,
        held_out_files=2,
        vocab_size=384,
        hidden_size=32,
        layers=3,
        heads=2,
        kv_heads=1,
        intermediate_size=64,
        sequence=64,
        batch=4,
        steps=30,
        seconds=300,
        rate=5e-3,
        prompt=16,
        completion=32,
        documents=48,
        side_by_side=48,
        evaluation_prompts=4,
    ),
}


@dataclass(frozen=True)
class Toy:
    """What `ensure` made or found."""

    target_dir: Path  # in shared memory
    data_dir: Path
    digest: str  # of the target's files
    prompts: Prompts
    made: bool  # False: it was there


def recipe_named(name: str) -> Recipe:
    """Raises InputError for an unknown name."""
    if name not in RECIPES:
        raise InputError(
            f"{RECIPE_VARIABLE}={name}: there is no such toy; known: {', '.join(RECIPES)}"
            f"{nearest(name, RECIPES)}"
        )
    return RECIPES[name]


def wanted() -> Recipe:
    """The recipe that $DRAFTHOUSE_TOY names, else the demo's. Raises InputError for an unknown name."""
    return recipe_named(os.environ.get(RECIPE_VARIABLE) or "demo")


def ensure(cache: Path, shm: Path, report: Report, *, recipe: Recipe | None = None) -> Toy:
    """Make the toy unless `cache` has it, and stage its target under `shm` unless it is there.

    `recipe` defaults to the one that $DRAFTHOUSE_TOY names, else to the demo's. `report` is told about
    progress at least every few seconds. Safe to be called by several processes at once: one makes, the
    others wait. Raises InputError if a directory cannot be written, a disk or the shared memory is full,
    or the standard library has no sources.
    """
    recipe = recipe or wanted()
    text = read_text(recipe)
    key = _key(recipe, text)
    place = cache / f"toy-{key}"
    made = False
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".toy-{key}.lock", report):
            if wrong := _what_is_wrong(place):
                if place.exists():
                    report(f"toy: {place} is damaged ({wrong}): making it anew")
                    shutil.rmtree(place)
                _make(recipe, text, place, report)
                made = True
    except OSError as error:
        raise InputError(
            f"--cache-dir {cache}: the toy target cannot be kept there ({error.strerror or error}); free "
            "some space or choose another directory"
        ) from None
    _tell_if_cut_short(place, recipe, report)
    digest = _digest(place / "target")
    return Toy(
        target_dir=stage(place / "target", digest, shm, report),
        data_dir=place / "data",
        digest=digest,
        prompts=json.loads((place / "prompts.json").read_text(encoding="utf-8")),
        made=made,
    )


# -- the text ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    known: list[str]  # whole files, which the target learns
    held_out: list[str]  # files that it never sees


def read_text(recipe: Recipe, library: Path | None = None) -> Text:
    """Choose files of the standard library: the same ones on every machine with the same Python.

    They come in the order of a hash of their names, so that the choice is mixed and does not depend on
    what else is there. Raises InputError if there are too few.
    """
    library = library or Path(sysconfig.get_path("stdlib"))
    files = sorted(library.glob("*.py"), key=lambda path: hashlib.sha256(path.name.encode()).digest())
    known: list[str] = []
    held_out: list[str] = []
    room = recipe.known_bytes
    for path in files:
        text = path.read_text(encoding="utf-8", errors="replace")
        raw = text.encode()
        size = len(raw)
        if not 3_000 <= size <= 30_000 or len(zlib.compress(raw)) < REPETITIVE * size:
            continue
        if size <= room:
            known.append(text)
            room -= size
        elif len(held_out) < recipe.held_out_files:
            held_out.append(text)
    if not known or len(held_out) < recipe.held_out_files:
        raise InputError(
            f"the toy target learns from Python's standard library, and {library} has too few .py files; "
            "install a complete Python, or give --target-model a directory"
        )
    return Text(known, held_out)


def _key(recipe: Recipe, text: Text) -> str:
    """Names a toy: 16 hex digits over all that decides how it comes out."""
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(recipe), sort_keys=True).encode())
    for name in CODE:
        digest.update(Path(__file__).with_name(name).read_bytes())
    for part in (*text.known, *text.held_out):
        digest.update(hashlib.sha256(part.encode()).digest())
    return digest.hexdigest()[:16]


# -- the cache ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    """Hold a lock file; while another process holds it, say so and wait."""
    with open(path, "a") as lock:
        began = time.monotonic()
        said = -10.0
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - began
                if waited - said >= 5:
                    report(f"toy: another process is making it; waiting for {waited:.0f} s")
                    said = waited
                time.sleep(0.1)
        yield


def _what_is_wrong(place: Path) -> str | None:
    """Why `place` cannot be used, judged from headers and sizes; None if it can."""
    try:
        read_config(place / "target")
        check_weights(place / "target")
        meta = read_meta(place / "data")
        missing = [name for name in meta["shards"] if not (place / "data" / name).exists()]
        if missing:
            return f"data/{missing[0]} is missing"
        json.loads((place / "prompts.json").read_text(encoding="utf-8"))
    except InputError as error:
        return str(error)
    except (OSError, ValueError) as error:
        return f"prompts.json: {error}"
    return None


def _make(recipe: Recipe, text: Text, place: Path, report: Report) -> None:
    """Make a toy beside its place and rename it. The caller holds the lock, so leftovers are nobody's."""
    for leftover in place.parent.glob(f".{place.name}.*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    from trainer import toy_target  # late: it takes seconds

    partial = place.with_name(f".{place.name}.{os.getpid()}.partial")
    partial.mkdir()
    try:
        facts = toy_target.make(recipe, text.known, text.held_out, partial, report)
        (partial / "toy.json").write_text(
            json.dumps({"recipe": dataclasses.asdict(recipe), **facts}, indent=1) + "\n", encoding="utf-8"
        )
        for file in [*partial.rglob("*"), partial]:
            flush(file)
        partial.rename(place)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _digest(directory: Path) -> str:
    """Names a directory by content: 12 hex digits over names and bytes of its files."""
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def _tell_if_cut_short(place: Path, recipe: Recipe, report: Report) -> None:
    """What comes of a target that was cut short is not what the docs show, today and from the cache."""
    steps = json.loads((place / "toy.json").read_text(encoding="utf-8"))["steps"]
    if steps < ENOUGH * recipe.steps:
        report(
            f"toy: this machine was busy when the target was made: {steps} of {recipe.steps} steps, so it "
            f"knows its text only in part, and τ will be lower; to make it anew, remove {place}"
        )
