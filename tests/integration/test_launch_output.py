"""Every byte that a trainer prints is in the log and on stdout, at once, and nothing stands in its way."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import signal
import subprocess
import sys

import pytest
from launching import gone, launched, make_run, python, wait_for, without_notes

from trainer.logfile import list_segments
from trainer.status import RunDir

pytestmark = pytest.mark.slow

HOLD = """
import os, time
def hold(name):
    while not os.path.exists(os.path.join(os.environ["DRAFTHOUSE_RUN_DIR"], name)):
        time.sleep(0.005)
"""


def test_the_banner_comes_first_and_proves_that_nothing_is_held_back(tmp_path):
    command = [sys.executable, "-u", "-S", "-c", "import time; print('first'); time.sleep(0.2)"]
    with launched(tmp_path, command, release={"id": "0123456789ab"}) as run:
        assert run.finish().code == 0
    lines = run.raw_log.decode().splitlines()
    assert lines[0].startswith(
        "── drafthouse run 0001-demo · attempt 1 · release 0123456789ab · no git · no image"
    )
    assert re.search(r"stdout unbuffered \(PYTHONUNBUFFERED=1, -u; from /proc/\d+\)", lines[0])
    assert lines[1] == "first"
    assert run.stdout == run.raw_log


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            [sys.executable, "-I", "-c", "import time; time.sleep(0.3)"],
            "stdout BUFFERED (-I makes Python ignore",
        ),
        (["sleep", "0.3"], "stdout unknown: sleep is not Python"),
    ],
)
def test_the_banner_says_when_output_is_held_back_or_cannot_be_judged(tmp_path, command, words):
    with launched(tmp_path, command) as run:
        run.finish()
    assert words in run.notes[0]


def test_the_banner_waits_for_a_wrapper_to_become_python_but_never_with_a_line(tmp_path):
    """A wrapper that takes a while is told of when it is through."""
    wrapper = [
        "sh",
        "-c",
        'echo early; until [ -e "$DRAFTHOUSE_RUN_DIR/go" ]; do sleep 0.02; done; exec "$@"',
        "sh",
        "env",
        "-u",
        "PYTHONUNBUFFERED",
    ]
    quick = ["env", *python("import time; time.sleep(0.3)")]
    slow = [*wrapper, *python("import time; time.sleep(600)")]
    with launched(tmp_path / "a", quick) as first, launched(tmp_path / "b", slow) as second:
        first.finish()
        second.wait_for_log(b"early")
        (tmp_path / "b" / "go").touch()
        second.wait_for_log(b"has become python")
    assert "stdout unbuffered (PYTHONUNBUFFERED=1; from /proc/" in first.notes[0]
    assert re.search(r"stdout unknown: \w*sh is not Python", second.notes[0])
    assert "stdout BUFFERED (neither PYTHONUNBUFFERED nor -u; from /proc/" in second.notes[1]


def test_what_the_trainer_printed_is_counted_without_launchs_own_lines(tmp_path):
    source = HOLD + "print('eleven here', flush=True); hold('go'); print('four', flush=True); hold('end')"
    with launched(tmp_path, python(source), tty=True) as run:
        run.wait_for_log(b"eleven here")
        run.directory.ask("dump-stacks", by="ada@desk")  # launch answers with lines of its own
        state = wait_for(lambda: (told := run.directory.launch()).answered and told)
        assert (state.output, state.offset) == (12, len(run.raw_log))
        assert state.output_time <= state.time
        (tmp_path / "go").touch()
        run.wait_for_log(b"four")
        assert len(run.raw_log) - state.offset == 5
        (tmp_path / "end").touch()
        run.finish()


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"PYTHONBUFFERED": "1"}, "PYTHONUNBUFFERED is meant"),
        ({"PYTHONUNBUFFERED": "0"}, "PYTHONUNBUFFERED=0 was given, which means off"),
        ({"PYTHONUNBUFFERED": ""}, "PYTHONUNBUFFERED=(empty) was given, which means off"),
    ],
)
def test_a_wrong_setting_is_named_and_put_right(tmp_path, environment, words):
    command = [
        sys.executable,
        "-S",
        "-c",
        "import os, time; print(os.environ['PYTHONUNBUFFERED']); time.sleep(0.2)",
    ]
    with launched(tmp_path, command, environment=environment) as run:
        run.finish()
    assert words in run.notes[0]
    assert "stdout unbuffered" in run.notes[0]
    assert run.log == b"1\n"


def test_a_line_is_in_the_log_and_on_stdout_while_the_trainer_goes_on(tmp_path):
    command = [sys.executable, "-S", "-c", HOLD + "print('now'); hold('go'); print('later')"]
    with launched(tmp_path, command) as run:
        run.wait_for_log(b"now\n")
        assert run.process.stdout.readline().startswith("──".encode())
        assert run.process.stdout.readline() == b"now\n"
        (tmp_path / "go").touch()
        assert run.finish().code == 0
    assert run.log == b"now\nlater\n"


def test_stdout_and_stderr_keep_their_order(tmp_path):
    source = "import sys\nfor n in range(200):\n print(n, file=(sys.stdout, sys.stderr)[n % 2])"
    with launched(tmp_path, [sys.executable, "-S", "-c", source]) as run:
        run.finish()
    assert run.log.split() == [str(n).encode() for n in range(200)]


@pytest.mark.parametrize(
    "source",
    [
        "sys.stdout.buffer.write(b'x' * 49_999 + b'\\n')",
        "sys.stdout.buffer.write(bytes(range(256)) * 100 + b'\\n')",
        "sys.stdout.buffer.write(os.urandom(100_000).replace(b'\\r', b'') + b'\\n')",
    ],
)
def test_long_lines_and_binary_pass_byte_for_byte(tmp_path, source):
    command = python(f"import os, sys\n{source}")
    with launched(tmp_path, command) as run:
        record = run.finish()
    assert run.stdout == run.raw_log
    assert record.log_bytes == len(run.raw_log)


def test_a_progress_bar_shows_within_seconds_on_stdout_and_exactly_in_the_log(tmp_path):
    source = HOLD + "print('\\r 10%\\r 20%', end=''); hold('go'); print('\\r100%', end='')"
    with launched(tmp_path, [sys.executable, "-S", "-c", source]) as run:
        assert run.process.stdout.readline().startswith("──".encode())
        assert run.process.stdout.readline() == b" 20%\n"  # although the trainer never printed a newline
        (tmp_path / "go").touch()
        run.finish()
    assert run.stdout.startswith(b"100%\n")
    assert run.raw_log.split(b"\n")[1] == b"\r 10%\r 20%\r100%"


def test_an_unfinished_line_shows_while_the_trainer_is_busy(tmp_path):
    source = HOLD + "print('loading ...', end='', flush=True); hold('go'); print(' done')"
    with launched(tmp_path, [sys.executable, "-S", "-c", source]) as run:
        run.process.stdout.readline()
        assert run.process.stdout.readline() == b"loading ...\n"
        (tmp_path / "go").touch()
        run.finish()
    assert run.log == b"loading ... done\n"
    assert run.stdout.startswith(b" done\n")


@pytest.mark.parametrize(
    "last",
    ["os.kill(os.getpid(), 9)", "os.abort()", "raise RuntimeError('last words')", "os._exit(7)"],
)
def test_the_last_words_before_a_crash_are_kept(tmp_path, last):
    with launched(tmp_path, python(f"import os\nprint('last words', end='')\n{last}")) as run:
        record = run.finish()
    assert record.reason == "failed"
    assert any("last words" in line for line in record.last_lines)
    assert b"last words" in run.raw_log
    assert b"last words" in run.stdout


def test_what_was_printed_before_the_end_is_kept_also_if_launch_comes_late(tmp_path):
    size = 900_000  # what the pipe alone holds
    source = HOLD + f"hold('go'); os.write(1, b'x' * {size}); os.kill(os.getpid(), 9)"
    with launched(tmp_path, python(source)) as run:
        trainer = run.trainer_pid()
        os.kill(run.launch_pid(), signal.SIGSTOP)
        (tmp_path / "go").touch()
        wait_for(lambda: gone(trainer), "the end of the trainer")
        os.kill(run.launch_pid(), signal.SIGCONT)
        run.finish()
    assert b"x" * size in run.raw_log
    assert b"x" * size in run.stdout


def test_a_flood_that_nobody_reads_is_no_obstacle_to_a_stop(tmp_path):
    with launched(tmp_path, ["yes"], segment_bytes=1 << 20, segments=3) as run:
        wait_for(lambda: (state := run.directory.launch()) and state.stdout_dropped, "stdout to be full")
        run.term()
        assert run.process.wait(60) == 143
        assert run.directory.exit().log_bytes > 8 << 20
        assert len(list_segments(run.directory.log)) == 3


def test_a_stdout_that_nobody_reads_never_stops_the_trainer(tmp_path):
    size = 50 << 20
    source = """
