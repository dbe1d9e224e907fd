"""`fab bootstrap`: what a Debian or Ubuntu host lacks, and the commands that install it.

`look` asks a host with nothing but `sh`, since python3 itself may be missing. `decide` is pure. Nothing that
is there is upgraded, reconfigured or restarted: where that would be needed, it is said.

Where Engine and Compose v2 come from (packages looked up in each distribution's archive):

    Ubuntu 22.04, 24.04 and later   docker.io docker-compose-v2 docker-buildx, Ubuntu's own (universe)
    Debian 13 and later             docker.io docker-cli docker-compose docker-buildx, Debian's own
    Debian 11, 12                   docker-compose there is Compose v1: Docker's own apt repository

Packages of the two families overwrite each other's files (docker-compose-v2 and docker-compose-plugin hold
the same program), so a host that has one family gets what it lacks from that one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deploy import installing
from deploy.host import Host
from deploy.installing import Report, Step

ENGINE = (20, 10)
COMPOSE = (2, 17)
PYTHON = (3, 9)
LOOK_TIMEOUT = 30.0  # seconds
PROGRAMS = ("python3", "docker", "tini", "rsync", "apt-get", "systemctl", "nvidia-smi", "nvidia-ctk")
TOOLKIT_PAGE = "https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/install-guide.html"
CONFIGURE_TOOLKIT = (
    "nvidia-ctk runtime configure --runtime=docker && systemctl restart docker "
    "(a restart of the engine ends containers unless live-restore is on)"
)

# One line for each answer: key, tab, value. Whatever is missing gives no line, or an empty value.
LOOK = r"""
PATH="$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"; export PATH
say() { printf '%s\t%s\n' "$1" "$2"; }
brief() { if command -v timeout >/dev/null 2>&1; then timeout 8 "$@"; else "$@"; fi; }
say uid "$(id -u)"; say user "$(id -un)"; say machine "$(uname -m)"
if [ -r /etc/os-release ]; then
  ( . /etc/os-release
    say id "$ID"; say version "$VERSION_ID"; say codename "$VERSION_CODENAME"; say pretty "$PRETTY_NAME" )
fi
for program in python3 docker tini rsync apt-get systemctl nvidia-smi nvidia-ctk pct; do
  say "program.$program" "$(command -v "$program" 2>/dev/null)"
done
say python "$(brief python3 -c 'import sys; print(".".join(map(str, sys.version_info[:3])))' 2>/dev/null)"
say architecture "$(dpkg --print-architecture 2>/dev/null)"
for package in docker.io docker-ce docker-cli docker-ce-cli ca-certificates; do
  case "$(dpkg-query -W -f '${Status}' "$package" 2>/dev/null)" in
    *' installed') say "package.$package" yes;;
  esac
done
all="docker-ce docker-ce-cli docker.io docker-cli"
say unfinished "$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' $all 2>/dev/null |
  while read -r state package; do case "$state" in (unpacked|half-*) printf '%s ' "$package";; esac; done)"
say docker_source "$(grep -lsE '^[^#]*download\.docker\.com' \
  /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources | head -n 1)"
if command -v docker >/dev/null 2>&1; then
  if answer=$(brief docker version --format '{{.Server.Version}}' 2>&1); then say engine "$answer"
  else say engine_error "$(printf %s "$answer" | tail -n 1)"; fi
  say compose "$(brief docker compose version --short 2>/dev/null | head -n 1)"
  say runtimes "$(brief docker info --format '{{range $name, $_ := .Runtimes}}{{$name}} {{end}}' 2>/dev/null)"
fi
[ -d /run/systemd/system ] && say systemd yes
[ "$(id -u)" = 0 ] || { sudo -n true 2>/dev/null && say sudo yes; }
[ -r /proc/driver/nvidia/version ] && say driver "$(head -n 1 /proc/driver/nvidia/version)"
for device in /sys/bus/pci/devices/*; do
  [ -r "$device/vendor" ] && [ "$(cat "$device/vendor")" = 0x10de ] || continue
  case "$(cat "$device/class")" in 0x03*) say gpu "${device##*/}";; esac
