"""deploy/parsing.py: what Invoke cannot read, in one sentence with its remedy."""

from __future__ import annotations

import pytest
from fabric import Config, task
from fabric.main import Fab
from invoke import Collection

from deploy import parsing
from deploy.executor import Parallel


@task(auto_shortflags=False)
def compare(context, before, after, last="50"):
    pass


@task(auto_shortflags=False)
def status(context, watch=False, name=None):
    pass


class Program(Fab):
    def load_collection(self):
        self.collection = Collection(compare, status)


COMPARE = "fab compare 0006-demo 0007-demo (runs, or names for their newest runs)"
CASES = {
    "compare tt": f"compare needs AFTER: {COMPARE}",
    "compare": f"compare needs BEFORE and AFTER: {COMPARE}",
    "compare a b c": "compare takes no 'c' at this place; fab --help compare lists what it takes",
    "status x": "status takes no 'x' at this place; fab --help status lists what it takes",
    "status --foo": "status has no flag --foo; fab --help status lists what it takes",
    "status --naem x": "status has no flag --naem; did you mean --name?",
    "status --name": "status --name needs a value after it; fab --help status lists what it takes",
    "--foo": "fab has no flag --foo; fab --list shows the tasks",
    "stats": "there is no task 'stats'; did you mean status?",
    "--help compair": "there is no task 'compair'; did you mean compare?",
}


@pytest.mark.parametrize("words", CASES)
def test_a_command_line_that_cannot_be_read_is_one_sentence_with_its_remedy(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program = Program(executor_class=Parallel, config_class=Config)
    parsing.speak(program, lambda text: text.replace("fab", "bin/fab"))
    with pytest.raises(SystemExit) as ended:
        program.run(["fab", *words.split()])
    said = capsys.readouterr()
    assert (ended.value.code, said.out, said.err) == (2, "", CASES[words].replace("fab", "bin/fab") + "\n")
