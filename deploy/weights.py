"""Model weights: found here or on the host, pushed there if need be, then copied into shared memory.

``<shm>/<name>@<digest12>`` holds a copy that never changes, ``<shm>/<name>`` points to it. A run is given the
versioned path, so that new weights never appear under a process that has the old ones mapped. Directories of
data go the same way, but for the shared memory. `deploy.weights_store` is the part that works on the host.
`toy` is not handled here: the trainer makes it, since `docker compose up` has no deploy.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy import onhost, weights_store
from deploy.errors import DeployError
from deploy.host import Host
from deploy.sizes import size

SILENCE = 120.0  # seconds without a word of a copy; it tells how far it is every 10 s

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Weights:
    """What a deploy will do about the weights, or about a directory of data, and where the run finds them."""

    source: str  # as in the run's file; on the host, unless `action` is push
    action: str  # toy | in-place | present | copy | push | changed (only told to those who will not wait)
    path: str | None  # what the run is given; None: the digest is not known yet
    name: str = ""
    digest: str = ""
    bytes: int = 0
    root: str = ""  # of shared memory
    kept: str = ""  # on the host's disk, what was pushed from this machine

    def describe(self) -> str:
        if self.action == "toy":
            return "toy, which the trainer makes itself on its first run and caches"
        if self.action == "in-place":
            return f"{self.path} ({size(self.bytes)}), in shared memory already, used where it lies"
        if self.action == "present":
            return f"{self.path} ({size(self.bytes)}), unchanged"
        if self.action == "push":
            staged = f", then copy them to {self.path}" if self.path != self.kept else ""
            return f"push {self.source} ({size(self.bytes)}) of this machine to {self.kept}{staged}"
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
    progress: Progress = weights_store.silent,
    *,
    read: bool = True,
) -> Weights:
    """What has to happen so that `source`, a directory of this machine, is in `place` on a host.

    `there` and `staged` are what `weights_store.known` says of `place` and of shared memory, `root`, which is
    empty for data, as those are not staged. Reads; hashes only what no manifest there tells of.
    """
    stamp = weights_store.stamp_of(source)
    total, name, origin = (
        sum(length for length, _ in stamp.values()),
        source.resolve().name,
        origin_of(source),
    )
    digest = next((one["digest"] for one in there if (one["source"], one["stamp"]) == (origin, stamp)), None)
    made = Weights(str(source), "changed", None, name, "", total, root)
    if digest is None:
        if not read:
            return made
        progress(f"reading {size(total)} of {source}")
        digest = weights_store.tree_digest(source, progress)
    version = f"{name}@{digest[:12]}"
    kept, path = f"{place}/{version}", f"{root or place}/{version}"
    made = dataclasses.replace(made, path=path, digest=digest, kept=kept)
    if not any(one["path"] == kept for one in there):
        return dataclasses.replace(made, action="push")
    is_staged = not root or any(one["path"] == path for one in staged)
    return dataclasses.replace(made, action="present" if is_staged else "copy")


def origin_of(source: Path) -> str:
    """How a host is told where a directory came from."""
    return f"{socket.gethostname()}:{source}"


def bring(host: Host, found: Weights, progress: Progress) -> None:
    """Carry out what is planned for weights or data. Raises DeployError; then nothing has changed."""
    if found.action == "push":
        push(host, found, progress)
    if found.root and found.action in ("push", "copy", "present"):
        boot = found.boot()
        assert boot
        onhost.ask(
            host,
            "deploy.weights_store:stage",
            *boot.values(),
            timeout=SILENCE,
            # A connection of its own only for what takes its time.
            progress=None if found.action == "present" else progress,
        )


def push(host: Host, found: Weights, progress: Progress) -> None:
    """Send a directory of this machine to the host's disk, where it appears once all of it has arrived."""
    source = Path(found.source)
    stamp = weights_store.stamp_of(source)
    progress(f"sending {size(found.bytes)} from {source}")
    onhost.ask(
        host,
        "deploy.weights_store:receive",
        found.kept,
        origin_of(source),
        found.digest,
        stamp,
        stream=_contents(source, stamp),
        timeout=SILENCE,
        progress=progress,
    )


def _contents(source: Path, stamp: Mapping[str, Sequence[int]]) -> Iterator[bytes]:
    """The files of `stamp` one after the other, each as long as it says, as the other side counts on it."""
    for relative, (length, _) in stamp.items():
        left = length
        try:
            with open(source / relative, "rb") as file:
                while left:
                    block = file.read(min(left, weights_store.CHUNK))
                    if not block:
                        raise DeployError(f"{source / relative} became shorter while it was sent")
                    left -= len(block)
                    yield block
        except OSError as error:
            raise DeployError(f"{source / relative} cannot be read: {error.strerror}") from None
