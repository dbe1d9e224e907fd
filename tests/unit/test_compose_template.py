"""templates/compose.yaml.j2: the demo's rendering is compose.yaml, and a deploy's keeps the rules too."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.runtimes.compose import Mount, Service, compose_file, demo, shm_bytes

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
        environment_file="/var/lib/drafthouse/names/exp ddtree/run.env",
        mounts=[
            Mount("/var/lib/drafthouse/runs/0007-exp-ddtree", "/run/drafthouse"),
            Mount("/dev/shm/drafthouse/w@0123", "/weights", read_only=True),
        ],
        user="10001:10001",
        gpus=["0", "GPU-11"],
        shm_bytes=shm_bytes(54 << 30),
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
    assert rendered["env_file"] == [
        {"path": "/var/lib/drafthouse/names/exp ddtree/run.env", "required": True}
    ]


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\u2028", "\x85"])
def test_a_title_of_several_lines_adds_nothing_to_the_file(end: str, deployed: Service) -> None:
    titled = dataclasses.replace(deployed, title=f"Mine.{end}x-injected: true")
    text = compose_file(titled)
    assert text.startswith("# Mine.\n")
    assert text.partition("\n")[2] == compose_file(deployed).partition("\n")[2]


def test_a_deployed_release_is_not_built_where_it_runs(deployed: Service) -> None:
    assert "build" not in service(deployed)
    assert service(deployed)["image"] == "sha256:0123"


def test_python_is_unbuffered_by_variable_and_by_flag() -> None:
    rendered = service(demo())
    assert rendered["environment"]["PYTHONUNBUFFERED"] == "1"
    words = rendered["command"]
    assert all(words[i + 1] == "-u" for i, word in enumerate(words) if word == "python")


def test_the_healthcheck_starts_nothing_but_a_reader_of_status_files() -> None:
    assert service(demo())["healthcheck"]["test"][:4] == ["CMD", "python", "-m", "trainer.healthcheck"]


@pytest.mark.parametrize("weights", [0, 1, 54 << 30])
def test_shared_memory_holds_the_weights_and_a_gibibyte_more(weights: int) -> None:
    size = shm_bytes(weights)
    assert size >= weights + (1 << 30)
    assert size % (1 << 20) == 0


OTHERWISE = {
    "name": "other",
    "command": ["true"],
    "image": "other",
    "title": "other",
    "build": False,
    "environment": {},
    "environment_file": None,
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
