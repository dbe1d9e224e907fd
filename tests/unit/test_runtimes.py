"""Which runtime a deploy takes, and what the compose runtime starts."""

# ruff: noqa: E501  (whole sentences, as people read them)

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from samples import facts, recipe, run

from deploy import CHECKOUT, runtimes
from deploy.image import Image
from deploy.release import Layout
from deploy.runtimes import compose, process
from deploy.settings import HostSettings
from trainer import status

ENGINE = {"client": "/usr/bin/docker", "answers": True, "permitted": True, "version": "29.1.0", "compose": "2.40.3", "error": None}  # fmt: skip
LAYOUT = Layout("/state", "/dev/shm/drafthouse", "demo")
BOX = HostSettings(name="box", address="box")
HERE = HostSettings(name="localhost", address="localhost")


def engine(**changes: Any) -> dict[str, Any]:
    return facts(engine={**ENGINE, **changes})


# -- the choice --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "runtime", "why"),
    [
        ({}, "compose", "Docker Engine 29.1.0 with Compose 2.40.3 answers"),
        ({"version": "20.10.24+dfsg1"}, "compose", "Docker Engine 20.10.24+dfsg1 with Compose 2.40.3 answers"),
        ({"compose": "v2.17.0"}, "compose", "Docker Engine 29.1.0 with Compose v2.17.0 answers"),
        ({"compose": "2.16.0"}, "process", "Compose 2.16.0 is older than 2.17"),
        ({"compose": None}, "process", "the Docker engine has no Compose v2 (docker compose is no command there)"),
        ({"version": "19.03.1"}, "process", "Docker Engine 19.03.1 is older than 20.10"),
        ({"answers": False, "error": "it hangs"}, "process", "no Docker engine answers (it hangs)"),
        ({"answers": False, "permitted": False, "error": "Permission denied"}, "process", "the Docker engine does not permit us (Permission denied)"),
    ],
)  # fmt: skip
def test_a_host_over_ssh_takes_the_engine_that_can_be_used(changes: dict, runtime: str, why: str) -> None:
    assert runtimes.choose(BOX, engine(**changes)) == (runtime, why)


def test_a_proxmox_host_takes_containers_of_its_own_unless_it_has_an_engine() -> None:
    proxmox = {"pct": "/usr/sbin/pct", "version": "9.1.1", "mounted": True}
    none = {**engine(answers=False, error="there is none"), "pve": proxmox}
    assert runtimes.choose(BOX, none) == ("pct", "Proxmox VE 9.1.1 is there, and no engine")
    assert runtimes.choose(BOX, {**engine(), "pve": proxmox})[0] == "compose"
    assert runtimes.choose(BOX, {**none, "pve": {**proxmox, "mounted": False}})[0] == "process"
    inside = BOX.model_copy(update={"container": 200})
    assert runtimes.choose(inside, engine())[0] == "process"
    docker = inside.model_copy(update={"runtime": "compose"})
    assert runtimes.choose(docker, engine())[0] == "compose"


def test_this_machine_takes_no_engine_unless_it_is_told() -> None:
    assert runtimes.choose(HERE, engine()) == (
        "process",
        "on this machine, unless fabric.yaml says runtime: compose (a Docker engine answers, version 29.1.0)",
    )
    told = HERE.model_copy(update={"runtime": "compose"})
    assert runtimes.choose(told, facts()) == ("compose", "as localhost has it in fabric.yaml")
    assert runtimes.choose(BOX.model_copy(update={"runtime": "process"}), engine())[0] == "process"


def test_a_run_in_progress_keeps_its_runtime_though_the_engine_does_not_answer() -> None:
    broken = {**engine(answers=False, error="it hangs"), "runs": [run(run={"runtime": "compose"})]}
    assert runtimes.choose(BOX, broken, "demo") == ("compose", "as 0007-demo, which is in progress")
    assert runtimes.choose(BOX, broken, "other")[0] == "process"
    over = {**broken, "runs": [run(alive=False, run={"runtime": "compose"})]}
    assert runtimes.choose(BOX, over, "demo")[0] == "process"


