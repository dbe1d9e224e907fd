"""Preflight: every reason not to deploy is found before anything is touched, and says what to do."""

# ruff: noqa: E501  (whole sentences, as people read them)

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from samples import LOCALHOST, PYTHON, facts, recipe, run, survey

from deploy import preflight
from deploy.errors import DeployError
from deploy.survey import Interpreter
from deploy.weights import Weights

TOY = "weights: toy\ntrainer: {}"
COMMAND = "command: [a]"
MODEL = Weights("/m", "copy", "/dev/shm/drafthouse/m@1", "m", "1", 54_000_000_000, "/dev/shm/drafthouse")
OTHER = ["python", "--output-dir", "/var/lib/drafthouse/names/demo/checkpoints"]


def failures(text: str, tmp_path: Path, **changes: Any) -> tuple[list[str], list[str]]:
    """(what stops the deploy, what only warns)."""
    found = preflight.checks(survey(**changes), LOCALHOST, recipe(text, tmp_path).settings)
    return [c.sentence for c in found if not c.ok and not c.warning], preflight.warnings(found)


@pytest.mark.parametrize("text", [TOY, COMMAND])
def test_a_machine_that_has_what_it_needs_passes(text: str, tmp_path: Path) -> None:
    assert failures(text, tmp_path) == ([], [])


STOPS: list[tuple[str, str, dict, str]] = [
    ("tools", TOY, {"found": facts(python="3.8.10")},
     "localhost has Python 3.8.10, but Drafthouse's own scripts need 3.9 or later; install a newer python3 there"),
    ("trainer", TOY, {"interpreter": Interpreter(PYTHON, "3.10.2")},
     f"{PYTHON} on localhost is Python 3.10.2, but the trainer needs 3.11 or later; set python: of localhost in fabric.yaml to a newer one"),
    ("packages", TOY, {"interpreter": Interpreter(PYTHON, "3.11.7", ("torch", "pyarrow"))},
     f"{PYTHON} on localhost lacks torch, pyarrow; install the trainer there with pip install -c constraints.txt '.[trainer]', or set python: of localhost in fabric.yaml"),
    ("no python", COMMAND, {"interpreter": Interpreter("/no", problem="does not exist")},
     "/no on localhost does not exist; set python: of localhost in fabric.yaml to one that has the trainer's packages"),
    ("no program", COMMAND, {"interpreter": Interpreter(PYTHON, "3.11.7", lost="trian")},
     "there is no program trian on localhost; correct command: in the run's file, or give the program's whole path"),
    ("typo", "command: [a]\nenvironment: {PYTHONBUFFERED: 1}", {},
     "the run's environment has PYTHONBUFFERED, which Python does not know; the name is PYTHONUNBUFFERED, and Drafthouse sets it: remove yours"),
    ("off", "command: [a]\nenvironment: {PYTHONUNBUFFERED: 0}", {},
     "the run's environment sets PYTHONUNBUFFERED to 0, which means off: output would wait in a buffer; remove it, Drafthouse sets it to 1"),
    ("empty", "command: [a]\nenvironment: {PYTHONUNBUFFERED: ''}", {},
     "the run's environment sets PYTHONUNBUFFERED to an empty text, which means off: output would wait in a buffer; remove it, Drafthouse sets it to 1"),
    ("state", COMMAND, {"found": facts(state={"writable": False, "owner_uid": 0}, user="me", uid=1000)},
     "the state directory /var/lib/drafthouse cannot be written (it belongs to uid 0, you are me, uid 1000); deploy as its owner, or choose another with state: in fabric.yaml or DRAFTHOUSE_STATE"),
    ("disk toy", TOY, {"found": facts(state={"free_bytes": 12_000_000})},
     "/var/lib/drafthouse has 12 MB free, but a run needs at least 500 MB for release, log and checkpoints; free some, or choose another place with state: in fabric.yaml"),
    ("disk command", COMMAND, {"found": facts(state={"free_bytes": 40_000_000})},
     "/var/lib/drafthouse has 40 MB free, but a run needs at least 50 MB for release, log and checkpoints; free some, or choose another place with state: in fabric.yaml"),
    ("shm toy", TOY, {"found": facts(shm={"free_bytes": 1_000_000})},
     "/dev/shm/drafthouse has 1.0 MB free, but the weights need 20 MB; remove weights that no run uses, or enlarge it: mount -o remount,size=… /dev/shm"),
    ("shm model", TOY, {"found": facts(shm={"free_bytes": 50_000_000_000}), "weights": MODEL},
     "/dev/shm/drafthouse has 50 GB free, but the weights need 54 GB; remove weights that no run uses, or enlarge it: mount -o remount,size=… /dev/shm"),
    ("shm rights", TOY, {"found": facts(shm={"writable": False})},
     "/dev/shm/drafthouse cannot be written by root; choose another place with shm: in fabric.yaml or DRAFTHOUSE_SHM"),
    ("memory", TOY, {"found": facts(memory={"available": 8_000_000_000}), "weights": MODEL},
     "the weights need 54 GB of memory, but only 8.0 GB is available; stop what uses it, or add memory"),
    ("weights", TOY, {"weights": None, "weights_problems": ("weights /m do not exist; correct weights: in the run's file",)},
     "weights /m do not exist; correct weights: in the run's file"),
    ("data", TOY, {"data_problems": ("data /d are empty; x",)}, "data /d are empty; x"),
    ("secret", COMMAND, {"secret_problems": ("secret K needs the environment variable X; set it and deploy again",)},
     "secret K needs the environment variable X; set it and deploy again"),
    ("another name", TOY, {"found": facts(runs=[run("0009-exp", run={"command": OTHER})])},
     "/var/lib/drafthouse/names/demo/checkpoints is in use by 0009-exp, a run of another name; stop it with fab stop --name exp"),
    ("another place", TOY, {"found": facts(runs=[run(run={"command": ["python", "--output-dir", "/else"]})])},
     "0007-demo runs as demo with its checkpoints in /else, not in /var/lib/drafthouse/names/demo/checkpoints; stop it with fab stop --name demo, or choose another --name"),
    ("switch", COMMAND, {"found": facts(switch={"demo": {"what": "switch", "by": "ann@desk", "since": 1_800_000_000.0 - 90}})},
     "a switch of demo has been under way for 90 s, by ann@desk; wait for it with --lock-wait SECONDS, or look with fab status"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "changes", "said"), [item[1:] for item in STOPS], ids=[item[0] for item in STOPS]
)
def test_what_is_missing_is_one_sentence_with_its_remedy(
    text: str, changes: dict, said: str, tmp_path: Path
) -> None:
    assert failures(text, tmp_path, **changes) == ([said], [])


