"""`fab bootstrap` on Debian machines with next to nothing on them: real sshd, apt-get and dpkg.

Debian's packages come from Debian. Docker's come from a repository that stands in for download.docker.com: see
`testbed.archive`. What bootstrap takes for Docker's key is therefore the test's.
"""

# ruff: noqa: E501  (whole sentences, as people read them)

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deployed import CHECKOUT
from fabbed import call
from testbed import archive
from testbed.bare import BareMachine, BareMachines
from testbed.place import TestbedError

from deploy import bootstrap, installing, openpgp
from deploy.errors import DeployError
from deploy.ssh import Ssh

pytestmark = [pytest.mark.bare, pytest.mark.root, pytest.mark.slow]

SOURCES = "etc/apt/sources.list.d/docker.sources"
KEY = "etc/apt/keyrings/docker.asc"
DOCKERS = {"docker-ce", "docker-ce-cli", "containerd.io", "docker-buildx-plugin", "docker-compose-plugin"}


@pytest.fixture
def docker(bare_machines: BareMachines, monkeypatch: pytest.MonkeyPatch) -> archive.Archive:
    """What stands in for download.docker.com, whole again for each test."""
    made = bare_machines.archive
    made.replaced, made.requests = {}, []
    monkeypatch.setattr(installing, "DOCKER_FINGERPRINT", made.fingerprint)
    monkeypatch.setenv("DRAFTHOUSE_SSH_CONFIG", str(bare_machines.client))
    return made


class Site:
    """A machine, and bootstrap on it."""

    def __init__(self, machine: BareMachine) -> None:
        self.machine = machine
        self.host = Ssh(machine.name)
        self.said: list[str] = []

    def decide(self) -> bootstrap.Bootstrap:
        return bootstrap.decide(self.machine.name, bootstrap.look(self.host))

    def bootstrap(self, **patience: float) -> None:
        bootstrap.carry_out(self.decide(), self.host, self.said.append, **patience)

    def refused(self, **patience: float) -> str:
        """The sentence with which it fails; it is one."""
        with pytest.raises(DeployError) as error:
            self.bootstrap(**patience)
        sentence = str(error.value)
        assert sentence.startswith(f"{self.machine.name}: ")
        assert "\n" not in sentence
        assert "bootstrap again" in sentence or "or install Docker Engine and Compose yourself" in sentence
        assert "steps were done; fab bootstrap goes on with the rest)" in sentence
        return sentence

    def installed(self) -> set[str]:
        """Which of Docker's are whole."""
        found = self.machine.packages()
        return {name for name in found if name in archive.PACKAGES and found[name] == "installed"}

    def is_complete(self) -> bool:
        made = self.decide()
        return (made.steps, made.blocked) == ((), ()) and self.installed() == DOCKERS


@pytest.fixture
def site(bare_machines: BareMachines, docker: archive.Archive) -> Iterator[Callable[..., Site]]:
    """Makes a machine that lacks nothing but Docker."""
    made: list[Site] = []

    def make(disk: str = "200m") -> Site:
        made.append(Site(bare_machines.machine(disk=disk).with_systemd().with_tools()))
        return made[-1]

    yield make
    for one in made:
        one.host.close()


