"""What must hold before a run can start in a container; a part of `deploy.preflight`. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deploy import image as images
from deploy import runtimes, sizes
from deploy.checks import Check
from deploy.devices import Devices
from deploy.release import Image
from deploy.runtimes import compose
from deploy.settings import HostSettings, RunSettings
from deploy.sizes import size

# What an image and its build take on the engine's disk, in bytes and rounded up. Our code alone takes little.
PACKAGES_BYTES = {"cpu": 4 * 10**9, "gpu": 16 * 10**9}
CODE_BYTES = 100 * 10**6
# A container that sees one of these instead of its own does not start.
OCCUPIED = (
    "/",
    "/proc",
    "/sys",
    "/dev",
    "/dev/shm",
    "/tmp",
    "/run",
    "/etc",
    "/usr",
    "/bin",
    "/lib",
    compose.APP,
)


def checks(
    facts: Mapping[str, Any],
    host: HostSettings,
    run: RunSettings,
    found: Devices,
    image: Image | None,
    mounts: list[compose.Mount],
    there: bool | None = None,
) -> list[Check]:
    """All findings about engine, image, devices, memory and mounts.

    `there` says whether the engine has an image that is used as it is; None: that is not known.
    """
    broken = list(_engine(facts["engine"], host, facts))
    if broken:
        return broken  # nothing else can be said of an engine that does not answer
    return [
        *command(run),
        *_lost(host, run, there),
        *_user(facts, host, run),
        *_taken(facts, host, run),
        *_toolkit(facts, host, found),
        *_storage(facts["engine"], host, image, facts),
        *_memory(facts, host, run, found),
        *_upgrades(facts, host),
        *places(mounts),
    ] or [Check("engine", True)]


def _engine(engine: Mapping[str, Any], host: HostSettings, facts: Mapping[str, Any]) -> Iterator[Check]:
    def bad(message: str, remedy: str) -> Check:
        return Check("engine", False, message, remedy)

    otherwise = f"or set runtime: process for {host.name} in fabric.yaml"
    bootstrap = f"fab bootstrap --host {host.name}"
    address = str(engine.get("address") or "unix://")
    if not address.startswith("unix://"):
        yield bad(
            f"the Docker client of {host.name} asks the engine at {address}, but a run can only be watched "
            "and stopped through a unix socket of the machine that it is deployed to",
            "unset DOCKER_HOST there (or docker context use default), or deploy to the engine's own machine, "
            f"{otherwise}",
        )
    elif engine.get("permitted") is False:
        user = facts["user"]
        yield bad(
            f"{user} may not use the Docker engine of {host.name} ({engine.get('error') or 'no permission'})",
            f"run sudo usermod -aG docker {user} there, which gives {user} root's rights, and log in anew",
        )
    elif not engine["answers"] and not engine.get("client"):
        yield bad(f"{host.name} has no Docker engine", f"install one with {bootstrap}, {otherwise}")
    elif not engine["answers"]:
        yield bad(
            f"the Docker engine of {host.name} does not answer ({engine.get('error') or 'it says nothing'})",
            f"start it there with systemctl start docker, {otherwise}",
        )
    elif runtimes.version(engine.get("version")) < runtimes.ENGINE:
        yield bad(
            f"{host.name} has Docker Engine {engine.get('version')}, but 20.10 or later is needed",
            f"upgrade it there, {otherwise}",
        )
    elif not engine.get("client"):
        yield bad(
            f"{host.name} has a Docker engine, but no docker command",
            f"install it with {bootstrap}, {otherwise}",
        )
    elif not engine.get("compose"):
        yield bad(
            f"{host.name} has no Docker Compose v2 ({runtimes.no_compose(engine)})",
            f"install it with {bootstrap}, {otherwise}",
        )
    elif runtimes.version(engine["compose"]) < runtimes.COMPOSE:
        yield bad(
            f"{host.name} has Docker Compose {engine['compose']}, but 2.17 or later is needed",
            f"upgrade it with {bootstrap}, {otherwise}",
        )


def command(run: RunSettings) -> Iterator[Check]:
    if run.command is not None and run.image.use is None:
        yield Check(
            "image",
            False,
            "the run has a command: of its own, but no image that has its program",
            "name one that is on the host, like image: {use: my/image:1.4}, or set runtime: process",
        )


def _lost(host: HostSettings, run: RunSettings, there: bool | None) -> Iterator[Check]:
    if run.image.use is not None and there is False:
        yield Check(
            "image",
            False,
            f"there is no image {run.image.use} on {host.name}",
            "docker pull it there, or correct image: in the run's file",
        )


def _user(facts: Mapping[str, Any], host: HostSettings, run: RunSettings) -> Iterator[Check]:
    """Only root can give the run's directory to another user, who could not write it otherwise."""
    wanted = int(compose.user(run, facts).split(":")[0])
    if facts["uid"] not in (0, wanted) and not facts["engine"].get("rootless"):
        yield Check(
            "user",
            False,
            f"the run has user: {run.user}, but on {host.name} {facts['user']} (uid {facts['uid']}) cannot "
            "give files to another user",
            "remove user: from the run's file, or deploy as root",
        )


