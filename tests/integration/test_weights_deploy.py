"""Weights over the life of a name: too large beside the old ones, gone after a reboot, deleted in mid-run."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployed import until
from fabbed import Fab, project

pytestmark = [pytest.mark.root, pytest.mark.slow]

SIZE = 2 << 20  # bytes of a model; one fits into the tmpfs, two do not
# Maps its weights as safetensors does, and says what they are.
MAPPING = """\
weights: {model}
command:
- python
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
def fab(tmp_path: Path) -> Iterator[Fab]:
    made = project(tmp_path)
    found = next(made)
    shm = found.root / "shm"
    shm.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m,mode=755", "tmpfs", shm], check=True)
    try:
        yield found
        next(made, None)
    finally:
        subprocess.run(["umount", "--lazy", shm], check=True)


def test_old_weights_go_first_come_back_and_are_missed_when_they_are_deleted(
    fab: Fab, tmp_path: Path
) -> None:
    model, shm = tmp_path / "models" / "m", fab.root / "shm"
    write(model, 1)
    fab.file(MAPPING.format(model=model))
    shown = fab.ok("deploy", "--no-follow")
    assert "memory    2.1 MB for the weights, of " in shown
    assert "what its command needs besides is not known" in shown
    until(lambda: "version 1\n" in fab.log(fab.runs[0]))
    (first,) = (path for path in shm.iterdir() if "@" in path.name)

    write(model, 2)  # both do not fit in together
    refused = fab.run("deploy", "--no-follow")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.splitlines()[-1] == (
        f"{shm} has 1.0 MB free, but the weights need 2.1 MB: 1.1 MB too little; the old ones ({first.name}, "
        "2.1 MB) do not fit in beside them: --evict-first stops 0001-demo, evicts them, and only then brings "
        "these"
    )
    assert fab.runs[0].alive()
    both = fab.run("deploy", "--no-follow", "--evict-first", "--rollback-on-failure")
    assert both.returncode == 2
    assert f"needs the old weights ({first.name} (2.1 MB))" in both.stderr
    assert fab.runs[0].alive()
    shown = fab.ok("deploy", "--no-follow", "--evict-first")
    assert (
        f"evict     {first.name} (2.1 MB), since the new weights do not fit in beside it: 0001-demo is "
        "stopped first, and nothing runs until the new ones are there\n"
    ) in shown
    assert not first.exists()
    assert [run.alive() for run in fab.runs] == [False, True]
    until(lambda: "version 2\n" in fab.log(fab.runs[1]))

    (second,) = (path for path in shm.iterdir() if "@" in path.name)
    (second / "model.safetensors").unlink()
    said = fab.ok("status")
    assert "its weights /" in said
    assert " were deleted: a restart will not find them\n" in said
    fab.ok("stop")

    shutil.rmtree(second)  # as a reboot does
    shown = fab.ok("start", "--no-follow")
    assert f"weights are copied from {model} into shared memory again: {second}" in shown
    until(lambda: "version 2\n" in fab.log(fab.runs[2]))
