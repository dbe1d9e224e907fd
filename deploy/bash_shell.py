"""The state of a bash at one point of a script, as far as it is known without running anything."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from typing import Any, Protocol


class Unknown(Exception):
    """A word whose value cannot be known here; the message says why, as the end of a sentence."""


class Place(Protocol):
    """What evaluation may ask of the machine that the script is for. Nothing of it runs anything there."""

    def read(self, path: str) -> bytes | None: ...
    def test(self, operator: str, path: str) -> bool: ...
    def which(self, program: str, path: str, directory: str) -> str | None: ...
    def real(self, path: str) -> str: ...


@dataclass
class Shell:
    """The state of a bash at one point of a script. `unsure` are variables of which only that is known."""

    place: Place
    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    touched: set[str] = field(default_factory=set)  # what the script itself has set
    unsure: dict[str, str] = field(default_factory=dict)
    export_unsure: dict[str, str] = field(default_factory=dict)  # of which it is not known whether they are
    scopes: list[dict[str, Any]] = field(default_factory=list)  # what local hides, for each function at work
    functions: dict[str, Any] = field(default_factory=dict)
    directory: str = "/"
    directory_unsure: str = ""  # why it is not known
    zero: str = "bash"
    arguments: list[str] = field(default_factory=list)
    asked_arguments: bool = False  # whether $1, $@ and the like were looked at
    all_exported: bool = False  # set -a

    def copy(self) -> Shell:
        made = dataclasses.replace(self)
        for name in ("variables", "exported", "touched", "unsure", "export_unsure", "functions", "arguments"):
            setattr(made, name, getattr(self, name).copy())
        made.arrays = {key: list(value) for key, value in self.arrays.items()}
        made.scopes = [dict(one) for one in self.scopes]
        return made

    def hide(self, name: str) -> None:
        """`local name`: until the function ends it is another variable, which is not set."""
        if self.scopes:
            state = (self.variables, self.arrays, self.unsure)
            kept = (*(one.get(name) for one in state), name in self.exported)
            if name not in self.scopes[-1]:
                self.scopes[-1][name] = kept
                self.unset(name)

    def leave(self) -> None:
        """The end of a function: what it has hidden is there again."""
        for name, (*values, exported) in self.scopes.pop().items():
            self.unset(name)
            for known, one in zip((self.variables, self.arrays, self.unsure), values, strict=True):
                if one is not None:
                    known[name] = one  # type: ignore[index]
            if exported:
                self.exported.add(name)

    def assign(self, name: str, value: str | list[str]) -> None:
        self.unsure.pop(name, None)
        self.touched.add(name)
        if isinstance(value, list):
            self.variables.pop(name, None)
            self.arrays[name] = value
        elif name in self.arrays:
            self.arrays[name][:1] = [value]
        else:
            self.variables[name] = value
        if self.all_exported:
            self.exported.add(name)

    def unset(self, name: str) -> None:
        for known in (self.variables, self.arrays, self.unsure):
            known.pop(name, None)
        self.exported.discard(name)

    def ask_arguments(self) -> None:
        """Note that the script's own arguments were looked at: a function has others."""
        self.asked_arguments = self.asked_arguments or not self.scopes

    def get(self, name: str) -> str | None:
        """The value of a variable or parameter, None if it is not set. Raises Unknown."""
        if name in self.unsure:
            raise Unknown(self.unsure[name])
        if name == "0":
            return self.zero
        if name.isdigit():
            self.ask_arguments()
            place = int(name)
            return self.arguments[place - 1] if place <= len(self.arguments) else None
        if name in ("@", "*"):
            self.ask_arguments()
            return " ".join(self.arguments) if self.arguments else None
        if name == "#":
            self.ask_arguments()
            return str(len(self.arguments))
        if name == "PWD":
            return self.here()
        if name == "BASH_SOURCE":
            return self.zero
        if name in ("?", "$", "!", "-", "_", "RANDOM", "SECONDS", "LINENO", "EPOCHSECONDS", "BASHPID",
                    "PPID", "OLDPWD", "SHLVL", "HOSTNAME", "UID", "EUID"):  # fmt: skip
            raise Unknown(f"${name} is another one at each start")
        if name in self.arrays:
            return self.arrays[name][0] if self.arrays[name] else None
        return self.variables.get(name)

    def here(self) -> str:
        if self.directory_unsure:
            raise Unknown(self.directory_unsure)
        return self.directory

    def absolute(self, path: str) -> str:
        return path if path.startswith("/") else os.path.join(self.here(), path)
