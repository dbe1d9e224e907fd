"""What is made of a script, held against what bash itself hands to the program that it starts."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest
from run_scripts import SCRIPTS, Bash

from deploy import adopt_host
from deploy.bash_found import Word, parse
from deploy.bash_parts import check_whole, touching
from deploy.bash_shell import Shell, Unknown
from deploy.bash_walk import Walk

OWN = ("_", "SHLVL", "PWD", "OLDPWD", "PS1", "VIRTUAL_ENV_PROMPT")  # bash's own, and a terminal's


class Here:
    """The test's own machine as the host."""

    def read(self, path):
        return Path(path).read_bytes() if Path(path).is_file() else None

    test = staticmethod(adopt_host.test)
    which = staticmethod(adopt_host.which)
    real = staticmethod(adopt_host.real)


def walked(bash, script):
    home = str(bash.home)
    shell = Shell(Here(), dict(bash.login), exported=set(bash.login), directory=home, zero=f"{home}/run.sh")
    walk = Walk(shell, dict(bash.login))
    walk.script(bash.placed(script).encode())
    return walk


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_program_gets_what_bash_would_give_it(tmp_path, name):
    bash = Bash(tmp_path)
    script = SCRIPTS[name]
    argv, environment, directory, limit = bash.run(script)
    walk = walked(bash, script)
    assert len(walk.starts) == 1, walk.notes
    start = walk.starts[0]
    words = [word.text for word in start.argv]
    assert not [word for word in start.argv if word.unknown]
    in_front = {"limits": 6, "timeout": 6}.get(name, 0)  # prlimit, nice, timeout, stdbuf with their own words
    words = words[in_front:]
    found = adopt_host.which(words[0], start.environment["PATH"], start.directory)
    assert [found, *words[1:]] == argv
    ours = {key: value for key, value in start.environment.items() if key not in OWN}
    theirs = {
        key: value
        for key, value in environment.items()
        if key not in OWN and key != "_STDBUF_O" and key != "LD_PRELOAD"
    }
    assert ours == theirs
    assert start.directory == directory
    if name == "limits":
        assert "--nofile=512" in [word.text for word in start.argv]
        assert limit == "512"


PIECES = (
    'x', '-', '/', '=', ':', ',', '@', '%', '+', '.', 'é', '"a b"', "'c  d'", '$V', '"$V"', '${V}',
    '"${V}q"', '$E', '"$E"', '${U:-d e}', '"${U:-d  e}"', '${U-}', '${V:+y z}', '\\$', '\\ ',
    '\\\\', "\\'", "$'t\\tq\\x42'", '"$(dirname "$V")"', '$(echo $V)', '{a,b}', '{1..3}', '{', '}',
    '~', '"${A[@]}"', '${A[@]}', '"${A[*]}"', '"$@"', '$1', '$((2+3*4))', '""', "''", '"\\$V"',
    '"\\\\"', '"\\q"', '${V%w}', '${V#* }', '${#V}', '`echo b`', '"$V $E ${V}"', '${A[1]}', '\\\n',
    '"x\\\ny"', '${N[@]}', '"${N[@]}"',
)  # fmt: skip


def test_any_words_become_what_bash_makes_of_them(tmp_path):
    """Thousands of generated words, in one bash."""
    chance = random.Random(8)
    lines = []
    for _ in range(1500):
        made = ["".join(chance.choices(PIECES, k=chance.randint(1, 4))) for _ in range(chance.randint(1, 3))]
        lines.append(" ".join(made))
    head = "V='u  v w' E= A=(1 '2  3' '') N=()\nset -- first 'second one'\n"
    # (a closing brace or the like at a line's end is still an argument)
    script = head + "".join(f"printf '%s\\1' X {line} ; printf '\\0'\n" for line in lines)
    login = {"HOME": "/home/of me", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-c", script], env=login, cwd="/", capture_output=True, check=True, timeout=60
    )
    theirs = [[os.fsdecode(word) for word in one.split(b"\1")[:-1]] for one in done.stdout.split(b"\0")[:-1]]
    shell = Shell(Here(), dict(login), exported=set(login))
    walk = Walk(shell, login)
    walk.script(head.encode())
    ours = []
    for line in lines:
        node = parse(f"printf X {line} ;\n".encode()).named_children[0]
        groups = touching(node.children_by_field_name("argument"), node)
        ours.append([word for group in groups for word in walk.evaluated(group)])
        try:
            check_whole(node)
            fits = node.type == "command" and not node.parent.has_error
        except Unknown:
            fits = False
        if not fits:
            ours[-1] = [Word(line, "the grammar does not fit")]
    assert len(theirs) == len(lines)
    known = 0
    wrong = []
    for line, bash, mine in zip(lines, theirs, ours, strict=True):
        if any(word.unknown for word in mine):
            continue
        known += 1
        if [word.text for word in mine] != bash:
            wrong.append((line, bash, [word.text for word in mine]))
    assert not wrong, (len(wrong), sorted(wrong, key=lambda one: len(one[0]))[:12])
    assert known > 0.8 * len(lines)
