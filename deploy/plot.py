"""The picture of a comparison: loss and speed over the steps, and where the time of a step goes."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

from deploy.compare import Comparison
from deploy.errors import USAGE, DeployError

DOTS = 110  # an inch


def check(path: Path) -> None:
    """Raise DeployError if no picture can be written there, before any host is asked."""
    if path.suffix.lower() != ".png":
        raise DeployError(f"--plot {path} must end in .png, the one format there is", code=USAGE)
    if not path.absolute().parent.is_dir():
        raise DeployError(f"--plot {path}: there is no directory {path.absolute().parent}", code=USAGE)
    _library()


def _library() -> Any:
    """matplotlib's Figure, which draws without a display. Imported here only: it takes half a second."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells about its font cache
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise DeployError(
            "--plot needs matplotlib, which is not installed here: "
            "pip install -c constraints.txt -e '.[deploy,plot]'"
        ) from None
    return Figure


def write(made: Comparison, path: Path) -> None:
    """Draw `made` into the PNG file `path`, which appears whole. Raises DeployError if that cannot be."""
    figure = _library()(figsize=(12, 8), layout="constrained")
    loss, speed, phases, memory = figure.subplots(2, 2).flat
    for label, one in zip(made.labels, (made.a, made.b), strict=True):
        for axes, key in ((loss, "loss"), (speed, "tokens_per_second")):
            points = [
                (p["step"], p[key])
                for p in one["curves"]
                if p.get("step") is not None and p.get(key) is not None
            ]
            if points:
                axes.plot(*zip(*points, strict=True), label=_plain(label), linewidth=1.2)
    for axes, title in ((loss, "loss"), (speed, "tok/s")):
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    places = range(len(made.phases))
    for shift, label, values in (
        (-0.2, made.labels[0], [phase.a for phase in made.phases]),
        (0.2, made.labels[1], [phase.b for phase in made.phases]),
    ):
        phases.barh(
            [place + shift for place in places], [1000 * (v or 0) for v in values], 0.4, label=_plain(label)
        )
    phases.set_yticks(list(places), [_plain(phase.name) for phase in made.phases])
    phases.invert_yaxis()  # what regressed most stands on top, as in the text
    phases.set_title(f"ms {made.unit}")
    peaks = [(one["memory"].get("peak") or 0) / 1e9 for one in (made.a, made.b)]
    memory.bar([0, 1], peaks, 0.5, color=["C0", "C1"])
    memory.set_xticks([0, 1], [_plain(label) for label in made.labels])
    memory.set_title("memory, peak, GB")
    figure.suptitle(_plain(made.headline), fontsize=10, wrap=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(temporary, format="png", dpi=DOTS)
        os.replace(temporary, path)
    except OSError as error:
        raise DeployError(f"--plot {path} cannot be written ({error.strerror})") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _plain(text: str) -> str:
    """Text as it stands: matplotlib would read formulas between dollar signs."""
    return text.replace("$", r"\$")
