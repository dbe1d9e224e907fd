"""What `fab adopt` does once its flags are read, and what it says."""

from __future__ import annotations

import dataclasses

from deploy import actions, adopt, mask
from deploy.adopt import Adopted
from deploy.errors import USAGE, DeployError
from deploy.health_words import command
from deploy.target import Target


def inside(host: str | None, container: int | None) -> str | None:
    """The host that --host and --container mean: container 200 of a Proxmox host is the host ``pve/200``."""
    if container is None:
        return host
    if container < 100:
        raise DeployError(f"--container {container} is no container's id: those begin at 100", code=USAGE)
    return f"{host or 'localhost'}/{container}"


def carry_out(
    goal: Target,
    *,
    script: str | None,
    pid: int | None,
    name: str | None,
    out: str | None,
    line: int | None = None,
    trainer: bool = False,
    force: bool = False,
    looks_only: bool = False,
) -> Adopted:
    """Read a script or a process, write the run's file and, of a process, register the run."""
    if (script is None) == (pid is None):
        raise DeployError(
            "fab adopt needs one of --script /root/run.sh and --pid N: what is to be adopted", code=USAGE
        )
    if line is not None and script is None:
        raise DeployError("--line chooses a program of a script; leave it out with --pid", code=USAGE)
    if script is not None:
        made = adopt.script(goal, script, name=name, out=out, line=line, trainer=trainer)
    else:
        assert pid is not None
        made = adopt.process(goal, pid, name=name, out=out, trainer=trainer)
    if looks_only:
        return made
    adopt.write(made, force=force)
    if made.process is not None:
        run_id = adopt.register(goal, made, actions.shown(goal.project, made.path))
        made = dataclasses.replace(made, run_id=run_id)
    return made


def text(made: Adopted, goal: Target, looks_only: bool) -> str:
    """What was done, for people."""
    file = actions.shown(goal.project, made.path)
    label = goal.settings.name
    words = made.words()
    if looks_only:
        return f"{mask.text(made.text)}\n{words}\nnothing was written (--dry-run): {file}"
    lines = [words, f"{file} is written"]
    with_file = (
        f"--run {made.path.stem}" if made.path.parent == goal.project.root / "runs" else f"--run {file}"
    )
    deploy = command("deploy", None, label, with_file)
    if made.run_id is not None and made.process is not None:
        lines.append(
            f"process {made.process['pid']} on {label} is run {made.run_id} now, and was not touched: "
            f"{command('status', made.name, label)}"
        )
        lines.append(f"{deploy} replaces it")
    else:
        lines.append(f"{deploy} starts it")
    return "\n".join(lines)