import hashlib, sys
digest, left, n = hashlib.sha256(), int(sys.argv[1]), 0
while left:
    block = b"".join(b"%09d %s\\n" % (n + i, b"x" * 89) for i in range(1000))[:left]
    n += 1000
    left -= len(block)
    digest.update(block)
    sys.stdout.buffer.write(block)
open(sys.argv[2], "w").write(digest.hexdigest())
"""
    command = [*python(source), str(size), str(tmp_path / "digest")]
    with launched(tmp_path, command, segments=20, segment_bytes=8 << 20) as run:
        assert run.process.wait(60) == 0  # with a full pipe on stdout
        record = run.directory.exit()
        got = run.process.stdout.read()
    log = run.log
    assert len(log) == size
    assert hashlib.sha256(log).hexdigest() == (tmp_path / "digest").read_text()
    assert len(list_segments(run.directory.log)) == 7
    assert record.stdout_dropped > 400_000
    assert run.directory.launch().stdout_dropped == record.stdout_dropped
    assert without_notes(got) == log[: len(without_notes(got))]
    assert without_notes(got).count(b"\n") + record.stdout_dropped >= log.count(b"\n")


def test_what_stdout_missed_is_told_there_once_it_flows_again(tmp_path):
    source = (
        HOLD
        + """
