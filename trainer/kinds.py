"""What a flag's value may be: how its text is read, and the words that say what it must be."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PLACE = re.compile(r"\d{1,4}(\+\d{1,4})*|cpu(:\d{1,4})?")
LARGEST = 2**31 - 1  # of a whole number, unless a flag says otherwise: what fits everywhere it is handed on


@dataclass(frozen=True)
class Kind:
    """How the text of a flag becomes a value. `read` raises ValueError; `what` ends "must be …"."""

    read: Callable[[str], Any]
    what: str
    types: tuple[type, ...] = (str,)  # what YAML may give instead of text


def integer(least: int, most: int = LARGEST) -> Kind:
    def read(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise ValueError
        return value

    span = f"from {least} to {most}"
    return Kind(read, f"a whole number {span}", (int,))


def share() -> Kind:
    def read(text: str) -> float:
        value = float(text)
        if not 0 <= value <= 1:
            raise ValueError
        return value

    return Kind(read, "a number from 0 to 1", (int, float))


def number(least: float, below: float | None = None, *, positive: bool = False) -> Kind:
    def read(text: str) -> float:
        value = float(text)
        if not least <= value < (float("inf") if below is None else below) or (positive and value == 0):
            raise ValueError
        return value

    span = f"from {least:g} to below {below:g}" if below is not None else f"of at least {least:g}"
    return Kind(read, "a number above 0" if positive else f"a number {span}", (int, float))


def one_of(*words: str) -> Kind:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError
        return text

    return Kind(read, " or ".join(words))


def _device(text: str) -> str:
    if text in ("auto", "cpu", "cuda") or (text.startswith("cuda:") and text[5:].isdigit()):
        return text
    raise ValueError


def _integers(text: str) -> tuple[int, ...]:
    found = tuple(int(part) for part in text.split(","))
    if any(not 0 <= number <= LARGEST for number in found):
        raise ValueError
    return found


def _devices(text: str) -> tuple[str, ...]:
    places = tuple(text.split(","))
    if not all(_PLACE.fullmatch(place) for place in places):
        raise ValueError
    return places


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or "/" in host or (":" in host and not host.startswith("[")):
        raise ValueError
    if not 0 < int(port) < 65535:  # the next one is needed too
        raise ValueError
    return text


TEXT = Kind(str, "text")
ADDRESS = Kind(_address, "HOST:PORT, with a port from 1 to 65534 (an IPv6 address in brackets)")
DIRECTORY = Kind(lambda text: str(Path(text).expanduser()), "a path")
SWITCH = Kind(lambda text: {"true": True, "false": False}[text.lower()], "true or false", (bool,))
INTEGERS = Kind(_integers, "whole numbers separated by commas", (list, int))
DEVICES = Kind(
    _devices,
    "numbers of GPUs separated by commas, like 0,1 (0+1: one target over both; cpu:0,cpu:1: processes "
    "without GPUs)",
    (list, int, str),
)
DEVICE = Kind(_device, "auto, cpu, cuda or cuda:N")
