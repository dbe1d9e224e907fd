"""What launch refuses, and how it says so; and the runs that it makes itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from launching import gone, launched, make_run, python

from trainer.status import Run, RunDir

pytestmark = pytest.mark.slow


def launch(*words: str, **keywords) -> subprocess.CompletedProcess:
    command = [sys.executable, "-u", "-m", "trainer.launch", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **keywords)


def one_sentence(answer: subprocess.CompletedProcess) -> str:
    assert answer.stderr.count("\n") == 1, answer.stderr
    assert "Traceback" not in answer.stderr
    return answer.stderr


@pytest.mark.parametrize(
    ("command", "fields", "code", "words"),
    [
        (["no-such-command"], {}, 127, "was not found"),
        (["/etc/hostname"], {}, 126, "cannot be run"),
        (["/etc"], {}, 126, "cannot be run"),
        (["./script"], {}, 127, "interpreter"),
        (["true"], {"working_directory": "/no/such/place"}, 2, "working directory /no/such/place"),
        (["true"], {"secrets": ["TOKEN"], "secrets_file": "/no/such/file"}, 2, "secrets file"),
        ([], {}, 2, "`command`"),
        (["true"], {"environment": {"A": 1}}, 2, "environment.A"),
    ],
)
def test_what_cannot_be_started_is_told_in_one_sentence_and_recorded(tmp_path, command, fields, code, words):
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    directory = make_run(tmp_path / "run", command, restart_attempts=3, **fields)
    answer = launch(
        "--run-dir", str(directory.path), cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.getcwd()}
    )
    assert answer.returncode == code
    assert words in one_sentence(answer)
    record = directory.exit()
    assert (record.reason, record.code) == ("failed", code)
    assert words in record.message
    if directory.log.exists():
        assert words in (directory.log / f"{0:020d}.log").read_text()


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "not valid JSON"), ("{}", "lacks"), ('{"run_id": "a", "name": "a", "command": 3}', "command is")],
)
def test_a_broken_run_json_is_told_and_recorded(tmp_path, content, words):
    (tmp_path / "run.json").write_text(content)
    answer = launch("--run-dir", str(tmp_path))
    assert answer.returncode == 2
    assert words in one_sentence(answer)
    assert RunDir(tmp_path).exit().code == 2


def test_a_directory_that_is_no_run_is_left_as_it_is(tmp_path):
    answer = launch("--run-dir", str(tmp_path))
    assert answer.returncode == 2
    assert "no run.json" in one_sentence(answer)
    assert list(tmp_path.iterdir()) == []
    assert "not a directory" in one_sentence(launch("--run-dir", str(tmp_path / "none")))


def test_a_run_starts_once(tmp_path):
    directory = make_run(tmp_path, ["sh", "-c", "echo once"])
    assert launch("--run-dir", str(tmp_path)).returncode == 0
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    answer = launch("--run-dir", str(tmp_path))
    assert answer.returncode == 2
    assert "a run starts once" in one_sentence(answer)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    (tmp_path / "exit.json").unlink()  # as after a kill of launch
    assert "lost its launch" in one_sentence(launch("--run-dir", str(tmp_path)))
    assert directory.exit() is None


def test_a_second_launch_is_refused_while_the_first_goes_on(tmp_path):
    with launched(tmp_path, python("import time; print('ready'); time.sleep(600)")) as run:
        run.wait_for_log(b"ready")
        answer = launch("--run-dir", str(tmp_path))
        assert answer.returncode == 2
        assert "in progress" in one_sentence(answer)
        assert not gone(run.trainer_pid())
        run.term()
        run.finish()


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--run-dir", "x", "--state", "y"],
        ["--state", "x"],
        ["--run-dir", "x", "--name", "n"],
        ["--nonsense"],
    ],
)
def test_a_wrong_command_line_is_explained(words):
    answer = launch(*words)
    assert answer.returncode == 2
    assert "Traceback" not in answer.stderr
    assert "trainer.launch: error:" in answer.stderr


def test_a_state_directory_gets_the_next_run_and_its_run_json(tmp_path):
    for number in (1, 2):
        answer = launch("--state", str(tmp_path), "--name", "demo", "--", "echo", "a b", "--", "c")
        assert answer.returncode == 0
        directory = RunDir(tmp_path / "runs" / f"{number:04d}-demo")
        assert directory.run().command == ["echo", "a b", "--", "c"]
        assert directory.exit().reason == "finished"
        assert "a b -- c\n" in answer.stdout


def test_a_name_with_a_run_in_progress_is_refused(tmp_path):
    with launched(
        tmp_path / "runs" / "0001-demo", python("import time; print('ready'); time.sleep(600)")
    ) as run:
        run.wait_for_log(b"ready")
        answer = launch("--state", str(tmp_path), "--name", "demo", "--", "true")
        assert answer.returncode == 2
        assert "0001-demo is in progress" in one_sentence(answer)
        assert [entry.name for entry in (tmp_path / "runs").iterdir()] == ["0001-demo"]
        run.term()
        run.finish()


def test_a_name_that_cannot_be_one_is_refused(tmp_path):
    answer = launch("--state", str(tmp_path / "state"), "--name", "../x", "--", "true")
    assert answer.returncode == 2
    assert "'../x'" in one_sentence(answer)
    assert not (tmp_path / "state").exists()


def test_run_json_of_a_newer_schema_still_starts(tmp_path):
    make_run(tmp_path, ["true"])
    value = json.loads((tmp_path / "run.json").read_text())
    value["something_new"] = 1
    (tmp_path / "run.json").write_text(json.dumps(value))
    assert launch("--run-dir", str(tmp_path)).returncode == 0
    assert isinstance(RunDir(tmp_path).run(), Run)