done
for file in /etc/cdi/nvidia.yaml /etc/cdi/nvidia.json /var/run/cdi/nvidia.yaml; do
  [ -e "$file" ] && say cdi "$file"
done
exit 0
"""


@dataclass(frozen=True)
class Bootstrap:
    """What will be done on a host, and what people have to do themselves."""

    host: str
    system: str
    there: tuple[str, ...] = ()
    installs: tuple[str, ...] = ()  # what, in words
    steps: tuple[Step, ...] = ()
    advice: tuple[str, ...] = ()  # good to know
    blocked: tuple[str, ...] = ()  # missing, and nothing here can install it

    def to_json(self) -> dict[str, Any]:
        return {
            "host": self.host,
            "system": self.system,
            "there": list(self.there),
            "installs": list(self.installs),
            "steps": [list(step.argv) for step in self.steps],
            "advice": list(self.advice),
            "blocked": list(self.blocked),
        }

    def __str__(self) -> str:
        lines = [f"bootstrap {self.host} ({self.system})"]
        lines += [f"  there    {text}" for text in self.there]
        lines += [f"  install  {text}" for text in self.installs]
        lines += [f"  run      {step}" for step in self.steps]
        lines += [f"  missing  {text}" for text in self.blocked]
        lines += [f"  note     {text}" for text in self.advice]
        if not self.steps and not self.blocked:
            lines.append("  nothing to do")
        return "\n".join(lines)


@dataclass
class _Making:
    there: list[str] = field(default_factory=list)
    packages: list[str] = field(default_factory=list)
    docker_repository: bool = False
    after: list[Step] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    blocked: list[str] = field(default_factory=list)


# -- looking -----------------------------------------------------------------------------------------------


def look(host: Host) -> dict[str, Any]:
    """What `decide` needs to know of a host. Needs nothing there but a POSIX shell."""
    return parse(host.run(["sh", "-c", LOOK], timeout=LOOK_TIMEOUT).text)


def parse(text: str) -> dict[str, Any]:
    """The answers of `LOOK` as {key: value}; `gpu` is a list, and programs and packages are dictionaries."""
    found: dict[str, Any] = {"program": {}, "package": {}, "gpu": []}
    for line in text.splitlines():
        key, _, value = line.partition("\t")
        head, _, rest = key.partition(".")
        if not value:
            continue
        if rest:
            found[head][rest] = value
        elif key == "gpu":
            found["gpu"].append(value)
        else:
            found[key] = value
    return found


def version(text: str | None) -> tuple[int, ...]:
    """``(2, 40, 3)`` of ``v2.40.3+ds1``; empty for nothing."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", text or "")
    return tuple(int(part) for part in match[1].split(".")) if match else ()


# -- deciding ----------------------------------------------------------------------------------------------


def decide(host: str, seen: Mapping[str, Any], *, engine: bool | None = None) -> Bootstrap:
    """What is there, what is installed and how, and what only people can do. Pure.

    Without `engine` (a host of the process or the pct runtime) Docker is not looked at; with None it is, but
    on a Proxmox host without one, which has containers of its own.
    """
    making = _Making()
    if engine is None:
        proxmox = bool(seen["program"].get("pct")) and not seen.get("engine")
        engine = not proxmox
        if proxmox:
            making.there.append("pct (containers of Proxmox; no engine is needed)")
    _python(seen, making)
    for program in ("tini", "rsync"):
        if seen["program"].get(program):
            making.there.append(program)
        else:
            making.packages.append(program)
    if engine:
        _engine(host, seen, making)
    _gpus(seen, making, engine)
    system = seen.get("pretty") or seen.get("id") or "an unknown system"
    if (making.packages or making.after) and not _can_install(host, seen, making):
        return Bootstrap(
            host, system, tuple(making.there), advice=tuple(making.advice), blocked=tuple(making.blocked)
        )
    installs = [", ".join(making.packages)] if making.packages else []
    if making.docker_repository and seen.get("docker_source"):
        making.docker_repository = False
        installs.append(f"from Docker's own apt repository, which {seen['docker_source']} has already")
    elif making.docker_repository:
        installs.append(
            f"from Docker's own apt repository, download.docker.com, which is added: "
            f"{seen.get('pretty') or 'this Debian'} has no package of Compose v2"
        )
    return Bootstrap(
        host,
        system,
        tuple(making.there),
        tuple(installs),
        installing.steps(seen, making.packages, making.docker_repository, making.after),
        tuple(making.advice),
        tuple(making.blocked),
    )


