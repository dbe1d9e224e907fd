"""deploy.pct_form: which form a host gets, and what a container of the image is started with."""

from __future__ import annotations

import pytest
from images import CONFIG, PASSWD

from deploy.errors import USAGE, DeployError
from deploy.pct_form import form_for, image_config


@pytest.mark.parametrize(
    ("version", "wanted", "form"),
    [
        ("9.1.4", None, "oci"),
        ("9.1", "oci", "oci"),
        ("10.0.1", None, "oci"),
        ("9.1.4", "template", "template"),
        ("9.0.11", None, "template"),
        ("8.4-1", None, "template"),
    ],
)
def test_the_version_of_the_host_decides_unless_somebody_does(version: str, wanted: str, form: str) -> None:
    assert form_for(version, wanted, "pve") == form


@pytest.mark.parametrize(
    ("version", "wanted", "words"),
    [
        ("8.4.1", "oci", r"pve has Proxmox 8\.4\.1, which takes no OCI images .*--form template"),
        ("9.1", "docker", "--form docker must be oci or template"),
    ],
)
def test_a_form_that_cannot_be_is_refused(version: str, wanted: str, words: str) -> None:
    with pytest.raises(DeployError, match=words) as caught:
        form_for(version, wanted, "pve")
    assert caught.value.code == USAGE


def test_a_version_that_is_none_asks_for_the_form() -> None:
    with pytest.raises(DeployError, match="pve says that its version of Proxmox is 'new', which names no"):
        form_for("new", None, "pve")


def test_what_the_image_says_is_what_a_container_is_started_with() -> None:
    assert image_config({"config": CONFIG}, PASSWD) == {
        "entrypoint": ["tini", "--", "run me", "--help"],
        "environment": {"PATH": "/opt/bin:/bin", "COLOUR": "blue green", "PYTHONUNBUFFERED": "1"},
        "working_directory": "/work",
        "user": "10001:10002",
        "stop_signal": "SIGTERM",
    }


def test_an_image_that_says_nothing_is_roots_and_ends_with_term() -> None:
    found = image_config({"config": {"Env": None, "StopSignal": None}})
    assert (found["entrypoint"], found["user"], found["working_directory"]) == ([], "0:0", "/")
    assert found["stop_signal"] == "SIGTERM"
    assert found["environment"]["PATH"].endswith("/sbin:/bin")


@pytest.mark.parametrize("value", ["", "0", "text"])
def test_pythonunbuffered_is_on_whatever_the_image_says(value: str) -> None:
    found = image_config({"config": {"Env": [f"PYTHONUNBUFFERED={value}"]}})
    assert found["environment"]["PYTHONUNBUFFERED"] == "1"


@pytest.mark.parametrize(
    ("user", "numbers"),
    [
        ("7", "7:0"),
        ("7:8", "7:8"),
        ("10001", "10001:10002"),
        ("trainer:8", "10001:8"),
        ("trainer:video", "10001:44"),
        ("root", "0:0"),
    ],
)
def test_a_user_is_there_by_numbers(user: str, numbers: str) -> None:
    found = image_config({"config": {"User": user}}, PASSWD, b"video:x:44:trainer\n")
    assert found["user"] == numbers


@pytest.mark.parametrize("user", ["nobody-knows", "trainer:nobody-knows"])
def test_a_user_whom_the_image_does_not_know_is_one_sentence(user: str) -> None:
    with pytest.raises(DeployError, match=f"the user '{user}', whom its /etc/passwd and /etc/group do not"):
        image_config({"config": {"User": user}}, PASSWD)
