"""Our own image as the root of a container that a deploy makes: built here, brought there, started."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from deployed import CHECKOUT
from elsewhere import small_checkout
from fabbed import FAB
from testbed.docker import Docker
from testbed.pct.box import PveBox

from trainer import status

pytestmark = [pytest.mark.engine, pytest.mark.pve, pytest.mark.sshd, pytest.mark.slow]

PCT = {"rootfs": "8g", "memory": "2g", "storage": "local-zfs"}


def test_the_image_of_the_checkout_becomes_a_container(
    base_images: Docker, pve_box: PveBox, tmp_path: Path
) -> None:
    """Without PyTorch in it the trainer ends at once; that is after all that a deploy has to do with it."""
    root = pve_box.project(tmp_path / "project", runtime="pct", pct=PCT)
    shutil.rmtree(root / "runs")
    small_checkout(root)
    for name in ("deploy", "templates"):
        shutil.copytree(CHECKOUT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    recipe = {"name": "own", "weights": "toy", "trainer": {"max-steps": 3}, "restart": {"attempts": 0}}
    (root / "runs" / "demo.yaml").write_text(yaml.safe_dump(recipe))
    own = {
        "PYTHONPATH": str(root),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(root),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "DRAFTHOUSE_BOOT": "no",
        **base_images.environment,
        **pve_box.environment,
    }
    words = [*FAB, "deploy", "--host", "gpu-box", "--no-follow"]
    done = subprocess.run(
        words, cwd=root, env={**os.environ, **own}, capture_output=True, text=True, timeout=600
    )
    said = done.stdout + done.stderr
    (run,) = status.list_runs(pve_box.state / "runs", "own")
    log = "".join(path.read_text() for path in sorted(run.log.glob("*.log")))
    assert "· image drafthouse:" in log, said
    assert "stdout unbuffered (PYTHONUNBUFFERED=1, -u; from /proc/" in log
    assert "under tini" in log
    assert "No module named 'torch'" in log
    conf = pve_box.conf(100).read_text()
    assert "lxc.init.cmd: tini -- setpriv --reuid=10001" in conf
    pve_box.remove(100)
