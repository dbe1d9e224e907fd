"""What a machine is: programs, space, memory, and whether its container engine answers.

Runs ON the host as a part of the probe. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import errno
import glob
import grp
import os
import pwd
import re
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

from deploy import engine, gpus, nvml, procfs

REPOSITORY = "drafthouse"  # images of other names are not ours to look at
PROGRAMS = ("docker", "tini", "rsync", "skopeo", "apt-get", "systemctl", "systemd-run", "loginctl", "crontab")
PLUGINS = (  # where the client looks for buildx, besides the user's own settings
    "/usr/local/lib/docker/cli-plugins",
    "/usr/local/libexec/docker/cli-plugins",
    "/usr/lib/docker/cli-plugins",
    "/usr/libexec/docker/cli-plugins",
)
# File systems that may hang with a server; of FUSE nobody knows what is behind.
NETWORK = ("nfs", "cifs", "smb", "fuse", "ceph", "lustre", "gpfs", "glusterfs", "beegfs", "9p", "afs")
COMPOSE_TIMEOUT = 5.0  # seconds; a program that starts and ends, which a busy machine may take long to do
PROGRAM_PATHS = ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # SSH logins lack some


def program(name: str) -> str | None:
    """Where a program is, also where an SSH login would not look."""
    return shutil.which(name, path=os.environ.get("PATH", "") + PROGRAM_PATHS)


def user_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's user without an entry in passwd
        return str(os.getuid())


def remote(pid: int) -> tuple[bytes, ...]:
    """How the paths of files on a network disk begin, as a process sees them."""
    found = []
    for line in procfs.read(pid, "mounts").split(b"\n"):
        words = line.split(b" ")
        if len(words) > 2 and words[2].decode("ascii", "replace").startswith(NETWORK):
            found.append(words[1].replace(b"\\040", b" ").rstrip(b"/") + b"/")
    return tuple(found)


def link(path: Path) -> str | None:
    """The last part of what a symlink points to."""
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return None


def tree_bytes(path: Path) -> int:
    """The size of all files below `path`."""
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    return total


# -- the system --------------------------------------------------------------------------------------------


def programs() -> dict[str, str | None]:
    return {name: program(name) for name in PROGRAMS}


def system() -> dict[str, str | None]:
    """Which Linux this is: ``{"id", "version_id", "codename"}``, for the packages that it would need."""
    values: dict[str, str] = {}
    for path in ("/etc/os-release", "/usr/lib/os-release"):
        try:
            lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        values = {key: value.strip("\"'") for key, _, value in (line.partition("=") for line in lines)}
        break
    return {
        "id": values.get("ID"),
        "version_id": values.get("VERSION_ID"),
        "codename": values.get("VERSION_CODENAME"),
    }


def groups() -> list[str]:
    """The names of the groups that this process is in, which may be fewer than its user's."""
    found = []
    for number in sorted({os.getgid(), *os.getgroups()}):
        try:
            found.append(grp.getgrgid(number).gr_name)
        except KeyError:
            found.append(str(number))
    return found


def unattended_upgrades() -> bool:
    """Whether packages, and with them engine and driver, are upgraded at night."""
    value = None
    for path in sorted(glob.glob("/etc/apt/apt.conf.d/*")):
        try:
            text = Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        for found in re.finditer(r'^\s*APT::Periodic::Unattended-Upgrade\s+"([^"]*)"', text, re.MULTILINE):
            value = found[1]  # the last one counts, as for apt
    return value not in (None, "", "0") and program("unattended-upgrade") is not None


# -- the devices -------------------------------------------------------------------------------------------


def nvidia(sample: float) -> dict[str, Any]:
    """The probe's "gpus", without what the library says: devices with who holds them, driver, toolkit."""
    devices = gpus.devices()
    held = gpus.holders(device["path"] for device in devices)
    toolkit = ("nvidia-ctk", "nvidia-container-runtime", "nvidia-container-cli")
    return {
        "devices": [{**device, "holders": held.get(device["path"], [])} for device in devices],
        "nvml": [] if sample > 0 else None,
        "control": gpus.control(),
        "driver": gpus.driver(),
        "library": gpus.library(),
        "toolkit": any(program(name) for name in toolkit),
        "nvidia_smi": program("nvidia-smi"),
    }


def asked_library(sample: float) -> nvml.Asking | None:
    """NVIDIA's library, asked from now on, if this machine has its devices and anybody wants a sample."""
    there = glob.glob(f"{gpus.root()}/dev/nvidia[0-9]*") or os.path.exists(f"{gpus.root()}/dev/dxg")
    return nvml.Asking(sample) if sample > 0 and there else None


# -- the container engine ----------------------------------------------------------------------------------


