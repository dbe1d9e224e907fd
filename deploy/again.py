"""A release that is on a host, started again as it was: which one, and whether what it needs is there. Pure.

`start` and `restart --same` mean the current release, `rollback` the one before it.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy import release
from deploy.errors import USAGE, DeployError, nearest
from deploy.health_words import command, trainers
from trainer import status

OURS = "drafthouse:"  # before the digest of every image that we build
Deployed = tuple[Mapping[str, bytes], Mapping[str, str]]  # what release.deployed gives


def which(
    task: str,
    host: str,
    name: str,
    facts: Mapping[str, Any],
    release_id: str | None = None,
    default_run: str | None = None,
) -> str:
    """The id of the release that is meant. Raises DeployError if there is none.

    `default_run` is the file that a command takes by itself, for those that are proposed.
    """
    known = facts["names"].get(name) or {}
    current, previous, there = known.get("current"), known.get("previous"), known.get("releases") or []
    if current is None and there:
        raise DeployError(puts_right(name, host, facts, default_run))
    if current is None:
        offered = nearest(name, [one for one in facts["names"] if one != name])
        raise DeployError(
            f"nothing of {name} is deployed on {host}{offered}; "
            f"{'--same' if task == 'restart' else 'fab ' + task} starts a deployed release again, "
            "fab deploy makes one"
        )
    if release_id is not None:
        if release_id not in there:
            offered = nearest(release_id, there) or f"; {command('runs', name, host)} shows which there are"
            raise DeployError(f"there is no release {release_id} of {name} on {host}{offered}", code=USAGE)
        if release_id == current and task == "rollback":
            raise DeployError(
                f"release {release_id} of {name} is the current one on {host}; "
                f"{command('restart', name, host, '--same')} starts it again"
            )
        return release_id
    if task != "rollback":
        return current
    if previous is None:
        raise DeployError(
            f"{name} on {host} cannot be rolled back: {current} is the only release that ever ran there"
        )
    if previous not in there:
        others = [one for one in there if one != current]
        rest = f"; --release takes one of {', '.join(others)}" if others else ""
        raise DeployError(
            f"{name} on {host} cannot be rolled back: the files of release {previous} are gone "
            f"(pruned){rest or '; fab deploy writes the release of another commit anew'}"
        )
    return previous


def without_current(name: str, facts: Mapping[str, Any]) -> str:
    """That a name has releases on a host, and no link that says which one is current; empty if it has."""
    known = facts["names"].get(name) or {}
    if known.get("current") is not None or not known.get("releases"):
        return ""
    return f"has no current release, as the link names/{name}/current is not there"


def puts_right(name: str, host: str, facts: Mapping[str, Any], default_run: str | None) -> str:
    """The same as a sentence with the command that puts it right, by the file of the name's newest run."""
    lost = without_current(name, facts)
    runs = [run for run in facts["runs"] if run["name"] == name and run["run"]]
    mends = with_file(command("deploy", name, host), runs[-1] if runs else {}, default_run)
    return f"{name} on {host} {lost}; {mends} puts it right"


def with_file(words: str, run: Mapping[str, Any], default_run: str | None) -> str:
    """A command with the run's own file: `fab deploy --name exp` would start the default run's as exp.

    Only commands that render a file get one.
    """
    file = (run.get("run") or {}).get("run_file")
    if not words.startswith(("fab deploy", "fab restart")) or not isinstance(file, str) or not file:
        return words
    word = Path(file).stem if str(Path(file).parent) == "runs" else file
    return words if word == default_run else f"{words} --run {shlex.quote(word)}"


def after_switch(
    words: Mapping[str, Any], host: str, name: str, facts: Mapping[str, Any], release_id: str | None
) -> str:
    """The same for a rollback that has just watched a switch, of whose lock these are the `words`.

    Was that a rollback, then it is what was asked for. Was it none, then "the release before" has become
    another one since the question. Raises DeployError.
    """
    known = facts["names"].get(name) or {}
    current, previous = known.get("current"), known.get("previous")
    if words.get("task") == "rollback" and current is not None and release_id in (None, current):
        return str(current)
    if release_id is None:
        back = f"; {command('rollback', name, host)} goes back to {previous}" if previous else ""
        raise DeployError(
            f"nothing was rolled back: {words.get('by', 'somebody')} has just made {current} the release of "
            f"{name} on {host}{back}"
        )
    return which("rollback", host, name, facts, release_id)


