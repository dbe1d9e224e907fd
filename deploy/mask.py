"""Values that look like secrets, for texts that people show around: plans and differences.

Secrets have a place of their own (`secrets:`) and are in no file that we render. This is for those who put
one into `environment:` or into an address all the same.
"""

from __future__ import annotations

import re

MASK = "***"
_NAME = re.compile(
    r"(?:^|[_.-])(?:token|secret|secrets|password|passwd|passphrase|pwd|credential|credentials|apikey|"
    r"auth|(?:api|access|private|secret|signing|encryption|ssh|account|license|wandb|key)[_-]?key)(?:$|[_.-])",
    re.IGNORECASE,
)
_ADDRESS = re.compile(r"(?<=://)([^/@\s:\"']*):([^/@\s\"']+)@")


def secret_name(name: str) -> bool:
    """Whether a variable or a flag of this name holds what nobody else should read."""
    return _NAME.search(name) is not None


def text(value: str) -> str:
    """`value` without the passwords of the addresses in it."""
    return _ADDRESS.sub(rf"\1:{MASK}@", value)
