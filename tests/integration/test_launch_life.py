"""How a run starts, crashes, starts again and ends, and what its trainer is given."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launching import gone, launched, make_run, python, wait_for

from trainer.status import RunDir

pytestmark = pytest.mark.slow

# Runs many launches in one interpreter, each in a process of its own, so that a table costs seconds.
MANY = """
import os, sys
import trainer.launch
sys.stdout.flush()
for path in sys.argv[1:]:
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = trainer.launch.main(["--run-dir", path])
        finally:
            os._exit(code)
    print(os.path.basename(path), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=sys.stderr)
"""


def many(tmp_path: Path, commands: dict[str, list[str]]) -> dict[str, int]:
    """The exit code of launch for each of `commands`, run one after the other under `tmp_path`."""
    for name, command in commands.items():
        make_run(tmp_path / name, command)
    paths = [str(tmp_path / name) for name in commands]
    answer = subprocess.run([sys.executable, "-c", MANY, *paths], capture_output=True, text=True, timeout=250)
    return {name: int(code) for name, code in (line.split() for line in answer.stderr.splitlines())}


@pytest.mark.slow
def test_exit_codes_are_passed_on_and_recorded(tmp_path):
    chosen = [0, 1, 2, 3, 42, 75, 100, *range(124, 148), 159, 192, 254, 255]  # also those that mean a signal
    codes = many(tmp_path, {str(code): ["sh", "-c", f"exit {code}"] for code in chosen})
    assert codes == {str(code): code for code in chosen}
    for code in chosen:
        record = RunDir(tmp_path / str(code)).exit()
        assert (record.code, record.signal) == (code, None)
        assert record.reason == ("failed" if code else "finished")


def test_every_fatal_signal_is_passed_on_as_a_code_and_recorded(tmp_path):
    signals = [s for s in range(1, 32) if s not in (1, 17, 18, 19, 20, 21, 22, 23, 28)]  # 1 is ignored
    codes = many(tmp_path, {str(s): ["sh", "-c", f"ulimit -c 0; kill -{s} $$"] for s in signals})
    assert codes == {str(s): 128 + s for s in signals}
    for number in signals:
        record = RunDir(tmp_path / str(number)).exit()
        assert (record.reason, record.code, record.signal) == ("failed", 128 + number, number)


def test_a_hangup_is_nothing_to_a_run(tmp_path):
    with launched(tmp_path, ["sh", "-c", "kill -HUP $$; echo still here"]) as run:
        assert run.finish().code == 0
    assert run.log == b"still here\n"


def test_the_record_tells_the_last_step_and_checkpoint(tmp_path):
    source = """
from trainer.status import *
d = RunDir(os.environ["DRAFTHOUSE_RUN_DIR"])
d.write_heartbeat(Heartbeat(rank=0, pid=os.getpid(), time=1.0, step=41, last_checkpoint={"step": 40}))
raise SystemExit(3)
"""
    with launched(tmp_path, [sys.executable, "-c", "import os" + source]) as run:
        record = run.finish()
    assert (record.last_step, record.last_checkpoint, record.code) == (41, {"step": 40}, 3)
    assert record.log_bytes == len(run.raw_log)
    assert not (tmp_path / ".reserve").exists()


def test_the_run_is_alive_from_its_start_to_its_record(tmp_path):
    with launched(tmp_path, python("import time; time.sleep(600)")) as run:
        run.trainer_pid()
        assert run.directory.alive()
        run.term()
        wait_for(lambda: not run.directory.alive(), "the lock to be released")
        assert run.directory.exit() is not None
        assert run.process.wait() == 143


def test_a_crash_is_followed_by_the_next_attempt_with_its_own_banner(tmp_path):
    source = """
