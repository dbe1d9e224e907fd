"""What bash makes of a word: its variables, quotes, tildes and braces, evaluated without any shell.

tree-sitter-bash parses; what is here gives its tree a meaning, as bash's manual does ("Shell Expansions").
What cannot be known without running something (a command's output, the files that a pattern matches) raises
Unknown, which says why: nothing is ever guessed. tests/unit/test_bash_words.py holds it against bash itself.
"""

from __future__ import annotations

import fnmatch
import re
from itertools import pairwise
from typing import Any

from deploy.bash_arithmetic import arithmetic
from deploy.bash_parts import SPACE, Literal, Part, braces, gapped, parts, tilde
from deploy.bash_shell import Shell, Unknown

Run = Any  # evaluates a command substitution: (Shell, node) -> str


def words(node: Any, shell: Shell, run: Run) -> list[str]:
    """The arguments that one word of a command becomes: a node, or several that touch. Raises Unknown."""
    found: list[str] = []
    nodes = node if isinstance(node, list) else [node]
    for one, following in pairwise(nodes):
        if one.type == "concatenation" and one.text.endswith(b"$") and re.match(rb"[\w{(]", following.text):
            raise Unknown(f"{(one.text + following.text).decode(errors='replace')} is not understood")
    whole = [part for one in nodes for part in parts(one, False)]
    for part in whole:
        if isinstance(part, Literal) and not part.quoted and re.search(rf"[{SPACE}]", part.text):
            raise Unknown(f"{b''.join(one.text for one in nodes).decode(errors='replace')} is not understood")
    for made in braces(whole):
        for one in fields(tilde(made, shell), shell, run):
            if _globs(one):
                text = "".join(part for part, _ in one)
                raise Unknown(f"the files that {text} matches are only known when it runs")
            found.append("".join(part for part, _ in one))
    return found


def value(node: Any, shell: Shell, run: Run) -> str:
    """What a word becomes after NAME=, where nothing is split and no file is looked for. Raises Unknown."""
    if node is None:
        return ""
    out = ""
    for part in tilde(list(parts(node, False)), shell, assignment=True):
        if isinstance(part, Literal):
            out += part.text
        else:
            out += " ".join(expand(part.node, shell, run, True)[0])
    return out


# -- expansions --------------------------------------------------------------------------------------------

Field = list[tuple[str, bool]]


def fields(whole: list[Part], shell: Shell, run: Run) -> list[Field]:
    out: list[Field] = []
    current: Field | None = None
    for part in whole:
        if isinstance(part, Literal):
            if part.text or part.quoted:
                current = [*(current or []), (part.text, part.quoted)]
            continue
        values, several = expand(part.node, shell, run, part.quoted)
        if part.quoted:
            for at, one in enumerate(values):
                if at and current is not None:
                    out.append(current)
                    current = None
                current = [*(current or []), (one, True)]
            continue
        if "IFS" in shell.variables and values and any(values):
            raise Unknown("it is split by IFS, which the script sets")
        for at, one in enumerate(values):
            if at and several and current is not None:
                out.append(current)
                current = None
            for piece in re.findall(rf"[{SPACE}]+|[^{SPACE}]+", one):
                if piece[0] in SPACE:
                    if current is not None:
                        out.append(current)
                    current = None
                else:
                    current = [*(current or []), (piece, False)]
    return out if current is None else [*out, current]


def _globs(one: Field) -> bool:
    text = "".join(part if not quoted else "x" for part, quoted in one)
    return bool(re.search(r"[*?]|\[[^]]+\]", text))


def expand(node: Any, shell: Shell, run: Run, quoted: bool) -> tuple[list[str], bool]:
    """(the values of an expansion, whether each is a word of its own). Raises Unknown."""
    text = node.text.decode("utf-8", "surrogateescape").lstrip()
    if node.type == "simple_expansion":
        name = text[1:]
        if name == "@" or (name == "*" and not quoted):
            shell.ask_arguments()
            return list(shell.arguments), True
        if not re.fullmatch(r"\w+|[@*#?$!_-]", name):
            raise Unknown(f"{text} is not understood")
        if name[0].isdigit() and len(name) > 1:  # $1x is $1 and x
            return [(shell.get(name[0]) or "") + name[1:]], False
        return [shell.get(name) or ""], False
    if node.type == "command_substitution":
        return [run(shell, node)], False
    if node.type == "arithmetic_expansion":
        return [str(arithmetic(text[3:-2] if text.startswith("$((") else text[2:-1], shell))], False
    if node.type == "expansion":
        found_values, several = _braced_expansion(node, text, shell, run)
        if several and quoted and re.match(r"\$\{(?:[A-Za-z_]\w*\[\*\]|\*)", text):
            return [" ".join(found_values)], False
        return found_values, several
    raise Unknown(f"{text} is not understood")


