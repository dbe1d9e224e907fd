"""fab adopt --script: the run's file that comes of a script, and what is said about it."""

from __future__ import annotations

import importlib
import json

import pytest
from deployed import HOST
from run_scripts import SCRIPTS, Bash

from deploy import adopt, adopt_task, settings, target
from deploy.errors import DeployError


@pytest.fixture
def bash(tmp_path, monkeypatch):
    made = Bash(tmp_path / "host")
    for name, value in made.login.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    return made


def directly(host, function, *arguments, **more):
    """`onhost.ask` without a process for each question; tests/integration has it as it is."""
    module, name = function.split(":")
    found = getattr(importlib.import_module(module), name)(*json.loads(json.dumps(arguments)))
    return json.loads(json.dumps(found))


@pytest.fixture
def goal(tmp_path, monkeypatch):
    monkeypatch.setattr(adopt.onhost, "ask", directly)
    project = settings.load_project(tmp_path)
    return target.Target(project, settings.find_host(project, None), HOST)


def adopted(goal, bash, script, **more):
    path = bash.home / "run.sh"
    path.write_text(bash.placed(script))
    wanted = {"script": str(path), "pid": None, "name": "exp", "out": None, **more}
    return adopt_task.carry_out(goal, **wanted)


def said(made, kind):
    return "\n".join(adopt._said(one) for one in made.notes if one.kind == kind)


def test_the_script_of_the_mission_becomes_a_file_that_starts_the_same(goal, bash):
    argv, environment, _, _ = bash.run(SCRIPTS["case"])
    made = adopted(goal, bash, SCRIPTS["case"], name=None)
    run = settings.load_run(goal.project, "exp-ddtree-tl-fix").settings
    assert run.command == argv
    wanted = {
        key: text
        for key, text in environment.items()
        if key in ("CUDA_MODULE_LOADING", "PATH", "VIRTUAL_ENV")
    }
    assert run.environment == {**wanted, "PYTORCH_CUDA_ALLOC_CONF": environment["PYTORCH_CUDA_ALLOC_CONF"]}
    assert run.gpus == list(range(8))
    assert not said(made, "lost")
    became = said(made, "became")
    for word in ("nohup", "disown", "torchinductor", "train_opt2.log", "PYTHONUNBUFFERED"):
        assert word in became, word
    assert "-u → as it stands" in said(made, "carried")
    assert "--as-trainer" in made.words()


def test_as_trainer_says_each_flag_that_it_cannot_take(goal, bash):
    script = SCRIPTS["case"].replace("--kl-weight", "--frobnicate 3 --kl-weight")
    made = adopted(goal, bash, script, trainer=True)
    run = settings.load_run(goal.project, "exp").settings
    assert run.command is None
    assert run.trainer["use-soft-labels"] is True
    assert run.trainer["kl-weight"] == 0.15
    assert run.trainer["lr"] == 6e-4
    assert run.trainer["token-budget"] == 49152
    assert run.weights == f"{bash.root}/dev/shm/Qwen3.6-27B"
    assert run.data == f"{bash.root}/workspace/tokenized_completions"
    assert "--frobnicate 3 → our trainer has no such flag" in said(made, "lost")
    assert said(made, "lost").count("no such flag") == 1
    assert "--output-dir" in said(made, "became")


def test_no_secret_gets_into_the_file_or_into_what_is_said(goal, bash):
    made = adopted(
        goal,
        bash,
        "export WANDB_API_KEY=abc123def456\nexport HF_TOKEN=$(cat ~/.token) DB_PASSWORD=tops3cret\n"
        "export PROXY=http://me:hidd3n@proxy:80\npython3 t.py --api-key sk-verysecret --api-token=tok3n\n",
    )
    run = settings.load_run(goal.project, "exp").settings
    assert set(run.secrets) == {"WANDB_API_KEY", "DB_PASSWORD", "PROXY", "HF_TOKEN"}
    assert run.secrets["WANDB_API_KEY"].env == "WANDB_API_KEY"
    shown = made.text + made.words() + str(made.to_json())
    for value in ("abc123def456", "tops3cret", "hidd3n", "sk-verysecret", "tok3n"):
        assert value not in shown


def test_devices_become_gpus_only_where_they_are_numbered_alike(goal, bash):
    adopted(goal, bash, SCRIPTS["prefix"])
    run = settings.load_run(goal.project, "exp").settings
    assert run.gpus == [0, 1]
    assert run.environment == {"OMP_NUM_THREADS": "4"}
    adopted(goal, bash, "python3 t.py --target-gpus 4,5 --drafter-gpus 6\n", force=True)
    assert settings.load_run(goal.project, "exp").settings.gpus is None


