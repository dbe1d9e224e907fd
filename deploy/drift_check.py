"""What of the runs in progress is not as it was deployed, or not as it would be deployed now.

`deploy.drift` compares a process with its run, `deploy.release` a release with another; this asks the host
for what they need, for all runs together: a status that asked once for each would be late with many.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from deploy import drift, plan, release, settings, survey
from deploy.errors import DeployError
from deploy.release import Release
from deploy.settings import RunSettings
from deploy.target import Target

Drift = tuple[str, ...]


def of_runs(
    goal: Target, facts: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]
) -> dict[str, Drift | None]:
    """By run id, every difference between a run, its release, and what would be rendered for it now.

    None for a run of which nothing at all can be told. The host is asked once about all of them, and once
    more if anything differs.
    """
    rendered = _against_files(goal, facts, [run for run in runs if _release_of(run)])
    return {run["run_id"]: _of_run(facts, run, rendered.get(run["run_id"])) for run in runs}


def _of_run(facts: Mapping[str, Any], run: Mapping[str, Any], rendered: Drift | None) -> Drift | None:
    known = tuple(drift.of_process(run, facts.get("images") or ()))
    if deployed := _release_of(run):
        known += tuple(release.edited(facts, run["name"], deployed))
    if rendered is None:
        return known or (() if run.get("running") else None)
    return (*rendered, *known)


def _release_of(run: Mapping[str, Any]) -> str | None:
    return ((run["run"] or {}).get("release") or {}).get("id")


def _against_files(
    goal: Target, facts: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]
) -> dict[str, Drift]:
    """By run id, what a deploy of the run's own file would change; not those deployed from another place.

    A run's own --set changes belong to it and are no difference.
    """
    found: dict[str, Drift] = {}
    wanted: dict[str, RunSettings] = {}
    for run in runs:
        try:
            if (run_settings := _settings_of(goal, run)) is not None:
                wanted[run["run_id"]] = run_settings
        except DeployError as error:
            found[run["run_id"]] = (str(error),)
    surveys = survey.of_releases(goal.project, goal.host, goal.settings, list(wanted.values()), facts)
    differing: dict[str, tuple[Release, str]] = {}
    for (run_id, run_settings), taken in zip(wanted.items(), surveys, strict=True):
        deployed = next(str(_release_of(run)) for run in runs if run["run_id"] == run_id)
        new = _release(goal, run_settings, taken)
        if not isinstance(new, Release):
            found[run_id] = new
        elif new.id == deployed:
            found[run_id] = ()
        else:
            differing[run_id] = (new, taken.layout.release(deployed))
    if differing:
        before = release.deployed_each(goal.host, [path for _, path in differing.values()])
        for (run_id, (new, _)), old in zip(differing.items(), before, strict=True):
            found[run_id] = (
                tuple(release.differences(old[0], old[1], new)) if old else (f"release {new.id} is rendered",)
            )
    return found


def _settings_of(goal: Target, run: Mapping[str, Any]) -> RunSettings | None:
    """What the run's own file says now; None without one here. Raises DeployError."""
    written = run["run"]
    if not written.get("run_file") or not os.path.isfile(goal.project.root / written["run_file"]):
        return None
    changes = [f"{key}={value}" for key, value in (written.get("changes") or {}).items()]
    recipe = settings.load_run(
        goal.project, written["run_file"], host=goal.settings, name=run["name"], changes=changes
    )
    return recipe.settings


def _release(goal: Target, run_settings: RunSettings, taken: survey.Survey) -> Release | Drift:
    """The release that would be made now, or why there is none."""
    if taken.weights_problems or taken.data_problems:
        return (taken.weights_problems + taken.data_problems)[:1]
    if taken.weights is not None and taken.weights.action == "changed":
        return (f"weights: the files in {taken.weights.source} have changed",)
    try:
        return plan.make_release(taken, goal.settings, run_settings)
    except DeployError as error:
        return (str(error),)
