"""Whatever path is typed, and whatever lies there, it is a sentence."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy import actions, lookup, release, secrets, settings, typedpath, weights_store
from deploy.errors import DeployError
from deploy.settings import SecretSource

NOBODY = 65534


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A path below a directory that we may not enter."""
    (tmp_path / "closed").mkdir(mode=0)
    mine = os.geteuid()
    if mine == 0:
        os.seteuid(NOBODY)
    yield tmp_path / "closed" / "x"
    if mine == 0:
        os.seteuid(0)
    (tmp_path / "closed").chmod(0o700)


def run_file(path: Path) -> str:
    with pytest.raises(DeployError) as caught:
        settings.load_run(settings.Project(Path("/"), {}), str(path))
    return str(caught.value)


def out(path: Path) -> str:
    with pytest.raises(DeployError) as caught:
        actions.write_out(release.Release("a", "b", {"a": b""}, (), {}), path)
    return str(caught.value)


LOOKS: dict[str, Callable[[Path], str]] = {
    "run file": run_file,
    "weights": lambda path: weights_store.look(str(path), "/shm")["problems"][0],
    "data": lambda path: lookup.data(str(path))["problems"][0],
    "secret KEY": lambda path: secrets.problems({"KEY": SecretSource(file=str(path))}, Path("/"))[0],
    "--out": out,
}


@pytest.mark.parametrize("what", LOOKS)
def test_a_place_that_is_closed_to_us_is_told(closed: Path, what: str) -> None:
    said = LOOKS[what](closed.with_suffix(".yaml"))
    assert said.startswith(what)
    assert said.endswith("cannot be looked at (Permission denied); correct it")


@pytest.mark.parametrize("what", LOOKS)
def test_a_name_that_no_file_can_have_is_told(what: str) -> None:
    assert "cannot be looked at (File name too long)" in LOOKS[what](Path("/tmp", "x" * 300 + ".yaml"))
    assert "cannot be looked at (embedded null byte)" in LOOKS[what](Path("/tmp", "a\0b.yaml"))


@pytest.mark.parametrize("what", list(LOOKS)[:-1])
def test_the_home_of_a_user_that_is_not_there_is_a_path_like_any_other(what: str) -> None:
    assert "~nouser/x.yaml" in LOOKS[what](Path("~nouser/x.yaml"))


def test_a_directory_that_may_not_be_listed_is_none_that_can_be_used(closed: Path) -> None:
    with pytest.raises(DeployError, match="Permission denied"):
        typedpath.look(closed.parent, "it")