def _python(seen: Mapping[str, Any], making: _Making) -> None:
    found = version(seen.get("python"))
    if not found:
        making.packages.append("python3")
    elif found < PYTHON:
        making.blocked.append(
            f"python3 is {seen['python']}, and {PYTHON[0]}.{PYTHON[1]} is needed; "
            "install a newer one and name it with python: in fabric.yaml"
        )
    else:
        making.there.append(f"python3 {seen['python']}")


def _engine(host: str, seen: Mapping[str, Any], making: _Making) -> None:
    answers, client = version(seen.get("engine")), seen["program"].get("docker")
    family = (
        "docker-ce"
        if "docker-ce" in seen["package"]
        else "docker.io"
        if "docker.io" in seen["package"]
        else ""
    )
    # What an installation that broke off has left is gone on with.
    parts = (seen.get("unfinished") or "").split()
    if not family:
        parts += [name for name in ("docker-ce-cli", "docker-cli") if name in seen["package"]]
    if not answers and (parts or (not client and not family)):
        _install_engine(seen, making, any(name.startswith("docker-ce") for name in parts))
        return
    if not answers:
        _silent_engine(host, seen, making, family)
    elif answers < ENGINE:
        making.blocked.append(
            f"Docker Engine is {seen['engine']}, and {ENGINE[0]}.{ENGINE[1]} is needed; upgrade it yourself, "
            "since that ends what runs in it"
        )
    else:
        making.there.append(f"Docker Engine {seen['engine']}")
    compose = version(seen.get("compose"))
    if compose >= COMPOSE:
        making.there.append(f"Compose {seen['compose']}")
    elif compose:
        making.blocked.append(
            f"Compose is {seen['compose']}, and {COMPOSE[0]}.{COMPOSE[1]} is needed; "
            "upgrade it from where it came"
        )
    else:
        _install_compose(seen, making, family)


def _silent_engine(host: str, seen: Mapping[str, Any], making: _Making, family: str) -> None:
    """There is a client, or a package, but nothing answers."""
    words = seen.get("engine_error") or "no reason was given"
    if "permission denied" in words:
        making.blocked.append(
            f"{seen.get('user')} may not talk to Docker Engine; as root: usermod -aG docker "
            f"{seen.get('user')}, then log in anew (who may do that is as good as root there)"
        )
    elif family and seen.get("systemd"):
        making.after.append(Step(("systemctl", "enable", "--now", "docker")))
    elif family:
        making.blocked.append(
            f"Docker Engine does not answer ({words}); start it, as this machine has no systemd"
        )
    else:
        making.blocked.append(
            f"there is a docker client at {seen['program'].get('docker')} of no package, and no engine "
            f"answers ({words}); set DOCKER_HOST for {host}, or remove the client and bootstrap again"
        )


def _install_engine(seen: Mapping[str, Any], making: _Making, dockers: bool = False) -> None:
    """Engine and Compose; `dockers`: Docker's own packages, whatever the distribution has."""
    which = "" if dockers else _family(seen)
    if which == "ubuntu":
        making.packages += ["docker.io", "docker-compose-v2", "docker-buildx"]
    elif which == "debian":
        making.packages += ["docker.io", "docker-cli", "docker-compose", "docker-buildx"]
    else:
        making.packages += [
            "docker-ce",
            "docker-ce-cli",
            "containerd.io",
            "docker-buildx-plugin",
            "docker-compose-plugin",
        ]
        making.docker_repository = True
    if seen.get("systemd"):
        making.after.append(Step(("systemctl", "enable", "--now", "docker")))


