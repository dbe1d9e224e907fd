"""A container of a Proxmox host, in which commands run by `pct exec`, and the reasons why they cannot.

What a command is goes in by stdin, as in `deploy.sshcommand`: `pct exec` itself is always told the same, so
nothing has to be quoted, no value is to be seen in a process list, and what `pct` would hand on of its
caller's environment is nothing. To start `pct` takes half a second, so `run` has one that stays
(`deploy.inside_agent`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploy import inside_agent, sshcommand, sshpipe
from deploy.host import (
    SCRIPT_FLAGS,
    HostError,
    Local,
    LostError,
    NoPython,
    Result,
    describe,
    failed,
    kill_group,
    logged,
)
from deploy.remote_files import RemoteFiles, no_python
from deploy.runtimes.process import PATH
from deploy.sshcommand import Request
from deploy.talk import Talk, pipe_of

if TYPE_CHECKING:
    from deploy.ssh import Ssh

log = logging.getLogger(__name__)

BEGIN_TIMEOUT = 30.0  # seconds that a container may take to start a stream
LOOK_TIMEOUT = 20.0
ANSWER_TIMEOUT = 15.0  # seconds for an answer on its way, beyond the command's own time

# What a command starts from, as a login would have it: `pct exec` hands on none of the container's variables.
ENVIRONMENT = {
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "SHELL": "/bin/bash",
    "PATH": PATH,
    "PYTHONUNBUFFERED": "1",
}

# Arguments: the words of `pct`. With or without --keep-env 0, there is nothing that it could hand on.
_EXEC = 'exec env -i PATH="$PATH:/usr/sbin:/sbin" pct "$@"'
NO_KEEP_ENV = b"nknown option: keep-env"  # of a Proxmox before 8.2
# Argument: the container. Says in `key=value` lines what keeps a command from running in it.
_LOOK = """\
PATH=$PATH:/usr/sbin:/sbin
echo "uid=$(id -u)"
command -v pct >/dev/null 2>&1 && echo pct=1
here=$(readlink /etc/pve/local 2>/dev/null) && echo "here=${here##*/}"
for file in /etc/pve/nodes/*/lxc/"$1".conf /etc/pve/nodes/*/qemu-server/"$1".conf; do
  [ -e "$file" ] || continue
  node=${file#/etc/pve/nodes/}
  case $file in */lxc/*) echo "on=${node%%/*}" ;; *) echo "machine=${node%%/*}" ;; esac
done
for file in /etc/pve/lxc/*.conf; do
  [ ! -e "$file" ] || { file=${file##*/}; echo "there=${file%.conf}"; }
