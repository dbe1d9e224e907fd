"""Model weights: found here or on the host, and brought into its shared memory.

``<shm>/<name>@<digest12>`` holds a copy that never changes, ``<shm>/<name>`` points to it. A run is given the
versioned path, so that new weights never appear under a process that has the old ones mapped. What comes
from this machine goes straight into shared memory, and a copy of it is kept on the host's disk for the time
after a reboot; directories of data go to the disk only. `deploy.sender` sends, `deploy.weights_store` works
on the host.
`toy` is not handled here: the trainer makes it, since `docker compose up` has no deploy.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy import hashing, manifest, onhost, sender, weights_store
from deploy.errors import DeployError
from deploy.host import Host
from deploy.manifest import Progress
from deploy.meter import Meter, on_terminal
from deploy.sizes import printable, size

SILENCE = 120.0  # seconds without a word of a copy; it tells how far it is every 10 s

_manifests: dict[str, dict[str, Any]] = {}  # by digest: what was read for a plan, for its carrying out


@dataclass(frozen=True)
class Weights:
    """What a deploy will do about the weights, or about a directory of data, and where the run finds them."""

    source: str  # as in the run's file; on the host, unless `action` is push
    # toy | in-place | present | copy | push | keep | changed (only told to those who will not wait)
    action: str
    path: str | None  # what the run is given; None: the digest is not known yet
    name: str = ""
    digest: str = ""
    bytes: int = 0
    root: str = ""  # of shared memory
    kept: str = ""  # on the host's disk, what was pushed from this machine
    held: int = 0  # bytes that an interrupted copy holds there, which this one takes over or frees

    def describe(self) -> str:
        if self.action == "toy":
            return "toy, which the trainer makes itself on its first run and caches"
        if self.action == "in-place":
            return f"{self.path} ({size(self.bytes)}), in shared memory already, used where it lies"
        if self.action == "present":
            return f"{self.path} ({size(self.bytes)}), unchanged"
        if self.action == "push":
            keep = f", and keep a copy in {self.kept}" if self.kept not in ("", self.path) else ""
            return f"push {self.source} ({size(self.bytes)}) of this machine to {self.path}{keep}"
        if self.action == "keep":
            return f"{self.path} ({size(self.bytes)}), unchanged; keep a copy in {self.kept}"
        whence = f"{self.kept}, pushed before," if self.kept else self.source
        return f"copy {whence} ({size(self.bytes)}) to {self.path}"

    def boot(self) -> dict[str, str] | None:
        """What stages them again after a reboot, the arguments of `weights_store.stage`; None for the toy."""
        if self.action == "toy" or self.path is None:
            return None
        return {"source": self.kept or self.source, "path": self.path, "digest": self.digest}


def pushed(
    source: Path,
    place: str,
    root: str,
    there: Sequence[Mapping[str, Any]],
    staged: Sequence[Mapping[str, Any]],
    progress: Progress = manifest.silent,
    *,
    read: bool = True,
    hashes: Sequence[str] = (hashing.SHA,),
    held: int = 0,
) -> Weights:
    """What has to happen so that `source`, a directory of this machine, is on a host.

    In shared memory, `root`, and on disk in `place` ("": no copy is kept); data, whose `root` is empty, on
    disk only. `there` and `staged` are what `weights_store.known` says of the two, `held` what
    `weights_store.held` says of shared memory, `hashes` what the host can compute. Reads; hashes only what no
    manifest there tells of.
    """
    outline, name, origin = manifest.outline(source, ""), manifest.name_of(source), origin_of(source)
    stamp, progress = outline["stamp"], lined(progress)
    copies = (*there, *staged)
    digest = next((one["digest"] for one in copies if (one["source"], one["stamp"]) == (origin, stamp)), None)
    made = Weights(str(source), "changed", None, name, "", weights_store.taken(outline), root, held=held)
    if digest is None:
        if not read:
            return made
        digest = read_manifest(source, hashes, progress)["digest"]
    version = f"{name}@{digest[:12]}"
    kept, path = f"{place}/{version}" if place else "", f"{root or place}/{version}"
    made = dataclasses.replace(made, path=path, digest=digest, kept=kept)
    is_kept = any(one["path"] == kept for one in there)
    is_staged = not root or any(one["path"] == path for one in staged)
    if is_kept or (is_staged and not place):
        return dataclasses.replace(made, action="present" if is_staged else "copy")
    return dataclasses.replace(made, action="keep" if root and is_staged else "push")


def read_manifest(source: Path, hashes: Sequence[str], progress: Progress) -> dict[str, Any]:
    """The manifest of a directory of this machine, with a hash that the host can compute as well."""
    progress(f"reading {size(weights_store.taken(manifest.outline(source, '')))} of {source}")
    found = {**manifest.read(source, hashing.common(hashes), progress), "source": origin_of(source)}
    _manifests[found["digest"]] = found
    return found


def lined(progress: Progress) -> Progress:
    """One that says everything in one line: a name may have a newline in it, or what a terminal obeys."""
    return lambda text: progress(printable(text))


def origin_of(source: Path) -> str:
    """How a host is told where a directory came from."""
    return f"{socket.gethostname()}:{source}"


def bring(
    host: Host, found: Weights, progress: Progress, again: str = "fab deploy", *, old: bool = False
) -> None:
    """Carry out what is planned for weights or data. Raises DeployError; then nothing has changed.

    `again`: the command that goes on; `old`: they are what an older run was started with.
    """
    progress = lined(progress)
    if found.action == "push":
        push(host, found, progress, meter=on_terminal(progress), again=again)
    if found.root and found.action in ("push", "keep") and found.kept:
        onhost.ask(
            host,
            "deploy.weights_store:keep",
            found.path,
            found.kept,
            found.digest,
            timeout=SILENCE,
            progress=progress,
        )
    if found.root and found.action in ("copy", "present", "keep"):
        boot = found.boot()
        assert boot
        onhost.ask(
            host,
            "deploy.weights_store:restage" if old else "deploy.weights_store:stage",
            *boot.values(),
            timeout=SILENCE,
            # A connection of its own only for what takes its time.
            progress=progress if found.action == "copy" else None,
        )


def push(
    host: Host,
    found: Weights,
    progress: Progress,
    *,
    streams: int | None = None,
    meter: Meter | None = None,
    again: str = "the same command",
) -> sender.Sent:
    """Send a directory of this machine to where the run finds it. It appears once all of it is verified.

    `again`: the command that goes on if the link is lost for good. Raises DeployError, also if the directory
    is not any more what was planned.
    """
    source = Path(found.source)
    wanted = _manifests.get(found.digest)
    if wanted is None or manifest.stamp_of(source) != wanted["stamp"]:
        raise DeployError(f"{source} changed since it was read; {again} reads it again")
    progress(f"sending {size(found.bytes)} from {source}")
    return sender.send(
        host,
        source,
        wanted,
        str(found.path),
        durable=not found.root,
        link=bool(found.root),
        streams=streams,
        progress=progress,
        meter=meter,
        again=again,
    )
