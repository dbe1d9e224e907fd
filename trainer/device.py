"""Whether the device that was asked for is there, told without importing torch, so that a check is quick.

It refuses only what torch would refuse for certain, since the real answer is torch's, at the start.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from trainer.errors import InputError

_NODES = re.compile(r"nvidia\d+")
_OTHERS = ("kfd", "dxg")  # AMD's driver and Windows' one: how many GPUs they have is not told by name


def check(name: str, *, devices: Path = Path("/dev"), environment: Mapping[str, str] = os.environ) -> None:
    """Raises InputError if no start on this machine could use the device `name`."""
    if not name.startswith("cuda"):
        return
    if _built_without_gpu():
        raise InputError(
            f"--device {name}: the torch of {sys.executable} is built for the CPU only; install one that is "
            "built for your GPU, or give --device auto or cpu"
        )
    found = sorted(os.listdir(devices)) if devices.is_dir() else []
    most = len([node for node in found if _NODES.fullmatch(node)])
    if not most and not set(_OTHERS) & set(found):
        raise InputError(
            f"--device {name}: there is no GPU here (no {devices}/nvidia0); give --device auto or cpu"
        )
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        most = min(most or len(visible), len([word for word in visible.split(",") if word.strip()]))
        if visible.strip() == "-1":
            most = 0
    if int(name[5:] or 0) >= most and (visible is not None or most):
        raise InputError(
            f"--device {name}: a run sees {most} GPUs here"
            f"{f' (CUDA_VISIBLE_DEVICES is {visible!r})' if visible is not None else ''}; give one of them, "
            "or --device auto or cpu"
        )


def _built_without_gpu() -> bool:
    """What torch/version.py says; False without torch, which the start tells better than we can."""
    spec = importlib.util.find_spec("torch")
    try:
        text = Path(next(iter(spec.submodule_search_locations)), "version.py").read_text(encoding="utf-8")  # type: ignore[union-attr, arg-type]
    except (AttributeError, TypeError, StopIteration, OSError, UnicodeDecodeError):
        return False
    built = dict(re.findall(r"^(cuda|hip)\b[^=\n]*=\s*(\S+)", text, re.MULTILINE))
    return built.get("cuda") == "None" and built.get("hip", "None") == "None"
