"""deploy/logs.py with real runs: every byte once, in order, until the run ends."""

from __future__ import annotations

import io
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import deployed
import pytest
from deployed import CHECKOUT, HOST, steps, until

from deploy import log_reader, logs, switch
from deploy.errors import DeployError
from trainer import status

pytestmark = pytest.mark.slow

COUNT = "import sys, time\nfor n in range({n}):\n print('line', n, flush=True)\n time.sleep({pause})\n"
WAITS = "import time\nprint('hello', flush=True)\ntime.sleep(1000)"


@pytest.fixture
def place(tmp_path):
    yield from deployed.place(tmp_path)


class Sink(io.BytesIO):
    """Where a follower writes, readable while it does."""

    def text(self) -> str:
        return self.getvalue().decode()


class Following(threading.Thread):
    """A follower at work."""

    def __init__(self, call, *arguments, **options) -> None:
        super().__init__(daemon=True)
        self.sink, self.notes, self.code, self.ended = Sink(), [], None, False
        self._call = lambda: call(*arguments, out=self.sink, note=self.notes.append, **options)
        self.start()

    def run(self) -> None:
        self.code = self._call()
        self.ended = True

    def end(self) -> int | None:
        self.join(90)
        assert self.ended
        return self.code


def lines(text: str) -> list[str]:
    """Those that the trainer printed; launch's own begin with a rule."""
    return [line for line in text.splitlines() if not line.startswith("──")]


def written(run) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(run.log.glob("*.log")))


def test_a_run_is_followed_from_its_banner_to_its_exit_code(place):
    run = place.run_dir(COUNT.format(n=50, pause=0.01) + "sys.exit(3)")
    following = Following(logs.follow, HOST, str(run.path))
    place.start(run)
    assert following.end() == 3
    assert "drafthouse run 0001-demo" in following.sink.text().splitlines()[0]
    assert lines(following.sink.text()) == [f"line {n}" for n in range(50)]
    assert following.sink.getvalue() == written(run)
    assert following.notes == []


def test_a_run_that_has_ended_is_shown_whole(place):
    run = place.run_dir(COUNT.format(n=3, pause=0))
    place.start(run)
    until(lambda: run.exit() and not run.alive())
    following = Following(logs.follow, HOST, str(run.path))
    assert following.end() == 0
    assert following.sink.getvalue() == written(run)


def test_only_the_last_lines_are_shown_when_asked_and_following_goes_on_from_there(place):
    more = "open(os.environ['GO']).read()\nprint('more')"
    code = "import os\n" + COUNT.format(n=1000, pause=0) + more
    run = place.run_dir(code, environment={"GO": str(place.root / "go")})
    os.mkfifo(place.root / "go")
    place.start(run)
    until(lambda: written(run).endswith(b"line 999\n"))
    following = Following(logs.follow, HOST, str(run.path), lines=3)
    until(lambda: following.sink.text().endswith("line 999\n"))
    (place.root / "go").write_text("")
    assert following.end() == 0
    assert lines(following.sink.text()) == ["line 997", "line 998", "line 999", "more"]


def test_following_goes_on_at_a_byte_offset_without_losing_or_repeating_a_byte(place):
    run = place.run_dir(COUNT.format(n=200, pause=0))
    place.start(run)
    until(lambda: run.exit() and not run.alive())
    whole = written(run)
    for offset in (0, 1, 500, len(whole) - 1, len(whole)):
        sink = Sink()
        assert logs.follow(HOST, str(run.path), from_offset=offset, out=sink) == 0
        assert sink.getvalue() == whole[offset:]


def test_without_following_what_is_there_is_shown_and_the_run_is_left_alone(place):
    run = place.run_dir(WAITS)
    place.start(run)
    until(lambda: b"hello" in written(run))
    sink = Sink()
    assert logs.follow(HOST, str(run.path), out=sink, follow=False) is None
    assert "hello" in sink.text()
    assert run.alive()


def test_nothing_is_lost_over_many_rotations(place):
    """CASES 10."""
    code = "import sys\nfor n in range(20000):\n sys.stdout.write('%d %s\\n' % (n, 'x' * (n % 97)))\n"
    run = place.run_dir(code, segment_bytes=8192, segments=1000)
    following = Following(logs.follow, HOST, str(run.path))
    place.start(run)
    assert following.end() == 0
    assert len(list(run.log.glob("*.log"))) > 50
    assert [int(line.split()[0]) for line in lines(following.sink.text())] == list(range(20000))


