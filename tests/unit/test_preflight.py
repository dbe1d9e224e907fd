"""Preflight: every reason not to deploy is found before anything is touched, and says what to do."""

# ruff: noqa: E501  (whole sentences, as people read them)

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from samples import LOCALHOST, PYTHON, facts, recipe, run, survey

from deploy import CHECKOUT, preflight
from deploy.errors import DeployError
from deploy.runtimes import compose
from deploy.settings import HostSettings
from deploy.survey import Interpreter
from deploy.weights import Weights

TOY = "weights: toy\ntrainer: {}"
COMMAND = "command: [a]"
PUSHED = Weights("/d", "push", "/k/d@1", "d", "1", 6_000_000_000, "", "/k/d@1")
MODEL = Weights("/m", "copy", "/dev/shm/drafthouse/m@1", "m", "1", 54_000_000_000, "/dev/shm/drafthouse")
OLD = {
    "name": "m",
    "digest": "0123456789ab",
    "path": "/dev/shm/drafthouse/m@0123456789ab",
    "bytes": 53_000_000_000,
}
COPY = {**OLD, "where": "memory", "memory": OLD["bytes"], "processes": []}
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
    ("image", "command: [a]\nimage: {use: 'python:3'}", {},
     "the run's file names the image python:3, but localhost would start a plain process: on this machine, unless fabric.yaml says runtime: compose; put that right, or say so with runtime: process in fabric.yaml"),
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
    ("disk push", TOY, {"found": facts(state={"free_bytes": 5_000_000_000}), "data_copy": PUSHED},
     "/var/lib/drafthouse has 5.0 GB free, but a run needs at least 6.5 GB for what is pushed there, release, log and checkpoints; free some, or choose another place with state: in fabric.yaml"),
    ("shm push", TOY, {"found": facts(shm={"free_bytes": 50_000_000_000}), "weights": dataclasses.replace(MODEL, action="push")},
     "/dev/shm/drafthouse has 50 GB free, but the weights need 54 GB: 4.0 GB too little; remove weights that no run uses, or enlarge it: mount -o remount,size=… /dev/shm"),
    ("shm toy", TOY, {"found": facts(shm={"free_bytes": 1_000_000})},
     "/dev/shm/drafthouse has 1.0 MB free, but the weights need 20 MB: 19 MB too little; remove weights that no run uses, or enlarge it: mount -o remount,size=… /dev/shm"),
    ("shm model", TOY, {"found": facts(shm={"free_bytes": 50_000_000_000}), "weights": MODEL},
     "/dev/shm/drafthouse has 50 GB free, but the weights need 54 GB: 4.0 GB too little; remove weights that no run uses, or enlarge it: mount -o remount,size=… /dev/shm"),
    ("shm rights", TOY, {"found": facts(shm={"writable": False})},
     "/dev/shm/drafthouse cannot be written by root; choose another place with shm: in fabric.yaml or DRAFTHOUSE_SHM"),
    ("memory", TOY, {"found": facts(memory={"available": 8_000_000_000}), "weights": MODEL},
     "localhost has 8.0 GB of memory free, but the weights (54 GB) and the run (1.0 GB: 1 process) need 55 GB: 47 GB too little; stop what uses it, or add memory"),
    ("room", COMMAND, {"found": facts(memory={"room": 512 << 20}), "weights": MODEL},
     "the container of localhost has 537 MB of memory free, but the weights need 54 GB: 53 GB too little; stop what uses it, or add memory"),
    ("resumed", TOY, {"found": facts(shm={"free_bytes": 10_000_000_000}), "weights": dataclasses.replace(MODEL, held=43_000_000_000)},
     "/dev/shm/drafthouse has 53 GB free, but the weights need 54 GB: 1.0 GB too little; remove weights that no run uses, or enlarge it: mount -o remount,size=… /dev/shm"),
    ("shm old", TOY, {"found": facts(shm={"free_bytes": 50_000_000_000}, weights=[OLD]), "weights": MODEL},
     "/dev/shm/drafthouse has 50 GB free, but the weights need 54 GB: 4.0 GB too little; the old ones (m@0123456789ab, 53 GB) do not fit in beside them: --evict-first evicts them before"),
    ("shm live", TOY, {"found": facts(shm={"free_bytes": 50_000_000_000}, weights=[{**OLD, "name": "n"}], runs=[run(weights={"path": OLD["path"]})]), "weights": MODEL},
     "/dev/shm/drafthouse has 50 GB free, but the weights need 54 GB: 4.0 GB too little; the old ones (n@0123456789ab, 53 GB) do not fit in beside them: --evict-first stops 0007-demo, evicts them, and only then brings these"),
    ("shm held", TOY, {"found": facts(shm={"free_bytes": 50_000_000_000}, weights=[OLD]), "weights": MODEL, "copies": ({**COPY, "processes": [1]},)},
     "/dev/shm/drafthouse has 50 GB free, but the weights need 54 GB: 4.0 GB too little; the old ones (m@0123456789ab, 53 GB) do not fit in beside them, and others use them: fab weights.list shows who"),
    ("shm other", TOY, {"found": facts(shm={"free_bytes": 50_000_000_000}, weights=[{**OLD, "name": "n"}]), "weights": MODEL},
     "/dev/shm/drafthouse has 50 GB free, but the weights need 54 GB: 4.0 GB too little; remove weights that no run uses, or enlarge it: mount -o remount,size=… /dev/shm"),
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


