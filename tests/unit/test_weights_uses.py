"""Which copies lie on a host, as people see them, and what may be evicted."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deploy import manifest, weights_store, weights_tasks, weights_uses
from deploy.errors import DeployError

DIGEST = "0123456789abcdef0123456789abcdef"


def item(**changes: Any) -> dict[str, Any]:
    """One copy as a host tells of it."""
    base = {
        "path": f"/shm/m@{DIGEST[:12]}",
        "name": "m",
        "digest": DIGEST,
        "where": "memory",
        "kind": "weights",
        "bytes": 54_000_000_000,
        "memory": 54_000_000_000,
        "modified": 1000.0,
        "age": 180.0,
        "linked": True,
        "whole": True,
        "manifest": True,
        "partial": False,
        "source": "desk:/models/m",
        "runs": ["0001-a", "0002-a", "0003-a", "0004-b"],
        "processes": [7, 8],
    }
    return {**base, **changes}


def test_the_table_says_what_takes_how_much_memory_and_who_uses_it() -> None:
    copies = [
        item(),
        item(linked=False, whole=False, partial=True, memory=1_000_000_000, runs=[], processes=[]),
        item(
            where="disk", kind="data", name="d\x1b[2J", linked=False, memory=0, processes=[], runs=["0001-a"]
        ),
    ]
    lines = weights_tasks.table(copies, "gpu-box").splitlines()
    assert lines[0].split() == ["WHERE", "COPY", "SIZE", "MEMORY", "AGE", "USED", "BY"]
    shown = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[1:4]]
    who = "0002-a, 0003-a, 0004-b, 1 more, 2 processes"
    assert shown == [
        ["memory", "m@0123456789ab ←", "54 GB", "54 GB", "3 min", who],
        ["memory", "m@0123456789ab (in part)", "54 GB", "1.0 GB", "3 min", "nobody"],
        ["disk", "data d [2J@0123456789ab", "54 GB", "-", "3 min", "0001-a"],
    ]
    assert lines[4] == "55 GB of gpu-box's memory in all; ← is what the plain name points to"


@pytest.mark.parametrize("word", ["m", "m@0123456789ab", "m@01", f"/shm/m@{DIGEST[:12]}"])
def test_a_copy_is_meant_by_its_name_its_version_or_its_path(word: str) -> None:
    assert weights_tasks.chosen([item(), item(name="n", path="/shm/n@1")], word, "h") == [item()]


@pytest.mark.parametrize("word", ["m@", "m@02", "@0123", "", "/shm", "mm"])
def test_another_word_means_none(word: str) -> None:
    with pytest.raises(DeployError, match="is not among the copies on h"):
        weights_tasks.chosen([item()], word, "h")


def test_a_copy_that_is_not_there_is_one_sentence() -> None:
    with pytest.raises(DeployError) as caught:
        weights_tasks.chosen([item(name="a model")], "a modle", "gpu-box")
    assert str(caught.value) == (
        "a modle is not among the copies on gpu-box, which fab weights.list shows; did you mean a model?"
    )


@pytest.mark.parametrize("word", ["", "m@", " "])
def test_a_word_that_says_next_to_nothing_is_named_all_the_same(word: str) -> None:
    with pytest.raises(DeployError) as caught:
        weights_tasks.chosen([item()], word, "box")
    named = word if word.strip() else f"'{word}'"
    hint = "; did you mean m?" if word == "m@" else ""
    assert str(caught.value) == (
        f"{named} is not among the copies on box, which fab weights.list shows{hint}"
    )


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    """A whole copy, one in part, and what is none."""
    source, place = tmp_path / "m", tmp_path / "shm"
    source.mkdir()
    (source / "a.bin").write_bytes(bytes(5000))
    (source / "b.bin").symlink_to("a.bin")
    digest = manifest.tree_digest(source)
    weights_store.stage(str(source), str(place / f"m@{digest[:12]}"), digest)
    for name in (".m.incoming.feed", "plain", ".pruned-m@1-7"):
        (place / name).mkdir()
        (place / name / "x").write_bytes(b"x")
    return place


def test_copies_are_listed_with_what_is_there_in_part(shm: Path, tmp_path: Path) -> None:
    run = tmp_path / "state" / "runs" / "0001-demo"
    run.mkdir(parents=True)
    (copy,) = shm.glob("m@*")
    (run / "run.json").write_text(json.dumps({"environment": {"DRAFTHOUSE_WEIGHTS": str(copy)}}))
    found = {Path(one["path"]).name: one for one in weights_uses.listing(str(tmp_path / "state"), str(shm))}
    assert sorted(found) == sorted([copy.name, ".m.incoming.feed", ".pruned-m@1-7"])
    left = found[".pruned-m@1-7"]  # of a removal that was killed: it takes its memory all the same
    assert (left["name"], left["digest"], left["partial"], left["bytes"]) == ("m", "1", True, 1)
    whole, part = found[copy.name], found[".m.incoming.feed"]
    size = 5000 + (copy / manifest.FILE).stat().st_size
    assert (whole["bytes"], whole["linked"], whole["whole"], whole["partial"]) == (size, True, True, False)
    assert (whole["runs"], whole["processes"]) == (["0001-demo"], [])
    assert (part["name"], part["digest"], part["whole"], part["partial"]) == ("m", "feed", False, True)


def test_what_is_evicted_goes_with_its_link_and_nothing_else(shm: Path) -> None:
    (copy,) = shm.glob("m@*")
    assert weights_uses.evict(str(shm), str(copy)) > 5000
    assert weights_uses.evict(str(shm), str(shm / ".m.incoming.feed")) == 1
    assert sorted(os.listdir(shm)) == [".m.lock", ".pruned-m@1-7", "plain"]
    for other in (copy, shm / "plain", shm / "..", shm / "m"):
        with pytest.raises(DeployError, match=r"is not there any more|is no copy in"):
            weights_uses.evict(str(shm), str(other))
    assert (shm / "plain" / "x").exists()


def test_a_copy_that_is_open_is_not_evicted(shm: Path) -> None:
    (copy,) = shm.glob("m@*")
    reading, writing = os.pipe()
    with open(copy / "a.bin", "rb"):
        child = os.fork()
        if not child:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
    try:
        with pytest.raises(DeployError, match=rf"^{copy} is used by process {child} \("):
            weights_uses.evict(str(shm), str(copy))
    finally:
        os.close(reading)
        os.close(writing)
        os.waitpid(child, 0)
    weights_uses.evict(str(shm), str(copy))


@pytest.mark.root
def test_a_copy_that_a_container_has_mounted_is_not_evicted(shm: Path, tmp_path: Path) -> None:
    """Its program may have read all of it, and need it again after a crash."""
    (copy,) = shm.glob("m@*")
    place = tmp_path / "in a\tcontainer"
    place.mkdir()
    script = 'mount --bind "$1" "$2" && echo mounted && exec sleep 600'
    with subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", script, "sh", copy, place], stdout=subprocess.PIPE
    ) as container:
        try:
            assert container.stdout
            assert container.stdout.readline() == b"mounted\n"
            with pytest.raises(
                DeployError, match=rf"^{copy} is used by process {container.pid} \(sleep 600\)"
            ):
                weights_uses.evict(str(shm), str(copy))
            (found,) = [
                one for one in weights_uses.listing(str(tmp_path), str(shm)) if one["path"] == str(copy)
            ]
            assert found["processes"] == [container.pid]
        finally:
            container.kill()
    weights_uses.evict(str(shm), str(copy))


def test_a_copy_without_a_manifest_is_not_called_damaged(tmp_path: Path) -> None:
    """The toy, which the trainer makes there itself."""
    toy, torn = tmp_path / "toy@d0e902be36e4", tmp_path / "m@0123456789ab"
    for place in (toy, torn):
        place.mkdir()
        (place / "model.safetensors").write_bytes(b"x")
    (torn / manifest.FILE).write_text("{}")
    found = {one["name"]: one for one in weights_uses.listing(str(tmp_path / "state"), str(tmp_path))}
    shown = weights_tasks.table(list(found.values()), "box")
    assert "toy@d0e902be36e4 (no manifest)" in shown
    assert "m@0123456789ab (damaged)" in shown
