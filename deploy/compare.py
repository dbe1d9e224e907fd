"""Two runs side by side: what became slower, and what is set differently. Pure.

Made from what `deploy.figures` tells of each run. The phase that regressed stands first; where the steps of
the two differ in size, times are held against the same number of tokens instead of a step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy import mask, yamlfile
from deploy.errors import DeployError
from deploy.health import cut, number, table
from deploy.sizes import age, size

NAMES = {
    "data": "data wait", "target": "target", "forward": "drafter", "objective": "loss",
    "backward": "backward", "optimizer": "optimiser", "communication": "communication",
}  # fmt: skip
REST = "rest"  # of a step, outside its phases: saving, evaluating, writing records
EQUAL = 0.02  # two figures that differ by less count as equal
SAME_STEP = 0.05  # two step sizes that differ by less count as the same
NONE = "–"
Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Phase:
    """What one phase of a step takes in the two runs, in seconds a step, or a thousand tokens."""

    name: str
    a: float | None
    b: float | None

    @property
    def lost(self) -> float:
        return (self.b or 0.0) - (self.a or 0.0)

    @property
    def regressed(self) -> bool:
        return self.b is not None and self.lost > EQUAL * (self.a or 0.0)


@dataclass(frozen=True)
class Comparison:
    labels: tuple[str, str]
    a: Figures
    b: Figures
    unit: str  # of the phases: "a step" or "per 1,000 tokens"
    phases: tuple[Phase, ...]  # what regressed most comes first
    settings: tuple[tuple[str, str, str], ...]  # (key, in a, in b), those that differ
    headline: str
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        shown = ("run_id", "name", "records", "used", "last_step", "tokens_per_second", "step_seconds",
                 "tokens_per_step", "phase_seconds", "memory", "loss", "metrics", "seconds")  # fmt: skip
        return {
            "headline": self.headline,
            "unit": self.unit,
            "phases": [{"name": one.name, "a": one.a, "b": one.b} for one in self.phases],
            "settings": [{"key": key, "a": a, "b": b} for key, a, b in self.settings],
            "runs": [
                {"label": label, **{key: one.get(key) for key in shown}}
                for label, one in zip(self.labels, (self.a, self.b), strict=True)
            ],
            "notes": list(self.notes),
        }


def compare(a: Figures, b: Figures, labels: tuple[str, str]) -> Comparison:
    sizes: list[float] = [one.get("tokens_per_step") or 0.0 for one in (a, b)]
    same = 0.0 in sizes or abs(sizes[1] / sizes[0] - 1) <= SAME_STEP
    scales = (1.0, 1.0) if same else (1000.0 / sizes[0], 1000.0 / sizes[1])
    unit = "a step" if same else "per 1,000 tokens"
    timed = [_phases(one, scale) for one, scale in zip((a, b), scales, strict=True)]
    names = dict.fromkeys([*timed[0], *timed[1]])
    phases = [Phase(name, timed[0].get(name), timed[1].get(name)) for name in names]
    phases.sort(key=lambda phase: (phase.name == REST and not phase.regressed, -phase.lost))
    notes = []
    for one in (a, b):
        notes += [f"could not be read: {cut(problem)}" for problem in one.get("problems") or ()]
    if not same:
        notes.append(
            f"steps differ in size ({sizes[0]:,.0f} and {sizes[1]:,.0f} tokens): times are per 1,000 tokens"
        )
    headline = _headline(a, b, labels, phases, unit)
    return Comparison(
        labels, a, b, unit, tuple(phases), tuple(differences(a, b)), headline, tuple(dict.fromkeys(notes))
    )


def _phases(one: Figures, scale: float) -> dict[str, float]:
    """Seconds by the name that people see, and what is left of a step."""
    parts = table(dict(one), "phase_seconds")
    found: dict[str, float] = {}
    for key in parts:
        value = number(parts, key)
        if value is not None:
            found[NAMES.get(key) or cut(key, 24)] = value * scale
    whole = one.get("step_seconds")
    if whole and found:
        found[REST] = max(0.0, whole * scale - sum(found.values()))
    return found


def _headline(a: Figures, b: Figures, labels: tuple[str, str], phases: Sequence[Phase], unit: str) -> str:
    moved = change(a.get("tokens_per_second"), b.get("tokens_per_second"))
    if moved is None:
        return f"{labels[0]} and {labels[1]} cannot be compared in speed: {_why_not(a, b, labels)}"
    if moved < -EQUAL:
        first = f"{labels[1]} is {-100 * moved:.0f} % slower than {labels[0]}"
    elif moved > EQUAL:
        first = f"{labels[1]} is {100 * moved:.0f} % faster than {labels[0]}"
    else:
        first = f"{labels[1]} is as fast as {labels[0]} (within {100 * EQUAL:.0f} %)"
    worst = next((phase for phase in phases if phase.regressed and phase.lost > 0), None)
    total = sum(phase.a or 0.0 for phase in phases)
    if worst is None or worst.lost < 0.01 * total:
        return f"{first}; no phase regressed" if phases else first
    lost = sum(max(0.0, phase.lost) for phase in phases)
    more = change(worst.a, worst.b)
    share = f"{100 * worst.lost / lost:.0f} % of the time lost"
    return (
        f"{first}: {worst.name} regressed{' most' if worst.lost < 0.995 * lost else ''}, "
        f"{_ms(worst.a)} → {_ms(worst.b)} ms {unit}"
        f"{f' ({100 * more:+.0f} %)' if more is not None else ''}, {share}"
    )


def _why_not(a: Figures, b: Figures, labels: tuple[str, str]) -> str:
    """Which of the two lacks its speed, and why."""
    bare = [label for label, one in zip(labels, (a, b), strict=True) if not one["records"]]
    if not bare:
        lacking = [
            label for label, one in zip(labels, (a, b), strict=True) if not one.get("tokens_per_second")
        ]
        return f"the records of {' and '.join(lacking) or labels[0]} tell no tok/s"
    first = f"{bare[0]} has no figures, because it has"
    if len(bare) == 2:
        first = "neither has figures, because they have"
    return f"{first} written no metrics.jsonl (a command of your own, or no step was logged yet)"


def change(a: float | None, b: float | None) -> float | None:
    """By which part of `a` `b` is greater; None if that cannot be told."""
    return b / a - 1 if a and b is not None else None


# -- settings ----------------------------------------------------------------------------------------------


def differences(a: Figures, b: Figures) -> list[tuple[str, str, str]]:
    """(key, in a, in b) of every setting that differs, with what looks like a secret masked."""
    before, after = _settings(a), _settings(b)
    if before is None or after is None:
        return []
    return [
        (cut(key, 60), _value(key, before, after), _value(key, after, before))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def _value(key: str, own: Mapping[str, str], other: Mapping[str, str]) -> str:
    if key not in own:
        return NONE
    shown = mask.MASK if mask.secret_name(key.rpartition(".")[2]) else mask.text(own[key])
    both = other.get(key)
    same = both is not None and shown == (mask.MASK if shown == mask.MASK else mask.text(both))
    return cut(shown + (mask.OTHER if same else ""), 80)


def _settings(one: Figures) -> dict[str, str] | None:
    """What a run was started with, flat: its release's run.yaml, what its checkpoint keeps beside that, and
    what stands in run.json. None if nothing at all is known."""
    made = table(dict(one), "run")
    found: dict[str, Any] = {}
    if one.get("release_settings"):
        try:
            found = flat(yamlfile.parse(one["release_settings"], "run.yaml").value or {})
        except DeployError:
            found = {}
    known = {key.rpartition(".")[2].replace("-", "_") for key in found}
    for key, value in flat(table(dict(one), "learnt")).items():
        if key.replace("-", "_") not in known:
            found[f"trainer.{key.replace('_', '-')}"] = value
    if not found and isinstance(made.get("command"), list):
        found["command"] = " ".join(mask.words([str(word) for word in made["command"]]))
    for key, value in (
        ("runtime", made.get("runtime")),
        ("git.commit", table(made, "git").get("commit")),
        ("git.dirty", table(made, "git").get("dirty")),
        ("image", made.get("image")),
        ("devices", made.get("devices")),
    ):
        if value is not None:
            found.setdefault(key, value)
    found.pop("name", None)  # two names are always different
    texts = {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in found.items()
    }
    return texts or None


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """``{"trainer.lr": 0.0006}``: nested mappings by dotted keys; lists are values."""
    if not isinstance(value, Mapping):
        return {prefix.rstrip("."): value} if prefix else {}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found.update(flat(inner, f"{prefix}{key}."))
    return found


# -- text --------------------------------------------------------------------------------------------------


def text(made: Comparison) -> str:
    """The headline, then a table of figures, phases and memory, then the settings that differ."""
    a, b = made.a, made.b
    lines: list[tuple[str, str, str, str]] = [("", *made.labels, "change")]

    def row(name: str, pair: Sequence[Any], form: Callable[[Any], str]) -> None:
        one, other = pair
        if one is None and other is None:
            return
        more = change(one, other)
        told = "" if more is None else f"{100 * more:+.0f} %"
        before, after = (NONE if value is None else form(value) for value in pair)
        lines.append((name, before, after, told))

    row("tok/s", (a.get("tokens_per_second"), b.get("tokens_per_second")), "{:,.0f}".format)
    for phase in made.phases:
        row(f"{phase.name}, ms {made.unit}", (phase.a, phase.b), _ms)
    row("whole step, ms", (a.get("step_seconds"), b.get("step_seconds")), _ms)
    row("tokens a step", (a.get("tokens_per_step"), b.get("tokens_per_step")), "{:,.0f}".format)
    for key in ("now", "peak"):
        row(f"memory {key}", [table(dict(one), "memory").get(key) for one in (a, b)], size)
    step = min((one["last_step"] for one in (a, b) if one.get("last_step") is not None), default=None)
    if step is not None:
        row(f"loss at step {step:.0f}", [loss_at(one, step) for one in (a, b)], "{:.3f}".format)
    metrics = [table(dict(one), "metrics") for one in (a, b)]
    for key in [key for key in metrics[0] if key in metrics[1]]:
        row(cut(str(key), 40), [number(one, key) for one in metrics], "{:.3f}".format)
    row("logged for", (a.get("seconds"), b.get("seconds")), age)
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    shown = [made.headline, ""] if len(lines) > 1 else [made.headline]
    for line in lines if len(lines) > 1 else ():
        cells = [
            f"{line[0]:<{widths[0]}}",
            *(f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        shown.append("  ".join(cells).rstrip())
    shown += ["", *_setting_lines(made), *made.notes]
    return "\n".join(shown).rstrip()


def _setting_lines(made: Comparison) -> list[str]:
    if made.settings:
        return ["settings that differ:", *(f"  {key}: {a} → {b}" for key, a, b in made.settings)]
    known = all(_settings(one) is not None for one in (made.a, made.b))
    return ["settings: no difference"] if known else ["settings: unknown, because a run has left none"]


def loss_at(one: Figures, step: float) -> float | None:
    """The loss of a curve at the step nearest to `step`."""
    points = [
        point
        for point in one.get("curves") or ()
        if number(point, "loss") is not None and number(point, "step")
    ]
    nearest = min(points, key=lambda point: abs(point["step"] - step), default=None)
    return None if nearest is None else float(nearest["loss"])


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return NONE
    return f"{1000 * seconds:,.0f}" if seconds >= 0.01 else f"{1000 * seconds:.1f}"
