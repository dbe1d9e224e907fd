"""The compose runtime: one service, described as a value and rendered by templates/compose.yaml.j2.

The top-level compose.yaml is this template rendered for the demo (`python -m deploy.runtimes.compose`,
`make compose`), so what `docker compose up` starts and what a deploy starts cannot drift apart.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from deploy.render import render

STATE = "/var/lib/drafthouse"  # the state root inside an image
APP = "/opt/drafthouse"  # the code and the recipes inside an image
LAUNCH_GRACE_SECONDS = 60  # what launch gives its trainer between TERM and KILL, see trainer.status.Run


@dataclass(frozen=True)
class Mount:
    """One mount. `source` is a named volume, or a directory of the host if it is an absolute path.

    A host directory that is missing is an error and never created: the trainer would start on an empty one.
    """

    source: str
    target: str
    read_only: bool = False

    @property
    def is_volume(self) -> bool:
        return not self.source.startswith("/")


@dataclass(frozen=True)
class Service:
    """All that the template needs to know of a run in a container."""

    name: str  # the experiment
    command: Sequence[str]  # what tini starts
    image: str
    title: str  # the file's first line, for people
    build: bool = False  # the image is built from the directory of the file
    environment: Mapping[str, str] = field(default_factory=dict)
    environment_file: str | None = None  # absolute path on the host; written with the filter `envfile`
    mounts: Sequence[Mount] = ()
    user: str | None = None  # uid:gid; None: the image's own
    shm_bytes: int = 1 << 30
    grace_seconds: int = LAUNCH_GRACE_SECONDS
    gpus: Sequence[str] = ()  # device ids; empty: none
    healthcheck: Sequence[str] = ()

    @property
    def project(self) -> str:
        return f"drafthouse-{self.name}"

    @property
    def stop_seconds(self) -> int:
        """When the engine kills: later than launch does, which then still tells how the run ended."""
        return self.grace_seconds + 10


def shm_bytes(weights_bytes: int) -> int:
    """Size of the container's own /dev/shm: the weights, 1/8 more, and 1 GiB for PyTorch's loaders.

    The engine's default of 64 MiB is too small even for the loaders. Whole MiB, rounded up.
    """
    mebibyte = 1 << 20
    wanted = weights_bytes + weights_bytes // 8 + (1 << 30)
    return -(-wanted // mebibyte) * mebibyte


def compose_file(service: Service) -> str:
    """The text of the Compose file for `service`."""
    values = asdict(service)
    values["mounts"] = service.mounts
    values["volumes"] = sorted({mount.source for mount in service.mounts if mount.is_volume})
    return render("compose.yaml.j2", project=service.project, stop_seconds=service.stop_seconds, **values)


def demo() -> Service:
    """What the top-level compose.yaml starts: the demo, with all state in one named volume."""
    name = "demo"
    state = f"{STATE}/names/{name}"
    return Service(
        name=name,
        title="The demo in a container: docker compose up, then docker compose logs -f. See docs/docker.md.",
        image="drafthouse:local",
        build=True,
        command=[
            *("python", "-u", "-m", "trainer.launch", "--state", STATE, "--name", name, "--"),
            *("python", "-u", "-m", "trainer", "--config", f"{APP}/runs/demo.yaml"),
            *("--output-dir", f"{state}/checkpoints", "--cache-dir", f"{state}/cache", "--resume", "auto"),
        ],
        environment={"PYTHONUNBUFFERED": "1"},
        mounts=[Mount("state", STATE)],
        shm_bytes=shm_bytes(0),  # the toy target is a few megabytes
        healthcheck=["python", "-m", "trainer.healthcheck", "--state", STATE, "--name", name],
    )


if __name__ == "__main__":
    sys.stdout.write(compose_file(demo()))
