"""`fab tail`: from run to run, over lost links, since a moment, by expression, on several hosts."""

from __future__ import annotations

import io
import os
import pty
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import small_runs
from deployed import HOST, until
from fabbed import FAB, Fab, project
from small_runs import alive, new_run

from deploy import log_reader, logs
from deploy.errors import DeployError
from deploy.host import HostError, Local
from trainer import status
from trainer.logfile import Log


@pytest.fixture
def fab(tmp_path):
    yield from project(tmp_path)


def written(run: status.RunDir) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(run.log.glob("*.log")))


def ended(root: Path, data: bytes, index: str = "") -> status.RunDir:
    """A run that is over."""
    run = new_run(root)
    with alive(run):
        log = Log(run.log, 64 << 20, 16)
        log.write(data)
        log.close()
    if index:
        (run.log / "index").write_text(index)
    return run


def shown(root: Path, **more) -> tuple[str, list[str]]:
    out, notes = io.BytesIO(), []
    logs.follow_name(HOST, str(root), "demo", out=out, note=notes.append, **more)
    return out.getvalue().decode(), notes


# -- from run to run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 10))])
def test_no_line_of_a_run_ever_stands_under_another_runs_banner(tmp_path, monkeypatch, seed) -> None:
    """1,000 restarts in ten names: to list the runs of one takes longer the more there are."""
    count = 100
    monkeypatch.setattr(log_reader, "CHECK", 0.003)
    monkeypatch.setattr(log_reader, "SETTLE", 0.005)
    out, notes = io.BytesIO(), []
    with subprocess.Popen([sys.executable, small_runs.__file__, tmp_path, str(count), str(seed)]) as restarts:
        until(lambda: any(map(log_reader.begun, status.list_runs(tmp_path / "runs"))))
        from_the_first = {"since": 1.0}
        logs.follow_name(HOST, str(tmp_path), "demo", **from_the_first, out=out, note=notes.append)
    assert restarts.returncode == 0
    runs = status.list_runs(tmp_path / "runs")
    assert len(runs) == count

    banner, lines = b"", 0
    rule = "── ".encode()
    for line in out.getvalue().splitlines():
        if line.startswith(rule + b"drafthouse run "):
            banner = line.split()[3]
        else:
            name = line.removeprefix(rule + b"run ")
            assert name.startswith(banner) or banner.startswith(name)
            lines += 1
    parts = [written(run) for run in runs]
    whole = [part if part.endswith(b"\n") else part + b"\n" for part in parts[:-1]]
    assert out.getvalue() == b"".join(whole) + parts[-1]
    assert lines > 5 * count
    assert len([note for note in notes if note.endswith(" follows")]) == count - 1


def test_without_following_the_run_in_progress_is_shown_and_not_the_one_that_is_prepared(tmp_path) -> None:
    ended(tmp_path, b"old\n")
    ended(tmp_path, b"new\n")
    new_run(tmp_path)
    assert shown(tmp_path, follow=False) == ("new\n", [])


# -- over lost links ---------------------------------------------------------------------------------------


class Elsewhere(Local):
    """This machine as another one: its readers are processes that can be lost."""

    is_local = False

    def __init__(self) -> None:
        super().__init__("gpu-box")
        self.opened: list[subprocess.Popen[bytes]] = []

    def open_stream(self, argv, env=None):
        self.opened.append(super().open_stream(argv, env))
        return self.opened[-1]


@pytest.mark.parametrize("expression", [None, " 1"])
def test_after_each_loss_the_log_goes_on_at_the_byte_where_it_was(tmp_path, expression) -> None:
    host, out, notes, chance = Elsewhere(), io.BytesIO(), [], random.Random(1)
    runs = [new_run(tmp_path) for _ in range(2)]
    follower = threading.Thread(
        target=logs.follow_name,
        args=(host, str(tmp_path), "demo"),
        kwargs={"out": out, "note": notes.append, "grep": expression},
    )
    lost = 0
    for run in runs:
        with alive(run):
            log = Log(run.log, 50_000, 1000)
            log.write(f"── banner of {run.path.name}\n".encode())
            if run is runs[0]:
                follower.start()
            for number in range(4000):
                log.write(b"%s %d %s\n" % (run.path.name.encode(), number, b"." * chance.randrange(200)))
                if number % 1000 == 500:
                    size = len(out.getvalue())
                    log.write(b"one 1 more\nhalf of a li")
                    until(lambda size=size: len(out.getvalue()) > size)
                    host.opened[-1].kill()
                    lost += 1
                    until(lambda lost=lost: len(host.opened) == lost + 1)
                    log.write(b"ne 1\n")
            log.close()
    follower.join(60)
    assert not follower.is_alive()
    whole = b"".join(map(written, runs))
    if expression:
        kept = [x for x in whole.splitlines(True) if b" 1" in x or x.startswith("── ".encode())]
        whole = b"".join(kept)
    assert out.getvalue() == whole
    assert sum(note == "── gpu-box: the connection was lost, reconnecting" for note in notes) == lost
    back = [note for note in notes if re.fullmatch(r"── gpu-box: connected again after \d+ s", note)]
    assert len(back) == lost