done
# Above the first snapshot's section.
sed -n -e '/^\\[/q' -e 's/^lock: */lock=/p' "/etc/pve/lxc/$1.conf" 2>/dev/null
pct status "$1" 2>/dev/null | sed -n 's/^status: */state=/p'
# pct knows no word for it.
lxc-info -n "$1" -s -H 2>/dev/null | sed -n 's/^FROZEN$/frozen=1/p'
"""


class Inside(RemoteFiles):
    """A container, reached through the Proxmox host `outer` (this machine, or one behind SSH)."""

    is_local = False

    def __init__(self, name: str, outer: Local | Ssh, container: int, python: str = "python3") -> None:
        self.name = name
        self.outer = outer
        self.container = container
        self.python = python
        self._place: tempfile.TemporaryDirectory[str] | None = None
        self._running = threading.RLock()  # one command at a time
        self._agent: Agent | None = None
        self._agentless = False
        self._has_keep_env = True
        self._failed: HostError | None = None  # of an agent that was begun

    def __repr__(self) -> str:
        return f"Inside({self.name!r}, {self.outer!r}, {self.container})"

    def begin(self) -> None:
        """Start what commands go through while something else is done. Failures are told at the first use."""
        locked = threading.Event()

        def work() -> None:
            with self._running:
                locked.set()
                try:
                    self._agent_there(["sh"])
                except HostError as error:
                    self._failed = error

        threading.Thread(target=work, daemon=True).start()
        locked.wait()

    # -- commands ------------------------------------------------------------------------------------------

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        env: Mapping[str, str] | None = None,
        input: bytes | None = None,
        check: bool = True,
    ) -> Result:
        with logged(self.name, argv, env, input) as ended:
            result = self._run(argv, timeout, env, input or b"")
            ended(result)
        if check and result.code:
            if result.code == 127 and argv[0] == self.python and not result.out:
                raise no_python(self)
            raise failed(self.name, argv, result)
        return result

    def _run(
        self, argv: Sequence[str], timeout: float, env: Mapping[str, str] | None, input: bytes
    ) -> Result:
        request, data = self._request(argv, env)
        with self._running:
            agent = self._agent_there(argv)
            if agent:
                done = self._by(agent, argv, data + input, timeout)
            else:
                done = self._once(argv, data + input, timeout)
        begun = request.begin(done.out)
        if begun is None:
            raise HostError(self._refused(argv, done))
        word, _, start = begun
        if word != "begun":
            return _not_there(argv, word)
        return Result(done.code, done.out[start:], request.errors(done.err)[0])

    def _once(self, argv: Sequence[str], data: bytes, timeout: float) -> Result:
        """A command by a `pct exec` of its own: where there is no Python for the agent."""
        try:
            done = self.outer.run(self._pct(), timeout=timeout, input=data, check=False)
        except HostError as error:
            raise self._of(argv, error) from None
        return self._once(argv, data, timeout) if self._without_keep_env(done.err) else done

    def _without_keep_env(self, errors: bytes) -> bool:
        """Whether a `pct` has refused the option, so that it is worth to try again without."""
        refused = self._has_keep_env and NO_KEEP_ENV in errors
        self._has_keep_env = self._has_keep_env and not refused
        return refused

    def _by(self, agent: Agent, argv: Sequence[str], data: bytes, timeout: float) -> Result:
        try:
            return agent.ask(data, timeout)
        except TimeoutError:
            raise HostError(
                f"{self.name}: {argv[0]} did not end within {timeout:g} s and was killed"
            ) from None
        except EOFError:
            why = refusal(self.container, self.name, self._look())
            lost = f"{self.name}: the connection was lost while {argv[0]} ran, which was ended; run it again"
            raise LostError(why or lost) from None
        except BaseException:  # Ctrl-C: the command does not outlive us
            agent.close()
            raise

    def _agent_there(self, argv: Sequence[str]) -> Agent | None:
        """The agent, started if it is not there (any more); None where there is no Python for it."""
        if self._agent is not None and self._agent.lives():
            return self._agent
        if self._failed is not None:
            error, self._failed = self._failed, None
            raise error
        if self._agentless:
            return None
        source = Path(inside_agent.__file__).read_text(encoding="utf-8")
        words = [self.python, *SCRIPT_FLAGS, "-c", source, "/bin/sh", "-c", sshcommand.COMMAND]
        try:
            process = self._begin(words, None, self.outer.resident)
        except NoPython:
            self._agentless = True
            return None
        self._agent = Agent(process)
        return self._agent

    def _pct(self) -> list[str]:
        keep = ["--keep-env", "0"] if self._has_keep_env else []
        words = ["exec", str(self.container), *keep, "--", "/bin/sh", "-c", sshcommand.COMMAND]
        return ["/bin/sh", "-c", _EXEC, "pct", *words]

    def _request(self, argv: Sequence[str], env: Mapping[str, str] | None) -> tuple[Request, bytes]:
        request = Request(argv, {**ENVIRONMENT, **(env or {})})
        try:
            return request, request.encode()
        except ValueError as error:  # a NUL byte, or a variable's name with '=' in it
            raise HostError(f"{self.name}: {argv[0]} cannot be started: {error}") from None

    def _of(self, argv: Sequence[str], error: HostError) -> HostError:
        """An error of the host around us, about the command that it was to run in here."""
        return type(error)(str(error).replace(f"{self.outer.name}: /bin/sh ", f"{self.name}: {argv[0]} ", 1))

    # -- streams -------------------------------------------------------------------------------------------

    def open_stream(
        self, argv: Sequence[str], env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        log.debug("%s: open %s", self.name, describe(argv, env, None))
        return self._begin(argv, env, self.outer.open_stream)

    def bulk(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        log.debug("%s: open %s over a connection of its own", self.name, describe(argv, env, None))
        return self._begin(argv, env, self.outer.bulk)

    def _begin(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None,
        start: Callable[[list[str]], subprocess.Popen[bytes]],
    ) -> subprocess.Popen[bytes]:
        request, data = self._request(argv, env)
        process = start(self._pct())
        talk = Talk(request, data, process)
        try:
            talk.until_begun(time.monotonic() + BEGIN_TIMEOUT)
        except TimeoutError:
            kill_group(process)
            raise HostError(self._hangs(argv)) from None
        except BaseException:
            kill_group(process)
            raise
        if talk.begun == "begun":
            return process
        kill_group(process)
        if self._without_keep_env(bytes(talk.err)):
            return self._begin(argv, env, start)
        if talk.begun is None:
            code = process.returncode
            raise HostError(self._refused(argv, Result(code, bytes(talk.out), bytes(talk.err))))
        if argv[0] == self.python:
            raise no_python(self)
        why = "No such file or directory" if talk.begun == "missing" else "Permission denied"
        raise HostError(f"{self.name}: cannot start {argv[0]}: {why}")

    def rsync_shell(self) -> str:
        if isinstance(self.outer, Local):
            if self._place is None:
                self._place = tempfile.TemporaryDirectory(prefix="drafthouse-")
            return sshpipe.shell(Path(self._place.name), self._pct())
        return self.outer.rsync_shell(through=Request(self._pct()).encode())

    # -- the connection ------------------------------------------------------------------------------------

    def lost(self) -> bool:
        return self.outer.lost()

    def close(self) -> None:
        with self._running:
            if self._agent is not None:
                self._agent.close()
                self._agent = None
        self.outer.close()

    # -- why not -------------------------------------------------------------------------------------------

    def _refused(self, argv: Sequence[str], done: Result) -> str:
        """The sentence for a command that `pct exec` did not begin."""
        lines = done.err.decode(errors="replace").splitlines()
        said = [line.strip() for line in lines if line.strip() and not sshcommand.MARK.match(line)]
        last = f": {said[-1]}" if said else ""
        otherwise = f"{self.name}: container {self.container} did not start {argv[0]} ({done.code}{last})"
        return refusal(self.container, self.name, self._look()) or otherwise

    def _hangs(self, argv: Sequence[str]) -> str:
        otherwise = (
            f"{self.name}: container {self.container} did not start {argv[0]} within {BEGIN_TIMEOUT:g} s; "
            f"see there whether it is short of memory, or its disks hang (lxc-top)"
        )
        return refusal(self.container, self.name, self._look()) or otherwise

    def _look(self) -> list[tuple[str, str]]:
        argv = ["/bin/sh", "-c", _LOOK, "look", str(self.container)]
        done = self.outer.run(argv, timeout=LOOK_TIMEOUT, check=False)
        return [(key, value) for key, _, value in (line.partition("=") for line in done.text.splitlines())]


class Agent:
    """`deploy.inside_agent`, at work: what it is asked and what it answers."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._ready = False

    def lives(self) -> bool:
        return self._process.poll() is None

    def ask(self, data: bytes, timeout: float) -> Result:
        """Have a shell read `data`, for at most `timeout` seconds.

        Raises TimeoutError if it took longer, and is killed; EOFError if the agent is gone.
        """
        overdue = threading.Timer(timeout + ANSWER_TIMEOUT, kill_group, [self._process])
        overdue.start()
        try:
            return self._ask(data, timeout)
        except TimeoutError:
            raise
        except (OSError, ValueError):  # its pipes are closed
            raise EOFError from None
        finally:
            overdue.cancel()

    def _ask(self, data: bytes, timeout: float) -> Result:
        stdin, stdout = pipe_of(self._process.stdin), pipe_of(self._process.stdout)
        stdin.write(b"%s\n%s" % (json.dumps({"bytes": len(data), "timeout": timeout}).encode(), data))
        stdin.flush()
        if not self._ready:
            self._ready = stdout.readline() == inside_agent.READY
        line = stdout.readline() if self._ready else b""
        if not line:
            self.close()
            raise EOFError
        said = json.loads(line)
        if said["code"] is None:
            raise TimeoutError
        out, err = stdout.read(said["out"]), stdout.read(said["err"])
        if len(out) + len(err) < said["out"] + said["err"]:
            raise EOFError
        return Result(said["code"], out, err)

    def close(self) -> None:
        """End it; it ends what it runs."""
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError, ValueError):
                pipe_of(pipe).close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
            return
        kill_group(self._process)