def _taken(facts: Mapping[str, Any], host: HostSettings, run: RunSettings) -> Iterator[Check]:
    """An engine has one project of a name, whoever began it; our locks know only our own state directory."""
    project = compose.project(run.name)
    for one in facts.get("containers") or ():
        if one["project"] == project and not one["here"]:
            yield Check(
                "in use",
                False,
                f"container {one['name']} of the project {project} runs on {host.name}, but was started from "
                f"{one['directory'] or 'elsewhere'} and would be ended without a checkpoint",
                f"stop it there with docker compose -p {project} stop, or take another --name",
            )


def _toolkit(facts: Mapping[str, Any], host: HostSettings, found: Devices) -> Iterator[Check]:
    if found.ids and not (facts.get("gpus") or {}).get("toolkit"):
        yield Check(
            "toolkit",
            False,
            f"{host.name} has GPUs, but no NVIDIA container toolkit, so no container could see them",
            f"install nvidia-container-toolkit there (fab bootstrap --host {host.name} says how), "
            "or set gpus: 0",
        )


def _storage(
    engine: Mapping[str, Any], host: HostSettings, image: Image | None, facts: Mapping[str, Any]
) -> Iterator[Check]:
    if not isinstance(image, images.Image):
        return
    tags = {tag for known in facts.get("images") or () for tag in known.get("tags") or ()}
    if image.reference in tags:
        return
    packages = PACKAGES_BYTES["gpu" if image.arguments.get("VARIANT") == "gpu" else "cpu"]
    need = CODE_BYTES if image.packages in tags else packages
    free = engine.get("storage_free_bytes")
    if free is not None and free < need:
        yield Check(
            "image",
            False,
            f"the Docker engine of {host.name} has {size(free)} free in {engine.get('root') or 'its store'}, "
            f"but the image needs about {size(need)}",
            "free some with docker image prune there, or with fab prune",
        )


def _memory(
    facts: Mapping[str, Any], host: HostSettings, run: RunSettings, found: Devices
) -> Iterator[Check]:
    """64 MB, the engine's default, ends in a bus error; and shared memory counts as the container's."""
    need, has = compose.shm_bytes(found.count), compose.container_shm(run, found.count)
    if has < need:
        yield Check(
            "shm",
            False,
            f"shm_size is {run.shm_size}, but PyTorch's loaders and NCCL may need {need >> 20} MiB in the "
            "container's /dev/shm, and would end in a bus error",
            "remove shm_size, or enlarge it",
            # Of our own trainer it is known; of a command of one's own only guessed.
            run.command is not None,
        )
    limit = sizes.parse(run.memory) if run.memory else None
    if limit is not None and limit <= has:
        yield Check(
            "memory",
            False,
            f"memory is {run.memory}, but the container's shared memory alone may take {has >> 20} MiB of it",
            "enlarge memory: in the run's file, or remove it",
        )
    total = (facts.get("memory") or {}).get("total")
    if limit is not None and total is not None and limit > total:
        yield Check(
            "memory",
            False,
            f"memory is {run.memory}, but {host.name} has {size(total)}, so the limit would never hold",
            "correct memory: in the run's file, or remove it",
            True,
        )


def _upgrades(facts: Mapping[str, Any], host: HostSettings) -> Iterator[Check]:
    if facts["engine"].get("live_restore") is False and facts.get("unattended_upgrades"):
        yield Check(
            "upgrades",
            False,
            f"{host.name} upgrades packages by itself, and its Docker engine ends all containers when it is "
            "restarted: an upgrade at night would end the run (the unit at boot starts the next one)",
            'set "live-restore": true in /etc/docker/daemon.json there, or keep the engine from upgrades',
            True,
        )


def places(mounts: list[compose.Mount]) -> Iterator[Check]:
    """Directories of the host that would hide what the container needs."""
    for mount in mounts:
        if mount.target.rstrip("/") in {place.rstrip("/") for place in OCCUPIED} and mount.source != "./app":
            yield Check(
                "mounts",
                False,
                f"{mount.source} would be mounted over the container's own {mount.target}",
                "choose a directory of its own for weights: or data: in the run's file",
            )
