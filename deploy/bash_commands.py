"""What each command of a script means for a run: it is the program, changes the shell, or is not needed."""

from __future__ import annotations

import os
import re
from typing import Any

from deploy.bash_found import KEPT, NOHUP, POSITIONAL, PROGRAM, Word
from deploy.bash_shell import Unknown
from deploy.bash_walk import Ends, Walk

CACHES = re.compile(r"torchinductor|triton|inductor_cache|torch_extensions|torch_compile", re.IGNORECASE)
RC = re.compile(r"(^|/)\.(bashrc|profile|bash_profile|zshrc)$|^/etc/(profile|bash\.bashrc|environment)")
SHELLS = ("bash", "sh", "dash", "zsh")
LIMITS = {"-n": ("nofile", 1), "-u": ("nproc", 1), "-l": ("memlock", 1024), "-s": ("stack", 1024),
          "-v": ("as", 1024), "-c": ("core", 0)}  # fmt: skip
NEEDLESS = {
    "disown": "not needed: a run belongs to nobody's terminal",
    "wait": "not needed: launch waits for the program",
    "sleep": "not needed: the switch waits until the devices are free",
    "echo": "not needed: the log begins with what was started",
    "printf": "not needed: the log begins with what was started",
    "date": "not needed: fab tail and fab status tell when",
    "nvidia-smi": "not needed: fab status shows the devices",
    "tail": "not needed: fab tail follows the log",
    "clear": "not needed",
    "jobs": "not needed",
    "hash": "not needed",
    "pkill": "not needed: the switch ends the run before, and nothing else",
    "killall": "not needed: the switch ends the run before, and nothing else",
    "kill": "not needed: the switch ends the run before, and nothing else",
    "true": "not needed",
    ":": "not needed",
    "trap": "not needed: launch passes signals on",
}


def command(walk: Walk, node: Any, argv: list[Word]) -> None:
    """Take one command of the script, whose words are `argv`. Raises Unknown."""
    if not argv:
        return
    name = argv[0].text
    if argv[0].unknown:
        walk.lost(node, f"which program this is, is not known here: {argv[0].unknown}")
        return
    rest = [word.text for word in argv[1:]]
    method = _BUILT_IN.get(name)
    if name in walk.shell.functions:
        _function(walk, node, name, argv[1:])
    elif method is not None:
        method(walk, node, argv[1:])
    elif name in NEEDLESS:
        walk.became(node, NEEDLESS[name])
    elif name == "rm":
        caches = [one for one in rest if not one.startswith("-") and CACHES.search(one)]
        if caches:
            walk.became(
                node,
                "the compile cache stays: what it holds is found by what it depends on, so it is never stale",
            )
        else:
            walk.lost(node, "a run deletes nothing before it starts")
    else:
        _program(walk, node, argv)


def _program(walk: Walk, node: Any, argv: list[Word]) -> None:
    wrappers: list[Word] = []
    rest = list(argv)
    ends = False
    shell = walk.shell
    changed = False
    while rest:
        name = os.path.basename(rest[0].text)
        if name in NOHUP:
            ends = ends or name == "exec"
            if name == "nohup":
                walk.became(node, "nohup, & and disown are not needed: a run outlives every terminal")
            elif name not in ("exec", "command", "builtin"):
                walk.became(node, f"{name} is not needed: a run has a session of its own")
            rest = rest[1:]
            while rest and rest[0].text.startswith("-") and name != "time":
                if name == "exec" and rest[0].text == "-a":
                    rest = rest[1:]
                rest = rest[1:]
        elif name == "env":
            rest, changed = _env(walk, rest[1:], changed)
        elif name in KEPT:
            taken = [rest.pop(0)]
            while rest and rest[0].text.startswith("-"):
                flag = rest.pop(0)
                taken.append(flag)
                if flag.text in KEPT[name] and rest:
                    taken.append(rest.pop(0))
            taken += [rest.pop(0) for _ in range(POSITIONAL.get(name, 0)) if rest]
            wrappers += taken
        elif name == "sudo":
            walk.lost(node, "sudo: a run is started as the user who deploys")
            rest = rest[1:]
            while rest and rest[0].text.startswith("-"):
                rest = rest[1:]
        else:
            break
    try:
        if not rest:
            return
        name = os.path.basename(rest[0].text)
        if rest[0].text in walk.shell.functions:
            _function(walk, node, rest[0].text, rest[1:])
        elif name in SHELLS or name.endswith((".sh", ".bash")):
            _script(walk, node, rest)
        elif name.endswith(".py") or (PROGRAM.fullmatch(name) and not _aside(rest)):
            walk.start(node, [*wrappers, *rest])
        elif name in ("mkdir", "touch", "ln", "cp", "mv", "chmod", "chown"):
            walk.lost(node, f"a run does no {name}: do it once on the host, if it is not done already")
        elif name == "conda" and len(rest) > 1 and rest[1].text == "run":
            walk.start(node, [*wrappers, *rest])
        elif name in ("tmux", "screen"):
            walk.lost(node, f"what {name} is told to start is not looked at; give the script that it starts")
        else:
            walk.lost(node, "a run starts one program, and this is another one")
    finally:
        walk.shell = shell
    if ends:
        raise Ends


