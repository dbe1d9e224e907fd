"""deploy/onhost.py: our scripts reach a host whole, and run there on the standard library of Python 3.9."""

from __future__ import annotations

import ast
import re
import shutil
import sys
import zlib
from pathlib import Path

import pytest

from deploy import CHECKOUT, bootunit, evidence, lock, onhost, switch
from deploy.errors import DeployError
from deploy.host import HostError, Local

pytestmark = pytest.mark.usefixtures("starts_python")
MAINS = (evidence.PROBE, switch.JOB, lock.HOLDER, *bootunit.MODULES)
# Whatever is asked for anywhere.
ASKED = {
    module
    for path in (CHECKOUT / "deploy").rglob("*.py")
    for module in re.findall(r'"((?:deploy|trainer)\.\w+):\w+"', path.read_text())
    if module != "deploy.module"
}
ON_HOST = sorted({"deploy.errors", *(name for main in (*MAINS, *ASKED) for name in onhost.needed(main))})


@pytest.mark.parametrize("module", ON_HOST)
def test_a_script_for_hosts_uses_the_standard_library_and_its_like_only(module):
    for node in ast.walk(ast.parse(onhost.source(module), feature_version=(3, 9))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            top = name.partition(".")[0]
            ours = any(name == known or name.startswith(known + ".") for known in ON_HOST)
            assert ours or top in sys.stdlib_module_names, f"{module} imports {name}"


@pytest.mark.parametrize("module", ON_HOST)
def test_a_script_for_hosts_is_python_3_9(module):
    """No syntax of later versions, also where the parser alone would not tell: match, parenthesised with."""
    tree = ast.parse(onhost.source(module), feature_version=(3, 9))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Match | ast.TryStar)]
    future = [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "__future__"
    ]
    assert future, "X | None in annotations needs: from __future__ import annotations"


def test_what_a_script_needs_is_found_by_following_its_imports():
    assert onhost.needed("deploy.lock_holder") == ("deploy.files", "deploy.lock_holder")
    assert "deploy.switch_steps" in onhost.needed("deploy.switch_job")


@pytest.mark.parametrize("module", ON_HOST)
def test_imports_are_found_in_a_text_as_python_finds_them(module):
    text = onhost.source(module)
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    files = {name for name in names if (CHECKOUT / (name.replace(".", "/") + ".py")).is_file()}
    assert {name for name in onhost.imported(text) if name in files} == files


def test_imports_are_found_however_they_are_written():
    text = """\
import deploy.a as first, deploy.b
from deploy import (
    c as third,  # why
    d,
)
from deploy import e as fifth, f
from deploy.g import deploy, h
def function():
    from trainer import i  # later
    import trainer.j
# from deploy import not_this
import os
"""
    names = [*(f"deploy.{letter}" for letter in "abcdefg"), "deploy.g.deploy", "deploy.g.h"]
    assert onhost.imported(text) == [*names, "trainer.i", "trainer.j"]


def test_a_program_over_stdin_needs_no_file_and_no_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/no/such/place")
    argv, stdin = onhost.script(Local(), evidence.PROBE, "--state", str(tmp_path), "--sample", "0")
    result = Local().run(argv, timeout=30, input=stdin)
    assert result.out.startswith(b'{"schema": 1')


def test_an_installed_tool_is_named_by_its_content_and_installed_once(tmp_path):
    first = onhost.install(Local(), str(tmp_path), [switch.JOB])
    assert onhost.install(Local(), str(tmp_path), [switch.JOB]) == first
    assert len(list((tmp_path / "tools").iterdir())) == 1
    other = onhost.install(Local(), str(tmp_path), ["deploy.procfs"])
    assert other != first


def test_an_installed_tool_runs_and_leaves_no_cache_files(tmp_path):
    tool = onhost.install(Local(), str(tmp_path), [switch.JOB])
    result = Local().run(onhost.command(Local(), tool, "/no/such/spec.json"), timeout=30, check=False)
    assert result.code != 0
    assert b"/no/such/spec.json" in result.err
    assert not list((tmp_path / "tools").rglob("__pycache__"))


# -- calls -------------------------------------------------------------------------------------------------

