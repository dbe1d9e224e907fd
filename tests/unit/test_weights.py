"""Weights: checked by their headers, copied whole into shared memory, versioned, and never written over."""

from __future__ import annotations

import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from deploy import budget, hashing, manifest, procfs, room, weights, weights_store
from deploy.errors import DeployError
from deploy.host import Local
from deploy.weights import Weights
from deploy.weights_check import check_model_dir


def tensor_file(path: Path, payload: bytes = b"\x01" * 16, *, claimed: int | None = None) -> None:
    """A safetensors file with one tensor; `claimed` is the size that its header says."""
    end = len(payload) if claimed is None else claimed
    header = json.dumps(
        {"w": {"dtype": "U8", "shape": [end], "data_offsets": [0, end]}, "__metadata__": {"a": "b"}}
    )
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + payload)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "models" / "small"
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    tensor_file(path / "model.safetensors")
    return path


@pytest.fixture(autouse=True)
def on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the tests' own directory is a tmpfs must not matter."""
    monkeypatch.setattr(weights_store, "on_tmpfs", lambda path: False)


# -- checks ------------------------------------------------------------------------------------------------


def test_a_whole_model_has_nothing_to_complain_about(model: Path) -> None:
    assert check_model_dir(model) == []


def spoil(kind: str, model: Path) -> str:
    """Spoil the model; returns the sentence that should be said after the directory's name."""
    file = model / "model.safetensors"
    data = file.read_bytes()
    if kind == "missing":
        shutil.rmtree(model)
        return " do not exist; correct weights: in the run's file"
    if kind == "file":
        shutil.rmtree(model)
        model.write_text("x")
        return " are no directory; give the directory that holds config.json"
    if kind == "no config":
        (model / "config.json").unlink()
        return ": config.json is missing; copy the model again"
    if kind == "bad config":
        (model / "config.json").write_text("{")
        return ": config.json is no valid JSON; copy the model again"
    if kind == "list config":
        (model / "config.json").write_text("[]")
        return ": config.json holds no JSON object; copy the model again"
    if kind == "no weights":
        file.unlink()
        return " hold no *.safetensors file; copy the model again"
    if kind == "pickle":
        file.rename(model / "pytorch_model.bin")
        return " hold no *.safetensors file (pytorch_model.bin is there: convert it); copy the model again"
    if kind == "short":
        file.write_bytes(data[:-1])
        size = len(data)
        return f": model.safetensors is {size - 1:,} bytes long, but its header says {size:,}; copy it again"
    if kind == "long":
        file.write_bytes(data + b"x")
        size = len(data)
        return f": model.safetensors is {size + 1:,} bytes long, but its header says {size:,}; copy it again"
    if kind == "pointer":
        file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        return ": model.safetensors is a Git LFS pointer, not the file itself; copy it again"
    if kind == "empty":
        file.write_bytes(b"")
        return ": model.safetensors is damaged: 0 B cannot hold its header; copy it again"
    if kind == "garbage":
        file.write_bytes((20).to_bytes(8, "little") + b"x" * 40)
        return ": model.safetensors is damaged: its header is no valid JSON; copy it again"
    if kind == "no offsets":
        file.write_bytes((8).to_bytes(8, "little") + b'{"a":{}}')
        return ": model.safetensors is damaged: its header is no valid JSON; copy it again"
    if kind in ("text offsets", "deep", "backwards"):
        header = {
            "text offsets": b'{"a":{"data_offsets":[0,"5"]}}',
            "backwards": b'{"a":{"data_offsets":[5,-1]}}',
            "deep": b"[" * 100_000,
        }[kind]
        file.write_bytes(len(header).to_bytes(8, "little") + header)
        return ": model.safetensors is damaged: its header is no valid JSON; copy it again"
    if kind == "fifo":
        file.unlink()
        os.mkfifo(file)
        return ": model.safetensors is no regular file; copy it again"
    if kind == "fifo config":
        (model / "config.json").unlink()
        os.mkfifo(model / "config.json")
        return ": config.json is no regular file; copy the model again"
    if kind == "nothing":
        shutil.rmtree(model)
        model.mkdir()
        return " are empty; give the directory that holds config.json"
    if kind == "cache":
        (model / "config.json").unlink()
        (model / "snapshots" / "0123abc").mkdir(parents=True)
        return f" are the cache of several revisions; give one of them: {model}/snapshots/0123abc"
    if kind == "lost link":
        (model / "tokenizer.json").symlink_to("../blobs/gone")
        return ": the link tokenizer.json leads nowhere; remove it, or copy the model again"
    if kind == "lost weights":
        file.unlink()
        file.symlink_to("../blobs/gone")
        return ": model.safetensors cannot be read (No such file or directory); copy it again"
    if kind == "shard":
        index = {"weight_map": {"a": "model.safetensors", "b": "x-2.safetensors", "c": "x-3.safetensors"}}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        return " lack x-2.safetensors and 1 more, which the index names; copy the model again"
    assert kind == "index"
    (model / "model.safetensors.index.json").write_text("{}")
    return ": model.safetensors.index.json has no weight_map; copy the model again"


