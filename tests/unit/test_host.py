"""deploy/host.py: one function for all commands, files that appear by rename, errors in one sentence."""

from __future__ import annotations

import json
import logging
import os
import stat
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deploy.host import HostError, Local, connect, describe
from deploy.inside import Inside

SHOW = (
    "import os, sys, json\n"
    "json.dump([[os.fsencode(a).hex() for a in sys.argv[1:]], os.environb[b'V'].hex()], sys.stdout)"
)
HOSTILE = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=40)


def python(*arguments: str) -> list[str]:
    return [sys.executable, "-I", "-X", "utf8", "-c", *arguments]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(HOSTILE, max_size=3), value=HOSTILE)
def test_arguments_and_variables_arrive_byte_for_byte(words, value):
    result = Local().run(python(SHOW, *words), timeout=30, env={"V": value})
    assert json.loads(result.out) == [[word.encode().hex() for word in words], value.encode().hex()]


@pytest.mark.parametrize(
    "word", ["a b", "$(id -u)", "`id`", "a;b", "'", '"', "\\", "a\nb", "*", "ü→", "", "-n", "%s"]
)
def test_no_shell_ever_sees_a_word(word):
    result = Local().run(python(SHOW, word), timeout=30, env={"V": word})
    assert json.loads(result.out) == [[word.encode().hex()], word.encode().hex()]


def test_input_goes_in_and_output_comes_out_as_bytes():
    data = bytes(range(256)) * 1000
    copy = python("import shutil, sys; shutil.copyfileobj(sys.stdin.buffer, sys.stdout.buffer)")
    assert Local().run(copy, timeout=30, input=data).out == data


def test_without_input_stdin_is_empty():
    assert Local().run(python("import sys; print(repr(sys.stdin.read()))"), timeout=30).text == "''"


def test_the_environment_is_added_to_the_one_that_is_there():
    code = "import os; print(os.environ['NEW'], 'PATH' in os.environ)"
    assert Local().run(python(code), timeout=30, env={"NEW": "1"}).text == "1 True"


def test_a_failure_names_host_program_code_and_last_words():
    code = "import sys; print('first', file=sys.stderr); print('disk full', file=sys.stderr); sys.exit(3)"
    with pytest.raises(HostError) as error:
        Local("box").run(python(code), timeout=30)
    assert str(error.value) == f"box: {sys.executable} failed (exit code 3): disk full"


def test_a_failure_by_a_signal_names_the_signal():
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(HostError, match=r"killed by SIGKILL"):
        Local().run(python(code), timeout=30)


def test_without_check_a_failure_is_a_result():
    result = Local().run(python("import sys; sys.exit(3)"), timeout=30, check=False)
    assert result.code == 3


def test_a_missing_program_is_named():
    with pytest.raises(HostError, match=r"no program 'no-such-program'"):
        Local().run(["no-such-program"], timeout=5)
    assert Local().run(["no-such-program"], timeout=5, check=False).code == 127


def test_a_file_that_is_no_program_is_named(tmp_path):
    (tmp_path / "text").write_text("hello")
    with pytest.raises(HostError, match="may not be executed"):
        Local().run([str(tmp_path / "text")], timeout=5)


def test_what_no_system_can_pass_is_refused_in_one_sentence():
    with pytest.raises(HostError, match="cannot be started"):
        Local().run(python("pass", "a\0b"), timeout=5)
    with pytest.raises(HostError, match="cannot be started"):
        Local().run(python("pass"), timeout=5, env={"A=B": "c"})


def test_a_timeout_kills_the_whole_process_group(tmp_path):
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        "open(sys.argv[1] + '.new', 'w').write(str(child.pid))\n"
        "import os; os.rename(sys.argv[1] + '.new', sys.argv[1])\n"
        "time.sleep(1000)"
    )
    pid_file = tmp_path / "pid"
    errors: list[str] = []

    def call():
        try:
            Local().run(python(code, str(pid_file)), timeout=3)
        except HostError as error:
            errors.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    until(pid_file.exists)
    child = int(pid_file.read_text())
    thread.join(60)
    assert errors
    assert "did not end within 3 s" in errors[0]
    until(lambda: gone(child))


def test_a_timeout_does_not_wait_for_a_child_that_left_the_group_and_holds_the_pipe():
    code = "import os, time\nif os.fork(): time.sleep(1000)\nos.setsid(); time.sleep(8)"
    with pytest.raises(HostError, match="did not end within"):
        Local().run(python(code), timeout=1)


