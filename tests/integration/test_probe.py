"""deploy/probe.py as a deploy sends it: what it finds, and that nothing it finds can break it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import deployed
import pytest
from deployed import HOST, TRAINER, processes_of, steps, until

from deploy import evidence, onhost, probe, release
from deploy.health import verdict
from deploy.host import HostError, Local
from deploy.release import Layout
from trainer import status

pytestmark = pytest.mark.slow

PARENT = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
BUSY = "print('hello', flush=True)\nwhile True: pass"


@pytest.fixture
def place(tmp_path):
    yield from deployed.place(tmp_path)


def collect(place, **options):
    return evidence.collect(HOST, str(place.root), str(place.root / "shm"), **options)


def test_a_bare_machine_is_described_without_a_problem(place):
    facts = collect(place, sample=0)
    assert facts["schema"] == 1
    assert facts["problems"] == []
    assert (facts["names"], facts["runs"], facts["weights"]) == ({}, [], [])
    assert facts["state"]["exists"] is False
    assert facts["state"]["writable"] is True
    assert facts["state"]["free_bytes"] > 0
    assert facts["memory"]["total"] > facts["memory"]["available"] > 0
    assert facts["python"] == ".".join(str(part) for part in sys.version_info[:3])
    assert (facts["uid"], facts["gid"]) == (os.getuid(), os.getgid())
    assert facts["groups"]
    assert facts["os"]["id"]
    assert facts["programs"]["docker"] == facts["engine"]["client"]
    assert facts["boot_time"] < facts["time"]


def test_shared_memory_is_told_from_a_disk(tmp_path):
    assert evidence.collect(HOST, str(tmp_path), "/dev/shm/drafthouse-of-a-test", sample=0)["shm"]["is_tmpfs"]
    assert not evidence.collect(HOST, str(tmp_path), "/proc/none", sample=0)["shm"]["is_tmpfs"]


def test_only_python_variables_leave_the_host(place, monkeypatch):
    monkeypatch.setenv("PYTHONBUFFERED", "1")
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    facts = collect(place, sample=0)
    assert facts["environment"]["PYTHONBUFFERED"] == "1"
    assert "hunter2" not in json.dumps(facts)


def test_a_run_in_progress_is_described_with_all_of_its_processes(place):
    run = place.run_dir(PARENT + TRAINER)
    place.start(run)
    until(lambda: steps(run) > 2)
    facts = collect(place)
    (found,) = facts["runs"]
    assert found["run_id"] == "0001-demo"
    assert found["alive"] is True
    assert found["rebooted"] is False
    assert found["heartbeats"]["0"]["step"] > 2
    assert found["log"]["bytes"] > 0
    assert found["log"]["tail"][-1].startswith("step ")
    pids = {process["pid"] for process in found["processes"]}
    assert set(processes_of(run)) | {run.launch().pid} <= pids
    assert os.getpid() not in pids
    trainer = next(p for p in found["processes"] if p["pid"] == run.launch().trainer_pid)
    assert len(trainer["cpu_ticks"]) == 2
    assert trainer["unbuffered"] == "1"
    assert trainer["stdout"].startswith("pipe:")
    assert trainer["rss"] > 1 << 20
    assert abs(trainer["started"] - found["launch"]["trainer_started"]) < 3
    assert verdict(found, facts["time"]).word == "training"


def test_cpu_work_between_the_two_samples_is_seen(place):
    run = place.run_dir(BUSY)
    place.start(run)
    until(
        lambda: (run.log / f"{0:020d}.log").exists() and b"hello" in (run.log / f"{0:020d}.log").read_bytes()
    )
    (found,) = collect(place)["runs"]
    assert sum(p["cpu_ticks"][1] - p["cpu_ticks"][0] for p in found["processes"]) > 0


def test_what_a_trainer_really_runs_with_is_told_without_its_secrets(place, tmp_path):
    script, secrets = tmp_path / "train.py", tmp_path / "secrets"
    script.write_text(TRAINER)
    secrets.write_text("TOKEN=hunter2\n")
    secrets.chmod(0o400)
    command = [sys.executable, "-u", str(script), "--lr", "3e-4"]
    fields = {"secrets": ["TOKEN"], "secrets_file": str(secrets)}
    run = place.run_dir(command, environment={"LR": "τ $(id)", "PYTHONHASHSEED": "0"}, **fields)
    place.start(run)
    until(lambda: steps(run))
    facts = collect(place, sample=0)
    found = facts["runs"][0]["running"]
    assert found["argv"] == command
    assert found["environment"]["LR"] == "τ $(id)"
    assert found["environment"]["PYTHONHASHSEED"] == "0"
    assert found["environment"]["PYTHONUNBUFFERED"] == "1"
    assert found["image_id"] is None
    assert {"path": str(script), "modified": script.stat().st_mtime} in found["files"]
    assert found["started"] <= facts["time"]
    assert "hunter2" not in json.dumps(facts)
    os.kill(run.launch().pid, signal.SIGTERM)
    until(lambda: run.exit() and not run.alive())
    assert collect(place, sample=0)["runs"][0]["running"] is None


def test_without_a_sample_cpu_time_is_read_once(place):
    run = place.run_dir()
    place.start(run)
    until(lambda: steps(run))
    (found,) = collect(place, sample=0)["runs"]
    assert all(len(process["cpu_ticks"]) == 1 for process in found["processes"])


def test_a_run_that_has_ended_owns_no_process_although_its_pids_were_used_again(place):
    run = place.run_dir("print('hello')")
    place.start(run)
    until(lambda: run.exit() and not run.alive())
    launch = run.launch()
    launch.pid, launch.trainer_pid = os.getpid(), os.getsid(0)
    run.write_launch(launch)
    facts = collect(place)
    assert facts["runs"][0]["processes"] == []
    assert verdict(facts["runs"][0], facts["time"]).word == "finished"


def test_names_with_releases_and_links_are_listed(place):
    place.release("aaaaaaaaaaaa")
    place.release("bbbbbbbbbbbb")
    name = place.root / "names" / "demo"
    (name / "current").symlink_to("releases/bbbbbbbbbbbb")
    (name / "previous").symlink_to("releases/aaaaaaaaaaaa")
    (name / "releases" / ".cccc.tmp").mkdir()
    (name / "secrets-0001-demo").touch()
    facts = collect(place, sample=0)
    assert facts["names"]["demo"] == {
        "current": "bbbbbbbbbbbb",
        "previous": "aaaaaaaaaaaa",
        "releases": ["aaaaaaaaaaaa", "bbbbbbbbbbbb"],
        "stop": None,
        "booted": None,
        "images": {},
        "reference": None,
        "secrets": [str(name / "secrets-0001-demo")],
        "changed": {"bbbbbbbbbbbb": ["release.json", "other files"]},  # (it has none)
        "added": {"bbbbbbbbbbbb": []},
    }
    assert facts["switch"] == {"demo": None}


def test_files_of_a_current_or_running_release_that_somebody_changed_are_named(place):
    layout = Layout(str(place.root), "/dev/shm/drafthouse", "demo")
    made, other = (release.of({"run.yaml": b"a: 1\n", "app/trainer/x.py": code}) for code in (b"1", b"2"))
    for one in (made, other):
        release.write(Local(), layout, one)
    (place.root / "names" / "demo" / "current").symlink_to(f"releases/{made.id}")

    def changed():
        return collect(place, sample=0)["names"]["demo"]["changed"]

    assert changed() == {made.id: []}
    for name, data in (("app/trainer/x.py", b"3"), ("run.yaml", None)):
        path = Path(layout.release(made.id)) / name
        path.unlink()
        if data is not None:
            path.write_bytes(data)
    assert changed() == {made.id: ["app/trainer/x.py", "run.yaml"]}
    for name in ("app/torch.py", "app/trainer/__pycache__/x.cpython-311.pyc"):  # Python leaves the second one
        (Path(layout.release(made.id)) / name).parent.mkdir(exist_ok=True)
        (Path(layout.release(made.id)) / name).touch()
    (Path(layout.release(made.id)) / "app/numpy").symlink_to("/")
    assert changed() == {made.id: ["app/numpy", "app/torch.py", "app/trainer/x.py", "run.yaml"]}
    told = collect(place, sample=0)["names"]["demo"]
    assert told["added"] == {made.id: ["app/numpy", "app/torch.py"]}
    os.mkfifo(Path(layout.release(made.id)) / "app/pipe")  # nobody writes into it
    assert "app/pipe" in changed()[made.id]
    (Path(layout.release(made.id)) / "app/pipe").unlink()
    # A manifest that was brought in line with the change no longer gives the release's id.
    manifest = Path(layout.release(made.id)) / "release.json"
    manifest.chmod(0o644)
    manifest.write_text(json.dumps({"files": {"app/trainer/x.py": hashlib.sha256(b"3").hexdigest()}}))
    bad = [
        "release.json",
        "app/numpy",
        "app/torch.py",
    ]  # (what it says of x.py is believed, for want of better)
    assert changed() == {made.id: bad}
    run = place.run_dir(release={"id": other.id})
    with open(run.lock, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert changed() == {made.id: bad, other.id: []}


def test_a_release_without_its_manifest_tells_by_its_id_whether_the_other_files_are_right(place):
    layout = Layout(str(place.root), "/dev/shm/drafthouse", "demo")
    made = release.of({"run.yaml": b"a: 1\n", "app/trainer/x.py": b"1"})
    release.write(Local(), layout, made)
    path = Path(layout.release(made.id))
    whole = (path / "release.json").read_bytes()
    (path / "release.json").unlink()
    assert probe.changed(path) == ["release.json"]
    (path / "run.yaml").unlink()
    assert probe.changed(path) == ["release.json", "other files"]
    assert probe.added(path, probe.changed(path)) == []
    (path / "release.json").write_bytes(whole.replace(b'"files": {', b'"files": {"app/x.py": "0",'))
    assert probe.changed(path) == ["release.json", "app/x.py", "run.yaml"]


def test_weights_are_listed_with_their_size(place):
    path = place.root / "shm" / "toy@0123456789ab"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"x" * 1000)
    (place.root / "shm" / "toy").symlink_to(path)
    (place.root / "shm" / ".incoming").mkdir()
    assert collect(place, sample=0)["weights"] == [
        {"name": "toy", "digest": "0123456789ab", "path": str(path), "bytes": 1000}
    ]


def test_only_the_newest_runs_of_a_name_are_read_and_other_names_keep_theirs(place):
    first = place.run_dir(name="other")
    for _ in range(25):
        place.run_dir()
    runs = [run["run_id"] for run in collect(place, sample=0)["runs"]]
    assert runs == [first.path.name, *(f"{n:04d}-demo" for n in range(7, 27))]


def test_a_run_in_progress_is_read_however_many_came_after_it(place):
    running = place.run_dir()
    for _ in range(25):
        place.run_dir()
    with open(running.lock, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        runs = collect(place, sample=0)["runs"]
    assert [run["run_id"] for run in runs if run["alive"]] == ["0001-demo"]
    assert len(runs) == 21


# -- files that are not ours, or not whole ------------------------------------------------------------------

FILES = ["run.json", "launch.json", "exit.json", "switch.json", "status/0.json"]
CONTENTS = [
    b"",
    b"{half",
    b"[]",
    b"null",
    b"3",
    b'"text"',
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b'{"pid": "x", "time": []}',
]


@pytest.mark.parametrize("content", CONTENTS, ids=lambda content: repr(content[:12]))
def test_a_half_written_or_foreign_file_becomes_a_problem_and_the_rest_is_still_told(place, content):
    for file in FILES:
        run = place.run_dir()
        (run.path / "status").mkdir()
        (run.path / file).write_bytes(content)
    (place.root / "names" / "demo" / "stop.json").parent.mkdir(parents=True)
    (place.root / "names" / "demo" / "stop.json").write_bytes(content)
    good = place.run_dir()
    facts = collect(place, sample=0)
    assert len(facts["runs"]) == len(FILES) + 1
    assert facts["runs"][-1]["run"]["run_id"] == good.path.name
    for run in facts["runs"]:
        verdict(run, facts["time"])
    if not content.startswith((b'{"', b"null")):
        for file in [*FILES, "stop.json"]:
            assert any(file in problem for problem in facts["problems"]), file


def test_things_in_the_wrong_place_break_nothing(place):
    run = place.run_dir()
    (run.path / "exit.json").mkdir()
    (run.path / "status").write_text("a file")
    (run.path / "log").write_text("a file")
    other = place.run_dir()
    other.log.mkdir()
    (other.log / f"{0:020d}.log").mkdir()
    (other.path / "launch.lock").mkdir()
    (place.root / "runs" / "not-a-run").mkdir()
    (place.root / "names").mkdir()
    (place.root / "names" / "file").write_text("")
    (place.root / "names" / "Bad Name").mkdir()
    facts = collect(place, sample=0)
    assert [found["run_id"] for found in facts["runs"]] == ["0001-demo", "0002-demo"]
    assert facts["names"] == {}
    assert facts["problems"]


def test_random_damage_never_breaks_the_probe_or_the_verdict(place):
    """A healthy run's files, cut and flipped at random."""
    run = place.run_dir()
    place.start(run)
    until(lambda: steps(run))
    os.kill(run.launch().pid, signal.SIGTERM)
    until(lambda: run.exit() and not run.alive())
    chance = random.Random(7)
    for number in range(2, 32):
        copy = run.path.with_name(f"{number:04d}-copy{number % 2}")
        shutil.copytree(run.path, copy, ignore=shutil.ignore_patterns("log"))
        for file in FILES:
            path = copy / file
            if not path.exists():
                continue
            data = bytearray(path.read_bytes())
            for _ in range(chance.randrange(1, 4)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            path.write_bytes(data[: chance.randrange(1, len(data) + 1)] if chance.random() < 0.5 else data)
    facts = collect(place, sample=0)
    assert len(facts["runs"]) == 31
    for found in facts["runs"]:
        assert verdict(found, facts["time"]).reason


def test_a_python_that_is_not_there_is_an_error_in_one_sentence(place):
    with pytest.raises(HostError, match="no program"):
        evidence.collect(Local(python="/no/such/python"), str(place.root))


def test_an_answer_that_is_no_json_is_an_error_in_one_sentence(place, monkeypatch):
    welcome = [sys.executable, "-c", "print('Welcome!')"]
    monkeypatch.setattr(onhost, "script", lambda host, module, *arguments: (welcome, b""))
    with pytest.raises(HostError, match="no JSON"):
        evidence.collect(HOST, str(place.root))


# -- the engine --------------------------------------------------------------------------------------------


class Engine(threading.Thread):
    """Answers on a socket as an engine does, or in other ways."""

    def __init__(self, path, answer: bytes | None) -> None:
        super().__init__(daemon=True)
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(path))
        self.socket.listen()
        self.answer = answer
        self.start()

    def run(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            if self.answer is not None:
                with contextlib.suppress(OSError):  # whoever only looks who listens is gone already
                    connection.recv(4096)
                    connection.sendall(self.answer)
                connection.close()


def engine_facts(place, monkeypatch, tmp_path, answer: bytes | None, client: str = ""):
    bin_directory = tmp_path / "bin"
    bin_directory.mkdir()
    if client:
        (bin_directory / "docker").write_text(f"#!/bin/sh\n{client}\n")
        (bin_directory / "docker").chmod(0o755)
    path = tmp_path / "docker.sock"
    server = Engine(path, answer)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    monkeypatch.setenv("PATH", f"{bin_directory}:{os.environ['PATH']}")
    try:
        return collect(place, sample=0)["engine"]
    finally:
        server.socket.close()


def test_an_engine_that_answers_is_told_with_its_version(place, monkeypatch, tmp_path):
    answer = b'HTTP/1.0 200 OK\r\n\r\n{"Version": "27.1.0"}'
    engine = engine_facts(place, monkeypatch, tmp_path, answer, client="echo 2.29.0")
    assert (engine["answers"], engine["version"], engine["compose"]) == (True, "27.1.0", "2.29.0")


def test_a_client_without_an_engine_is_no_engine(place, monkeypatch, tmp_path):
    """A bare machine often has Docker's client."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    (tmp_path / "docker").write_text("#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2\nexit 1\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    engine = collect(place, sample=0)["engine"]
    assert engine["client"] == str(tmp_path / "docker")
    assert (engine["answers"], engine["version"]) == (False, None)
    assert "Cannot connect" in engine["error"]


@pytest.mark.root
def test_an_engine_that_we_may_not_use_is_told_from_one_that_is_not_there():
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:  # one that another user can look into
        os.chmod(directory, 0o755)
        path = f"{directory}/docker.sock"
        server = Engine(path, None)
        os.chmod(path, 0o660)
        argv, program = onhost.script(HOST, "deploy.probe", "--sample", "0", "--state", f"{directory}/state")
        try:
            done = subprocess.run(
                ["/usr/bin/python3", *argv[1:]],
                input=program,
                stdout=subprocess.PIPE,
                env={"DOCKER_HOST": f"unix://{path}", "PATH": "/usr/bin:/bin", "HOME": directory},
                user=65534,
                group=65534,
                extra_groups=[],
                check=True,
            )
        finally:
            server.socket.close()
    engine = json.loads(done.stdout)["engine"]
    assert (engine["answers"], engine["permitted"]) == (False, False)
    assert "Permission denied" in engine["error"]


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.0 200 OK\r\n\r\n{half", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.0 200 OK\r\n\r\n[]"]
)
def test_something_else_on_the_socket_is_no_engine(place, monkeypatch, tmp_path, answer):
    engine = engine_facts(place, monkeypatch, tmp_path, answer, client="exit 1")
    assert engine["answers"] is False
    assert engine["error"]


def test_an_engine_that_hangs_is_given_up_on_and_its_client_is_not_asked_too(place, monkeypatch, tmp_path):
    engine = engine_facts(place, monkeypatch, tmp_path, None, client="echo 27.1.0")
    assert engine["answers"] is False
    assert "does not answer within 2 s" in engine["error"]


def test_a_compose_plugin_that_is_missing_is_told_although_the_engine_answers(place, monkeypatch, tmp_path):
    answer = b'HTTP/1.0 200 OK\r\n\r\n{"Version": "27.1.0"}'
    client = "echo \"docker: 'compose' is not a docker command.\" >&2; exit 1"
    engine = engine_facts(place, monkeypatch, tmp_path, answer, client=client)
    assert (engine["answers"], engine["compose"]) == (True, None)
    assert "compose" in engine["error"]


def test_a_run_is_alive_for_every_reader_and_reading_never_keeps_one_from_starting(place):
    """The probe tests locks by holding them for a moment; a start at that moment must still succeed."""
    probing = threading.Event()

    def keep_probing():
        while not probing.is_set():
            for run in status.list_runs(place.root / "runs"):
                run.alive()

    thread = threading.Thread(target=keep_probing, daemon=True)
    thread.start()
    try:
        for _ in range(5):
            run = place.run_dir("print('hello')")
            place.start(run)
            until(lambda run=run: run.exit())
            assert run.exit().reason == "finished"
    finally:
        probing.set()
        thread.join()