def refusal(container: int, host: str, look: Sequence[tuple[str, str]]) -> str:
    """Why nothing can run in a container, with what to do, by what `_LOOK` says; empty if nothing is known.

    Pure.
    """
    said = dict(look)
    here = said.get("here") or "that node"
    which = f"container {container}"
    if "pct" not in said:
        return (
            f"{host}: there is no pct, so it is no Proxmox host and has no {which}; correct address: in "
            "fabric.yaml, or remove container:"
        )
    if said.get("uid") != "0":
        return (
            f"{host}: only root can run commands in {which} by pct exec; log in as root, like "
            "address: root@… in fabric.yaml"
        )
    if "machine" in said:
        return (
            f"{host}: {container} is a virtual machine on {said['machine']} and no container; deploy to it "
            "by SSH, without container:"
        )
    if "on" in said and said["on"] != here:
        return (
            f"{host}: {which} is on node {said['on']} and this is {here}; set address: in fabric.yaml to "
            f"{said['on']}"
        )
    if "on" not in said:
        others = [value for key, value in look if key == "there"]
        there = f"there are {', '.join(others)}" if others else "there are none"
        return f"{host}: there is no {which} on {here} ({there}); correct container: in fabric.yaml"
    if said.get("state") == "stopped":
        if "lock" in said:
            return (
                f"{host}: {which} is stopped and locked ({said['lock']}); wait for the end of that, or give "
                f"it up with pct unlock {container} there, then pct start {container}"
            )
        return f"{host}: {which} is stopped; start it there with pct start {container}"
    if "frozen" in said:
        return (
            f"{host}: {which} is frozen, so nothing in it goes on; let it go on there with "
            f"lxc-unfreeze {container}"
        )
    return ""


def _not_there(argv: Sequence[str], word: str) -> Result:
    if word == "missing":
        return Result(127, b"", f"there is no program {argv[0]!r}".encode())
    return Result(126, b"", f"{argv[0]!r} may not be executed".encode())