import os
attempt = int(os.environ["DRAFTHOUSE_ATTEMPT"])
print("attempt", attempt)
os._exit(0 if attempt == 2 else 9)
"""
    with launched(tmp_path, python(source), restart_attempts=3) as run:
        record = run.finish()
    assert (record.reason, record.code, record.attempts) == ("finished", 0, 2)
    told = run.directory.launch().ended
    assert (told["attempt"], told["how"].partition(" after ")[0]) == (1, "with exit code 9")
    assert run.log == b"attempt 1\nattempt 2\n"
    banners = [line for line in run.notes if "drafthouse run" in line]
    assert [f"attempt {n} ·" in line for n, line in enumerate(banners, 1)] == [True, True]
    lines = run.raw_log.splitlines()
    assert lines.index(banners[1].encode()) == lines.index(b"attempt 2") - 1


def test_when_the_attempts_are_used_up_the_run_has_failed_with_its_last_lines(tmp_path):
    with launched(tmp_path, ["sh", "-c", "seq 100; echo boom; exit 5"], restart_attempts=1) as run:
        record = run.finish()
    assert (record.reason, record.code, record.attempts) == ("failed", 5, 2)
    assert record.last_lines == [*map(str, range(82, 101)), "boom"]
    assert "exit code 5" in record.message
    assert "attempt 2" in record.message


def test_a_wrong_command_line_is_not_tried_again(tmp_path):
    with launched(tmp_path, ["sh", "-c", "exit 2"], restart_attempts=3) as run:
        record = run.finish()
    assert (record.reason, record.attempts) == ("failed", 1)


def test_a_stop_between_two_attempts_is_heard(tmp_path):
    with launched(tmp_path, ["sh", "-c", "exit 5"], restart_attempts=100) as run:
        run.wait_for_log(b"attempt 3 starts in 1 s")
        run.term()
        record = run.finish()
    assert (record.reason, record.code, record.asked_by) == ("stopped", 5, "SIGTERM")


NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,20}", fullmatch=True).map(lambda name: f"X_{name}")
VALUES = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60
) | st.sampled_from(
    [
        "x y",
        "a;b",
        "$(id -u)",
        "`id`",
        "'",
        '"',
        "\\",
        "two\nlines",
        "\n",
        " lead",
        "trail ",
        "τ ≥ 2",
        "%s",
        "${HOME}",
    ]
)


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(NAMES, VALUES, min_size=10, max_size=60))
def test_values_arrive_byte_for_byte(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("run")
    secrets = path / "secrets"
    secrets.write_bytes(b"SECRET=a 'b' $(c)\nd\0")
    secrets.chmod(0o400)
    source = "import os, sys; sys.stdout.buffer.write(b'\\0'.join(b'%s=%s' % i for i in os.environb.items()))"
    argv = [*python(source), *values.values()]
    fields = {"environment": values, "secrets": ["SECRET"], "secrets_file": str(secrets)}
    with launched(path, argv, popen={"env": {**os.environ, "LC_ALL": "C"}}, **fields) as run:
        run.finish()
    raw = run.raw_log.partition(b"\n")[2]
    got = dict(entry.partition(b"=")[::2] for entry in raw.rpartition("\n──".encode())[0].split(b"\0"))
    expected = {name.encode(): value.encode() for name, value in values.items()}
    assert {name: got.get(name) for name in expected} == expected
    assert got[b"SECRET"] == b"a 'b' $(c)\nd"
    assert got[b"DRAFTHOUSE_RUN_DIR"] == os.fsencode(path)
    assert got[b"DRAFTHOUSE_ATTEMPT"] == b"1"
    assert got[b"PYTHONUNBUFFERED"] == b"1"


def test_the_trainer_has_a_session_of_its_own_and_no_stdin(tmp_path):
    source = """
