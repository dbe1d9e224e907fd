"""Drift: what the process really runs, against what was deployed. Each difference is named."""

from __future__ import annotations

from typing import Any

import pytest
from samples import NOW, run

from deploy import drift, release

COMMAND = ["/opt/venv/bin/python", "-u", "-m", "trainer", "--lr", "0.0006", "--use-soft-labels"]


def of(command: list[str] = COMMAND, **running: Any) -> list[str]:
    written = {
        "command": command,
        "environment": {"PYTHONUNBUFFERED": "1", "GREETING": "hello"},
        "image": None,
    }
    written |= running.pop("written", {})
    images = running.pop("images", ())
    seen = {"argv": list(command), "environment": {"PYTHONUNBUFFERED": "1", "GREETING": "hello"}, **running}
    return drift.of_process(run(run=written, running=seen), images)


def test_a_process_that_is_what_was_deployed_has_no_drift() -> None:
    assert of() == []


def test_a_process_that_nobody_can_look_into_is_no_drift() -> None:
    assert drift.of_process(run(running=None)) == []
    assert drift.of_process(run()) == []
    assert of(environment=None, argv=[]) == []


def test_each_variable_with_another_value_is_named() -> None:
    assert of(environment={"PYTHONUNBUFFERED": "0"}) == [
        "process: GREETING is not set, but hello was deployed",
        "process: PYTHONUNBUFFERED is 0, but 1 was deployed",
    ]


def test_each_word_of_the_command_line_that_differs_is_named_by_its_flag() -> None:
    other = [*COMMAND[:4], "--lr", "0.0003", "--block-size", "8"]
    assert of(argv=other) == [
        "process: --lr is 0.0003, but 0.0006 was deployed",
        "process: --use-soft-labels is not set, but '' was deployed",
        "process: --block-size is 8, but not set was deployed",
    ]


def test_what_looks_like_a_secret_is_said_to_differ_and_not_shown() -> None:
    own = {
        "environment": {"HF_TOKEN": "hf_old", "URL": "https://a:pw1@x"},
        "command": ["p", "--api-key", "old"],
    }
    assert of(
        written=own,
        argv=["p", "--api-key", "new"],
        environment={"HF_TOKEN": "hf_new", "URL": "https://a:pw2@x"},
    ) == [
        "process: --api-key is *** (another value), but *** was deployed",
        "process: HF_TOKEN is *** (another value), but *** was deployed",
        "process: URL is https://a:***@x (another value), but https://a:***@x was deployed",
    ]
    assert "process: HF_TOKEN is not set, but *** was deployed" in of(written=own, environment={})


@pytest.mark.parametrize(
    ("deployed", "running"),
    [
        (["./train.sh", "now"], ["/bin/sh", "./train.sh", "now"]),  # the kernel follows the #! line
        (["bash", "run.sh"], ["python", "train.py"]),  # it ends in exec
        (["python", "train.py", "--x"], ["trainer: step 12"]),  # it gave itself a title
    ],
)
def test_a_program_that_goes_on_as_another_one_is_no_drift(deployed: list[str], running: list[str]) -> None:
    assert of(deployed, argv=running) == []


def test_another_image_than_the_deployed_one_is_named() -> None:
    written = {"image": "drafthouse:aaaaaaaaaaaa"}
    images = [{"id": "sha256:" + "1" * 64, "tags": ["drafthouse:aaaaaaaaaaaa"]}]
    assert of(written=written, image_id="sha256:" + "1" * 64, images=images) == []
    foreign = {"image": "python:3.11-slim-bookworm"}  # one that the probe does not list
    assert of(written=foreign, image_id="sha256:" + "2" * 64, images=images) == []
    assert of(written=written, image_id="sha256:" + "2" * 64, images=images) == [
        "process: image sha256:222222222222 runs, but drafthouse:aaaaaaaaaaaa was deployed"
    ]


def test_a_script_that_was_corrected_after_the_process_had_started_is_named() -> None:
    """The corrected script does nothing for the process that has read the old one."""
    files = [
        {"path": "/root/train.py", "modified": NOW},
        {"path": "/root/out.json", "modified": NOW},  # perhaps what it writes
        {"path": "/root/settings.yaml", "modified": NOW - 500},
    ]
    argv = ["python", "/root/train.py", "/root/out.json", "--config", "/root/settings.yaml"]
    (found,) = of(argv, files=files, started=NOW - 100)
    assert found.startswith("/root/train.py: changed at ")
    assert found.endswith(", after the process had started")
    assert of(argv, files=files, started=NOW) == []


def test_files_of_the_release_that_were_edited_on_the_host_are_named() -> None:
    known = {"changed": {"a" * 12: ["app/trainer/loss.py", "extra"]}, "added": {"a" * 12: ["extra"]}}
    assert release.edited({"names": {"demo": known}}, "demo", "a" * 12) == [
        "app/trainer/loss.py: changed on the host",
        "extra: added on the host",
    ]
