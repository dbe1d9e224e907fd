"""The parts of a word, from the tree of tree-sitter-bash: what is quoted, what is not, what is expanded."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from deploy.bash_shell import Shell, Unknown

SPACE = " \t\n"
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f",
            "v": "\v", "\\": "\\", "'": "'", '"': '"', "?": "?"}  # fmt: skip


@dataclass(frozen=True)
class Literal:
    text: str
    quoted: bool


@dataclass(frozen=True)
class Hole:
    """Something to be expanded."""

    node: Any
    quoted: bool


Part = Literal | Hole


def touching(nodes: Sequence[Any], whole: Any) -> list[list[Any]]:
    """The nodes of one command in groups that are one word each: the grammar cuts some at a backslash."""
    found: list[list[Any]] = []
    for node in nodes:
        if found:
            between = whole.text[
                found[-1][-1].end_byte - whole.start_byte : node.start_byte - whole.start_byte
            ]
            if not between.replace(b"\\\n", b"") or (between == b"\n" and found[-1][-1].text.endswith(b"\\")):
                found[-1].append(node)
                continue
        found.append([node])
    return found


def check_whole(node: Any) -> None:
    """Raise Unknown if the grammar has left out a part of a command, as it does with an escaped blank."""
    following = node.next_sibling
    parts = [*node.children, *([following] if following is not None else [])]
    data, offset = (node.parent.text, node.parent.start_byte) if node.parent else (node.text, node.start_byte)
    for one, other in pairwise(parts):
        between = data[one.end_byte - offset : other.start_byte - offset].replace(b"\\\n", b"")
        if between.strip():
            raise Unknown("a part of it is not understood")


def parts(node: Any, quoted: bool) -> Iterator[Part]:
    kind, text = node.type, node.text.decode("utf-8", "surrogateescape")
    if kind in ("word", "number", "variable_name", "regex", "test_operator", "file_descriptor"):
        if node.named_child_count and kind == "number":
            raise Unknown(f"{text} is not understood")
        yield from _bare(text)
    elif kind == "raw_string":
        yield Literal(text[1:-1], True)
    elif kind == "ansi_c_string":
        yield Literal(ansi_c(text[2:-1]), True)
    elif kind in ("string", "translated_string"):
        yield from _double(node.children[-1] if kind == "translated_string" else node)
    elif kind == "concatenation":
        yield from gapped(node.children, node.start_byte, node.end_byte, node)
    elif kind in ("simple_expansion", "expansion", "command_substitution", "arithmetic_expansion"):
        yield Hole(node, quoted)
    elif kind == "brace_expression":
        yield from _bare(text)
    elif kind == "command_name":
        yield from parts(node.children[0], quoted)
    elif kind == "process_substitution":
        raise Unknown(f"{text} is a pipe to another program")
    else:
        raise Unknown(f"{text} is not understood ({kind.replace('_', ' ')})")


def _source(node: Any) -> tuple[bytes, int]:
    """The bytes of a node, and where they begin."""
    return node.text, node.start_byte


def gapped(children: Any, start: int, end: int, node: Any) -> Iterator[Part]:
    """Parts of several nodes, with what lies between them, which the grammar leaves out."""
    data, offset = _source(node)
    at = start
    for child in children:
        if child.start_byte > at:
            yield from _bare(data[at - offset : child.start_byte - offset].decode("utf-8", "surrogateescape"))
        if child.is_named:
            yield from parts(child, False)
        else:
            yield from _bare(child.text.decode("utf-8", "surrogateescape"))
        at = child.end_byte
    if end > at:
        yield from _bare(data[at - offset : end - offset].decode("utf-8", "surrogateescape"))


def _bare(text: str) -> Iterator[Literal]:
    """A text without quotes: a backslash quotes the sign after it, and makes nothing of a line break.

    An expansion that the grammar has not seen in it raises Unknown.
    """
    if re.search(r"(?<!\\)(?:\\\\)*(?:\$[\w{(@*#?!-]|`)", text):
        raise Unknown(f"{text} is not understood")
    for match in re.finditer(r"\\(?P<one>.)|\\$|[^\\]+", text, re.DOTALL):
        if match["one"] is not None:
            if match["one"] != "\n":
                yield Literal(match["one"], True)
        elif match[0] != "\\":  # (which ends a node before a line break)
            yield Literal(match[0], False)


def _double(node: Any) -> Iterator[Part]:
    """Between double quotes, where a backslash quotes only what would mean something there."""
    data, offset = _source(node)
    at, end, several = node.start_byte + 1, node.end_byte - 1, False
    found: list[Part] = []

    def literal(until: int) -> None:
        if until > at:
            text = data[at - offset : until - offset].decode("utf-8", "surrogateescape")
            found.append(Literal(re.sub(r'\\([$`"\\\n])', lambda m: "" if m[1] == "\n" else m[1], text,
                                        flags=re.DOTALL), True))  # fmt: skip

    for child in node.named_children:
        if child.type == "string_content":
            continue
        # (The grammar gives a blank before "$" to the expansion behind it.)
        literal(child.start_byte + len(child.text) - len(child.text.lstrip()))
        found.append(Hole(child, True))
        several = several or _is_list(child)
        at = child.end_byte
    literal(end)
    if not found or not several:
        found.append(Literal("", True))
    yield from found


def ansi_c(text: str) -> str:
    """Between $' and '."""

    def one(match: re.Match[str]) -> str:
        letter = match[1]
        if letter in _ESCAPES:
            return _ESCAPES[letter]
        code = int(letter[1:], 16) if letter[0] in "xuU" and len(letter) > 1 else None
        code = int(letter, 8) & 0xFF if letter[0] in "01234567" else code
        if code is not None:
            if code == 0 or code > sys.maxunicode:
                raise Unknown(f"$'{text}' is not understood")
            one_byte = letter[0] not in "uU" and code > 0x7F
            return bytes([code]).decode("utf-8", "surrogateescape") if one_byte else chr(code)
        if letter[0] == "c" and len(letter) > 1:
            return chr(ord(letter[1].upper()) ^ 64)
        return f"\\{letter}"

    pattern = r"\\([0-7]{1,3}|x[0-9A-Fa-f]{1,2}|u[0-9A-Fa-f]{1,4}|U[0-9A-Fa-f]{1,8}|c.|.)"
    made = re.sub(pattern, one, text, flags=re.DOTALL)
    try:  # bytes that are given one by one may be one sign together
        return made.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise Unknown(f"$'{text}' is not understood") from None


def _is_list(node: Any) -> bool:
    """Whether an expansion becomes several words even between quotes."""
    text = node.text.decode("utf-8", "surrogateescape").lstrip()
    return node.type in ("simple_expansion", "expansion") and (
        text in ("$@", "${@}") or re.match(r"\$\{[A-Za-z_]\w*\[@\]|\$\{@", text) is not None
    )


# -- braces and tildes -------------------------------------------------------------------------------------


def braces(whole: list[Part]) -> list[list[Part]]:
    """``a{b,c}`` becomes ab and ac, before anything else; one part for each sign makes that simple."""
    signs: list[Part] = []
    for part in whole:
        if isinstance(part, Literal) and not part.quoted:
            signs += [Literal(sign, False) for sign in part.text]
        else:
            signs.append(part)
    found = [joined(one) for one in _braced(signs)]
    for one in found if len(found) > 1 else []:
        for part, following in pairwise(one):
            # $V{a,b} is $Va and $Vb.
            if (
                isinstance(part, Hole)
                and part.node.type == "simple_expansion"
                and not part.quoted
                and (
                    isinstance(following, Literal)
                    and not following.quoted
                    and re.match(r"\w", following.text)
                )
            ):
                raise Unknown("a variable before braces is not understood; write ${NAME}")
    return found


def _bare_sign(part: Part) -> str:
    return part.text if isinstance(part, Literal) and not part.quoted else ""


def _braced(signs: list[Part]) -> list[list[Part]]:
    for start, part in enumerate(signs):
        if _bare_sign(part) != "{":
            continue
        depth, commas, end = 0, [], None
        for at in range(start, len(signs)):
            sign = _bare_sign(signs[at])
            depth += (sign == "{") - (sign == "}")
            if sign == "," and depth == 1:
                commas.append(at)
            if sign == "}" and depth == 0:
                end = at
                break
        if end is None:
            continue
        if commas:
            edges = [start, *commas, end]
            inner = [signs[a + 1 : b] for a, b in pairwise(edges)]
            choices = [choice for one in inner for choice in _braced(one)]
        else:
            text = "".join(_bare_sign(one) or "\0" for one in signs[start + 1 : end])
            choices = [[Literal(word, False)] for word in _sequence(text)]
            if not choices:
                continue
        return [signs[:start] + one + rest for one in choices for rest in _braced(signs[end + 1 :])]
    return [signs]


def _sequence(text: str) -> list[str]:
    """``1..3``; none if it is no sequence."""
    match = re.fullmatch(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?", text)
    if not match:
        letters = re.fullmatch(r"([A-Za-z])\.\.([A-Za-z])", text)
        if not letters:
            return []
        first, last = ord(letters[1]), ord(letters[2])
        return [
            chr(one) for one in range(first, last + (1 if last >= first else -1), 1 if last >= first else -1)
        ]
    first, last, step = int(match[1]), int(match[2]), abs(int(match[3] or 1)) or 1
    if abs(last - first) // step > 1000:
        raise Unknown(f"{{{text}}} makes more than a thousand words")
    padded = any(re.match(r"-?0\d", one) for one in (match[1], match[2]))
    width = max(len(match[1]), len(match[2])) if padded else 0
    numbers = range(first, last + (1 if last >= first else -1), step if last >= first else -step)
    return [f"{one:0{width}d}" for one in numbers]


def joined(signs: list[Part]) -> list[Part]:
    out: list[Part] = []
    for part in signs:
        before = out[-1] if out else None
        if isinstance(part, Literal) and isinstance(before, Literal) and part.quoted == before.quoted:
            out[-1] = Literal(before.text + part.text, part.quoted)
        else:
            out.append(part)
    return out


def tilde(parts: list[Part], shell: Shell, assignment: bool = False) -> list[Part]:
    parts = joined(parts)
    first = parts[0] if parts else None
    if not isinstance(first, Literal) or first.quoted:
        return parts
    looks = _ASSIGNMENT.match(first.text)
    if assignment or looks:
        head = looks[0] if looks and not assignment else ""
        pieces = first.text[len(head) :].split(":")
        done = [
            _home(one, shell, last=at == len(pieces) - 1 and len(parts) > 1) for at, one in enumerate(pieces)
        ]
        return [Literal(head + ":".join(done), False), *parts[1:]]
    return [Literal(_home(first.text, shell, last=len(parts) > 1), False), *parts[1:]]


def _home(text: str, shell: Shell, last: bool) -> str:
    if not text.startswith("~"):
        return text
    user, slash, rest = text[1:].partition("/")
    if ":" in user:
        raise Unknown(f"{text} is not understood")
    if last and not slash:  # ~"x": quoted signs belong to the name
        return text
    if user == "":
        home = shell.get("HOME")
        return text if home is None else home + slash + rest
    if user == "+":
        return shell.here() + slash + rest
    raise Unknown(f"where ~{user} is, is not known here")
