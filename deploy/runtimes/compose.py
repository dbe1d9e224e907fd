"""The compose runtime: one service, described as a value and rendered by templates/compose.yaml.j2.

The top-level compose.yaml is this template rendered for the demo (`python -m deploy.runtimes.compose`,
`make compose`), so what `docker compose up` starts and what a deploy starts cannot drift apart.

In the container every path is the host's own, so that a command line, a heartbeat or a link means the same on
both sides. There are two exceptions, for a file that names a run would be another release for each run: the
run's directory and its secrets. `names/<name>/run` and `names/<name>/secrets` point to the current ones.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from deploy import devices, render, runtimes, sizes
from deploy.image import Image, describe

if TYPE_CHECKING:
    from pathlib import Path

    from deploy.release import Layout
    from deploy.settings import HostSettings, RunSettings
    from trainer import status

STATE = "/var/lib/drafthouse"  # the state root inside an image
APP = "/opt/drafthouse"  # the code and the recipes inside an image
RUN_DIR = "/run/drafthouse"  # the run's directory inside a container
SECRETS = "/run/drafthouse-secrets"  # the run's secrets file inside a container
LAUNCH_GRACE_SECONDS = 60  # what launch gives its trainer between TERM and KILL, see trainer.status.Run
ENGINE_MARGIN_SECONDS = 10  # the engine kills so much later than launch, which then still tells how it ended
DOCKERD_SHUTDOWN_SECONDS = 15  # dockerd's own default: its containers get no more when the host goes down
IMAGE_USER = 10001  # the image's user and group
SERVICE = "trainer"
OWN_VARIABLES = {
    "PYTHONUNBUFFERED": "1",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # devices are numbered as nvidia-smi and NVML number them
    "LANG": "C.UTF-8",
    # A user that the image does not know has neither name nor home, and torch.compile asks for both.
    "HOME": "/tmp",
    "USER": "drafthouse",
    "LOGNAME": "drafthouse",
}
# Of the caller's environment, what the client needs in order to find the engine and its plugins.
CLIENT_VARIABLES = ("DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT", "DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY")


@dataclass(frozen=True)
class Mount:
    """One mount. `source` is a named volume, or a directory of the host if it is a path.

    A path that begins with ``./`` counts from the Compose file. What is missing on the host is an error and
    never created: the trainer would start on an empty directory.
    """

    source: str
    target: str
    read_only: bool = False

    @property
    def is_volume(self) -> bool:
        return not self.source.startswith(("/", "./"))


@dataclass(frozen=True)
class Service:
    """All that the template needs to know of a run in a container."""

    name: str  # the experiment
    command: Sequence[str]  # what tini starts
    image: str
    title: str  # the file's first line, for people
    build: bool = False  # the image is built from the directory of the file
    foreign: bool = False  # the image is not ours: it has neither tini nor an entrypoint that we know
    environment: Mapping[str, str] = field(default_factory=dict)
    mounts: Sequence[Mount] = ()
    directory: str | None = None  # where the command is started; None: the image's own
    user: str | None = None  # uid:gid; None: the image's own
    memory_bytes: int | None = None  # limit; None: none
    shm_bytes: int = 1 << 30
    grace_seconds: int = LAUNCH_GRACE_SECONDS
    gpus: Sequence[str] = ()  # device ids; empty: none
    devices: Sequence[str] = ()  # device files, named one by one
    healthcheck: Sequence[str] = ()

    @property
    def project(self) -> str:
        return project(self.name)

    @property
    def stop_seconds(self) -> int:
        """When the engine kills: later than launch does, which then still tells how the run ended."""
        return self.grace_seconds + ENGINE_MARGIN_SECONDS


@dataclass(frozen=True)
class Used:
    """An image of one's own, used as it is (`image: {use: ...}`). Its counterpart is `deploy.image.Image`."""

    reference: str
    digest: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    arguments: Mapping[str, str] = field(default_factory=dict)


def project(name: str) -> str:
    """The Compose project of an experiment: one for one, though Compose permits no dots."""
    if "." not in name:
        return f"drafthouse-{name}"
    return f"drafthouse-{name.replace('.', '_')}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def shm_bytes(devices: int = 0) -> int:
    """Size of the container's own /dev/shm: 1 GiB for PyTorch's loaders, 512 MiB a device for NCCL.

    The engine's default of 64 MiB is too small even for the loaders. Weights are mounted from the host's.
    """
    return (1 << 30) + devices * (512 << 20)


