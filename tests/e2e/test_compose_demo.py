"""`docker compose up` and `docker compose logs -f` of the top-level compose.yaml, on a real engine.

The demo itself, with two changes by an override file: the toy target that is made in seconds, and more steps
than anybody waits for.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from queue import Empty, Queue

import pytest
import yaml
from testbed.docker import Compose, Docker
from testbed.place import CHECKOUT

from deploy.runtimes.compose import STATE, demo

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SHORT = [
    *("--max-steps", "200000", "--epochs", "200000", "--log-interval", "1", "--eval-prompts", "0"),
    *("--threads", "1", "--target-layer-ids", "0,1"),  # the tiny toy has fewer layers than the demo's
]
VOLUME = "drafthouse-demo_state"
TRY_TO_WRITE = """
for path in ("/x", "/opt/drafthouse/x", "/opt/venv/x", "/etc/x"):
    try:
        open(path, "w")
        print(path)
    except OSError:
        pass
"""
RUN_FROM_TMP = """
import os
open("/tmp/x", "w").write("#!/bin/sh\\necho ran")
os.chmod("/tmp/x", 0o755)
os.system("/tmp/x")
"""


class Follower:
    """`docker compose logs -f`: its lines, as they come."""

    def __init__(self, compose: Compose, *words: str) -> None:
        self.lines: Queue[str] = Queue()
        self.seen: list[str] = []
        self.process = subprocess.Popen(
            compose.argv(["logs", "-f", "--no-log-prefix", "--no-color", *words]),
            env=compose.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.put(line.rstrip("\n"))

    def until(self, words: str, seconds: float = 240) -> str:
        """The first line with `words`; fails with what was seen if none comes."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                line = self.lines.get(timeout=1)
            except Empty:
                if self.process.poll() is not None and self.lines.empty():
                    break
                continue
            self.seen.append(line)
            if words in line:
                return line
        raise AssertionError(f"no line with {words!r}; seen:\n" + "\n".join(self.seen[-40:]))

    def end(self) -> None:
        """Ctrl-C, which reaches the client and its Compose plugin alike."""
        os.killpg(self.process.pid, signal.SIGINT)
        try:
            self.process.wait(20)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def compose(engine: Docker, image: str, tmp_path_factory: pytest.TempPathFactory) -> Compose:
    override = tmp_path_factory.mktemp("compose") / "short.yaml"
    service = {"environment": {"DRAFTHOUSE_TOY": "tiny"}, "command": [*demo().command, *SHORT]}
    override.write_text(yaml.safe_dump({"services": {"trainer": service}}))
    return Compose(engine, CHECKOUT / "compose.yaml", override)


@pytest.fixture(scope="module")
def up(compose: Compose) -> Iterator[Compose]:
    """The demo, up in the background and training; afterwards gone, its volume too."""
    try:
        compose.run("up", "--detach", "--build", timeout=600)
        follower = Follower(compose)
        try:
            follower.until("step 1/")
        finally:
            follower.end()
        yield compose
    finally:
        compose.run("down", "--volumes", "--timeout", "20", timeout=120)


@pytest.fixture
def logs(up: Compose) -> Iterator[Follower]:
    follower = Follower(up)
    try:
        yield follower
    finally:
        follower.end()


def state(docker: Docker, path: str) -> dict:
    """A JSON file of the state volume."""
    words = [
        "run",
        "--rm",
        "--read-only",
        "-v",
        f"{VOLUME}:{STATE}:ro",
        "drafthouse:local",
        "cat",
        f"{STATE}/{path}",
    ]
    return json.loads(docker.run(*words))


def inside(compose: Compose, script: str) -> str:
    return compose.run("exec", "-T", "trainer", "python", "-c", script).stdout.strip()


def test_the_log_comes_live_and_starts_with_the_banner(up: Compose, logs: Follower) -> None:
    step = logs.until("step 1/200000")
    assert "loss" in step
    banner = logs.seen[0]
    assert "drafthouse run 0001-demo · attempt 1" in banner
    assert "stdout unbuffered (PYTHONUNBUFFERED=1, -u; from /proc/" in banner
    # The run goes on: no buffer was flushed because something ended.
    assert json.loads(up.run("ps", "--format", "json").stdout)["State"] == "running"


def test_the_container_has_no_rights(up: Compose) -> None:
    facts = dict(
        line.split(":\t", 1) for line in inside(up, "print(open('/proc/1/status').read())").splitlines()
    )
    assert facts["Name"] == "tini"
    assert facts["Uid"].split() == ["10001"] * 4
    for kind in ("CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(facts[kind], 16) == 0, kind
    assert facts["NoNewPrivs"] == "1"
    assert inside(up, TRY_TO_WRITE) == "", "only the volume and the tmpfs can be written"
    assert inside(up, RUN_FROM_TMP) == "ran", "torch.compile runs what it writes to /tmp"
    assert int(inside(up, "import os; s = os.statvfs('/dev/shm'); print(s.f_blocks * s.f_frsize)")) >= 1 << 30


def test_no_variable_of_ours_reaches_the_container_but_those_of_the_file(up: Compose) -> None:
    names = set(
        inside(
            up, "print(*open('/proc/1/environ').read().strip(chr(0)).split(chr(0)), sep='\\n')"
        ).splitlines()
    )
    known = (
        "PATH=",
        "HOSTNAME=",
        "HOME=",
        "PYTHON",
        "PIP_CONFIG_FILE=",
        "HF_HUB_OFFLINE=",
        "DRAFTHOUSE_TOY=",
    )
    assert [name for name in names if not name.startswith(known)] == []


def test_the_healthcheck_tells_what_the_run_does(up: Compose) -> None:
    check = demo().healthcheck
    said = up.run("exec", "-T", "trainer", *check).stdout
    assert re.match(r"\d{4}-demo: rank 0 training, step \d+, heartbeat \d+ s ago$", said)
    declared = json.loads(up.docker.run("inspect", "drafthouse-demo-trainer-1"))[0]
    assert declared["Config"]["Healthcheck"]["Test"] == ["CMD", *check]
    assert declared["HostConfig"]["RestartPolicy"]["Name"] in ("no", "")


def test_stop_saves_a_checkpoint_and_the_next_up_goes_on_from_it(up: Compose, engine: Docker) -> None:
    before = inside(up, "import os; print(max(os.listdir('runs')))")
    up.run("stop")
    end = state(engine, f"runs/{before}/exit.json")
    assert (end["reason"], end["code"]) == ("stopped", 0)
    saved = end["last_checkpoint"]
    assert saved["step"] >= 1
    record = state(engine, f"{saved['path'].removeprefix(STATE + '/')}/state.json")
    assert (record["step"], record["finished"]) == (saved["step"], False)
    ended = "{{.State.ExitCode}} {{.State.OOMKilled}}"
    code = engine.run("inspect", "-f", ended, "drafthouse-demo-trainer-1")
    assert code.split() == ["0", "false"], "it ended by itself, before the engine killed it"

    up.run("up", "--detach")
    run_id = f"{int(before.split('-')[0]) + 1:04d}-demo"
    after = Follower(up)
    try:
        after.until(f"drafthouse run {run_id}")
        first = after.until("/200000 ·")
    finally:
        after.end()
    assert int(first.split("step ")[1].split("/")[0].replace(",", "")) == saved["step"] + 1
    assert state(engine, f"runs/{run_id}/run.json")["name"] == "demo"
