"""$((…)): whole numbers with + - * / % and brackets, as bash computes them."""

from __future__ import annotations

import re

from deploy.bash_shell import Shell, Unknown

_NAME = re.compile(r"[A-Za-z_]\w*")


def arithmetic(text: str, shell: Shell) -> int:
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