def test_a_bare_machine_gets_all_that_a_deploy_needs_and_then_nothing_more(
    bare_machines: BareMachines, docker: archive.Archive, tmp_path: Path
) -> None:
    site = Site(machine := bare_machines.machine().with_systemd())
    shutil.copy(CHECKOUT / "fabfile.py", tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    new = machine.files()

    looked = call(["bootstrap", "--host", machine.name, "--dry-run"], tmp_path, environment)
    assert looked.returncode == 0, looked.stderr
    assert "  install  python3, tini, rsync, docker-ce, " in looked.stdout
    assert "  run      systemctl enable --now docker" in looked.stdout
    unasked = call(["bootstrap", "--host", machine.name], tmp_path, environment)  # no terminal to agree at
    assert unasked.returncode != 0
    assert "--yes" in unasked.stderr
    assert machine.files() == new
    assert docker.requests == []

    made = site.decide()
    site.bootstrap()
    assert site.said == [f"[{at}/{len(made.steps)}] {step}" for at, step in enumerate(made.steps, 1)]
    assert site.is_complete()
    assert site.decide().there == (
        "python3 3.11.2", "tini", "rsync", "Docker Engine 28.5.1", "Compose 2.40.3"
    )  # fmt: skip
    assert not {"curl", "docker-ce-rootless-extras"} & set(machine.packages())  # only recommended
    assert docker.requests[:2] == [f"{archive.ROOT}/gpg", archive.RELEASE]
    assert (machine.root / KEY).read_bytes() == docker.files[f"{archive.ROOT}/gpg"]
    assert {path for path in machine.files() if path.startswith("etc/apt/")} == {
        "etc/apt/keyrings", KEY, "etc/apt/sources.list.d", SOURCES
    }  # fmt: skip
    for path in (KEY, SOURCES):
        assert (machine.root / path).stat().st_mode & 0o777 == 0o644
    assert (machine.root / "etc/systemd/system/multi-user.target.wants/docker.service").is_symlink()
    machine.run("tini", "--", "rsync", "--version")
    sound(machine)

    docker.requests.clear()
    done = machine.files()
    again = call(["bootstrap", "--host", machine.name, "--yes"], tmp_path, environment)
    assert (again.returncode, again.stdout.splitlines()[-1]) == (0, "  nothing to do"), again.stderr
    assert machine.files() == done
    assert docker.requests == []
    site.host.close()


def sound(machine: BareMachine) -> None:
    """apt and dpkg there are as able as ever."""
    machine.run("apt-get", "check")
    assert machine.run("dpkg", "--audit").stdout == ""
    updated = machine.run("apt-get", "-o", "APT::Update::Error-Mode=any", "update", timeout=120)
    assert "W:" not in updated.stderr


@pytest.mark.parametrize(
    ("path", "answer", "why"),
    [
        (archive.RELEASE, 404, "has nothing for bookworm; install Engine and Compose as https://docs.docker"),
        (archive.RELEASE, 503, "cannot be fetched (503 Service Unavailable"),
        (archive.RELEASE, "early", "in the future: the clock there is behind; set it (timedatectl set-ntp true)"),
        (f"{archive.ROOT}/gpg", 404, f"https://download.docker.com{archive.ROOT}/gpg cannot be fetched (404 Not Found"),
        (f"{archive.ROOT}/gpg", "other", "gave is one with the fingerprint {other}, but Docker's is {own}"),
        (f"{archive.ROOT}/gpg", b"<html>", "gave is none that can be read, but Docker's is {own}"),
    ],
    ids=["gone", "down", "clock", "no-key", "other-key", "no-openpgp"],
)  # fmt: skip
def test_a_repository_that_is_not_as_it_should_be_is_not_added_and_the_next_bootstrap_finds_it_mended(
    site: Callable[..., Site], docker: archive.Archive, path: str, answer: Any, why: str
) -> None:
    here = site()
    before = here.machine.files()
    fingerprints = {"own": docker.fingerprint, "other": openpgp.fingerprint(docker.other_key)}
    docker.replaced[path] = {"other": docker.other_key, "early": docker.early_release}.get(answer, answer)
    assert why.format(**{k: openpgp.grouped(v) for k, v in fingerprints.items()}) in here.refused()
    after = here.machine.files()
    changed = {path for path in after if after[path] != before.get(path)}
    noted = ("var/lib/apt/lists", "var/cache/apt", "etc/apt/keyrings", "tmp")  # what apt keeps; keys
    assert {path for path in changed if not path.startswith(noted)} <= {
        ".", "etc", "etc/apt", "var", "var/lib", "var/lib/apt", "var/cache"
    }  # fmt: skip
    assert not [path for path in changed if path.endswith(".new")]
    assert not (here.machine.root / SOURCES).exists()
    sound(here.machine)
    docker.replaced = {}
    here.bootstrap()
    assert here.is_complete()


def test_lists_that_another_key_has_signed_are_not_taken(
    site: Callable[..., Site], docker: archive.Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = site()
    monkeypatch.setattr(installing, "DOCKER_FINGERPRINT", openpgp.fingerprint(docker.other_key))
    docker.replaced[f"{archive.ROOT}/gpg"] = docker.other_key
    assert "is not signed by the key that is expected" in here.refused()
    assert not (here.machine.root / SOURCES).exists()
    sound(here.machine)


def test_a_disk_that_gets_full_between_packages_is_told_and_the_next_bootstrap_goes_on(
    site: Callable[..., Site],
) -> None:
    here = site(disk="24m")
    filling = here.machine.root / "filling"
    free = os.statvfs(here.machine.root)
    room = archive.WEIGHT * 3 // 2  # the packages arrive, but they cannot be unpacked
    filling.write_bytes(bytes(free.f_bavail * free.f_frsize - room - 2_500_000))
    assert "there is no space left for the packages; free some (apt-get clean, " in here.refused()
    assert here.installed() < DOCKERS
    filling.unlink()
    said = here.refused()
    assert "an earlier installation was interrupted; run dpkg --configure -a there as root" in said
    here.machine.run("dpkg", "--configure", "-a")  # the remedy is one
    here.bootstrap()
    assert here.is_complete()
    sound(here.machine)


def test_packages_that_cannot_be_fetched_leave_none_half_installed(
    site: Callable[..., Site], docker: archive.Archive
) -> None:
    here = site()
    docker.replaced = {path: 404 for path in docker.files if "/docker-ce_" in path}
    assert "docker-ce_28.5.1-1%7edebian.12%7ebookworm_" in here.refused()
    assert here.installed() == set()
    sound(here.machine)


SLOW = "Package: slow\nVersion: 1\nArchitecture: all\nMaintainer: x <x@x>\nDescription: x\n"


def test_another_installation_is_waited_for_and_named(
    site: Callable[..., Site],
) -> None:
    here = site()
    os.mkfifo(here.machine.root / "go")
    waits = {"postinst": "#!/bin/sh\n[ -e /not ] || { touch /not; read line </go; }\n"}
    here.machine.write("tmp/slow.deb", archive.package(SLOW, {}, waits))
    other = here.machine.popen("dpkg", "-i", "/tmp/slow.deb")
    assert other.stdout
    while b"Setting up slow" not in other.stdout.readline():
        pass
    said = here.refused(patience=0.5, pause=0.1)
    assert " (dpkg) holds /var/lib/dpkg/lock" in said
    assert "another program installs packages there; wait until it has ended, and bootstrap again" in said

    def let_go(sentence: str) -> None:
        if "waiting at most 100 s: process " in sentence:
            (here.machine.root / "go").write_text("\n")

    reported: list[str] = []
    bootstrap.carry_out(
        here.decide(), here.host, lambda s: (reported.append(s), let_go(s))[0], patience=100, pause=0.1
    )
    assert len([s for s in reported if s.startswith("waiting")]) == 1
    assert other.wait(30) == 0
    assert here.is_complete()
    other.communicate()


def test_a_package_whose_own_script_fails_is_named_and_so_is_an_engine_that_does_not_start(
    site: Callable[..., Site],
) -> None:
    here = site()
    here.machine.write("tmp/slow.deb", archive.package(SLOW, {}, {"postinst": "#!/bin/sh\nexit 7\n"}))
    with pytest.raises(TestbedError):
        here.machine.run("dpkg", "-i", "/tmp/slow.deb")
    said = here.refused()
    assert (
        "the package slow is there, but its own post-installation script failed; dpkg --configure slow "
        in said
    )
    here.machine.run("dpkg", "--purge", "slow")
    started = (here.machine.root / "usr/bin/systemctl").read_text()
    failing = "#!/bin/sh\necho 'Job for docker.service failed.' >&2; exit 1\n"
    here.machine.write("usr/bin/systemctl", failing, 0o755)
    assert "systemctl failed (exit code 1): Job for docker.service failed.; mend that" in here.refused()
    here.machine.write("usr/bin/systemctl", started, 0o755)
    here.bootstrap()
    assert here.is_complete()


def test_nothing_that_is_there_is_removed_for_it(site: Callable[..., Site]) -> None:
    here = site()
    fields = "Package: runc\nVersion: 1.1\nArchitecture: all\nMaintainer: x <x@x>\nDescription: x\n"
    here.machine.write("tmp/runc.deb", archive.package(fields, {"usr/bin/runc": "#!/bin/sh\n"}))
    here.machine.run("dpkg", "-i", "/tmp/runc.deb")
    assert (
        "it would remove runc, which cannot be beside what is missing; if nothing there needs "
        in here.refused()
    )
    assert here.machine.packages()["runc"] == "installed"
    here.machine.run("apt-get", "remove", "-y", "runc")  # the remedy is one
    here.bootstrap()
    assert here.is_complete()


def test_a_source_for_dockers_packages_that_is_there_is_used_as_it_is(
    site: Callable[..., Site], docker: archive.Archive
) -> None:
    here = site()
    here.machine.write("etc/apt/keyrings/docker.gpg.asc", docker.files[f"{archive.ROOT}/gpg"])
    line = "deb [signed-by=/etc/apt/keyrings/docker.gpg.asc] https://download.docker.com/linux/debian bookworm stable\n"
    here.machine.write("etc/apt/sources.list.d/docker.list", line)
    assert "which /etc/apt/sources.list.d/docker.list has already" in str(here.decide())
    here.bootstrap()
    assert here.is_complete()
    assert not (here.machine.root / SOURCES).exists()
    sound(here.machine)
