"""Goes through a bash script as bash would, without running anything: what it starts, and all else it does.

The script is parsed by tree-sitter-bash and its words are evaluated by `deploy.bash_words`. Every statement
is either carried out on a `Shell` here (variables, cd, source, functions), noted as something that a run does
not need or that is not carried over, or it is a `Start`: a program that the script is there to start.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from deploy import bash_tests
from deploy.bash_found import Note, Start, Word, bodies, branches, on_lines_before, parse, text_of, writes
from deploy.bash_parts import check_whole, touching
from deploy.bash_shell import Shell, Unknown
from deploy.bash_words import value, words

DEEPEST = 8  # scripts and functions within each other
MOST_ROUNDS = 64  # of one loop


class Ends(Exception):
    """The script goes no further."""


class Walk:
    """One script, and those that it reads. `starts` and `notes` are what was found."""

    def __init__(self, shell: Shell, login: dict[str, str]) -> None:
        self.shell, self.login = shell, login
        self.starts: list[Start] = []
        self.notes: list[Note] = []
        self.limits: list[str] = []  # of ulimit, as prlimit has them
        self.moved = False
        self._inside: list[Note] = []  # what stands around the statement that is looked at
        self._after: list[Note] = []  # where its output goes
        self._depth = 0
        self._file = ""

    # -- scripts -------------------------------------------------------------------------------------------

    def script(self, data: bytes, file: str = "") -> None:
        """Go through a script; `file` is put before its lines where it is not the first one."""
        before, self._file = self._file, file
        self._depth += 1
        try:
            if self._depth > DEEPEST:
                raise Unknown("scripts call each other too deep")
            root = parse(data)
            self._check(root)
            self.body(root)
        except Ends:
            if file:
                raise
        finally:
            self._depth -= 1
            self._file = before

    def _check(self, node: Any) -> None:
        if node.type == "ERROR" or node.is_missing:
            self.lost(node, "bash's grammar does not fit here, so this part was not understood")
        elif node.has_error:
            for child in node.children:
                self._check(child)

    def note(self, kind: str, node: Any, said: str) -> None:
        text = " ".join(text_of(node).replace("\\\n", " ").split())
        made = Note(kind, node.start_point[0] + 1, f"{self._file}: {text}" if self._file else text, said)
        if made not in self.notes:
            self.notes.append(made)

    def became(self, node: Any, said: str) -> None:
        self.note("became", node, said)

    def lost(self, node: Any, said: str) -> None:
        self.note("lost", node, said)

    # -- statements ----------------------------------------------------------------------------------------

    def body(self, node: Any) -> None:
        children = list(node.children)
        for at, child in enumerate(children):
            after = children[at + 1] if at + 1 < len(children) else None
            background = after is not None and after.type == "&"
            if child.is_named:
                self.statement(child, background)

    def statement(self, node: Any, background: bool = False) -> None:
        try:
            if background:
                self.apart(lambda: self.of_kind(node), node)
            else:
                self.of_kind(node)
        except Unknown as error:
            self.lost(node, str(error))

    def of_kind(self, node: Any) -> None:
        kind = node.type
        method = getattr(self, f"do_{kind}", None)
        if kind in ("comment", "heredoc_body", "heredoc_end", "word", "ERROR"):
            return
        if method is None:
            self.lost(node, f"a {kind.replace('_', ' ')} is not carried over")
        else:
            method(node)

    def apart(self, walk: Any, node: Any) -> None:
        """In a shell of its own, whose changes nobody sees afterwards."""
        before, moved = self.shell, self.moved
        self.shell = before.copy()
        try:
            walk()
        except Ends:
            pass
        finally:
            before.asked_arguments |= self.shell.asked_arguments
            self.shell, self.moved = before, moved

    def maybe(self, nodes: Sequence[Any], where: Note) -> None:
        """What may be done or not: starts in it count, and what it sets is not known afterwards."""
        before = self.shell
        self.shell = before.copy()
        self._inside.append(where)
        try:
            for node in nodes:
                self.statement(node)
        except Ends:
            pass
        finally:
            self._inside.pop()
            after, self.shell = self.shell, before
            why = f"line {where.line} may set it or not"
            for name in {*after.variables, *before.variables, *after.arrays, *after.unsure}:
                kept = (before.variables.get(name), before.arrays.get(name), name in before.exported)
                if kept != (after.variables.get(name), after.arrays.get(name), name in after.exported) or (
                    name in after.unsure
                ):
                    before.unsure.setdefault(name, why)
            for name in (after.exported ^ before.exported) | set(after.export_unsure):
                before.export_unsure[name] = why
            if after.directory != before.directory:
                before.directory_unsure = f"line {where.line} may change the directory or not"

    def where(self, node: Any, said: str) -> Note:
        first = text_of(node).split("\n")[0].strip()
        return Note("lost", node.start_point[0] + 1, first, said)

    do_program = do_compound_statement = do_do_group = do_else_clause = lambda self, node: self.body(node)

    def do_subshell(self, node: Any) -> None:
        self.apart(lambda: self.body(node), node)

    def do_negated_command(self, node: Any) -> None:
        self.statement(node.named_children[-1])

    def do_test_command(self, node: Any) -> None:
        pass

    def do_function_definition(self, node: Any) -> None:
        self.shell.functions[text_of(node.child_by_field_name("name"))] = (
            node.child_by_field_name("body"),
            self._file,
        )

    def do_list(self, node: Any) -> None:
        left, operator, right = node.children[0], node.children[1].type, node.children[-1]
        known = self.truth(left)
        count = len(self.starts)
        self.statement(left)
        if len(self.starts) > count and operator == "||":
            self.lost(right, "what is done after a failure is restart:'s affair, or yours")
        elif known is None and left.type in ("test_command", "negated_command"):
            said = (
                f"whether {text_of(left)} holds is not known here, so what stands after it may be done or not"
            )
            self.maybe([right], self.where(node, said))
        elif (known is not False) == (operator == "&&"):
            self.statement(right)

    def truth(self, node: Any) -> bool | None:
        try:
            return bash_tests.truth(node, self.shell, self.run)
        except Unknown:
            return None

    def do_if_statement(self, node: Any) -> None:
        for condition, part in branches(node):
            known = True if condition is None else self.truth(condition)
            if condition is not None and known is None and condition.type not in ("test_command", "command"):
                self.statement(condition)
            if known is True:
                for one in part:
                    self.statement(one)
                return
            if known is None:
                said = "whether this holds is not known here: taken as if, and what it sets is left out"
                for _, rest in list(branches(node)):
                    self.maybe(rest, self.where(node, said))
                return

    def do_case_statement(self, node: Any) -> None:
        items = [child for child in node.named_children if child.type == "case_item"]
        chosen = bash_tests.case(node, items, self.shell, self.run)
        said = "which case holds is not known here: taken as each, and what it sets is left out"
        for item in items if chosen is None else chosen:
            done = bodies(item)
            if chosen is None:
                self.maybe(done, self.where(node, said))
            else:
                for one in done:
                    self.statement(one)

    def do_for_statement(self, node: Any) -> None:
        name = text_of(node.child_by_field_name("variable"))
        body, values = node.child_by_field_name("body"), []
        try:
            for child in node.children_by_field_name("value"):
                values += words(child, self.shell, self.run)
            if len(values) > MOST_ROUNDS:
                raise Unknown("it goes round too often")
        except Unknown as error:
            self.shell.unsure[name] = str(error)
            self.maybe([body], self.where(node, f"this loop is not carried over: {error}"))
            return
        count = len(self.starts)
        for one in values:
            self.shell.assign(name, one)
            self.statement(body)
            if len(self.starts) > count:
                if len(values) > 1:
                    said = f"a run starts one program: taken for {name}={one}; make a file for each other one"
                    self.starts[-1].notes.append(self.where(node, said))
                return

    def do_c_style_for_statement(self, node: Any) -> None:
        said = "this loop is not carried over"
        self.maybe([node.child_by_field_name("body")], self.where(node, said))

    def do_while_statement(self, node: Any) -> None:
        count = len(self.starts)
        parts = [child for child in node.children if child.is_named]
        said = "a run starts one program"
        self.maybe(parts, self.where(node, said))
        if len(self.starts) > count:
            self.starts[-1].notes = [one for one in self.starts[-1].notes if one.words != said] + [
                Note("became", node.start_point[0] + 1, text_of(node).split("\n")[0],
                     "the loop around it becomes restart: (a crash starts it again, 3 times in 10 minutes)")
            ]  # fmt: skip
        else:
            self.lost(node, "this loop is not carried over")

    def do_pipeline(self, node: Any) -> None:
        parts = [child for child in node.named_children if child.type != "comment"]
        count, found = len(self.starts), None
        for at, part in enumerate(parts):
            quiet = len(self.notes)
            self.apart(lambda part=part: self.statement(part), part)
            if len(self.starts) > count and found is None:
                found = at
            del self.notes[quiet if found != at else len(self.notes) :]
        if found is None:
            self.lost(node, "it is not carried over: a run starts one program")
            return
        for part in parts[:found]:
            self.lost(part, "its output went into the program; a run reads nothing from stdin")
        for part in parts[found + 1 :]:
            if text_of(part).split()[:1] == ["tee"]:
                self.became(part, "the log: Drafthouse keeps it (fab tail)")
            else:
                self.lost(part, "the log has all lines; fab tail --grep shows some of them")

    def do_redirected_statement(self, node: Any) -> None:
        target = node.child_by_field_name("body")
        redirects = node.children_by_field_name("redirect")
        heredoc = next((one for one in redirects if one.type == "heredoc_redirect"), None)
        if target is None:
            self.lost(node, "what it writes is not carried over")
            return
        count, quiet = len(self.starts), len(self.notes)
        self.statement(target)
        if heredoc is not None and len(self.starts) == count:
            del self.notes[quiet:]
            self.lost(redirects[0] if redirects else node, writes(redirects))
            return
        if len(self.starts) > count:
            for one in redirects:
                self.redirect(one)
        elif any(self._inside) and not redirects:
            return

    def redirect(self, node: Any) -> None:
        text = text_of(node).split("\n")[0]
        if node.type != "file_redirect" or text.lstrip("0123456789").startswith("<"):
            if "/dev/null" in text:
                self.became(node, "as ever: a run's stdin is empty")
            else:
                self.lost(node, "a run reads nothing from stdin; let the program read a file")
        else:
            self.became(node, "the log: Drafthouse keeps all that is printed (fab tail)")

    # -- variables -----------------------------------------------------------------------------------------

    def do_variable_assignment(self, node: Any, export: bool = False) -> None:
        name_node = node.child_by_field_name("name")
        if name_node is None:
            raise Unknown("what it sets is not understood")
        name = text_of(name_node)
        adds = any(child.type == "+=" for child in node.children)
        given = node.child_by_field_name("value")
        if name_node.type == "subscript":
            array = text_of(name_node.child_by_field_name("name"))
            self.shell.unsure[array] = f"line {node.start_point[0] + 1} sets a part of it"
            return
        if export:
            self.shell.exported.add(name)
            self.shell.export_unsure.pop(name, None)
        try:
            if given is not None and given.type == "array":
                if any(
                    child.type == "concatenation" and text_of(child).startswith("[")
                    for child in given.children
                ):
                    raise Unknown(f"{name} is an array with names")
                many = [one for child in given.named_children if child.type != "comment"
                        for one in words(child, self.shell, self.run)]  # fmt: skip
                old = self.shell.arrays.get(name) or [
                    one for one in [self.shell.get(name)] if one is not None
                ]
                self.shell.assign(name, [*old, *many] if adds else many)
            else:
                one = value(given, self.shell, self.run)
                old_text = (self.shell.get(name) or "") if adds else ""
                self.shell.assign(name, old_text + one)
        except Unknown as error:
            self.shell.variables.pop(name, None)
            self.shell.arrays.pop(name, None)
            self.shell.unsure[name] = f"{name} is set in line {node.start_point[0] + 1}, where {error}"

    def do_variable_assignments(self, node: Any) -> None:
        for child in node.named_children:
            self.do_variable_assignment(child)

    def do_declaration_command(self, node: Any) -> None:
        builtin = node.children[0].type
        flags = [
            text_of(child)
            for child in node.named_children
            if child.type == "word" and text_of(child)[0] in "-+"
        ]
        export = builtin == "export" or any("x" in flag for flag in flags)
        if "-A" in flags:
            raise Unknown("an array with names is not carried over")
        hides = builtin == "local" or (builtin in ("declare", "typeset") and "-g" not in flags)
        for child in node.named_children[len(flags) :]:
            if hides:
                self.shell.hide(re.split(r"\+?=", text_of(child))[0].partition("[")[0])
            if child.type == "variable_assignment":
                self.do_variable_assignment(child, export and "-n" not in flags)
                continue
            for text in words(child, self.shell, self.run):
                name, equals, given = text.partition("=")
                if equals:
                    self.shell.assign(name, given)
                if "-n" in flags and builtin == "export":
                    self.shell.exported.discard(name)
                    self.shell.export_unsure.pop(name, None)
                elif export:
                    self.shell.exported.add(name)
                    self.shell.export_unsure.pop(name, None)

    def do_unset_command(self, node: Any) -> None:
        for child in node.named_children:
            name = text_of(child)
            if not name.startswith("-"):
                self.shell.unset(name)

    # -- commands ------------------------------------------------------------------------------------------

    def do_command(self, node: Any) -> None:
        from deploy import bash_commands  # it builds on what is here

        before = [child for child in node.children if child.type == "variable_assignment"]
        name = node.child_by_field_name("name")
        redirects = [child for child in node.children if child.type.endswith("_redirect")]
        if name is None:
            for child in before:
                self.do_variable_assignment(child)
            return
        check_whole(node)
        alone = on_lines_before(before, name, node)
        for child in before[:alone]:
            self.do_variable_assignment(child)
        before = before[alone:]
        argv = [*self.evaluated(name)]
        for group in touching(node.children_by_field_name("argument"), node):
            argv += self.evaluated(group)
        count = len(self.starts)
        if before:
            own = self.shell
            self.shell = own.copy()
            try:
                for child in before:
                    self.do_variable_assignment(child, export=True)
                bash_commands.command(self, node, argv)
            finally:
                own.asked_arguments |= self.shell.asked_arguments
                self.shell = own
        else:
            bash_commands.command(self, node, argv)
        if len(self.starts) > count:
            for one in redirects:
                self.redirect(one)

    def evaluated(self, node: Any) -> Iterator[Word]:
        try:
            yield from (Word(text) for text in words(node, self.shell, self.run))
        except Unknown as error:
            yield Word("".join(map(text_of, node)) if isinstance(node, list) else text_of(node), str(error))

    def start(self, node: Any, argv: list[Word]) -> None:
        """Take note of a program that the script starts."""
        shell = self.shell
        sure = {name: shell.variables[name] for name in sorted(shell.exported) if name in shell.variables}
        unsure = {name: shell.unsure[name] for name in sorted(shell.exported) if name in shell.unsure}
        unsure |= {name: why for name, why in sorted(shell.export_unsure.items()) if name in shell.variables}
        for name in unsure:
            sure.pop(name, None)
        removed = tuple(sorted(name for name in self.login if name not in sure and name not in unsure))
        self.starts.append(
            Start(
                [*(Word(word) for word in self._limited()), *argv],
                sure,
                unsure,
                frozenset(shell.touched),
                removed,
                shell.directory,
                shell.directory_unsure,
                node.start_point[0] + 1,
                " ".join(text_of(node).replace("\\\n", " ").split()),
                self.moved,
                shell.asked_arguments,
                list(self._inside),
            )
        )

    def _limited(self) -> list[str]:
        return ["prlimit", *self.limits] if self.limits else []

    def run(self, shell: Shell, node: Any) -> str:
        """The output of a command substitution, for the few commands that only compute with words."""
        return bash_tests.output(node, shell, self.run)
