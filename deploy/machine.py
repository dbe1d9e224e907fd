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


def memory() -> dict[str, int | None]:
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return {"total": None, "available": None, "room": None}
    values = {key: int(value) * 1024 for key, value in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    return {"total": values.get("MemTotal"), "available": values.get("MemAvailable"), "room": memory_room()}


def memory_room() -> int | None:
    """What the memory limits of our cgroup and of those above it leave, in bytes; None without one.

    Files that the kernel only keeps at hand count as room: it drops them first.
    """
    found = []
    for place in _memory_groups():
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            try:
                most = int((place / limit).read_text(encoding="ascii"))
                if most < 1 << 60:
                    taken = int((place / used).read_text(encoding="ascii")) - _dropped_first(place)
                    found.append(max(0, most - taken))
            except (OSError, ValueError):  # "max" is no number, and no limit
                continue
    return min(found, default=None)


def _memory_groups() -> list[Path]:
    """Our memory cgroup and those above it. A container sees its own as the root."""
    found = [Path(procfs.GROUPS), Path(procfs.GROUPS, "memory")]
    for place in map(Path, procfs.groups(os.getpid())):
        found += [place, *(above for above in place.parents if above.is_relative_to(procfs.GROUPS))]
    return list(dict.fromkeys(found))


def _dropped_first(group: Path) -> int:
    """Bytes of files on disk that a cgroup holds in the page cache."""
    try:
        text = (group / "memory.stat").read_text(encoding="ascii")
    except OSError:
        return 0
    values = dict(re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE))
    cached = sum(int(values.get(key, 0)) for key in ("total_inactive_file", "total_active_file"))
    return cached or sum(int(values.get(key, 0)) for key in ("inactive_file", "active_file"))


def directory(path: Path) -> dict[str, Any]:
    """Space and rights of a directory, or of what is there of it, where it would be made."""
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    result: dict[str, Any] = {"root": str(path), "exists": path.is_dir()}
    try:
        space = os.statvfs(there)
        result.update(free_bytes=space.f_bavail * space.f_frsize, total_bytes=space.f_blocks * space.f_frsize)
        result["owner_uid"] = there.stat().st_uid
    except OSError:
        result.update(free_bytes=None, total_bytes=None, owner_uid=None)
    result["writable"] = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    return result


def filesystem(path: Path) -> str | None:
    """The type of the file system that holds `path`."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    resolved = os.path.realpath(path)
    best, kind = "", None
    for line in mounts.splitlines():
        point = line.split(" ")[1].replace("\\040", " ")
        below = resolved == point or resolved.startswith(point.rstrip("/") + "/")
        if below and len(point) >= len(best):
            best, kind = point, line.split(" ")[2]
    return kind


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
    if client:
        asking.start()
    found = ask_engine(client)
    facts = found["engine"]
    if client:
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