@pytest.mark.parametrize(
    ("script", "kind", "words"),
    [
        ("for lr in 1 2; do\n  python3 t.py $lr\ndone\n", "lost", "1: for lr in 1 2; do → a run starts"),
        ("if ping -c1 box; then A=1; fi\npython3 t.py $A\n", "lost", "$A → line 1 may set it or not"),
        ("if nc -z box 1; then python3 t.py; fi\n", "lost", "line 1: if nc -z box 1; then python3 t.py"),
        ("while true; do\n  python3 t.py\n  sleep 5\ndone\n", "became", "restart:"),
        ("python3 t.py --name x-$(date +%s)\n", "lost", "$(date +%s) is what a program says"),
        ("python3 t.py data/*.arrow\n", "lost", "data/*.arrow → the files that data/*.arrow matches"),
        ("python3 t.py \"$@\"\n", "lost", "without arguments"),
        ("run() { \"$@\"; }\nrun python3 t.py \"$1\"\n", "lost", "without arguments"),
        (SCRIPTS["heredoc"], "lost", "it writes config.yaml before each start"),
        (SCRIPTS["limits"], "lost", "mkdir"),
        (SCRIPTS["limits"], "became", "prlimit --nofile=512 before the command"),
        ("cat rows | python3 t.py | grep loss\n", "lost", "cat rows → its output went into the program"),
        ("cat rows | python3 t.py | grep loss\n", "lost", "grep loss → the log has all lines"),
        ("pip install -q x\ngit pull\npython3 t.py\n", "lost", "git pull → a run starts one program"),
        ("source ~/.bashrc\npython3 t.py\n", "lost", "what it sets for a terminal"),
        ("export A=$(nproc) B\nB=2\npython3 t.py\n", "lost", "A → its value is not known here: A is set"),
        ("missing-launcher=1; torchrun2 x\npython3 t.py\n", "lost", "torchrun2 x"),
        ("python3 t.py; rm -rf /workspace/old\n", "lost", "a run deletes nothing"),
        ("python3 -I t.py\n", "became", "tty: true"),
    ],
)  # fmt: skip
def test_what_is_not_carried_over_is_said_with_its_line(goal, bash, script, kind, words):
    made = adopted(goal, bash, script, looks_only=True)
    assert words in said(made, kind), made.words()


def test_a_functions_arguments_are_not_those_of_the_script(goal, bash):
    made = adopted(goal, bash, 'run() { "$@"; }\nrun python3 t.py --lr 1\n')
    assert "without arguments" not in said(made, "lost")
    assert settings.load_run(goal.project, "exp").settings.command[1:] == ["t.py", "--lr", "1"]


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("python3 a.py\npython3 b.py\n", r"starts 2 programs: line 1 \(python3 a.py\), line 2 .*; choose"),
        ("echo hello\nls\n", "starts no Python program"),
        ("#!/usr/bin/perl\nprint 1\n", "is a script for /usr/bin/perl"),
        ("python3 - <<EOF\nprint(1)\nEOF\n", "a run reads nothing from stdin"),
        ("\0ELF", "is a program and no script"),
    ],
)  # fmt: skip
def test_what_cannot_be_adopted_is_one_sentence(goal, bash, script, sentence):
    with pytest.raises(DeployError, match=sentence) as caught:
        adopted(goal, bash, script)
    assert "\n" not in str(caught.value)
    assert not (goal.project.root / "runs").exists()


def test_one_of_several_is_chosen_by_its_line(goal, bash):
    made = adopted(goal, bash, "python3 a.py\npython3 b.py\n", line=2)
    assert "b.py" in made.text
    assert "a.py" not in made.text


def test_a_file_that_is_there_stays(goal, bash):
    adopted(goal, bash, "python3 a.py\n")
    file = goal.project.root / "runs" / "exp.yaml"
    before = file.read_text()
    adopted(goal, bash, "python3 a.py\n")  # the same again is nothing new
    with pytest.raises(DeployError, match="is there already and stays as it is"):
        adopted(goal, bash, "python3 b.py\n")
    assert file.read_text() == before
    adopted(goal, bash, "python3 b.py\n", looks_only=True)
    assert file.read_text() == before
    adopted(goal, bash, "python3 b.py\n", force=True)
    assert "b.py" in file.read_text()


def test_a_program_that_names_its_python_itself_is_one(goal, bash):
    adopted(goal, bash, "cd /workspace\n./train.py --lr 1\n")
    assert settings.load_run(goal.project, "exp").settings.command == ["./train.py", "--lr", "1"]


def test_a_conda_environment_is_its_python(goal, bash):
    root = bash.home / "miniconda3"
    python = root / "envs" / "llm" / "bin" / "python3"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    adopted(goal, bash, "source ~/miniconda3/etc/profile.d/conda.sh\nconda activate llm\npython3 t.py\n")
    run = settings.load_run(goal.project, "exp").settings
    assert run.command == [str(python), "t.py"]
    assert run.environment["CONDA_PREFIX"] == str(root / "envs" / "llm")


def test_a_container_of_a_proxmox_host_is_a_host():
    assert adopt_task.inside("pve", 200) == "pve/200"
    assert adopt_task.inside(None, 200) == "localhost/200"
    assert adopt_task.inside("pve", None) == "pve"
    with pytest.raises(DeployError, match="--container 7 is no container's id"):
        adopt_task.inside("pve", 7)


def test_without_one_of_script_and_pid_nothing_is_done(goal):
    with pytest.raises(DeployError, match="needs one of"):
        adopt_task.carry_out(goal, script=None, pid=None, name=None, out=None)
    with pytest.raises(DeployError, match=r"there is no script /nowhere/run\.sh"):
        adopt_task.carry_out(goal, script="/nowhere/run.sh", pid=None, name=None, out=None)