def test_bytes_that_rotation_removed_before_they_could_be_read_are_counted(place):
    code = "for n in range(20000):\n print(n, 'x' * 60)\n"
    run = place.run_dir(code, segment_bytes=8192, segments=2)
    place.start(run)
    until(lambda: run.exit() and not run.alive())
    following = Following(logs.follow, HOST, str(run.path), from_offset=0)
    assert following.end() == 0
    assert len(following.notes) == 1
    gone = int(re.search(r"([\d,]+) bytes of this log are gone", following.notes[0])[1].replace(",", ""))
    assert gone + len(following.sink.getvalue()) == run.exit().log_bytes
    assert lines(following.sink.text())[-1].startswith("19999 ")


def test_a_line_over_sixteen_kilobytes_arrives_whole(place):
    """CASES 9."""
    run = place.run_dir("print('é' * 50_000)")
    following = Following(logs.follow, HOST, str(run.path))
    place.start(run)
    assert following.end() == 0
    assert lines(following.sink.text()) == ["é" * 50_000]


def test_a_line_is_there_while_the_run_waits_for_its_reader(place, tmp_path):
    """CASES 24: the trainer prints a line and goes on only when the follower has shown it."""
    go = tmp_path / "go"
    os.mkfifo(go)
    code = "import os\nfor n in range(5):\n print('line', n)\n open(os.environ['GO']).read()\n"
    run = place.run_dir(code, environment={"GO": str(go)})
    following = Following(logs.follow, HOST, str(run.path))
    place.start(run)
    for n in range(5):
        until(lambda n=n: following.sink.text().endswith(f"line {n}\n"))
        go.write_text("")
    assert following.end() == 0


def test_a_second_attempt_appears_in_the_same_log_under_its_own_banner(place, tmp_path):
    """CASES 11."""
    code = (
        "import os, sys\n"
        "print('attempt', os.environ['DRAFTHOUSE_ATTEMPT'])\n"
        "sys.exit(os.environ['DRAFTHOUSE_ATTEMPT'] == '1')"
    )
    run = place.run_dir(code, restart_attempts=1)
    following = Following(logs.follow, HOST, str(run.path))
    place.start(run)
    assert following.end() == 0
    text = following.sink.text()
    assert (
        text.index("attempt 1 ·")
        < text.index("\nattempt 1\n")
        < text.index("attempt 2 ·")
        < text.index("\nattempt 2\n")
    )


def test_a_run_whose_launch_was_killed_ends_with_a_sentence(place):
    run = place.run_dir(WAITS)
    place.start(run)
    following = Following(logs.follow, HOST, str(run.path))
    until(lambda: "hello" in following.sink.text())
    os.kill(run.launch().pid, signal.SIGKILL)
    assert following.end() == 1
    assert following.notes == [
        "── run 0001-demo ended without a record of its end: killed, or the machine restarted"
    ]


def test_a_run_directory_that_is_removed_ends_the_following(place):
    run = place.run_dir("print('hello')")
    place.start(run)
    until(lambda: run.exit() and not run.alive())
    (run.path / "exit.json").unlink()
    run.write_launch(run.launch())
    switch_to = run.path.with_name("moved")
    os.rename(run.path, switch_to)
    following = Following(logs.follow, HOST, str(run.path))
    assert following.end() == 1
    assert following.notes == ["── the directory of run 0001-demo is gone"]


def test_a_run_that_is_not_started_because_its_switch_failed_is_not_waited_for(place):
    run = place.run_dir()
    following = Following(logs.follow, HOST, str(run.path))
    switch = {"outcome": "failed", "reason": "the old run cannot be stopped"}
    status.write_json(run.path / "switch.json", switch)  # whole, as the switch writes it
    assert following.end() == 1
    assert following.notes == ["── run 0001-demo was not started: the old run cannot be stopped"]


def test_a_foreign_file_in_the_place_of_the_record_ends_with_a_sentence(place):
    run = place.run_dir()
    (run.path / "exit.json").write_text("{half")
    following = Following(logs.follow, HOST, str(run.path))
    assert following.end() == 1
    assert "cannot be followed" in following.notes[0]


def test_what_is_written_between_the_last_look_and_the_end_is_shown(place, monkeypatch):
    run = place.run_dir("print('hello')")
    place.start(run)
    until(lambda: run.exit() and not run.alive())
    end = log_reader.Follower.end

    def late(self, follow):
        with open(run.log / f"{0:020d}.log", "ab") as file:
            file.write(b"late\n")
        return end(self, follow)

    monkeypatch.setattr(log_reader.Follower, "end", late)
    sink = Sink()
    assert logs.follow(HOST, str(run.path), out=sink) == 0
    assert lines(sink.text()) == ["hello", "late"]


# -- by name -----------------------------------------------------------------------------------------------


