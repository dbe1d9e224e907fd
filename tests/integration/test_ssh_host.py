"""A host that is reached by SSH, against a real sshd that allows two sessions and three logins at a time."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from testbed.gpubox import ALIAS, JUMP, SLOW, GpuBox

from deploy import CHECKOUT, early, ssh
from deploy.host import HostError, Local, LostError, connect
from deploy.settings import HostSettings
from deploy.ssh import Ssh

pytestmark = [pytest.mark.root, pytest.mark.sshd, pytest.mark.slow]

SHOW = (
    "import os, sys, json\n"
    "json.dump([[os.fsencode(a).hex() for a in sys.argv[1:]], os.environb[b'V'].hex()], sys.stdout)"
)
HOSTILE = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=40)
WORDS = ["a b", "$(id -u)", "`id`", "a;b", "'", '"', "\\", "a\nb", "*", "ü→", "", "-n", "%s", "!", "a\\'b\n"]


def python(*arguments: str) -> list[str]:
    return ["python3", "-I", "-X", "utf8", "-c", *arguments]


@pytest.fixture(autouse=True)
def _client(gpubox: GpuBox, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in gpubox.environment.items():
        monkeypatch.setenv(key, value)


@pytest.fixture(scope="module")
def box(gpubox: GpuBox) -> Iterator[Ssh]:
    with pytest.MonkeyPatch.context() as patch:
        for key, value in gpubox.environment.items():
            patch.setenv(key, value)
        host = Ssh(ALIAS)
        host.connect()
    yield host
    host.close()


@pytest.fixture
def fresh() -> Iterator[list[Ssh]]:
    """Hosts that are closed after the test, whatever became of it."""
    hosts: list[Ssh] = []
    yield hosts
    for host in hosts:
        host.close()


def until(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


# -- what arrives there, and what comes back ---------------------------------------------------------------


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(words=st.lists(HOSTILE, max_size=3), value=HOSTILE)
def test_arguments_and_variables_arrive_byte_for_byte(box, words, value):
    result = box.run(python(SHOW, *words), timeout=30, env={"V": value})
    assert json.loads(result.out) == [[word.encode().hex() for word in words], value.encode().hex()]


def test_no_shell_reads_anything_into_a_word(box):
    result = box.run(python(SHOW, *WORDS), timeout=30, env={"V": "".join(WORDS)})
    assert json.loads(result.out) == [[w.encode().hex() for w in WORDS], "".join(WORDS).encode().hex()]


def test_bytes_that_are_no_text_arrive_too(box):
    word = os.fsdecode(bytes(range(1, 256)))
    result = box.run(python(SHOW, word), timeout=30, env={"V": word})
    assert json.loads(result.out) == [[bytes(range(1, 256)).hex()], bytes(range(1, 256)).hex()]


@pytest.mark.parametrize("name", ["UID", "PPID", "IFS", "LC_ALL", "BASH_ENV", "PWD", "A.B", "drafthouse_s"])
def test_a_variable_that_a_shell_keeps_for_itself_arrives(box, name):
    code = f"import os; print(repr(os.environ[{name!r}]))"
    assert box.run(python(code), timeout=30, env={name: "C"}).text == "'C'"


def test_an_argument_of_a_hundred_kilobytes_and_a_variable_beside_it_arrive(box):
    result = box.run(python(SHOW, "x" * 100_000), timeout=30, env={"V": "y" * 100_000})
    assert json.loads(result.out) == [[b"x".hex() * 100_000], b"y".hex() * 100_000]


def test_values_are_not_to_be_seen_in_the_process_list_of_the_connection(box, gpubox):
    value = f"secret-{secrets.token_hex(8)}"
    with box.open_stream(python("import sys; sys.stdin.read()"), env={"TOKEN": value}) as process:
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in gpubox.pids()]
        here = [one.read_bytes() for one in Path("/proc").glob("[0-9]*/cmdline") if one.parent.exists()]
        process.stdin.close()
    assert lines
    assert not [line for line in lines + here if value.encode() in line]


def test_input_goes_in_and_output_comes_out_as_bytes(box):
    data = bytes(range(256)) * 10_000
    copy = python("import shutil, sys; shutil.copyfileobj(sys.stdin.buffer, sys.stdout.buffer)")
    assert box.run(copy, timeout=60, input=data).out == data


def test_output_that_comes_while_input_goes_in_does_not_block(box):
    data = os.urandom(5_000_000)
    assert box.run(["cat"], timeout=60, input=data).out == data


def test_without_input_stdin_is_empty(box):
    assert box.run(["cat"], timeout=30).out == b""


def test_the_environment_is_added_to_the_one_of_the_login(box):
    code = "import os; print(os.environ['NEW'], os.environ['HOME'], 'DRAFTHOUSE_SSH_CONFIG' in os.environ)"
    assert box.run(python(code), timeout=30, env={"NEW": "1"}).text == "1 /root False"


@pytest.mark.parametrize("code", [0, 1, 3, 126, 127, 254, 255])
def test_exit_codes_come_back_as_they_are(box, code):
    result = box.run(["sh", "-c", f"echo out; echo err >&2; exit {code}"], timeout=30, check=False)
    assert (result.code, result.out, result.err) == (code, b"out\n", b"err\n")


@pytest.mark.parametrize("name", ["KILL", "TERM", "SEGV"])
def test_a_command_that_a_signal_ends_is_told_as_a_shell_tells_it(box, name):
    number = getattr(signal, f"SIG{name}")
    result = box.run(python(f"import os; os.kill(os.getpid(), {number})"), timeout=30, check=False)
    assert (result.code, result.err) == (128 + number, b"")
    with pytest.raises(HostError, match=f"gpu-box: sh failed \\(killed by SIG{name}\\)"):
        box.run(["sh", "-c", f"kill -{name} $$"], timeout=30)


def test_a_failure_names_host_program_code_and_last_words(box):
    with pytest.raises(HostError) as error:
        box.run(["sh", "-c", "echo first >&2; echo disk full >&2; exit 3"], timeout=30)
    assert str(error.value) == "gpu-box: sh failed (exit code 3): disk full"


@pytest.mark.parametrize("program", ["no-such-program", "/no/such/program", ""])
def test_a_missing_program_is_named(box, program):
    with pytest.raises(HostError, match=f"no program '{program}'"):
        box.run([program, "x"], timeout=5)
    assert box.run([program], timeout=5, check=False).code == 127


def test_a_file_that_is_no_program_is_named(box):
    with pytest.raises(HostError, match=r"gpu-box: /etc/passwd failed .*may not be executed"):
        box.run(["/etc/passwd"], timeout=5)
    assert box.run(["/etc"], timeout=5, check=False).code == 126


def test_what_no_system_can_pass_is_refused_in_one_sentence(box):
    for env in ({"A=B": "c"}, {"": "x"}, {"A": "\0"}):
        with pytest.raises(HostError, match="gpu-box: true cannot be started"):
            box.run(["true"], timeout=5, env=env)
    with pytest.raises(HostError, match="cannot be started"):
        box.run(["true", "a\0b"], timeout=5)


def test_a_missing_python_is_a_matter_for_bootstrap(fresh):
    host = Ssh(ALIAS, python="python3.99")
    fresh.append(host)
    sentence = r"gpu-box: there is no python3.99 there, .*; fab bootstrap --host gpu-box installs it"
    with pytest.raises(HostError, match=sentence):
        host.read("/etc/passwd")
    with pytest.raises(HostError, match=sentence):
        host.open_stream(["python3.99"])


# -- whatever the login does -------------------------------------------------------------------------------


@pytest.fixture
def noisy(gpubox: GpuBox) -> Iterator[None]:
    """A ~/.bashrc that says things on both outputs, as many have it."""
    file = gpubox.home / ".bashrc"
    file.write_text("echo welcome to $HOSTNAME; echo 'motd\n' >&2; printf 'no newline'; printf x >&2\n")
    yield
    file.unlink()


@pytest.mark.usefixtures("noisy")
def test_what_the_login_prints_is_not_taken_for_the_commands_output(box, gpubox):
    assert "welcome" in gpubox.run("true")  # it does print
    result = box.run(["sh", "-c", "echo out; echo err >&2"], timeout=30)
    assert (result.out, result.err) == (b"out\n", b"err\n")
    assert box.read("/etc/passwd") == (gpubox.directory / "etc" / "passwd").read_bytes()
    with box.open_stream(["sh", "-c", "echo out; echo err >&2"]) as process:
        assert (process.stdout.read(), process.stderr.read()) == (b"out\n", b"err\n")


@pytest.mark.parametrize(
    "shell", [pytest.param(name, marks=pytest.mark.program(name)) for name in ("fish", "tcsh", "dash")]
)
def test_a_login_shell_with_a_syntax_of_its_own_does_not_matter(gpubox, fresh, shell):
    program = shutil.which(shell)
    host = Ssh(gpubox.alias(f"with-{shell}", User=gpubox.user(shell, program)))
    fresh.append(host)
    result = host.run(python(SHOW, *WORDS), timeout=30, env={"V": "".join(WORDS)})
    assert json.loads(result.out) == [[w.encode().hex() for w in WORDS], "".join(WORDS).encode().hex()]


def test_a_user_without_a_shell_is_named_with_a_remedy(gpubox, fresh):
    host = Ssh(gpubox.alias("no-shell", User="nobody-home"))
    fresh.append(host)
    for use in (lambda: host.run(["true"], timeout=30), lambda: host.open_stream(["true"])):
        with pytest.raises(HostError, match=r"no-shell: the login .*not available.*give its user a shell"):
            use()


def test_another_user_works_in_its_own_home(gpubox, fresh):
    host = Ssh("ada's", "ada@gpu-box")
    fresh.append(host)
    assert host.run(["pwd"], timeout=30).text == "/home/ada"
    host.write("/home/ada/a file", b"x")
    assert (gpubox.directory / "home" / "ada" / "a file").stat().st_uid == 20001
    with pytest.raises(HostError, match=r"ada's: cannot write /root/x: Permission denied"):
        host.write("/root/x", b"x")


# -- one connection ----------------------------------------------------------------------------------------


def logins(gpubox: GpuBox) -> int:
    return gpubox.log.read_text(errors="replace").count("Accepted publickey")


def test_everything_but_bulk_goes_over_one_connection_with_two_sessions(gpubox, fresh):
    before = logins(gpubox)
    host = Ssh(ALIAS)
    fresh.append(host)
    with host.open_stream(["cat"]) as process:
        results: list[str] = []
        threads = [
            threading.Thread(target=lambda n=n: results.append(host.run(["echo", str(n)], timeout=60).text))
            for n in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        host.write(str(gpubox.directory / "one"), b"1")
        process.stdin.close()
        assert process.stdout.read() == b""
    assert sorted(results) == [str(n) for n in range(6)]
    assert logins(gpubox) == before + 1
    with host.bulk(["cat"]) as process:
        process.stdin.write(b"much")
        process.stdin.close()
        assert process.stdout.read() == b"much"
    assert logins(gpubox) == before + 2


def test_a_further_stream_gets_a_connection_of_its_own(gpubox, box):
    before = logins(gpubox)
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(box.open_stream(["cat"])) for _ in range(3)]
        for number, stream in enumerate(streams):
            stream.stdin.write(b"%d" % number)
            stream.stdin.close()
        assert [stream.stdout.read() for stream in streams] == [b"0", b"1", b"2"]
        assert box.run(["echo", "beside"], timeout=30).text == "beside"
    assert logins(gpubox) == before + 2


def test_a_command_finds_a_way_when_all_sessions_of_the_connection_are_in_use(gpubox, box):
    before = logins(gpubox)
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(box._open(["cat"], None, shared=True)) for _ in range(2)]
        assert box.run(["cat"], timeout=30, input=b"third").out == b"third"
        assert logins(gpubox) == before + 1
        for stream in streams:
            stream.stdin.close()
            assert stream.wait(30) == 0


def test_many_clients_at_once_get_in_although_only_three_may_log_in_at_a_time(fresh):
    hosts = [Ssh(ALIAS) for _ in range(8)]
    fresh.extend(hosts)
    results: list[str] = []
    errors: list[Exception] = []

    def work(host: Ssh) -> None:
        try:
            results.append(host.run(["echo", "in"], timeout=60).text)
        except HostError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(host,)) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (errors, results) == ([], ["in"] * 8)


def test_a_second_host_object_is_nobodys_business(box, fresh):
    other = Ssh(ALIAS)
    fresh.append(other)
    assert other.run(["echo", "1"], timeout=30).text == "1"
    other.close()
    assert box.run(["echo", "2"], timeout=30).text == "2"
    assert other.run(["echo", "again"], timeout=30).text == "again"


@pytest.mark.parametrize("name", ["gpu-box-port", JUMP, SLOW, "root@gpu-box", "root@gpu-box:22"])
def test_ports_jump_hosts_users_and_included_files_are_the_ones_of_the_ssh_configuration(fresh, name):
    host = Ssh(name)
    fresh.append(host)
    assert host.run(["id", "-un"], timeout=60).text == "root"
    with host.bulk(["cat"]) as process:
        process.stdin.write(b"x")
        process.stdin.close()
        assert process.stdout.read() == b"x"


def test_settings_of_the_user_that_would_disturb_do_not(gpubox, fresh):
    port = gpubox.link.port  # somebody's own session has this forwarding already
    name = gpubox.alias(
        "busy-config",
        RemoteCommand="tmux attach",
        RequestTTY="force",
        LocalForward=f"127.0.0.1:{port} 127.0.0.1:1",
        ExitOnForwardFailure="yes",
        ControlMaster="auto",
        ControlPath=gpubox.directory / "client" / "users-own",
        ControlPersist="60",
        LogLevel="QUIET",
        StrictHostKeyChecking="ask",
    )
    host = Ssh(name)
    fresh.append(host)
    assert host.run(["echo", "hello"], timeout=30).out == b"hello\n"
    host.close()
    assert not (gpubox.directory / "client" / "users-own").exists()


# -- what is killed, and what lives on ---------------------------------------------------------------------

PARENT = """\
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])
open(sys.argv[1] + '.new', 'w').write(f'{os.getpid()} {child.pid}')
os.rename(sys.argv[1] + '.new', sys.argv[1])
time.sleep(1000)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def started(file: Path) -> list[int]:
    until(file.exists)
    return [int(word) for word in file.read_text().split()]


