"""`deployed.Place` with its runs in containers of a real engine, for tests of deploy/."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from deployed import CHECKOUT, TRAINER, Place, until
from testbed.docker import Docker

from deploy import contained, new_run
from deploy.runtimes import process
from trainer import status

IMAGE = "python:3.11-slim-bookworm"  # the testbed's: Debian with Python, there in any case
TINI = "/usr/bin/tini"  # this machine's, which is a Debian too
USER = (10001, 10001)
INSIDE = "/run/drafthouse"


class ContainerPlace(Place):
    """A state root whose runs are started with `docker compose up`, as the compose runtime renders it."""

    def __init__(self, root: Path, docker: Docker, name: str) -> None:
        super().__init__(root)
        self.docker = docker
        self.name = name
        self.service: dict[str, Any] = {}  # what a test wants otherwise in the Compose file

    @property
    def project(self) -> str:
        return f"drafthouse-{self.name}"

    def run_dir(self, command: list[str] | str = TRAINER, name: str = "", **fields: Any) -> status.RunDir:
        if isinstance(command, str):
            command = ["python3", "-u", "-c", command]
        run = super().run_dir(command, name or self.name, runtime="compose", **fields)
        new_run.hand_over(str(run.path), list(USER))
        return run

    def compose_file(self, release_id: str) -> Path:
        """compose.yaml of a release. A process that is alive keeps what it was started with."""
        path = self.root / "names" / self.name / "releases" / release_id / "compose.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        mounts = {
            str(path.parents[2] / "run"): INSIDE,
            str(CHECKOUT / "trainer"): "/opt/drafthouse/trainer",
            TINI: "/usr/bin/tini",
        }
        service = {
            "image": IMAGE,
            "entrypoint": ["tini", "--"],
            "command": ["python3", "-u", "-m", "trainer.launch", "--run-dir", INSIDE],
            "environment": {
                "PYTHONUNBUFFERED": "1",
                "PYTHONPATH": "/opt/drafthouse",
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            "user": f"{USER[0]}:{USER[1]}",
            "read_only": True,
            "tmpfs": ["/tmp:exec,mode=1777"],
            "cap_drop": ["ALL"],
            "network_mode": "none",
            "restart": "no",
            "stop_grace_period": "30s",
            "volumes": [
                {"type": "bind", "source": one, "target": other, "bind": {"create_host_path": False}}
                for one, other in mounts.items()
            ],
            **self.service,
        }
        path.write_text(yaml.safe_dump({"name": self.project, "services": {"trainer": service}}))
        return path

    def container_spec(self, release_id: str = "aaaaaaaaaaaa") -> dict[str, Any]:
        compose = str(self.compose_file(release_id))
        argv = [*self.docker.command[:1], "compose", "-f", compose, "up", "-d", "--no-build"]
        return {
            "argv": [*argv, "--pull", "never", "--force-recreate"],
            "environment": {"PATH": process.PATH, "HOME": "/root", **self.docker.environment},
            "working_directory": str(Path(compose).parent),
            "container": {"project": self.project, "service": "trainer", "image": IMAGE},
            "user": list(USER),
            "devices": [],
        }

    def spec(
        self,
        new: status.RunDir | None,
        old: status.RunDir | None = None,
        release_id: str = "aaaaaaaaaaaa",
        **more: Any,
    ) -> dict[str, Any]:
        start = {"start": self.container_spec(release_id)} if new else {}
        return super().spec(None, old, release_id, name=self.name, **{**start, **more}) | {
            "run_path": str(new.path) if new else None
        }

    def process_spec(self, run: status.RunDir, old: status.RunDir | None, **more: Any) -> dict[str, Any]:
        """The same for a run without a container."""
        return {**self.spec(run, old, **more), "start": self.start_spec(run)}

    def up(self, run: status.RunDir) -> contained.Container:
        """Start a run as the switch does, and wait until it lives."""
        link = self.root / "names" / self.name / "run"
        link.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            link.unlink()
        link.symlink_to(os.path.relpath(run.path, link.parent))
        container, problem, said = contained.up(run, self.container_spec())
        assert not problem, said
        assert container is not None
        until(lambda: run.alive() or run.exit())
        return container

    def end_all(self) -> None:
        super().end_all()
        ids = self.docker.run(
            "ps", "-aq", "--filter", f"label=com.docker.compose.project={self.project}"
        ).split()
        if ids:
            self.docker.run("rm", "-f", *ids)


def place(tmp_path: Path, docker: Docker, name: str) -> Iterator[ContainerPlace]:
    """For a fixture: ``yield from place(tmp_path, engine, "a-name-of-its-own")``."""
    made = ContainerPlace(tmp_path / "state", docker, name)
    try:
        yield made
    finally:
        made.end_all()