def template(facts: Mapping[str, Any], name: str, release_id: str, host: str) -> status.Run:
    """run.json of the newest run of a release: what started it then starts it now."""
    for run in reversed(facts["runs"]):
        written = run["run"]
        if run["name"] == name and written and (written.get("release") or {}).get("id") == release_id:
            known = {field.name for field in dataclasses.fields(status.Run)}
            return status.Run(**{key: value for key, value in written.items() if key in known})
    raise DeployError(
        f"no run of release {release_id} of {name} is known on {host} any more (pruned), so neither is how "
        "it was started; fab deploy from the commit that made it"
    )


def way_back(facts: Mapping[str, Any], name: str, new_id: str) -> tuple[str, str] | None:
    """(release, path of its newest run) that is restored should a run of `new_id` die before its first step.

    None if nothing else was ever started. A run that never took a step itself is no way back.
    """
    current = (facts["names"].get(name) or {}).get("current")
    for run in reversed(facts["runs"]):
        release_id = ((run["run"] or {}).get("release") or {}).get("id")
        if run["name"] == name and release_id and release_id != new_id:
            stepped = run["alive"] or any(beat.get("step") for beat in trainers(run))
            if stepped or (release_id == current and run["launch"]):
                return release_id, run["path"]
    return None


def refuse_lost_image(facts: Mapping[str, Any], host: str, run: status.Run) -> None:
    """Raise DeployError if the image of an older run is gone.

    The probe lists our own images only; another one (`image: {use: …}`) is looked for by the switch, before
    it stops anything.
    """
    release_id = run.release.get("id")
    if run.runtime != "pct" and run.image and run.image.startswith(OURS) and "images" in facts:
        known = {word for image in facts["images"] for word in (image.get("id"), *(image.get("tags") or ()))}
        if run.image not in known:
            raise DeployError(
                f"the image of release {release_id} of {run.name} ({run.image}) is not on {host} any more; "
                "fab deploy builds one, from the commit that made it if it must be the same"
            )


def restage(facts: Mapping[str, Any], host: str, run: status.Run) -> dict[str, str] | None:
    """From where an older run's weights are copied into shared memory again; None if they are there.

    Raises DeployError if they are gone and nothing says where they came from.
    """
    weights = staged_weights(run)
    root = facts["shm"]["root"].rstrip("/") + "/"
    if not weights or not weights.startswith(root) or weights in [one["path"] for one in facts["weights"]]:
        return None
    known = source_of_weights(facts, run)
    if known:
        return known
    raise DeployError(
        f"the weights of release {run.release.get('id')} of {run.name} ({weights}) are not in {host}'s "
        f"shared memory any more; fab deploy --name {run.name} puts them there"
    )


def source_of_weights(facts: Mapping[str, Any], run: status.Run) -> dict[str, str] | None:
    """From where a run's weights can be copied into shared memory, by what its name's runs have left."""
    weights = staged_weights(run)
    for other in reversed(facts["runs"]):
        known = (other.get("boot") or {}).get("weights")
        if (
            other["name"] == run.name
            and isinstance(known, Mapping)
            and weights
            and known.get("path") == weights
        ):
            return {key: str(known[key]) for key in ("source", "path", "digest")}
    return None


def staged_weights(run: status.Run) -> str | None:
    """Where a run finds its weights: in our trainer's flags, or in a foreign command's environment."""
    if "--target-model" in run.command[:-1]:
        return str(run.command[run.command.index("--target-model") + 1])
    found = run.environment.get("DRAFTHOUSE_WEIGHTS")
    return str(found) if found else None


def secrets_file(facts: Mapping[str, Any], run: status.Run) -> str | None:
    """The file on the host that has a run's secrets: its own, else a newer run's of the same name."""
    if not run.secrets:
        return None
    there = facts["names"].get(run.name, {}).get("secrets") or []
    if run.secrets_file in there:
        return run.secrets_file
    for other in reversed(facts["runs"]):
        written = other["run"] or {}
        if other["run_id"] == run.run_id:
            break
        if (
            other["name"] == run.name
            and set(run.secrets) <= set(written.get("secrets") or ())
            and written.get("secrets_file") in there
        ):
            return str(written["secrets_file"])
    return None


def differences(before: Deployed, after: Deployed, release_id: str) -> list[str]:
    """What differs between two releases on the host, as `release.differences` says it."""
    return release.differences(before[0], before[1], _OnHost(release_id, "", after[0], (), {}, after[1]))


@dataclass(frozen=True)
class _OnHost(release.Release):
    """A release of which people's files are here, and the digests of all of them."""

    known: Mapping[str, str]

    @property
    def digests(self) -> dict[str, str]:
        return dict(self.known)