def test_what_evict_first_removes_makes_room(tmp_path: Path) -> None:
    found = facts(shm={"free_bytes": 50_000_000_000}, weights=[OLD])
    assert failures(TOY, tmp_path, found=found, weights=MODEL, copies=(COPY,)) == ([], [])


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


def test_a_place_for_weights_that_is_no_tmpfs_only_warns(tmp_path: Path) -> None:
    assert failures(TOY, tmp_path, found=facts(shm={"is_tmpfs": False}), weights=MODEL) == (
        [],
        [
            "/dev/shm/drafthouse is no tmpfs, so weights would be read from disk; choose a place below /dev/shm with shm: in fabric.yaml or DRAFTHOUSE_SHM"
        ],
    )


def test_a_run_that_has_ended_holds_no_directory(tmp_path: Path) -> None:
    ended = facts(runs=[run("0009-exp", alive=False, run={"command": OTHER})])
    assert failures(TOY, tmp_path, found=ended) == ([], [])


def test_weights_that_are_there_already_need_no_room(tmp_path: Path) -> None:
    there = Weights("/m", "present", "/s/m@1", bytes=10**15)
    assert failures(TOY, tmp_path, weights=there) == ([], [])


# -- hosts and clocks --------------------------------------------------------------------------------------


def test_root_does_not_deploy_into_somebody_elses_state(tmp_path: Path) -> None:
    theirs = facts(state={"owner_uid": 1000})
    assert failures(TOY, tmp_path, found=theirs)[0] == [
        "the state directory /var/lib/drafthouse belongs to uid 1000, and you are root: that user could not manage what you deploy there; deploy as its owner, or choose another with state: in fabric.yaml or DRAFTHOUSE_STATE"
    ]
    far = HostSettings(name="box", address="box")  # where the variables of this machine count for nothing
    lost = facts(state={"owner_uid": 1000}, shm={"writable": False})
    assert [
        check.sentence.rpartition("; ")[2]
        for check in preflight.checks(survey(lost), far, recipe(TOY, tmp_path).settings)
        if not check.ok
    ] == [
        "deploy as its owner, or choose another with state: in fabric.yaml",
        "choose another place with shm: in fabric.yaml",
    ]
    assert failures(TOY, tmp_path, found=facts(state={"owner_uid": 10001})) == ([], []), (
        "the image's own user"
    )
    assert failures(TOY, tmp_path, found=facts(state={"owner_uid": 1000, "exists": False})) == ([], [])