import os
print(os.getsid(0) == os.getpid(), os.readlink("/proc/self/fd/0"), os.listdir("/proc/self/fd"))
"""
    with launched(tmp_path, python(source)) as run:
        run.finish()
    assert run.log == b"True /dev/null ['0', '1', '2', '3']\n"  # 3 is the listing's own


def test_the_kernel_takes_the_trainer_before_launch_when_memory_is_short(tmp_path):
    with launched(tmp_path, python("print(open('/proc/self/oom_score_adj').read())")) as run:
        run.finish()
    own = int(Path("/proc/self/oom_score_adj").read_text())
    assert int(run.log) == min(own + 500, 1000)


ANSWERING = """
import faulthandler, os, signal, sys, time
from trainer.status import Heartbeat, RunDir
if sys.argv[1] == "handler": faulthandler.register(signal.SIGUSR1)
beat = Heartbeat(pid=os.getpid(), attempt=1, time=time.time())
RunDir(os.environ["DRAFTHOUSE_RUN_DIR"]).write_heartbeat(beat)
print("ready")
def stuck_here():
    time.sleep(600)
stuck_here()
"""


@pytest.mark.parametrize(
    ("handler", "outcome"), [("handler", "SIGUSR1 to rank 0"), ("none", "has no handler for SIGUSR1")]
)
def test_stacks_are_asked_of_processes_that_can_answer_and_of_no_other(tmp_path, handler, outcome):
    with launched(tmp_path, [sys.executable, "-c", ANSWERING, handler]) as run:
        run.wait_for_log(b"ready")
        request = run.directory.ask("dump-stacks", by="ann@laptop")
        answer = wait_for(lambda: run.directory.launch().answered, "the answer")
        assert answer["id"] == request.id
        assert outcome in answer["outcome"]
        run.wait_for_log(b"stacks asked for by ann@laptop")
        if handler == "handler":
            run.wait_for_log(b"in stuck_here")
        assert not gone(run.trainer_pid())
        run.term()
        run.finish()


@pytest.mark.parametrize("text", ["{", "[]", '"x"', '{"id": 1, "action": "checkpoint"}', "\0"])
def test_a_broken_request_or_heartbeat_is_passed_over_and_the_end_is_recorded(tmp_path, text):
    with launched(tmp_path, python("import time; time.sleep(600)")) as run:
        run.trainer_pid()
        (tmp_path / "status").mkdir(exist_ok=True)
        (tmp_path / "status" / "0.json").write_text(text)
        (tmp_path / "status" / "1.json").write_text('{"step": 7}')
        (tmp_path / "request.json").write_text(text)
        run.wait_for_log(b"a request was ignored")
        run.term()
        record = run.finish()
    assert (record.reason, record.last_step) == ("stopped", 7)


def memory_group() -> Path | None:
    """The memory cgroup that this process is in, if groups can be made in it."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        root = "/sys/fs/cgroup" if number == "0" else "/sys/fs/cgroup/memory"
        if (number == "0" and not controllers) or "memory" in controllers.split(","):
            group = Path(root + path)
            v2 = (group / "cgroup.subtree_control").exists() and "memory" in (
                group / "cgroup.subtree_control"
            ).read_text()
            if os.access(group, os.W_OK) and (v2 or (group / "memory.limit_in_bytes").exists()):
                return group
    return None


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0 or memory_group() is None, reason="no memory cgroup can be made here")
def test_a_trainer_that_runs_out_of_memory_is_told_so_and_launch_survives_to_tell(tmp_path):
    group = memory_group() / f"drafthouse-test-{os.getpid()}"
    group.mkdir()
    try:
        for name in ("memory.limit_in_bytes", "memory.max"):
            if (group / name).exists():
                (group / name).write_text(str(96 << 20))
        wrapper = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
        source = "kept = []\nwhile True: kept.append(bytearray(b'x' * (1 << 20)))"
        with launched(tmp_path, python(source), wrapper=wrapper) as run:
            record = run.finish()
    finally:
        wait_for(lambda: not (group / "cgroup.procs").read_text(), "the group to be empty")
        group.rmdir()
    assert (record.reason, record.signal, record.out_of_memory) == ("failed", 9, True)
    assert "out of memory" in record.message


def test_a_kill_by_somebody_is_not_taken_for_out_of_memory(tmp_path):
    with launched(tmp_path, python("import time; time.sleep(600)")) as run:
        os.kill(run.trainer_pid(), signal.SIGKILL)
        record = run.finish()
    assert record.signal == 9
    assert record.out_of_memory is False
