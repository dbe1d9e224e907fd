"""Releases: named by their content, written whole, never rewritten, and without secrets."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from samples import APP, PYTHON, STATE, recipe

from deploy import release
from deploy.host import Local
from deploy.image import Image
from deploy.release import Layout, Release
from deploy.runtimes import compose

DEMO = "weights: toy\ntrainer: {max-steps: 600, lr: 6e-4}\nenvironment: {LEVEL: info}\nsecrets: {KEY: env}\n"
LAYOUT = Layout(STATE, "/dev/shm/drafthouse", "demo")


def built(text: str, path: Path, *changes: str, layout: Layout = LAYOUT, **named: object) -> Release:
    values = {"runtime": "process", "python": PYTHON, "weights": "toy", "data": "toy", "app": APP, "git": {}}
    settings = recipe(text, path, *changes).settings
    return release.build(settings, layout, **{**values, **named})  # type: ignore[arg-type]


def test_the_trainers_command_line_is_this(tmp_path: Path) -> None:
    assert " ".join(built(DEMO, tmp_path).command) == (
        "/opt/venv/bin/python -u -m trainer --target-model toy --resume auto --max-steps 600 --lr 0.0006 "
        "--output-dir /var/lib/drafthouse/names/demo/checkpoints "
        "--cache-dir /var/lib/drafthouse/names/demo/cache"
    )


def test_weights_and_data_of_ones_own_reach_the_command_line(tmp_path: Path) -> None:
    words = built(DEMO, tmp_path, weights="/dev/shm/m@1", data="/data").command
    assert " ".join(words[4:8]) == "--target-model /dev/shm/m@1 --data-dir /data"


def test_a_foreign_command_is_left_as_it_is_and_learns_its_places_from_the_environment(
    tmp_path: Path,
) -> None:
    made = built("command: [sh, -c, 'echo $X']\nenvironment: {X: 'a b'}", tmp_path, weights="/w", data=None)
    assert made.command == ("sh", "-c", "echo $X")
    assert made.files["run.env"].decode() == (
        'DRAFTHOUSE_CACHE="/var/lib/drafthouse/names/demo/cache"\n'
        'DRAFTHOUSE_CHECKPOINTS="/var/lib/drafthouse/names/demo/checkpoints"\n'
        'DRAFTHOUSE_WEIGHTS="/w"\nPYTHONUNBUFFERED="1"\nX="a b"\n'
    )


def test_a_foreign_command_gets_launch_and_what_launch_imports(tmp_path: Path) -> None:
    made = built("command: [a]", tmp_path, weights=None, data=None)
    assert sorted(name for name in made.files if name.startswith("app/")) == [
        "app/trainer/__init__.py",
        "app/trainer/keeper.py",
        "app/trainer/launch.py",
        "app/trainer/status.py",
    ]


def test_launch_as_it_is_finds_all_that_it_imports_in_the_release_of_a_foreign_command() -> None:
    found = release.needed(release.trainer_files(Path(release.__file__).parents[1]), "trainer/launch.py")
    assert {"trainer/launch.py", "trainer/status.py", "trainer/__init__.py"} <= set(found)
    assert not {"trainer/loss.py", "trainer/drafter.py", "trainer/train.py"} & set(found)


def test_equal_content_is_one_release_whatever_the_commit(tmp_path: Path) -> None:
    one = built(DEMO, tmp_path, git={"commit": "a", "dirty": False})
    other = built(DEMO, tmp_path, git={"commit": "b", "dirty": True})
    assert (one.id, one.digest) == (other.id, other.digest)
    assert len(one.id) == 12
    assert json.loads(other.manifest)["git"] == {"commit": "b", "dirty": True}


@pytest.mark.parametrize(
    "changes",
    [
        {"app": {**APP, "trainer/loss.py": b"loss = 2\n"}},
        {"app": {name: data for name, data in APP.items() if name != "trainer/loss.py"}},
        {"python": "/other/python"},
        {"weights": "/dev/shm/m@2"},
        {"data": "/data"},
        {"layout": Layout("/elsewhere", "/dev/shm/drafthouse", "demo")},
    ],
)
def test_whatever_the_run_would_notice_makes_another_release(changes: dict, tmp_path: Path) -> None:
    assert built(DEMO, tmp_path, **changes).id != built(DEMO, tmp_path).id


def test_a_renamed_file_makes_another_release(tmp_path: Path) -> None:
    one, other = ({**APP, name: b"x"} for name in ("trainer/a.py", "trainer/aa.py"))
    assert built(DEMO, tmp_path, app=one).id != built(DEMO, tmp_path, app=other).id


@given(value=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30))
def test_hostile_values_arrive_in_the_runs_environment_byte_for_byte(value: str, tmp_path_factory) -> None:
    path = tmp_path_factory.getbasetemp() / "hostile-release"
    path.mkdir(exist_ok=True)
    settings = recipe("command: [a]", path, f"environment.X={value}").settings
    assert release.environment(settings, LAYOUT, None, None)["X"] == value


# -- differences -------------------------------------------------------------------------------------------


def test_differences_name_settings_and_code_and_nothing_twice(tmp_path: Path) -> None:
    old = built(DEMO, tmp_path)
    app = {**APP, "trainer/loss.py": b"loss = 2\n", "trainer/new.py": b""}
    del app["trainer/keeper.py"]
    new = built(
        DEMO,
        tmp_path,
        "lr=3e-4",
        "seed=1",
        "environment.LEVEL=",
        "restart.attempts=0",
        "grace_seconds=7",
        app=app,
    )
    assert release.differences(old.files, old.digests, new) == [
        "trainer.lr: 0.0006 → 0.0003",
        "trainer.seed: not set → 1",
        "environment.LEVEL: info → ''",
        "grace_seconds: 60 → 7",
        "restart.attempts: 3 → 0",
        "trainer/keeper.py: removed",
        "trainer/loss.py: changed",
        "trainer/new.py: new",
    ]
    assert release.differences(old.files, old.digests, old) == []


def test_a_long_difference_shows_the_place_where_it_is(tmp_path: Path) -> None:
    text = "command: [python, -c, '{}print({}); {}']\nname: x\n"
    old = built(text.format("x = 1; " * 30, 1, "y = 2; " * 30), tmp_path)
    new = built(text.format("x = 1; " * 30, 2, "y = 2; " * 30), tmp_path)
    (line,) = release.differences(old.files, old.digests, new)
    was, now = line.removeprefix("command: ").split(" → ")
    assert "print(1); y" in was
    assert "print(2); y" in now
    assert max(len(was), len(now)) <= release.SHOWN


def test_differences_that_are_in_no_setting_are_named_by_file(tmp_path: Path) -> None:
    old, new = built(DEMO, tmp_path), built(DEMO, tmp_path, layout=Layout("/else", "/dev/shm", "demo"))
    assert release.differences(old.files, old.digests, new) == ["command.json: changed"]


def test_a_damaged_old_release_has_differences_and_no_traceback(tmp_path: Path) -> None:
    new = built(DEMO, tmp_path)
    assert "name: not set → demo" in release.differences({"run.yaml": b"\xff: ["}, {}, new)


# -- on a host ---------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path) -> Layout:
    return Layout(str(tmp_path / "state"), "/dev/shm/drafthouse", "demo")


def test_a_release_is_written_once_and_then_left_alone(here: Layout, tmp_path: Path) -> None:
    made, host = built(DEMO, tmp_path, layout=here), Local()
    assert release.write(host, here, made) == "written"
    path = Path(here.release(made.id))
    before = {file: (file.stat().st_mtime_ns, file.stat().st_ino) for file in path.rglob("*")}
    assert release.write(host, here, made) == "there already"
    assert {file: (file.stat().st_mtime_ns, file.stat().st_ino) for file in path.rglob("*")} == before
    assert {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} == {
        *made.files,
        "release.json",
    }
    assert [entry.name for entry in path.parent.iterdir()] == [made.id]
    assert all(not file.stat().st_mode & 0o222 for file in path.rglob("*") if file.is_file())


def test_python_may_leave_its_caches_in_a_release(here: Layout, tmp_path: Path) -> None:
    made, host = built(DEMO, tmp_path, layout=here), Local()
    release.write(host, here, made)
    (Path(here.release(made.id)) / "app" / "trainer" / "__pycache__").mkdir()
    (Path(here.release(made.id)) / "app" / "trainer" / "__pycache__" / "loss.cpython-311.pyc").touch()
    assert release.write(host, here, made) == "there already"


@pytest.mark.parametrize("harm", ["change", "remove", "add", "manifest"])
def test_a_release_that_somebody_changed_is_moved_aside_whole_and_written_again(
    harm: str, here: Layout, tmp_path: Path
) -> None:
    made, host = built(DEMO, tmp_path, layout=here), Local()
    release.write(host, here, made)
    name = {"manifest": "release.json", "add": "app/torch.py"}.get(harm, "app/trainer/loss.py")
    victim = Path(here.release(made.id)) / name
    victim.unlink(missing_ok=True)
    if harm in ("change", "add"):
        victim.write_text("edited on the host")
    done = release.write(host, here, made)
    assert done.startswith(f"written again: {name} on the host had been changed; the old files are in ")
    assert release.damage(host, here, made) == []
    aside = Path(done.rpartition(" ")[2])
    assert (aside / "app/trainer/status.py").exists()
    if harm in ("change", "add"):
        assert (aside / name).read_text() == "edited on the host"


def test_the_deployed_release_can_be_read_back_for_comparison(here: Layout, tmp_path: Path) -> None:
    made, host = built(DEMO, tmp_path, layout=here), Local()
    assert release.deployed(host, here, made.id) is None
    release.write(host, here, made)
    files, digests = release.deployed(host, here, made.id) or ({}, {})
    assert release.differences(files, digests, made) == []
    assert digests == made.digests


def test_no_secret_is_in_any_file_of_a_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "hunter2-hunter2")
    made = built(DEMO, tmp_path)
    assert not [name for name, data in {**made.files, "m": made.manifest}.items() if b"hunter2" in data]
    assert "secrets:\n- KEY\n" in made.files["run.yaml"].decode()


def test_the_copy_of_the_trainer_is_its_sources_and_nothing_else(tmp_path: Path) -> None:
    for name in (
        "trainer/a.py",
        "trainer/sub/b.py",
        "trainer/data.bin",
        "trainer/__pycache__/a.py",
        "trainer/.x/c.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    assert release.trainer_files(tmp_path) == {"trainer/a.py": b"1", "trainer/sub/b.py": b"1"}


def test_git_is_named_with_its_uncommitted_changes_and_missing_outside_a_checkout(tmp_path: Path) -> None:
    host, git = Local(), ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@y"]
    assert release.git_state(tmp_path) == {}
    (tmp_path / "a").write_text("1")
    for words in (["init", "-q"], ["add", "a"], ["commit", "-qm", "x"]):
        host.run([*git, *words], timeout=20, env={"GIT_CONFIG_GLOBAL": os.devnull})
    state = release.git_state(tmp_path)
    assert (len(state["commit"]), state["dirty"]) == (40, False)
    (tmp_path / "a").write_text("2")
    assert release.git_state(tmp_path) == {**state, "dirty": True}


# -- containers --------------------------------------------------------------------------------------------

OURS = Image("drafthouse:0123456789ab", "0123" * 16, "drafthouse:packages-1", APP, {"VARIANT": "cpu"})
USED = compose.Used("my/image:1.4")
FOREIGN = "command: [train, --lr, 'a b']\nimage: {use: my/image:1.4}\n"


def contained(text: str, path: Path, image: object = OURS, **named: object) -> Release:
    values = {"runtime": "compose", "python": "python", "user": "10001:10001", "devices": [], "image": image}
    return built(text, path, **{**values, **named})


def test_a_release_of_a_container_has_what_starts_it_and_no_code_that_is_in_the_image(tmp_path: Path) -> None:
    made = contained(DEMO, tmp_path, unit="[Unit]\n")
    assert sorted(made.files) == [
        "command.json",
        "compose.yaml",
        "drafthouse-demo.service",
        "image.json",
        "launch.sh",
        "run.env",
        "run.yaml",
    ]
    assert b'image: "drafthouse:0123456789ab"\n' in made.files["compose.yaml"]
    assert made.command[:4] == ("python", "-u", "-m", "trainer")
    service = yaml.safe_load(made.files["compose.yaml"])["services"]["trainer"]
    # Unbuffered, devices as nvidia-smi numbers them, and a home for a user that the image does not know.
    assert service["environment"] == {
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "DRAFTHOUSE_SECRETS_FILE": "/run/drafthouse-secrets",
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "LOGNAME": "drafthouse",
        "USER": "drafthouse",
    }
    assert service["working_dir"] == "/run/drafthouse"
    assert service["stop_grace_period"] == "70s"
    assert (
        "image: drafthouse:0123456789ab\nuser: 10001:10001\ndevices: []\n" in made.files["run.yaml"].decode()
    )


def test_in_an_image_of_ones_own_launch_comes_from_the_release(tmp_path: Path) -> None:
    made = contained(FOREIGN, tmp_path, USED, weights=None, data=None)
    assert {"app/trainer/launch.py", "app/trainer/keeper.py", "compose.yaml"} <= set(made.files)
    assert "app/trainer/loss.py" not in made.files
    service = yaml.safe_load(made.files["compose.yaml"])["services"]["trainer"]
    assert {"source": "./app", "target": "/opt/drafthouse"}.items() <= service["volumes"][-1].items()
    assert service["environment"]["PYTHONPATH"] == "/opt/drafthouse"
    assert service["command"][0] == "python3", "which most images have"


@pytest.mark.parametrize(
    "changes",
    [
        {"image": dataclasses.replace(OURS, reference="drafthouse:other")},
        {"user": "1000:1000"},
        {"devices": ["1"]},
        {"unit": "[Unit]\nX=1\n"},
        {"devices": ["1"], "device_files": ["/dev/nvidia1"]},
    ],
)
def test_whatever_a_container_would_notice_makes_another_release(changes: dict, tmp_path: Path) -> None:
    assert contained(DEMO, tmp_path, **changes).id != contained(DEMO, tmp_path).id


def test_the_same_settings_give_the_same_container_for_every_run(tmp_path: Path) -> None:
    made = contained(DEMO, tmp_path)
    assert contained(DEMO, tmp_path).id == made.id
    assert b"0007" not in b"".join(made.files.values())


def test_code_that_is_in_the_image_is_compared_file_by_file(tmp_path: Path) -> None:
    old = contained(DEMO, tmp_path)
    files = {**APP, "trainer/loss.py": b"loss = 2\n", "runs/new.yaml": b""}
    new = contained(DEMO, tmp_path, image=dataclasses.replace(OURS, reference="drafthouse:ffff", files=files))
    assert release.differences(old.files, old.digests, new) == [
        "image: drafthouse:0123456789ab → drafthouse:ffff",
        "runs/new.yaml: new",
        "trainer/loss.py: changed",
    ]


def test_from_a_process_to_a_container_the_code_is_no_difference(tmp_path: Path) -> None:
    old, new = built(DEMO, tmp_path), contained(DEMO, tmp_path)
    found = release.differences(old.files, old.digests, new)
    assert not [line for line in found if line.startswith("trainer/")]
    assert "runtime: process → compose" in found


def test_limits_are_in_the_file_and_in_what_people_compare(tmp_path: Path) -> None:
    made = contained(f"{DEMO}memory: 8g\nshm_size: 2g\n", tmp_path)
    service = yaml.safe_load(made.files["compose.yaml"])["services"]["trainer"]
    assert (service["mem_limit"], service["shm_size"]) == (8 << 30, 2 << 30)
    assert b"memory: 8g\nshm_size: 2g\n" in made.files["run.yaml"]


def test_a_secret_in_the_environment_is_not_shown_as_a_difference(tmp_path: Path) -> None:
    old, new = (built(f"command: [a]\nenvironment: {{API_KEY: {word}}}", tmp_path) for word in ("one", "two"))
    assert release.differences(old.files, old.digests, new) == [
        "environment.API_KEY: *** → *** (another value)"
    ]


def test_a_release_says_how_long_its_start_is_waited_for(tmp_path: Path) -> None:
    text = "command: [a]\nfirst_heartbeat_timeout_seconds: 3600\nsettle_seconds: 0\n"
    expected = {"first_heartbeat_timeout_seconds": 3600.0, "settle_seconds": 0.0}
    assert release.patience(built(text, tmp_path).files) == expected
    assert release.patience(built(DEMO, tmp_path).files) == {"first_heartbeat_timeout_seconds": 600.0}
    assert release.patience({"run.yaml": b"["}) == release.patience({}) == {}