def test_all_failures_are_listed_at_once(tmp_path: Path) -> None:
    found = facts(python="3.8.1", state={"free_bytes": 0}, shm={"writable": False})
    with pytest.raises(DeployError) as caught:
        preflight.refuse(preflight.checks(survey(found), LOCALHOST, recipe(TOY, tmp_path).settings))
    assert (len(str(caught.value).splitlines()), caught.value.code) == (3, 1)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"PYTHONBUFFERED": "1"}, "the host's environment has PYTHONBUFFERED, which Python does not know; the name is PYTHONUNBUFFERED, and Drafthouse sets it: remove yours"),
        ({"PYTHONUNBUFFERED": "0"}, "the host's environment sets PYTHONUNBUFFERED to 0, which means off: output would wait in a buffer; remove it, Drafthouse sets it to 1"),
    ],
)  # fmt: skip
def test_the_login_environment_of_a_host_only_warns_since_a_run_does_not_inherit_it(
    variables: dict, said: str, tmp_path: Path
) -> None:
    assert failures(COMMAND, tmp_path, found=facts(environment=variables)) == ([], [said])


@pytest.mark.parametrize(
    ("value", "off"),
    [("1", False), ("0", True), ("", True), ("00", True), ("+0", True), (" 0", True), ("-1", False), ("no", False),
     ("0x", False), ("2", False), ("false", False)],
)  # fmt: skip
def test_off_is_what_python_itself_takes_for_off(value: str, off: bool) -> None:
    import os
    import subprocess
    import sys

    code = "import sys; sys.exit(sys.stdout.write_through)"
    environment = {**os.environ, "PYTHONUNBUFFERED": value}
    unbuffered = bool(
        subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE).returncode
    )
    assert preflight._is_off(value) == off == (not unbuffered)


def test_a_place_for_weights_that_is_no_tmpfs_only_warns(tmp_path: Path) -> None:
    assert failures(TOY, tmp_path, found=facts(shm={"is_tmpfs": False}), weights=MODEL) == (
        [],
        [
            "/dev/shm/drafthouse is no tmpfs, so weights would be read from disk; choose a place below /dev/shm with shm: in fabric.yaml"
        ],
    )


def test_a_run_that_has_ended_holds_no_directory(tmp_path: Path) -> None:
    ended = facts(runs=[run("0009-exp", alive=False, run={"command": OTHER})])
    assert failures(TOY, tmp_path, found=ended) == ([], [])


def test_weights_that_are_there_already_need_no_room(tmp_path: Path) -> None:
    there = Weights("/m", "present", "/s/m@1", bytes=10**15)
    assert failures(TOY, tmp_path, weights=there) == ([], [])
