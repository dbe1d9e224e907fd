"""Checking what YAML said against a pydantic model, and saying what is wrong for people.

Every sentence names the file with its line, the key, what it is, what it must be, and the nearest known word.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from deploy import flags
from deploy.errors import USAGE, DeployError, either, nearest
from deploy.yamlfile import YamlFile, dotted

Model = TypeVar("Model", bound=BaseModel)


def mapping(file: YamlFile, way: tuple[str, ...], value: Any) -> Mapping[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        what = f"{file.at(way)}: {dotted(way)}" if way else file.name
        raise DeployError(f"{what} holds {shown(value)}, but must hold keys, like `name: demo`", code=USAGE)
    return value


def known(file: YamlFile, way: tuple[str, ...], given: Mapping[Any, Any], known: Iterable[str]) -> None:
    for key in given:
        if key not in (known := list(known)):
            raise DeployError(_unknown(file, (*way, str(key)), known), code=USAGE)


def _unknown(file: YamlFile, way: tuple[str, ...], known: Iterable[str]) -> str:
    key, known = way[-1], list(known)
    offered = nearest(key, known)
    if not offered and way[:-1] == () and difflib.get_close_matches(flags.spelled(key), flags.FLAGS, 1, 0.8):
        offered = ", which belongs under trainer:"
    return f"{file.at(way)}: unknown key {dotted(way)!r}{offered or f'; known are {either(known)}'}"


def build(model: type[Model], value: Mapping[str, Any], file: YamlFile, way: tuple[str, ...]) -> Model:
    """Validate with pydantic; its first finding becomes one sentence."""
    try:
        return model.model_validate(dict(value))
    except ValidationError as error:
        raise DeployError(_sentence(error.errors()[0], model, file, way), code=USAGE) from None


_WANTED = {
    "string_type": "a text",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "list_type": "a list",
    "dict_type": "keys with values",
    "finite_number": "a finite number",
}


def _sentence(found: ErrorDetails, model: type[BaseModel], file: YamlFile, way: tuple[str, ...]) -> str:
    inner = tuple(found["loc"])
    key = (*way, *inner)
    where = file.at([str(part) for part in key])
    kind, context, value = found["type"], found.get("ctx", {}), found["input"]
    if kind == "extra_forbidden":
        known = _fields(model, inner[:-1])
        return _unknown(file, tuple(map(str, key)), known)
    if kind == "invalid_key" or key[-1:] == ("[key]",):
        whole = dotted(part for part in key if part != "[key]")
        return f"{where}: the key {whole} is {shown(value)}, but must be a text; quote it"
    if kind == "value_error":
        if not inner:
            return f"{file.name} {context['error']}"
        message = str(context["error"])
        link = f" is {shown(value)}, " if message.startswith("but ") else " "
        return f"{where}: {dotted(key)}{link}{message}"
    if kind in _WANTED:
        wanted = _WANTED[kind]
        if isinstance(value, dict) and kind == "string_type":
            wanted += "; quote it if it holds ': '"
    elif kind == "literal_error":
        wanted = context["expected"].replace("'", "")
        offered = nearest(str(value), re.split(r", | or ", wanted)) if isinstance(value, str) else ""
        return f"{where}: {dotted(key)} is {shown(value)}, but must be {wanted}{offered}"
    elif "ge" in context or "gt" in context:
        wanted = f"at least {context['ge']:g}" if "ge" in context else f"above {context['gt']:g}"
    elif "le" in context:
        wanted = f"at most {context['le']:g}"
    elif kind in ("model_type", "model_attributes_type"):
        wanted = f"keys: {either(_fields(model, inner))}"
    else:
        wanted = found["msg"][0].lower() + found["msg"][1:]
    return f"{where}: {dotted(key)} is {shown(value)}, but must be {wanted}"


def _fields(model: type[BaseModel], way: tuple[Any, ...]) -> list[str]:
    """The keys that may stand at `way` in a file for `model`."""
    for part in way:
        if part not in model.model_fields:  # the key of a mapping, like the name of a secret
            continue
        annotation = model.model_fields[part].annotation
        for inner in (annotation, *get_args(annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                model = inner
    return [name for name in model.model_fields if name not in getattr(model, "derived", ())]


def shown(value: Any) -> str:
    """A value as it may appear in a sentence: short, and on one line."""
    text = (
        {True: "true", False: "false", None: "empty"}.get(value) if isinstance(value, bool | None) else None
    )
    text = text or repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