def compose_file(service: Service) -> str:
    """The text of the Compose file for `service`."""
    values = asdict(service)
    values["mounts"] = service.mounts
    values["volumes"] = sorted({mount.source for mount in service.mounts if mount.is_volume})
    return render.render(
        "compose.yaml.j2", project=service.project, stop_seconds=service.stop_seconds, **values
    )


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
        shm_bytes=shm_bytes(),
        healthcheck=["python", "-m", "trainer.healthcheck", "--state", STATE, "--name", name],
    )


# -- a deploy ----------------------------------------------------------------------------------------------


def image(
    root: Path, host: HostSettings, settings: RunSettings, facts: Mapping[str, Any]
) -> Image | Used | None:
    """The image that a run needs, from the checkout `root`; None unless the run lives in a container."""
    runtime, _ = runtimes.choose(host, facts, settings.name)
    if runtime not in runtimes.CONTAINED:
        return None
    if settings.image.use is not None:
        return Used(settings.image.use)
    variant = settings.image.variant
    if variant == "auto":
        found = devices.choose(settings.gpus, facts, settings.name, host.name, runtime)
        variant = "gpu" if found.count else "cpu"
    return describe(root, settings.image, variant)


def python(settings: RunSettings) -> str:
    """The interpreter inside the container: our image's, or the one that most images have."""
    return "python3" if settings.image.use else "python"


def user(settings: RunSettings, facts: Mapping[str, Any]) -> str:
    """uid:gid inside the container: the image's own user where root deploys, else the deployer's."""
    if settings.user is not None:
        return "0:0" if settings.user == "root" else settings.user
    uid = facts["uid"]
    if facts["engine"].get(
        "rootless"
    ):  # there root inside is the deployer outside, and any other uid is nobody
        return "0:0"
    return f"{IMAGE_USER}:{IMAGE_USER}" if uid == 0 else f"{uid}:{facts.get('gid', uid)}"


def deployed(
    settings: RunSettings,
    layout: Layout,
    *,
    image: str,
    user: str,
    weights: str | None,
    data: str | None,
    gpus: Sequence[str] = (),
    device_files: Sequence[str] = (),
) -> Service:
    """The service of a release. `weights` and `data` are paths on the host, or `toy`."""
    foreign = settings.image.use is not None
    own = dict(OWN_VARIABLES)
    if settings.secrets:
        own["DRAFTHOUSE_SECRETS_FILE"] = SECRETS
    if foreign:
        own |= {"PYTHONPATH": APP, "PYTHONDONTWRITEBYTECODE": "1"}
    interpreter = python(settings)
    check = [interpreter, "-m", "trainer.healthcheck", "--run-dir", RUN_DIR]
    return Service(
        name=settings.name,
        title=f"{settings.name}, as deployed: docker compose logs -f follows its log. See docs/docker.md.",
        image=image,
        foreign=foreign,
        command=[interpreter, "-u", "-m", "trainer.launch", "--run-dir", RUN_DIR],
        environment=own,
        mounts=mounts(settings, layout, weights, data),
        directory=RUN_DIR,
        user=user,
        memory_bytes=sizes.parse(settings.memory) if settings.memory else None,
        shm_bytes=container_shm(settings, len(gpus)),
        grace_seconds=math.ceil(settings.grace_seconds),
        gpus=gpus,
        devices=device_files if gpus else (),
        healthcheck=[] if foreign else check,
    )


def mounts(settings: RunSettings, layout: Layout, weights: str | None, data: str | None) -> list[Mount]:
    """What a container sees of the host: nothing of other runs, and nothing to write but its own."""
    found = [Mount(f"{layout.home}/run", RUN_DIR)]
    if settings.secrets:
        found.append(Mount(f"{layout.home}/secrets", SECRETS, read_only=True))
    found += [Mount(path, path) for path in (layout.checkpoints, layout.cache)]
    found += [Mount(path, path, read_only=True) for path in (weights, data) if path and path.startswith("/")]
    if settings.image.use is not None:
        found.append(Mount("./app", APP, read_only=True))
    return found


def container_shm(settings: RunSettings, devices: int) -> int:
    """Bytes of the container's own /dev/shm: as the run's file says, else what is needed."""
    return (sizes.parse(settings.shm_size) if settings.shm_size else None) or shm_bytes(devices)


def outside(text: str, run_path: str) -> str:
    """A path that a container has for its run's directory, as the host has it."""
    inside = text == RUN_DIR or text.startswith(f"{RUN_DIR}/")
    return run_path + text[len(RUN_DIR) :] if inside else text


