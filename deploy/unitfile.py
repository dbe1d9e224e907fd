"""Puts the unit that starts a name's next run after a reboot in its place, and takes it away.

Runs ON the host, asked by `deploy.bootunit`. As root with systemd: /etc/systemd/system. Otherwise the user's
own systemd, if it may go on without a login; otherwise an @reboot line in the user's crontab. What somebody
else wrote is never touched. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from deploy import files, machine
from deploy.errors import DeployError

SYSTEM = "/etc/systemd/system"
RUNNING = "/run/systemd/system"  # is there exactly if systemd is PID 1
LINGER = Path("/var/lib/systemd/linger")
MARK = "# drafthouse: the unit of {name} in {state}"  # the first line of the template
LINE = "# drafthouse: {name} in {state}"  # the end of a crontab's line
TIMEOUT = 30.0


class Unable(Exception):
    """This way is not open on this machine."""


def install(state: str, name: str, text: str, program: str) -> str:
    """Have `text` as the unit of `name`, started at a boot, with `program` (a directory) as the boot program.

    Returns a sentence. Raises DeployError if that cannot be.
    """
    link = Path(state) / "tools" / "boot"
    link.parent.mkdir(parents=True, exist_ok=True)
    files.replace_link(link, os.path.basename(program))
    try:
        if os.path.isdir(RUNNING):
            return user_unit(state, name, text) if os.geteuid() else system_unit(state, name, text)
        why = "there is no systemd"
    except Unable as error:
        why = str(error)
    try:
        return crontab_line(state, name, command(text))
    except Unable as error:
        raise DeployError(f"{why}, and {error}; after a reboot, fab start does it") from None


def remove(state: str, name: str) -> str:
    """Take away what `install` made. What is not ours stays."""
    done = []
    for place in {SYSTEM, user_place()}:
        path = Path(place) / f"drafthouse-{name}.service"
        if path.is_file() and ours(path, state, name):
            scope = [] if place == SYSTEM else ["--user"]
            with contextlib.suppress(Unable):
                systemctl(*scope, "disable", "--no-reload", path.name)
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            done.append(str(path))
    with contextlib.suppress(Unable, FileNotFoundError), crontab_lock(state):
        before = crontab()
        after = without(before, state, name)
        if after != before:
            write_crontab(after)
            done.append("the line in the crontab")
    return f"removed {' and '.join(done)}" if done else f"{name} had nothing that starts after a reboot"


# -- systemd -----------------------------------------------------------------------------------------------


def system_unit(state: str, name: str, text: str) -> str:
    return unit(Path(SYSTEM), [], state, name, text)


def user_unit(state: str, name: str, text: str) -> str:
    user = machine.user_name()
    linger = LINGER / user
    if not linger.exists():
        call("loginctl", "enable-linger", user)
        if not linger.exists():
            raise Unable(f"systemd does not let {user} go on without a login")
    return unit(Path(user_place()), ["--user"], state, name, text)


def user_place() -> str:
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return f"{config}/systemd/user"


def unit(place: Path, scope: list[str], state: str, name: str, text: str) -> str:
    """Have the unit there, enabled and started; systemd reads its files again only if it must.

    A reload takes the GPUs from containers whose devices the engine was not told one by one.
    """
    path = place / f"drafthouse-{name}.service"
    if path.exists() or path.is_symlink():
        if not ours(path, state, name):
            raise DeployError(
                f"{path} was not written for {name} in {state}, so it is left as it is; move it aside and "
                "deploy again, or let it start the run"
            )
        same = path.read_text(encoding="utf-8", errors="replace") == text
    else:
        same = False
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if not same:
            write(path, text)
            # A unit that it has not loaded it finds by itself.
            if "yes" in systemctl(*scope, "show", "--property=NeedDaemonReload", path.name):
                systemctl(*scope, "daemon-reload")
        if not enabled(path, text):
            systemctl(*scope, "enable", "--no-reload", path.name)
        # It finds the run in progress and does nothing, but only what is started is stopped at a shutdown.
        systemctl(*scope, "start", "--no-block", path.name)
    except Unable:
        path.unlink()
        raise
    return f"{path.name} starts the next run after a reboot ({'as it was' if same else 'written'})"


def enabled(path: Path, text: str) -> bool:
    """Whether each target that the unit names as wanting it has the link."""
    wanting = [line.partition("=")[2].split() for line in text.splitlines() if line.startswith("WantedBy=")]
    targets = [target for line in wanting for target in line]
    return all(os.path.exists(path.parent / f"{target}.wants" / path.name) for target in targets)


def ours(path: Path, state: str, name: str) -> bool:
    if path.is_symlink():
        return False
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return bool(lines) and lines[0] == MARK.format(name=name, state=state)


def write(path: Path, text: str) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def systemctl(*words: str) -> str:
    return call("systemctl", *words)


def call(*argv: str) -> str:
    """Run a command of systemd's, and return what it says. Raises Unable with its last words."""
    environment = dict(os.environ)
    place = f"/run/user/{os.getuid()}"
    if os.path.isdir(place):  # an SSH command does not always get it
        environment.setdefault("XDG_RUNTIME_DIR", place)
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT, env=environment
        )
    except subprocess.TimeoutExpired:
        raise Unable(f"{argv[0]} {argv[1]} did not end within {TIMEOUT:g} s") from None
    except OSError as error:
        raise Unable(f"{argv[0]} cannot be started ({error.strerror})") from None
    if done.returncode:
        words = done.stderr.decode("utf-8", "replace").strip().splitlines() or [
            f"exit code {done.returncode}"
        ]
        raise Unable(f"{argv[0]} {' '.join(argv[1:])} failed: {words[-1]}")
    return done.stdout.decode("utf-8", "replace")


