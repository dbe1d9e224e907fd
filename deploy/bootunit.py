"""What starts a name's next run after a reboot: a unit of systemd, or a line in a crontab.

Pure but for `install` and `remove`, which ask `deploy.unitfile` on the host. It starts `deploy.boot` there.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from deploy import onhost
from deploy.errors import DeployError
from deploy.host import SCRIPT_FLAGS, Host
from deploy.release import Layout

MODULES = ("deploy.boot",)
STOP_MARGIN = 30.0  # seconds: launch's own work after the grace, and ours
TIMEOUT = 60.0  # seconds; systemd reads all of its units again


def wanted() -> bool:
    """Whether whoever deploys wants anything to start at boot: ``DRAFTHOUSE_BOOT=no`` declines."""
    return os.environ.get("DRAFTHOUSE_BOOT", "").lower() not in ("no", "0", "false", "off")


def unit_name(name: str) -> str:
    return f"drafthouse-{name}.service"


def tool(layout: Layout) -> str:
    """Where the newest deploy's boot program is, whatever its version."""
    return f"{layout.state}/tools/boot"


def text(layout: Layout, name: str, facts: Mapping[str, Any], runtime: str, stop_seconds: float) -> str:
    """The unit for a release, pure. `facts` is the probe's JSON.

    `stop_seconds` is what saving and stopping may take before the machine goes down: the checkpoint's
    timeout and the grace.
    """
    from deploy import render  # takes a moment, and most tasks render nothing

    return render.render(
        "drafthouse.service.j2",
        name=name,
        state=layout.state,
        program=[str(facts.get("python_path") or "/usr/bin/python3"), *SCRIPT_FLAGS, tool(layout)],
        user=bool(facts.get("uid")),
        engine=runtime == "compose",
        proxmox=runtime == "pct",
        stop_seconds=math.ceil(stop_seconds + STOP_MARGIN),
    )


def keeper(facts: Mapping[str, Any]) -> str:
    """Who starts it after a reboot: system | user (a user's systemd) | cron | nobody | declined. Pure."""
    if facts.get("boot_unit") is False:
        return "declined"
    if facts.get("systemd"):
        return "user" if facts.get("uid") else "system"
    programs = facts.get("programs")
    return "nobody" if isinstance(programs, Mapping) and not programs.get("crontab") else "cron"


def describe(facts: Mapping[str, Any], name: str, runtime: str) -> str:
    """The plan's words for what a reboot will do. Pure."""
    again = "unless the last run finished, failed or was stopped by a person"
    # Only a unit of the system can be tied to the engine's; a user's and cron learn of reboots alone.
    contained = runtime == "compose"
    engine = " or a restart of the engine" if contained else ""
    alone = "; when the engine alone restarts, fab start does" if contained else ""
    own = f"by {unit_name(name)} of your own systemd (with lingering, so also before a login)"
    return {
        "system": f"the next run starts by {unit_name(name)} after a reboot{engine} {again}",
        "user": f"the next run starts {own} after a reboot {again}{alone}",
        "cron": f"the next run starts by an @reboot line in your crontab after a reboot {again}{alone}",
        "declined": "nothing that was not there before is put there (DRAFTHOUSE_BOOT=no)",
        "nobody": "nothing starts after a reboot, since there is neither systemd nor cron: fab start does",
    }[keeper(facts)]


def install(host: Host, layout: Layout, name: str, unit: str) -> str:
    """Let the next run of `name` start after a reboot; the sentence to report.

    `unit` is the text of its unit, as the release has it. A failure is only told: the run goes on without.
    """
    if not wanted():
        return f"nothing was put in place to start {name} after a reboot (DRAFTHOUSE_BOOT=no)"
    try:
        program = onhost.install(host, layout.state, MODULES)
        done: str = onhost.ask(
            host, "deploy.unitfile:install", layout.state, name, unit, program, timeout=TIMEOUT
        )
        return done
    except DeployError as error:
        return f"nothing starts {name} after a reboot: {error}"


def remove(host: Host, layout: Layout, name: str) -> str:
    """Take it away again, with the name; the sentence to report. Raises DeployError."""
    done: str = onhost.ask(host, "deploy.unitfile:remove", layout.state, name, timeout=TIMEOUT)
    return done