def test_a_name_is_followed_across_a_restart_with_a_line_between(place):
    """CASES 11. Never a line of the old run below the banner of the new one."""
    old = place.run_dir()
    place.start(old)
    until(lambda: steps(old))
    following = Following(logs.follow_name, HOST, str(place.root), "demo")
    until(lambda: "step" in following.sink.text())
    new = place.run_dir(COUNT.format(n=3, pause=0))
    switch.start(HOST, place.spec(new, old, heartbeats=False))
    assert following.end() == 0
    text = following.sink.text()
    before, after = text.split("── drafthouse run 0002-demo")
    assert "saved and out" in before
    assert lines("── " + after) == ["line 0", "line 1", "line 2"]
    assert following.notes == ["── 0001-demo stopped with exit code 0 · 0002-demo follows"]


def test_the_run_in_progress_is_shown_although_a_newer_one_was_never_started(place):
    run = place.run_dir(WAITS)
    place.start(run)
    until(lambda: b"hello" in written(run))
    failed = place.run_dir()
    (failed.path / "switch.json").write_text('{"outcome": "failed", "reason": "no"}')
    following = Following(logs.follow_name, HOST, str(place.root), "demo")
    until(lambda: "hello" in following.sink.text())
    os.kill(run.launch().pid, signal.SIGTERM)
    assert following.end() == 143
    assert following.notes == []


def test_a_name_without_a_run_is_an_error(place):
    with pytest.raises(DeployError, match="no run of demo"):
        logs.follow_name(HOST, str(place.root), "demo", out=Sink())


# -- what the reader's end does -----------------------------------------------------------------------------

CLIENT = """
import sys
from deploy import logs
from deploy.host import Local
try:
    code = logs.follow(Local(), sys.argv[1], out=sys.stdout.buffer)
except KeyboardInterrupt:
    sys.exit(130)
sys.exit(0 if code is None else code)
"""


def client(run, **options) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", CLIENT, str(run.path)], cwd=CHECKOUT, **options)


def test_a_reader_that_goes_away_ends_the_following_quietly_also_while_the_log_is_quiet(place):
    """``fab tail | head -1``."""
    run = place.run_dir(WAITS)
    place.start(run)
    follower = client(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert b"drafthouse run" in follower.stdout.readline()
    follower.stdout.close()
    assert follower.wait(60) == 0
    assert follower.stderr.read() == b""
    assert run.alive()


def test_ctrl_c_ends_the_following_and_the_run_goes_on(place):
    """CASES 4 and 5."""
    run = place.run_dir()
    place.start(run)
    follower = client(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert b"drafthouse run" in follower.stdout.readline()
    follower.send_signal(signal.SIGINT)
    _, err = follower.communicate(timeout=60)
    assert (follower.returncode, err) == (130, b"")
    before = steps(run)
    until(lambda: steps(run) > before)


def test_a_terminal_gets_colours_but_no_other_controls_and_a_pipe_gets_every_byte(place):
    run = place.run_dir(r"print('\x1b[31mred\x1b[0m \x1b]0;title\x07 \x1b[2J')")
    place.start(run)
    until(lambda: run.exit() and not run.alive())
    piped = subprocess.run([sys.executable, "-c", CLIENT, str(run.path)], cwd=CHECKOUT, capture_output=True)
    assert piped.stdout == written(run)
    ours, theirs = pty.openpty()
    follower = client(run, stdout=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:
            break
        if not chunk:
            break
        shown += chunk
    os.close(ours)
    follower.wait(60)
    assert b"\x1b[31mred\x1b[0m ^[]0;title^G ^[[2J" in shown


@pytest.mark.slow
def test_two_hundred_megabytes_pass_in_bounded_memory(place):
    """CASES 7. The follower reports its own largest size; Python itself takes some 20 MB of that."""
    code = (
        "import sys\n"
        "line = b'x' * 99 + b'\\n'\n"
        "for _ in range(2000):\n"
        " sys.stdout.buffer.write(line * 1000)\n"
    )
    run = place.run_dir(code)
    place.start(run)
    usage = "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0], file=sys.stderr)\n"  # kB
    reporting = CLIENT.replace("sys.exit(0 if", usage + "sys.exit(0 if")
    follower = subprocess.Popen(
        [sys.executable, "-c", reporting, str(run.path)],
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    size, began = 0, time.monotonic()
    while chunk := follower.stdout.read(1 << 20):
        size += len(chunk)
    print(f"{size / 1e6 / (time.monotonic() - began):.0f} MB/s")
    assert follower.wait(60) == 0
    assert size == run.exit().log_bytes > 200_000_000
    assert int(follower.stderr.read()) < 80_000
    shutil.rmtree(run.path)
