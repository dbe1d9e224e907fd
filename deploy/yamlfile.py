"""YAML as people mean it, with the line of every key, so that an error can point at it.

PyYAML follows YAML 1.1, where `lr: 6e-4` is a text, `country: no` is false, `id: 010` is eight and the
second of two equal keys wins in silence. Here the first is a number, the next two are what they look like,
and the last is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from deploy.errors import USAGE, DeployError

Key = tuple[str | int, ...]  # ("restart", "attempts"): the way from the top of the file to a value


MOST_VALUES = 20_000  # in a file, counted where they are used: anchors of anchors multiply
DEEPEST = 50  # lists and mappings within each other
# What PyYAML's constructors let through, besides its own errors, for a text that its tag does not fit.
UNFIT = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict = {}  # noqa: RUF012  (PyYAML's own name; nothing inherited from YAML 1.1)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except UNFIT:
            kind, text = node.tag.rpartition(":")[2], repr(node.value)
            text = text if len(text) <= 60 else text[:57] + "…"
            raise yaml.constructor.ConstructorError(
                problem=f"{text} is no value of the kind {kind}", problem_mark=node.start_mark
            ) from None


_SCALARS: tuple[tuple[str, str, str], ...] = (
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+(_[0-9]+)*", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
)


class _Dumper(yaml.SafeDumper):
    """Quotes what either reading of YAML would take for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), [*_first] + [""] * (_tag == "null")
        )


def _whole_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))


# Decimal always: YAML 1.1 reads 010 as eight.
_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)


@dataclass(frozen=True)
class YamlFile:
    """What a file says, and where it says it."""

    name: str  # as people know it: relative to the project
    value: Any
    lines: dict[Key, int] = field(default_factory=dict)
    written: dict[Key, str] = field(default_factory=dict)  # scalars exactly as written, before any typing
    origins: dict[Key, str] = field(
        default_factory=dict
    )  # values from elsewhere: {("trainer", "lr"): "--set lr"}

    def at(self, key: Iterable[str | int]) -> str:
        """``runs/demo.yaml:7`` for the line of `key`, or of its nearest parent that is in the file."""
        way = tuple(key)
        for length in range(len(way), 0, -1):
            if way[:length] in self.origins:
                return self.origins[way[:length]]
        inside = [origin for key, origin in self.origins.items() if key[: len(way)] == way]
        if inside and way and way not in self.lines:
            return inside[0]
        while way and way not in self.lines:
            way = way[:-1]
        return f"{self.name}:{self.lines[way]}" if way in self.lines and way else self.name


def parse_value(text: str) -> Any:
    """One value of the command line, typed as in a file: `3e-4` is a number, `[1, 2]` a list."""
    try:
        return _build(text, "")[0]
    except (yaml.YAMLError, DeployError, RecursionError, *UNFIT):
        return text


def read(path: Path, name: str | None = None) -> YamlFile:
    """Read one file. Raises DeployError, with file and line, when it cannot be read or is no YAML."""
    name = name or str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DeployError(f"{name} does not exist", code=USAGE) from None
    except UnicodeDecodeError as error:
        raise DeployError(
            f"{name} is not UTF-8 text (byte {error.start}); save it as UTF-8", code=USAGE
        ) from None
    except OSError as error:
        raise DeployError(f"{name} cannot be read: {error.strerror}", code=USAGE) from None
    return parse(text, name)


def parse(text: str, name: str) -> YamlFile:
    """See `read`."""
    try:
        return YamlFile(name, *_build(text, name))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if error.context_mark and mark and mark.index >= len(text):  # the end of the file says little
            mark = error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        column = f" at column {mark.column + 1}" if mark else ""
        raise DeployError(
            f"{where} is not valid YAML: {error.problem or error.context}{column}; correct that line",
            code=USAGE,
        ) from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise DeployError(f"{name} is not valid YAML: {reason}; correct it", code=USAGE) from None
    except UNFIT as error:
        raise DeployError(
            f"{name} holds a value that YAML cannot build ({error}); quote it", code=USAGE
        ) from None
    except RecursionError:
        raise DeployError(f"{name} {_TOO_DEEP}", code=USAGE) from None


_TOO_DEEP = f"holds lists or keys more than {DEEPEST} deep; write it flatter"


def _build(text: str, name: str) -> tuple[Any, dict[Key, int], dict[Key, str]]:
    """(value, lines, scalars as written)."""
    loader = _Loader(text)
    node = loader.get_single_node()
    lines: dict[Key, int] = {}
    written: dict[Key, str] = {}
    if node is None:
        return None, lines, written
    _walk(node, (), lines, written, name, frozenset())
    return loader.construct_document(node), lines, written


def _walk(node: yaml.Node, way: Key, lines: dict, written: dict, name: str, above: frozenset[int]) -> None:
    """Note lines and scalars; refuse keys given twice, anchors in themselves, and what is no text."""
    line = node.start_mark.line + 1
    if id(node) in above:
        raise DeployError(f"{name}:{line} refers to itself; write the value out", code=USAGE)
    above = above | {id(node)}
    if len(above) > DEEPEST:
        raise DeployError(f"{name}:{line} {_TOO_DEEP}", code=USAGE)
    if len(lines) > MOST_VALUES:
        raise DeployError(
            f"{name}:{line} makes more than {MOST_VALUES:,} values of its anchors; write out what is needed",
            code=USAGE,
        )
    if isinstance(node, yaml.ScalarNode):
        if not is_text(node.value):
            raise DeployError(
                f"{name}:{line} holds {node.value!r}, which is half a character; correct the escape",
                code=USAGE,
            )
        written[way] = node.value
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*way, index)] = item.start_mark.line + 1
            _walk(item, (*way, index), lines, written, name, above)
    elif isinstance(node, yaml.MappingNode):
        for key_node, item in node.value:
            key = (*way, str(getattr(key_node, "value", "")))
            line = key_node.start_mark.line + 1
            if key in lines:
                raise DeployError(
                    f"{name}:{line} gives {dotted(key)} a second time (first in line {lines[key]}); keep one",
                    code=USAGE,
                )
            lines[key] = line
            _walk(item, key, lines, written, name, above)


def is_text(text: str) -> bool:
    """Whether it can be written anywhere: without half characters, which Python also makes of stray bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def dotted(key: Iterable[str | int]) -> str:
    """``restart.attempts`` for ("restart", "attempts"); a part with a line break is quoted."""
    return ".".join(str(part) if str(part).isprintable() else repr(part) for part in key)


def dump(value: Any) -> str:
    """YAML for people and for digests: keys in the order given, one way to write each value."""
    return yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100, default_flow_style=False
    )
