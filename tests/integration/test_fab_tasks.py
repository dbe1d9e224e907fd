"""The tasks of the fabfile as people use them: a project of its own, a state of its own, real runs."""

# ruff: noqa: E501  (whole sentences, as people read them)

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployed import CHECKOUT, processes_of, until
from fabbed import COUNTING, FAB, Fab, project

from deploy import evidence, lock
from deploy.host import Local

pytestmark = pytest.mark.slow

# A file named by GATE ends it, with the exit code that the file holds.
GATED = """\
command:
- python
- -c
- |
  import os, sys, time
  print("first", flush=True)
  while not os.path.exists(os.environ["GATE"]):
      time.sleep(0.02)
  print("last", flush=True)
  sys.exit(int(open(os.environ["GATE"]).read()))
environment: {GATE: GATE_PATH}
restart: {attempts: 0}
settle_seconds: 0
"""


@pytest.fixture
def fab(tmp_path: Path) -> Iterator[Fab]:
    yield from project(tmp_path)


# -- the life of a run -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_name_is_deployed_left_alone_changed_looked_at_and_stopped(fab: Fab) -> None:
    planned = fab.ok("plan")
    assert not fab.place.root.exists()
    assert fab.ok("deploy", "--no-follow") == planned
    first = fab.runs[0]
    assert first.alive()

    before = fab.snapshot()
    assert fab.ok("plan").startswith("unchanged: 0001-demo runs release ")
    assert fab.ok("deploy", "--no-follow").startswith("unchanged: 0001-demo runs release ")
    assert [run.path.name for run in fab.runs] == ["0001-demo"]
    assert set(fab.snapshot()) == set(before)

    changed = fab.ok("restart", "--no-follow", "--set", "environment.GREETING=bye; $(id) 'x'")
    assert "environment.GREETING: hello → \"bye; $(id) 'x'\"" in changed
    assert "stop      0001-demo" in changed
    second = fab.runs[1]
    assert not first.alive()
    assert second.alive()
    until(lambda: "greeting bye; $(id) 'x'\n" in fab.log(second))
    made = second.run()
    assert made is not None
    assert made.changes == {"environment.GREETING": "bye; $(id) 'x'"}

    rows = json.loads(fab.ok("status", "--json"))
    assert [(row["run_id"], row["drift"]) for row in rows] == [("0002-demo", [])]
    fab.file(COUNTING + "restart: {attempts: 1}\n")
    assert "drift: the run differs from what is rendered now" in (shown := fab.ok("status"))
    assert "restart.attempts: 3 → 1" in shown

    assert "stop demo on localhost" in fab.ok("stop")
    assert not second.alive()
    assert fab.ok("stop") == "nothing to stop: no run of demo is in progress on localhost\n"
    table = fab.ok("runs").splitlines()
    assert [line.split()[0] for line in table] == ["RUN", "0002-demo", "0001-demo"]
    assert "stopped (143)" in table[1]

    same = fab.ok("restart", "--same", "--no-follow")
    assert "(--same)" in same
    third = fab.runs[2]
    until(lambda: "greeting bye; $(id) 'x'\n" in fab.log(third))
    assert json.loads(fab.ok("status", "--json"))[0]["run_id"] == "0003-demo"


@pytest.mark.slow
def test_a_release_that_was_edited_on_the_host_is_named_and_not_started_again_as_it_is(fab: Fab) -> None:
    fab.ok("deploy", "--no-follow")
    made = fab.runs[0].run()
    assert made is not None
    edited = (
        fab.place.root / "names" / "demo" / "releases" / made.release["id"] / "app" / "trainer" / "guard.py"
    )
    edited.chmod(0o644)
    edited.write_text(edited.read_text() + "# edited\n")
    named = "app/trainer/guard.py"
    assert fab.ok("plan").splitlines()[1:] == [
        f"note: release file {named} was changed on the host; the running process may differ; "
        "fab restart writes it anew"
    ]
    assert json.loads(fab.ok("status", "--json"))[0]["drift"] == [f"{named}: changed on the host"]
    done = fab.run("restart", "--same", "--no-follow")
    assert (done.returncode, done.stderr) == (
        1, f"{named} of release {made.release['id']} of demo was changed on localhost; fab restart writes it anew\n"
    )  # fmt: skip
    assert [run.alive() for run in fab.runs] == [True]
    fab.ok("restart", "--no-follow")
    assert json.loads(fab.ok("status", "--json"))[0]["drift"] == []
    assert not edited.read_text().endswith("# edited\n")
    fab.ok("restart", "--same", "--no-follow")
    assert [run.alive() for run in fab.runs] == [False, False, True]