@pytest.mark.parametrize(
    ("apart", "said"),
    [
        (-4, []),
        (4, []),
        (7200, ["the clock of localhost is 2 h 00 min ahead of this machine's: times will not agree; set both by NTP: timedatectl set-ntp true"]),
        (-30, ["the clock of localhost is 30 s behind this machine's: times will not agree; set both by NTP: timedatectl set-ntp true"]),
    ],
)  # fmt: skip
def test_clocks_apart_are_told(apart: float, said: list[str], tmp_path: Path) -> None:
    found = facts()
    assert failures(COMMAND, tmp_path, found={**found, "client_time": found["time"] - apart}) == ([], said)


def test_another_deploy_that_holds_the_lock_is_told(tmp_path: Path) -> None:
    assert failures(COMMAND, tmp_path, found=facts(locks={"demo": {"by": "ada@desk"}, "x": {}})) == (
        [],
        [
            "another deploy of demo by ada@desk is under way, and holds the lock; wait for it with --lock-wait SECONDS"
        ],
    )


def test_a_secret_in_the_environment_is_told_and_not_shown(tmp_path: Path) -> None:
    text = "command: [a]\nenvironment: {HF_TOKEN: hunter2, LEVEL: x, API_KEY: ''}"
    assert failures(text, tmp_path) == (
        [],
        ["environment.HF_TOKEN looks like a secret, but is kept in files of the release that all can read; move HF_TOKEN to secrets: in the run's file"],
    )  # fmt: skip


# -- containers --------------------------------------------------------------------------------------------

BOX = HostSettings(name="box", address="box", runtime="compose")
ENGINE = {
    "client": "/usr/bin/docker", "answers": True, "permitted": True, "version": "29.1.0", "compose": "2.40.3",
    "error": None, "storage_free_bytes": 10**12, "root": "/var/lib/docker", "live_restore": False,
}  # fmt: skip
GPUS = {
    "devices": [{"index": 0, "path": "/dev/nvidia0", "holders": []}],
    "driver": "550.54.14", "library": "550.54.14", "toolkit": True,
}  # fmt: skip
USE = "command: [a]\nimage: {use: my/image:1}\n"


@pytest.mark.parametrize(
    ("engine", "remedy"),
    [
        (True, "after fab stop --host box --name demo a deploy starts a container"),
        (False, "without it there would be no container either: no Docker engine answers (it is down)"),
    ],
)
def test_an_image_that_a_plain_process_in_progress_keeps_from_use_is_told(
    engine: bool, remedy: str, tmp_path: Path
) -> None:
    """Also by a deploy that is unchanged otherwise."""
    live = run(run={"runtime": "process", "command": OTHER})
    found = facts(runs=[live], engine=ENGINE if engine else {"answers": False, "error": "it is down"})
    box = HostSettings(name="box", address="box")
    listed = preflight.checks(survey(found), box, recipe(USE, tmp_path).settings)
    said = (
        "the image my/image:1 of the run's file is not used: 0007-demo is in progress as a plain process, and what "
        f"takes its place is one too; {remedy}"
    )
    assert preflight.warnings(listed) == [said]
    pinned = box.model_copy(update={"runtime": "process"})  # then the file says so
    assert preflight.warnings(preflight.checks(survey(found), pinned, recipe(USE, tmp_path).settings)) == []


def contained(text: str, tmp_path: Path, **changes: Any) -> tuple[list[str], list[str]]:
    """The same for a host with an engine. `engine` changes what the probe says of that."""
    given = {"engine": {**ENGINE, **changes.pop("engine", {})}, **changes.pop("facts", {})}
    found, settings = facts(**given), recipe(text, tmp_path).settings
    image = compose.image(CHECKOUT, BOX, settings, found)
    listed = preflight.checks(survey(found, image=image, **changes), BOX, settings)
    return [c.sentence for c in listed if not c.ok and not c.warning], preflight.warnings(listed)


