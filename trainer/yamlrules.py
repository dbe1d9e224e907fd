"""YAML as a run's file is meant, the same for the trainer as for whoever deploys it.

YAML 1.1 makes a text of `6e-4`, eight of `010`, false of `no`, and of a key given twice it takes the second.
Here the first is a number, the second is ten, the third a text and the last an error. deploy/yamlfile.py has
the same rules, and lines besides; a test reads the same texts with both.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import yaml

MOST_VALUES = 20_000
DEEPEST = 50


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict = {}  # noqa: RUF012  PyYAML's own name; nothing inherited from YAML 1.1

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError):
            raise yaml.constructor.ConstructorError(
                problem=f"a value is none of the kind {node.tag.rpartition(':')[2]}",
                problem_mark=node.start_mark,
            ) from None


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+(_[0-9]+)*", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


def _whole_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)


def load(text: str) -> Any:
    """The one document of `text`. Raises yaml.YAMLError, or ValueError or TypeError for a value that cannot
    be built (a date that is none).
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
    except RecursionError:
        raise yaml.YAMLError("lists or keys are too deep") from None
    if node is None:
        return None
    _check(node, frozenset(), itertools.count())
    return loader.construct_document(node)


def _check(node: yaml.Node, above: frozenset[int], count: Iterator[int]) -> None:
    """Raises YAMLError for a key given twice, a value that contains itself, and more than anybody writes."""
    if id(node) in above:
        raise yaml.MarkedYAMLError(problem="a value contains itself", problem_mark=node.start_mark)
    above |= {id(node)}
    if len(above) > DEEPEST or next(count) > MOST_VALUES:
        raise yaml.MarkedYAMLError(problem="too deep or too many values", problem_mark=node.start_mark)
    if isinstance(node, yaml.ScalarNode) and any("\ud800" <= letter <= "\udfff" for letter in node.value):
        raise yaml.MarkedYAMLError(problem="half a character", problem_mark=node.start_mark)
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check(item, above, count)
    elif isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, item in node.value:
            if (name := str(key.value)) in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"{name} is given a second time; keep one", problem_mark=key.start_mark
                )
            seen.add(name)
            _check(item, above, count)
