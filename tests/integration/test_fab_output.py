"""`fab` where nobody reads what it prints, where the disk behind that is full, and Ctrl-C at any moment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployed import CHECKOUT
from fabbed import FAB, Fab, project, server
from invoke import Context, Exit

pytestmark = pytest.mark.slow

FULL = (
    "the answer cannot be written to stdout: No space left on device; "
    "make room there, or write it elsewhere\n"
)
TASKS = ["status", "status --json", "runs", "--list", "--help status", "-H a,b status"]


@pytest.fixture(scope="module")
def fab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fab]:
    made = project(tmp_path_factory.mktemp("output"))
    fab = next(made)
    hosts = "drafthouse:\n  hosts:\n    a: {address: localhost}\n    b: {address: localhost}\n"
    path = fab.root / "fabric.yaml"
    path.write_text(path.read_text().split("drafthouse:")[0] + hosts)
    yield fab
    next(made, None)


def call(fab: Fab, words: str, stdout: int, stderr: int | None = None) -> tuple[int, str]:
    """(exit code, stderr) of ``fab WORDS`` with these outputs."""
    errors = fab.root / "stderr"
    with errors.open("wb") as file:
        where = file.fileno() if stderr is None else stderr
        argv = [*FAB, *words.split()]
        process = server().start(argv, cwd=fab.root, env=fab.environment(), stdout=stdout, stderr=where)
        code = process.wait(60)
    return code, errors.read_text()


@pytest.mark.parametrize("words", TASKS)
def test_a_full_disk_is_one_sentence_and_nobody_who_reads_is_none(fab: Fab, words: str) -> None:
    with open("/dev/full", "wb") as full:
        code, said = call(fab, words, full.fileno())
    assert code == 1
    assert said == FULL
    reads, writes = os.pipe()
    os.close(reads)
    try:
        assert call(fab, words, writes) == (0, "")
    finally:
        os.close(writes)


def test_what_cannot_be_said_beside_the_result_stops_nothing(fab: Fab) -> None:
    answer = fab.root / "answer"
    for words in ("plan --json --build host", "-H a,b status"):
        with open("/dev/full", "wb") as full, answer.open("wb") as file:
            assert call(fab, words, file.fileno(), full.fileno())[0] == 0
        assert answer.stat().st_size > 10


INTERRUPT = """
import builtins, os, signal
imported = builtins.__import__
def hook(name, globals=None, locals=None, fromlist=(), level=0):
    if name == "deploy" and os.environ["AT"] in (fromlist or ()):
        os.kill(os.getpid(), signal.SIGINT)
    return imported(name, globals, locals, fromlist, level)
builtins.__import__ = hook
"""


@pytest.mark.parametrize(("moment", "said"), [("output", ""), ("target", "interrupted; fab status shows ")])
def test_ctrl_c_is_quiet_from_the_first_line_of_ours_on(
    fab: Fab, tmp_path: Path, moment: str, said: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT)
    path = f"{tmp_path}:{fab.environment()['PYTHONPATH']}"
    done = subprocess.run(
        [*FAB, "status"],
        cwd=fab.root,
        env=fab.environment(PYTHONPATH=path, AT=moment),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr[: len(said) or None]) == (130, "", said)


def test_ctrl_c_between_the_beginning_of_a_task_and_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(*_: object) -> None:
        raise KeyboardInterrupt

    sys.path.insert(0, str(CHECKOUT))
    import fabfile
    from deploy import menu

    monkeypatch.setattr(menu.early, "begin", begin)
    with pytest.raises(Exit) as ended:
        fabfile.compare(Context(), "a", "b")
    assert ended.value.code == 130
