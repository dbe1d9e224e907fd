"""What `fab prune` decides, and what the host's end refuses to remove whatever it is asked."""

# ruff: noqa: E501  (lists of things, one a line)

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy import files, leftovers, prune
from deploy.host import Local
from trainer import status

NOW = 1_800_000_000.0
STATE = "/var/lib/drafthouse"


def item(path: str, age: float = 1e6, size: int = 1000) -> dict[str, Any]:
    return {"path": path, "id": path.rpartition("/")[2], "bytes": size, "modified": NOW - age}


def run(number: int, release: str, *, name: str = "demo", alive: bool = False, **more: Any) -> dict[str, Any]:
    run_id = f"{number:04d}-{name}"
    base = {"run_id": run_id, "name": name, "alive": alive, "release": release, "image": None}
    return {**item(f"{STATE}/runs/{run_id}"), **base, "reason": "stopped", "uses": [], **more}


def found(runs: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    releases = list(dict.fromkeys(one["release"] for one in runs))
    home = {
        "current": releases[-1] if releases else None,
        "previous": releases[-2] if len(releases) > 1 else None,
        "releases": [item(f"{STATE}/names/demo/releases/{one}") for one in releases],
        "checkpoints": [item(f"{STATE}/names/demo/checkpoints/{one['run_id']}") for one in runs],
        "latest": runs[-1]["run_id"] if runs else None,
    }
    base = {"time": NOW, "names": {"demo": home}, "runs": runs, "copies": [], "tools": [], "boot": None}
    return {**base, "leftovers": [], **more}


def what(made: prune.Prune, kind: str) -> list[str]:
    return [one.what for one in made.items if one.kind == kind]


def test_the_newest_runs_and_releases_stay_and_older_ones_go() -> None:
    runs = [run(number, f"release{number}") for number in range(1, 9)]
    made = prune.decide("box", found(runs), keep=3)
    assert what(made, "run") == [f"000{number}-demo" for number in range(1, 6)]
    assert what(made, "release") == [f"demo release{number}" for number in range(1, 6)]
    assert what(made, "checkpoints") == [f"of 000{number}-demo" for number in range(1, 6)]


def test_what_start_and_rollback_need_stays_however_old_it_is() -> None:
    runs = [run(1, "old"), *(run(number, "new") for number in range(2, 9))]
    made = prune.decide("box", found(runs), keep=1)
    assert "0001-demo" not in what(made, "run")
    assert what(made, "release") == []
    assert what(made, "run") == [f"000{number}-demo" for number in range(2, 8)]


def test_a_run_in_progress_keeps_its_release_its_weights_and_itself() -> None:
    runs = [
        run(1, "first", alive=True, uses=["/dev/shm/drafthouse/m@aaaaaaaaaaaa"]),
        *(run(n, f"r{n}") for n in range(2, 9)),
    ]
    copies = [item("/dev/shm/drafthouse/m@aaaaaaaaaaaa"), item("/dev/shm/drafthouse/m@bbbbbbbbbbbb")]
    made = prune.decide("box", found(runs, copies=copies), keep=1)
    assert "0001-demo" not in what(made, "run")
    assert "demo first" not in what(made, "release")
    assert what(made, "weights") == ["m@bbbbbbbbbbbb in shared memory"]


def test_checkpoints_of_a_run_that_finished_are_never_removed() -> None:
    runs = [run(1, "a", reason="finished"), *(run(number, "b") for number in range(2, 9))]
    made = prune.decide("box", found(runs), keep=1)
    assert "of 0001-demo" not in what(made, "checkpoints")
    assert "of 0002-demo" in what(made, "checkpoints")


def test_weights_on_disk_stay_for_every_run_that_stays_and_those_in_memory_for_what_is_current() -> None:
    disk, memory = f"{STATE}/weights/m@aaaaaaaaaaaa", "/dev/shm/drafthouse/m@aaaaaaaaaaaa"
    runs = [run(1, "a", uses=[disk, memory]), run(2, "b")]
    made = prune.decide("box", found(runs, copies=[item(disk), item(memory)]), keep=5)
    assert what(made, "weights") == ["m@aaaaaaaaaaaa in shared memory"]
    fresh = item(memory, age=5)
    assert what(prune.decide("box", found(runs, copies=[fresh])), "weights") == [], "a deploy may be at work"


def test_tools_and_leftovers_go_once_nobody_can_be_writing_them() -> None:
    tools = [item(f"{STATE}/tools/aaaa"), item(f"{STATE}/tools/bbbb"), item(f"{STATE}/tools/cccc", age=60)]
    hidden = [item("/dev/shm/drafthouse/.m.incoming.x"), item("/dev/shm/drafthouse/.m.incoming.y", age=60)]
    made = prune.decide("box", found([], tools=tools, boot="bbbb", leftovers=hidden))
    assert what(made, "tool") == ["aaaa"]
    assert what(made, "leftover") == ["/dev/shm/drafthouse/.m.incoming.x"]
    assert prune.decide("box", found([], tools=tools, leftovers=hidden), name="demo").items == ()


def test_images_of_runs_that_stay_stay_with_their_packages_and_other_peoples_are_not_looked_at() -> None:
    runs = [run(1, "a", image="drafthouse:aaaaaaaaaaaa")]
    images = [
        {"id": "1", "tags": ["drafthouse:aaaaaaaaaaaa"], "bytes": 1, "labels": {"drafthouse.packages": "drafthouse:packages-1"}},
        {"id": "2", "tags": ["drafthouse:bbbbbbbbbbbb"], "bytes": 2, "labels": {"drafthouse.packages": "drafthouse:packages-2"}},
        {"id": "3", "tags": ["drafthouse:packages-1"], "bytes": 3, "labels": {}},
        {"id": "4", "tags": ["drafthouse:packages-2"], "bytes": 4, "labels": {}},
        {"id": "5", "tags": ["postgres:16"], "bytes": 5, "labels": {}},
        {"id": "6", "tags": ["drafthouse:local"], "bytes": 6, "labels": {}},  # docker compose up, by hand
    ]  # fmt: skip
    made = prune.decide("box", found(runs), images)
    assert what(made, "image") == ["drafthouse:bbbbbbbbbbbb", "drafthouse:packages-2"]
    del images[0]["labels"]
    assert what(prune.decide("box", found(runs), images), "image") == ["drafthouse:bbbbbbbbbbbb"]
    runs[0]["image"] = None  # the last run of ours is of another runtime by now
    assert "drafthouse:packages-1" in what(prune.decide("box", found(runs), images), "image")


PACKAGES = {"drafthouse.packages": "drafthouse:packages-1"}
TWO = [
    {"id": "1", "tags": ["drafthouse:aaaaaaaaaaaa"], "bytes": 1007, "labels": PACKAGES},
    {"id": "2", "tags": ["drafthouse:packages-1"], "bytes": 1000, "labels": PACKAGES},
]


def test_packages_count_once_and_not_with_each_image_on_top_of_them() -> None:
    made = prune.decide("box", found([]), TWO)
    assert [(one.what, one.bytes) for one in made.items] == [
        ("drafthouse:aaaaaaaaaaaa", 7),
        ("drafthouse:packages-1", 1000),
    ]


def test_shipped_layers_stay_while_an_image_that_stays_is_of_them() -> None:
    layers = {**item(f"{STATE}/images/blobs", size=400), "reference": "drafthouse:packages-1"}
    kept = found([run(1, "a", image="drafthouse:aaaaaaaaaaaa")], shipped=layers)
    assert what(prune.decide("box", kept, TWO), "layers") == []
    gone = found([run(1, "a")], shipped=layers)
    made = prune.decide("box", gone, TWO)
    assert what(made, "layers") == ["shipped for drafthouse:packages-1"]
    assert made.bytes == 7 + 1000 + 400
    assert what(prune.decide("box", gone, []), "layers") == ["shipped for drafthouse:packages-1"]
    assert what(prune.decide("box", gone, None), "layers") == [], "the engine did not say what it has"
    assert what(prune.decide("box", gone, TWO, name="demo"), "layers") == []


def test_what_a_switch_is_about_to_start_stays() -> None:
    """The newest run is neither current nor alive while the old one saves its last checkpoint."""
    memory = "/dev/shm/drafthouse/m@aaaaaaaaaaaa"
    runs = [*(run(number, f"r{number}") for number in range(1, 5)), run(5, "r1", uses=[memory])]
    seen = found(runs, copies=[item(memory)])
    seen["names"]["demo"] |= {"current": "r4", "previous": "r3"}
    made = prune.decide("box", seen, keep=1)
    assert (what(made, "release"), what(made, "weights")) == (["demo r2"], [])


def test_containers_of_proxmox_stay_for_what_start_and_rollback_need_and_while_they_run() -> None:
    runs = [run(number, f"release{number}") for number in range(1, 6)]
    made = [{"id": 100 + n, "name": "demo", "release": f"release{n}", "running": n == 2} for n in range(1, 6)]
    made += [{"id": 200, "name": "other", "release": "release1", "running": False}]
    decided = prune.decide("box", found(runs, containers=made), keep=9)
    assert what(decided, "container") == ["101, of demo release1", "103, of demo release3"]


def test_while_a_name_is_being_deployed_nothing_of_it_goes_and_nothing_shared() -> None:
    runs = [
        *(run(number, "a") for number in range(1, 4)),
        *(run(number, "b", name="exp") for number in range(4, 8)),
    ]
    seen = found(runs, tools=[item(f"{STATE}/tools/aaaa")], leftovers=[item(f"{STATE}/tools/.x.y")])
    seen["names"]["demo"]["busy"] = "a deploy of demo by ada@desk is under way"
    images = [{"id": "1", "tags": ["drafthouse:aaaaaaaaaaaa"], "bytes": 1, "labels": {}}]
    made = prune.decide("box", seen, images, keep=3)
    assert [one.what for one in made.items] == ["0004-exp"]
    assert made.skipped == (
        "a deploy of demo by ada@desk is under way, so nothing of it goes",
        "weights, data, images and scripts stay until then, since it may be about to use them",
    )
    assert f"  note: {made.skipped[0]}" in str(made)
    assert prune.decide("box", seen, name="exp", keep=3).skipped == ()


def test_it_prints_what_goes_and_how_much_that_is() -> None:
    assert str(prune.decide("box", found([]))) == "nothing to prune on box"
    shown = str(prune.decide("box", found([run(1, "a"), run(2, "b"), run(3, "c")]), keep=1)).splitlines()
    assert shown[0] == "prune box: 3 things, 3.0 kB"
    assert [line.split() for line in shown[1:]] == [
        ["release", "demo", "a", "1.0", "kB"],
        ["checkpoints", "of", "0001-demo", "1.0", "kB"],
        ["run", "0001-demo", "1.0", "kB"],
    ]


# -- the host's end ----------------------------------------------------------------------------------------


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Two releases of demo, two runs with checkpoints, copies of weights, a tool and a leftover."""
    root = tmp_path / "state"
    home = root / "names" / "demo"
    for release in ("aaaa", "bbbb", "cccc"):
        (home / "releases" / release / "app").mkdir(parents=True)
        (home / "releases" / release / "app" / "x.py").write_text("x")
        (home / "releases" / release / "app").chmod(0o555)
    (home / "current").symlink_to("releases/bbbb")
    (home / "previous").symlink_to("releases/aaaa")
    copies = [tmp_path / "shm" / "m@aaaaaaaaaaaa", root / "weights" / "m@bbbbbbbbbbbb"]
    for path in copies:
        path.mkdir(parents=True)
        (path / leftovers.MANIFEST).write_text("{}")
        (path / "w").write_bytes(b"0" * 4096)
    for name in ("aaaa", "bbbb"):
        made = status.allocate_run(root / "runs", "demo")
        made.write_run(status.Run(made.path.name, "demo", ["x", str(copies[0])], release={"id": name}))
        (home / "checkpoints" / made.path.name / "step-00000010").mkdir(parents=True)
    (home / "checkpoints" / "latest").symlink_to("0002-demo/step-00000010")
    (root / "tools" / "dddd").mkdir(parents=True)
    (root / "tools" / "eeee").mkdir()
    (root / "tools" / "boot").symlink_to("eeee")
    (tmp_path / "shm" / ".m.incoming.1").mkdir()
    (tmp_path / "shm" / "foreign@aaaaaaaaaaaa").mkdir()  # not ours: no manifest
    return root


def newest(state: Path, release: str, *words: str) -> None:
    """One more run of demo, not begun yet."""
    made = status.allocate_run(state / "runs", "demo")
    made.write_run(status.Run(made.path.name, "demo", ["x", *words], release={"id": release}))


@contextlib.contextmanager
def held(state: Path, lock: str, **words: str) -> Iterator[None]:
    path = state / "names" / "demo" / lock
    path.write_text(json.dumps(words))
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def remove(state: Path, *paths: str) -> tuple[list[str], list[str]]:
    top = state.parent
    done = leftovers.remove(str(state), str(top / "shm"), [str(top / path) for path in paths])
    return [path.removeprefix(f"{top}/") for path in done["removed"]], [why for _, why in done["kept"]]


def test_the_survey_lists_what_is_ours_and_what_uses_it(state: Path) -> None:
    seen = leftovers.survey(str(state), str(state.parent / "shm"))
    assert [one["id"] for one in seen["copies"]] == ["m@aaaaaaaaaaaa", "m@bbbbbbbbbbbb"]
    assert [one["uses"] for one in seen["runs"]] == [[str(state.parent / "shm" / "m@aaaaaaaaaaaa")]] * 2
    demo = seen["names"]["demo"]
    assert (demo["current"], demo["previous"], demo["latest"]) == ("bbbb", "aaaa", "0002-demo")
    assert [one["id"] for one in demo["checkpoints"]] == ["0001-demo", "0002-demo"]
    assert (seen["boot"], [one["id"] for one in seen["tools"]]) == ("eeee", ["dddd", "eeee"])
    assert [one["id"] for one in seen["leftovers"]] == [".m.incoming.1"]
    assert seen["copies"][0]["bytes"] == 4096 + 2


def test_what_was_decided_is_removed_whole(state: Path) -> None:
    paths = ["state/names/demo/releases/cccc", "state/runs/0001-demo", "state/names/demo/checkpoints/0001-demo",
             "shm/m@aaaaaaaaaaaa", "state/weights/m@bbbbbbbbbbbb", "state/tools/dddd", "shm/.m.incoming.1"]  # fmt: skip
    newest(state, "bbbb")
    assert remove(state, *paths) == (paths, [])
    for path in paths:
        assert not (state.parent / path).exists()
    left = [path for path in state.parent.rglob("*") if path.name.startswith(leftovers.TRASH)]
    assert left == []


def test_what_came_into_use_meanwhile_is_kept_and_named(state: Path) -> None:
    lock = status.RunDir(state / "runs" / "0001-demo").lock
    hold = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", hold, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    mapping = state.parent / "shm" / "m@aaaaaaaaaaaa" / "w"
    file = os.open(mapping, os.O_RDONLY)
    import mmap

    with mmap.mmap(file, 0, prot=mmap.PROT_READ):
        paths = ["state/runs/0001-demo", "state/names/demo/checkpoints/0001-demo", "state/names/demo/releases/bbbb",
                 "state/names/demo/releases/aaaa", "state/names/demo/checkpoints/0002-demo", "state/tools/eeee",
                 "shm/m@aaaaaaaaaaaa"]  # fmt: skip
        assert remove(state, *paths) == (
            [],
            ["is in progress", "is in progress", "is current or previous", "is current or previous",
             "has the newest checkpoint", "is what starts runs after a reboot", "is used by a process"],
        )  # fmt: skip
    os.close(file)
    child.communicate(b"\n", timeout=30)


def test_what_the_newest_run_was_made_for_is_kept_though_it_has_not_begun(state: Path) -> None:
    """The switch waits for the old run's checkpoint, and prune was decided before."""
    newest(state, "cccc", str(state / "weights" / "m@bbbbbbbbbbbb"))
    paths = ["state/names/demo/releases/cccc", "state/weights/m@bbbbbbbbbbbb"]
    assert remove(state, *paths) == ([], ["is what 0003-demo starts from"] * 2)
    newest(state, "bbbb")
    assert remove(state, *paths) == (paths, [])


def test_what_a_push_is_filling_is_kept(state: Path) -> None:
    with open(state.parent / "shm" / ".m.lock", "w") as lock:
        assert files.take(lock.fileno())
        assert remove(state, "shm/.m.incoming.1") == ([], ["is being filled by a push or a deploy"])
    assert remove(state, "shm/.m.incoming.1") == (["shm/.m.incoming.1"], [])


@pytest.mark.parametrize("lock", ["deploy.lock", "switch.lock"])
def test_nothing_goes_while_a_name_is_being_deployed(lock: str, state: Path) -> None:
    paths = ["state/names/demo/releases/cccc", "shm/m@aaaaaaaaaaaa", "state/tools/dddd", "shm/.m.incoming.1"]
    newest(state, "bbbb")
    with held(state, lock, by="ada@desk"):
        why = f"stays: a {lock.partition('.')[0]} of demo by ada@desk is under way"
        assert leftovers.survey(str(state), "/nowhere")["names"]["demo"]["busy"] == why[7:]
        assert leftovers.at_work(str(state))["busy"] == why[7:]
        assert remove(state, *paths) == ([], [why] * 4)
    assert remove(state, *paths) == (paths, [])
    assert (state / "names" / "demo" / "deploy.lock").read_text() == "", "its words are gone with the lock"


def test_no_deploy_begins_while_what_is_shared_disappears(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(leftovers, "_aside", lambda path: seen.append(leftovers.at_work(str(state))["busy"]))
    monkeypatch.setattr(leftovers, "_remove", lambda path: seen.append(leftovers.at_work(str(state))["busy"]))
    leftovers.remove(str(state), str(state.parent / "shm"), [str(state / "tools" / "dddd")], None, "me@desk")
    assert seen == ["a prune of demo by me@desk is under way", None], "their bytes take no lock"


FOREIGN = [".org.chromium.Chromium.abc", ".cache", ".damaged-x", ".X11-unix", ".pruned-x"]
OURS = [".m.incoming.k3j2h1", ".damaged-m@aaaaaaaaaaaa-12", ".pruned-m@aaaaaaaaaaaa-12"]


def test_of_hidden_directories_in_shared_memory_only_those_of_our_names_are_ours(state: Path) -> None:
    for name in (*FOREIGN, *OURS):
        (state.parent / "shm" / name).mkdir()
    found = leftovers.survey(str(state), str(state.parent / "shm"))["leftovers"]
    assert {one["id"] for one in found} == {*OURS, ".m.incoming.1"}
    assert remove(state, *(f"shm/{name}" for name in FOREIGN)) == (
        [], ["is no place of Drafthouse's"] * len(FOREIGN))  # fmt: skip
    assert remove(state, *(f"shm/{name}" for name in OURS)) == ([f"shm/{name}" for name in OURS], [])


def test_a_damaged_release_that_was_moved_aside_stays_for_30_days(state: Path) -> None:
    now = int(time.time())
    young, old = (f".damaged-aaaa-{now - days * 86400}" for days in (29, 31))
    for name in (young, old, ".bbbb.k3j2h1"):
        (state / "names" / "demo" / "releases" / name).mkdir()
    found = leftovers.survey(str(state), "/nowhere")["leftovers"]
    assert [one["id"] for one in found] == [".bbbb.k3j2h1", old]
    assert remove(state, f"state/names/demo/releases/{young}") == (
        [],
        ["was moved aside less than 30 days ago"],
    )
    assert remove(state, f"state/names/demo/releases/{old}")[1] == []


def test_of_shipping_the_layers_go_and_what_nobody_has_gone_on_with_for_a_day(state: Path) -> None:
    images = state / "images"
    for name in ("blobs", "incoming/.partial", "seeds", ".build-x"):
        (images / name).mkdir(parents=True)
    for name in ("blobs/aa", "incoming/.partial/bb"):
        (images / name).write_bytes(b"0" * 4096)
    (images / "load.json").write_text("{}")
    (images / "shipped.json").write_text('{"reference": "drafthouse:packages-1", "blobs": [["aa", 4096]]}')
    seen = leftovers.survey(str(state), "/nowhere")
    assert seen["shipped"] == {
        "path": str(images / "blobs"), "id": "blobs", "bytes": 4096, "reference": "drafthouse:packages-1",
        "modified": seen["shipped"]["modified"],
    }  # fmt: skip
    assert [one["id"] for one in seen["leftovers"]] == [".build-x"]
    assert remove(state, "state/images/incoming", "state/images/load.json", "state/images") == (
        [],
        ["is no place of Drafthouse's"] * 3,
    )
    long_ago = time.time() - 2 * leftovers.SHIP_PATIENCE
    for path in (images / "incoming").rglob("*"):
        os.utime(path, (long_ago, long_ago))
    os.utime(images / "incoming", (long_ago, long_ago))
    assert [one["id"] for one in leftovers.survey(str(state), "/nowhere")["leftovers"]] == [
        "incoming",
        ".build-x",
    ]
    paths = ["state/images/blobs", "state/images/incoming", "state/images/.build-x"]
    with open(images / "load.lock", "w") as loading:
        fcntl.flock(loading, fcntl.LOCK_EX)
        assert remove(state, *paths[:2]) == ([], ["is being loaded by the engine"] * 2)
    assert remove(state, *paths) == (paths, [])
    assert leftovers.survey(str(state), "/nowhere")["shipped"] is None


def test_a_name_whose_lock_is_not_to_be_had_is_passed_over_and_named(state: Path) -> None:
    name = prune.Item("release", "demo cccc", str(state / "names/demo/releases/cccc"), 1, "demo")
    made = prune.Prune("localhost", 5, (name,))
    with held(state, "deploy.lock", by="ada@desk"):
        freed, stayed = prune.carry_out(made, Local(), str(state), "/nowhere", print)
    assert freed == 0
    assert stayed[0].startswith("demo on localhost is locked by ada@desk")
    assert prune.carry_out(made, Local(), str(state), "/nowhere", print) == (1, [])


@pytest.mark.parametrize(
    "path", ["", "state", "shm", "state/names/demo", "state/runs", "shm/foreign@aaaaaaaaaaaa", "elsewhere",
             "state/runs/../../elsewhere", "state/names/demo/cache/x", "state/names/demo/current"]
)  # fmt: skip
def test_what_is_no_place_of_ours_is_never_removed(state: Path, path: str) -> None:
    (state.parent / "elsewhere").mkdir()
    (state / "names" / "demo" / "cache" / "x").mkdir(parents=True)
    assert remove(state, path) == ([], ["is no place of Drafthouse's"])