SAMPLE = """
from __future__ import annotations
import os, sys, time
from deploy.errors import DeployError
from deploy import second

def add(a, b): return a + b
def refuse(code): raise DeployError("the \u2018thing\u2019 is gone; bring it back", code=code)
def crash(): raise RuntimeError("what nobody thought of")
def missing(): open("/no/such/file")
def length(data): return [len(data), sum(data)]
def talk(count, progress):
    print("a word on stdout is no part of the answer")
    for number in range(count):
        progress("%d of %d" % (number + 1, count))
    return second.WORD
def sleep(progress):
    progress("begun")
    time.sleep(600)
def echo(prefix):
    while True:
        block = os.read(0, 4096)
        if not block:
            return
        os.write(1, prefix.encode() + block)
def give_up(): raise DeployError("not today")
"""


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A checkout with a module `deploy.sample` that has something to call."""
    (tmp_path / "deploy").mkdir()
    shutil.copy(CHECKOUT / "deploy" / "errors.py", tmp_path / "deploy")
    (tmp_path / "deploy" / "sample.py").write_text(SAMPLE)
    (tmp_path / "deploy" / "second.py").write_text("from trainer.third import WORD\n")
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "third.py").write_text("WORD = 'grün ❯'\n")
    caches = (onhost.needed, onhost._packed)
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setattr(onhost, "CHECKOUT", tmp_path)
    yield
    for cache in caches:
        cache.cache_clear()


def other_python(tmp_path: Path) -> Local:
    """This machine as one whose Python is not ours: nothing that ours has compiled can be sent there."""
    program = tmp_path / "python3"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return Local(python=str(program))


@pytest.mark.usefixtures("sample")
def test_what_was_compiled_goes_to_our_own_python_only_and_is_never_older_than_the_text(tmp_path):
    for host in (Local(), other_python(tmp_path)):
        assert onhost.ask(host, "deploy.sample:add", [1], [2]) == [1, 2]
    text = tmp_path / "deploy" / "sample.py"
    text.write_text(text.read_text().replace("def add(a, b):", "def add(b, a, *more):"))
    onhost._packed.cache_clear()
    for host in (Local(), other_python(tmp_path)):
        assert onhost.ask(host, "deploy.sample:add", [1], [2]) == [2, 1]
    assert b"def add" in zlib.decompress(onhost._packed("deploy.sample", ours=False))
    assert b"def add" not in zlib.decompress(onhost._packed("deploy.sample", ours=True))


@pytest.mark.usefixtures("sample")
class TestAsk:
    def test_a_function_is_called_there_and_its_value_comes_back(self):
        assert onhost.ask(Local(), "deploy.sample:add", ["ä", 1], ["$(id)", None]) == ["ä", 1, "$(id)", None]

    def test_bytes_reach_it_as_they_are_however_many(self):
        data = bytes(range(256)) * 20_000
        assert onhost.ask(Local(), "deploy.sample:length", data=data) == [len(data), sum(data)]

    def test_a_deploy_error_there_is_the_same_sentence_here(self):
        with pytest.raises(DeployError, match=r"^the ‘thing’ is gone; bring it back$") as caught:
            onhost.ask(Local(), "deploy.sample:refuse", 2)
        assert caught.value.code == 2

    def test_an_error_of_the_system_names_host_and_file(self):
        with pytest.raises(HostError, match=r"^box: /no/such/file: No such file or directory$"):
            onhost.ask(Local("box"), "deploy.sample:missing")

    def test_any_other_error_names_host_and_function(self):
        sentence = "^box: deploy.sample:crash failed: RuntimeError: what nobody thought of$"
        with pytest.raises(HostError, match=sentence):
            onhost.ask(Local("box"), "deploy.sample:crash")

    def test_progress_arrives_as_it_is_told(self):
        said: list[str] = []
        assert onhost.ask(Local(), "deploy.sample:talk", 3, progress=said.append) == "grün ❯"
        assert said == ["1 of 3", "2 of 3", "3 of 3"]

    def test_with_progress_silence_ends_it(self):
        said: list[str] = []
        with pytest.raises(HostError, match="gave no sign of life for 1 s and was ended"):
            onhost.ask(Local(), "deploy.sample:sleep", timeout=1, progress=said.append)
        assert said == ["begun"]

    def test_an_open_function_has_stdin_and_stdout_for_itself(self):
        process = onhost.open(Local(), "deploy.sample:echo", "heard ")
        assert process.stdin
        assert process.stdout
        process.stdin.write(b"a\0b")
        process.stdin.flush()
        assert process.stdout.read(9) == b"heard a\0b"
        onhost.close(process)
        assert process.returncode == 0

    def test_the_last_words_of_an_open_function_are_its_sentence(self):
        process = onhost.open(Local(), "deploy.sample:give_up")
        assert onhost.last_words(process) == "not today"
        onhost.close(process)