for n in range(200_000): print("%06d" % n, "x" * 60)
print("all printed"); hold("go"); print("the end")
"""
    )
    command = [
        sys.executable,
        "-S",
        "-c",
        "import sys; sys.stdout = open(1, 'w', buffering=1 << 16)" + source,
    ]
    command[3] = command[3].replace('print("all printed")', 'print("all printed", flush=True)')
    with launched(tmp_path, command) as run:
        run.wait_for_log(b"all printed\n")
        (tmp_path / "go").touch()
        record = run.finish()
    told = [line for line in run.stdout.decode().splitlines() if "records are missing here" in line]
    counts = [int(re.search(r"([\d,]+) records", line)[1].replace(",", "")) for line in told]
    assert sum(counts) == record.stdout_dropped > 0
    log_lines = run.raw_log.splitlines()
    out_lines = [line for line in run.stdout.splitlines() if b"records are missing here" not in line]
    assert len(out_lines) + record.stdout_dropped == len(log_lines)
    assert set(out_lines) <= set(log_lines)


@pytest.mark.parametrize("how", ["closed", "without a reader", "full"])
def test_a_stdout_that_is_gone_ends_nothing(tmp_path, how):
    command = python("for n in range(1000): print(n)")
    reading, writing = os.pipe()
    os.close(reading)
    with open("/dev/full", "wb") as full:
        stdout = {"closed": subprocess.PIPE, "without a reader": writing, "full": full}[how]
        wrapper = ["sh", "-c", 'exec "$@" >&-', "sh"] if how == "closed" else None
        with launched(tmp_path, command, wrapper=wrapper, stdout=stdout) as run:
            os.close(writing)
            assert run.finish().code == 0
    assert run.log.split() == [str(n).encode() for n in range(1000)]


def test_the_log_is_cut_into_segments_at_records_and_indexed(tmp_path):
    command = python("for n in range(20_000): print('line %06d' % n)")
    with launched(tmp_path, command, segment_bytes=10_000, segments=5) as run:
        record = run.finish()
    segments = list_segments(run.directory.log)
    assert len(segments) == 5
    for (offset, path), (following, _) in itertools.pairwise(segments):
        assert path.stat().st_size == following - offset <= 10_000
        assert path.read_bytes().endswith(b"\n")
    assert segments[-1][0] + segments[-1][1].stat().st_size == record.log_bytes
    kept = run.log.splitlines()
    assert kept == [b"line %06d" % n for n in range(20_000 - len(kept), 20_000)]
    first, *others = [int(line.split()[1]) for line in (run.directory.log / "index").read_text().splitlines()]
    assert first <= record.log_bytes  # it tells when the oldest segment begins, so it may be about what went
    assert all(segments[0][0] < offset <= record.log_bytes for offset in others)


@pytest.mark.slow
def test_a_worker_that_holds_its_output_back_is_named(tmp_path):
    source = (
        HOLD
        + """
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-I", "-c", "import time; print('hidden'); time.sleep(600)"])
hold("go")
worker.kill()
"""
    )
    with launched(tmp_path, python(source)) as run:
        run.wait_for_log(b"holds its output back: -I makes Python ignore PYTHONUNBUFFERED")
        (tmp_path / "go").touch()
        run.finish()


@pytest.mark.root
def test_a_full_disk_costs_log_lines_that_are_counted_and_told_and_never_the_trainer(tmp_path):
    source = """
