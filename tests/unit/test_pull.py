"""What `fab pull` takes for a checkpoint, and that no link of a run's user leads it anywhere else."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from deploy import pull, pull_source
from deploy.errors import DeployError
from deploy.release import Layout

LAYOUT = Layout("/var/lib/drafthouse", "/dev/shm/drafthouse", "demo")
WAYS_OUT = [
    "../../../../etc/cron.d",
    "/etc",
    "..",
    "../0001-demo/step-00000010",
    "0001-demo/..",
    "0001-demo/step-1/../../..",
    "0001-demo/step-1/x",
    "step-00000010",
    "",
]


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    place = tmp_path / "checkpoints"
    (place / "0001-demo" / "step-00000010").mkdir(parents=True)
    (place / "0001-demo" / "step-00000010" / "state.json").write_text("{}")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("theirs")
    return place


def test_the_newest_checkpoint_is_what_latest_points_to_and_that_of_a_run_is_its_highest_step(
    checkpoints: Path,
) -> None:
    (checkpoints / "latest").symlink_to("0001-demo/step-00000010")
    assert pull_source.checkpoint(str(checkpoints), None) == "0001-demo/step-00000010"
    for step in ("step-99999999", "step-100000000", "step-x", "step-100000001.old"):
        (checkpoints / "0001-demo" / step).mkdir()
    assert pull_source.checkpoint(str(checkpoints), "0001-demo") == "0001-demo/step-100000000"
    chosen = pull.choose(LAYOUT, None, "checkpoint", Path("out"), "0001-demo/step-00000010")
    assert chosen.place == Path("out/0001-demo-step-00000010")


@pytest.mark.parametrize("target", WAYS_OUT)
def test_a_link_that_is_no_checkpoint_is_followed_on_neither_side(target: str, checkpoints: Path) -> None:
    if target:
        (checkpoints / "latest").symlink_to(target)
    assert pull_source.checkpoint(str(checkpoints), None) is None
    with pytest.raises(DeployError, match="no checkpoint of ours"):
        pull.choose(LAYOUT, None, "checkpoint", Path("out"), target)


@pytest.mark.parametrize("run_id", ["..", "", "0001-demo/..", "../x", None])
@pytest.mark.parametrize("what", ["run", "events", "log"])
def test_a_run_that_leads_out_of_the_target_is_refused(run_id: str | None, what: str) -> None:
    with pytest.raises(DeployError, match="no run of ours"):
        pull.choose(LAYOUT, run_id, what, Path("out"))


@pytest.mark.parametrize("link", ["0002-demo", "0001-demo/step-00000020"])
def test_a_directory_that_is_a_link_out_of_the_place_is_not_read(link: str, checkpoints: Path) -> None:
    (checkpoints / link).symlink_to(checkpoints.parent / "secret")
    with pytest.raises(DeployError, match="nothing was read"):
        pull_source.listing(str(checkpoints / link), str(checkpoints))


def test_a_place_that_is_a_link_itself_is_read(checkpoints: Path) -> None:
    """It is the host's administrator who has moved it to a larger disk."""
    moved = checkpoints.rename(checkpoints.with_name("disk"))
    checkpoints.symlink_to(moved)
    found = pull_source.listing(f"{checkpoints}/0001-demo/step-00000010", str(checkpoints))
    assert [file["name"] for file in found["files"]] == ["state.json"]


@pytest.mark.parametrize("swapped", ["state.json", "inner"])
def test_what_became_a_link_after_the_listing_is_not_sent(
    swapped: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = os.path.realpath(checkpoints / "0001-demo" / "step-00000010")
    name = "state.json" if swapped == "state.json" else "inner/key"
    Path(root, "state.json").unlink()
    secret = checkpoints.parent / "secret"
    Path(root, swapped).symlink_to(secret if swapped == "inner" else secret / "key")
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=out))
    with pytest.raises(DeployError, match="leads to"):
        pull_source.send(root, [(name, 0, 6)])
    assert out.getvalue() == b""