@pytest.mark.parametrize("held", [False, True])
def test_a_timeout_kills_the_whole_process_group_there(box, tmp_path, held):
    """Also while a stream takes the second session, so that there is none left to kill it from."""
    with contextlib.ExitStack() as stack:
        if held:
            stream = stack.enter_context(box.open_stream(["cat"]))
        with pytest.raises(HostError, match=r"gpu-box: python3 did not end within 2 s and was killed"):
            box.run(python(PARENT, str(tmp_path / "pids")), timeout=2)
        for pid in started(tmp_path / "pids"):
            until(lambda pid=pid: not alive(pid), 10)
        if held:
            stream.stdin.close()
            assert stream.wait(10) == 0
    assert box.run(["echo", "on"], timeout=30).text == "on"


def test_a_timeout_is_kept_although_a_child_that_left_the_group_holds_the_output(box):
    code = "import os, time\nif os.fork(): time.sleep(1000)\nos.setsid(); time.sleep(20)"
    with pytest.raises(HostError, match="did not end within 1 s and was killed"):
        box.run(python(code), timeout=1)


CLIENT = f"""\
import sys
sys.path.insert(0, {str(CHECKOUT)!r})
from deploy.ssh import Ssh
box = Ssh("gpu-box")
print("connecting", flush=True)
box.run(sys.argv[1:], timeout=1000)
"""