KINDS = (
    "missing, file, no config, bad config, list config, no weights, pickle, short, long, pointer, empty, "
    "garbage, no offsets, text offsets, backwards, deep, fifo, fifo config, nothing, cache, lost link, "
    "lost weights, shard, index"
)


@pytest.mark.parametrize("kind", KINDS.split(", "))
def test_a_model_that_is_not_whole_is_one_sentence(kind: str, model: Path) -> None:
    wanted = spoil(kind, model)
    assert check_model_dir(model) == [f"weights {model}{wanted}"]


# -- staging -----------------------------------------------------------------------------------------------


def plan(source: Path, shm: Path, **more: Any) -> Weights:
    return Weights(**weights_store.look(str(source), str(shm), **more))


def stage(planned: Weights, *more: Any) -> str:
    boot = planned.boot()
    assert boot
    return weights_store.stage(*boot.values(), *more)


def entries(path: Path) -> list[str]:
    """What is in shared memory, but for the lock file, which stays."""
    return sorted(set(os.listdir(path)) - {".small.lock"}) if path.exists() else []


def test_weights_appear_under_their_digest_behind_a_link(model: Path, tmp_path: Path) -> None:
    shm = tmp_path / "shm"
    (model / "sub").mkdir()
    (model / "sub" / "x.txt").write_text("x")
    (model / ".git").mkdir()
    planned = plan(model, shm)
    assert (planned.action, planned.path) == ("copy", f"{shm}/small@{planned.digest[:12]}")
    assert entries(shm) == []
    stage(planned)
    assert entries(shm) == ["small", f"small@{planned.digest[:12]}"]
    assert os.readlink(shm / "small") == f"small@{planned.digest[:12]}"
    assert sorted(os.listdir(shm / "small")) == [
        ".drafthouse.json",
        "config.json",
        "model.safetensors",
        "sub",
    ]
    assert check_model_dir(shm / "small") == []


def test_weights_that_are_there_are_neither_copied_nor_read_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage(plan(model, tmp_path / "shm"))
    monkeypatch.setattr(manifest, "read", lambda *_, **__: pytest.fail("the weights were read again"))
    monkeypatch.setattr(weights_store, "_copy", lambda *_: pytest.fail("the weights were copied again"))
    planned = plan(model, tmp_path / "shm")
    assert planned.action == "present"
    stage(planned)


def test_who_does_not_want_to_wait_is_only_told_that_weights_changed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage(plan(model, tmp_path / "shm"))
    monkeypatch.setattr(manifest, "read", lambda *_, **__: pytest.fail("the weights were read"))
    assert plan(model, tmp_path / "shm", read=False).action == "present"
    tensor_file(model / "model.safetensors", b"\x04" * 16)
    assert plan(model, tmp_path / "shm", read=False).action == "changed"


def test_changed_weights_are_another_version_and_the_old_one_stays_as_it_was(
    model: Path, tmp_path: Path
) -> None:
    shm = tmp_path / "shm"
    first = plan(model, shm)
    stage(first)
    old = Path(str(first.path)) / "model.safetensors"
    before = (old.read_bytes(), old.stat().st_mtime_ns)
    tensor_file(model / "model.safetensors", b"\x02" * 16)
    second = plan(model, shm)
    assert second.digest != first.digest
    stage(second)
    assert (old.read_bytes(), old.stat().st_mtime_ns) == before
    assert os.readlink(shm / "small") == Path(str(second.path)).name


def test_a_copy_that_lost_a_file_is_made_again(model: Path, tmp_path: Path) -> None:
    shm = tmp_path / "shm"
    stage(plan(model, shm))
    (shm / "small" / "config.json").unlink()
    again = plan(model, shm)
    assert again.action == "copy"
    stage(again)
    assert check_model_dir(shm / "small") == []


