"""What a preflight finds: see `deploy.preflight`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One finding. `message` says what is, `remedy` what to do; with `warning` the deploy goes on."""

    name: str
    ok: bool
    message: str = ""
    remedy: str = ""
    warning: bool = False

    @property
    def sentence(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message
