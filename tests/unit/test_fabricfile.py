"""fabric.yaml: a mistake in it is one sentence, before Fabric reads it and answers with a traceback."""

# ruff: noqa: E501  (whole sentences, as people read them)

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import fabricfile
from deploy.errors import DeployError
from deploy.settings import load_project

CHECKOUT = Path(__file__).resolve().parents[2]
SAID = [
    ("a list", "- gpu-box\n", "fabric.yaml holds a list, but must hold keys; begin it with drafthouse: and hosts: below that"),
    ("a word", "gpu-box\n", "fabric.yaml holds a single value, but must hold keys; begin it with drafthouse: and hosts: below that"),
    ("misspelt", "drafthose:\n  hosts: {}\n", "fabric.yaml:1: unknown key 'drafthose'; did you mean drafthouse?"),
    ("misspelt too", "# x\ntask: {}\n", "fabric.yaml:2: unknown key 'task'; did you mean tasks?"),
    ("hosts at the top", "hosts:\n  gpu-box: {}\n", "fabric.yaml:1: hosts stands at the top, but belongs below drafthouse:; indent it there"),
    ("defaults at the top", "drafthouse: {}\ndefaults: {run: x}\n", "fabric.yaml:2: defaults stands at the top, but belongs below drafthouse:; indent it there"),
    ("no such class", "tasks:\n  executor_class: deploy.executor.Paralel\n",
     "fabric.yaml:2: tasks.executor_class is deploy.executor.Paralel, but deploy.executor has no class Paralel; did you mean Parallel?"),
    ("no such module", "tasks:\n  executor_class: nowhere.Parallel\n",
     "fabric.yaml:2: tasks.executor_class is nowhere.Parallel, but No module named 'nowhere'; write executor_class: deploy.executor.Parallel, or remove it"),
    ("no dot", "tasks: {executor_class: Parallel}\n",
     "fabric.yaml:1: tasks.executor_class is 'Parallel', which names no class; write executor_class: deploy.executor.Parallel, or remove it"),
    ("no mapping", "tasks: [a]\n", "fabric.yaml:1: tasks holds no keys, but must; remove it, or read Fabric's docs"),
    ("no keys in drafthouse", "drafthouse: [gpu-box]\n", "fabric.yaml:1: drafthouse holds ['gpu-box'], but must hold keys, like `name: demo`"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said"), [item[1:] for item in SAID], ids=[item[0] for item in SAID])
def test_a_mistake_is_one_sentence_with_file_line_and_remedy(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "fabric.yaml").write_text(text)
    with pytest.raises(DeployError) as caught:
        load_project(tmp_path)
    assert (str(caught.value), caught.value.code) == (said, 2)


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "~\n", "user: ada\nconnect_kwargs: {}\nmine: 1\n"])
def test_an_empty_file_and_keys_of_fabric_or_of_ones_own_are_fine(text: str, tmp_path: Path) -> None:
    (tmp_path / "fabric.yaml").write_text(text)
    assert load_project(tmp_path).hosts == {}
    assert fabricfile.check(tmp_path / "missing.yaml") is None


@pytest.mark.parametrize("text", [SAID[0][1], SAID[2][1], SAID[6][1], ""])
def test_fab_itself_ends_with_that_sentence_and_no_traceback(text: str, tmp_path: Path) -> None:
    shutil.copy(CHECKOUT / "fabfile.py", tmp_path)
    (tmp_path / "fabric.yaml").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "fabric", "--search-root", str(tmp_path), "--list"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        check=False,
    )
    said = next((item[2] for item in SAID if item[1] == text), None)
    assert (done.returncode, done.stderr) == ((2, f"{said}\n") if said else (0, ""))
    assert ("deploy" in done.stdout) == (said is None)
