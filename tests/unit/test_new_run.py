"""deploy/new_run.py: a run's directory is there whole, with its user's rights, or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from deploy import new_run, switch_job
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
    assert sorted(path.name for path in (tmp_path / "names" / "demo").glob("secrets-*")) == [
        "secrets-0001-demo",
        "secrets-0002-demo",
    ]


def test_a_run_that_a_switch_has_accepted_stays_though_the_same_was_refused(tmp_path: Path) -> None:
    paths = [new_run.make(str(tmp_path), RUN, "K=v\n")["path"] for _ in range(3)]
    (Path(paths[0]) / "switch.json").touch()  # accepted, and on its way
    with open(tmp_path / "names" / "demo" / "switch.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(json.dumps({"run_path": paths[1], "what": "switch"}))  # accepted, and not a word written
        lock.flush()
        for path in paths:
            secrets = tmp_path / "names" / "demo" / f"secrets-{Path(path).name}"
            new_run.discard_refused(str(tmp_path), "demo", path, str(secrets))
    assert [os.path.exists(path) for path in paths] == [True, True, False]
    left = sorted(path.name for path in (tmp_path / "names" / "demo").glob("secrets-*"))
    assert left == ["secrets-0001-demo", "secrets-0002-demo"]
    new_run.discard_refused(str(tmp_path), "demo", paths[1])  # nobody has it any more
    assert not os.path.exists(paths[1])


def test_a_run_is_given_up_or_taken_by_its_switch_and_never_both(tmp_path: Path) -> None:
    """Ctrl-C at the moment at which the switch begins: one of the two is first, whatever the order."""
    (tmp_path / "names" / "demo" / "releases" / "a").mkdir(parents=True)
    outcomes = set()
    for delay in [*[0, 0.001, 0.002, 0.005, 0.01] * 6, None]:
        path = Path(new_run.make(str(tmp_path), RUN)["path"])
        start = {"argv": ["/bin/true"], "environment": {}, "working_directory": None}
        record = str(path / "switch.json")
        spec = {"state_root": str(tmp_path), "name": "demo", "run_path": str(path), "release_id": "a"}
        spec = {**spec, "old_run_path": None, "by": "ada@desk", "start": start, "record": record}
        begun = threading.Barrier(2)

        def switch(spec: dict[str, Any] = spec, begun: threading.Barrier = begun) -> bool:
            begun.wait()
            try:
                lock = switch_job.claim(spec)
            except switch_job.Refused:
                return False
            switch_job.Record(spec["record"], spec)
            os.close(lock)
            return True

        with ThreadPoolExecutor(1) as pool:
            taken = pool.submit(switch)
            begun.wait()
            _ = taken.result() if delay is None else time.sleep(delay)
            new_run.discard_refused(str(tmp_path), "demo", str(path))
            assert taken.result() == path.exists() == Path(record).exists()
        outcomes.add(taken.result())
    assert outcomes == {True, False}


@pytest.mark.root
def test_a_link_put_in_a_directorys_place_meanwhile_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, victim = tmp_path / "names" / "demo" / "checkpoints", tmp_path / "etc"
    for folder in (place / "step-1", victim):
        folder.mkdir(parents=True)
        for name in ("data", "model"):
            (folder / name).touch()
    chown = os.chown

    def swap(path: Any, *words: Any, **more: Any) -> None:
        """A container that is faster: after the first file in it the directory is a link."""
        chown(path, *words, **more)
        if os.path.basename(path) in ("data", "model") and not (place / "step-1").is_symlink():
            (place / "step-1").rename(place / "aside")
            (place / "step-1").symlink_to(victim)

    monkeypatch.setattr(os, "chown", swap)
    new_run.make(str(tmp_path), RUN, None, [str(place)], [10001, 10001])
    assert place.stat().st_uid == 10001
    assert [path.stat().st_uid for path in (place / "aside").iterdir()] == [10001, 10001]
    assert [path.stat().st_uid for path in (victim, victim / "data", victim / "model")] == [0, 0, 0]
