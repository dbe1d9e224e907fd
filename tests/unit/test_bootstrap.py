"""What `fab bootstrap` decides, for each distribution and each state of a host."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from deploy import bootstrap

BARE = {"program": {"apt-get": "/usr/bin/apt-get"}, "package": {}, "gpu": [], "uid": "0", "user": "root",
        "architecture": "amd64", "systemd": "yes"}  # fmt: skip
SYSTEMS = {
    "debian 11": {"id": "debian", "version": "11", "codename": "bullseye", "pretty": "Debian GNU/Linux 11"},
    "debian 12": {"id": "debian", "version": "12", "codename": "bookworm", "pretty": "Debian GNU/Linux 12"},
    "debian 13": {"id": "debian", "version": "13", "codename": "trixie", "pretty": "Debian GNU/Linux 13"},
    "ubuntu 22.04": {"id": "ubuntu", "version": "22.04", "codename": "jammy", "pretty": "Ubuntu 22.04.5 LTS"},
    "ubuntu 24.04": {"id": "ubuntu", "version": "24.04", "codename": "noble", "pretty": "Ubuntu 24.04.2 LTS"},
}
DOCKERS = ["docker-ce", "docker-ce-cli", "containerd.io", "docker-buildx-plugin", "docker-compose-plugin"]
DEBIANS = ["docker.io", "docker-cli", "docker-compose", "docker-buildx"]
UBUNTUS = ["docker.io", "docker-compose-v2", "docker-buildx"]
INSTALL = (
    "apt-get -o Dpkg::Options::=--force-confold install -y --no-install-recommends --no-upgrade --no-remove"
)
ALL = {
    "program": {"apt-get": "/a", "docker": "/usr/bin/docker", "tini": "/t", "rsync": "/r", "python3": "/p"},
    "package": {"docker.io": "yes"},
    "python": "3.11.2",
    "engine": "27.1.0",
    "compose": "v2.29.0",
}


def seen(system: str, **more: Any) -> dict[str, Any]:
    return {**BARE, **SYSTEMS[system], **more}


def words(made: bootstrap.Bootstrap) -> list[str]:
    return [str(step) for step in made.steps]


@pytest.mark.parametrize(
    ("system", "packages"),
    [
        ("debian 11", DOCKERS),
        ("debian 12", DOCKERS),
        ("debian 13", DEBIANS),
        ("ubuntu 22.04", UBUNTUS),
        ("ubuntu 24.04", UBUNTUS),
    ],
)
def test_a_bare_host_gets_all_that_a_deploy_needs(system: str, packages: list[str]) -> None:
    made = bootstrap.decide("gpu-box", seen(system))
    assert f"{INSTALL} python3 tini rsync {' '.join(packages)}" in words(made)
    assert words(made)[0] == "apt-get update"
    assert words(made)[-1] == "systemctl enable --now docker"
    assert made.blocked == ()
    third_party = any("download.docker.com" in word for word in words(made))
    assert third_party == (packages is DOCKERS)


@pytest.mark.parametrize("system", ["debian 11", "debian 12"])
def test_dockers_own_repository_is_named_before_it_is_added(system: str) -> None:
    made = bootstrap.decide("gpu-box", seen(system))
    assert (
        "install  from Docker's own apt repository, download.docker.com, which is added: "
        f"{SYSTEMS[system]['pretty']} has no package of Compose v2"
    ) in str(made)
    key, sources = "/etc/apt/keyrings/docker.asc", "/etc/apt/docker.sources"
    assert words(made)[1:-2] == [
        f"{INSTALL} ca-certificates",
        "install -m 0755 -d /etc/apt/keyrings",
        f"/usr/lib/apt/apt-helper download-file https://download.docker.com/linux/debian/gpg {key}.new",
        f"cat {key}.new (must be 9DC8 5822 9FC7 DD38 854A E2D8 8D81 803C 0EBF CD88)",
        f"chmod 0644 {key}.new",
        f"mv {key}.new {key}",
        f"tee {sources}",
        f"chmod 0644 {sources}",
        f"apt-get -o Dir::Etc::sourcelist={sources} -o Dir::Etc::sourceparts=- "
        "-o APT::Get::List-Cleanup=0 -o APT::Update::Error-Mode=any update",
        f"mv {sources} /etc/apt/sources.list.d/docker.sources",
    ]
    assert made.steps[7].input.decode() == (
        "Types: deb\nURIs: https://download.docker.com/linux/debian\n"
        f"Suites: {SYSTEMS[system]['codename']}\nComponents: stable\nArchitectures: amd64\n"
        "Signed-By: /etc/apt/keyrings/docker.asc\n"
    )


def test_no_command_asks_or_restarts_or_removes_or_upgrades_what_is_there() -> None:
    for step in bootstrap.decide("gpu-box", seen("debian 12", uid="1000", sudo="yes")).steps:
        if "apt-get" in step.argv:
            start = "sudo -n env LC_ALL=C DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1 apt-get "
            assert " ".join(step.argv).startswith(start)
        if "install" in step.argv and "apt-get" in step.argv:
            assert {"--no-remove", "--no-upgrade", "Dpkg::Options::=--force-confold"} < set(step.argv)


@pytest.mark.parametrize(
    ("left", "packages"),
    [
        ({"unfinished": "docker-ce docker-ce-cli "}, DOCKERS),
        ({"package": {"docker-ce-cli": "yes"}}, DOCKERS),
        ({"package": {"docker-cli": "yes"}}, DEBIANS),
    ],
)
def test_an_installation_that_broke_off_is_gone_on_with(left: dict[str, Any], packages: list[str]) -> None:
    state = {**ALL, "package": {}, "engine": None, "engine_error": "Cannot connect", **left}
    made = bootstrap.decide("gpu-box", seen("debian 13", **state))
    assert f"{INSTALL} {' '.join(packages)}" in words(made)
    assert made.blocked == ()


@pytest.mark.parametrize("system", SYSTEMS)
def test_nothing_is_done_where_all_is_there(system: str) -> None:
    made = bootstrap.decide("gpu-box", seen(system, **ALL))
    assert (made.steps, made.blocked, made.installs) == ((), (), ())
    assert str(made).splitlines()[1:] == [
        "  there    python3 3.11.2",
        "  there    tini",
        "  there    rsync",
        "  there    Docker Engine 27.1.0",
        "  there    Compose v2.29.0",
        "  nothing to do",
    ]


@pytest.mark.parametrize(
    ("system", "package", "wanted"),
    [
        ("debian 12", "docker.io", ["docker-buildx-plugin", "docker-compose-plugin"]),
        ("debian 12", "docker-ce", ["docker-buildx-plugin", "docker-compose-plugin"]),
        ("debian 13", "docker.io", ["docker-compose", "docker-buildx"]),
        ("ubuntu 24.04", "docker.io", ["docker-compose-v2", "docker-buildx"]),
        ("ubuntu 24.04", "docker-ce", ["docker-buildx-plugin", "docker-compose-plugin"]),
    ],
)
def test_compose_comes_from_where_the_engine_came_from_and_the_engine_stays(
    system: str, package: str, wanted: list[str]
) -> None:
    made = bootstrap.decide("gpu-box", seen(system, **{**ALL, "package": {package: "yes"}, "compose": None}))
    assert words(made)[-1] == f"{INSTALL} {' '.join(wanted)}"
    repository = any("docker.sources" in word for word in words(made))
    assert repository == (system == "debian 12" and package == "docker.io")


def test_an_engine_that_is_stopped_is_started_and_nothing_is_installed() -> None:
    down = {**ALL, "engine": None, "engine_error": "Cannot connect to the Docker daemon"}
    assert words(bootstrap.decide("gpu-box", seen("debian 13", **down))) == ["systemctl enable --now docker"]
    made = bootstrap.decide("gpu-box", seen("debian 13", **{**down, "systemd": None}))
    assert made.steps == ()
    assert "start it, as this machine has no systemd" in made.blocked[0]


def test_what_nothing_here_can_mend_is_a_sentence_with_its_remedy() -> None:
    denied = {
        **ALL,
        "engine": None,
        "engine_error": "permission denied while trying to connect",
        "user": "ada",
    }
    (sentence,) = bootstrap.decide("gpu-box", seen("debian 13", **denied)).blocked
    assert "as root: usermod -aG docker ada" in sentence
    (sentence,) = bootstrap.decide("gpu-box", seen("debian 13", **{**ALL, "engine": "19.3.8"})).blocked
    assert "Docker Engine is 19.3.8, and 20.10 is needed" in sentence
    (sentence,) = bootstrap.decide("gpu-box", seen("debian 13", **{**ALL, "compose": "v2.3.3"})).blocked
    assert "Compose is v2.3.3, and 2.17 is needed" in sentence
    (sentence,) = bootstrap.decide("gpu-box", seen("debian 11", **{**ALL, "python": "3.8.10"})).blocked
    assert "python: in fabric.yaml" in sentence
    binary = {**ALL, "package": {}, "compose": None}
    (sentence,) = bootstrap.decide("gpu-box", seen("debian 12", **binary)).blocked
    assert "https://docs.docker.com/compose/install/linux/" in sentence


def test_another_system_and_a_user_who_is_not_root_are_told_what_to_do() -> None:
    made = bootstrap.decide("gpu-box", {**BARE, "id": "fedora", "version": "41", "pretty": "Fedora 41"})
    assert made.steps == ()
    assert "with this system's own package manager" in made.blocked[-1]
    made = bootstrap.decide("gpu-box", seen("debian 13", uid="1000", user="ada"))
    assert made.steps == ()
    assert "ada is not root on gpu-box and sudo asks for a password" in made.blocked[-1]
    made = bootstrap.decide("gpu-box", seen("debian 13", uid="1000", user="ada", sudo="yes"))
    assert all(step.argv[:2] == ("sudo", "-n") for step in made.steps)


def test_nvidia_is_looked_at_and_never_installed() -> None:
    def advice(**more: Any) -> tuple[str, ...]:
        return bootstrap.decide("gpu-box", seen("ubuntu 24.04", **{**ALL, **more})).advice

    driver = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024"
    program = {**ALL["program"], "nvidia-ctk": "/usr/bin/nvidia-ctk"}  # type: ignore[dict-item]
    assert "2 NVIDIA GPUs, but no driver is loaded" in advice(gpu=["0000:01:00.0", "0000:02:00.0"])[0]
    assert "no NVIDIA Container Toolkit" in advice(driver=driver)[0]
    assert "the engine does not know it" in advice(driver=driver, program=program, runtimes="runc")[0]
    assert advice(driver=driver, program=program, runtimes="nvidia runc") == ()
    made = bootstrap.decide(
        "gpu-box", seen("ubuntu 24.04", **{**ALL, "driver": driver, "program": program, "cdi": "/x"})
    )
    assert made.there[-2:] == ("NVIDIA driver 550.54.15", "NVIDIA Container Toolkit")


def test_a_host_of_the_process_runtime_gets_no_engine() -> None:
    made = bootstrap.decide("box", seen("debian 12"), engine=False)
    assert made.installs == ("python3, tini, rsync",)


def test_a_host_is_looked_at_with_nothing_but_a_shell() -> None:
    done = subprocess.run(
        ["sh", "-c", bootstrap.LOOK], capture_output=True, text=True, timeout=60, check=True
    )
    found = bootstrap.parse(done.stdout)
    assert found["uid"].isdigit()
    assert found["program"]["python3"]
    bare = subprocess.run(
        ["/bin/sh", "-c", bootstrap.LOOK],
        env={"PATH": "/nowhere"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert bare.returncode == 0


def test_versions_are_read_as_programs_write_them() -> None:
    assert bootstrap.version("v2.40.3+ds1-0ubuntu1") == (2, 40, 3)
    assert bootstrap.version("20.10.24+dfsg1") == (20, 10, 24)
    assert bootstrap.version(None) == bootstrap.version("none") == ()