def test_proxmox_is_taken_if_it_is_said() -> None:
    said = runtimes.choose(BOX.model_copy(update={"runtime": "pct"}), facts())
    assert said == ("pct", "as box has it in fabric.yaml")
    going_on = {**facts(), "runs": [run(run={"runtime": "pct"})]}
    assert runtimes.choose(BOX, going_on, "demo") == ("pct", "as 0007-demo, which is in progress")


# -- the image ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "gpus", "variant"),
    [("", 0, "cpu"), ("", 2, "gpu"), ("gpus: 0", 2, "cpu"), ("image: {variant: gpu}", 0, "gpu")],
)
def test_the_variant_follows_the_devices_unless_it_is_said(
    text: str, gpus: int, variant: str, tmp_path: Path
) -> None:
    devices = [{"index": index, "path": f"/dev/nvidia{index}"} for index in range(gpus)]
    found = {**engine(), "gpus": {"devices": devices}}
    made = compose.image(
        CHECKOUT, BOX, recipe(f"weights: toy\ntrainer: {{}}\n{text}", tmp_path).settings, found
    )
    assert isinstance(made, Image)
    assert made.arguments["VARIANT"] == variant


def test_without_containers_there_is_no_image_and_one_of_ones_own_is_used_as_it_is(tmp_path: Path) -> None:
    own = recipe("command: [a]\nimage: {use: my/image:1.4}", tmp_path).settings
    assert compose.image(CHECKOUT, HERE, own, facts()) is None
    assert compose.image(CHECKOUT, BOX, own, engine()) == compose.Used("my/image:1.4")


# -- who it is and what it sees ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found", "user"),
    [
        ("", {"uid": 0, "gid": 0}, "10001:10001"),
        ("", {"uid": 1000, "gid": 100}, "1000:100"),
        ("user: root", {"uid": 0}, "0:0"),
        ("user: 1234:5678", {"uid": 0}, "1234:5678"),
        ("", {"uid": 1000, "gid": 100, "engine": {**ENGINE, "rootless": True}}, "0:0"),
    ],
)
def test_the_user_is_never_root_unless_told(text: str, found: dict, user: str, tmp_path: Path) -> None:
    settings = recipe(f"command: [a]\n{text}", tmp_path).settings
    assert compose.user(settings, {**engine(), **found}) == user


def test_a_container_sees_its_own_places_at_the_hosts_paths_and_nothing_of_other_runs(tmp_path: Path) -> None:
    settings = recipe("weights: toy\ntrainer: {}\nsecrets: {K: env}", tmp_path).settings
    found = compose.mounts(settings, LAYOUT, "/dev/shm/drafthouse/m@1", "/data/x")
    home = "/state/names/demo"
    assert [(mount.source, mount.target, mount.read_only) for mount in found] == [
        (f"{home}/run", "/run/drafthouse", False),
        (f"{home}/secrets", "/run/drafthouse-secrets", True),
        (f"{home}/checkpoints", f"{home}/checkpoints", False),
        (f"{home}/cache", f"{home}/cache", False),
        ("/dev/shm/drafthouse/m@1", "/dev/shm/drafthouse/m@1", True),
        ("/data/x", "/data/x", True),
    ]


# -- what is started ---------------------------------------------------------------------------------------

MADE = status.Run(
    "0008-demo",
    "demo",
    ["python", "-u", "-m", "trainer", "--lr", "$(id) ${X} ' \""],
    runtime="compose",
    image="drafthouse:0123",
    user="10001:10001",
    devices=["0", "1"],
    environment={"NOTE": "$HOME ${X} a\nb"},
    secrets=["K"],
    secrets_file="/state/names/demo/secrets-0008-demo",
)