def _install_compose(seen: Mapping[str, Any], making: _Making, family: str) -> None:
    which = _family(seen)
    if family == "docker-ce":  # its repository is there already
        making.packages += ["docker-buildx-plugin", "docker-compose-plugin"]
    elif family == "docker.io" and which == "ubuntu":
        making.packages += ["docker-compose-v2", "docker-buildx"]
    elif family == "docker.io" and which == "debian":
        making.packages += ["docker-compose", "docker-buildx"]
    elif family == "docker.io" and which == "old debian":
        making.packages += ["docker-buildx-plugin", "docker-compose-plugin"]
        making.docker_repository = True
    else:
        making.blocked.append(
            "Compose v2 is missing, and Docker Engine came from no package; install the plugin as its origin "
            "says (https://docs.docker.com/compose/install/linux/)"
        )


def _family(seen: Mapping[str, Any]) -> str:
    """Which packages this distribution has: ubuntu, debian, old debian, or nothing that is known here."""
    found = version(seen.get("version"))
    if seen.get("id") == "ubuntu" and found >= (20, 4):
        return "ubuntu"
    if seen.get("id") == "debian":
        return "old debian" if found and found < (13,) else "debian"  # testing and sid have no number
    return ""


def _gpus(seen: Mapping[str, Any], making: _Making, engine: bool) -> None:
    """Drivers and toolkit are NVIDIA's: they are looked at, and never installed from here."""
    driver = seen.get("driver")
    if not driver:
        if seen["gpu"]:
            count = len(seen["gpu"])
            making.advice.append(
                f"{count} NVIDIA GPU{'s' * (count > 1)}, but no driver is loaded; install it "
                + (
                    "(ubuntu-drivers install --gpgpu)"
                    if seen.get("id") == "ubuntu"
                    else "(nvidia-driver, from non-free)"
                )
                + ", restart the machine, and bootstrap again"
            )
        return
    number = re.search(r"\d+\.\d+(?:\.\d+)?", driver)
    making.there.append(f"NVIDIA driver {number[0] if number else '(unknown version)'}")
    if not engine:
        return
    if not seen["program"].get("nvidia-ctk"):
        making.advice.append(
            "no NVIDIA Container Toolkit, so no container gets a GPU; install nvidia-container-toolkit as "
            f"{TOOLKIT_PAGE} says, then {CONFIGURE_TOOLKIT}"
        )
    elif "nvidia" not in (seen.get("runtimes") or "").split() and not seen.get("cdi"):
        making.advice.append(
            f"the NVIDIA Container Toolkit is there, but the engine does not know it; run {CONFIGURE_TOOLKIT}"
        )
    else:
        making.there.append("NVIDIA Container Toolkit")


def _can_install(host: str, seen: Mapping[str, Any], making: _Making) -> bool:
    """Whether what is missing can be installed from here; if not, `blocked` says why."""
    missing = ", ".join(making.packages) or "a running Docker Engine"
    if not seen["program"].get("apt-get") or not _family(seen):
        making.blocked.append(
            f"{missing}; fab bootstrap knows Debian (11 and later) and Ubuntu (20.04 and later) only: "
            f"install Docker Engine {ENGINE[0]}.{ENGINE[1]} or later, Compose {COMPOSE[0]}.{COMPOSE[1]} or "
            "later, tini, rsync and python3 with this system's own package manager"
        )
        return False
    if seen.get("uid") != "0" and not seen.get("sudo"):
        making.blocked.append(
            f"{missing}; {seen.get('user')} is not root on {host} and sudo asks for a password: bootstrap as "
            "root (address: root@… in fabric.yaml), or let an administrator run apt-get install "
            f"{' '.join(making.packages)}"
        )
        return False
    return True


# -- acting ------------------------------------------------------------------------------------------------


def carry_out(made: Bootstrap, host: Host, report: Report, **patience: float) -> None:
    """Run the steps, in order: see `installing.carry_out`."""
    installing.carry_out(made.steps, host, report, **patience)


def missing(seen: Mapping[str, Any], *, engine: bool | None = None) -> Sequence[str]:
    """What is still missing after the steps: packages and findings that nothing here could mend."""
    left = decide("", seen, engine=engine)
    return (*left.installs, *left.blocked)
