"""What is found in a script, and small questions about its tree."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

PROGRAM = re.compile(
    r"(python|pypy)\d*(\.\d+)*t?|accelerate|torchrun|deepspeed|mpirun|mpiexec|srun|horovodrun|composer|"
    r"uv|poetry|pipenv|colossalai|axolotl|llamafactory-cli"
)
NOHUP = ("nohup", "setsid", "exec", "command", "builtin", "unbuffer", "time")  # a run needs none of them
KEPT = {  # stay in front of the command: which of their flags take a word
    "nice": ("-n",), "ionice": ("-c", "-n"), "taskset": (), "numactl": ("-m", "-N", "-C", "-i"), "chrt": (),
    "timeout": ("-k", "-s"), "stdbuf": ("-i", "-o", "-e"), "prlimit": (), "catchsegv": (),
}  # fmt: skip
POSITIONAL = {"taskset": 1, "timeout": 1, "chrt": 1}  # words of their own before the command


@dataclass(frozen=True)
class Note:
    kind: str  # carried | became | lost
    line: int  # 0: of no line
    text: str  # as it stands there
    words: str  # what becomes of it, as a sentence without its first word's capital


@dataclass(frozen=True)
class Word:
    text: str
    unknown: str = ""  # why its value is not known; then `text` is as it stands in the script


@dataclass
class Start:
    """A program that the script starts."""

    argv: list[Word]
    environment: dict[str, str]
    unsure: dict[str, str]  # exported variables of which no value is known, and why
    touched: frozenset[str]  # those variables that the script has set
    removed: tuple[str, ...]  # variables of the login that it does not have
    directory: str
    directory_unsure: str
    line: int
    text: str
    moved: bool  # whether the script chose the directory
    arguments_asked: bool
    notes: list[Note] = field(default_factory=list)


def parse(data: bytes) -> Any:
    """The tree of a script."""
    import tree_sitter
    import tree_sitter_bash

    language = tree_sitter.Language(tree_sitter_bash.language())
    return tree_sitter.Parser(language).parse(data).root_node


def text_of(node: Any) -> str:
    """How a node stands in the script; nothing for one that the grammar misses."""
    text: str = "" if node is None else node.text.decode("utf-8", "surrogateescape")
    return text


def on_lines_before(assignments: Sequence[Any], name: Any, whole: Any) -> int:
    """How many assignments before a command end in a line of their own, which the grammar may miss."""
    found = 0
    for at, (one, following) in enumerate(zip(assignments, [*assignments[1:], name], strict=False), 1):
        between = whole.text[one.end_byte - whole.start_byte : following.start_byte - whole.start_byte]
        if b"\n" in between.replace(b"\\\n", b""):
            found = at
    return found


def branches(node: Any) -> Iterator[tuple[Any, list[Any]]]:
    """(condition, statements) of an if, of each elif, and of else, which has no condition."""
    own: list[Any] = []
    condition = node.child_by_field_name("condition")
    rest = []
    for child in node.children:
        if child.type in ("elif_clause", "else_clause"):
            rest.append(child)
        elif child.is_named and child != condition:
            own.append(child)
    yield condition, own
    for clause in rest:
        if clause.type == "else_clause":
            yield None, [child for child in clause.children if child.is_named]
        else:
            named = [child for child in clause.children if child.is_named]
            yield named[0], named[1:]


def bodies(item: Any) -> list[Any]:
    values = item.children_by_field_name("value")
    return [child for child in item.named_children if child not in values]


def writes(redirects: Sequence[Any]) -> str:
    file = next(
        (one.child_by_field_name("destination") for one in redirects if one.type == "file_redirect"), None
    )
    if file is None:
        return "the text after it is not carried over: a run reads nothing from stdin"
    name = os.path.basename(text_of(file))
    return f"it writes {name} before each start; a run does not, so keep that file as it was last written"
