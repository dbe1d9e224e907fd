"""Tensors into a safetensors file whose rights are those of any other new file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # --check-config does without torch
    from torch import Tensor


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write `tensors` to the new file `path`. Raises OSError or SafetensorError if that is impossible.

    The library makes it readable for its owner alone (since 0.8): then a server run by another user could not
    load what was exported, and nobody else go on from a checkpoint.
    """
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode & 0o777
    whole = {name: value.detach().contiguous() for name, value in tensors.items()}
    save_file(whole, path, metadata={"format": "pt"})
    path.chmod(mode)
