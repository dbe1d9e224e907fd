"""How the real programs fail: a sentence on stderr, and an exit code."""

from __future__ import annotations

from typing import NoReturn


class Died(Exception):
    """Perl's `die`: the sentence goes to stderr. Its exit code is errno where that is set, else 255."""

    def __init__(self, sentence: str, code: int = 255) -> None:
        super().__init__(sentence)
        self.code = code


class BadParameters(Died):
    """PVE::Exception with code 400, as Exception.pm writes it out; the command's usage follows."""

    def __init__(self, sentence: str, errors: dict[str, str] | None = None) -> None:
        lines = [f"400 {sentence}", *(f"{key}: {said}" for key, said in (errors or {}).items())]
        super().__init__("\n".join(line.rstrip("\n") for line in lines))


def not_simulated(what: str) -> NoReturn:
    raise Died(f"the test stand-in for Proxmox does not simulate {what}", 254)
