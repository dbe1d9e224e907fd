"""A command line that Invoke cannot read, as one sentence with the remedy, and exit code 2.

Invoke's own words are "No idea what 'x' is!", with exit code 1. Fabric owns the program, so two of its steps
are wrapped, from the fabfile, which is read before them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

from invoke import Exit, ParseError

from deploy.errors import USAGE, nearest

EXAMPLES = {
    "compare": "fab compare 0006-demo 0007-demo (runs, or names for their newest runs)",
    "reference": "fab reference 0007-demo (a run, or a name for its newest run)",
    "weights.push": "fab weights.push /models/Qwen3-8B --host gpu-box",
    "weights.stage": "fab weights.stage /nvme/Qwen3-8B --host gpu-box",
    "weights.evict": "fab weights.evict Qwen3-8B --host gpu-box",
    "data.push": "fab data.push /data/completions --host gpu-box",
    "data.stage": "fab data.stage /nvme/completions --host gpu-box",
}
_UNKNOWN = re.compile(r"No idea what (['\"])(.*)\1 is!", re.DOTALL)
_MISSING = re.compile(r"did not receive required positional arguments: (.*)")
_VALUE = re.compile(r"Flag <Argument: ([\w-]+).* needed value and was not given one!", re.DOTALL)


def speak(program: Any, words: Callable[[str], str]) -> None:
    """Have `program` (Fabric's) answer in our words. `words` makes hints such as can be typed."""

    def wrapped(step: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(step)
        def run() -> None:
            try:
                step()
            except ParseError as error:
                flags = getattr(error.context, "flags", None) or {}
                task = getattr(error.context, "name", None)
                text = sentence(str(error), task, flags, program.collection.task_names)
                raise Exit(words(text), code=USAGE) from None

        return run

    program.parse_tasks = wrapped(program.parse_tasks)
    program.parse_cleanup = wrapped(program.parse_cleanup)


def sentence(said: str, task: str | None, flags: Iterable[str], tasks: Iterable[str]) -> str:
    """What Invoke `said` of `task` (None: before any), whose flags are `flags`."""
    more = f"fab --help {task} lists what it takes" if task else "fab --list shows the tasks"
    if found := _UNKNOWN.search(said):
        word = found[2]
        if word.startswith("-"):
            return f"{task or 'fab'} has no flag {word}{nearest(word, flags) or f'; {more}'}"
        if task:
            return f"{task} takes no {word!r} at this place; {more}"
        return f"there is no task {word!r}{nearest(word, tasks) or f'; {more}'}"
    if found := _MISSING.search(said):
        names = re.findall(r"'([\w-]+)'", found[1])
        example = EXAMPLES.get(task or "")
        return f"{task} needs {' and '.join(name.upper() for name in names)}: {example or more}"
    if found := _VALUE.search(said):
        return f"{task or 'fab'} --{found[1]} needs a value after it; {more}"
    return f"{said.strip().rstrip('.!')}; {more}"