def test_two_names_that_stage_the_same_weights_at_once_copy_them_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shm = tmp_path / "shm"
    planned = plan(model, shm)
    copying, waiting, copied, copy = threading.Event(), threading.Event(), [], weights_store._copy

    def slow(*arguments: Any) -> None:
        copying.set()
        assert waiting.wait(60)
        copy(*arguments)
        copied.append(1)

    monkeypatch.setattr(weights_store, "_copy", slow)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(stage, planned)
        assert copying.wait(60)
        said: list[str] = []
        second = pool.submit(stage, planned, lambda text: (said.append(text), waiting.set()))
        first.result(60)
        second.result(60)
    assert said == [f"another deploy copies small into {shm}; waiting for it"]
    assert copied == [1]
    assert entries(shm) == ["small", f"small@{planned.digest[:12]}"]


def test_what_a_killed_copy_left_behind_is_removed_and_other_weights_are_let_be(
    model: Path, tmp_path: Path
) -> None:
    shm = tmp_path / "shm"
    others = [".other.incoming.x", ".damaged-other@0123456789ab-1", "small-2@0123456789ab"]
    for name in (".small.incoming.abc", ".damaged-small@0123456789ab-17", *others):
        (shm / name).mkdir(parents=True)
        (shm / name / "x").touch()
    planned = plan(model, shm)
    stage(planned)
    assert entries(shm) == sorted(["small", f"small@{planned.digest[:12]}", *others])


@pytest.mark.root
@pytest.mark.parametrize("planted", ["", ".drafthouse.json", "model.safetensors"])
def test_a_copy_that_another_user_can_have_made_is_not_taken_for_the_weights(
    model: Path, tmp_path: Path, planted: str
) -> None:
    shm = tmp_path / "shm"
    planned = plan(model, shm)
    stage(planned)
    copy = Path(str(planned.path))
    (copy / "model.safetensors").chmod(0o644)
    (copy / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-1] + b"?")
    os.chown(copy / planted, 1000, 1000)
    again = plan(model, shm)
    assert (again.action, again.path) == ("copy", planned.path)
    assert stage(again) == "copied"
    assert (copy / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert plan(model, shm).action == "present"


@pytest.mark.parametrize("name", [".", "model.safetensors"])
def test_a_copy_that_every_user_can_change_is_made_again(model: Path, tmp_path: Path, name: str) -> None:
    shm = tmp_path / "shm"
    planned = plan(model, shm)
    stage(planned)
    (Path(str(planned.path)) / name).chmod(0o777)
    assert plan(model, shm).action == "copy"


def test_a_copy_is_only_ours_to_change_whatever_new_files_are_given(model: Path, tmp_path: Path) -> None:
    (model / "sub").mkdir()
    (model / "sub" / "x.txt").write_text("x")
    before = os.umask(0)
    try:
        stage(plan(model, tmp_path / "shm"))
    finally:
        os.umask(before)
    assert plan(model, tmp_path / "shm").action == "present"


@pytest.mark.root
@pytest.mark.parametrize(
    ("owner", "mode", "said"),
    [
        (1000, 0o755, "{shm} belongs to user 1000, who can change the weights in it"),
        (0, 0o1777, "every user can write to {shm}, and so change the weights in it"),
    ],
)
def test_a_place_that_another_user_can_change_is_refused(
    model: Path, tmp_path: Path, owner: int, mode: int, said: str
) -> None:
    shm = tmp_path / "shm"
    planned = plan(model, shm)
    shm.mkdir()
    os.chown(shm, owner, owner)
    shm.chmod(mode)
    words = f"{said.format(shm=shm)}; remove {shm}, or choose another place with shm: in fabric.yaml"
    assert weights_store.look(str(model), str(shm)) == {"problems": [words]}
    with pytest.raises(DeployError) as caught:
        stage(planned)
    assert str(caught.value) == words
    assert not list(shm.iterdir())  # not even a lock: there could be a link in its place


def test_a_damaged_copy_does_not_stay_beside_the_new_one(model: Path, tmp_path: Path) -> None:
    shm = tmp_path / "shm"
    stage(plan(model, shm))
    (shm / "small" / "config.json").unlink()
    planned = plan(model, shm)
    stage(planned)
    assert entries(shm) == ["small", f"small@{planned.digest[:12]}"]


def test_links_of_a_download_cache_are_followed(model: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).symlink_to(model / name)
    stage(plan(snapshot, tmp_path / "shm"))
    copied = tmp_path / "shm" / "snapshot" / "model.safetensors"
    assert not copied.is_symlink()
    assert copied.read_bytes() == (model / "model.safetensors").read_bytes()


def test_without_room_nothing_is_copied(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shm = tmp_path / "shm"
    planned = plan(model, shm)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=3))
    with pytest.raises(DeployError) as caught:
        stage(planned)
    assert str(caught.value) == (
        f"{shm} has 3 B free, but weights {model} need {planned.bytes} B: {planned.bytes - 3} B too little; "
        "remove what no run uses (fab weights.list, fab prune), or choose another place with shm: in "
        "fabric.yaml"
    )
    assert entries(shm) == []