def _aside(argv: list[Word]) -> bool:
    """A Python that is asked something, and trains nothing."""
    words = [word.text for word in argv[1:]]
    if os.path.basename(argv[0].text) in ("uv", "poetry", "pipenv"):
        return words[:1] != ["run"]
    if os.path.basename(argv[0].text) == "accelerate":
        return words[:1] != ["launch"]
    return (
        words[:1] in (["-V"], ["--version"], ["-c"])
        or words[:2] in (["-m", "pip"], ["-m", "venv"])
        or not words
    )


def _env(walk: Walk, rest: list[Word], changed: bool) -> tuple[list[Word], bool]:
    """env's own words: variables for what follows."""
    if not changed:
        walk.shell = walk.shell.copy()
    while rest:
        text = rest[0].text
        if text in ("-i", "-", "--ignore-environment"):
            for name in list(walk.shell.exported):
                walk.shell.unset(name)
        elif text in ("-u", "--unset") and len(rest) > 1:
            walk.shell.unset(rest[1].text)
            rest = rest[1:]
        elif text.startswith("--unset="):
            walk.shell.unset(text.partition("=")[2])
        elif re.match(r"[A-Za-z_]\w*=", text):
            name, _, given = text.partition("=")
            if rest[0].unknown:
                walk.shell.unsure[name] = rest[0].unknown
            else:
                walk.shell.assign(name, given)
            walk.shell.exported.add(name)
        elif text == "--":
            rest = rest[1:]
            break
        elif text.startswith("-"):
            raise Unknown(f"env {text} is not understood")
        else:
            break
        rest = rest[1:]
    return rest, True


def _known(words: list[Word]) -> list[str]:
    for word in words:
        if word.unknown:
            raise Unknown(word.unknown)
    return [word.text for word in words]


def _function(walk: Walk, node: Any, name: str, arguments: list[Word]) -> None:
    body, _ = walk.shell.functions[name]
    shell = walk.shell
    before = (shell.arguments, shell.asked_arguments)
    walk._depth += 1
    if walk._depth > 8:
        walk._depth -= 1
        raise Unknown("it calls itself")
    shell.arguments = _known(arguments)
    shell.scopes.append({})
    try:
        walk.statement(body)
    except Ends:
        if not _returns(body):
            raise
    finally:
        shell.leave()
        walk._depth -= 1
        shell.arguments, shell.asked_arguments = before


def _returns(body: Any) -> bool:
    """Whether what has ended in a function is the function: it has return in it, and no exit."""
    text = body.text
    return re.search(rb"\breturn\b", text) is not None and re.search(rb"\b(exit|exec)\b", text) is None


