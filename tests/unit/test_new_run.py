"""deploy/new_run.py: a run's directory is there whole, with its user's rights, or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from deploy import new_run
from deploy.errors import DeployError
from trainer import status

RUN: dict[str, Any] = {"run_id": "", "name": "demo", "command": ["true"], "who": "ada@desk"}


def test_the_next_run_has_its_number_its_record_and_its_secrets(tmp_path: Path) -> None:
    places = [str(tmp_path / "names" / "demo" / "checkpoints"), str(tmp_path / "cache")]
    new_run.make(str(tmp_path), RUN)
    made = new_run.make(str(tmp_path), {**RUN, "of a newer version": 1}, "KEY=ä\udcff\n", places)
    assert made["path"] == str(tmp_path / "runs" / "0002-demo")
    written = status.RunDir(made["path"]).run()
    assert written == status.Run(**made["run"])
    assert written
    assert (written.run_id, written.who) == ("0002-demo", "ada@desk")
    secrets = Path(str(written.secrets_file))
    assert secrets == tmp_path / "names" / "demo" / "secrets-0002-demo"
    assert secrets.read_bytes() == "KEY=ä".encode() + b"\xff\n"
    assert secrets.stat().st_mode & 0o777 == 0o400
    assert all(os.path.isdir(place) for place in places)


@pytest.mark.root
def test_all_of_it_is_the_runs_users_but_not_what_is_somebody_elses(tmp_path: Path) -> None:
    mine = tmp_path / "names" / "demo" / "checkpoints"
    (mine / "step-1").mkdir(parents=True)
    (mine / "step-1" / "model").touch()
    shared, fresh = tmp_path / "shared", tmp_path / "fresh"
    shared.mkdir()
    made = new_run.make(str(tmp_path), RUN, "K=v\n", [str(mine), str(shared), str(fresh)], [10001, 10002])
    for path in (mine, mine / "step-1", mine / "step-1" / "model", fresh, Path(made["run"]["secrets_file"])):
        assert (path.stat().st_uid, path.stat().st_gid) == (10001, 10002), path
    assert shared.stat().st_uid == 0
    assert os.stat(made["path"]).st_gid == 10002


def test_what_cannot_be_made_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: status.RunDir, run: status.Run) -> None:
        raise OSError(28, "No space left on device", str(self.path / "run.json"))

    monkeypatch.setattr(status.RunDir, "write_run", full)
    with pytest.raises(DeployError) as caught:
        new_run.make(str(tmp_path), RUN, "K=v\n")
    path = tmp_path / "runs" / "0001-demo"
    assert str(caught.value) == (
        f"{path}/run.json cannot be written for a new run of demo: No space left on device"
    )
    assert not path.exists()
    assert list((tmp_path / "names" / "demo").iterdir()) == []


def test_a_state_root_that_is_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(DeployError, match=r"state/runs cannot take a new run of demo: Not a directory$"):
        new_run.make(str(tmp_path / "state"), RUN)


def test_what_a_killed_make_left_is_removed_and_nothing_that_a_switch_was_told_of(tmp_path: Path) -> None:
    for name in ("demo", "demo", "demo", "other"):
        new_run.make(str(tmp_path), {**RUN, "name": name}, "K=v\n")
    (tmp_path / "runs" / "0002-demo" / "switch.json").touch()
    status.allocate_run(tmp_path / "runs", "demo")  # killed before run.json
    new_run.discard_begun(str(tmp_path), "demo", 1)
    assert sorted(path.name for path in (tmp_path / "runs").glob("0*")) == [
        "0001-demo",
        "0002-demo",
        "0004-other",
    ]
    assert sorted(path.name for path in (tmp_path / "names" / "demo").iterdir()) == [
        "secrets-0001-demo",
        "secrets-0002-demo",
    ]
