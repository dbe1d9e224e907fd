"""The deploy lock of a name: one client at a time changes what is on a host.

A small process on the host holds it (`deploy.lock_holder`) and lives on the heartbeats that we send. If we
are killed, lose the network or go to sleep, it lets go within 30 s.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deploy import onhost
from deploy.errors import DeployError
from deploy.host import Host, HostError

HOLDER = "deploy.lock_holder"
SILENCE = 30.0  # seconds without a heartbeat after which the host's side lets go
BEAT = 5.0  # seconds between heartbeats


class Patience:
    """How long a task waits for others altogether, wherever it does: `left` counts down to 0."""

    def __init__(self, seconds: float = 0) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())


NONE = Patience()


class Held:
    """The lock, while we have it."""

    def __init__(self, host: Host, name: str, process: subprocess.Popen[bytes]) -> None:
        self._what = f"the deploy lock of {name} on {host.name}"
        self._process = process

    def check(self) -> None:
        """Raise DeployError if the lock was lost: call it before each step that changes something."""
        if self._process.poll() is not None:
            raise DeployError(
                f"{self._what} was lost on the way (its holder ended); nothing more was changed"
            )


def who() -> str:
    """Who we are, for the words of a lock, a request or a run: user@machine."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no entry in passwd and no USER
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


@contextlib.contextmanager
def hold(
    host: Host,
    state_root: str,
    name: str,
    what: str = "deploy",
    wait: float = 0,
    *,
    silence: float = SILENCE,
    beat: float = BEAT,
    waiting: Callable[[str], None] = lambda words: None,
) -> Iterator[Held]:
    """Hold the deploy lock of `name` for the body of a ``with``, waiting up to `wait` seconds for it.

    `waiting` is called once with a sentence if somebody else has it. Raises DeployError, naming who holds
    it, from where, since when and what for, if it does not come free in time.
    """
    words = {"by": who(), "what": what, "since": time.time()}
    argv, program = onhost.script(
        host,
        HOLDER,
        f"{state_root}/names/{name}/deploy.lock",
        json.dumps(words),
        str(wait),
        str(silence),
    )
    process = host.open_stream(argv)
    onhost.feed(process, [program], end=False)
    stop = threading.Event()
    try:
        _acquire(host, name, process, waiting)
        beats = threading.Thread(target=_beat, args=(process, stop, beat), daemon=True)
        beats.start()
        yield Held(host, name, process)
    finally:
        stop.set()
        onhost.close(process)  # the end of its stdin tells the holder to let go


def _acquire(host: Host, name: str, process: subprocess.Popen[bytes], waiting: Callable[[str], None]) -> None:
    assert process.stdout
    assert process.stderr
    for line in process.stdout:
        said = json.loads(line)
        if "held" in said:
            return
        if "busy" in said:
            raise DeployError(refusal(host, name, said["busy"]))
        waiting(sentence(host, name, said["waiting"]) + "; waiting")
    why = onhost.last_words(process)
    raise HostError(f"{host.name}: cannot take the deploy lock of {name}: {why}")


def refusal(host: Host, name: str, words: Mapping[str, Any]) -> str:
    """The sentence for who did not wait long enough."""
    return f"{sentence(host, name, words)}; wait for it with --lock-wait SECONDS, or try again"


def sentence(host: Host, name: str, words: Mapping[str, Any]) -> str:
    """Who holds a lock, for people."""
    since = words.get("since")
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since)) if isinstance(since, float) else "?"
    return (
        f"{name} on {host.name} is locked by {words.get('by', 'somebody')} "
        f"({words.get('what', 'unknown work')}, since {when})"
    )


def _beat(process: subprocess.Popen[bytes], stop: threading.Event, seconds: float) -> None:
    assert process.stdin
    while not stop.wait(seconds):
        try:
            process.stdin.write(b".")
            process.stdin.flush()
        except (OSError, ValueError):  # the holder is gone, or we have closed the pipe: Held.check says so
            return