import glob, os, sys, time
room = os.environ["DRAFTHOUSE_RUN_DIR"]
out = open(1, "w", buffering=1 << 16)
for n in range(60_000): out.write("before %06d %s\\n" % (n, "x" * 50))
out.flush()
os.unlink(room + "/ballast")
def told():
    return any(b"bytes are missing here" in open(p, "rb").read() for p in glob.glob(room + "/log/*.log"))
while not told(): time.sleep(0.01)
for n in range(100): print("after", n, file=out)
out.flush()
open(room + "/ballast", "wb").write(b"x" * (os.statvfs(room).f_bavail * os.statvfs(room).f_bsize))
"""
    prepared, room = make_run(tmp_path / "prepared", python(source)).path, tmp_path / "room"
    room.mkdir()
    script = """
    set -e
    mount -t tmpfs -o size=4m tmpfs room
    cp prepared/run.json room/
    head -c 2000000 /dev/zero > room/ballast
    "$1" -u -m trainer.launch --run-dir room || failed=$?
    cp -r room copy
    exit $failed
    """
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    answer = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", sys.executable],
        cwd=prepared.parent,
        env=environment,
        capture_output=True,
        timeout=60,
    )
    assert answer.returncode == 0, answer.stderr
    everything = b"".join(b"before %06d %s\n" % (n, b"x" * 50) for n in range(60_000)) + b"".join(
        b"after %d\n" % n for n in range(100)
    )
    assert without_notes(answer.stdout) == everything  # stdout has it all
    copy = RunDir(tmp_path / "copy")
    record = copy.exit()
    assert record is not None  # although the disk was full again at the end
    data = b"".join(path.read_bytes() for _, path in list_segments(copy.log))
    assert record.log_missing > 100_000
    assert record.log_bytes == len(data)
    told = [int(n.replace(b",", b"")) for n in re.findall(rb"([\d,]+) bytes are missing here", data)]
    assert sum(told) <= record.log_missing
    before, _, after = data.partition(b"bytes are missing here")
    begin = before.index(b"before 000000")
    kept = before[begin : before.rindex("\n──".encode())]
    assert kept == everything[: len(kept)]
    assert without_notes(b"\n" + after.partition(b"\n")[2]).split() == everything[-1090:].split()[-200:]