@pytest.mark.parametrize("text", [TOY, USE, "weights: toy\ntrainer: {}\nmemory: 8g\nshm_size: 1g"])
def test_a_host_with_an_engine_that_has_what_it_needs_passes(text: str, tmp_path: Path) -> None:
    assert contained(text, tmp_path) == ([], [])


def test_the_hosts_own_python_is_of_no_interest_to_a_container(tmp_path: Path) -> None:
    assert contained(TOY, tmp_path, interpreter=Interpreter("/no", problem="does not exist")) == ([], [])


TAKEN = {
    "name": "drafthouse-demo-trainer-1", "project": "drafthouse-demo", "directory": "/home/ada/drafthouse", "here": False,
}  # fmt: skip
OTHERWISE = "or set runtime: process for box in fabric.yaml"
REFUSED: list[tuple[str, str, dict, str]] = [
    ("no engine", TOY, {"engine": {"answers": False, "client": None}},
     f"box has no Docker engine; install one with fab bootstrap --host box, {OTHERWISE}"),
    ("silent", TOY, {"engine": {"answers": False, "error": "the engine at /x does not answer within 2 s"}},
     f"the Docker engine of box does not answer (the engine at /x does not answer within 2 s); start it there with systemctl start docker, {OTHERWISE}"),
    ("not permitted", TOY, {"engine": {"answers": False, "permitted": False, "error": "no engine at /x: Permission denied"}, "facts": {"user": "ada", "uid": 1000}},
     "ada may not use the Docker engine of box (no engine at /x: Permission denied); run sudo usermod -aG docker ada there, which gives ada root's rights, and log in anew"),
    ("elsewhere", TOY, {"engine": {"address": "tcp://build:2375"}},
     f"the Docker client of box asks the engine at tcp://build:2375, but a run can only be watched and stopped through a unix socket of the machine that it is deployed to; unset DOCKER_HOST there (or docker context use default), or deploy to the engine's own machine, {OTHERWISE}"),
    ("user", f"{TOY}\nuser: 1234:5678", {"facts": {"user": "ada", "uid": 1000}},
     "the run has user: 1234:5678, but on box ada (uid 1000) cannot give files to another user; remove user: from the run's file, or deploy as root"),
    ("taken", TOY, {"facts": {"containers": [TAKEN]}},
     "container drafthouse-demo-trainer-1 of the project drafthouse-demo runs on box, but was started from /home/ada/drafthouse and would be ended without a checkpoint; stop it there with docker compose -p drafthouse-demo stop, or take another --name"),
    ("too old", TOY, {"engine": {"version": "19.03.15"}},
     f"box has Docker Engine 19.03.15, but 20.10 or later is needed; upgrade it there, {OTHERWISE}"),
    ("no client", TOY, {"engine": {"client": None}},
     f"box has a Docker engine, but no docker command; install it with fab bootstrap --host box, {OTHERWISE}"),
    ("no Compose", TOY, {"engine": {"compose": None, "error": "Run 'docker --help' for more information"}},
     f"box has no Docker Compose v2 (docker compose is no command there); install it with fab bootstrap --host box, {OTHERWISE}"),
    ("old Compose", TOY, {"engine": {"compose": "2.3.3"}},
     f"box has Docker Compose 2.3.3, but 2.17 or later is needed; upgrade it with fab bootstrap --host box, {OTHERWISE}"),
    ("no image", COMMAND, {},
     "the run has a command: of its own, but no image that has its program; name one that is on the host, like image: {use: my/image:1.4}, or set runtime: process"),
    ("disk", TOY, {"engine": {"storage_free_bytes": 2 * 10**9}},
     "the Docker engine of box has 2.0 GB free in /var/lib/docker, but the image needs about 4.0 GB; free some with docker image prune there, or with fab prune"),
    ("no toolkit", TOY, {"facts": {"gpus": {**GPUS, "toolkit": False}}},
     "box has GPUs, but no NVIDIA container toolkit, so no container could see them; install nvidia-container-toolkit there (fab bootstrap --host box says how), or set gpus: 0"),
    ("no driver", f"{TOY}\ngpus: all", {},
     "the run has gpus: all, but box has no NVIDIA driver loaded; install it there, or set gpus: 0 to compute on the CPU"),
    ("driver changed", TOY, {"facts": {"gpus": {**GPUS, "library": "560.1"}}},
     "the NVIDIA driver that box has loaded is 550.54.14, but its library is 560.1: no CUDA call would work; reboot that machine, or unload the nvidia modules and load them again"),
    ("bus error", f"{TOY}\nshm_size: 64m", {},
     "shm_size is 64m, but PyTorch's loaders and NCCL may need 1024 MiB in the container's /dev/shm, and would end in a bus error; remove shm_size, or enlarge it"),
    ("memory", f"{TOY}\nmemory: 512m", {},
     "memory is 512m, but the container's shared memory alone may take 1024 MiB of it; enlarge memory: in the run's file, or remove it"),
    ("lost image", USE, {"image_there": False},
     "there is no image my/image:1 on box; docker pull it there, or correct image: in the run's file"),
    ("mount", USE, {"data": "/usr", "image_there": True},
     "/usr would be mounted over the container's own /usr; choose a directory of its own for weights: or data: in the run's file"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "changes", "said"), [item[1:] for item in REFUSED], ids=[item[0] for item in REFUSED]
)
def test_what_a_container_lacks_is_one_sentence_with_its_remedy(
    text: str, changes: dict, said: str, tmp_path: Path
) -> None:
    assert contained(text, tmp_path, **dict(changes)) == ([said], [])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (TOY, {"containers": [{**TAKEN, "here": True}, {**TAKEN, "project": "drafthouse-other"}]}),
        (f"{TOY}\nuser: 1000:5", {"user": "ada", "uid": 1000}),
        (f"{TOY}\nuser: root", {"user": "ada", "uid": 1000, "engine": {**ENGINE, "rootless": True}}),
    ],
)
def test_ones_own_container_and_ones_own_user_are_no_obstacle(text: str, found: dict, tmp_path: Path) -> None:
    changes = dict(found)
    assert contained(text, tmp_path, engine=changes.pop("engine", {}), facts=changes) == ([], [])