def _braced_expansion(node: Any, text: str, shell: Shell, run: Run) -> tuple[list[str], bool]:
    match = re.match(
        r"\$\{(?P<count>#?)(?P<name>[A-Za-z_]\w*|[0-9]+|[@*#])(?:\[(?P<index>[^]]*)\])?(?P<rest>.*)\}\Z",
        text, re.DOTALL,
    )  # fmt: skip
    if not match or text.startswith("${!"):
        raise Unknown(f"{text} is not understood")
    name, index, rest = match["name"], match["index"], match["rest"]
    values, several = _named(name, index, shell)
    if match["count"]:
        if rest:
            raise Unknown(f"{text} is not understood")
        return [str(len(values or [])) if several else str(len(values[0] if values else ""))], False
    if not rest:
        return (values if several else values[:1] or [""]), several
    operator = re.match(r":?[-=+?]|##?|%%?|//?|\^\^?|,,?|:", rest)
    if not operator:
        raise Unknown(f"{text} is not understood")
    op, present = operator[0], bool(values)
    begin = node.end_byte - len(text.encode("utf-8", "surrogateescape"))
    start = begin + match.start("rest") + len(op)  # (all before it is ASCII)
    operand = [child for child in node.children if child.start_byte >= start and child.type != "}"]
    raw = rest[len(op) :]

    def other() -> str:
        if not raw:
            return ""
        if any(child.type not in _PLAIN for child in operand):
            raise Unknown(f"{text} is not understood")
        out = ""
        for part in tilde(list(gapped(operand, start, node.end_byte - 1, node)), shell):
            one = [part.text] if isinstance(part, Literal) else expand(part.node, shell, run, True)[0]
            out += " ".join(one)
        return out

    if op in (":-", "-", ":=", "="):
        use = not present or (op[0] == ":" and not "".join(values))
        if not use:
            return values, several
        chosen = other()
        if "=" in op:
            shell.assign(name, chosen)
        return [chosen], False
    if op in (":+", "+"):
        use = present and not (op[0] == ":" and not "".join(values))
        return ([other()] if use else [""]), False
    if op in (":?", "?"):
        if not present or (op[0] == ":" and not values[0]):
            raise Unknown(f"{name} is not set, and the script refuses to go on without it")
        return values, several
    if "$" in raw or "`" in raw:
        raise Unknown(f"{text} is not understood")
    return [_changed(one, op, raw, text) for one in values] or [""], several


_PLAIN = ("word", "number", "concatenation", "string", "raw_string", "ansi_c_string", "simple_expansion",
          "expansion", "command_substitution", "arithmetic_expansion", "variable_name", "regex")  # fmt: skip


def _named(name: str, index: str | None, shell: Shell) -> tuple[list[str], bool]:
    """(the values of what is between ${ and }, none if it is not set; whether each is a word)."""
    if name in ("@", "*"):
        shell.ask_arguments()
        return list(shell.arguments), True
    if name in shell.unsure:
        raise Unknown(shell.unsure[name])
    if index in ("@", "*"):
        if name in shell.arrays:
            return list(shell.arrays[name]), True
        one = shell.get(name)
        return ([] if one is None else [one]), True
    if index is not None and name != "BASH_SOURCE":
        if not re.fullmatch(r"-?\d+", index):
            raise Unknown(f"which one ${{{name}[{index}]}} is, is not known here")
        known = shell.arrays.get(name) or ([] if shell.get(name) is None else [str(shell.get(name))])
        place = int(index)
        return ([known[place]] if -len(known) <= place < len(known) else []), False
    one = shell.get(name)
    return ([] if one is None else [one]), False


def _changed(text: str, op: str, raw: str, whole: str) -> str:
    if op in ("#", "##", "%", "%%"):
        lengths = range(len(text) + 1) if len(op) == 1 else range(len(text), -1, -1)
        regex = pattern(raw)
        for length in lengths:
            piece = text[:length] if op[0] == "#" else text[len(text) - length :]
            if regex.fullmatch(piece):
                return text[length:] if op[0] == "#" else text[: len(text) - length]
        return text
    if op in ("/", "//"):
        before, _, after = raw.partition("/")
        if re.search(r"[*?\[\\'\"#%&]", raw):
            raise Unknown(f"{whole} is not understood")
        return text.replace(before, after, 1 if op == "/" else -1) if before else text
    if op in ("^^", ",,") and not raw:
        return text.upper() if op == "^^" else text.lower()
    if op == ":" and (span := re.fullmatch(r"\s*(\d+)(?::(\d+))?", raw)):
        start = int(span[1])
        return text[start : start + int(span[2])] if span[2] is not None else text[start:]
    raise Unknown(f"{whole} is not understood")


def pattern(raw: str) -> re.Pattern[str]:
    """A pattern of bash, without quotes in it, as a regular expression."""
    if re.search(r"[\\'\"]", raw):
        raise Unknown(f"the pattern {raw} is not understood")
    return re.compile(fnmatch.translate(raw), re.DOTALL)