def test_the_switch_is_told_all_that_it_needs_for_a_container() -> None:
    found = {**engine(variables={"DOCKER_HOST": "unix:///x.sock", "LD_PRELOAD": "no"}), "home": "/home/ada"}
    assert compose.start_spec(MADE, found, LAYOUT, "/state/r", "/state/runs/0008-demo") == {
        "argv": [
            *(
                "/usr/bin/docker",
                "compose",
                "--project-directory",
                f"{LAYOUT.home}/current",  # as who types `docker compose up` there: the same configuration
                "--file",
                f"{LAYOUT.home}/current/compose.yaml",
            ),
            *("up", "--detach", "--no-build", "--pull", "never", "--force-recreate"),
        ],
        "environment": {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/home/ada",
            "LANG": "C.UTF-8",
            "DOCKER_HOST": "unix:///x.sock",
        },
        "working_directory": f"{LAYOUT.home}/current",
        "container": {"project": "drafthouse-demo", "service": "trainer", "image": "drafthouse:0123"},
        "user": [10001, 10001],
        "devices": ["0", "1"],
    }


def test_root_gives_the_runs_directories_to_the_containers_user_and_others_have_none_to_give() -> None:
    root = status.Run("0008-demo", "demo", ["a"], user="0:0")
    assert compose.start_spec(root, {**engine(), "uid": 0}, LAYOUT, "/r", "/runs/x")["user"] == [0, 0]
    own = status.Run("0008-demo", "demo", ["a"], user="1000:100")
    found = {**engine(), "uid": 1000, "gid": 100}
    assert compose.start_spec(own, found, LAYOUT, "/r", "/runs/x")["user"] is None
    rootless = {**engine(rootless=True), "uid": 1000, "gid": 100}
    inside = status.Run("0008-demo", "demo", ["a"], user="0:0")
    assert compose.start_spec(inside, rootless, LAYOUT, "/r", "/runs/x")["user"] is None


def test_the_trial_is_the_releases_own_service_with_the_new_run_in_its_place() -> None:
    made = compose.trial(MADE, engine(), LAYOUT, "/state/r", "/state/runs/0008-demo")
    assert list(made.argv[5:]) == [
        *("/state/r/compose.yaml", "--file", "-", "run", "--rm", "--no-deps", "-T", "trainer"),
    ]
    assert "id" not in " ".join(made.argv).split("--file")[-1], "no value of the run in an argument"
    service = yaml.safe_load(made.input.decode().replace("$$", "$"))["services"]["trainer"]
    assert [
        (mount["source"], mount["target"], mount.get("read_only", False)) for mount in service["volumes"]
    ] == [
        ("/state/runs/0008-demo", "/run/drafthouse", False),
        ("/state/names/demo/secrets-0008-demo", "/run/drafthouse-secrets", True),
    ]
    asked = json.loads(service["command"][3])
    assert (asked["command"], asked["environment"], asked["check"]) == (MADE.command, MADE.environment, True)
    assert asked["written"] == ["/run/drafthouse", "/state/names/demo/checkpoints", "/state/names/demo/cache"]


def test_a_plain_process_sees_the_devices_that_it_was_given_and_all_without_a_word() -> None:
    given = facts()

    def seen(devices: list | None) -> str | None:
        made = status.Run("0008-demo", "demo", ["a"], devices=devices)
        start = process.start_spec(made, given, "/r", run_path="/runs/x", python="python")
        return start["environment"].get("CUDA_VISIBLE_DEVICES")

    assert (seen(None), seen([]), seen(["0", "2"])) == (None, "", "0,2")


def test_a_link_into_the_containers_run_directory_is_shown_as_the_host_has_it() -> None:
    assert compose.outside("/run/drafthouse/events", "/s/runs/0001-x") == "/s/runs/0001-x/events"
    assert compose.outside("/run/drafthouse", "/s/runs/0001-x") == "/s/runs/0001-x"
    for other in ("/run/drafthouse-secrets", "https://w.example/run/drafthouse/x"):
        assert compose.outside(other, "/s") == other
