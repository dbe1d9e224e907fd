"""Which release `start`, `rollback` and `restart --same` mean, and what makes them refuse early."""

# ruff: noqa: E501  (whole sentences, as people read them)

from __future__ import annotations

from typing import Any

import pytest
from samples import facts, run

from deploy import again
from deploy.errors import DeployError
from trainer import status

OLD, NEW = "a" * 12, "b" * 12


def known(current: str | None = NEW, previous: str | None = OLD, **more: Any) -> dict[str, Any]:
    home = {"current": current, "previous": previous, "releases": [OLD, NEW], "secrets": [], **more}
    return facts(
        names={"demo": home},
        runs=[run("0001-demo", alive=False, release_id=OLD), run("0002-demo", release_id=NEW)],
    )


def refusal(*words: Any, **more: Any) -> str:
    with pytest.raises(DeployError) as caught:
        again.which(*words, **more)
    return str(caught.value)


def test_start_and_restart_mean_the_current_release_and_rollback_the_one_before() -> None:
    assert again.which("start", "box", "demo", known()) == NEW
    assert again.which("restart", "box", "demo", known()) == NEW
    assert again.which("rollback", "box", "demo", known()) == OLD
    assert again.which("rollback", "box", "demo", known(), OLD) == OLD


def test_a_lost_link_is_put_right_with_the_file_of_the_run() -> None:
    found = known(current=None)
    found["runs"][-1]["run"]["run_file"] = "runs/nocur.yaml"
    said = "demo on box has no current release, as the link names/demo/current is not there; fab deploy --host box --name demo"
    assert refusal("start", "box", "demo", found, None, "demo") == f"{said} --run nocur puts it right"
    assert refusal("start", "box", "demo", found, None, "nocur") == f"{said} puts it right"


def test_a_release_that_is_not_there_is_refused_with_the_reason() -> None:
    assert refusal("start", "box", "dem", known()) == (
        "nothing of dem is deployed on box; did you mean demo?; fab start starts a deployed release again, fab deploy makes one"
    )
    assert refusal("rollback", "box", "demo", known(previous=None)) == (
        f"demo on box cannot be rolled back: {NEW} is the only release that ever ran there"
    )
    gone = known(releases=[NEW, "c" * 12])
    assert refusal("rollback", "box", "demo", gone) == (
        f"demo on box cannot be rolled back: the files of release {OLD} are gone (pruned); --release takes one of cccccccccccc"
    )
    assert refusal("rollback", "box", "demo", known(), NEW) == (
        f"release {NEW} of demo is the current one on box; fab restart --host box --name demo --same starts it again"
    )
    assert refusal("rollback", "box", "demo", known(), "aaaaaaaaaaab") == (
        f"there is no release aaaaaaaaaaab of demo on box; did you mean {OLD}?"
    )


def test_how_a_release_was_started_is_known_from_its_newest_run() -> None:
    assert again.template(known(), "demo", OLD, "box").run_id == "0001-demo"
    with pytest.raises(DeployError, match="no run of release cccc of demo is known on box any more"):
        again.template(known(), "demo", "cccc", "box")


def made(**fields: Any) -> status.Run:
    return status.Run("0001-demo", "demo", fields.pop("command", ["x"]), release={"id": OLD}, **fields)


def test_an_image_that_is_gone_is_refused_and_one_that_is_there_is_not() -> None:
    there = [{"id": "sha256:1", "tags": ["drafthouse:aaaa"]}]
    again.refuse_lost_image({**known(), "images": there}, "box", made(image="drafthouse:aaaa"))
    again.refuse_lost_image({**known(), "images": there}, "box", made(image="python:3.11-slim"))
    with pytest.raises(
        DeployError, match=rf"the image of release {OLD} of demo \(drafthouse:bbbb\) is not on box any more"
    ):
        again.refuse_lost_image({**known(), "images": there}, "box", made(image="drafthouse:bbbb"))


def test_weights_that_left_shared_memory_are_copied_again_from_where_a_run_had_them() -> None:
    path = "/dev/shm/drafthouse/m@aaaaaaaaaaaa"
    command = ["python", "-u", "-m", "trainer", "--target-model", path]
    one = known()
    with pytest.raises(
        DeployError, match="are not in box's shared memory any more; fab deploy --name demo puts"
    ):
        again.restage(one, "box", made(command=command))
    one["runs"][0]["boot"] = {
        "weights": {"source": "/models/m", "path": path, "digest": "a" * 32, "name": "m"}
    }
    assert again.restage(one, "box", made(command=command)) == {
        "source": "/models/m", "path": path, "digest": "a" * 32
    }  # fmt: skip
    assert again.restage({**one, "weights": [{"path": path}]}, "box", made(command=command)) is None
    for elsewhere in ("/models/m", "toy"):
        assert again.restage(one, "box", made(command=[*command[:-1], elsewhere])) is None


def test_secrets_are_those_of_the_run_else_of_a_newer_one_that_has_them_all() -> None:
    older = made(secrets=["A"], secrets_file="/s/secrets-0001-demo")
    one = known(secrets=["/s/secrets-0001-demo"])
    assert again.secrets_file(one, older) == "/s/secrets-0001-demo"
    two = known(secrets=["/s/secrets-0002-demo"])
    assert again.secrets_file(two, older) is None
    two["runs"][1]["run"] |= {"secrets": ["A", "B"], "secrets_file": "/s/secrets-0002-demo"}
    assert again.secrets_file(two, older) == "/s/secrets-0002-demo"
    assert again.secrets_file(two, made()) is None


def test_the_way_back_is_the_newest_other_release_that_ever_took_a_step() -> None:
    one = known()
    assert again.way_back(one, "demo", "c" * 12) == (NEW, one["runs"][1]["path"])
    assert again.way_back(one, "demo", NEW) == (OLD, one["runs"][0]["path"])
    one["runs"][0]["heartbeats"] = {"1": {"role": "target", "step": 480}}
    assert again.way_back(one, "demo", NEW) is None