def test_the_memory_of_host_and_container_counts_on_a_tmpfs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_store, "on_tmpfs", lambda path: True)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("450000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 30000\nactive_file 20000\n")
    monkeypatch.setattr(procfs, "groups", lambda pid: [str(tmp_path)])
    ask = (tmp_path, 700_000, "weights /m", "shm: in fabric.yaml")
    said = weights_store.room_problem(*ask)
    assert said
    assert said.startswith(
        f"the container here has 600 kB of memory free, but weights /m need 700 kB of it in {tmp_path}: "
        "100 kB too little; remove"
    )
    (tmp_path / "memory.max").write_text("max\n")
    assert weights_store.room_problem(*ask) is None
    monkeypatch.setattr(room, "memory", lambda: {"available": 1000, "room": None})
    said = weights_store.room_problem(*ask)
    assert said
    assert said.startswith("this host has 1.0 kB of memory free, but weights /m need 700 kB of it")


def test_weights_that_change_while_they_are_copied_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, copy = plan(model, tmp_path / "shm"), manifest.Reader.copy

    def late(self: manifest.Reader, *rest: Any) -> bytes:
        tensor_file(model / "model.safetensors", b"\x03" * 16)
        return copy(self, *rest)

    monkeypatch.setattr(manifest.Reader, "copy", late)
    with pytest.raises(DeployError, match="changed while they were copied"):
        stage(planned)
    assert entries(tmp_path / "shm") == []


