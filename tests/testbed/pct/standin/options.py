"""Reading a command line as PVE::JSONSchema::get_options does, and checking it as check_prop does.

Stricter in one thing: Getopt::Long would take any unambiguous beginning of an option's name, in any case.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .errors import BadParameters, Died

TRUE, FALSE = re.compile(r"(1|on|yes|true)\Z", re.I), re.compile(r"(0|off|no|false)\Z", re.I)


class Option(NamedTuple):
    """One property of a schema. `check` raises Died with what is wrong with the format."""

    type: str = "string"  # boolean | integer | number | string
    minimum: float | None = None
    maximum: float | None = None
    enum: tuple[str, ...] = ()
    pattern: str = ""
    longest: int | None = None
    shortest: int | None = None
    list: bool = False
    required: bool = False
    check: Callable[[str], object] | None = None


VMID = Option("integer", 100, 999_999_999, pattern=r"[1-9][0-9]{2,8}", required=True)
FLAG = Option("boolean")
TEXT = Option()


def parse(
    words: Sequence[str], schema: Mapping[str, Option], positional: Sequence[str], *, rest: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Options and positional arguments by name, checked; and what follows them, if `rest`.

    A boolean's value may follow it ("--purge 1"), and then does: the next word is taken for it unless it
    looks like an option. "--" ends the options. An unknown one is refused.
    """
    given: dict[str, Any] = {}
    plain: list[str] = []
    waiting = [_decoded(word) for word in words]
    while waiting:
        word = waiting.pop(0)
        if word == "--":
            plain += waiting
            break
        if not word.startswith("-") or word == "-":
            plain.append(word)
            continue
        name, equals, value = re.sub(r"^--?", "", word).partition("=")
        option = schema.get(name)
        if option is None:
            print(f"Unknown option: {name}", file=sys.stderr)
            raise BadParameters("unable to parse option")
        if not equals:
            looks_like_an_option = not waiting or (waiting[0].startswith("-") and waiting[0] != "-")
            if option.type == "boolean":
                value = "" if looks_like_an_option else waiting.pop(0)
            elif not waiting or waiting[0] == "--":
                print(f"Option {name} requires an argument", file=sys.stderr)
                raise BadParameters("unable to parse option")
            else:
                value = waiting.pop(0)
        given[name] = f"{given[name]},{value}" if option.list and name in given else value
    for name in positional:
        if not plain:
            raise BadParameters("not enough arguments")
        given[name] = plain.pop(0)
    if plain and not rest:
        raise BadParameters("too many arguments")
    for name, value in given.items():
        if schema[name].type == "boolean":
            given[name] = _boolean(value)
    errors = {name: said for name, value in given.items() if (said := wrong(schema[name], value))}
    if errors:
        raise BadParameters("Parameter verification failed.", errors)
    return given, plain


def wrong(option: Option, value: str) -> str | None:
    """What check_prop finds wrong with `value`; None if nothing."""
    if option.type == "integer" and not re.fullmatch(r"[+-]?\d+", value):
        return f"type check ('integer') failed - got '{value}'"
    if option.type == "number" and not re.fullmatch(r"[+-]?\d+(\.\d+)?", value):
        return f"type check ('number') failed - got '{value}'"
    if option.check is not None:
        try:
            option.check(value)
        except Died as died:
            return f"invalid format - {died}"
    if option.pattern and not re.fullmatch(option.pattern, value):
        return "value does not match the regex pattern"
    if option.longest is not None and len(value) > option.longest:
        return f"value may only be {option.longest} characters long"
    if option.shortest is not None and len(value) < option.shortest:
        return f"value must be at least {option.shortest} characters long"
    if re.fullmatch(r"[+-]?\d+(\.\d+)?", value):
        if option.maximum is not None and float(value) > option.maximum:
            return f"value must have a maximum value of {option.maximum}"
        if option.minimum is not None and float(value) < option.minimum:
            return f"value must have a minimum value of {option.minimum}"
    if option.enum and value not in option.enum:
        return f"value '{value}' does not have a value in the enumeration '{', '.join(option.enum)}'"
    return None


def _boolean(value: str) -> str:
    if value == "" or TRUE.match(value):
        return "1"
    if FALSE.match(value):
        return "0"
    raise BadParameters("unable to parse boolean option")


def _decoded(word: str) -> str:
    """get_options decodes every argument by the locale: what is no text there arrives as U+FFFD.

    So in the C locale, which ssh and cron have, no byte above 127 passes through `pct exec`'s arguments.
    """
    raw = os.fsencode(word)
    setting = next((v for k in ("LC_ALL", "LC_CTYPE", "LANG") if (v := os.environ.get(k))), "C")
    encoding = "utf-8" if setting.lower().endswith(("utf-8", "utf8")) else "ascii"
    return raw.decode(encoding, errors="replace")