def _script(walk: Walk, node: Any, argv: list[Word]) -> None:
    """Another script, or a text: in a bash of its own, which knows exported variables only."""
    words = list(argv)
    text: str | None = None
    if os.path.basename(words[0].text) in SHELLS:
        words = words[1:]
        while words and words[0].text.startswith("-"):
            flag = words.pop(0).text
            if flag.endswith("c") and words:
                text = _known(words[:1])[0]
                words = words[1:]
                break
    else:
        words = list(argv)
    if text is None and not words:
        raise Unknown("a shell without a script is not carried over")
    plain = _known(words)
    shell = walk.shell
    inner = shell.copy()
    for name in [*inner.variables, *inner.unsure]:
        if name not in inner.exported:
            inner.variables.pop(name, None)
            inner.unsure.pop(name, None)
    inner.arrays, inner.functions = {}, {}
    inner.zero = plain[0] if plain else "bash"
    inner.arguments = plain[1:]
    if text is None:
        data = shell.place.read(shell.absolute(plain[0]))
        if data is None:
            raise Unknown(f"there is no {plain[0]} on the host")
    else:
        data = text.encode("utf-8", "surrogateescape")

    walk.shell, asked = inner, shell.asked_arguments
    try:
        walk.script(data, os.path.basename(plain[0]) if text is None else f"line {node.start_point[0] + 1}")
    except Ends:
        pass
    finally:
        walk.shell, shell.asked_arguments = shell, asked


# -- what bash does itself ---------------------------------------------------------------------------------


def _cd(walk: Walk, node: Any, words: list[Word]) -> None:
    plain = [word for word in words if word.text not in ("--", "-P", "-L")]
    shell = walk.shell
    walk.moved = True
    if plain and plain[0].unknown:
        shell.directory_unsure = plain[0].unknown
        return
    to = plain[0].text if plain else (shell.get("HOME") or "/")
    if to == "-":
        shell.directory_unsure = "cd - is not understood"
        return
    if shell.directory_unsure and not to.startswith("/"):
        return
    shell.directory = os.path.normpath(os.path.join(shell.directory, to))
    shell.directory_unsure = ""


def _source(walk: Walk, node: Any, words: list[Word]) -> None:
    plain = _known(words)
    if not plain:
        return
    path = walk.shell.absolute(plain[0])
    if (
        os.path.basename(path) == "activate"
        and len(plain) == 1
        and not os.path.basename(os.path.dirname(os.path.dirname(path))).startswith(
            ("conda", "miniconda", "anaconda", "miniforge", "mambaforge")
        )
    ):
        prefix = os.path.dirname(os.path.dirname(os.path.normpath(path)))
        _prepend(walk, prefix)
        walk.shell.assign("VIRTUAL_ENV", prefix)
        walk.shell.exported.add("VIRTUAL_ENV")
        walk.shell.unset("PYTHONHOME")
        return
    if os.path.basename(path) == "activate":  # conda's own, with an environment or without
        root = os.path.dirname(os.path.dirname(path))
        _conda_activate(walk, root, plain[1] if len(plain) > 1 else "base")
    elif path.endswith("/etc/profile.d/conda.sh"):
        walk.shell.assign("_CONDA_ROOT", path[: -len("/etc/profile.d/conda.sh")])
    elif RC.search(path):
        walk.lost(node, "what it sets for a terminal is not looked at")
    else:
        data = walk.shell.place.read(path)
        if data is None:
            walk.lost(node, f"there is no {plain[0]} on the host, so what it would set is not known")
            return
        before = walk.shell.arguments
        walk.shell.arguments = plain[1:] or before
        try:
            walk.script(data, os.path.basename(path))
        except Ends:
            pass
        finally:
            walk.shell.arguments = before


def _prepend(walk: Walk, prefix: str) -> None:
    walk.shell.assign("PATH", f"{prefix}/bin:{walk.shell.get('PATH') or ''}")
    walk.shell.exported.add("PATH")


