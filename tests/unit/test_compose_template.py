"""templates/compose.yaml.j2: the demo's rendering is compose.yaml, and a deploy's keeps the rules too."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.runtimes.compose import Mount, Service, compose_file, demo, project, shm_bytes

CHECKOUT = Path(__file__).resolve().parents[2]


def service(described: Service) -> dict[str, Any]:
    """The one service of the rendered file."""
    document = yaml.safe_load(compose_file(described))
    assert list(document["services"]) == ["trainer"]
    return document["services"]["trainer"]


@pytest.fixture
def deployed() -> Service:
    """A release on a host, with everything that a template value can be."""
    return Service(
        name="exp-ddtree",
        title="a release",
        command=["python", "-u", "-m", "trainer.launch", "--run-dir", "/run/drafthouse"],
        image="sha256:0123",
        environment={"LR": "6e-4", "NOTE": "a: b # ${c} $d 'e' \"f\"\n"},
        mounts=[
            Mount("/var/lib/drafthouse/runs/0007-exp-ddtree", "/run/drafthouse"),
            Mount("/dev/shm/drafthouse/w@0123", "/weights", read_only=True),
        ],
        directory="/run/drafthouse",
        user="10001:10001",
        gpus=["0", "GPU-11"],
        devices=["/dev/nvidia0", "/dev/nvidiactl"],
        memory_bytes=64 << 30,
        shm_bytes=shm_bytes(2),
        grace_seconds=300,
    )


def test_the_top_level_file_is_the_template_rendered_for_the_demo() -> None:
    assert (CHECKOUT / "compose.yaml").read_bytes() == compose_file(demo()).encode(), "run: make compose"


def test_the_demo_mounts_named_volumes_only() -> None:
    document = yaml.safe_load(compose_file(demo()))
    mounts = document["services"]["trainer"]["volumes"]
    assert {mount["type"] for mount in mounts} == {"volume"}
    assert {mount["source"] for mount in mounts} == set(document["volumes"])


@pytest.mark.parametrize("which", ["demo", "deployed"])
def test_a_container_has_no_rights_and_no_second_init(which: str, deployed: Service) -> None:
    rendered = service(demo() if which == "demo" else deployed)
    assert rendered["read_only"] is True
    assert rendered["tmpfs"] == ["/tmp:exec,mode=1777"], "torch.compile runs what it writes there"
    assert rendered["cap_drop"] == ["ALL"]
    assert rendered["security_opt"] == ["no-new-privileges:true"]
    assert "init" not in rendered, "tini is in the image"
    assert "privileged" not in rendered
    assert rendered["restart"] == "no"
    assert rendered["network_mode"] == "bridge", "no network of its own is left behind"


@pytest.mark.parametrize("which", ["demo", "deployed"])
def test_the_log_rotates_with_three_files_or_more(which: str, deployed: Service) -> None:
    logging = service(demo() if which == "demo" else deployed)["logging"]
    assert logging["driver"] == "json-file"
    assert int(logging["options"]["max-file"]) >= 3
    assert logging["options"]["max-size"].endswith("m")


def test_the_engine_kills_later_than_launch_does(deployed: Service) -> None:
    assert service(deployed)["stop_grace_period"] == "310s"


def test_the_project_is_named_after_the_experiment_and_not_after_a_directory(deployed: Service) -> None:
    assert yaml.safe_load(compose_file(deployed))["name"] == "drafthouse-exp-ddtree"
    assert yaml.safe_load(compose_file(demo()))["name"] == "drafthouse-demo"


def test_names_with_dots_have_projects_of_their_own_that_compose_permits() -> None:
    names = ["a.b", "a_b", "a-b", "a.b.c", "a.b_c", "a_b.c"]
    projects = [project(name) for name in names]
    assert len(set(projects)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9_-]*", found) for found in projects)
    assert project("a_b") == "drafthouse-a_b"


def test_a_missing_directory_of_the_host_is_never_created(deployed: Service) -> None:
    run, weights = service(deployed)["volumes"]
    assert run["type"] == weights["type"] == "bind"
    assert run["bind"] == weights["bind"] == {"create_host_path": False}
    assert weights["read_only"] is True
    assert "read_only" not in run
    assert "volumes" not in yaml.safe_load(compose_file(deployed))


def test_gpus_are_reserved_by_id_and_only_when_asked_for(deployed: Service) -> None:
    (device,) = service(deployed)["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "device_ids": ["0", "GPU-11"], "capabilities": ["gpu"]}
    assert "deploy" not in service(demo())


def test_values_are_not_taken_for_variables_or_for_yaml(deployed: Service) -> None:
    rendered = service(deployed)
    assert rendered["environment"]["NOTE"] == "a: b # $${c} $$d 'e' \"f\"\n", "Compose reads $$ as $"
    assert rendered["environment"]["LR"] == "6e-4", "a string, not a number"


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\u2028", "\x85"])
def test_a_title_of_several_lines_adds_nothing_to_the_file(end: str, deployed: Service) -> None:
    titled = dataclasses.replace(deployed, title=f"Mine.{end}x-injected: true")
    text = compose_file(titled)
    assert text.startswith("# Mine.\n")
    assert text.partition("\n")[2] == compose_file(deployed).partition("\n")[2]


def test_a_deployed_release_is_not_built_where_it_runs(deployed: Service) -> None:
    assert "build" not in service(deployed)
    assert service(deployed)["image"] == "sha256:0123"
    assert service(deployed)["pull_policy"] == "never", "nor fetched from a registry that it never was in"


def test_python_is_unbuffered_by_variable_and_by_flag() -> None:
    rendered = service(demo())
    assert rendered["environment"]["PYTHONUNBUFFERED"] == "1"
    words = rendered["command"]
    assert all(words[i + 1] == "-u" for i, word in enumerate(words) if word == "python")


def test_the_healthcheck_starts_nothing_but_a_reader_of_status_files() -> None:
    assert service(demo())["healthcheck"]["test"][:4] == ["CMD", "python", "-m", "trainer.healthcheck"]


def test_shared_memory_is_a_gibibyte_and_more_for_each_device(deployed: Service) -> None:
    assert (shm_bytes(), shm_bytes(2)) == (1 << 30, 2 << 30)
    assert service(deployed)["shm_size"] == 2 << 30


def test_an_image_of_ones_own_gets_the_engines_init_and_no_entrypoint(deployed: Service) -> None:
    rendered = service(dataclasses.replace(deployed, foreign=True))
    assert (rendered["init"], rendered["entrypoint"], rendered["stop_signal"]) == (True, [], "SIGTERM")
    assert rendered["command"] == deployed.command


def test_devices_are_named_one_by_one_besides_the_reservation(deployed: Service) -> None:
    assert service(deployed)["devices"] == ["/dev/nvidia0:/dev/nvidia0", "/dev/nvidiactl:/dev/nvidiactl"]


OTHERWISE = {
    "name": "other",
    "command": ["true"],
    "image": "other",
    "title": "other",
    "build": False,
    "environment": {},
    "foreign": True,
    "directory": "/other",
    "devices": (),
    "memory_bytes": None,
    "mounts": (),
    "user": None,
    "shm_bytes": 4242,
    "grace_seconds": 7,
    "gpus": (),
    "healthcheck": (),
}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Service)])
def test_every_value_of_a_service_shows_in_the_file(field: str, deployed: Service) -> None:
    full = dataclasses.replace(deployed, healthcheck=["true"], build=True)
    changed = dataclasses.replace(full, **{field: OTHERWISE[field]})
    assert compose_file(changed) != compose_file(full)