def client(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", CLIENT, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def connections(pid: int) -> list[int]:
    """Live ssh processes that `pid` has started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def test_ctrl_c_kills_the_whole_process_group_there(tmp_path):
    process = client(*python(PARENT, str(tmp_path / "pids")))
    pids = started(tmp_path / "pids")
    ours = connections(process.pid)
    assert ours
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert b"KeyboardInterrupt" in err
    for pid in pids + ours:
        until(lambda pid=pid: not alive(pid), 10)


def test_nothing_of_ours_is_left_when_we_are_killed(tmp_path):
    temporary = tmp_path / "t"
    temporary.mkdir()
    process = client(*python(PARENT, str(tmp_path / "pids")))
    started(tmp_path / "pids")
    ours = connections(process.pid)
    sockets = [
        Path(word).parent
        for pid in ours
        for word in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if "/drafthouse-" in word and not word.endswith("config")
    ]
    assert sockets
    process.kill()
    process.communicate(timeout=30)
    for pid in ours:
        until(lambda pid=pid: not alive(pid), 10)
    until(lambda: not any(path.exists() for path in sockets), 10)


def test_what_was_detached_there_lives_on(box, tmp_path):
    pid_file = tmp_path / "pid"
    argv = ["setsid", "sh", "-c", f"echo $$ >{pid_file}; exec sleep 1000 </dev/null >/dev/null 2>&1"]
    box.run(["sh", "-c", '"$@" </dev/null >/dev/null 2>&1 &', "sh", *argv], timeout=30)
    (pid,) = started(pid_file)
    box.close()
    assert alive(pid)
    os.kill(pid, signal.SIGKILL)


def test_closing_leaves_nothing_behind(fresh):
    host = Ssh(ALIAS)
    fresh.append(host)
    host.connect()
    place = host._place.path
    ours = [pid for pid in connections(os.getpid()) if str(place) in Path(f"/proc/{pid}/cmdline").read_text()]
    assert ours
    host.close()
    assert not place.exists()
    assert not [pid for pid in ours if alive(pid)]


# -- a link that breaks ------------------------------------------------------------------------------------


def test_a_command_whose_connection_is_reset_says_so_and_is_killed_there(gpubox, fresh, tmp_path):
    host = Ssh(SLOW)
    fresh.append(host)
    errors: list[HostError] = []

    def work() -> None:
        try:
            host.run(python(PARENT, str(tmp_path / "pids")), timeout=1000)
        except HostError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    pids = started(tmp_path / "pids")
    time.sleep(0.3)  # its first words are on their way
    gpubox.link.reset()
    thread.join(60)
    (error,) = errors
    assert isinstance(error, LostError)
    assert "slow-box: the connection was lost while python3 ran" in str(error)
    assert str(error).endswith("it was killed there")
    for pid in pids:
        until(lambda pid=pid: not alive(pid), 10)
    assert host.run(["echo", "again"], timeout=60).text == "again"


@pytest.mark.slow
def test_a_link_that_goes_silent_is_noticed(gpubox, fresh, tmp_path):
    host = Ssh(SLOW)
    fresh.append(host)
    errors: list[HostError] = []

    def work() -> None:
        try:
            host.run(python(PARENT, str(tmp_path / "pids")), timeout=1000)
        except HostError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    pids = started(tmp_path / "pids")
    time.sleep(0.3)
    gpubox.link.cut()
    try:
        thread.join(90)
        assert not thread.is_alive()
    finally:
        gpubox.link.mend()
    (error,) = errors
    assert isinstance(error, LostError)
    assert "what it has started there may go on" in str(error)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_connection_that_was_lost_between_two_commands_is_made_anew(gpubox, fresh):
    host = Ssh(SLOW)
    fresh.append(host)
    assert host.run(["echo", "1"], timeout=60).text == "1"
    assert not host.lost()
    gpubox.link.reset()
    assert host.run(["echo", "2"], timeout=60).text == "2"
    gpubox.link.reset()
    until(host.lost)
    with host.open_stream(["cat"]) as stream:
        stream.stdin.write(b"3")
        stream.stdin.close()
        assert stream.stdout.read() == b"3"


def test_a_stream_ends_when_its_connection_does(gpubox, fresh):
    host = Ssh(SLOW)
    fresh.append(host)
    with host.open_stream(["cat"]) as stream:
        gpubox.link.reset()
        assert stream.stdout.read() == b""
        assert stream.wait(10) == 255


# -- files -------------------------------------------------------------------------------------------------


@pytest.fixture
def there(gpubox: GpuBox) -> Path:
    path = gpubox.directory / "files" / secrets.token_hex(4)
    path.mkdir(parents=True)
    return path


def test_write_replaces_a_file_whole_with_the_wanted_rights(box, there):
    path = there / "a file with 'quotes' and ü"
    path.write_text("old")
    with open(path) as reader:
        box.write(str(path), b"new", mode=0o600)
        assert reader.read() == "old"
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(there) == [path.name]


def test_a_write_that_fails_leaves_nothing_and_says_so_in_one_sentence(box, there):
    with pytest.raises(HostError, match=r"^gpu-box: cannot write .*/none/file: No such file or directory$"):
        box.write(str(there / "none" / "file"), b"x")
    (there / "directory" / "x").mkdir(parents=True)
    with pytest.raises(HostError, match="gpu-box: cannot write"):
        box.write(str(there / "directory"), b"x")
    assert os.listdir(there) == ["directory"]
    box.write(str(there / "a" / "b"), b"x" * 2_000_000, parents=True)
    assert (there / "a" / "b").stat().st_size == 2_000_000


def test_read_gives_none_for_a_file_that_is_not_there_and_a_sentence_for_one_that_cannot_be_read(box, there):
    data = bytes(range(256)) * 5000
    (there / "data").write_bytes(data)
    assert box.read(str(there / "data")) == data
    assert box.read(str(there / "none")) is None
    assert box.read("/proc/999999999/stat") is None
    with pytest.raises(HostError, match=r"gpu-box: cannot read .*: Is a directory"):
        box.read(str(there))


def test_a_tree_appears_whole_and_is_never_written_twice(box, there):
    target = there / "releases" / "abc"
    files = {"a": b"1", "app/b": b"2", "an odd\nname 'ü'": os.urandom(300_000), "empty": b""}
    assert box.write_tree(str(target), files, mode=0o640)
    assert {str(p.relative_to(target)): p.read_bytes() for p in target.rglob("*") if p.is_file()} == files
    assert stat.S_IMODE((target / "a").stat().st_mode) == 0o640
    assert box.write_tree(str(target), {"a": b"other"}) is False
    assert (target / "a").read_bytes() == b"1"
    assert os.listdir(target.parent) == ["abc"]
    for name in ("../outside", "/tmp/outside", "a/../../b"):
        with pytest.raises(ValueError, match="leads out of"):
            box.write_tree(str(there / "tree"), {name: b"x"})


def test_local_and_ssh_leave_the_same_files(box, there):
    for host, name in ((Local(), "here"), (box, "there")):
        host.write(str(there / name / "file"), b"1", mode=0o640, parents=True)
        host.write_tree(str(there / name / "tree"), {"x/y": b"2"})
    shown = [
        sorted((p.relative_to(top).as_posix(), p.stat().st_mode) for p in top.rglob("*"))
        for top in (there / "here", there / "there")
    ]
    assert shown[0] == shown[1]


@pytest.mark.usefixtures("noisy")
@pytest.mark.program("rsync")
def test_rsync_reaches_the_host_whatever_its_login_prints(box, there, tmp_path):
    (tmp_path / "big").write_bytes(os.urandom(1_000_000))
    rsync = ["rsync", "-a", "-e", box.rsync_shell()]
    subprocess.run([*rsync, str(tmp_path / "big"), f"whatever:{there}/a b"], check=True, timeout=60)
    assert (there / "a b").read_bytes() == (tmp_path / "big").read_bytes()
    subprocess.run([*rsync, f"whatever:{there}/a b", str(tmp_path / "back")], check=True, timeout=60)
    assert (tmp_path / "back").read_bytes() == (tmp_path / "big").read_bytes()


# -- begun early -------------------------------------------------------------------------------------------


def test_a_connection_that_was_begun_early_is_the_one_that_is_used(gpubox, tmp_path):
    before = logins(gpubox)
    (tmp_path / "fabric.yaml").write_text("drafthouse: {hosts: {gpu-box: {address: root@gpu-box}}}\n")
    early.begin("gpu-box", tmp_path)
    early.begin("gpu-box", tmp_path)
    host = connect(HostSettings(name="gpu-box", address="root@gpu-box"))
    assert host.run(["echo", "in"], timeout=30).text == "in"
    assert (host.name, host.python) == ("gpu-box", "python3")
    assert logins(gpubox) == before + 1
    host.close()


def test_what_kept_a_connection_from_being_begun_is_told_by_its_first_use_and_once(gpubox, tmp_path):
    name = gpubox.alias("late", HostName="127.0.0.1", Port=1)
    early.begin(name, tmp_path)
    host = connect(HostSettings(name=name, address=name))
    with pytest.raises(HostError, match=r"^late: 127.0.0.1 port 1 refuses the connection"):
        host.run(["true"], timeout=30)
    gpubox.alias("late")
    assert host.run(["echo", "in"], timeout=30).text == "in"
    host.close()


@pytest.mark.parametrize("name", [None, "localhost", "-oProxyCommand=id", "a b"])
def test_nothing_is_begun_for_this_machine_or_for_what_is_no_host(tmp_path, name):
    early.begin(name, tmp_path)
    assert ssh._begun == {}