def test_an_image_that_is_there_needs_no_room_and_code_on_packages_little(tmp_path: Path) -> None:
    image = compose.image(CHECKOUT, BOX, recipe(TOY, tmp_path).settings, facts(engine=ENGINE))
    tight = {"engine": {"storage_free_bytes": 10**9}}
    for tag in (image.reference, image.packages):  # type: ignore[union-attr]
        assert contained(TOY, tmp_path, **tight, facts={"images": [{"tags": [tag]}]}) == ([], [])
    assert contained(TOY, tmp_path, **tight, facts={"images": [{"tags": ["drafthouse:other"]}]})[0]


def test_without_devices_nothing_is_said_of_drivers(tmp_path: Path) -> None:
    broken = {"gpus": {**GPUS, "toolkit": False, "library": "560.1"}}
    assert contained(f"{TOY}\ngpus: 0", tmp_path, facts=broken) == ([], [])


@pytest.mark.parametrize(("restores", "unattended", "told"), [(False, True, 1), (True, True, 0), (False, False, 0), (None, True, 0)])  # fmt: skip
def test_upgrades_at_night_that_would_end_the_run_are_told(
    restores: bool | None, unattended: bool, told: int, tmp_path: Path
) -> None:
    found = contained(
        TOY, tmp_path, engine={"live_restore": restores}, facts={"unattended_upgrades": unattended}
    )
    assert (found[0], len(found[1])) == ([], told)