def _conda(walk: Walk, node: Any, words: list[Word]) -> None:
    plain = _known(words)
    if plain[:1] == ["run"]:
        walk.start(node, [Word("conda"), *words])
        return
    if plain[:1] != ["activate"]:
        walk.lost(node, "a run does not do it")
        return
    root = walk.shell.variables.get("_CONDA_ROOT")
    if root is None:
        found = walk.shell.place.which("conda", walk.shell.get("PATH") or "", walk.shell.here())
        home = walk.shell.get("HOME") or ""
        usual = [f"{home}/{one}" for one in ("miniconda3", "anaconda3", "miniforge3")] + ["/opt/conda"]
        roots = [os.path.dirname(os.path.dirname(walk.shell.place.real(found)))] if found else usual
        root = next((one for one in roots if walk.shell.place.test("-d", one)), None)
    if root is None:
        walk.lost(
            node, "where conda lies on the host is not known: write its python's whole path into command:"
        )
        return
    _conda_activate(walk, root, plain[1] if len(plain) > 1 else "base")
    walk.became(node, "PATH and CONDA_PREFIX; what the environment's own activate.d does is not carried over")


def _conda_activate(walk: Walk, root: str, name: str) -> None:
    prefix = name if "/" in name else root if name == "base" else f"{root}/envs/{name}"
    _prepend(walk, prefix)
    for key, given in (("CONDA_PREFIX", prefix), ("CONDA_DEFAULT_ENV", name)):
        walk.shell.assign(key, given)
        walk.shell.exported.add(key)


def _set(walk: Walk, node: Any, words: list[Word]) -> None:
    plain = _known(words)
    if plain[:1] == ["--"]:
        walk.shell.arguments = plain[1:]
        return
    for flag in plain:
        if flag.startswith("-") and "a" in flag[1:] and not flag.startswith("-o"):
            walk.shell.all_exported = True
        if flag.startswith("+") and "a" in flag[1:]:
            walk.shell.all_exported = False
    if plain:
        walk.became(node, "not needed: a run ends with its program's exit code")


def _ulimit(walk: Walk, node: Any, words: list[Word]) -> None:
    plain = _known(words)
    flag, given = ("-f", "") if not plain else (plain[0], plain[1] if len(plain) > 1 else "")
    soft, hard = "S" in flag, "H" in flag
    key = "-" + flag.replace("S", "").replace("H", "").lstrip("-")
    kind = LIMITS.get(key)
    number = None if kind is None else "unlimited" if given == "unlimited" else None
    if kind and given.isdigit() and (kind[1] or given == "0"):
        number = str(int(given) * (kind[1] or 1))
    if kind is None or number is None:
        raise Unknown("this limit is not carried over; set it on the host (/etc/security/limits.d)")
    both = f"{number}:" if soft and not hard else f":{number}" if hard and not soft else number
    walk.limits = [one for one in walk.limits if not one.startswith(f"--{kind[0]}=")]
    walk.limits.append(f"--{kind[0]}={both}")
    walk.became(node, f"prlimit --{kind[0]}={both} before the command")


def _ends(walk: Walk, node: Any, words: list[Word]) -> None:
    raise Ends


def _shift(walk: Walk, node: Any, words: list[Word]) -> None:
    count = int(words[0].text) if words and words[0].text.isdigit() else 1
    walk.shell.ask_arguments()
    walk.shell.arguments = walk.shell.arguments[count:]


def _eval(walk: Walk, node: Any, words: list[Word]) -> None:
    text = " ".join(word.text for word in words)
    hook = re.search(r"(\S+)/bin/conda\b.*shell\.\w+ hook|conda shell\.\w+ hook", text)
    if hook:
        if hook[1]:
            walk.shell.assign("_CONDA_ROOT", hook[1].removeprefix("$(").strip("\"'"))
        return
    walk.script(" ".join(_known(words)).encode("utf-8", "surrogateescape"), f"line {node.start_point[0] + 1}")


def _nothing(walk: Walk, node: Any, words: list[Word]) -> None:
    walk.lost(node, "it is not carried over")


_BUILT_IN = {
    "cd": _cd, "pushd": _cd, "source": _source, ".": _source, "conda": _conda, "mamba": _conda,
    "micromamba": _conda, "set": _set, "ulimit": _ulimit, "exit": _ends, "return": _ends, "shift": _shift,
    "eval": _eval, "umask": _nothing, "shopt": _nothing, "alias": _nothing, "module": _nothing,
    "read": _nothing, "let": _nothing, "popd": _nothing,
}  # fmt: skip
