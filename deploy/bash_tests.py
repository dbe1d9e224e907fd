"""Conditions of a bash script, and the output of commands that only compute with words. Nothing is run."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from deploy.bash_parts import touching
from deploy.bash_shell import Shell, Unknown
from deploy.bash_words import Run, pattern, value, words

FILES = ("-e", "-f", "-d", "-r", "-w", "-x", "-s", "-L", "-h")
NUMBERS = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}


def truth(node: Any, shell: Shell, run: Run) -> bool | None:
    """Whether a condition holds; None where only running it would tell. Raises Unknown, which is the same."""
    kind = "" if node is None else node.type
    if kind == "test_command":
        inner = [
            child for child in node.children if child.type not in ("[", "]", "[[", "]]", "((", "))", "test")
        ]
        if node.children[0].type == "((" or len(inner) != 1:
            return None
        return _test(inner[0], shell, run, node.children[0].type == "[[")
    if kind == "negated_command":
        found = truth(node.named_children[-1], shell, run)
        return None if found is None else not found
    if kind == "list":
        left, right = (truth(one, shell, run) for one in (node.children[0], node.children[-1]))
        if node.children[1].type == "&&":
            return False if left is False else right if left else None
        return True if left is True else right if left is False else None
    if kind == "redirected_statement":
        return truth(node.child_by_field_name("body"), shell, run)
    if kind != "command":
        return None
    argv = _argv(node, shell, run)
    if argv[:1] in (["true"], [":"]):
        return True
    if argv[:1] == ["false"]:
        return False
    if argv[:1] == ["test"] and len(argv) == 3 and argv[1] in (*FILES, "-z", "-n"):
        return _unary(argv[1], argv[2], shell)
    if argv[:2] == ["command", "-v"] and len(argv) == 3:
        return shell.place.which(argv[2], shell.get("PATH") or "", shell.here()) is not None
    return None


def _test(node: Any, shell: Shell, run: Run, double: bool) -> bool | None:
    kind = node.type
    if kind == "unary_expression":
        operator, operand = node.children[0], node.children[-1]
        sign = operator.text.decode()
        if sign == "!":
            found = _test(operand, shell, run, double)
            return None if found is None else not found
        if sign == "-v":
            return shell.get(operand.text.decode()) is not None
        return _unary(sign, value(operand, shell, run), shell)
    if kind == "parenthesized_expression":
        return _test(node.named_children[0], shell, run, double)
    if kind == "binary_expression":
        left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
        sign = node.child_by_field_name("operator").text.decode()
        if sign in ("&&", "||", "-a", "-o"):
            one, two = (_test(part, shell, run, double) for part in (left, right))
            if sign in ("&&", "-a"):
                return False if False in (one, two) else None if None in (one, two) else True
            return True if True in (one, two) else None if None in (one, two) else False
        first, second = value(left, shell, run), value(right, shell, run)
        if sign in ("=", "=="):
            return _equal(first, second, right, double)
        if sign == "!=":
            found = _equal(first, second, right, double)
            return None if found is None else not found
        if sign in NUMBERS and all(re.fullmatch(r"-?\d+", one) for one in (first, second)):
            a, b = int(first), int(second)
            return {"-eq": a == b, "-ne": a != b, "-lt": a < b, "-le": a <= b, "-gt": a > b, "-ge": a >= b}[
                sign
            ]
        return None
    return bool(value(node, shell, run))


def _equal(first: str, second: str, right: Any, double: bool) -> bool | None:
    if double and right.type not in ("string", "raw_string") and re.search(r"[*?\[\\]", second):
        return pattern(second).fullmatch(first) is not None
    return first == second


def _unary(sign: str, text: str, shell: Shell) -> bool | None:
    if sign in ("-z", "-n"):
        return (text == "") == (sign == "-z")
    if sign in FILES:
        return bool(text) and shell.place.test(sign, shell.absolute(text))
    return None


def case(node: Any, items: Sequence[Any], shell: Shell, run: Run) -> list[Any] | None:
    """The item of a case that holds, in a list; None where that is not known."""
    try:
        text = value(node.child_by_field_name("value"), shell, run)
        for item in items:
            if any(child.type in (";&", ";;&") for child in item.children):
                return None
            for one in item.children_by_field_name("value"):
                wanted = one.text.decode("utf-8", "surrogateescape")
                if one.type in ("string", "raw_string", "ansi_c_string"):
                    holds = value(one, shell, run) == text
                else:
                    holds = pattern(wanted).fullmatch(text) is not None
                if holds:
                    return [item]
    except Unknown:
        return None
    return []


def _argv(node: Any, shell: Shell, run: Run) -> list[str]:
    name = node.child_by_field_name("name")
    groups = touching(node.children_by_field_name("argument"), node)
    return [one for part in ([name] if name else [], *groups) for one in words(part, shell, run)]


def output(node: Any, shell: Shell, run: Run) -> str:
    """What $(…) becomes. Raises Unknown for all that would have to be run."""
    whole = node.text.decode("utf-8", "surrogateescape")
    inner = [child for child in node.named_children if child.type != "comment"]
    own = shell.copy()
    try:
        text = ""
        for one in inner:
            text += _said(one, own, run)
        return text.rstrip("\n")
    except _NotKnown:
        raise Unknown(f"{whole} is what a program says when it runs") from None


class _NotKnown(Exception):
    pass


def _said(node: Any, shell: Shell, run: Run) -> str:
    """The output of one command. `shell` is changed by cd."""
    if node is None:
        raise _NotKnown
    if node.type == "list" and node.children[1].type in ("&&", ";"):
        return _said(node.children[0], shell, run) + _said(node.children[-1], shell, run)
    if node.type == "redirected_statement":
        redirects = node.children_by_field_name("redirect")
        text = _said(node.child_by_field_name("body"), shell, run)
        silent = [one.text.decode().replace(" ", "") for one in redirects]
        if all(one in ("2>/dev/null", "2>&1") for one in silent):
            return text
        if all(
            one in (">/dev/null", "&>/dev/null", "2>&1", "2>/dev/null", ">/dev/null2>&1") for one in silent
        ):
            return ""
        raise _NotKnown
    if node.type != "command":
        raise _NotKnown
    argv = _argv(node, shell, run)
    if not argv:
        raise _NotKnown
    program, rest = argv[0], argv[1:]
    if rest[:1] == ["--"]:
        rest = rest[1:]
    if program == "dirname" and len(rest) == 1:
        return f"{_dirname(rest[0])}\n"
    if program == "basename" and len(rest) in (1, 2) and not rest[0].startswith("-"):
        name = os.path.basename(rest[0].rstrip("/")) or ("/" if rest[0] else "")
        suffix = rest[1] if len(rest) == 2 else ""
        return f"{name[: -len(suffix)] if suffix and name.endswith(suffix) and name != suffix else name}\n"
    if program == "pwd" and rest in ([], ["-L"]):
        return f"{shell.here()}\n"
    if program == "pwd" and rest == ["-P"]:
        return f"{shell.place.real(shell.here())}\n"
    if program == "cd" and len(rest) == 1 and rest[0] != "-":
        shell.directory = os.path.normpath(shell.absolute(rest[0]))
        return ""
    if program in ("realpath", "readlink") and len(rest) == (2 if program == "readlink" else 1):
        if program == "readlink" and rest[0] not in ("-f", "-e", "-m"):
            raise _NotKnown
        return f"{shell.place.real(shell.absolute(rest[-1]))}\n"
    if program == "echo" and not (rest and rest[0].startswith("-")) and not any("\\" in one for one in rest):
        return f"{' '.join(rest)}\n"
    if program == "printf" and len(rest) == 2 and rest[0] in ("%s", "%s\\n"):
        return rest[1]
    if program == "which" or (program == "command" and rest[:1] == ["-v"]):
        found = shell.place.which(rest[-1], shell.get("PATH") or "", shell.here())
        return f"{found}\n" if found else ""
    raise _NotKnown


def _dirname(path: str) -> str:
    stripped = path.rstrip("/")
    if not stripped:
        return "/" if path.startswith("/") else "."
    head, slash, _ = stripped.rpartition("/")
    return (head.rstrip("/") or "/") if slash else "."
