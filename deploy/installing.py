"""The commands of `fab bootstrap`: which, in which order, and what is said when one fails.

They leave a host's package manager as able as it was: a source of packages is put in place only when its key
has the right fingerprint and its lists could be fetched, and what was made for that goes when it fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from deploy import apt, openpgp
from deploy.errors import DeployError
from deploy.host import HostError, failure

if TYPE_CHECKING:
    from deploy.host import Host, Result

STEP_TIMEOUT = 1800.0  # seconds, for one command; a slow mirror takes its time
LOCK_PATIENCE = 300.0  # seconds: unattended-upgrades, after a boot
LOCK_PAUSE = 3.0  # seconds between two tries

DOCKER = "https://download.docker.com/linux"
DOCKER_KEY = "/etc/apt/keyrings/docker.asc"
DOCKER_SOURCES = "/etc/apt/sources.list.d/docker.sources"
# "Docker Release (CE deb)", as https://docs.docker.com/engine/install gives it.
DOCKER_FINGERPRINT = "9DC858229FC7DD38854AE2D88D81803C0EBFCD88"
_NEW_KEY = f"{DOCKER_KEY}.new"
_NEW_SOURCES = "/etc/apt/docker.sources"  # nothing reads it there

Report = Callable[[str], None]


@dataclass(frozen=True)
class Step:
    """One command, as root."""

    argv: tuple[str, ...]
    input: bytes = b""
    fingerprint: str = ""  # of the key that the command prints; with another one it has failed
    undo: tuple[str, ...] = ()  # files to remove if it fails

    @property
    def words(self) -> list[str]:
        """The command without what is set for it: that says nothing to people."""
        return [word for word in self.argv if word not in apt.APT[:-1]]

    def __str__(self) -> str:
        from deploy.render import shell

        text = " ".join(shell(word) for word in self.words)
        return f"{text} (must be {openpgp.grouped(self.fingerprint)})" if self.fingerprint else text


def steps(
    seen: Mapping[str, Any], packages: Sequence[str], docker_repository: bool, after: Sequence[Step]
) -> tuple[Step, ...]:
    """The commands that install `packages` on a host that is as `look` has `seen` it; `after` comes last."""
    made: list[Step] = []
    if packages:
        made.append(Step(apt.UPDATE))
    if docker_repository:
        made += _docker_repository(seen)
    if packages:
        made.append(Step((*apt.INSTALL, *packages)))
    made += after
    if seen.get("uid") != "0":
        made = [Step(("sudo", "-n", *step.argv), step.input, step.fingerprint, step.undo) for step in made]
    return tuple(made)


def _docker_repository(seen: Mapping[str, Any]) -> list[Step]:
    sources = (
        f"Types: deb\nURIs: {DOCKER}/{seen['id']}\nSuites: {seen.get('codename')}\nComponents: stable\n"
        f"Architectures: {seen.get('architecture')}\nSigned-By: {DOCKER_KEY}\n"
    )
    key, new = (_NEW_KEY,), (_NEW_SOURCES,)
    certificates = () if seen["package"].get("ca-certificates") else (*apt.INSTALL, "ca-certificates")
    return [
        *([Step(certificates)] if certificates else []),
        Step(("install", "-m", "0755", "-d", "/etc/apt/keyrings")),
        Step((*apt.DOWNLOAD, f"{DOCKER}/{seen['id']}/gpg", _NEW_KEY), undo=key),
        Step(("cat", _NEW_KEY), fingerprint=DOCKER_FINGERPRINT, undo=key),
        Step(("chmod", "0644", _NEW_KEY), undo=key),
        Step(("mv", _NEW_KEY, DOCKER_KEY), undo=key),
        Step(("tee", _NEW_SOURCES), sources.encode(), undo=new),
        Step(("chmod", "0644", _NEW_SOURCES), undo=new),
        Step(apt.update_only(_NEW_SOURCES), undo=new),
        Step(("mv", _NEW_SOURCES, DOCKER_SOURCES), undo=new),
    ]


def carry_out(
    made: Sequence[Step],
    host: Host,
    report: Report,
    *,
    patience: float = LOCK_PATIENCE,
    pause: float = LOCK_PAUSE,
) -> None:
    """Run the steps, in order. Raises DeployError at the first that fails: one sentence with what to do.

    While another program holds apt's or dpkg's lock, a step is tried again every `pause` seconds, for at most
    `patience` seconds.
    """
    earlier = ""  # what updates complained of
    for number, step in enumerate(made, 1):
        report(f"[{number}/{len(made)}] {step}")
        try:
            done = _run(step, host, report, patience, pause)
            problem = _problem(step, done, host, earlier)
        except HostError as error:  # it took too long, or the connection is lost
            raise DeployError(f"{error}{_so_far(number, made)}") from None
        if problem:
            if step.undo:
                sudo = step.argv[:2] if step.argv[0] == "sudo" else ()
                host.run([*sudo, "rm", "-f", *step.undo], timeout=60, check=False)
            raise DeployError(problem + _so_far(number, made))
        if "update" in step.argv:
            earlier += done.err.decode(errors="replace")


def _so_far(number: int, made: Sequence[Step]) -> str:
    return f" ({number - 1} of {len(made)} steps were done; fab bootstrap goes on with the rest)"


def _run(step: Step, host: Host, report: Report, patience: float, pause: float) -> Result:
    deadline, told = time.monotonic() + patience, ""
    while True:
        done = host.run(list(step.argv), timeout=STEP_TIMEOUT, input=step.input or None, check=False)
        held = apt.holder(done.err.decode(errors="replace")) if done.code else ""
        if not held or time.monotonic() >= deadline:
            return done
        if held != told:
            report(f"waiting at most {patience:g} s: {held}")
            told = held
        time.sleep(pause)


def _problem(step: Step, done: Result, host: Host, earlier: str) -> str:
    if done.code:
        out, errors = done.out.decode(errors="replace"), done.err.decode(errors="replace")
        why = apt.explain(out, errors, earlier)
        if why:
            return f"{host.name}: {why}"
        words = [word for word in step.words if word not in ("sudo", "-n")]
        if words[0] == "apt-get":
            done = replace(done, err=apt.last_words(out, errors).encode())
        return f"{failure(host.name, words, done)}; mend that, and bootstrap again"
    if step.fingerprint:
        found = openpgp.fingerprint(done.out)
        if found != step.fingerprint:
            what = f"one with the fingerprint {openpgp.grouped(found)}" if found else "none that can be read"
            return (
                f"{host.name}: the key that {DOCKER} gave is {what}, but Docker's is "
                f"{openpgp.grouped(step.fingerprint)}; nothing from there was installed: look whether a "
                "proxy or a mirror is in between, or install Docker Engine and Compose yourself if Docker "
                "has a new key"
            )
    return ""