# -- since -------------------------------------------------------------------------------------------------


def test_since_begins_in_the_run_that_said_something_then(tmp_path) -> None:
    ended(tmp_path, b"a\nb\n", "1000.0 0\n1100.0 2\n")
    ended(tmp_path, b"c\nd\n", "2000.0 0\n2100.0 2\n")
    new_run(tmp_path, created=2500.0)  # never began
    ended(tmp_path, b"e\nf\n", "3000.0 0\n3100.0 2\n")
    for follow in (False, True):
        assert shown(tmp_path, since=1.0, follow=follow)[0] == "a\nb\nc\nd\ne\nf\n"
        text, notes = shown(tmp_path, since=2050.0, follow=follow)
        assert text == "d\ne\nf\n"
        assert re.fullmatch(r"── run 0002-demo, the last \d.*", notes[0])
        assert notes[1] == "── 0002-demo finished with exit code 0 · 0004-demo follows"
        assert shown(tmp_path, since=3000.0, follow=follow)[0] == "e\nf\n"
        assert shown(tmp_path, since=9000.0, follow=follow)[0] == ""


def test_since_and_lines_mean_the_later_of_the_two_in_the_run_itself(tmp_path) -> None:
    ended(tmp_path, b"old\n", "1000.0 0\n")
    ended(tmp_path, b"a\nb\nc\nd\n", "2000.0 0\n2100.0 4\n")
    assert shown(tmp_path, since=500.0, lines=3)[0] == "b\nc\nd\n"
    assert shown(tmp_path, since=2100.0, lines=3)[0] == "c\nd\n"


# -- by expression -----------------------------------------------------------------------------------------


def test_lines_count_matches_and_what_launch_says_stays(tmp_path) -> None:
    text = "── drafthouse run 0001-demo\nloss 1\nnoise\nloss 2\n── note\nnoise\nloss 3\nnoise\n"
    ended(tmp_path, text.encode())
    assert shown(tmp_path, grep="loss", lines=2)[0] == "loss 2\n── note\nloss 3\n"
    assert shown(tmp_path, grep="loss")[0] == "── drafthouse run 0001-demo\nloss 1\nloss 2\n── note\nloss 3\n"
    assert shown(tmp_path, grep="loss", lines=2)[1] == ["── run 0001-demo, its last 2 matches"]


def test_only_matches_come_from_the_host(tmp_path) -> None:
    ended(tmp_path, b"noise of a log that says much\n" * 100_000 + b"a match\n")
    wanted = log_reader.Wanted(str(tmp_path), "demo", None, grep="match", follow=False)
    host, size = Elsewhere(), 0
    events = logs.there(host, wanted, print)
    for event in events:
        size += len(event.data)
    assert size < 1000


@pytest.mark.slow
def test_an_expression_that_tries_for_ever_ends_in_a_sentence_and_leaves_no_reader(
    tmp_path, monkeypatch
) -> None:
    ended(tmp_path, b"a" * 60 + b"\n")
    host = Elsewhere()
    with pytest.raises(HostError, match=r"takes more than 2 s for one line; make it simpler"):
        logs.follow_name(host, str(tmp_path), "demo", out=io.BytesIO(), grep="(a+)+$x")
    assert [process.poll() for process in host.opened] == [1]


def test_a_reader_that_older_python_runs_may_refuse_an_expression_in_one_sentence(tmp_path) -> None:
    ended(tmp_path, b"x\n")
    with pytest.raises(DeployError, match=r"gpu-box: --grep '\(' is no regular expression"):
        logs.follow_name(Elsewhere(), str(tmp_path), "demo", out=io.BytesIO(), grep="(")