def test_what_a_dry_run_prints_is_what_a_deploy_then_prints_and_it_changes_nothing(fab: Fab) -> None:
    printed = fab.ok("deploy", "--dry-run")
    assert not fab.place.root.exists()
    assert fab.ok("--dry", "deploy") == printed
    assert not fab.place.root.exists()
    assert fab.ok("deploy", "--no-follow") == printed


@pytest.mark.slow
def test_deploy_follows_the_log_to_its_end_and_ends_with_the_runs_exit_code(fab: Fab) -> None:
    gate = fab.root / "gate"
    fab.file(GATED.replace("GATE_PATH", str(gate)))
    following = fab.begin("deploy", stdout=subprocess.PIPE, text=True)
    assert following.stdout is not None
    seen = []
    for line in following.stdout:
        seen.append(line)
        if line == "first\n":
            break
    gate.write_text("3")
    rest = following.stdout.read()
    assert following.wait(60) == 3
    assert rest.splitlines()[0] == "last"
    assert [line for line in seen if line.startswith("── drafthouse run 0001-demo · attempt 1 ")]


@pytest.mark.slow
def test_ctrl_c_ends_the_following_and_the_run_goes_on(fab: Fab) -> None:
    following = subprocess.Popen(
        [*FAB, "deploy"],
        cwd=fab.root,
        env=fab.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert following.stdout is not None
    for line in following.stdout:
        if line.startswith("line "):
            break
    os.killpg(following.pid, signal.SIGINT)
    _, errors = following.communicate(timeout=60)
    assert following.returncode == 130
    assert errors.endswith(
        "\nthe run goes on; fab tail --name demo follows it again, fab stop --name demo ends it\n"
    )
    assert "Traceback" not in errors
    run = fab.runs[0]
    assert run.alive()
    shown = fab.ok("tail", "--lines", "2", "--no-follow").splitlines()
    assert len(shown) == 2
    assert shown[-1].startswith("line ")
    assert fab.ok("tail", "--run-id", "0001-demo", "--lines", "1", "--no-follow").startswith("line ")


@pytest.mark.slow
def test_tail_goes_on_with_the_next_run_after_a_restart_and_ends_with_the_last_ones_exit_code(
    fab: Fab,
) -> None:
    """CASES 11. Never a line of the old run below the banner of the new one."""
    fab.ok("deploy", "--no-follow")
    tail = fab.begin("tail", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert tail.stdout is not None
    until(lambda: tail.stdout.readline().startswith("line "))
    fab.ok("restart", "--no-follow", "--set", "environment.GREETING=again")
    seen = []
    until(
        lambda: seen.append(tail.stdout.readline()) or (seen[-1] == "line 3\n" and "greeting again\n" in seen)
    )
    fab.ok("stop")
    rest, errors = tail.communicate(timeout=60)
    assert tail.returncode == 143
    assert "── 0001-demo stopped with exit code 143 · 0002-demo follows" in errors
    text = "".join(seen) + rest
    below = text[text.index("── drafthouse run 0002-demo") :].splitlines()
    assert below[1] == "greeting again"
    assert [line for line in below if line.startswith("line ")][:3] == ["line 0", "line 1", "line 2"]


def test_a_command_that_fails_at_once_is_not_called_running(fab: Fab) -> None:
    fab.file("command: [sh, -c, 'echo broken; exit 7']\nrestart: {attempts: 0}")
    done = fab.run("deploy")
    assert done.returncode == 7
    assert "\nbroken\n" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_answers_for_scripts_are_json_and_nothing_else(fab: Fab) -> None:
    made = json.loads(fab.ok("deploy", "--json"))
    assert (made["run_id"], made["plan"]["action"], made["outcome"]["word"]) == ("0001-demo", "start", "done")
    assert json.loads(fab.ok("deploy", "--json"))["plan"]["action"] == "unchanged"
    assert [run["run_id"] for run in json.loads(fab.ok("runs", "--json"))] == ["0001-demo"]
    stopped = json.loads(fab.ok("stop", "--json"))
    assert (stopped["plan"]["stop"]["run_id"], stopped["outcome"]["word"]) == ("0001-demo", "done")


@pytest.mark.slow
def test_a_deploy_that_somebody_else_has_under_way_is_named_and_nothing_is_touched(fab: Fab) -> None:
    fab.ok("deploy", "--no-follow")
    with lock.hold(Local(), str(fab.place.root), "demo", "restart"):
        before = {path for path in fab.snapshot() if "/log/" not in path}
        done = fab.run("restart", "--no-follow")
        assert done.returncode == 1
        assert f"demo on localhost is locked by {lock.who()} (restart, since " in done.stderr
        assert {path for path in fab.snapshot() if "/log/" not in path} == before
    assert [run.path.name for run in fab.runs] == ["0001-demo"]
    assert fab.runs[0].alive()


# -- what reaches the run ----------------------------------------------------------------------------------


def test_hostile_values_reach_the_process_byte_for_byte_and_secrets_reach_nothing_else(fab: Fab) -> None:
    hostile = {
        "BLANKS": "  two  words ",
        "SHELL": "; $(touch /tmp/no) `id` && $HOME | x",
        "QUOTES": "'\"\\'",
        "LINES": "one\ntwo\r\n\tthree",
        "UNICODE": "τ̂ ≥ 2 · ünïcødé",
        "EMPTY": "",
        "EQUALS": "a=b=c",
    }
    text = {
        "command": ["python", "-c", "import json, os; print(json.dumps(dict(os.environ)), flush=True)"],
        "environment": hostile,
        "secrets": {"TOKEN": {"env": "MINE"}, "PEM": {"file": "key.pem"}},
        "restart": {"attempts": 0},
    }
    fab.file(json.dumps(text))
    (fab.root / "key.pem").write_text("-----BEGIN\nhunter2-pem\n-----END\n")
    done = fab.run("--debug", "deploy", "--debug", MINE="hunter2 $(id) 'x'")
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    found = json.loads(line)
    assert {key: found[key] for key in hostile} == hostile
    assert found["TOKEN"] == "hunter2 $(id) 'x'"
    assert found["PEM"] == "-----BEGIN\nhunter2-pem\n-----END"

    assert "hunter2" not in done.stderr + done.stdout.replace(line, "")
    home = fab.place.root / "names" / "demo"
    holding = {path for path, (_, data) in fab.snapshot().items() if b"hunter2" in data}
    logs = {path for path in holding if "/log/" in path}  # the command printed them itself
    assert holding - logs == {str(home / "secrets-0001-demo")}
    assert (home / "secrets-0001-demo").stat().st_mode & 0o777 == 0o400


@pytest.mark.slow
def test_every_run_keeps_the_secrets_that_it_was_started_with_and_those_of_runs_that_are_over_go(
    fab: Fab,
) -> None:
    """The run in progress reads its file at every attempt, also while the next one is made ready."""
    home = fab.place.root / "names" / "demo"

    def kept() -> dict[str, str]:
        return {path.name: path.read_text() for path in home.glob("secrets*")}

    fab.file(COUNTING + "secrets: {TOKEN: {env: MINE}}\n")
    fab.ok("deploy", "--no-follow", MINE="one")
    (home / "secrets").write_text("TOKEN=left by an earlier version\n")
    for known in ({"MINE": "one"}, {}):  # what cannot be read here cannot be compared
        said = fab.ok("deploy", "--no-follow", **known)
        assert said.startswith("unchanged: 0001-demo runs release ")
        unread = "note: secret TOKEN: cannot be read here, so it is not compared\n"
        assert said.endswith(unread) == (not known)
    assert fab.ok("diff").endswith("\nsecret TOKEN: cannot be read here, so it is not compared\n")
    assert "TOKEN" not in fab.ok("diff", MINE="one")
    assert fab.ok("diff", MINE="two").endswith("\nsecret TOKEN: changed (not shown)\n")
    planned = fab.ok("plan", MINE="two")
    assert ", unchanged\n            secret TOKEN: changed (not shown)\n" in planned
    assert "two" not in planned
    assert json.loads(fab.ok("plan", "--json", MINE="two"))["plan"]["differences"] == [
        "secret TOKEN: changed (not shown)"
    ]
    assert "secret TOKEN: changed (not shown)\n" in fab.ok("deploy", "--no-follow", MINE="two")
    assert fab.ok("plan", MINE="two").startswith("unchanged: 0002-demo runs release ")
    assert kept() == {"secrets-0001-demo": "TOKEN=one\n", "secrets-0002-demo": "TOKEN=two\n"}
    fab.ok("restart", "--same", "--no-follow")  # needs no MINE
    assert kept() == {"secrets-0002-demo": "TOKEN=two\n", "secrets-0003-demo": "TOKEN=two\n"}
    made = fab.runs[2].run()
    assert made is not None
    assert made.secrets_file == str(home / "secrets-0003-demo")
    fab.ok("stop")
    (home / "secrets-0003-demo").rename(fab.root / "aside")
    done = fab.run("restart", "--same", "--no-follow")
    sentence = "secret TOKEN needs the environment variable MINE; set it and deploy again\n"
    assert (done.returncode, done.stderr) == (1, sentence)
    fab.file(COUNTING)
    done = fab.run("restart", "--same", "--no-follow")
    assert (done.returncode, done.stderr) == (
        1,
        f"the secrets of release {made.release['id']} of demo (TOKEN) are on localhost no more; "
        "fab deploy reads them again\n",
    )
    (fab.root / "aside").rename(home / "secrets-0003-demo")
    fab.file(COUNTING)
    fab.ok("deploy", "--no-follow")
    assert kept() == {}


def test_weights_are_staged_and_the_command_learns_where(fab: Fab, tmp_path: Path) -> None:
    model = tmp_path / "small"
    model.mkdir()
    (model / "config.json").write_text("{}")
    header = b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abcd")
    fab.file(f"command: [sh, -c, 'echo at $DRAFTHOUSE_WEIGHTS; ls $DRAFTHOUSE_WEIGHTS']\nweights: {model}\n")
    out = fab.ok("deploy")
    staged = next((fab.root / "shm").glob("small@*"), None) or model  # used in place if /tmp is a tmpfs
    assert f"\nat {staged}\n" in out
    assert "\nmodel.safetensors\n" in out


def test_the_run_is_the_trainer_of_the_release_not_of_the_checkout(fab: Fab) -> None:
    fab.ok("deploy", "--no-follow")
    made = fab.runs[0].run()
    assert made is not None
    app = fab.place.root / "names" / "demo" / "releases" / made.release["id"] / "app"
    assert processes_of(fab.runs[0])
    facts = evidence.collect(Local(), str(fab.place.root), sample=0)
    launch = next(
        item for item in facts["runs"][0]["processes"] if "trainer.launch" in " ".join(item["cmdline"])
    )
    variables = dict(
        item.split(b"=", 1)
        for item in Path(f"/proc/{launch['pid']}/environ").read_bytes().split(b"\0")
        if item
    )
    assert variables[b"PYTHONPATH"].decode() == str(app)
    assert os.readlink(app.parent.parent.parent / "current") == f"releases/{made.release['id']}"


# -- input that is wrong -----------------------------------------------------------------------------------

BAD = [
    (2, ["deploy", "--host", "loclhost"],
     "host 'loclhost' is neither in fabric.yaml nor a Host of the SSH configuration, and its name does not resolve; "
     "did you mean localhost?"),
    (2, ["deploy", "--run", "dmo"], "run 'dmo' (--run) is no file in runs/; did you mean demo?"),
    (2, ["deploy", "--run", "broken"],
     "runs/broken.yaml:2 is not valid YAML: expected ',' or ']', but got '<stream end>' at column 4; correct that "
     "line"),
    (2, ["deploy", "--run", "unknown"], "runs/unknown.yaml:2: unknown key 'enviroment'; did you mean environment?"),
    (2, ["deploy", "--run", "typed"], "runs/typed.yaml:2: grace_seconds is 'soon', but must be a number"),
    (2, ["deploy", "--run", "toy", "--set", "lr=-1"], "--set lr: trainer.lr is -1, but must be a number above 0"),
    (2, ["restart", "--run", "toy", "--set", "block_size=1"],
     "--set block_size: trainer.block_size is 1, but must be a whole number from 2 to 256"),
    (2, ["deploy", "--name", "No Name"],
     "--name: name is 'No Name', but a name needs lower-case letters, digits, '.', '_' and '-', begins and ends with "
     "a letter or a digit, and has at most 63 characters"),
    (1, ["deploy", "--run", "absent"],
     "there is no program trian on localhost; correct command: in the run's file, or give the program's whole path"),
    (1, ["deploy", "--run", "lost"], "weights /no/such/model do not exist; correct weights: in the run's file"),
    (1, ["deploy", "--run", "secret"],
     "secret TOKEN needs the environment variable NO_SUCH_VARIABLE; set it and deploy again"),
    (1, ["deploy", "--run", "demo", "--set", "environment.PYTHONBUFFERED=1"],
     "the run's environment has PYTHONBUFFERED, which Python does not know; the name is PYTHONUNBUFFERED, and "
     "Drafthouse sets it: remove yours"),
    (1, ["restart", "--same", "--name", "never"],
     "nothing of never is deployed on localhost; --same starts a deployed release again, fab deploy makes one"),
    (2, ["restart", "--same", "--set", "environment.A=1"],
     "--same starts the deployed release as it is, so --set cannot change it; give one of them"),
    (2, ["tail", "--name", "dem"], "there is no run of dem on localhost; did you mean demo?"),
    (2, ["tail", "--run-id", "0001-dem"], "there is no run 0001-dem on localhost; did you mean 0001-demo?"),
    (2, ["tail", "--run-id", "seven"], "--run-id 'seven' is not a run id (like 0007-exp-ddtree)"),
    (2, ["deploy", "--lock-wait", 400 * "9"], "--lock-wait is 999999999…, but must have at most 9 digits"),
    (2, ["tail", "--lines", "few"], "--lines few must be a whole number, like --lines 60"),
    (2, ["stop", "--name", "dem"], "there is no dem on localhost; did you mean demo?"),
    (2, ["status", "--interval", "5"], "--interval is for --watch; add it, or leave --interval out"),
    (2, ["status", "--watch", "--interval", "0"], "--interval 0 leaves no pause; give at least 1"),
    (2, ["tail", "--run-id", "0001-demo", "--name", "idle"],
     "--run-id 0001-demo is a run of demo, not of idle; give one of them"),
    (2, ["-H", "a,b", "deploy", "--host", "z"],
     "-H a,b and --host z both name hosts: use --host for one, or -H for several"),
]  # fmt: skip


@pytest.mark.slow
def test_wrong_input_is_one_sentence_a_code_and_not_a_byte_of_change(fab: Fab) -> None:
    fab.ok("deploy", "--no-follow")
    fab.ok("stop")
    fab.file("command: [a]\nx: [1\n", "broken")
    fab.file("command: [a]\nenviroment: {}\n", "unknown")
    fab.file("command: [a]\ngrace_seconds: soon\n", "typed")
    fab.file("trainer: {}\nweights: toy\n", "toy")
    fab.file("command: [trian, --now]\n", "absent")
    fab.file("command: ['true']\nweights: /no/such/model\n", "lost")
    fab.file("command: ['true']\nsecrets: {TOKEN: {env: NO_SUCH_VARIABLE}}\n", "secret")
    before = fab.snapshot()
    for code, words, said in BAD:
        done = fab.run(*words)
        assert (done.stderr, done.returncode, done.stdout) == (f"{said}\n", code, ""), words
        assert fab.snapshot() == before, words


def test_no_room_on_the_disk_is_found_before_anything_is_written(fab: Fab) -> None:
    here = shutil.disk_usage(fab.root).free
    crippled = fab.root / "sitecustomize.py"  # the probe runs isolated, so its answer is replaced on our side
    crippled.write_text(
        "import deploy.evidence as e\n"
        "real = e.collect\n"
        "def collect(*a, **k):\n"
        "    facts = real(*a, **k); facts['state']['free_bytes'] = 1000; return facts\n"
        "e.collect = collect\n"
    )
    done = fab.run("deploy", "--no-follow", PYTHONPATH=f"{fab.root}:{CHECKOUT}")
    assert here > 1000
    assert done.returncode == 1
    assert done.stderr == (
        f"{fab.place.root} has 1.0 kB free, but a run needs at least 50 MB for release, log and checkpoints; "
        "free some, or choose another place with state: in fabric.yaml\n"
    )
    assert not fab.place.root.exists()


def test_a_broken_fabric_yaml_is_one_sentence(fab: Fab) -> None:
    with open(fab.root / "fabric.yaml", "a") as file:
        file.write("  bad: [x\n")
    done = fab.run("--list")
    assert done.returncode == 2
    assert done.stderr.startswith("fabric.yaml:")
    assert done.stderr.count("\n") == 1


def test_hosts_side_by_side_are_told_apart(fab: Fab) -> None:
    out = fab.ok("-H", "localhost,127.0.0.1", "runs")
    assert sorted(out.splitlines()) == [
        "127.0.0.1   ok",
        "127.0.0.1 │ no runs on localhost; fab deploy starts one",
        "localhost   ok",
        "localhost │ no runs on localhost; fab deploy starts one",
    ]


def test_one_host_before_the_task_is_the_host_after_it_and_no_connection_is_made(fab: Fab) -> None:
    assert fab.ok("-H", "localhost", "plan") == fab.ok("plan", "--host", "localhost")


@pytest.mark.slow
def test_render_writes_what_a_deploy_would_write(fab: Fab, tmp_path: Path) -> None:
    out = fab.ok("render", "--out", str(tmp_path / "out"), "--set", "environment.GREETING=x")
    release_id = out.split()[1].rstrip(":")
    fab.ok("deploy", "--no-follow", "--set", "environment.GREETING=x")
    deployed = fab.place.root / "names" / "demo" / "releases" / release_id
    files = {
        path.relative_to(deployed) for path in deployed.rglob("*") if path.is_file() and path.suffix != ".pyc"
    }
    assert files == {
        path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*") if path.is_file()
    }
    assert all((deployed / path).read_bytes() == (tmp_path / "out" / path).read_bytes() for path in files)
    assert 'GREETING="x"' in fab.ok("render", "--set", "environment.GREETING=x")
    assert fab.run("render", "--out", str(tmp_path / "out")).returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize("part", ["runs/0001-demo", "names/demo/secrets-0001-demo"])
def test_ctrl_c_while_a_run_is_being_made_leaves_none_that_nobody_starts(fab: Fab, part: str) -> None:
    fab.file(COUNTING + "secrets: {TOKEN: {command: [echo, x]}}\n")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    deploying = fab.begin("deploy", "--no-follow", start_new_session=True, **pipes)
    until((fab.place.root / part).exists)
    os.killpg(deploying.pid, signal.SIGINT)
    said = deploying.communicate(timeout=60)[0]
    assert deploying.returncode == 130, said
    assert "Traceback" not in said
    assert all((run.path / "switch.json").exists() for run in fab.runs)
