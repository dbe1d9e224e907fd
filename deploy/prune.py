"""`fab prune`: what a host no longer needs. `decide` is pure; `carry_out` does what it says and nothing else.

Never removed: a run in progress, its release, weights and image, and those of the newest run of each name,
which a switch may be about to start; the current release of a name and the one before it, with the newest run
of each, so that start and rollback work; the newest checkpoint, and the checkpoints of a run that finished,
which are what the training was for. While a name is being deployed, nothing of it goes, and nothing shared.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deploy import lock, onhost
from deploy.errors import DeployError
from deploy.host import Host, HostError
from deploy.image import PACKAGES_LABEL
from deploy.lock import Patience
from deploy.sizes import size

KEEP = 5
SETTLED = 3600.0  # seconds since the last write, after which what is half-written is a leftover
_SURVEY_TIMEOUT = 120.0  # seconds; a state on a slow disk may have many files
_REMOVE_TIMEOUT = 600.0
_DEPLOYED = re.compile(r"drafthouse:(?:[0-9a-f]{12}|packages-[0-9a-f]+)")
_PACKAGES = "drafthouse:packages-"

Report = Callable[[str], None]


@dataclass(frozen=True)
class Item:
    """One thing that is removed: a directory on the host, or an image by its tag."""

    kind: str  # release | run | checkpoints | container | weights | data | tool | leftover | image | layers
    what: str  # for people
    path: str  # or the image's tag, or the id of a Proxmox container
    bytes: int
    name: str = ""  # the experiment, if it belongs to one


@dataclass(frozen=True)
class Prune:
    """What is removed from a host, and what stays."""

    host: str
    keep: int
    items: tuple[Item, ...]
    skipped: tuple[str, ...] = ()  # sentences: what was not looked at, since somebody is at work on it

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.items)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        notes = [f"  note: {sentence}" for sentence in self.skipped]
        if not self.items:
            return "\n".join([f"nothing to prune on {self.host}", *notes])
        rows = [(item.kind, item.what, size(item.bytes)) for item in self.items]
        kinds, whats = (max(len(row[column]) for row in rows) for column in (0, 1))
        return "\n".join(
            [
                f"prune {self.host}: {len(rows)} thing{'s' * (len(rows) != 1)}, {size(self.bytes)}",
                *(f"  {kind:<{kinds}}  {what:<{whats}}  {bytes}" for kind, what, bytes in rows),
                *notes,
            ]
        )


def decide(
    host: str,
    found: Mapping[str, Any],
    images: Sequence[Mapping[str, Any]] | None = (),
    *,
    keep: int = KEEP,
    name: str | None = None,
) -> Prune:
    """What can go, by what `leftovers.survey` found and the probe's images (None: the engine is silent).

    `keep` releases and runs of each name stay besides those that must; with `name`, only what belongs to it
    is looked at.
    """
    runs = found["runs"]
    kept_runs = _kept_runs(found, keep)
    items: list[Item] = []
    at_work = busy(found)
    skipped = [f"{words}, so nothing of it goes" for owner, words in at_work.items() if name in (None, owner)]
    for owner, home in sorted(found["names"].items()):
        if name in (None, owner) and owner not in at_work:
            items += _releases(owner, home, runs, keep)
            items += _checkpoints(owner, home, runs, kept_runs)
            items += _containers(owner, home, runs, found.get("containers") or ())
    items += [
        Item("run", run["run_id"], run["path"], run["bytes"], run["name"])
        for run in runs
        if run["run_id"] not in kept_runs and name in (None, run["name"]) and run["name"] not in at_work
    ]
    if name is None and at_work:
        skipped.append("weights, data, images and scripts stay until then, since it may be about to use them")
    elif name is None:
        items += _copies(found, kept_runs)
        items += [
            Item("tool", item["id"], item["path"], item["bytes"])
            for item in found["tools"]
            if item["id"] != found["boot"] and _settled(item, found)
        ]
        items += [
            Item("leftover", item["path"], item["path"], item["bytes"])
            for item in found["leftovers"]
            if _settled(item, found)
        ]
        gone = _images(images or (), [run for run in runs if run["run_id"] in kept_runs])
        items += gone
        if images is not None:
            items += _layers(found.get("shipped"), images, {item.path for item in gone})
    return Prune(host, keep, tuple(items), tuple(skipped))


def busy(found: Mapping[str, Any]) -> dict[str, str]:
    """The names that are being deployed just now, and by whom."""
    return {name: home["busy"] for name, home in sorted(found["names"].items()) if home.get("busy")}


def _newest(runs: Iterable[Mapping[str, Any]], release_id: str | None) -> str | None:
    """The newest run of a release. (Runs are listed oldest first.)"""
    found = None
    for run in runs:
        if release_id is not None and run["release"] == release_id:
            found = run["run_id"]
    return found


def _kept_runs(found: Mapping[str, Any], keep: int) -> set[str]:
    kept = {run["run_id"] for run in found["runs"] if run["alive"]}
    for name in {run["name"] for run in found["runs"]}:
        own = [run for run in found["runs"] if run["name"] == name]
        kept |= {run["run_id"] for run in own[max(0, len(own) - max(1, keep)) :]}
        home = found["names"].get(name) or {}
        for release_id in (home.get("current"), home.get("previous")):
            newest = _newest(own, release_id)
            kept |= {newest} if newest else set()
    return kept


def _releases(name: str, home: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], keep: int) -> list[Item]:
    must = _must(name, home, runs)
    # By their newest run: the same release may be started again long after it was written.
    last = {run["release"]: number for number, run in enumerate(runs) if run["name"] == name}
    others = sorted(
        (item for item in home["releases"] if item["id"] not in must),
        key=lambda item: (last.get(item["id"], -1), item["modified"]),
    )
    gone = others[: max(0, len(others) - max(0, keep - len(must - {None})))]
    return [Item("release", f"{name} {item['id']}", item["path"], item["bytes"], name) for item in gone]


def _must(name: str, home: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> set[str | None]:
    """The releases that are needed: current, the one before, what runs, what ran last."""
    own = [run for run in runs if run["name"] == name]
    return {
        home["current"],
        home["previous"],
        *(run["release"] for run in own if run["alive"] or run is own[-1]),
    }


def _containers(
    name: str,
    home: Mapping[str, Any],
    runs: Sequence[Mapping[str, Any]],
    containers: Iterable[Mapping[str, Any]],
) -> list[Item]:
    """Proxmox containers of releases that are needed no more. They are gigabytes, a release is not."""
    must = _must(name, home, runs)
    return [
        Item("container", f"{one['id']}, of {name} {one['release']}", str(one["id"]), 0, name)
        for one in containers
        if one["name"] == name and one["release"] not in must and not one["running"]
    ]


def _checkpoints(
    name: str, home: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], kept_runs: set[str]
) -> list[Item]:
    finished = {run["run_id"] for run in runs if run["reason"] == "finished"}
    known = {run["run_id"] for run in runs}
    return [
        Item("checkpoints", f"of {item['id']}", item["path"], item["bytes"], name)
        for item in home["checkpoints"]
        # Of a run that was removed before nobody knows whether it finished.
        if item["id"] != home["latest"]
        and item["id"] not in kept_runs
        and item["id"] not in finished
        and item["id"] in known
    ]


def _copies(found: Mapping[str, Any], kept_runs: set[str]) -> list[Item]:
    """Copies that we made: in memory for what runs, is current or newest, on disk for any run kept."""
    current: set[str] = set()
    for name, home in found["names"].items():
        own = [run for run in found["runs"] if run["name"] == name]
        newest = _newest(own, home["current"])
        current |= {run["run_id"] for run in own if run["alive"] or run["run_id"] == newest or run is own[-1]}
    items = []
    for copy in found["copies"]:
        place = copy["path"].rsplit("/", 2)[-2]
        on_disk = place in ("weights", "data")
        wanted = kept_runs if on_disk else current
        if any(copy["path"] in run["uses"] for run in found["runs"] if run["run_id"] in wanted):
            continue
        if _settled(copy, found):
            where = f"{copy['id']} {'on disk' if on_disk else 'in shared memory'}"
            items.append(Item("data" if place == "data" else "weights", where, copy["path"], copy["bytes"]))
    return items


def _images(images: Sequence[Mapping[str, Any]], kept: Sequence[Mapping[str, Any]]) -> list[Item]:
    """Images of ours that no run that stays was started from. Their packages stay while an image has them.

    Ours are those that a deploy has named by their content: what somebody built by hand has another tag. The
    engine counts the packages in each image on top of them; they are given back with their own name only.
    """
    wanted = {run["image"] for run in kept if run["image"]}
    own = [(tag, image) for image in images for tag in image.get("tags") or () if _DEPLOYED.fullmatch(tag)]
    stay = [image for tag, image in own if tag in wanted]
    labels = [image.get("labels") for image in stay]
    packages = {(label or {}).get(PACKAGES_LABEL) for label in labels}
    sizes = {tag: int(image.get("bytes") or 0) for tag, image in own}
    items = []
    for tag, image in own:
        if tag in wanted:
            continue
        # Without labels nobody can say whose packages these are.
        if tag.startswith(_PACKAGES) and (tag in packages or None in packages):
            continue
        below = (image.get("labels") or {}).get(PACKAGES_LABEL)
        shared = sizes.get(below, 0) if below != tag else 0
        items.append(Item("image", tag, tag, max(0, sizes[tag] - shared)))
    return items


def _layers(
    shipped: Mapping[str, Any] | None, images: Sequence[Mapping[str, Any]], gone: Collection[str]
) -> list[Item]:
    """The layers of the last ship. While an image that stays is of them, the next ship builds on them."""
    if shipped is None:
        return []
    reference = shipped["reference"]
    there = {tag for image in images for tag in image.get("tags") or ()}
    if reference in there - set(gone):
        return []
    return [Item("layers", f"shipped for {reference or 'an image'}", shipped["path"], shipped["bytes"])]


def _settled(item: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    return bool(found["time"] - item["modified"] > SETTLED)


# -- acting ------------------------------------------------------------------------------------------------


def survey(host: Host, state: str, shm: str) -> dict[str, Any]:
    """What lies on a host; see `deploy.leftovers.survey`."""
    value: dict[str, Any] = onhost.ask(host, "deploy.leftovers:survey", state, shm, timeout=_SURVEY_TIMEOUT)
    return value


def carry_out(
    made: Prune, host: Host, state: str, shm: str, report: Report, lock_wait: Patience = lock.NONE
) -> tuple[int, list[str]]:
    """Remove what was decided: (bytes that were given back, a sentence for each thing that stayed).

    What belongs to a name is removed while its deploy lock is held, what is shared while all names' are, so
    that no deploy counts on it meanwhile. A name whose lock is not to be had is passed over.
    """
    freed, stayed = 0, []
    groups: dict[str, list[Item]] = {}
    for item in made.items:
        groups.setdefault("" if item.kind == "image" else item.name, []).append(item)
    for name, items in sorted(groups.items()):
        paths = [item.path for item in items if item.kind not in ("image", "container")]
        if not paths:
            continue
        try:
            done = _remove_of(name, host, state, shm, paths, report, lock_wait)
        except HostError:
            raise
        except DeployError as error:
            stayed.append(str(error))
            continue
        gone = set(done["removed"])
        freed += sum(item.bytes for item in items if item.path in gone)
        stayed += [f"{path} {why}" for path, why in done["kept"]]
    for item in made.items:
        if item.kind == "container":
            stayed += _remove_container(item, host, state, report, lock_wait)
        if item.kind == "image":
            now = onhost.ask(host, "deploy.leftovers:at_work", state)
            if now["busy"] or item.path in now["images"]:
                stayed.append(f"image {item.path} stays: {now['busy'] or 'a run counts on it'}")
                continue
            result = host.run(["docker", "image", "rm", item.path], timeout=_REMOVE_TIMEOUT, check=False)
            if result.code:
                words = result.err.decode(errors="replace").strip().splitlines() or ["no reason was given"]
                stayed.append(f"image {item.path} stays: {words[-1]}")
            else:
                freed += item.bytes
    return freed, stayed


def _remove_container(item: Item, host: Host, state: str, report: Report, lock_wait: Patience) -> list[str]:
    """Why a Proxmox container stayed, as a sentence; none if it is gone."""
    try:
        with lock.hold(host, state, item.name, "prune", lock_wait.left, waiting=report):
            words = (int(item.path), state)
            why = onhost.ask(host, "deploy.pct_host:remove", *words, timeout=_REMOVE_TIMEOUT)
    except HostError:
        raise
    except DeployError as error:
        why = str(error)
    return [f"container {item.path} stays: {why}"] if why else []


def _remove_of(
    name: str, host: Host, state: str, shm: str, paths: Sequence[str], report: Report, lock_wait: Patience
) -> dict[str, Any]:
    """What belongs to a name, or, with an empty one, what is shared."""
    with contextlib.ExitStack() as held:
        if name:
            held.enter_context(lock.hold(host, state, name, "prune", lock_wait.left, waiting=report))
        whose = (name or None, lock.who())
        value: dict[str, Any] = onhost.ask(
            host, "deploy.leftovers:remove", state, shm, list(paths), *whose, timeout=_REMOVE_TIMEOUT
        )
    return value