# -- as people call it -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--grep", "("], "--grep '(' is no regular expression"),
        (["--since", "soon"], "--since 'soon' is no time; give a span like 90s"),
        (["--since", "2999-01-01"], "--since 2999-01-01 is in the future"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence_before_any_host_is_asked(fab: Fab, words, sentence) -> None:
    done = fab.run("tail", *words, "--host", "no-such-host.invalid")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(sentence)
    assert done.stderr.count("\n") == 1


def two_hosts(fab: Fab) -> None:
    config = (fab.root / "fabric.yaml").read_text()
    more = "  hosts:\n    a: {address: localhost}\n    bb: {address: localhost}\n"
    (fab.root / "fabric.yaml").write_text(config.replace("  hosts:\n", more))


def ended_in(fab: Fab, data: bytes) -> None:
    fab.place.root.mkdir(parents=True, exist_ok=True)
    ended(fab.place.root, data)


def test_tail_takes_its_flags_on_one_host_and_on_several(fab: Fab) -> None:
    ended_in(
        fab, "── drafthouse run 0001-demo\n".encode() + b"".join(b"loss %d\nnoise\n" % n for n in range(30))
    )
    assert fab.ok("tail", "--no-follow").splitlines() == ["loss 20", "noise", *fab_lines(21, 30)]
    assert fab.ok("tail", "--no-follow", "--grep", "loss", "--lines", "2") == "loss 28\nloss 29\n"
    assert len(fab.ok("tail", "--no-follow", "--since", "1h").splitlines()) == 61
    two_hosts(fab)
    done = fab.ok("-H", "a,bb", "tail", "--grep", "loss 2.", "--lines", "3")
    for name in ("a ", "bb"):
        mine = [line for line in done.splitlines() if line.startswith(f"{name} │ loss")]
        assert mine == [f"{name} │ loss {n}" for n in (27, 28, 29)]


def fab_lines(first: int, end: int) -> list[str]:
    return [line for n in range(first, end) for line in (f"loss {n}", "noise")]


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [[], ["-H", "a,bb"]], ids=["one", "two"])
def test_ctrl_c_and_a_terminal_that_is_not_utf_8_do_no_harm(fab: Fab, hosts) -> None:
    """In a real terminal of 8-bit signs: exit code 130, no traceback, no byte that such a terminal obeys."""
    two_hosts(fab)
    code = r"import time; print('\x1b[31mτ б \x1b]0;title\x07'); time.sleep(1000)"
    fab.file(f"command: [python, -c, {code!r}]\ngrace_seconds: 1\nsettle_seconds: 0\n".replace("\\\\", "\\"))
    fab.ok("deploy", "--no-follow")
    ours, theirs = pty.openpty()
    tail = subprocess.Popen(
        [*FAB, *hosts, "tail"],
        cwd=fab.root,
        env=fab.environment(PYTHONIOENCODING="latin-1", TERM="xterm"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    os.close(theirs)
    seen = b""
    while seen.count(b"title") < max(len(hosts), 1):
        seen += os.read(ours, 65_536)
    began = time.monotonic()
    tail.send_signal(signal.SIGINT)
    assert tail.wait(60) == 130
    print(f"ended {time.monotonic() - began:.2f} s after Ctrl-C", file=sys.stderr)
    try:
        while more := os.read(ours, 65_536):
            seen += more
    except OSError:
        pass
    os.close(ours)
    assert b"Traceback" not in seen
    assert b"\x1b[31m? ? ^[]0;title^G" in seen
    assert not re.search(rb"[\x80-\x9f]", seen)
    assert not re.search(rb"\x1b(?!\[[0-9;]*m)", seen)
    assert seen.count(b"\x1b[0m") >= max(len(hosts), 1)  # the colour was taken back
    assert fab.runs[-1].alive()


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["", "-H a,bb"], ids=["one", "two"])
def test_a_pipe_to_head_ends_quietly_also_while_the_log_is_quiet(fab: Fab, hosts) -> None:
    two_hosts(fab)
    command = "command: [python, -c, 'import time; print(1); print(2); time.sleep(1000)']\n"
    fab.file(f"{command}grace_seconds: 1\nsettle_seconds: 0\n")
    fab.ok("deploy", "--no-follow")
    script = f"{FAB[0]} {hosts} tail | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=fab.root,
        env=fab.environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines()[1:] == ["0"]
    assert "Traceback" not in done.stderr
    assert fab.runs[-1].alive()


def test_a_full_disk_behind_stdout_is_one_sentence(tmp_path) -> None:
    ended(tmp_path, b"line\n" * 1000)
    said = "the log cannot be written to stdout: No space left on device"
    with open("/dev/full", "wb") as full, pytest.raises(DeployError, match=said):
        logs.follow_name(HOST, str(tmp_path), "demo", out=full)
