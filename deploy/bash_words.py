"""What bash makes of a word: its variables, quotes, tildes and braces, evaluated without any shell.

tree-sitter-bash parses; what is here gives its tree a meaning, as bash's manual does ("Shell Expansions").
What cannot be known without running something (a command's output, the files that a pattern matches) raises
Unknown, which says why: nothing is ever guessed. tests/unit/test_bash_words.py holds it against bash itself.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

SPACE = " \t\n"
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f",
            "v": "\v", "\\": "\\", "'": "'", '"': '"', "?": "?"}  # fmt: skip


class Unknown(Exception):
    """A word whose value cannot be known here; the message says why, as the end of a sentence."""


class Place(Protocol):
    """What evaluation may ask of the machine that the script is for. Nothing of it runs anything there."""

    def read(self, path: str) -> bytes | None: ...
    def test(self, operator: str, path: str) -> bool: ...
    def which(self, program: str, path: str, directory: str) -> str | None: ...
    def real(self, path: str) -> str: ...


@dataclass
class Shell:
    """The state of a bash at one point of a script. `unsure` are variables of which only that is known."""

    place: Place
    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    touched: set[str] = field(default_factory=set)  # what the script itself has set
    unsure: dict[str, str] = field(default_factory=dict)
    functions: dict[str, Any] = field(default_factory=dict)
    directory: str = "/"
    directory_unsure: str = ""  # why it is not known
    zero: str = "bash"
    arguments: list[str] = field(default_factory=list)
    asked_arguments: bool = False  # whether $1, $@ and the like were looked at
    all_exported: bool = False  # set -a

    def copy(self) -> Shell:
        return Shell(
            self.place, dict(self.variables), {key: list(value) for key, value in self.arrays.items()},
            set(self.exported), set(self.touched), dict(self.unsure), dict(self.functions), self.directory,
            self.directory_unsure, self.zero, list(self.arguments), self.asked_arguments, self.all_exported,
        )  # fmt: skip

    def assign(self, name: str, value: str | list[str]) -> None:
        self.unsure.pop(name, None)
        self.touched.add(name)
        if isinstance(value, list):
            self.variables.pop(name, None)
            self.arrays[name] = value
        elif name in self.arrays:
            self.arrays[name][:1] = [value]
        else:
            self.variables[name] = value
        if self.all_exported:
            self.exported.add(name)

    def unset(self, name: str) -> None:
        for known in (self.variables, self.arrays, self.unsure):
            known.pop(name, None)  # type: ignore[attr-defined]
        self.exported.discard(name)

    def get(self, name: str) -> str | None:
        """The value of a variable or parameter, None if it is not set. Raises Unknown."""
        if name in self.unsure:
            raise Unknown(self.unsure[name])
        if name == "0":
            return self.zero
        if name.isdigit():
            self.asked_arguments = True
            place = int(name)
            return self.arguments[place - 1] if place <= len(self.arguments) else None
        if name in ("@", "*"):
            self.asked_arguments = True
            return " ".join(self.arguments) if self.arguments else None
        if name == "#":
            self.asked_arguments = True
            return str(len(self.arguments))
        if name == "PWD":
            return self.here()
        if name == "BASH_SOURCE":
            return self.zero
        if name in ("?", "$", "!", "-", "_", "RANDOM", "SECONDS", "LINENO", "EPOCHSECONDS", "BASHPID",
                    "PPID", "OLDPWD", "SHLVL", "HOSTNAME", "UID", "EUID"):  # fmt: skip
            raise Unknown(f"${name} is another one at each start")
        if name in self.arrays:
            return self.arrays[name][0] if self.arrays[name] else None
        return self.variables.get(name)

    def here(self) -> str:
        if self.directory_unsure:
            raise Unknown(self.directory_unsure)
        return self.directory

    def absolute(self, path: str) -> str:
        return path if path.startswith("/") else os.path.join(self.here(), path)


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
Run = Any  # evaluates a command substitution: (Shell, node) -> str


def words(node: Any, shell: Shell, run: Run) -> list[str]:
    """The arguments that one word of a command becomes: a node, or several that touch. Raises Unknown."""
    found: list[str] = []
    nodes = node if isinstance(node, list) else [node]
    for one, following in zip(nodes, nodes[1:], strict=False):
        if one.type == "concatenation" and one.text.endswith(b"$") and re.match(rb"[\w{(]", following.text):
            raise Unknown(f"{(one.text + following.text).decode(errors='replace')} is not understood")
    whole = [part for one in nodes for part in _parts(one, False)]
    for part in whole:
        if isinstance(part, Literal) and not part.quoted and re.search(rf"[{SPACE}]", part.text):
            raise Unknown(f"{b''.join(one.text for one in nodes).decode(errors='replace')} is not understood")
    for parts in _braces(whole):
        for one in _fields(_tilde(parts, shell), shell, run):
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
    for part in _tilde(list(_parts(node, False)), shell, assignment=True):
        if isinstance(part, Literal):
            out += part.text
        else:
            out += " ".join(_expand(part.node, shell, run, True)[0])
    return out


def touching(nodes: Sequence[Any], whole: Any) -> list[list[Any]]:
    """The nodes of one command in groups that are one word each: the grammar cuts some at a backslash."""
    found: list[list[Any]] = []
    for node in nodes:
        if found:
            between = whole.text[found[-1][-1].end_byte - whole.start_byte : node.start_byte - whole.start_byte]
            if not between.replace(b"\\\n", b"") or (between == b"\n" and found[-1][-1].text.endswith(b"\\")):
                found[-1].append(node)
                continue
        found.append([node])
    return found


def check_whole(node: Any) -> None:
    """Raise Unknown if the grammar has left out a part of a command, as it does with a blank in backslashes."""
    following = node.next_sibling
    parts = [*node.children, *([following] if following is not None else [])]
    data, offset = (node.parent.text, node.parent.start_byte) if node.parent else (node.text, node.start_byte)
    for one, other in zip(parts, parts[1:], strict=False):
        between = data[one.end_byte - offset : other.start_byte - offset].replace(b"\\\n", b"")
        if between.strip():
            raise Unknown("a part of it is not understood")


# -- parts -------------------------------------------------------------------------------------------------


def _parts(node: Any, quoted: bool) -> Iterator[Part]:
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
        yield from _gapped(node.children, node.start_byte, node.end_byte, node)
    elif kind in ("simple_expansion", "expansion", "command_substitution", "arithmetic_expansion"):
        yield Hole(node, quoted)
    elif kind == "brace_expression":
        yield from _bare(text)
    elif kind == "command_name":
        yield from _parts(node.children[0], quoted)
    elif kind == "process_substitution":
        raise Unknown(f"{text} is a pipe to another program")
    else:
        raise Unknown(f"{text} is not understood ({kind.replace('_', ' ')})")


def _source(node: Any) -> tuple[bytes, int]:
    """The bytes of a node, and where they begin."""
    return node.text, node.start_byte


def _gapped(children: Any, start: int, end: int, node: Any) -> Iterator[Part]:
    """Parts of several nodes, with what lies between them, which the grammar leaves out."""
    data, offset = _source(node)
    at = start
    for child in children:
        if child.start_byte > at:
            yield from _bare(data[at - offset : child.start_byte - offset].decode("utf-8", "surrogateescape"))
        if child.is_named:
            yield from _parts(child, False)
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
        if letter[0] in "xuU" and len(letter) > 1:
            return chr(int(letter[1:], 16))
        if letter[0] in "01234567":
            return chr(int(letter, 8) & 0xFF)
        if letter[0] == "c" and len(letter) > 1:
            return chr(ord(letter[1].upper()) ^ 64)
        return f"\\{letter}"

    pattern = r"\\([0-7]{1,3}|x[0-9A-Fa-f]{1,2}|u[0-9A-Fa-f]{1,4}|U[0-9A-Fa-f]{1,8}|c.|.)"
    return re.sub(pattern, one, text, flags=re.DOTALL)


def _is_list(node: Any) -> bool:
    """Whether an expansion becomes several words even between quotes."""
    text = node.text.decode("utf-8", "surrogateescape").lstrip()
    return node.type in ("simple_expansion", "expansion") and (
        text in ("$@", "${@}") or re.match(r"\$\{[A-Za-z_]\w*\[@\]|\$\{@", text) is not None
    )


# -- braces and tildes -------------------------------------------------------------------------------------


def _braces(parts: list[Part]) -> list[list[Part]]:
    """``a{b,c}`` becomes ab and ac, before anything else; one part for each sign makes that simple."""
    signs: list[Part] = []
    for part in parts:
        if isinstance(part, Literal) and not part.quoted:
            signs += [Literal(sign, False) for sign in part.text]
        else:
            signs.append(part)
    found = [_joined(one) for one in _braced(signs)]
    for one in found if len(found) > 1 else []:
        for part, following in zip(one, one[1:], strict=False):
            # $V{a,b} is $Va and $Vb.
            if isinstance(part, Hole) and part.node.type == "simple_expansion" and not part.quoted and (
                isinstance(following, Literal) and not following.quoted and re.match(r"\w", following.text)
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
            inner = [signs[a + 1 : b] for a, b in zip(edges, edges[1:], strict=False)]
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
        return [chr(one) for one in range(first, last + (1 if last >= first else -1), 1 if last >= first else -1)]
    first, last, step = int(match[1]), int(match[2]), abs(int(match[3] or 1)) or 1
    if abs(last - first) // step > 1000:
        raise Unknown(f"{{{text}}} makes more than a thousand words")
    padded = any(re.match(r"-?0\d", one) for one in (match[1], match[2]))
    width = max(len(match[1]), len(match[2])) if padded else 0
    numbers = range(first, last + (1 if last >= first else -1), step if last >= first else -step)
    return [f"{one:0{width}d}" for one in numbers]


def _joined(signs: list[Part]) -> list[Part]:
    out: list[Part] = []
    for part in signs:
        before = out[-1] if out else None
        if isinstance(part, Literal) and isinstance(before, Literal) and part.quoted == before.quoted:
            out[-1] = Literal(before.text + part.text, part.quoted)
        else:
            out.append(part)
    return out


def _tilde(parts: list[Part], shell: Shell, assignment: bool = False) -> list[Part]:
    parts = _joined(parts)
    first = parts[0] if parts else None
    if not isinstance(first, Literal) or first.quoted:
        return parts
    looks = _ASSIGNMENT.match(first.text)
    if assignment or looks:
        head = looks[0] if looks and not assignment else ""
        pieces = first.text[len(head) :].split(":")
        done = [_home(one, shell, last=at == len(pieces) - 1 and len(parts) > 1) for at, one in enumerate(pieces)]
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


# -- expansions --------------------------------------------------------------------------------------------

Field = list[tuple[str, bool]]


def _fields(parts: list[Part], shell: Shell, run: Run) -> list[Field]:
    out: list[Field] = []
    current: Field | None = None
    for part in parts:
        if isinstance(part, Literal):
            if part.text or part.quoted:
                current = [*(current or []), (part.text, part.quoted)]
            continue
        values, several = _expand(part.node, shell, run, part.quoted)
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


def _expand(node: Any, shell: Shell, run: Run, quoted: bool) -> tuple[list[str], bool]:
    """(the values of an expansion, whether each is a word of its own). Raises Unknown."""
    text = node.text.decode("utf-8", "surrogateescape").lstrip()
    if node.type == "simple_expansion":
        name = text[1:]
        if name == "@" or (name == "*" and not quoted):
            shell.asked_arguments = True
            return list(shell.arguments), True
        if not re.fullmatch(r"\w+|[@*#?$!_-]", name):
            raise Unknown(f"{text} is not understood")
        if name[0].isdigit() and len(name) > 1:  # $1x is $1 and x
            return [(shell.get(name[0]) or "") + name[1:]], False
        return [shell.get(name) or ""], False
    if node.type == "command_substitution":
        return [run(shell, node)], False
    if node.type == "arithmetic_expansion":
        return [str(_arithmetic(text[3:-2] if text.startswith("$((") else text[2:-1], shell))], False
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
        for part in _tilde(list(_gapped(operand, start, node.end_byte - 1, node)), shell):
            one = [part.text] if isinstance(part, Literal) else _expand(part.node, shell, run, True)[0]
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
        shell.asked_arguments = True
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


def _arithmetic(text: str, shell: Shell) -> int:
    """Whole numbers with + - * / % and brackets."""
    tokens = re.findall(r"\s*(\d+|[A-Za-z_]\w*|\$[A-Za-z_]\w*|\$\{[A-Za-z_]\w*\}|[-+*/%()])", text)
    if "".join(tokens) != re.sub(r"\s+", "", text) or not tokens:
        raise Unknown(f"$(({text})) is not understood")

    def atom() -> int:
        token = tokens.pop(0) if tokens else ""
        if token == "(":
            found = total()
            if not tokens or tokens.pop(0) != ")":
                raise Unknown(f"$(({text})) is not understood")
            return found
        if token in ("-", "+"):
            return -atom() if token == "-" else atom()
        if token.isdigit():
            return int(token, 8) if token.startswith("0") and len(token) > 1 else int(token)
        name = token.strip("${}")
        if not _NAME.fullmatch(name):
            raise Unknown(f"$(({text})) is not understood")
        found_text = (shell.get(name) or "0").strip()
        if not re.fullmatch(r"-?(0|[1-9]\d*)", found_text):
            raise Unknown(f"$(({text})) is not understood")
        return int(found_text)

    def product() -> int:
        found = atom()
        while tokens and tokens[0] in "*/%":
            op, right = tokens.pop(0), atom()
            if op == "*":
                found *= right
            elif not right:
                raise Unknown(f"$(({text})) divides by 0")
            else:
                quotient = abs(found) // abs(right) * (1 if (found < 0) == (right < 0) else -1)
                found = quotient if op == "/" else found - right * quotient
        return found

    def total() -> int:
        found = product()
        while tokens and tokens[0] in "+-":
            found = found + product() if tokens.pop(0) == "+" else found - product()
        return found

    try:
        found = total()
    except (ValueError, IndexError):
        raise Unknown(f"$(({text})) is not understood") from None
    if tokens:
        raise Unknown(f"$(({text})) is not understood")
    return found
