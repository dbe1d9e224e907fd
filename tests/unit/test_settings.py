"""Settings: a mistake is one sentence that names file, line, key and remedy; values arrive as they were meant."""

# ruff: noqa: E501  (whole sentences, as people read them)

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from samples import recipe

from deploy import sizes, sshconfig, yamlfile
from deploy.errors import USAGE, DeployError, nearest
from deploy.settings import HostSettings, Project, RunSettings, find_host, load_project, load_run

NAME_RULE = (
    "but a name needs lower-case letters, digits, '.', '_' and '-', begins and ends with a letter or a digit, and "
    "has at most 63 characters"
)


def sentence(call: object, *arguments: object, **named: object) -> str:
    with pytest.raises(DeployError) as caught:
        call(*arguments, **named)  # type: ignore[operator]
    assert caught.value.code == USAGE
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- runs/*.yaml -------------------------------------------------------------------------------------------

BIG = 400 * "9"
BAD_RUNS = {
    "trainer: {lr: -1}": "runs/demo.yaml:1: trainer.lr is -1, but must be a number above 0",
    "trainer:\n  lr: fast": "runs/demo.yaml:2: trainer.lr is 'fast', but must be a number above 0",
    f"trainer: {{lr: {BIG}}}": f"runs/demo.yaml:1: trainer.lr is {BIG[:57]}…, but must be a number above 0",
    f"trainer: {{target-layer-ids: [{BIG}]}}":
        f"runs/demo.yaml:1: trainer.target-layer-ids is [{BIG[:56]}…, but must be a list of whole numbers, like [1, 3, 5]",
    f"command: [a]\nmemory: {BIG}":
        f"runs/demo.yaml:2: memory is {BIG[:57]}…, but must be a size, like 512m or 64g",
    f"command: [a]\nrestart: {{attempts: {BIG}}}":
        f"runs/demo.yaml:2: restart.attempts is {BIG[:57]}…, but must be at most 100000",
    "command: [a]\n1: 2": "runs/demo.yaml:2: the key 1 is 1, but must be a text; quote it",
    "command: [a]\nsecrets: {1: env}": "runs/demo.yaml:2: the key secrets.1 is 1, but must be a text; quote it",
    "command: [a]\nenvironment: {1: 2}":
        "runs/demo.yaml:2: environment names the variable '1', but a name has letters, digits and '_' only",
    'command: [a]\nenvironment: {A: "\\ud800"}':
        "runs/demo.yaml:2 holds '\\ud800', which is half a character; correct the escape",
    """command: [a]\nsecrets: {A: {command: "'"}}""":
        "runs/demo.yaml:2: secrets.A.command is a text, but its quotes do not match (no closing quotation); write it as a "
        "list",
    'command: [a]\nsecrets: {A: {command: "cat ~/token"}}':
        "runs/demo.yaml:2: secrets.A.command is a text, but no shell reads it, so ~ would not mean what it means there; "
        'write [sh, -c, "cat ~/token"], or quote it if it is meant as it stands',
    'description: x\ncommand: "prog | cat"':
        "runs/demo.yaml:2: command is 'prog | cat', but no shell reads it, so | would not mean what it means there; "
        'write [sh, -c, "prog | cat"], or quote it if it is meant as it stands',
    "command: [a]\nsecrets: {A: {command: ' '}}":
        "runs/demo.yaml:2: secrets.A.command must name a program, like [pass, show, wandb]",
    "trainer: {lr: .nan}": "runs/demo.yaml:1: trainer.lr is nan, but must be a number above 0",
    "trainer: {warmup_ratio: 2}":
        "runs/demo.yaml:1: trainer.warmup_ratio is 2, but must be a number of at least 0 and below 1",
    "trainer: {block-size: 1}":
        "runs/demo.yaml:1: trainer.block-size is 1, but must be a whole number from 2 to 256",
    "trainer: {epochs: 1.5}": "runs/demo.yaml:1: trainer.epochs is 1.5, but must be a whole number from 1 to 2147483647",
    "trainer: {epochs: true}": "runs/demo.yaml:1: trainer.epochs is true, but must be a whole number from 1 to 2147483647",
    "trainer: {resume: maybe}": "runs/demo.yaml:1: trainer.resume is 'maybe', but must be auto or never",
    "trainer: {device: gpu}": "runs/demo.yaml:1: trainer.device is 'gpu', but must be auto, cpu, cuda or cuda:N",
    "trainer: {target-layer-ids: 3}":
        "runs/demo.yaml:1: trainer.target-layer-ids is 3, but must be a list of whole numbers, like [1, 3, 5]",
    "trainer: {learning-rate: 1}":
        "runs/demo.yaml:1: the trainer has no flag 'learning-rate'; remove it",
    "trainer: {grad_acum: 1}": "runs/demo.yaml:1: the trainer has no flag 'grad_acum'; did you mean grad-accum?",
    "trainer: {max-steps: 1, max_steps: 2}":
        "runs/demo.yaml:1: trainer.max_steps is given twice, once with '-' and once with '_'; keep one",
    "trainer: {output-dir: /x}":
        "runs/demo.yaml:1: trainer.output-dir is set by Drafthouse (checkpoints lie with the name, under "
        "names/<name>/checkpoints); remove it",
    "trainer: {token-budget: 64}":
        "runs/demo.yaml:1: trainer.max-seq-len is 3072, but must fit into token-budget, 64",
    "trainer: {target-model: /a}\nweights: /b":
        "runs/demo.yaml:1: weights is '/b' and trainer.target-model is '/a', which are the same setting; keep weights",
    "trainer: 5": "runs/demo.yaml:1: trainer is 5, but must be keys with values",
    "traner: {}": "runs/demo.yaml:1: unknown key 'traner'; did you mean trainer?",
    "weights: toy\nlr: 3": "runs/demo.yaml:2: unknown key 'lr', which belongs under trainer:",
    "trainer: {}\ngrace_seconds: 0": "runs/demo.yaml:2: grace_seconds is 0, but must be at least 1",
    "trainer: {}\ngrace_seconds: soon": "runs/demo.yaml:2: grace_seconds is 'soon', but must be a number",
    "trainer: {}\nrestart: 3": "runs/demo.yaml:2: restart is 3, but must be keys: attempts or minutes",
    "trainer: {}\nrestart:\n  atempts: 3":
        "runs/demo.yaml:3: unknown key 'restart.atempts'; did you mean attempts?",
    "trainer: {}\nlog: {segments: 1}": "runs/demo.yaml:2: log.segments is 1, but must be at least 2",
    "trainer: {}\nname: Demo": f"runs/demo.yaml:2: name is 'Demo', {NAME_RULE}",
    "trainer: {}\ncommand: [a]":
        "runs/demo.yaml has both trainer: and command:; keep the one that is to be started",
    "description: x":
        "runs/demo.yaml has neither trainer: nor command:, so there is nothing to start; add one",
    "": "runs/demo.yaml has neither trainer: nor command:, so there is nothing to start; add one",
    "command: []": "runs/demo.yaml:1: command is [], but must name a program, like [python, train.py]",
    "command: python 'x":
        "runs/demo.yaml:1: command is \"python 'x\", but its quotes do not match (no closing quotation); write it "
        "as a list",
    "command: [a, {b: c}]":
        "runs/demo.yaml:1: command.1 is {'b': 'c'}, but must be a text; quote it if it holds ': '",
    "command: [a]\nweights: toy":
        "runs/demo.yaml has weights: toy, which only our trainer can make; give command: a directory",
    "command: [a]\nenvironment: {A-B: x}":
        "runs/demo.yaml:2: environment names the variable 'A-B', but a name has letters, digits and '_' only",
    "command: [a]\nenvironment: {\"A\\n\": x}":
        "runs/demo.yaml:2: environment names the variable 'A\\n', but a name has letters, digits and '_' only",
    "command: [a]\nenvironment: {DRAFTHOUSE_RUN_DIR: x}":
        "runs/demo.yaml:2: environment sets DRAFTHOUSE_RUN_DIR, which every run gets from Drafthouse; remove it",
    "command: [a]\nenvironment: [x]": "runs/demo.yaml:2: environment is ['x'], but must be keys with values",
    "command: [a]\nsecrets: {A: xyz}": "runs/demo.yaml:2: secrets.A is 'xyz', but must be keys: env, file or command",
    "command: [a]\nsecrets: {A: {envi: x}}": "runs/demo.yaml:2: unknown key 'secrets.A.envi'; did you mean env?",
    "command: [a]\nsecrets: {A: {}}":
        "runs/demo.yaml:2: secrets.A must have exactly one of env, file or command, like {env: WANDB_API_KEY}",
    "command: [a]\nenvironment: {A: x}\nsecrets: {A: env}":
        "runs/demo.yaml has A under both environment: and secrets:; keep the secret",
    "- a": "runs/demo.yaml holds ['a'], but must hold keys, like `name: demo`",
    "a: 1\nb: 2\na: 3": "runs/demo.yaml:3 gives a a second time (first in line 1); keep one",
    "a: [1\nb: 2":
        "runs/demo.yaml:2 is not valid YAML: expected ',' or ']', but got ':' at column 2; correct that line",
    "\tx": "runs/demo.yaml:1 is not valid YAML: found character '\\t' that cannot start any token at column 1; "
           "correct that line",
    "a: &x [*x]": "runs/demo.yaml:1 refers to itself; write the value out",
    "a: !!python/object:os.system x":
        "runs/demo.yaml:1 is not valid YAML: could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/object:os.system' at column 4; correct that line",
}  # fmt: skip


@pytest.mark.parametrize("text", BAD_RUNS)
def test_a_bad_run_file_is_one_sentence_with_its_remedy(text: str, tmp_path: Path) -> None:
    assert sentence(recipe, text, tmp_path) == BAD_RUNS[text]


def test_a_run_file_that_is_no_text_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo.yaml").write_bytes(b"a: \xff")
    assert sentence(load_run, Project(tmp_path, {}), "demo") == (
        "runs/demo.yaml is not UTF-8 text (byte 3); save it as UTF-8"
    )


def test_numbers_are_numbers_however_they_are_written(tmp_path: Path) -> None:
    found = recipe(
        "trainer: {lr: 6e-4, grad_accum: 04, gamma: 10, wandb-run-name: 1e5}", tmp_path
    ).settings.trainer
    assert found == {"lr": 6e-4, "grad-accum": 4, "gamma": 10.0, "wandb-run-name": "1e5"}


def test_environment_values_are_taken_exactly_as_written(tmp_path: Path) -> None:
    text = 'command: [a]\nenvironment:\n  A: no\n  B: 007\n  C: 1e3\n  D: "x\\ny"\n  E: ~\n  F:\n  G: true\n'
    assert recipe(text, tmp_path).settings.environment == {
        "A": "no", "B": "007", "C": "1e3", "D": "x\ny", "E": "~", "F": "", "G": "true",
    }  # fmt: skip


@given(value=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40))
def test_any_value_of_the_environment_survives_the_file_and_the_command_line(
    value: str, tmp_path_factory
) -> None:
    path = tmp_path_factory.getbasetemp() / "hostile"
    path.mkdir(exist_ok=True)
    text = yaml.safe_dump({"command": ["a"], "environment": {"X": value}})
    assert recipe(text, path).settings.environment["X"] == value
    assert recipe("command: [a]", path, f"environment.X={value}").settings.environment["X"] == value


@given(value=st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
                          lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner,
                                                                                      max_size=3), max_leaves=8),
       key=st.sampled_from(["trainer", "command", "environment", "secrets", "grace_seconds", "restart", "log",
                            "weights", "name", "x"]))  # fmt: skip
@example(value={"\n": None}, key="secrets")
@example(value={"a\nb": 1}, key="x")
@example(value={"\r": {"\x1b": 1}}, key="restart")
def test_whatever_stands_in_a_file_it_is_settings_or_one_sentence(value, key: str, tmp_path_factory) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    path.mkdir(exist_ok=True)
    said = ""
    try:
        recipe(yaml.safe_dump({"command": ["a"], key: value}), path)
    except DeployError as error:
        said = str(error)
    assert not said or (said.startswith("runs/demo.yaml") and "\n" not in said)


def test_what_is_dumped_reads_back_the_same_with_both_readings_of_yaml() -> None:
    value = {
        "a": "6e-4",
        "b": "no",
        "c": "010",
        "d": 6e-4,
        "e": "1:30",
        "f": "~",
        "g": "",
        "h": "true",
        "i": [1],
    }
    assert yamlfile.parse(yamlfile.dump(value), "x").value == value
    assert yaml.safe_load(yamlfile.dump(value)) == value


def test_a_command_may_be_a_text_or_a_list(tmp_path: Path) -> None:
    assert recipe("command: python train.py --x 'a b'", tmp_path).settings.command == [
        "python", "train.py", "--x", "a b",
    ]  # fmt: skip
    assert recipe("command: [python, train.py, 3, 0.5]", tmp_path).settings.command[2:] == ["3", "0.5"]


def test_the_target_may_be_named_as_weights_or_as_the_trainers_flag(tmp_path: Path) -> None:
    for text in ("trainer: {}\nweights: toy", "trainer: {target-model: toy}", "trainer: {target_model: toy}"):
        found = recipe(text, tmp_path).settings
        assert (found.weights, found.trainer) == ("toy", {})


# -- --set -------------------------------------------------------------------------------------------------

BAD_CHANGES = {
    f"lr={BIG}": f"--set lr: trainer.lr is {BIG[:57]}…, but must be a number above 0",
    f"lr={5000 * '9'}": f"--set lr: trainer.lr is '{BIG[:56]}…, but must be a number above 0",
    "lr=!!timestamp x": "--set lr: trainer.lr is '!!timestamp x', but must be a number above 0",
    "description=a\udcff": "--set 'description=a\\udcff' is no UTF-8 text; correct it",
    "lr=-1": "--set lr: trainer.lr is -1, but must be a number above 0",
    "warmup_ratio=2": "--set warmup_ratio: trainer.warmup_ratio is 2, but must be a number of at least 0 and below 1",
    "block_size=1": "--set block_size: trainer.block_size is 1, but must be a whole number from 2 to 256",
    "lrr=1": "--set lrr: 'lrr' is neither a flag of the trainer nor a key of the run's file; did you mean lr?",
    "qqq=1": "--set qqq: 'qqq' is neither a flag of the trainer nor a key of the run's file; docs/settings.md lists "
             "them",
    "lr": "--set 'lr' is no KEY=VALUE; write it like --set lr=3e-4",
    "=3": "--set '=3' is no KEY=VALUE; write it like --set lr=3e-4",
    "name=x": "--set name: use --name for the name",
    "secrets.A=x": "--set secrets.A: secrets are named in the run's file only, so that none gets into a command "
                   "line; add it there",
    "grace_seconds=soon": "--set grace_seconds: grace_seconds is 'soon', but must be a number",
    "restart.atempts=1": "--set restart.atempts: unknown key 'restart.atempts'; did you mean attempts?",
    "grace_seconds.x=1": "--set grace_seconds.x: grace_seconds holds no keys; set grace_seconds itself",
    "environment.A-B=1": "--set environment.A-B: environment names the variable 'A-B', but a name has letters, "
                         "digits and '_' only",
    "environment=x": "--set environment: environment is 'x', but must be keys with values",
    "cache_dir=/x": "--set cache_dir: trainer.cache_dir is set by Drafthouse (caches lie with the name; a host's "
                    "`cache:` in fabric.yaml moves them); remove it",
}  # fmt: skip


@pytest.mark.parametrize("change", BAD_CHANGES)
def test_a_bad_change_is_one_sentence_with_its_remedy(change: str, tmp_path: Path) -> None:
    assert sentence(recipe, "trainer: {}\ngrace_seconds: 5", tmp_path, change) == BAD_CHANGES[change]


def test_a_file_whose_name_is_no_text_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a\udcff.yaml"
    path.write_text("trainer: {}")
    with pytest.raises(DeployError, match="has a name that is no UTF-8 text; rename it"):
        load_run(Project(tmp_path, {}), str(path))


def test_a_flag_for_a_file_whose_flags_are_none_is_one_sentence(tmp_path: Path) -> None:
    said = sentence(recipe, "trainer: 5", tmp_path, "lr=1")
    assert said == "--set trainer.lr: trainer holds no keys; set trainer itself"


def test_changes_reach_flags_and_keys_and_are_remembered_as_written(tmp_path: Path) -> None:
    found = recipe(
        "trainer: {max-steps: 7}", tmp_path, "lr=3e-4", "max_steps=9", "restart.attempts=0", "log.segments=4"
    )
    assert found.settings.trainer == {"max-steps": 9, "lr": 3e-4}
    assert (found.settings.restart.attempts, found.settings.log.segments) == (0, 4)
    assert found.changes == {
        "trainer.lr": "3e-4", "trainer.max-steps": "9", "restart.attempts": "0", "log.segments": "4",
    }  # fmt: skip
    again = recipe(
        "trainer: {max-steps: 7}", tmp_path, *(f"{key}={value}" for key, value in found.changes.items())
    )
    assert again.settings == found.settings


def test_a_foreign_command_has_no_flags_to_set(tmp_path: Path) -> None:
    assert sentence(recipe, "command: [a]", tmp_path, "lr=1") == (
        "--set lr: 'lr' is not a key of the run's file; flags without a prefix are those of trainer:, and this "
        "file has command: instead: change that with --set command=…"
    )
    assert sentence(recipe, "command: [a]", tmp_path, "max_steps=1").endswith("with --set command=…")
    assert sentence(recipe, "command: [a]", tmp_path, "zzz=1").endswith("file; docs/settings.md lists them")


# -- which file, which name --------------------------------------------------------------------------------


def test_an_unknown_run_is_answered_with_the_nearest_names(tmp_path: Path) -> None:
    recipe("command: [a]", tmp_path)
    project = Project(tmp_path, {})
    assert sentence(load_run, project, "dem") == "run 'dem' (--run) is no file in runs/; did you mean demo?"
    assert sentence(load_run, project, "zzz") == "run 'zzz' (--run) is no file in runs/; there are demo"
    assert (
        sentence(load_run, project, "runs/dmo.yaml")
        == "run file runs/dmo.yaml does not exist; did you mean demo?"
    )
    assert sentence(load_run, Project(tmp_path / "x", {}), None) == (
        "run 'demo' (the default) is no file in runs/; runs/ holds none"
    )


def test_the_run_comes_from_the_flag_else_the_host_else_the_project(tmp_path: Path) -> None:
    for stem in ("demo", "exp", "big"):
        recipe("command: [a]", tmp_path, stem=stem)
    project = Project(tmp_path, {}, "demo")
    host = HostSettings(name="box", address="box", run="exp")
    chosen = [
        load_run(project, run, host=where) for run, where in (("big", host), (None, host), (None, None))
    ]
    assert [(one.settings.name, one.why) for one in chosen] == [
        ("big", "--run"), ("exp", "run: of box in fabric.yaml"), ("demo", "the default"),
    ]  # fmt: skip


def test_the_name_is_the_flags_else_the_files_else_its_stem(tmp_path: Path) -> None:
    assert recipe("command: [a]\nname: inner", tmp_path, name="outer").settings.name == "outer"
    assert recipe("command: [a]\nname: inner", tmp_path).settings.name == "inner"
    assert recipe("command: [a]", tmp_path, stem="stem").settings.name == "stem"
    assert sentence(recipe, "command: [a]", tmp_path, name="A b") == f"--name: name is 'A b', {NAME_RULE}"


# -- fabric.yaml and hosts ---------------------------------------------------------------------------------

BAD_PROJECTS = {
    "drafthouse: {hosts: {a: {runtime: proces}}}":
        "fabric.yaml:1: drafthouse.hosts.a.runtime is 'proces', but must be auto, process, compose or pct; did you "
        "mean process?",
    "drafthouse:\n  hosts:\n    a: {state: 7}": "fabric.yaml:3: drafthouse.hosts.a.state is 7, but must be a text",
    "drafthouse:\n  hosts:\n    a: {stat: /x}":
        "fabric.yaml:3: unknown key 'drafthouse.hosts.a.stat'; did you mean state?",
    "drafthouse: {hosts: {a: {state: x}}}":
        "fabric.yaml:1: drafthouse.hosts.a.state is 'x', but must be an absolute path on that host, like "
        "/var/lib/drafthouse",
    "drafthouse: {hosts: {a: {pct: {bridge: vmbr0, ip: 10.0.0.5}}}}":
        "fabric.yaml:1: drafthouse.hosts.a.pct.ip is '10.0.0.5', but must be an address of version 4 with its network, "
        "like 10.0.0.5/24, or dhcp",
    "drafthouse: {hosts: {a: {pct: {bridge: vmbr0, gateway: 10.0.0.1/24}}}}":
        "fabric.yaml:1: drafthouse.hosts.a.pct.gateway is '10.0.0.1/24', but must be an address of version 4 without a "
        "network, like 10.0.0.1",
    "drafthouse: {hosts: {a: {pct: {net0: name=eth0}}}}":
        "fabric.yaml:1: drafthouse.hosts.a.pct.net0 is 'name=eth0', but must be what Proxmox has as net0, like "
        "name=eth0,bridge=vmbr0,ip=dhcp",
    "drafthouse: {host: {}}": "fabric.yaml:1: unknown key 'drafthouse.host'; did you mean hosts?",
    "drafthouse: {hosts: [a]}":
        "fabric.yaml:1: drafthouse.hosts holds ['a'], but must hold keys, like `name: demo`",
    "drafthouse: {defaults: {runs: x}}": "fabric.yaml:1: unknown key 'drafthouse.defaults.runs'; did you mean run?",
    "drafthouse: {hosts: {a: b}}": "fabric.yaml:1: drafthouse.hosts.a holds 'b', but must hold keys, like `name: demo`",
    "drafthouse: [": "fabric.yaml:1 is not valid YAML: expected the node content, but found '<stream end>' at column "
                     "14; correct that line",
}  # fmt: skip


@pytest.mark.parametrize("text", BAD_PROJECTS)
def test_a_bad_fabric_yaml_is_one_sentence_with_its_remedy(text: str, tmp_path: Path) -> None:
    (tmp_path / "fabric.yaml").write_text(text)
    assert sentence(load_project, tmp_path) == BAD_PROJECTS[text]


def test_other_sections_of_fabric_yaml_are_fabrics_own_affair(tmp_path: Path) -> None:
    (tmp_path / "fabric.yaml").write_text("user: ada\nanything: [1]\n")
    assert load_project(tmp_path).hosts == {}
    assert load_project(tmp_path / "none").default_run == "demo"


def test_hosts_take_the_defaults_that_they_do_not_override(tmp_path: Path) -> None:
    (tmp_path / "fabric.yaml").write_text(
        "drafthouse: {defaults: {run: exp, state: /s}, hosts: {a: {state: /t}, b: }}"
    )
    hosts = load_project(tmp_path).hosts
    assert (hosts["a"].state, hosts["a"].run, hosts["b"].state, hosts["b"].address) == (
        "/t",
        "exp",
        "/s",
        "b",
    )


SSH = """
Host gpu-box gpu-?? !gpu-99
Host *
  User me
Include more/*.conf
"""


@pytest.fixture
def ssh(tmp_path: Path) -> sshconfig.SshHosts:
    (tmp_path / "more").mkdir()
    (tmp_path / "config").write_text(SSH)
    (tmp_path / "more" / "a.conf").write_text('host="inner one"\tinner\n# Host no\nInclude ../config\n')
    return sshconfig.read(tmp_path / "config")


def test_a_host_is_known_from_fabric_yaml_or_the_ssh_configuration_or_if_it_resolves(
    ssh, tmp_path: Path
) -> None:
    project = Project(tmp_path, {"box": HostSettings(name="box", address="10.0.0.1", runtime="process")})

    def find(name: str, answer: bool = False) -> HostSettings:
        return find_host(project, name, ssh=ssh, resolves=lambda bare: answer, environment={})

    assert find("box").address == "10.0.0.1"
    for name in ("gpu-box", "gpu-07", "inner", "me@gpu-07:2222"):
        assert find(name).address == name
    assert find("elsewhere", True).name == "elsewhere"
    for name in ("gpu-99", "gpu-100", "no"):
        sentence(find, name)
    assert sentence(find, "gpubox") == (
        "host 'gpubox' is neither in fabric.yaml nor a Host of the SSH configuration, and its name does not resolve; "
        "did you mean gpu-box?"
    )
    assert sentence(find, "qqqq").endswith("does not resolve; add it under drafthouse: hosts: in fabric.yaml")


def test_a_container_of_a_proxmox_host_is_named_behind_a_slash(ssh, tmp_path: Path) -> None:
    entry = HostSettings(
        name="pve", address="root@10.0.0.1", state="/srv/state", run="qwen", python="/usr/bin/python3"
    )
    project = Project(tmp_path, {"pve": entry})

    def find(name: str) -> HostSettings:
        return find_host(project, name, ssh=ssh, resolves=lambda bare: False, environment={})

    found = find("pve/200")
    assert (found.name, found.address, found.container, found.run) == (
        "pve/200",
        "root@10.0.0.1",
        200,
        "qwen",
    )
    assert (found.state, found.python) == (None, None)  # places of the host around it, not of the container
    assert find("gpu-box/101").address == "gpu-box"
    here = find("localhost/200")
    assert (here.is_local, here.container, here.python) == (False, 200, None)
    for name in ("nowhere/200", "pve/99", "pve/0200", "pve/", "pve/200/300"):
        sentence(find, name)


@pytest.mark.parametrize("name", ["", " ", "-oProxyCommand=x", "a b"])
def test_what_is_no_host_name_never_reaches_ssh(name: str, tmp_path: Path) -> None:
    assert sentence(find_host, Project(tmp_path, {}), name).endswith(
        "is no host name; give one like --host localhost"
    )


def test_no_host_means_localhost_with_the_places_of_the_environment(tmp_path: Path) -> None:
    found = find_host(
        Project(tmp_path, {}), None, environment={"DRAFTHOUSE_STATE": "/s", "DRAFTHOUSE_CACHE": "/c"}
    )
    assert (found.name, found.is_local, found.state, found.cache, found.shm) == (
        "localhost",
        True,
        "/s",
        "/c",
        None,
    )


def test_an_ssh_configuration_that_includes_itself_ends(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("Include config\nHost a\n")
    assert sshconfig.read(tmp_path / "config").names == ["a"]
    assert sshconfig.read(tmp_path / "none").names == []


def test_nearest_words_are_offered_once() -> None:
    assert nearest("demmo", ["demo", "demo", "exp"]) == "; did you mean demo?"
    assert nearest("qqq", ["demo"]) == ""


# -- containers and devices --------------------------------------------------------------------------------

BAD_CONTAINERS = {
    "gpus: two": "gpus is 'two', but must be all, how many (0: none), or a list of devices like [0, 1]",
    "gpus: -1": "gpus is -1, but must be all, how many (0: none), or a list of devices like [0, 1]",
    "gpus: true": "gpus is true, but must be all, how many (0: none), or a list of devices like [0, 1]",
    "gpus: [0, a]": "gpus is [0, 'a'], but must be all, how many (0: none), or a list of devices like [0, 1]",
    "gpus: [1, 1]": "gpus is [1, 1], but names a device twice; name each once",
    "memory: lots": "memory is 'lots', but must be a size, like 512m or 64g",
    "memory: 0": "memory is 0, but must be a size, like 512m or 64g",
    "shm_size: -1g": "shm_size is '-1g', but must be a size, like 512m or 64g",
    "user: ada": "user is 'ada', but must be root or numbers like 1000:1000; a name means nothing in an image",
    "image: {build: here}": "image.build is 'here', but must be host or local",
    "image: {variant: cuda}": "image.variant is 'cuda', but must be auto, cpu or gpu",
    "image: {base: 'a b'}": "image.base is 'a b', but must be an image's name, like debian:bookworm-slim",
    "image: {use: --privileged}": "image.use is '--privileged', but must be an image's name, like debian:bookworm-slim",
    "image: {torch_index_url: cpu}": "image.torch_index_url is 'cpu', but must be the address of a package index, like https://index.example/cpu",
    "image: {torch_index_url: 'https://ada:pw@x/y'}": "image.torch_index_url holds a password, which would lie in the image and in the release; give pip's configuration to the build as a secret instead (docs/docker.md)",
    "image: {tag: x}": "unknown key 'image.tag'; known are build, base, variant, torch_index_url or use",
    "image: my/image:1": "image is 'my/image:1', but must be keys: build, base, variant, torch_index_url or use",
    "image: {use: a, base: b}": "image has base beside use, but an image that is used as it is cannot be built; keep one",
}  # fmt: skip


@pytest.mark.parametrize("text", BAD_CONTAINERS)
def test_what_no_container_can_be_is_one_sentence(text: str, tmp_path: Path) -> None:
    said = sentence(recipe, f"command: [a]\n{text}", tmp_path)
    assert said.startswith("runs/demo.yaml:2: "), said
    assert BAD_CONTAINERS[text] in said


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("gpus: all", "gpus", "all"),
        ("gpus: [1, 0]", "gpus", [0, 1]),
        ("gpus: []", "gpus", 0),
        ("gpus:", "gpus", None),
        ("memory: 1073741824", "memory", "1073741824"),
        ("shm_size: 1.5 GiB", "shm_size", "1.5 GiB"),
        ("user: 1000", "user", "1000:1000"),
        ("user: 1000:100", "user", "1000:100"),
    ],
)
def test_what_a_container_can_be_is_taken_as_it_is_meant(
    text: str, key: str, value: object, tmp_path: Path
) -> None:
    assert getattr(recipe(f"command: [a]\n{text}", tmp_path).settings, key) == value


def test_a_change_of_the_command_line_reaches_into_the_image(tmp_path: Path) -> None:
    found = recipe("command: [a]", tmp_path, "image.build=local", "gpus=[0,1]").settings
    assert (found.image.build, found.gpus) == ("local", [0, 1])


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("64g", 64 << 30), ("512 MiB", 512 << 20), ("1.5G", 3 << 29), ("10kb", 10240), ("7", 7), ("0", None), ("x", None)],
)  # fmt: skip
def test_sizes_are_read_as_docker_reads_them(text: str, bytes_: int | None) -> None:
    assert sizes.parse(text) == bytes_


# -- the reference -----------------------------------------------------------------------------------------


def examples() -> list[str]:
    text = (Path(__file__).resolve().parents[2] / "docs" / "settings.md").read_text()
    return re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)


def test_the_reference_is_valid_and_names_every_key(tmp_path: Path) -> None:
    hosts, run = examples()
    (tmp_path / "fabric.yaml").write_text(hosts)
    assert set(load_project(tmp_path).hosts) == {"localhost", "gpu-box"}
    ours = re.sub(r"^command: .*$", "", run, flags=re.MULTILINE)
    theirs = re.sub(r"^trainer:\n(  .*\n)+", "", run, flags=re.MULTILINE)
    assert recipe(ours, tmp_path).settings.trainer == {"max-steps": 600, "lr": 6e-4}
    assert recipe(theirs, tmp_path).settings.command == ["python", "-u", "train.py", "--epochs", "6"]
    assert set(RunSettings.model_fields) == set(yaml.safe_load(run))
    named = set(yaml.safe_load(hosts)["drafthouse"]["hosts"]["gpu-box"])
    assert named == set(HostSettings.model_fields) - {"name"}


def test_the_reference_says_the_defaults_that_hold(tmp_path: Path) -> None:
    written = yaml.safe_load(examples()[1])
    found = recipe("command: [a]", tmp_path).settings.model_dump()
    for key in (
        "grace_seconds",
        "checkpoint_timeout_seconds",
        "first_heartbeat_timeout_seconds",
        "restart",
        "log",
    ):
        assert written[key] == found[key]
