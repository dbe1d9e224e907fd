"""pyproject.toml and constraints.txt: nothing is asked for that nothing uses."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CHECKOUT = Path(__file__).resolve().parents[2]
EXTRAS = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
MODULES = {
    "pyyaml": "yaml",
    "tree-sitter": "tree_sitter",
    "tree-sitter-bash": "tree_sitter_bash",
}  # where a package's module has another name
NOT_IMPORTED = {"tensorboard", "py-spy"}  # (through torch, and make; a program)


def imported(*places: str) -> set[str]:
    """The top-level modules that the files of these places import, anywhere in them."""
    found = set()
    for place in places:
        path = CHECKOUT / place
        for file in [path] if path.is_file() else path.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Import):
                    found |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize(
    ("extra", "places"), [("deploy", ["deploy", "fabfile.py"]), ("trainer", ["trainer"])]
)
def test_every_package_of_an_extra_is_imported_by_what_it_is_for(extra: str, places: list[str]) -> None:
    names = {Requirement(line).name for line in EXTRAS[extra]} - NOT_IMPORTED
    assert {MODULES.get(name, name) for name in names} <= imported(*places)


def test_every_pin_is_of_a_package_that_an_extra_needs() -> None:
    """As far as what is installed here tells what it needs, on any platform."""
    wanted = [Requirement(line) for lines in EXTRAS.values() for line in lines]
    needed = set()
    while wanted:
        one = wanted.pop()
        name = canonicalize_name(one.name)
        if (name, frozenset(one.extras)) in needed:
            continue
        needed.add((name, frozenset(one.extras)))
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for line in lines:
            more = Requirement(line)
            extra = re.search(r'extra == "([^"]+)"', str(more.marker or ""))
            if extra is None or extra[1] in one.extras:
                wanted.append(more)
    pins = re.findall(r"^([A-Za-z0-9._-]+)==", (CHECKOUT / "constraints.txt").read_text(), re.MULTILINE)
    needed.add(("pip", frozenset()))  # which installs all the others
    assert {canonicalize_name(pin) for pin in pins} <= {name for name, _ in needed}