def engine_facts() -> dict[str, Any]:
    """``{"engine": {...}, "images": [...], "containers": {id: state}}``, see `deploy.probe`.

    The engine itself is asked: an installed client proves nothing.
    """
    client = program("docker")
    compose: list[Any] = [None, None]

    def ask_compose() -> None:  # it takes longer than all that the engine answers
        compose[:] = ask(client or "", "compose", "version", "--short", timeout=COMPOSE_TIMEOUT)

    asking = threading.Thread(target=ask_compose, daemon=True)
    ahead = client is not None and not engine.absent(engine.address())
    if ahead:
        asking.start()
    found = ask_engine(client)
    facts = found["engine"]
    if facts["answers"] and client and not ahead:
        asking.start()
        ahead = True
    if ahead:
        asking.join()
        if facts["answers"]:
            facts["compose"], problem = compose
            facts["error"] = facts["error"] or problem
    return found


def ask_engine(client: str | None) -> dict[str, Any]:
    """The same, but for Compose."""
    one = engine.Engine()
    facts: dict[str, Any] = {
        "client": client,
        "address": one.address,
        "variables": engine.variables(),
        "answers": False,
        "permitted": None,
        "version": None,
        "api": None,
        "compose": None,
        "error": None,
        "started": None,
        "root": None,
        "storage_free_bytes": None,
        "live_restore": None,
        "rootless": None,
        "buildx": plugin("docker-buildx"),
        "runtimes": [],
        "cdi": False,
    }
    found: dict[str, Any] = {"engine": facts, "images": [], "containers": {}}
    try:
        told = one.get("/version")
        if not isinstance(told, dict) or not told.get("Version"):
            raise engine.EngineError(f"what answers at {one.address} is no Docker engine")
    except engine.EngineError as error:
        facts["error"] = str(error)
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in (errno.EACCES, errno.EPERM):
            facts["permitted"] = False
        elif client and not error.hangs:
            # A DOCKER_HOST that is no socket: only the client knows how to ask there.
            facts["version"], other = ask(client, "version", "--format", "{{.Server.Version}}")
            facts["error"] = other
            facts["answers"] = facts["version"] is not None
            facts["permitted"] = facts["answers"] or None
        return found
    facts.update(answers=True, permitted=True, version=str(told["Version"]), api=told.get("ApiVersion"))
    facts["started"] = one.started()
    try:
        facts.update(settings(one.get("/info")))
        found["images"] = images(one)
        for row in one.containers()[:64]:
            kept = one.inspect(str(row.get("Id")))
            found["containers"][kept["id"]] = kept
    except engine.EngineError as error:  # one that went away meanwhile, or hangs in half of what it does
        facts.update(error=str(error), incomplete=True)
    return found


def settings(info: Any) -> dict[str, Any]:
    """What counts of the engine's own description of itself."""
    info = info if isinstance(info, dict) else {}
    place = info.get("DockerRootDir")
    free = None
    try:
        space = os.statvfs(place) if place else None
        free = space.f_bavail * space.f_frsize if space else None
    except OSError:
        pass  # (it may be another user's, or in a virtual machine)
    runtimes = info.get("Runtimes")
    return {
        "root": place,
        "storage_free_bytes": free,
        "live_restore": info.get("LiveRestoreEnabled"),
        "rootless": any("rootless" in str(option) for option in info.get("SecurityOptions") or []),
        "runtimes": sorted(runtimes) if isinstance(runtimes, dict) else [],
        "cdi": cdi(info.get("CDISpecDirs")),
    }


def cdi(places: Any) -> bool:
    """Whether the engine takes devices from CDI files (it names their places), and one is NVIDIA's."""
    for place in places if isinstance(places, list) else []:
        for path in glob.glob(f"{gpus.root()}{place}/*"):
            try:
                if "nvidia.com/gpu" in Path(path).read_text(encoding="utf-8", errors="replace"):
                    return True
            except OSError:
                continue
    return False


def images(one: engine.Engine) -> list[dict[str, Any]]:
    """Our images: ``{"id", "tags", "bytes", "created", "labels"}``."""
    rows = one.get("/images/json", filters={"reference": [REPOSITORY]})
    return [
        {
            "id": row.get("Id"),
            "tags": sorted(row.get("RepoTags") or []),
            "bytes": row.get("Size"),
            "created": row.get("Created"),
            "labels": row.get("Labels") or {},
        }
        for row in (rows if isinstance(rows, list) else [])
        if isinstance(row, dict)
    ]


def plugin(name: str) -> bool:
    """Whether the client has a plugin. Looked for as it does, which is quicker than asking it."""
    own = os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker")
    return any(os.access(os.path.join(place, name), os.X_OK) for place in (f"{own}/cli-plugins", *PLUGINS))


def ask(*argv: str, timeout: float = engine.TIMEOUT) -> tuple[str | None, str | None]:
    """(first line of output, None) or (None, why not)."""
    try:
        result = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return None, f"{argv[0]} {argv[1]} does not answer within {timeout:g} s"
    except OSError as error:
        return None, f"{argv[0]}: {error.strerror}"
    line = result.stdout.decode("utf-8", "replace").strip().partition("\n")[0]
    if result.returncode == 0 and line:
        return line, None
    words = result.stderr.decode("utf-8", "replace").strip().splitlines()
    return None, words[-1] if words else f"{argv[0]} {argv[1]} ended with {result.returncode}"
