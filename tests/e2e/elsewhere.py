"""What the tests of shipping share: a checkout with few packages, and a host that is another engine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed.base_image import SMALL
from testbed.docker import Docker
from testbed.place import CHECKOUT

from deploy import image
from deploy.host import Local


@dataclass(frozen=True)
class Settings:
    base: str | None = SMALL
    torch_index_url: str | None = None


def small_checkout(directory: Path, requirements: Sequence[str] = ("safetensors", "pyyaml")) -> Path:
    """The real Dockerfile and the real code, with `requirements` for what the trainer needs."""
    for name in image.FILES:
        shutil.copy(CHECKOUT / name, directory)
    for name in image.CODE:
        shutil.copytree(CHECKOUT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    require(directory, requirements)
    return directory


def require(directory: Path, requirements: Sequence[str]) -> None:
    """Have the trainer of a small checkout need these packages."""
    text = (CHECKOUT / "pyproject.toml").read_text()
    listed = ", ".join(f'"{one}"' for one in requirements)
    text, count = re.subn(r"(?ms)^trainer = \[$.*?^\]$", f"trainer = [{listed}]", text)
    assert count == 1
    (directory / "pyproject.toml").write_text(text)


def describe(root: Path) -> image.Image:
    return image.describe(root, Settings(), "cpu")


class Elsewhere(Local):
    """This machine in the part of another one: `environment` is what its login would have."""

    def __init__(self, environment: Mapping[str, str], name: str = "gpu-box") -> None:
        super().__init__(name)
        self.environment = dict(environment)

    def _start(
        self, argv: Sequence[str], env: Mapping[str, str] | None, stdin: int
    ) -> subprocess.Popen[bytes]:
        return super()._start(argv, {**self.environment, **(env or {})}, stdin)


def tags(engine: Docker) -> set[str]:
    """The names of all images that the engine has."""
    return set(engine.run("images", "--format", "{{.Repository}}:{{.Tag}}").split())


def holders(words: Sequence[str]) -> list[int]:
    """The pids of the processes whose command line has all of `words`."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                line = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (OSError, UnicodeDecodeError):
                continue
            if all(word in line for word in words):
                found.append(int(entry))
    return found


def wire_bytes(number: int) -> int:
    """Bytes that have passed, in both directions, between this machine and the gpu-box of that number."""
    counters = Path(f"/sys/class/net/dh-box{number}/statistics")
    return sum(int((counters / name).read_text()) for name in ("rx_bytes", "tx_bytes"))
