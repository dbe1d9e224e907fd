"""The host of a task, and how it is reached."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy import evidence, host, settings
from deploy.host import Host
from deploy.settings import HostSettings, Project

QUIET = 0.0  # a probe that only looks needs no second sample


@dataclass(frozen=True)
class Target:
    """A host, how it is reached, and what its name is set to run."""

    project: Project
    settings: HostSettings
    host: Host

    def facts(self, sample: float = QUIET) -> dict[str, Any]:
        found = evidence.collect(self.host, self.settings.state, self.settings.shm, sample=sample)
        return self.completed(found)

    def completed(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Facts of the host, with what the Proxmox host around it says if it is a container there."""
        if self.settings.container is not None:
            from deploy import outside
            from deploy.inside import Inside

            assert isinstance(self.host, Inside)
            outside.add(self.host.outer, self.settings.container, facts)
        return facts


def one(host_name: str | None, root: Path, accept_new_host_key: bool = False) -> Target:
    """The host of a task. Raises DeployError for one that is unknown; it is reached at its first use."""
    project = settings.load_project(root)
    return _target(project, settings.find_host(project, host_name), accept_new_host_key)


def several(host_name: str | None, root: Path, accept_new_host_key: bool = False) -> list[Target]:
    """The host of a task that only looks; without a name localhost and every host of fabric.yaml."""
    project = settings.load_project(root)
    if host_name is not None:
        return [_target(project, settings.find_host(project, host_name), accept_new_host_key)]
    local = settings.find_host(project, None)
    others = [found for key, found in project.hosts.items() if key != local.name and not found.is_local]
    return [_target(project, found, accept_new_host_key) for found in (local, *others)]


def _target(project: Project, found: HostSettings, accept_new_host_key: bool) -> Target:
    made = host.connect(found, accept_new_host_key=accept_new_host_key)
    if found.container is not None:
        from deploy.inside import Inside  # (most hosts are none)

        assert isinstance(made, Inside)
        made.begin()  # takes a while, in which the rest of us is imported
    return Target(project, found, made)