# -- cron --------------------------------------------------------------------------------------------------


def command(text: str) -> list[str]:
    """The argv of a unit's ExecStart."""
    line = next(line for line in text.splitlines() if line.startswith("ExecStart="))
    return [unquote(word) for word in shlex.split(line.partition("=")[2])]


def unquote(word: str) -> str:
    return word.replace("%%", "%").replace("$$", "$")


def crontab_line(state: str, name: str, argv: list[str]) -> str:
    log = f"{state}/names/{name}/boot.log"
    words = " ".join(shlex.quote(word) for word in argv)
    line = f"@reboot {words} >>{shlex.quote(log)} 2>&1 {LINE.format(name=name, state=state)}"
    line = line.replace("%", "\\%")  # which cron takes for a newline
    with crontab_lock(state):
        before = crontab()
        kept = without(before, state, name)
        if kept and not kept.endswith("\n"):
            kept += "\n"
        after = f"{kept}{line}\n"
        if after != before:
            write_crontab(after)
    return f"an @reboot line in the crontab of {machine.user_name()} starts the next run after a reboot"


@contextlib.contextmanager
def crontab_lock(state: str) -> Iterator[None]:
    """Between reading and writing a crontab no other deploy may do so."""
    lock = os.open(f"{state}/tools/.crontab.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def without(text: str, state: str, name: str) -> str:
    """A crontab without the line of this name; every other line byte for byte."""
    mark = LINE.format(name=name, state=state).replace("%", "\\%")
    return "".join(
        line
        for line in text.splitlines(keepends=True)
        if not (line.startswith("@reboot ") and line.rstrip("\n").endswith(f" {mark}"))
    )


def crontab() -> str:
    """The user's crontab; empty without one. Raises Unable."""
    program = shutil.which("crontab", path=os.environ.get("PATH", "") + machine.PROGRAM_PATHS)
    if program is None:
        raise Unable("there is no crontab")
    try:
        done = subprocess.run([program, "-l"], stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unable(f"crontab -l failed: {error}") from None
    errors = done.stderr.decode("utf-8", "replace").strip()
    if done.returncode and "no crontab for" not in errors:
        raise Unable(f"crontab -l failed: {errors or f'exit code {done.returncode}'}")
    return done.stdout.decode("utf-8", "surrogateescape") if not done.returncode else ""


def write_crontab(text: str) -> None:
    program = shutil.which("crontab", path=os.environ.get("PATH", "") + machine.PROGRAM_PATHS)
    assert program
    content = text.encode("utf-8", "surrogateescape")
    try:
        done = subprocess.run([program, "-"], input=content, capture_output=True, timeout=TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unable(f"crontab did not take the line: {error}") from None
    if done.returncode:
        raise Unable(f"crontab refused the line: {done.stderr.decode('utf-8', 'replace').strip()}")
