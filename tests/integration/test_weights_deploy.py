"""Weights over the life of a name: too large beside the old ones, and deleted in mid-run."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deployed import Place, until

from deploy import actions, evicting, execute, overview, settings, switch, weights_store
from deploy.errors import DeployError
from deploy.host import Local
from deploy.plan import Plan, Stop
from deploy.release import Layout
from deploy.target import Target
from deploy.weights import Weights
from trainer import status

pytestmark = [pytest.mark.root, pytest.mark.slow]

SIZE = 2 << 20  # bytes of a model; one fits into the tmpfs, two do not
# Maps its weights as safetensors does, and says what they are.
MAPPING = """\
weights: {model}
command:
- python3
- -S
- -c
- |
  import mmap, os, time
  with open(os.environ["DRAFTHOUSE_WEIGHTS"] + "/model.safetensors", "rb") as file:
      held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
  print("version", held[-1], flush=True)
  while True:
      time.sleep(0.05)
grace_seconds: 5
settle_seconds: 0
"""


def write(model: Path, version: int) -> None:
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "U8", "shape": [SIZE], "data_offsets": [0, SIZE]}}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes([version]) * SIZE
    (model / "model.safetensors").write_bytes(data)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "state")
    (tmp_path / "shm").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m,mode=755", "tmpfs", tmp_path / "shm"], check=True)
    try:
        yield made
    finally:
        made.end_all()
        subprocess.run(["umount", "--lazy", tmp_path / "shm"], check=True)


@pytest.fixture
def goal(place: Place, tmp_path: Path) -> Target:
    (tmp_path / "fabric.yaml").write_text("drafthouse: {}")
    (tmp_path / "runs").mkdir()
    write(tmp_path / "m", 1)
    (tmp_path / "runs" / "demo.yaml").write_text(MAPPING.format(model=tmp_path / "m"))
    host = settings.HostSettings(name="localhost", state=str(place.root), shm=str(tmp_path / "shm"))
    return Target(settings.load_project(tmp_path), host, Local())


def planned(goal: Target, **more: Any) -> Any:
    return actions.plan_deploy("deploy", goal, actions.recipe(goal, None, None), **more)


def deploy(goal: Target, said: list[str], **more: Any) -> str:
    """The plan's text, once what it says is done."""
    made, work = planned(goal, **more)
    _, record = execute.start(made, goal.host, work, said.append)
    outcome = switch.watch(goal.host, record, lambda step: None)
    assert outcome.word == "done", outcome
    return str(made)


def log_of(run: status.RunDir) -> str:
    return "".join(path.read_text() for path in sorted(run.log.glob("*.log")))


def test_old_weights_go_first_where_both_do_not_fit_and_are_missed_when_they_are_deleted(
    goal: Target, place: Place, tmp_path: Path
) -> None:
    shm, said = tmp_path / "shm", []
    shown = deploy(goal, said)
    assert "memory    2.1 MB for the weights, of " in shown
    assert "what its command needs besides is not known" in shown
    (first,) = (path for path in shm.iterdir() if "@" in path.name)
    old = status.list_runs(place.root / "runs")[0]
    until(lambda: "version 1\n" in log_of(old))

    write(tmp_path / "m", 2)
    with pytest.raises(DeployError, match="--rollback-on-failure needs the old weights"):
        planned(goal, evict_first=True, rollback=True)
    assert old.alive()
    said.clear()
    assert (
        f"evict     {first.name} (2.1 MB), since the new weights do not fit in beside it: 0001-demo is "
        "stopped first, and nothing runs until the new ones are there\n"
    ) in deploy(goal, said, evict_first=True)
    assert said[:2] == [
        "stopping 0001-demo, so that its weights can go", f"{first} evicted: 2.1 MB of memory freed"
    ]  # fmt: skip
    assert not first.exists()
    assert not old.alive()
    new = status.list_runs(place.root / "runs")[-1]
    until(lambda: "version 2\n" in log_of(new))
    (second,) = (path for path in shm.iterdir() if "@" in path.name)
    (second / "model.safetensors").unlink()
    ((found,),) = overview.everywhere([goal], "demo", None)
    gone = f"its weights {second}/model.safetensors were deleted: a restart will not find them"
    assert gone[:60] in found.rows[-1].reason
    assert weights_store.whole(second) is None


def test_what_fails_once_the_old_run_was_stopped_says_how_to_go_on_and_how_to_get_back() -> None:
    layout = Layout("/state", "/shm", "demo", None)
    stop = Stop("0001-demo", "/state/runs/0001-demo", "training", False, 0.0, 5.0)
    weights = Weights("/m", "push", "/shm/m@2", "m")
    made = Plan("deploy", "switch", "gpu-box", "demo", layout, weights=weights, stop=stop)
    said: list[str] = []
    with pytest.raises(DeployError) as caught, evicting.way_back(made, said.append):
        raise DeployError("the link is lost")
    words = (
        "0001-demo may have been stopped by now: fab deploy --host gpu-box --name demo --evict-first goes "
        "on; fab start --host gpu-box --name demo starts its release again, with its weights from where they "
        "came (if they do not fit in, fab weights.evict m --host gpu-box first)"
    )
    assert str(caught.value) == f"the link is lost\n{words}"
    with pytest.raises(KeyboardInterrupt), evicting.way_back(made, said.append):
        raise KeyboardInterrupt
    assert said == [words]