def test_commands_are_logged_at_debug_without_values_that_may_be_secret(caplog):
    with caplog.at_level(logging.DEBUG, "deploy.host"):
        Local("box").run(python("pass"), timeout=30, env={"TOKEN": "hunter2"}, input=b"hunter2")
    line = caplog.records[-1].getMessage()
    assert "box:" in line
    assert "TOKEN" in line
    assert "exit code 0" in line
    assert "hunter2" not in line


def test_long_arguments_are_cut_in_the_log():
    assert len(describe(["x" * 10_000], None, None)) < 200


def test_write_replaces_a_file_whole_with_the_wanted_rights(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with open(path) as reader:
        Local().write(str(path), b"new", mode=0o600)
        assert reader.read() == "old"  # who has it open still sees all of the old one
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["file"]


def test_a_write_that_fails_leaves_nothing_and_says_so_in_one_sentence(tmp_path):
    with pytest.raises(HostError, match=r"cannot write .*No such file or directory"):
        Local().write(str(tmp_path / "none" / "file"), b"x")
    (tmp_path / "directory" / "x").mkdir(parents=True)
    with pytest.raises(HostError, match="cannot write"):
        Local().write(str(tmp_path / "directory"), b"x")
    assert os.listdir(tmp_path) == ["directory"]


def test_write_makes_parents_only_when_asked(tmp_path):
    Local().write(str(tmp_path / "a" / "b"), b"x", parents=True)
    assert (tmp_path / "a" / "b").read_bytes() == b"x"


def test_read_gives_none_for_a_file_that_is_not_there_and_a_sentence_for_one_that_cannot_be_read(tmp_path):
    assert Local().read(str(tmp_path / "none")) is None
    assert Local().read("/proc/999999999/stat") is None
    with pytest.raises(HostError, match="cannot read"):
        Local().read(str(tmp_path))


def test_a_tree_appears_whole_and_is_never_written_twice(tmp_path):
    target = tmp_path / "releases" / "abc"
    assert Local().write_tree(str(target), {"a": b"1", "app/b": b"2"}, mode=0o640)
    assert (target / "app" / "b").read_bytes() == b"2"
    assert stat.S_IMODE((target / "a").stat().st_mode) == 0o640
    assert Local().write_tree(str(target), {"a": b"other"}) is False
    assert (target / "a").read_bytes() == b"1"
    assert os.listdir(target.parent) == ["abc"]


def test_a_tree_cannot_write_outside_itself(tmp_path):
    with pytest.raises(ValueError, match="leads out of"):
        Local().write_tree(str(tmp_path / "tree"), {"../outside": b"x"})
    assert os.listdir(tmp_path) == []


def test_two_writers_of_one_tree_leave_one_of_them(tmp_path):
    target = str(tmp_path / "tree")
    results: list[bool] = []
    threads = [
        threading.Thread(target=lambda: results.append(Local().write_tree(target, {"a": b"1", "b": b"2"})))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False] * 7 + [True]
    assert os.listdir(tmp_path) == ["tree"]


def test_a_stream_takes_and_gives_bytes_while_it_runs():
    echo = python(
        "import sys\nfor line in sys.stdin.buffer:\n sys.stdout.buffer.write(line); sys.stdout.flush()"
    )
    with Local().open_stream(echo) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"hello\n"
        process.stdin.close()
        assert process.wait(30) == 0


def test_this_machine_is_never_lost_and_needs_no_way_for_rsync():
    host = Local()
    with host.bulk(["cat"]) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.close()
        assert process.stdout.read() == b""
    host.close()
    assert (host.is_local, host.lost(), host.rsync_shell()) == (True, False, None)


@dataclass
class Settings:
    name: str
    address: str = ""
    container: int | None = None
    python_for_tools: str | None = None


def test_settings_say_which_machine_is_meant_and_nothing_is_connected_before_it_is_used():
    assert isinstance(connect(Settings("localhost")), Local)
    assert isinstance(connect(Settings("here", "127.0.0.1")), Local)
    box = connect(Settings("gpu-box"))
    assert not box.is_local
    assert (box.name, box.python, box.lost()) == ("gpu-box", "python3", False)
    inside = connect(Settings("pve", "root@10.0.0.1", 200, "/opt/python3.12"))
    assert isinstance(inside, Inside)
    assert (inside.container, inside.name, inside.python, inside.is_local) == (
        200,
        "pve",
        "/opt/python3.12",
        False,
    )
    assert isinstance(connect(Settings("here", "localhost", 200)), Inside)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def until(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)