def test_weights_that_are_others_by_now_are_said_to_be(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan(model, tmp_path / "shm")
    tensor_file(model / "model.safetensors", b"\x03" * 16)
    now = manifest.tree_digest(model)[:12]
    start = f"^weights {model} are not what "
    digests = rf" \(digest {now} instead of {planned.digest[:12]}\); "
    with pytest.raises(DeployError, match=f"{start}they were when they were read{digests}run the same com"):
        stage(planned)
    words = f"{start}the run was started with{digests}fab deploy takes them as they are now$"
    again = (str(model), str(planned.path), planned.digest)
    with pytest.raises(DeployError, match=words):
        weights_store.restage(*again)
    (model / manifest.FILE).write_text(json.dumps(manifest.read(model)))
    with monkeypatch.context() as patch:
        patch.setattr(weights_store, "prepare", lambda *_: pytest.fail("room was made before it was said"))
        with pytest.raises(DeployError, match=words):
            weights_store.restage(*again)
    tensor_file(model / "model.safetensors")  # of the length that the manifest says, but not its content
    assert weights_store.restage(*again) == "copied"


def test_a_link_that_is_in_the_way_is_one_sentence(model: Path, tmp_path: Path) -> None:
    (tmp_path / "shm" / "small").mkdir(parents=True)
    with pytest.raises(DeployError, match="is in the way"):
        stage(plan(model, tmp_path / "shm"))


def test_weights_in_shared_memory_are_used_where_they_lie(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_store, "on_tmpfs", lambda path: True)
    planned = plan(model, Path("/dev/shm/drafthouse"))
    assert (planned.action, planned.path) == ("in-place", str(model))


@pytest.mark.parametrize(
    ("planned", "text"),
    [
        (Weights("toy", "toy", "toy"), "toy, which the trainer makes itself on its first run and caches"),
        (Weights("/m", "in-place", "/m", bytes=5), "/m (5 B), in shared memory already, used where it lies"),
        (Weights("/m", "present", "/s/m@1", bytes=54_000_000_000), "/s/m@1 (54 GB), unchanged"),
        (Weights("/m", "copy", "/s/m@1", bytes=1234), "copy /m (1.2 kB) to /s/m@1"),
        (
            Weights("/m", "copy", "/s/m@1", bytes=1234, kept="/k/m@1"),
            "copy /k/m@1, pushed before, (1.2 kB) to /s/m@1",
        ),
        (
            Weights("/m", "push", "/s/m@1", bytes=1234, kept="/k/m@1"),
            "push /m (1.2 kB) of this machine to /s/m@1, and keep a copy in /k/m@1",
        ),
        (
            Weights("/d", "push", "/k/d@1", bytes=1234, kept="/k/d@1"),
            "push /d (1.2 kB) of this machine to /k/d@1",
        ),
    ],
)
def test_the_plan_says_what_happens_to_the_weights(planned: Weights, text: str) -> None:
    assert planned.describe() == text


# -- pushing -----------------------------------------------------------------------------------------------


def to_push(model: Path, state: Path, shm: Path, keep: bool = True, **more: Any) -> Weights:
    place, known = str(state / "weights"), weights_store.known
    there, staged = known(place, model.name), known(str(shm), model.name)
    return weights.pushed(
        model, place if keep else "", str(shm), there, staged, hashes=hashing.names(), **more
    )


def test_pushed_weights_lie_on_disk_and_in_shared_memory_and_are_not_sent_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, shm = tmp_path / "state", tmp_path / "shm"
    (model / "sub").mkdir()
    (model / "sub" / "empty.txt").touch()
    planned = to_push(model, state, shm)
    assert planned.action == "push"
    weights.bring(Local(), planned, lambda text: None)
    version = f"small@{planned.digest[:12]}"
    for place in (state / "weights" / version, shm / version, shm / "small"):
        assert check_model_dir(place) == []
        assert (place / "sub" / "empty.txt").read_bytes() == b""
        assert manifest.verify(place) == []
    monkeypatch.setattr(manifest, "read", lambda *_, **__: pytest.fail("the weights were read again"))
    assert to_push(model, state, shm).action == "present"
    shutil.rmtree(shm)  # a reboot
    again = to_push(model, state, shm)
    assert again.action == "copy"
    assert again.boot() == {
        "source": str(state / "weights" / version),
        "path": str(shm / version),
        "digest": planned.digest,
    }
    weights.bring(Local(), again, lambda text: None)
    assert check_model_dir(shm / "small") == []
    shutil.rmtree(state / "weights" / version)
    lost = to_push(model, state, shm)
    assert lost.action == "keep"
    weights.bring(Local(), lost, lambda text: None)
    assert check_model_dir(state / "weights" / version) == []


def test_without_a_copy_on_disk_pushed_weights_are_known_by_those_in_shared_memory(
    model: Path, tmp_path: Path
) -> None:
    state, shm = tmp_path / "state", tmp_path / "shm"
    planned = to_push(model, state, shm, keep=False)
    assert (planned.action, planned.kept) == ("push", "")
    weights.bring(Local(), planned, lambda text: None)
    assert not state.exists()
    again = to_push(model, state, shm, keep=False, read=False)
    assert (again.action, again.path) == ("present", planned.path)
    weights.bring(Local(), again, lambda text: None)


def test_data_are_pushed_to_disk_only(model: Path, tmp_path: Path) -> None:
    place = str(tmp_path / "state" / "data")
    planned = weights.pushed(model, place, "", [], [])
    weights.bring(Local(), planned, lambda text: None)
    assert planned.path == planned.kept
    assert check_model_dir(Path(planned.kept)) == []
    assert entries(tmp_path / "state" / "data") == [f"small@{planned.digest[:12]}"]
    there = weights_store.known(place, "small")
    assert weights.pushed(model, place, "", there, []).action == "present"


def test_who_does_not_want_to_wait_is_told_that_what_would_be_pushed_is_new(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "read", lambda *_, **__: pytest.fail("the weights were read"))
    assert to_push(model, tmp_path / "state", tmp_path / "shm", read=False).action == "changed"


def test_weights_that_change_between_the_plan_and_the_push_are_not_sent(model: Path, tmp_path: Path) -> None:
    planned = to_push(model, tmp_path / "state", tmp_path / "shm")
    tensor_file(model / "model.safetensors", b"\x03" * 16)
    with pytest.raises(DeployError, match=r"changed since it was read; fab deploy reads it again$"):
        weights.bring(Local(), planned, lambda text: None)
    assert entries(tmp_path / "shm") == []


# -- what is sent ------------------------------------------------------------------------------------------


def test_a_model_of_hugging_faces_cache_has_the_models_name(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--Qwen--Qwen3-8B" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    assert manifest.name_of(snapshot) == "Qwen3-8B"
    assert manifest.name_of(tmp_path) == tmp_path.name


def test_links_to_one_blob_are_one_file_and_change_no_digest(model: Path, tmp_path: Path) -> None:
    whole = manifest.read(model)
    linked = tmp_path / "linked" / "small"
    linked.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (linked / name).symlink_to(model / name)
    (linked / "z.safetensors").symlink_to(model / "model.safetensors")
    found = manifest.read(linked)
    assert found["same"] == {"z.safetensors": "model.safetensors"}
    assert [one.relative for one in manifest.chunks(found)] == ["config.json", "model.safetensors"]
    shutil.copy(model / "model.safetensors", model / "z.safetensors")
    assert manifest.read(model)["digest"] == found["digest"] != whole["digest"]


def test_what_several_links_lead_to_counts_once(model: Path, tmp_path: Path) -> None:
    size = sum(path.stat().st_size for path in model.iterdir())
    (model / "z.safetensors").symlink_to(model / "model.safetensors")
    said: list[str] = []
    pushing = weights.pushed(model, "", str(tmp_path / "shm"), [], [], said.append)
    assert (pushing.bytes, plan(model, tmp_path / "shm").bytes, budget.need_of(pushing)) == (size,) * 3
    assert said == [f"reading {size} B of {model}"]
    data = weights_store.stage_data(str(model), str(tmp_path / "data"))
    assert data["bytes"] == size == weights_store.taken(manifest.read(model))


def test_a_link_that_leads_back_is_one_sentence(model: Path) -> None:
    (model / "sub").mkdir()
    (model / "sub" / "up").symlink_to("..")
    with pytest.raises(DeployError) as caught:
        manifest.read(model)
    assert str(caught.value) == f"{model}/sub/up leads back to a directory that it lies in; remove that link"
    (model / "sub" / "up").unlink()
    (model / "loop").symlink_to("loop")
    assert check_model_dir(model) == [f"{model}/loop cannot be read: Too many levels of symbolic links"]


def test_what_is_no_file_is_not_waited_for(model: Path) -> None:
    os.mkfifo(model / "pipe")
    with pytest.raises(
        DeployError, match=r"/pipe is no file, but a device, pipe or socket; move it elsewhere$"
    ):
        manifest.read(model)


@pytest.mark.parametrize("name", hashing.names())
def test_a_damaged_byte_is_found_with_its_file_and_place(name: str, model: Path, tmp_path: Path) -> None:
    (model / "long.bin").write_bytes(bytes(5000))
    wanted = manifest.read(model, name, chunk=1024)
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    (copy / manifest.FILE).write_text(json.dumps(wanted))
    assert manifest.verify(copy) == []
    with open(copy / "long.bin", "r+b") as file:
        file.seek(2100)
        file.write(b"x")
    assert manifest.verify(copy) == [f"{copy}/long.bin is damaged in bytes 2,048 to 3,072"]
    (copy / "long.bin").write_bytes(b"")
    (copy / "config.json").unlink()
    assert manifest.verify(copy) == [
        f"{copy}/config.json is not there",
        f"{copy}/long.bin is 0 bytes long, but must be 5,000",
    ]


def test_xxh3_is_the_one_that_others_compute() -> None:
    """The values are those of the xxhash package."""
    for data, value in (
        (b"", "99aa06d3014798d86001c324468d497f"),
        (b"x" * 1000 + b"y" * 77, "ed553088c2749f68553992678dba2e12"),
    ):
        found = hashing.function(hashing.XXH3)()
        found.update(memoryview(bytearray(data))[:1000])
        found.update(memoryview(bytearray(data))[1000:])
        assert found.digest().hex() == value
    assert hashing.common(["blake3", hashing.SHA, hashing.XXH3]) == hashing.XXH3
    assert hashing.common([hashing.SHA]) == hashing.SHA


def test_a_damaged_copy_on_disk_is_not_staged(model: Path, tmp_path: Path) -> None:
    planned = to_push(model, tmp_path / "state", tmp_path / "shm")
    weights.bring(Local(), planned, lambda text: None)
    shutil.rmtree(tmp_path / "shm")
    file = Path(planned.kept, "model.safetensors")
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(DeployError, match=r"model\.safetensors is damaged near byte 0; push it again$"):
        weights_store.stage(planned.kept, str(planned.path), planned.digest)
    assert entries(tmp_path / "shm") == []
