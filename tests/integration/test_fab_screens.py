"""`fab watch` and `fab status --watch` on a real terminal, and what is left of it; compare and reference."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployed import steps, until
from fabbed import FAB, Fab, project

from deploy import live, newest, target
from trainer import status

pytestmark = pytest.mark.slow


@pytest.fixture
def fab(tmp_path: Path) -> Iterator[Fab]:
    yield from project(tmp_path)


@pytest.fixture
def running(fab: Fab) -> status.RunDir:
    run = fab.place.run_dir()
    fab.place.start(run)
    until(lambda: steps(run) > 2)
    (fab.place.root / "names" / "demo").mkdir(exist_ok=True)
    write_records(run, 1.0)
    return run


def write_records(run: status.RunDir, slower: float) -> None:
    now = time.time()
    lines = [
        {
            "step": step, "time": now + slower * step, "kind": "training", "loss": 8.0 - step / 10,
            "tokens_per_second": 9000 / slower, "phase_seconds": {"data": 0.01, "target": slower - 0.1},
            "memory": {"now": 7, "peak": 9},
        }
        for step in range(1, 30)
    ]  # fmt: skip
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))


class Terminal:
    """A terminal of 100 by 30 with `fab` in it."""

    def __init__(self, fab: Fab, *words: str) -> None:
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.seen = ""
        self.process = subprocess.Popen(
            [*FAB, *words], cwd=fab.root, env=fab.environment(TERM="xterm", LC_ALL="C.UTF-8"),
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(theirs)

    def until(self, *texts: str, seconds: float = 60) -> str:
        """Wait until all of the texts have been shown since the last call; what was shown."""
        deadline = time.monotonic() + seconds
        while not all(text in self.seen for text in texts):
            assert time.monotonic() < deadline, self.seen[-4000:]
            assert self.read(), self.seen[-4000:]
        shown, self.seen = self.seen, ""
        return shown

    def read(self) -> bool:
        if not select.select([self.ours], [], [], 1.0)[0]:
            return True
        with contextlib.suppress(OSError):  # that is how a terminal says that nobody is left
            data = os.read(self.ours, 65536)
            self.seen += data.decode("utf-8", "replace")
            return bool(data)
        return False

    def end(self, how: str | int) -> int:
        """End it by what is typed or by a signal; its exit code."""
        if isinstance(how, str):
            os.write(self.ours, how.encode())
        else:
            os.kill(self.process.pid, how)
        while self.read() and self.process.poll() is None:
            pass
        code = self.process.wait(20)
        while select.select([self.ours], [], [], 0)[0] and self.read():
            pass
        os.close(self.ours)
        return code


def test_a_live_screen_follows_the_run_and_leaves_the_terminal_as_it_was(
    fab: Fab, running: status.RunDir
) -> None:
    terminal = Terminal(fab, "watch")
    first = terminal.until("\x1b[?1049h", "training", "loss", "▁", "memory", "0001-demo")
    assert "\x1b[?25l" in first
    written = steps(running)
    until(
        lambda: (
            terminal.read() and max(map(int, re.findall(r"step (\d+)/", terminal.seen)), default=0) > written
        )
    )
    assert terminal.end("\x03") == 130
    assert terminal.seen.index("\x1b[?1049l") >= 0
    assert "\x1b[?25h" in terminal.seen
    assert "Traceback" not in terminal.seen
    assert running.alive()


@pytest.mark.parametrize(("how", "code"), [("\x03", 130), (signal.SIGTERM, 143)])
def test_status_refreshes_in_place_and_leaves_the_terminal_as_it_was(
    fab: Fab, running: status.RunDir, how: str | int, code: int
) -> None:
    terminal = Terminal(fab, "status", "--watch", "--interval", "1")
    terminal.until("\x1b[?1049h\x1b[?25l", "0001-demo", "training")
    shown = terminal.until("\x1b[H", "training", "\x1b[J")
    assert "\x1b[2J" not in shown  # a cleared screen would flicker
    assert terminal.end(how) == code
    assert terminal.seen.rstrip().endswith("\x1b[?25h\x1b[?1049l")
    assert running.alive()


def test_without_a_terminal_status_prints_again_and_again_and_watch_says_what_to_do(
    fab: Fab, running: status.RunDir
) -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with fab.begin("status", "--watch", "--interval", "1", **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        seen = []
        while sum("0001-demo  training" in line for line in seen) < 2:
            seen.append(process.stdout.readline())
        assert sum(line.startswith("── ") for line in seen) == 2
        assert "\x1b" not in "".join(seen)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr.read() == ""
    done = fab.run("watch")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "fab watch draws a live screen, which needs a terminal; fab status --watch prints without one\n"
    )


def test_two_runs_are_compared_and_one_becomes_the_reference(fab: Fab, running: status.RunDir) -> None:
    other = fab.place.run_dir()
    write_records(other, 2.0)
    said = fab.ok("compare", "0001-demo", "0002-demo", "--plot", str(fab.root / "x.png"))
    assert said.startswith("0002-demo is 50 % slower than 0001-demo: target regressed, 900 → 1,900 ms a step")
    assert (fab.root / "x.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(fab.ok("compare", "0001-demo", "0002-demo", "--json"))["phases"][0]["name"] == "target"
    assert fab.ok("reference", "demo") == "0001-demo with 9,000 tok/s is the reference of demo on localhost\n"
    written = json.loads((fab.place.root / "names" / "demo" / "reference.json").read_text())
    assert (written["run_id"], written["tokens_per_second"], written["memory_peak"]) == ("0001-demo", 9000, 9)
    assert fab.run("reference", "demo", "--clear").returncode == 0
    assert not (fab.place.root / "names" / "demo" / "reference.json").exists()
    done = fab.run("compare", "0001-demo", "0009-demo")
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        2, "there is no run 0009-demo on localhost; did you mean 0002-demo or 0001-demo?",
    )  # fmt: skip


@pytest.mark.usefixtures("starts_python")
def test_a_stream_that_is_lost_is_taken_up_again(
    fab: Fab, running: status.RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ends the program on the host: the screen goes on, and the program goes with its listener."""
    monkeypatch.setenv("DRAFTHOUSE_STATE", str(fab.place.root))
    others = streams()  # of tests before this one
    listener = newest.Newest([target.one(None, fab.root)], None, None, 0.2, points=10, lines=3)
    try:
        (first,) = until(lambda: [one for one in listener.heard() if one.rows])
        assert first.rows[0].run_id == "0001-demo"
        assert len(first.curves["0001-demo"]) == 10
        assert len(first.logs["0001-demo"]) == 3
        (pid,) = streams() - others
        os.kill(pid, signal.SIGKILL)
        until(lambda: streams() - others - {pid})
        until(lambda: (one := listener.heard()[0]).at > first.at + 1 and not one.note)
    finally:
        listener.close()
    until(lambda: not streams() - others)


def streams() -> set[int]:
    """Our children that are streams: Python with the loader, and nothing else on the command line."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and words[0] == os.fsencode(sys.executable) and b"-c" in words:
                found.add(int(entry.name))
    return found


def test_the_end_of_a_log_is_its_last_states(tmp_path: Path) -> None:
    run = status.allocate_run(tmp_path, "demo")
    run.log.mkdir()
    (run.log / f"{0:020d}.log").write_bytes(b"first\n10%\r20%\r\nmore \xff\n\n" + b"x" * 1000)
    assert live.last_lines(str(run.path), 4) == ["20%", "more \ufffd", "x" * live.LINE]
    assert live.last_lines(str(tmp_path / "none"), 3) == []