def start_spec(
    run: status.Run, facts: Mapping[str, Any], layout: Layout, release_path: str, run_path: str
) -> dict[str, Any]:
    """What the switch starts for `run`; see `deploy.switch_job`.

    The command returns when the container runs. `container` says by which labels it is found, `user` whom the
    run's directory is to belong to (None: whoever starts it), `devices` what has to be free.

    Compose reads `current`, which the switch has pointed to the release by then, and so finds the container
    unchanged if somebody types `docker compose up` there: a path is a part of what it compares.
    """
    current = f"{layout.home}/current"
    return {
        "argv": [
            *_compose(facts, current),
            *("up", "--detach", "--no-build", "--pull", "never", "--force-recreate"),
        ],
        "environment": client_environment(facts),
        "working_directory": current,
        "container": {"project": project(layout.name), "service": SERVICE, "image": run.image},
        "user": owner(run.user, facts),
        "devices": list(run.devices or []),
    }


@dataclass(frozen=True)
class Trial:
    """A container that starts and ends before anything else is touched."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    input: bytes = field(repr=False)


# Looks whether the container's user can write where the run will, then becomes the trainer's --check-config.
TRIAL = """\
import json, os, shutil, sys
asked = json.loads(sys.argv[1])
for mode, paths in ((os.W_OK | os.X_OK, asked["written"]), (os.R_OK, asked["read"])):
    for path in paths:
        if not os.access(path, mode):
            verb = "written" if mode & os.W_OK else "read"
            who = "the container's user (%d:%d)" % (os.getuid(), os.getgid())
            sys.exit("error: %s cannot be %s by %s; give it to that user, or set user:" % (path, verb, who))
environment = {**os.environ, **asked["environment"]}
command = asked["command"]
if asked["directory"] and not os.path.isdir(asked["directory"]):
    sys.exit("error: the working directory %s does not exist in the container" % asked["directory"])
if shutil.which(command[0], path=environment.get("PATH")) is None:
    sys.exit("error: there is no program %s in the image" % command[0])
if asked["check"]:
    sys.stdout.flush()
    os.execvpe(command[0], command + ["--check-config"], environment)
"""


def trial(
    run: status.Run, facts: Mapping[str, Any], layout: Layout, release_path: str, run_path: str
) -> Trial:
    """One container of this release, before the run in progress is touched: the same image, user, mounts and
    devices, with the directory of the new run in its place.

    It finds an engine that cannot start containers or has no GPUs to give, places that the container's user
    cannot write, a program that is not in the image, and settings that the trainer refuses. It exits with 0
    if all is well; otherwise the last line on stderr says why.
    """
    ours = run.command[1:4] == ["-u", "-m", "trainer"]
    mounts = [_bind(run_path, RUN_DIR)]
    if run.secrets_file:
        mounts.append(_bind(run.secrets_file, SECRETS, read_only=True))
    asked = {
        "written": [RUN_DIR, layout.checkpoints, layout.cache],
        "read": [SECRETS] if run.secrets_file else [],
        "environment": run.environment,
        "command": run.command,
        "directory": run.working_directory,
        "check": ours,
    }
    interpreter = run.command[0] if ours else "python3"
    service = {"volumes": mounts, "command": [interpreter, "-c", TRIAL, json.dumps(asked)]}
    return Trial(
        [*_compose(facts, release_path), "--file", "-", "run", "--rm", "--no-deps", "-T", SERVICE],
        client_environment(facts),
        render.compose({"services": {SERVICE: service}}).encode(),
    )


def client_environment(facts: Mapping[str, Any]) -> dict[str, str]:
    """The whole environment of the Docker client on the host; it starts from nothing."""
    given = facts["engine"].get("variables") or {}
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": facts.get("home") or "/",
        "LANG": "C.UTF-8",
        **{key: given[key] for key in CLIENT_VARIABLES if given.get(key)},
    }


def _compose(facts: Mapping[str, Any], release_path: str) -> list[str]:
    client = (facts.get("programs") or {}).get("docker") or facts["engine"].get("client") or "docker"
    # The project's directory by name: a second file that comes over stdin must not decide it.
    where = ["--project-directory", release_path, "--file", f"{release_path}/compose.yaml"]
    return [client, "compose", *where]


def owner(user: str | None, facts: Mapping[str, Any]) -> list[int] | None:
    """Whom the run's directories are given to; only root can give any away."""
    return [int(part) for part in user.split(":")] if user is not None and facts["uid"] == 0 else None


def _bind(source: str, target: str, *, read_only: bool = False) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "bind", "source": source, "target": target}
    if read_only:
        made["read_only"] = True
    return {**made, "bind": {"create_host_path": False}}


if __name__ == "__main__":
    sys.stdout.write(compose_file(demo()))
