"""deploy/machine.py: what is kept of the engine's description of itself, whatever it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy import gpus, machine
from deploy.engine import Engine, EngineError

INFO = {
    "DockerRootDir": "/",
    "LiveRestoreEnabled": True,
    "SecurityOptions": ["name=seccomp,profile=default", "name=rootless"],
    "Runtimes": {"runc": {}, "nvidia": {}, "io.containerd.runc.v2": {}},
}


def test_what_counts_of_the_engine_is_kept():
    found = machine.settings(INFO)
    assert (found["live_restore"], found["rootless"], found["root"]) == (True, True, "/")
    assert found["runtimes"] == ["io.containerd.runc.v2", "nvidia", "runc"]
    assert found["storage_free_bytes"] > 0


@pytest.mark.parametrize(
    "info", [None, [], {}, {"DockerRootDir": "/no/such"}, {"Runtimes": [], "SecurityOptions": None}]
)
def test_what_an_engine_does_not_say_is_none(info: object):
    found = machine.settings(info)
    assert found["storage_free_bytes"] is None
    assert (found["runtimes"], found["rootless"], found["cdi"]) == ([], False, False)


def test_devices_come_from_cdi_only_if_the_engine_reads_it_and_nvidia_is_in_it(tmp_path: Path, monkeypatch):
    monkeypatch.setenv(gpus.ROOT_VARIABLE, str(tmp_path))
    places = tmp_path / "etc" / "cdi"
    places.mkdir(parents=True)
    assert not machine.cdi(["/etc/cdi"])
    (places / "other.yaml").write_text("kind: vendor.com/net\n")
    assert not machine.cdi(["/etc/cdi"])
    (places / "nvidia.yaml").write_text("cdiVersion: 0.5.0\nkind: nvidia.com/gpu\n")
    assert machine.cdi(["/etc/cdi", "/var/run/cdi"])
    assert not machine.cdi([])
    assert not machine.cdi(None)


def test_a_plugin_is_found_where_the_client_looks(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    assert not machine.plugin("docker-no-such")
    (tmp_path / "cli-plugins").mkdir()
    (tmp_path / "cli-plugins" / "docker-no-such").touch()
    assert not machine.plugin("docker-no-such")
    (tmp_path / "cli-plugins" / "docker-no-such").chmod(0o755)
    assert machine.plugin("docker-no-such")


class Told(Engine):
    """An engine that gives the same answer to everything."""

    def __init__(self, answer: object) -> None:
        super().__init__("unix:///none")
        self.answer = answer

    def call(self, method: str, path: str, **parameters: object) -> object:
        if isinstance(self.answer, EngineError):
            raise self.answer
        return self.answer


def test_images_are_told_with_tags_labels_and_size():
    row = {
        "Id": "sha256:1",
        "RepoTags": ["drafthouse:b", "drafthouse:a"],
        "Size": 7,
        "Created": 1,
        "Labels": None,
    }
    assert machine.images(Told([row])) == [
        {"id": "sha256:1", "tags": ["drafthouse:a", "drafthouse:b"], "bytes": 7, "created": 1, "labels": {}}
    ]
    assert machine.images(Told({"message": "?"})) == []
    assert machine.images(Told([None, {}])) == [
        {"id": None, "tags": [], "bytes": None, "created": None, "labels": {}}
    ]


def test_an_installed_system_is_told_by_its_own_names():
    found = machine.system()
    assert set(found) == {"id", "version_id", "codename"}
    assert found["id"] == found["id"].strip("\"'")


def test_a_client_that_hangs_is_given_up_on(tmp_path: Path):
    client = tmp_path / "docker"
    client.write_text("#!/bin/sh\nexec sleep 60\n")
    client.chmod(0o755)
    assert machine.ask(str(client), "compose", timeout=0.2) == (
        None,
        f"{client} compose does not answer within 0.2 s",
    )
