"""Whether the device that was asked for is there, told without importing torch, so that a check is quick.

It refuses only what torch would refuse for certain, since the real answer is torch's, at the start.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.errors import InputError

_NODES = re.compile(r"nvidia\d+")
_OTHERS = ("kfd", "dxg")  # AMD's driver and Windows' one: how many GPUs they have is not told by name


def check(name: str, *, devices: Path = Path("/dev"), environment: Mapping[str, str] = os.environ) -> None:
    """Raises InputError if no start on this machine could use the device `name`."""
    if not name.startswith("cuda"):
        return
    _check_build(f"--device {name}", "give --device auto or cpu")
    most, visible = _count(devices, environment)
    if most == 0 and visible is None:
        raise InputError(
            f"--device {name}: there is no GPU here (no {devices}/nvidia0); give --device auto or cpu"
        )
    if most is not None and int(name[5:] or 0) >= most:
        raise InputError(
            f"--device {name}: a run sees {most} GPUs here{_why(visible)}; give one of them, "
            "or --device auto or cpu"
        )


def check_gpus(
    flag: str,
    places: Sequence[str],
    *,
    starting: bool,
    devices: Path = Path("/dev"),
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Raises InputError if `flag` names more GPUs than a run sees here. A machine without any may check a
    configuration for another one; it cannot start it.
    """
    named = [device for place in places for device in place.split("+")]
    numbers = [int(device) for device in named if device.isdigit()]
    if not numbers:
        return
    most, visible = _count(devices, environment)
    if starting:
        _check_build(f"{flag} {','.join(places)}", f"give {flag} cpu:0 or leave it out")
    if most is None or (most == 0 and not starting):
        return
    if missing := [number for number in numbers if number >= most]:
        raise InputError(
            f"{flag} {','.join(places)}: there is no GPU {missing[0]} here, "
            f"since a run sees {most} GPUs{_why(visible)}; GPUs are counted from 0"
        )


def on_gpu(name: str, *, devices: Path = Path("/dev"), environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a run with the device `name` computes on a GPU, as far as that can be told without torch."""
    if name != "auto":
        return name.startswith("cuda")
    return _count(devices, environment)[0] != 0 and not _built_without_gpu()


def gpu_memory() -> float | None:
    """Bytes of the smallest NVIDIA GPU here; None if there is none, or nvidia-smi does not tell."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        return min((int(line) for line in told.split()), default=0) * 2.0**20 or None
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _check_build(named: str, remedy: str) -> None:
    if _built_without_gpu():
        raise InputError(
            f"{named}: the torch of {sys.executable} is built for the CPU only; "
            f"install one that is built for your GPU, or {remedy}"
        )


def _count(devices: Path, environment: Mapping[str, str]) -> tuple[int | None, str | None]:
    """(how many GPUs a run sees, None if that is not told by names; CUDA_VISIBLE_DEVICES)."""
    found = sorted(os.listdir(devices)) if devices.is_dir() else []
    nodes = len([node for node in found if _NODES.fullmatch(node)])
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if not nodes and not set(_OTHERS) & set(found):
        return 0, None
    if visible is None:
        return nodes or None, None
    listed = 0 if visible.strip() == "-1" else len([word for word in visible.split(",") if word.strip()])
    return min(nodes or listed, listed), visible


def _why(visible: str | None) -> str:
    return f" (CUDA_VISIBLE_DEVICES is {visible!r})" if visible is not None else ""


def _built_without_gpu() -> bool:
    """What torch/version.py says; False without torch, which the start tells better than we can."""
    spec = importlib.util.find_spec("torch")
    try:
        text = Path(next(iter(spec.submodule_search_locations)), "version.py").read_text(encoding="utf-8")  # type: ignore[union-attr, arg-type]
    except (AttributeError, TypeError, StopIteration, OSError, UnicodeDecodeError):
        return False
    built = dict(re.findall(r"^(cuda|hip)\b[^=\n]*=\s*(\S+)", text, re.MULTILINE))
    return built.get("cuda") == "None" and built.get("hip", "None") == "None"
